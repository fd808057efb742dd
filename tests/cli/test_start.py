"""Loading beside compiling: the plan's numbers are those of the one after the other."""

import argparse
import collections
import concurrent.futures
import dataclasses
import gc
import io
import math
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxattn.cli.options.parser import InputError
from jaxattn.cli.startup.engine_startup import BackgroundLoad, LoadCancelled, start_engine
from jaxattn.cli.startup.model_source import ModelSource
from jaxattn.cli.startup.progress_display import ProgressDisplay
from jaxattn.cli.startup.progress_lines import ProgressLines
from jaxattn.cli.startup.stage_timings import StageTimings
from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.startup.engine_build import prepare
from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.memory import device_memory as memory_device
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.plan import nbytes
from jaxattn.models import Hybrid
from jaxattn.models.checkpoint import CheckpointError
from jaxattn.models.loading.loader import CheckpointWeights, ModelFolder
from jaxattn.text import ByteTokenizer
from tests.helpers.engine_cases import (
    LIMITS,
    SMALLEST,
    TRIAL,
    WHOLE,
    kept_steps,
    params_of,
)

MODEL = Hybrid(SMALLEST)
FILLED = dataclasses.replace(WHOLE, num_pages=None, utilization=0.5)


@pytest.fixture(autouse=True)
def steps():
    """Compiled before: what is tested here is what goes on beside it."""
    return kept_steps(LIMITS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder(ModelFolder):
    """A folder that loads what a function makes."""

    make: Callable[..., Any]

    def open(self) -> CheckpointWeights:
        return CheckpointWeights(nbytes=1000, load=self.make)


def started(make, limits=LIMITS, console=None):
    folder = Folder(path=None, model=MODEL, make=make)
    layout = dict(data=1, tensor=1, context=1, expert=1)
    options = argparse.Namespace(implementation=None, strict=True, **layout)
    console = console or Console(file=io.StringIO(), quiet=True)
    chosen = ModelSource(folder=folder)
    return start_engine(chosen, MODEL, ByteTokenizer(), limits, options, console, StageTimings())


@pytest.fixture
def counted(monkeypatch):
    """A device whose pool holds what JAX holds since now."""
    monkeypatch.setattr(PROCESS_STATE, "_engines", weakref.WeakSet())  # those of earlier tests
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())

    def memory(device):
        held = max(sum(array.nbytes for array in jax.live_arrays()) - before, 0)
        total = 4 * 2**20
        return DeviceMemory("counted", total, total - held, pool=held, in_use=held)

    monkeypatch.setattr(memory_device, "device_memory", memory)


def hold_compiling(monkeypatch, until: threading.Event) -> list[bool]:
    """Lets nothing compile before an event; returns whether it came, each time."""
    came = []

    def compiles(self, name, *, done):
        came.append(until.wait(300))

    monkeypatch.setattr(ProgressDisplay, "compiles", compiles)
    return came


def made_anew(model) -> int:
    """Bytes of the parameters that are not among the packed ones as they are."""
    given, packed = (
        collections.Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes))
        for shapes in (model.param_shapes(), packed_shapes(model))
    )
    left = given - packed
    return sum(math.prod(s) * np.dtype(d).itemsize * count for (s, d), count in left.items())


@pytest.mark.sampled
@pytest.mark.parametrize("limits", [LIMITS, FILLED], ids=["pages", "utilization"])
def test_weights_that_are_loaded_meanwhile_count_once(limits, counted, monkeypatch):
    """The whole model is on the device before the first step compiles."""
    placed = threading.Event()

    def make(on_progress):
        # Drawn, as the buffers of arrays from a file are not donated on a CPU.
        params = jax.block_until_ready(MODEL.init_params(jax.random.key(0)))
        placed.set()
        return params

    if limits is FILLED:
        kept_steps(TRIAL)
    alone = prepare(MODEL, MODEL.param_shapes(), limits)
    came = hold_compiling(monkeypatch, placed)
    engine, _ = started(make, limits)
    with engine:
        assert came and all(came)
        assert engine.limits == alone.limits
        plans = [{i.name: i.nbytes for i in plan.items} for plan in (engine.plan, alone.plan)]
        # What `pack` makes anew is there twice while `start` runs: vectors in stacks, and matrices
        # that get columns of zeros, of which this model of 16 features has many.
        assert plans[0].pop("others", 0) <= made_anew(MODEL)
        assert plans[0] == plans[1] and plans[0]["weights"] >= nbytes(MODEL.param_shapes())


