"""GPU tests run on a Hopper GPU and are skipped, with the reason, anywhere else."""

import contextlib
import gc
import os
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Two workers and some fifty processes import the package: each would compile its 660 modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A job in the background ignores Ctrl-C, and so would every process that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The interpreter's GPU threads wait for one another in callbacks, each on a thread of XLA's pool:
# with fewer threads in the pool than wait, nobody goes on. XLA reads this when JAX starts.
os.environ.setdefault("PJRT_NPROC", "16")
# Of a GPU take what is needed only: other processes of the suite run beside this one.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# OpenBLAS's threads wait in a loop, and take the time of those that work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# XLA:CPU compiles a fusion by a pipeline of MLIR passes, which is half of what compiling a test
# takes; the emitters of LLVM code that came before it need a tenth of that.
_GIVEN = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true "
    f"--xla_cpu_parallel_codegen_split_count=1 {_GIVEN}"
)

# filelock, which the hub's client imports, hears each audit event of Python from then on, and each
# id() and each frame that JAX looks up is one: a hundredth of the time. No test forks with a lock.
_add_hook, sys.addaudithook = sys.addaudithook, lambda _: None
with contextlib.suppress(ImportError):
    import filelock  # noqa: F401
sys.addaudithook = _add_hook

import jax  # noqa: E402
import pytest  # noqa: E402

from tests.helpers.eager_moves import use_numpy_moves  # noqa: E402
from tests.helpers.executables import (  # noqa: E402
    keep_freed_memory,
    leave_out_locations,
    share_executables,
    with_locations,
)
from tests.helpers.interpreter import use_numpy_callbacks  # noqa: E402
from tests.helpers.virtual_devices import end_virtual_devices  # noqa: E402

# Of each operation JAX notes where in the source it comes from, ten callers deep; no test reads it,
# and the suite takes a tenth less time without.
jax.config.update("jax_traceback_in_locations_limit", 0)
if jax.default_backend() == "cpu":
    # Without it LLVM optimizes at length what runs once.
    jax.config.update("jax_disable_most_optimizations", True)
    leave_out_locations()
    keep_freed_memory()
    use_numpy_moves()
use_numpy_callbacks()
share_executables()
# All of it is read once, and most of it stays.
gc.set_threshold(1_000_000, 20, 20)
# XLA has read them: a process that a test starts is compiled as users compile it.
os.environ["XLA_FLAGS"] = _GIVEN


def _missing_hopper() -> str | None:
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        return f"needs a Hopper GPU; JAX sees {jax.default_backend()} only"
    if device.compute_capability != "9.0":
        return f"needs a Hopper GPU (compute capability 9.0); this is {device.device_kind}"
    return None


