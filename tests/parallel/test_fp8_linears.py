"""FP8 matrices beside the experts over two devices: the tokens of one, loaded whole or in parts."""

import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.models.loading.loader import read_folder
from jaxattn.models.sharding import divided
from jaxattn.parallel import DeviceGroup, Parallel
from tests.helpers.fp8_folders import write_folder
from tests.helpers.virtual_devices import on_virtual_devices
from tests.parallel.cases import SMALL, Stepped, followed


@pytest.mark.slow(
    reason="scales that are cut elsewhere than their numbers; found by deepseek_v3_fp8 in "
    "parallel/test_tiny_checkpoints and by the cuts of FP8 folders in "
    "parallel/test_loading too"
)
@pytest.mark.parametrize("classes", ["Qwen3Next", "DeepseekV3"])
@on_virtual_devices
def test_two_devices_give_the_tokens_of_one(classes):
    two = Parallel(tensor=2, expert=2)
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), classes)
        model, params = huggingface_checkpoint.load(folder, dtype="float32", dense="fp8")
        assert all(block.mixer.fp8 for block in model.spec.blocks)
        group = DeviceGroup(two, tuple(jax.devices()[:2]))
        opened = read_folder(folder, dtype="float32", dense="fp8")
        own = divided(opened.model, two)
        in_parts = opened.open().place(model=own, group=group)
    whole = own.place_params(params, group)
    jax.tree.map(np.testing.assert_array_equal, in_parts, whole)
    one, both = (
        followed(model, each, SMALL, Stepped(model, each, SMALL, params, implementation="xla"))
        for each in (Parallel(), two)
    )
    np.testing.assert_array_equal(both[0], one[0])
    error = np.linalg.norm(both[1] - one[1]) / np.linalg.norm(one[1])
    assert error < 1e-4, error