def test_bytes_that_lie_there_before_are_another_s(counted):
    """What the test above would see if the device was measured after loading."""
    params = jax.block_until_ready(params_of(SMALLEST))
    late = prepare(MODEL, MODEL.param_shapes(), LIMITS)
    assert late.plan["others"] >= nbytes(params)


def test_what_is_wrong_with_the_weights_ends_the_command(monkeypatch):
    def make(on_progress):
        raise CheckpointError("the file\nis damaged")

    with pytest.raises(InputError, match="^the file is damaged$"):
        started(make)


def test_what_goes_wrong_is_raised_by_the_next_check():
    def fail(loading):
        raise CheckpointError("damaged")

    with BackgroundLoad(fail) as loading:
        loading.check()
        loading.start()
        concurrent.futures.wait([loading._future])
        with pytest.raises(CheckpointError, match="damaged"):
            loading.check()


def test_a_loading_that_nobody_waits_for_ends():
    ended, began = [], threading.Event()

    def load(loading):
        began.set()
        try:
            while True:
                loading.watch()
                time.sleep(0.001)
        except LoadCancelled:
            ended.append(True)
            raise

    with pytest.raises(NotImplementedError), BackgroundLoad(load) as loading:
        loading.start()
        assert began.wait(30)
        raise NotImplementedError("the kernel refuses")
    assert ended


def test_what_was_loaded_is_not_kept():
    class Params:
        pass

    with BackgroundLoad(lambda loading: Params()) as loading:
        loading.start()
        gone = weakref.ref(loading.result())
        assert gone() is None


def test_a_file_gets_a_line_when_something_happens(monkeypatch):
    """And not all of them at the end: a server that starts for minutes says what it does."""
    monkeypatch.setattr("jaxattn.cli.startup.progress_lines.EVERY", 0.0)
    out = io.StringIO()
    seen = []

    def make(on_progress):
        for done in (250, 500, 1000):
            on_progress(done, 1000)
            seen.append(out.getvalue())
        return params_of(SMALLEST)

    engine, seconds = started(make, console=Console(file=out, width=100))
    engine.close()
    assert "loading 1.0 kB of weights\nloading: 250 bytes of 1.0 kB, " in seen[0]
    assert "500 bytes of 1.0 kB" in seen[1] and "500 bytes" not in seen[0]
    shown = out.getvalue()
    count = len(seconds)
    assert re.search(r"loading: 1.0 kB of 1.0 kB, .+/s after .+ s\n", shown)
    assert f"compiling {count} executables\n" in shown
    for i, name in enumerate(seconds, 1):
        assert f"compiled {i} of {count}: {name}\n" in shown
    lines = [f"compiled {count} of {count}", "memory plan for", "warming up"]
    assert sorted(lines, key=shown.index) == lines
    assert "\x1b" not in shown


def test_lines_of_a_file_are_few_where_much_happens_at_once():
    out = io.StringIO()
    with ProgressLines(Console(file=out, width=100), every=60) as lines:
        lines.begins(50)
        for i in range(50):
            lines.compiles(f"step {i}", done=False)
            lines.compiles(f"step {i}", done=True)
            lines.moved("loading", i, 49)
    shown = out.getvalue().splitlines()
    assert [line.partition(" ")[0] for line in shown] == [
        "compiling",
        "loading",
        "compiled",
        "loading:",
    ]
    assert "compiled 50 of 50: step 49" in shown


def test_one_display_shows_what_compiles_and_what_moves():
    out = io.StringIO()

    def make(on_progress):
        on_progress(500, 1000)
        on_progress(1000, 1000)
        return params_of(SMALLEST)

    terminal = Console(file=out, width=100, force_terminal=True, color_system=None)
    engine, seconds = started(make, console=terminal)
    engine.close()
    shown = out.getvalue()
    for name in seconds:
        assert f"compiling {name}" in shown
    assert "loading" in shown and "1.0 kB of 1.0 kB" in shown
    assert shown.index("loading") < shown.index("memory plan for")