def _is_interpreted(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and "mosaic_gpu_interpret" in callspec.params.values()


SAMPLE = 40  # of the cases of a test that is `sampled`, one in so many runs without --slow


def _left_to_slow(items: list[pytest.Item]) -> set[pytest.Item]:
    """What is marked `slow`, and most cases of what is `sampled`: all but the first of each
    implementation and one in `SAMPLE` others. A case stays in the sample, or out of it, whichever
    others there are. A GPU takes seconds for all of them."""
    found, begun = set(), set()
    for item in items:
        if item.get_closest_marker("gpu"):
            continue
        if item.get_closest_marker("slow"):
            found.add(item)
        elif item.get_closest_marker("sampled"):
            params = getattr(item, "callspec", None) and item.callspec.params or {}
            test = item.nodeid.partition("[")[0], params.get("implementation")
            if test in begun and zlib.crc32(item.nodeid.encode()) % SAMPLE:
                found.add(item)
            begun.add(test)
    return found


def why_slow(item: pytest.Item) -> str | None:
    """What a slow case finds and who finds it too; None where no marker says it."""
    marks = (*item.iter_markers("slow"), *item.iter_markers("slow_cases"))
    return next((mark.kwargs["reason"] for mark in marks if mark.kwargs.get("reason")), None)


def _print_reasons(items: list[pytest.Item]) -> None:
    """A row of a Markdown table for each test with slow cases."""
    tests: dict[tuple[str, str | None], int] = {}
    for item in filter(lambda item: item.get_closest_marker("slow"), items):
        row = item.nodeid.partition("[")[0], why_slow(item)
        tests[row] = tests.get(row, 0) + 1
    print("\n| test | slow cases | what they find, and what finds it too |\n|---|---|---|")
    for (test, reason), cases in tests.items():
        print(f"| `{test}` | {cases} | {reason} |")


# Of all that was collected: what slow cases say, and which say nothing.
REASONS: set[str] = set()
WITHOUT_REASON: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run what is slow on a CPU too")
    parser.addoption(
        "--slow-reasons", action="store_true", help="print why tests are slow, and end"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = [item for item in items if item.get_closest_marker("slow")]
    REASONS.update(filter(None, map(why_slow, slow)))
    WITHOUT_REASON.extend(item.nodeid for item in slow if not why_slow(item))
    if config.getoption("--slow-reasons"):
        _print_reasons(items)
        items.clear()
    # What is marked for a GPU is no work for the interpreter, which wants a CPU: beside a GPU its
    # threads have been seen to wait for one another for ever.
    none = [item for item in items if item.get_closest_marker("gpu") and _is_interpreted(item)]
    if none:
        config.hook.pytest_deselected(items=none)
        items[:] = [item for item in items if item not in none]
    if not config.getoption("--slow"):
        slow = _left_to_slow(items)
        if slow:
            config.hook.pytest_deselected(items=list(slow))
            items[:] = [item for item in items if item not in slow]
    # What fills the whole GPU from a process of its own, before this one holds any of it.
    items.sort(key=lambda item: item.get_closest_marker("whole_gpu") is None)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _missing_hopper() if marked else None
    if reason and _asks_for_all(config):
        # A skip is reported three times to pytest-xdist's controller: four milliseconds each.
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    elif reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _asks_for_all(config: pytest.Config) -> bool:
    """Whether the command names no test, folder or marker."""
    options = config.option
    return not (options.file_or_dir or options.keyword or options.markexpr or options.slow)


def pytest_collection_finish() -> None:
    # Modules and collected tests stay: the garbage collector need not look through them again.
    gc.collect()
    gc.freeze()
    # What JAX traces lives on: to look through it every 100,000 objects took a twentieth of the
    # time. On a GPU what waits for the collector may hold memory that other processes want.
    cpu = jax.default_backend() == "cpu"
    gc.set_threshold(*((1_000_000, 20, 20) if cpu else (10_000, 20, 20)))


# Seconds of CPU time of one test with its fixtures. An engine of a file's own takes up to 13 s, and
# other programs make that half as much again, whatever they do to the clock. Virtual machines with
# two cores differ by a factor of two.
MOST_TEST_SECONDS = 80
_BEGUN = pytest.StashKey[float]()


def too_slow(seconds: float, markers: set[str]) -> str | None:
    """What a test that took so many seconds of CPU time is told, or None."""
    if seconds <= MOST_TEST_SECONDS or markers & {"gpu", "large", "slow"}:
        return None
    return (
        f"the test took {seconds:.0f} s of CPU time, more than {MOST_TEST_SECONDS} s: use smaller "
        "shapes, share an engine, or mark cases `slow`; see docs/testing.md"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Any:
    item.stash[_BEGUN] = time.process_time()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    result = yield
    if jax.default_backend() == "cpu" and not item.config.getoption("--slow"):
        markers = {mark.name for mark in item.iter_markers()}
        said = too_slow(time.process_time() - item.stash[_BEGUN], markers)
        if said:
            pytest.fail(said, pytrace=False)
    return result


# Seconds of CPU time that the suite is meant to take at most: eight minutes on two cores.
MOST_CPU_SECONDS = 900
_WORKERS_SECONDS: list[float] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    end_virtual_devices()  # so that its time counts
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # of pytest-xdist: this is a worker, and tells its controller
        output["cpu_seconds"] = sum(os.times()[:4])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _WORKERS_SECONDS.append(getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """How long the tests took, however busy the machine was."""
    own = os.times()[:2] if _WORKERS_SECONDS else os.times()[:4]
    seconds = sum(own) + sum(_WORKERS_SECONDS)
    line = f"CPU time: {seconds:,.0f} s"
    if _asks_for_all(config):
        line += f"; the target is {MOST_CPU_SECONDS:,} s"
        if seconds > MOST_CPU_SECONDS:
            line += ": docs/testing.md says what to leave to --slow"
        if reason := _missing_hopper():
            line += f"\nleft out what is marked `gpu`: {reason}"
    terminalreporter.write_line(line)


@pytest.fixture(scope="module", autouse=True)
def _little_garbage_to_look_through(request: pytest.FixtureRequest) -> None:
    """What earlier files left in JAX's caches stays: collections in tests take a second less.

    Gigabytes are there in the end, and tests collect to see that memory comes back: those of files
    that have `gc`. Before others there is nothing to gain, and this takes a tenth of a second.
    """
    if "gc" in vars(request.module):
        gc.collect()
        gc.freeze()


# A process may have 65,530 mappings (Linux's vm.max_map_count), a program of XLA:CPU takes up to
# twelve, and XLA ends the process where one more is refused.
MOST_MAPPINGS = 40_000
MAPPINGS = Path("/proc/self/maps")
# To count them takes some ten milliseconds. In so many seconds of CPU time a thousand programs are
# compiled.
BETWEEN_COUNTS = 15
_COUNTED = [0.0]


@pytest.fixture(scope="module", autouse=True)
def _mappings_for_more_programs() -> None:
    """Lets JAX forget its programs before there are too many. What is used again is traced."""
    global MOST_MAPPINGS
    if time.process_time() < _COUNTED[0] + BETWEEN_COUNTS:
        return
    _COUNTED[0] = time.process_time()
    if jax.default_backend() == "cpu" and MAPPINGS.exists():
        if _mappings() > MOST_MAPPINGS:
            jax.clear_caches()
            gc.collect()
            MOST_MAPPINGS = max(MOST_MAPPINGS, _mappings() + 5_000)


def _mappings() -> int:
    return MAPPINGS.read_bytes().count(b"\n")


def _use_lazy_steps(request: pytest.FixtureRequest, lazy: bool) -> None:
    if lazy or "tests.helpers.lazy_steps" in sys.modules:
        from tests.helpers.lazy_steps import use_lazy_steps

        cpu = jax.default_backend() == "cpu"
        use_lazy_steps(lazy and cpu and not request.config.getoption("--slow"))


@pytest.fixture(scope="module", autouse=True)
def _lazy_steps(request: pytest.FixtureRequest) -> None:
    """Of files that are marked `lazy_steps`; see tests/helpers/lazy_steps.py."""
    _use_lazy_steps(request, request.node.get_closest_marker("lazy_steps") is not None)


@pytest.fixture
def lazy_steps(request: pytest.FixtureRequest) -> Iterator[None]:
    """For single tests of other files."""
    _use_lazy_steps(request, True)
    yield
    _use_lazy_steps(request, False)


@pytest.fixture
def untraced_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count the same bytes of temp for each step, for tests that read a plan's other lines.

    To trace the steps of a published model takes a second of CPU time.
    """
    from jaxattn.engine.startup.executable_memory import ExecutableMemory
    from jaxattn.plan import device_plan

    bound = ExecutableMemory(2**20, 2**26, 0, "bound")
    monkeypatch.setattr(device_plan, "_bound", lambda *_: bound)


@pytest.fixture
def locations() -> Iterator[None]:
    with with_locations():
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: a GPU has room for one process, and four take some 3 GB each of a CPU's."""
    return 0 if jax.default_backend() == "gpu" else min(os.cpu_count() or 1, 4)
