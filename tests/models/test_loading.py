"""A folder in three steps, each of which can refuse it before the next costs anything."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.engine.steps.engine_state import new_state
from jaxattn.engine.steps.model_steps import ModelStep
from jaxattn.limits import Limits
from jaxattn.models.checkpoint import EMBEDDED, CheckpointError, native_format
from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.models.loading.loader import read_folder

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints"
YOUTU = TINY / "youtu"
both = pytest.mark.parametrize("folder", [YOUTU, EMBEDDED], ids=["hub", "own"])


@both
def test_the_first_two_steps_allocate_nothing(folder):
    before = sum(array.nbytes for array in jax.live_arrays())
    opened = read_folder(folder)
    weights = opened.open()
    assert weights.nbytes > 10**6 and opened.model.vocab_size > 0
    assert sum(array.nbytes for array in jax.live_arrays()) <= before


@both
def test_progress_ends_with_the_bytes_that_were_promised(folder):
    weights, seen = read_folder(folder).open(), []
    params = weights.place(lambda *now: seen.append(now))
    assert seen[-1] == (weights.nbytes, weights.nbytes)
    loaded = (
        native_format.load(EMBEDDED)[1]
        if folder == EMBEDDED
        else huggingface_checkpoint.load(YOUTU)[1]
    )
    jax.tree.map(np.testing.assert_array_equal, params, loaded)


def test_what_progress_raises_ends_the_loading():
    seen = []

    def stop(done, total):
        seen.append(done)
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        read_folder(YOUTU).open().place(stop)
    assert len(seen) == 1


def test_config_json_is_enough_for_the_first_step(tmp_path):
    (tmp_path / "config.json").write_bytes((YOUTU / "config.json").read_bytes())
    folder = read_folder(tmp_path, dtype="float32")
    assert folder.model == read_folder(YOUTU, dtype="float32").model
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        folder.open()


# --- tokens


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_step_has_the_logits_of_the_tokens_there_are(kind):
    whole = read_folder(YOUTU).model
    model, limits = whole.with_tokens(430), Limits(batch=2, max_model_len=64, prefill_chunk=16)
    entry = ModelStep(kind, 2, 16) if kind == "prefill" else ModelStep(kind, 2, 1)
    step, batch = entry.step(model, limits), entry.batch_shapes(limits)
    state = jax.eval_shape(lambda: new_state(model, limits))
    logits, *_ = jax.eval_shape(step, packed_shapes(model), state, batch)
    assert logits.shape == (limits.batch, 430)


def test_a_model_of_fewer_tokens_is_another_model():
    whole = read_folder(YOUTU).model
    model = whole.with_tokens(430)
    assert (whole.vocab_size, model.vocab_size) == (512, 430)
    assert model != whole and model == whole.with_tokens(430)
    assert model.with_dtype("float32").vocab_size == 430
    assert jax.tree.leaves(model.param_shapes()) == jax.tree.leaves(whole.param_shapes())


@pytest.mark.parametrize("tokens", [0, 513])
def test_an_embedding_has_not_more_tokens_than_rows(tokens):
    with pytest.raises(ValueError, match=f"from 1 to the 512 rows of the embedding; got {tokens}"):
        read_folder(YOUTU).model.with_tokens(tokens)
