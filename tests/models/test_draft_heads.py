"""Draft heads of published models (MTP) against their prediction layers in float64."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Limits
from jaxattn.engine.startup.engine_build import prepare
from jaxattn.models.caches.layer_cache import CacheSize
from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.families.deepseek import prediction_layers
from jaxattn.models.interface import DecodeBatch, PrefillBatch, init_state, scratch_spec
from jaxattn.models.loading.huggingface_checkpoint import load, read_config
from tests.helpers.draft_heads import CONFIGS, VOCAB, PredictionLayer, write_folder
from tests.helpers.safetensors_files import write_file

TABLE = np.array([[2, 0]], np.int32)
LINES = (24, 16)  # tokens of the prompt's two pieces, of which the second is not full
TOKENS, PROMPT = 38, 37


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @functools.cache
    def made(model_type):
        folder = tmp_path_factory.mktemp(model_type)
        return folder, write_folder(folder, model_type)

    return made


def prompt_batch(tokens, first, line):
    """A piece of the prompt in one line of so many tokens."""
    own = tokens[first : first + line]
    padded = np.zeros((1, line), np.int32)
    padded[0, : len(own)] = own
    lens = np.array([len(own)], np.int32)
    return on_device(PrefillBatch(padded, lens, first + lens, TABLE, np.zeros(1, np.int32)))


def next_tokens(tokens, length):
    """The next tokens [1, S] of the row, which has so many with them."""
    lens, slots = np.array([length], np.int32), np.zeros(1, np.int32)
    return on_device(DecodeBatch(tokens, lens, TABLE, slots))


def on_device(batch):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), batch)


SLOW = pytest.mark.slow(
    reason="a family's names of the prediction layer; found by the other family of its kind too"
)
MODEL_TYPES = [
    "qwen3_5_text", *(pytest.param(each, marks=SLOW) for each in CONFIGS
                      if each != "qwen3_5_text"),
]  # fmt: skip


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_head_guesses_what_the_prediction_layer_says(folder_of, model_type):
    """Pairs of a prompt in two pieces, of the next two tokens, and of a guess of the head's own."""
    folder, tensors = folder_of(model_type)
    model, params = load(folder, dtype="float32", draft_head=True)
    tokens = np.random.default_rng(1).integers(0, VOCAB, TOKENS + 1)
    spec = scratch_spec(model, 1, max_pages=2, q_len=2)

    @jax.jit
    def run(params):
        params = model.pack(params)
        state = init_state(model, CacheSize(pages=4, slots=1, drafts=1), spec)
        read, first = [], 0
        for line in LINES:
            own = tokens[:PROMPT]
            hidden, state = model.mixed_hidden(params, state, prompt_batch(own, first, line), None)
            pairs = prompt_batch(tokens[1 : PROMPT + 1], first, line)
            state = model.draft_prompts(params, state, pairs, hidden)
            read.append(hidden[: min(line, PROMPT - first)])
            first += line
        # The model's next token, whose pair comes beside the last of the prompt again.
        batch = next_tokens(tokens[None, PROMPT:TOKENS], TOKENS)
        _, state, hidden = model.decode_each(params, state, batch)
        read.append(hidden[0])
        hidden = jnp.concatenate(read)
        pairs = next_tokens(tokens[None, PROMPT : TOKENS + 1], TOKENS)
        last = jnp.ones(1, jnp.int32)
        logits, handed, state = model.draft(params, state, pairs, hidden[None, -2:], last)
        guess = jnp.argmax(logits, -1).astype(jnp.int32)
        behind = next_tokens(guess[:, None], TOKENS + 1)
        second, _, _ = model.draft(params, state, behind, handed[:, None], 0 * last)
        return hidden, logits[0], handed[0], guess, second[0]

    hidden, logits, handed, guess, second = map(np.asarray, run(params))
    layer = PredictionLayer(model_type, tensors)
    wanted, hands_on = layer(tokens[1:], hidden)
    np.testing.assert_allclose(logits, wanted[-1], atol=2e-4, rtol=2e-4)
    np.testing.assert_allclose(handed, hands_on[-1], atol=2e-4, rtol=2e-4)
    both = np.concatenate([hidden, handed[None]])
    again, _ = layer(np.concatenate([tokens[1:], guess]), both)
    np.testing.assert_allclose(second, again[-1], atol=2e-4, rtol=2e-4)


def test_the_head_is_left_out_unless_it_is_asked_for(folder_of):
    folder, _ = folder_of("glm4_moe_lite")
    assert not read_config(folder).model.has_draft_head
    assert read_config(folder, draft_head=True).model.caches[0].layers == 3


def test_a_number_of_prediction_layers_is_null_or_a_number():
    def layers(value):
        return prediction_layers(ConfigFields({"num_nextn_predict_layers": value}, "config.json"))

    assert [layers(value) for value in (None, 0, 2)] == [0, 0, 2]
    for wrong in (False, "", []):
        with pytest.raises(ConfigError, match="num_nextn_predict_layers must be an integer"):
            layers(wrong)


def test_a_model_without_a_head_is_refused_by_name(tmp_path):
    config = CONFIGS["glm4_moe_lite"] | dict(num_nextn_predict_layers=0, model_type="deepseek_v3")
    config |= dict(n_group=1, topk_group=1)  # DeepSeek-V3's default groups need more experts
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="needs a prediction layer"):
        read_config(tmp_path, draft_head=True)
    with pytest.raises(CheckpointError, match="model_type 'kimi_linear' has no draft head"):
        read_config(Path("tests/data/tiny_checkpoints/kimi_linear"), draft_head=True)


def test_a_prediction_layer_that_is_not_in_the_folder_is_named(tmp_path):
    tensors = write_folder(tmp_path, "qwen3_5_text")
    write_file(
        tmp_path / "model.safetensors",
        {name: x for name, x in tensors.items() if not name.startswith("mtp.")},
    )
    with pytest.raises(CheckpointError, match=r"missing .*'mtp\."):
        load(tmp_path, draft_head=True)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"speculate_by": "mtp"},
            "speculate_by='mtp' needs speculate from 1 to .* got speculate=0",
        ),
        ({"speculate_by": "eagle", "speculate": 1}, "must be one of lookup, mtp"),
    ],
)
def test_limits_that_name_no_head_or_no_tokens_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        Limits(**limits)


def test_an_engine_of_a_model_without_its_head_is_refused(folder_of):
    model = read_config(folder_of("glm4_moe_lite")[0]).model
    with pytest.raises(ValueError, match=r"load\(folder, draft_head=True\)"):
        prepare(model, model.param_shapes(), Limits(speculate=1, speculate_by="mtp"))
