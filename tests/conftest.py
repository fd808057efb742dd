"""Settings of the suite. GPU tests need a Hopper GPU, and are skipped without one."""

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

# Two workers and about fifty processes import the package; without .pyc files, each compiles it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A background job ignores Ctrl-C, and so would every process that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The interpreter's GPU threads wait for each other in callbacks, each on a thread of XLA's pool. If
# more of them wait than the pool has threads, they deadlock. XLA reads this when JAX starts.
os.environ.setdefault("PJRT_NPROC", "16")
# Allocate only what is needed of a GPU, because other processes of the suite share it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# OpenBLAS's threads wait in a busy loop, which takes CPU time from working threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# XLA:CPU compiles a fusion by a pipeline of MLIR passes, which takes half of a test's compile time;
# the older emitters of LLVM code take a tenth of that.
_GIVEN = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true "
    f"--xla_cpu_parallel_codegen_split_count=1 {_GIVEN}"
)

# filelock, which the hub's client imports, installs an audit hook. Python then calls it for each
# id() and each frame that JAX looks up: 1% of the time. No test forks with a lock.
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

# JAX records the source location of each operation, ten callers deep. No test reads the callers,
# and without them the suite takes 10% less time.
jax.config.update("jax_traceback_in_locations_limit", 0)
if jax.default_backend() == "cpu":
    # Otherwise LLVM spends a long time on optimizing code that runs once.
    jax.config.update("jax_disable_most_optimizations", True)
    leave_out_locations()
    keep_freed_memory()
    use_numpy_moves()
use_numpy_callbacks()
share_executables()
# The collector needs to look at imported objects only once, because most of them stay.
gc.set_threshold(1_000_000, 20, 20)
# XLA has read the flags, so a process that a test starts compiles with the user's flags.
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


SAMPLE = 40  # a `sampled` test runs one in this many of its cases without --slow


def _left_to_slow(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases marked `slow`, and most cases of `sampled` tests.

    A sampled test keeps the first case of each implementation, and one in `SAMPLE` others. Whether
    a case is in the sample does not depend on the other cases. Cases for a GPU are never left out,
    because a GPU runs all of them in seconds.
    """
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
    """The reason of a slow case: what it finds, and what else finds it; None without a reason."""
    marks = (*item.iter_markers("slow"), *item.iter_markers("slow_cases"))
    return next((mark.kwargs["reason"] for mark in marks if mark.kwargs.get("reason")), None)


def _print_reasons(items: list[pytest.Item]) -> None:
    """Prints a row of a Markdown table for each test with slow cases."""
    tests: dict[tuple[str, str | None], int] = {}
    for item in filter(lambda item: item.get_closest_marker("slow"), items):
        row = item.nodeid.partition("[")[0], why_slow(item)
        tests[row] = tests.get(row, 0) + 1
    print("\n| test | slow cases | what they find, and what finds it too |\n|---|---|---|")
    for (test, reason), cases in tests.items():
        print(f"| `{test}` | {cases} | {reason} |")


# The reasons of all collected slow cases, and the cases without one.
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
    # Cases marked for a GPU are not for the interpreter, which needs a CPU: next to a GPU, its
    # threads have been seen to deadlock.
    none = [item for item in items if item.get_closest_marker("gpu") and _is_interpreted(item)]
    if none:
        config.hook.pytest_deselected(items=none)
        items[:] = [item for item in items if item not in none]
    if not config.getoption("--slow"):
        slow = _left_to_slow(items)
        if slow:
            config.hook.pytest_deselected(items=list(slow))
            items[:] = [item for item in items if item not in slow]
    # Tests that fill the whole GPU from a process of their own run first, while this one holds
    # none.
    items.sort(key=lambda item: item.get_closest_marker("whole_gpu") is None)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _missing_hopper() if marked else None
    if reason and _asks_for_all(config):
        # pytest-xdist reports a skip to its controller three times, which takes 4 ms each.
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    elif reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _asks_for_all(config: pytest.Config) -> bool:
    """Whether the command selects no test, folder or marker."""
    options = config.option
    return not (options.file_or_dir or options.keyword or options.markexpr or options.slow)


def pytest_collection_finish() -> None:
    # Modules and collected tests stay alive, so the garbage collector can skip them.
    gc.collect()
    gc.freeze()
    # JAX's traces stay alive too: looking at them after every 100,000 objects took 5% of the time.
    # On a GPU, garbage may hold memory that other processes need.
    cpu = jax.default_backend() == "cpu"
    gc.set_threshold(*((1_000_000, 20, 20) if cpu else (10_000, 20, 20)))


# Limit in seconds of CPU time for a test with its fixtures. An engine for one file takes up to 13
# s, and other programs add up to half of that, even to CPU time. Virtual machines with two cores
# differ by a factor of two.
MOST_TEST_SECONDS = 80
_BEGUN = pytest.StashKey[float]()


def too_slow(seconds: float, markers: set[str]) -> str | None:
    """The failure message of a test that took this much CPU time, or None."""
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


# Target for the CPU seconds of the whole suite: eight minutes on two cores.
MOST_CPU_SECONDS = 900
_WORKERS_SECONDS: list[float] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    end_virtual_devices()  # so that their time counts
    gc.freeze()  # pytest collects garbage twice more, which takes seconds for JAX's traces
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # this is a worker of pytest-xdist, which reports to its controller
        output["cpu_seconds"] = sum(os.times()[:4])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _WORKERS_SECONDS.append(getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints the CPU time of the tests, which hardly depends on how busy the machine is."""
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
    """Excludes objects that earlier files left in JAX's caches from collections in tests.

    These objects take gigabytes in the end. Files that import `gc` collect garbage to check that
    memory is freed, and this fixture saves them a second. It takes a tenth of a second, so other
    files do without it.
    """
    if "gc" in vars(request.module):
        gc.collect()
        gc.freeze()


# A process may have 65,530 mappings (Linux's vm.max_map_count). A program of XLA:CPU takes up to
# twelve, and XLA ends the process if one more is refused.
MOST_MAPPINGS = 40_000
MAPPINGS = Path("/proc/self/maps")
# Counting takes about ten milliseconds. JAX compiles about a thousand programs in this many seconds
# of CPU time.
BETWEEN_COUNTS = 15
_COUNTED = [0.0]


@pytest.fixture(scope="module", autouse=True)
def _mappings_for_more_programs() -> None:
    """Clears JAX's caches before there are too many mappings; programs in use are traced again."""
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
    """Enables lazy steps for files marked `lazy_steps`; see tests/helpers/lazy_steps.py."""
    _use_lazy_steps(request, request.node.get_closest_marker("lazy_steps") is not None)


@pytest.fixture
def lazy_steps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Enables lazy steps for single tests of other files."""
    _use_lazy_steps(request, True)
    yield
    _use_lazy_steps(request, False)


@pytest.fixture
def untraced_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count the same bytes of temp for each step, for tests that read a plan's other lines.

    Tracing the steps of a published model takes a second of CPU time.
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
    """The workers of `-n auto`: a GPU has room for one process, and a CPU's four take 3 GB each."""
    return 0 if jax.default_backend() == "gpu" else min(os.cpu_count() or 1, 4)
