"""Embeddings of prompts: transformers' last hidden states, whatever the chunks and the rows.

`reference.safetensors` has transformers' logits. The head is linear and has more rows than columns,
so hidden states are right where their logits are, and the mean's logits are the logits' mean.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxattn import Engine, Limits, Request
from jaxattn.engine.requests.outputs import FinishReason
from jaxattn.models.loading import huggingface_checkpoint
from tests.helpers.engine_cases import with_steps

pytestmark = pytest.mark.lazy_steps

FOLDER = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "llama"
# Chunks of 16 tokens, two prompts in one step; the pool holds less than three whole rows.
LIMITS = Limits(batch=3, max_model_len=128, num_pages=4, prefill_chunk=16, prefill_rows=2)


@pytest.fixture(scope="module")
def engine():
    model, params = huggingface_checkpoint.load(FOLDER, dtype="float32")
    with Engine(model, params, LIMITS, strict=True) as engine:
        engine.start()
        yield engine


@pytest.fixture(scope="module")
def texts() -> list[tuple[list[int], np.ndarray]]:
    """Prompts, each with transformers' logits of its tokens."""
    found = safetensors.numpy.load_file(FOLDER / "reference.safetensors")
    lengths = [*found["lengths"], 1, 16]
    rows = [0, 1, 0, 1]
    return [
        (found["prompt"][row, :length].tolist(), found["logits"][row, :length])
        for row, length in zip(rows, lengths, strict=True)
    ]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_is_of_transformers_hidden_states(engine, texts, pooling):
    params = huggingface_checkpoint.load(FOLDER, dtype="float32")[1]
    for _ in range(2):  # the second time the cache of prefixes has them
        found = engine.embed([tokens for tokens, _ in texts], pooling=pooling)
        assert found.dtype == np.float32 and found.shape == (4, *engine.model.hidden_shape.shape)
        assert engine.model.vocab_size > found.shape[1]
        logits = jax.jit(engine.model.head)(params, jnp.asarray(found))
        for own, (_, expected) in zip(np.asarray(logits), texts, strict=True):
            wanted = expected.mean(axis=0) if pooling == "mean" else expected[-1]
            np.testing.assert_allclose(own, wanted, atol=1e-4, rtol=1e-4)


def test_a_prompt_as_long_as_the_model_is_pooled_and_one_token_more_is_refused(engine, texts):
    tokens = (texts[0][0] * 5)[:128]
    assert engine.embed([tokens]).shape == (1, *engine.model.hidden_shape.shape)
    with pytest.raises(RuntimeError, match="embed: text 0: refused: .*129 tokens"):
        engine.embed([[*tokens, 1]])


@pytest.mark.usefixtures("no_forecast")
def test_a_row_that_loses_its_pages_in_the_middle_is_pooled_once(engine, texts):
    tokens = (texts[1][0] * 8)[:128]
    alone = engine.embed([tokens], pooling="mean")[0]
    # Two rows that take a second page while the third has read some chunks.
    rows = [Request([n, *tokens[:59]], max_tokens=40) for n in (1, 2)]
    asked = Request(tokens, max_tokens=0, pooling="mean", prompt_logprobs=0)
    *others, done = engine.generate([*rows, asked])
    assert engine.stats.preemptions > 0
    assert [each.embedding for each in others] == [None, None]
    np.testing.assert_allclose(done.embedding, alone, atol=1e-5)
    assert len(done.prompt_logprobs) == 128


def test_no_text_is_no_row(engine):
    assert engine.embed([]).shape == (0, *engine.model.hidden_shape.shape)


def test_hidden_states_of_nan_end_a_row(engine, texts):
    real, name = engine.executables, "pooling of 16 tokens"

    def spoiled(hidden, weights, wanted):
        hidden, sums = real[name](hidden, weights, wanted)
        return hidden, jnp.asarray(sums).at[:, 0].set(np.nan)

    names = [each for each in real if each.startswith("pooling")]
    with_steps(engine, dict(real) | dict.fromkeys(names, spoiled) | {name: spoiled})
    seal, engine.seal.strict = engine.seal.strict, False  # the spoiling compiles
    try:
        [done] = engine.generate([Request(texts[2][0], max_tokens=0, pooling="last")])
    finally:
        with_steps(engine, dict(real))
        engine.seal.strict = seal
    assert done.finish_reason is FinishReason.NOT_FINITE


@pytest.mark.parametrize(
    ("pooling", "tokens", "match"),
    [("sum", 0, "pooling must be one of mean, last; got 'sum'"), ("mean", 1, "max_tokens=0")],
)
def test_a_pooling_that_is_none_is_named(pooling, tokens, match):
    with pytest.raises(ValueError, match=match):
        Request(b"x", max_tokens=tokens, pooling=pooling)
