"""Published layouts of checkpoints over 2, 4 and 8 devices: the greedy tokens of one, in float32.

The embedded model is among them. On GPUs XLA's form of each op runs, as kernels are for bfloat16:
tests/parallel/test_gpus.py has those.

    python -m pytest -m gpu -p no:xdist -s tests/parallel/test_tiny_checkpoints.py

JAXATTN_TINY_CHECKPOINTS names a folder with more of them, as for tests/models/test_parity.py. Its
reference logits are compared there; here the steps over devices meet those of one device.
"""

import dataclasses
import functools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxattn.models import Hybrid
from jaxattn.models.checkpoint import EMBEDDED, load
from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.models.network.decoder_model import DecoderModel
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
# Also without --slow: latents with FP8 experts.
QUICK = {"deepseek_v3_fp8": [Parallel(data=2, expert=2)]}


@functools.cache
def loaded(name: str) -> tuple[DecoderModel, Any]:
    if name != "embedded":
        return huggingface_checkpoint.load(FOLDERS[name], dtype="float32")
    config, params = load(EMBEDDED)
    wide: Any = dict(dtype="float32", param_dtype="float32")
    return Hybrid(dataclasses.replace(config, **wide)), jax.tree.map(in_float32, params)


def in_float32(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


def stepped(name: str, parallel: Parallel) -> Stepped:
    model, params = loaded(name)
    return Stepped(model, parallel, SMALL, params, implementation="xla")


@functools.cache
def on_one(name: str) -> tuple[np.ndarray, np.ndarray]:
    return over(name, Parallel())


def over(
    name: str, parallel: Parallel, steps: Stepped | None = None
) -> tuple[np.ndarray, np.ndarray]:
    return followed(loaded(name)[0], parallel, SMALL, steps or stepped(name, parallel))


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


def assert_same(
    name: str,
    parallel: Parallel,
    steps: Stepped | None = None,
    one: tuple[np.ndarray, np.ndarray] | None = None,
) -> None:
    expected, logits = one or on_one(name)
    assert len(np.unique(expected)) > 8, "the tokens have to differ for this to say anything"
    tokens, found = over(name, parallel, steps)
    np.testing.assert_array_equal(tokens, expected, err_msg=parallel.flags)
    # Sums in another order, of float32 numbers.
    error = np.linalg.norm(found - logits) / np.linalg.norm(logits)
    assert error < 1e-4, f"{parallel.flags}: {error}"


@pytest.mark.parametrize("name", QUICK)
@on_virtual_devices
def test_two_devices_give_the_tokens_of_one(name):
    for parallel in QUICK[name]:
        assert_same(name, parallel)


@pytest.mark.slow(
    reason="a tensor that is cut elsewhere; found by each device's cut of it in test_loading and "
    "tokens of its layers in test_same_tokens too"
)
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", [*FOLDERS, "embedded"])
@on_virtual_devices
def test_every_mode_gives_the_tokens_of_one_device(name, devices):
    model, _ = loaded(name)
    modes = each_mode(model, devices)
    for parallel in modes:
        assert_same(name, parallel)
    print(f"{name} on {devices}: {', '.join(mode.flags for mode in modes) or 'no layout'}")
    assert modes or devices > 2, "a model of two heads has layouts of two devices"


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", [*FOLDERS, "embedded"])
def test_every_mode_gives_the_tokens_of_one_gpu(name, devices):
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    with jax.default_matmul_precision("highest"):
        modes = each_mode(loaded(name)[0], devices)
        steps = [stepped(name, parallel) for parallel in [Parallel(), *modes]]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lower_and_compile, steps))
        expected = over(name, Parallel(), steps[0])
        for parallel, each in zip(modes, steps[1:], strict=True):
            assert_same(name, parallel, each, expected)
    print(f"{name} on {devices}: {', '.join(mode.flags for mode in modes) or 'no layout'}")
    assert modes or devices > 2, "a model of two heads has layouts of two devices"


def lower_and_compile(steps: Stepped) -> None:
    with jax.default_matmul_precision("highest"):  # a thread begins without
        assert steps.compiled_prefill and steps.compiled_decode
