"""FP8 matrices beside the experts over two devices: cuts, and the tokens of one device."""

import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.models.loading.loader import read_folder
from jaxattn.models.sharding import divided
from jaxattn.models.sharding.axis_sharding import own
from jaxattn.parallel import DeviceGroup, Parallel
from tests.helpers.fp8_folders import write_folder
from tests.helpers.virtual_devices import on_virtual_devices
from tests.parallel.cases import SMALL, Stepped, followed

BLOCK = 128
TWO = Parallel(tensor=2, expert=2)


def test_scales_are_cut_where_their_numbers_are():
    """Of latent and grouped-query attention, a delta net, and feed-forwards of both kinds."""
    found = set()
    for classes in ("Qwen3Next", "DeepseekV3"):
        with tempfile.TemporaryDirectory() as name:
            folder = write_folder(Path(name), classes)
            model = read_folder(folder, dtype="float32", dense="fp8").model
        shapes = nnx.to_flat_state(model.param_shapes())
        local = divided(model, TWO)
        shape_of = {key: leaf.shape for key, leaf in shapes}
        for key in [key for key in shape_of if key[-1] == "scale"]:
            numbers = (*key[:-1], "weight")
            scales = np.arange(np.prod(shape_of[key])).reshape(shape_of[key])
            whole = widened(scales, shape_of[numbers])
            for gpu in range(TWO.gpus):
                part = own(scales, local.cuts_of(key), TWO, gpu)
                wanted = own(whole, local.cuts_of(numbers), TWO, gpu)
                np.testing.assert_array_equal(widened(part, wanted.shape), wanted, str(key))
            if part.shape != scales.shape:
                found.add(key[-2])
    assert found >= {"q_proj", "k_proj", "q_b_proj", "o_proj", "in_proj_qkvz", "down_proj"}


def widened(scales, shape):
    """Each scale at the numbers [..., N, K] of its block."""
    wide = scales.repeat(BLOCK, axis=-2).repeat(BLOCK, axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


@pytest.mark.slow(
    reason="scales that are multiplied with other numbers, or loaded elsewhere; found by the cuts "
    "above and those of deepseek_v3_fp8 in parallel/test_loading, bit by bit, too"
)
@pytest.mark.parametrize("classes", ["Qwen3Next", "DeepseekV3"])
@on_virtual_devices
def test_two_devices_give_the_tokens_of_one(classes):
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), classes)
        model, params = huggingface_checkpoint.load(folder, dtype="float32", dense="fp8")
        assert all(block.mixer.fp8 for block in model.spec.blocks)
        group = DeviceGroup(TWO, tuple(jax.devices()[:2]))
        opened = read_folder(folder, dtype="float32", dense="fp8")
        local = divided(opened.model, TWO)
        in_parts = opened.open().place(model=local, group=group)
    whole = local.place_params(params, group)
    jax.tree.map(np.testing.assert_array_equal, in_parts, whole)
    one, both = (
        followed(model, each, SMALL, Stepped(model, each, SMALL, params, implementation="xla"))
        for each in (Parallel(), TWO)
    )
    np.testing.assert_array_equal(both[0], one[0])
    error = np.linalg.norm(both[1] - one[1]) / np.linalg.norm(one[1])
    assert error < 1e-4, error
