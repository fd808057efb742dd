"""Published layouts of checkpoints over 2, 4 and 8 devices: the greedy tokens of one, in float32.

JAXATTN_TINY_CHECKPOINTS names a folder with more of them, as for tests/models/test_parity.py. Its
reference logits are compared there; here the steps over devices meet those of one device.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxattn.models import huggingface
from jaxattn.models.decoder import DecoderModel
from jaxattn.models.registry import FAMILIES
from jaxattn.models.sharding import layouts
from jaxattn.parallel import Parallel
from tests.helpers.virtual_devices import on_virtual_devices
from tests.parallel.cases import SMALL, Stepped, followed


def is_ours(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and json.loads(config.read_text())["model_type"] in FAMILIES


ROOTS = [
    Path(__file__).parents[1] / "data" / "tiny_checkpoints",
    *map(Path, filter(None, [os.environ.get("JAXATTN_TINY_CHECKPOINTS")])),
]
FOLDERS = {
    folder.name: folder for root in ROOTS for folder in sorted(root.iterdir()) if is_ours(folder)
}
# Also without --slow: latents with FP8 experts, and key-value pages with delta nets.
QUICK = {"deepseek_v3_fp8": [Parallel(data=2, expert=2)], "qwen3_5_moe": [Parallel(tensor=2)]}


@functools.cache
def loaded(folder: Path) -> tuple[DecoderModel, Any]:
    return huggingface.load(folder, dtype="float32")


@functools.cache
def on_one(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    return over(folder, Parallel())


def over(folder: Path, parallel: Parallel) -> tuple[np.ndarray, np.ndarray]:
    model, params = loaded(folder)
    return followed(model, parallel, SMALL, Stepped(model, parallel, SMALL, params))


def each_mode(model: DecoderModel, devices: int) -> list[Parallel]:
    """Of each mode the layout of so many devices, where the model has it."""
    found = list(layouts(model, devices))
    half = devices // 2
    wanted = [
        dict(tensor=devices),
        dict(tensor=devices, context=2),
        dict(tensor=devices, expert=devices),
        dict(data=devices, expert=devices),
        dict(data=2, tensor=half, expert=2),
        dict(data=half, tensor=2, context=2),
    ]
    modes = dict.fromkeys(Parallel(**each) for each in wanted if max(each.values()) <= devices)
    return [mode for mode in modes if mode in found]


def assert_same(folder: Path, parallel: Parallel) -> None:
    expected, logits = on_one(folder)
    assert len(np.unique(expected)) > 8, "the tokens have to differ for this to say anything"
    tokens, found = over(folder, parallel)
    np.testing.assert_array_equal(tokens, expected, err_msg=parallel.flags)
    # Sums in another order, of float32 numbers.
    error = np.linalg.norm(found - logits) / np.linalg.norm(logits)
    assert error < 1e-4, f"{parallel.flags}: {error}"


@pytest.mark.parametrize("name", QUICK)
@on_virtual_devices
def test_two_devices_give_the_tokens_of_one(name):
    for parallel in QUICK[name]:
        assert_same(FOLDERS[name], parallel)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", FOLDERS)
@on_virtual_devices
def test_every_mode_gives_the_tokens_of_one_device(name, devices):
    model, _ = loaded(FOLDERS[name])
    modes = each_mode(model, devices)
    for parallel in modes:
        assert_same(FOLDERS[name], parallel)
    print(f"{name} on {devices}: {', '.join(mode.flags for mode in modes) or 'no layout'}")
    assert modes or devices > 2, "a model of two heads has layouts of two devices"
