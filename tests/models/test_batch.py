"""A row of a model with experts does not depend on the rows beside it."""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Engine, Limits, Request
from jaxattn.models import CacheSize, DecodeBatch, PrefillBatch
from jaxattn.models.interface import init_state, jit_step, scratch_spec
from jaxattn.models.loading import huggingface_checkpoint

pytestmark = pytest.mark.lazy_steps

FOLDER = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "deepseek_v3"
ROWS, PAGES = 32, 2


@cache
def loaded(dtype: str):
    model, params = huggingface_checkpoint.load(FOLDER, dtype=dtype)
    return model, model.pack(params)


def prompts(vocab: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(0, vocab, size).tolist() for size in random.integers(1, 40, ROWS)]


@pytest.mark.slow(
    reason="a row's tokens that depend on others; found by bits of the model's steps there, and "
    "engine/test_scheduling too"
)
def test_a_row_among_31_others_writes_the_tokens_that_it_writes_alone():
    model, params = loaded("float32")
    requests = [Request(each, max_tokens=6) for each in prompts(model.vocab_size)]
    limits = Limits(batch=ROWS, max_model_len=128, prefill_chunk=96)
    with Engine(model, params, limits) as engine:
        together = [done.tokens for done in engine.generate(requests)]
        alone = [engine.generate([requests[row]])[0].tokens for row in (0, 7, 31)]
    assert alone == [together[row] for row in (0, 7, 31)]


@pytest.mark.slow(
    reason="bits that depend on other rows; found by engine/test_exact_mode in random company and "
    "by the same test on a GPU too"
)
def test_a_row_of_a_bucket_has_the_same_bits_alone_and_among_31_others():
    model, params = loaded("bfloat16")
    model = model.with_batch_invariance()
    spec = scratch_spec(model, ROWS, max_pages=PAGES)
    prefill, decode = jit_step(model.prefill, prefill=True), jit_step(model.decode)
    tables = np.arange(ROWS * PAGES, dtype=np.int32).reshape(ROWS, PAGES)
    texts = prompts(model.vocab_size)

    def logits(rows: list[int]) -> np.ndarray:
        """Of three steps after the prompts of these rows; the others are padding."""
        state = init_state(model, CacheSize(pages=ROWS * PAGES, slots=ROWS), spec)
        lens = np.array([len(t) if row in rows else 0 for row, t in enumerate(texts)], np.int32)
        slots = np.where(lens > 0, np.arange(ROWS), -1).astype(np.int32)
        tokens = np.zeros((ROWS, 40), np.int32)
        for row in rows:
            tokens[row, : lens[row]] = texts[row]
        found, state = prefill(params, state, PrefillBatch(tokens, lens, lens, tables, slots))
        steps = [found]
        for step in range(1, 4):
            after = np.where(lens > 0, lens + step, 0).astype(np.int32)
            token = jnp.where(jnp.arange(ROWS) == 3, step, 7)[:, None].astype(jnp.int32)
            found, state = decode(params, state, DecodeBatch(token, after, tables, slots))
            steps.append(found)
        return np.asarray(jnp.stack(steps))

    together = logits(list(range(ROWS)))
    assert np.isfinite(together).all()
    for row in (3, 31):
        np.testing.assert_array_equal(logits([row])[:, row], together[:, row])


@pytest.mark.gpu
def test_the_same_with_the_kernels():
    assert jax.default_backend() == "gpu"
    test_a_row_of_a_bucket_has_the_same_bits_alone_and_among_31_others()
