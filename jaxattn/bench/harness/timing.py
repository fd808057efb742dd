"""Times on one device, with one meaning in every bench.

`us` or `ms`: GPU time of an op's kernels, from a profile: all that its executable runs, but copies
from the host.
`call us` or `call ms`: a call's share of a long loop of calls, with what lies between kernels. XLA
makes a CUDA graph of each turn, as a peer makes one of its calls. What starts and ends the loop is
left out.
Both after a warm-up; where there is no GPU both are the loop's.
"""

import glob
import math
import platform
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROTATE_BYTES = 256 * 2**20  # inputs are rotated through as much, several times the L2 of 60 MB
# Seconds of calls before what counts, as Triton's do_bench has them. An H200 that is kept busy soon
# runs at its power limit: a prefill of 0.43 ms takes 7% more after 0.3 s, and 24% after 1 s.
WARMUP = 0.025
PROFILED = 10  # calls whose kernels are counted
# A turn of a loop has two small kernels of its own, and begins with a graph's launch. So it has as
# many calls as a peer's graph, or fewer that take as long: their results are held until its end.
TOGETHER, TURN_SECONDS = 32, 1e-3
LOOP_SECONDS = 0.05  # of the calls that count


def device_facts() -> dict[str, str]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "runtime": device.client.platform_version.splitlines()[0],
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def rotation(nbytes: int, most: int = 128) -> int:
    """How many inputs of `nbytes` are taken in turn, so that none is in L2 when its turn comes."""
    return max(1, min(most, -(-ROTATE_BYTES // nbytes)))


def wall(call: Callable[[], Any]) -> float:
    """Seconds until what `call` returns is there."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def warm(call: Callable[[], Any], seconds: float) -> None:
    """Compiles, then calls for as long."""
    wall(call)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        wall(call)


def seconds(call: Callable[[], Any], *, repeats: int = 7, warmup: float = WARMUP) -> float:
    """Median wall time of `call`, which returns arrays.

    Left out are the first call, which compiles, and `warmup` seconds of calls.
    """
    warm(call, warmup)
    return statistics.median(wall(call) for _ in range(repeats))


def seconds_more(
    call: Callable[[], Any],
    more: Callable[[], Any],
    *,
    repeats: int = 7,
    warmup: float = WARMUP,
) -> float:
    """Median wall time that `more` takes beyond that of `call`, one after the other; both return
    arrays."""
    warm(call, warmup)
    return statistics.median(-wall(call) + wall(more) for _ in range(repeats))


class TimedOp:
    """An op that is timed: compiled once by itself, for its result and its profile, and once in a
    loop of calls. Every call has the operands that were given, bit for bit.

    Args:
        call: (operands, state, layer) -> (result, state).
        operands: sets of operands, taken in turn by what is profiled; a loop has the first. Neither
            written nor donated.
        state: what the op updates in place; goes from call to call, donated.
        layers: call i has layer `i % layers`, an int32 scalar on the device. The host has just put
            it there: it is in L2, as the counter of a loop over layers is.
    """

    def __init__(
        self,
        call: Callable[[Any, Any, jax.Array], tuple[Any, Any]],
        operands: Sequence[Any],
        state: Any = (),
        *,
        layers: int = 1,
    ) -> None:
        self.state = state
        self._call, self.operands = call, operands
        self.layers, self._only = layers, jnp.int32(0)
        self._run = jax.jit(call, donate_argnums=1)

    def __call__(self, i: int = 0) -> Any:
        operands = self.operands[i % len(self.operands)]
        layer = jax.device_put(np.int32(i % self.layers)) if self.layers > 1 else self._only
        result, self.state = self._run(operands, self.state, layer)
        return result

    def times(self) -> tuple[float, float]:
        """Seconds of a call's kernels (where there is no GPU, as the second), and in a loop."""
        kernels = kernel_seconds(self)
        loop = self.loop_seconds(kernels)
        return kernels or loop, loop

    def time(self) -> float:
        """The first of `times()`, without compiling a loop where that is not needed."""
        return kernel_seconds(self) or self.loop_seconds(0.0)

    def loop_seconds(self, kernels: float) -> float:
        """Seconds a call, of calls one after another; `kernels` are a call's, or 0 without a GPU.

        An executable is dispatched once, then three times in a row. What starts and ends it, up to
        a millisecond, is in both times, so what it takes more is of two loops alone.
        """
        turns, together = turns_of(kernels, self.layers) if kernels else (4, 1)
        compiled = jax.jit(self.loop(turns, together), donate_argnums=1)

        def run(times: int) -> Any:
            for _ in range(times):
                seen, self.state = compiled(self.operands[0], self.state)
            return seen, self.state

        if not kernels:
            return seconds(lambda: run(1)) / (turns * together)
        return seconds_more(lambda: run(1), lambda: run(3)) / (2 * turns * together)

    def loop(self, turns: int, together: int) -> Callable[[Any, Any], tuple[jax.Array, Any]]:
        """(operands, state) -> (a number of the last turn's results, state).

        Args:
            turns: of a loop on the device.
            together: calls per turn, of which call i has layer `i % layers`.
        """
        call = jax.jit(self._call)  # traced once

        def step(carry, _):
            operands, layers, seen, state = carry
            results, before = [], seen
            for i in range(together):
                # A call's operands exist once the result of the call before it does, so that XLA
                # can neither merge calls nor move them out of the loop; the loop hands them on
                # unchanged.
                operands, layers, kept = lax.optimization_barrier((operands, layers, before))
                results.append(kept)
                before, state = call(operands, state, layers[i % self.layers])
            results.append(lax.optimization_barrier(before))
            # All of a result is needed for one number of it.
            firsts = [jax.tree.leaves(result)[0] for result in results[1:]]
            numbers = [first[(0,) * first.ndim].astype(jnp.float32) for first in firsts]
            return (operands, layers, sum(numbers), state), None

        def run(operands, state):
            # Scalars of the device that no turn changes: its graph is made once, and XLA does not
            # see which layer a call has.
            layers = tuple(map(jnp.int32, range(min(self.layers, together))))
            carry = operands, lax.optimization_barrier(layers), jnp.float32(0), state
            (_, _, seen, state), _ = lax.scan(step, carry, length=turns)
            return seen, state

        return run


def turns_of(kernels: float, layers: int) -> tuple[int, int]:
    """(turns, calls per turn) of half of LOOP_SECONDS: all layers in a turn, equally often."""
    most = min(TOGETHER, max(1, int(TURN_SECONDS / kernels)))
    together = layers * math.ceil(most / layers)
    return math.ceil(LOOP_SECONDS / 2 / (kernels * together)), together


def columns(unit: str, times: tuple[float, float]) -> dict[str, float]:
    """A row's `us` and `call us`, or in ms, of `TimedOp.times()`."""
    scale = {"us": 1e6, "ms": 1e3}[unit]
    return {unit: times[0] * scale, f"call {unit}": times[1] * scale}


class KernelLaunch(NamedTuple):
    """What the GPU ran.

    Attributes:
        kernel: its name.
        op: the instruction of the executable that it belongs to; "" if the profile does not say.
    """

    kernel: str
    op: str


class KernelTimes(NamedTuple):
    """Per call: GPU seconds, and how often it ran."""

    seconds: float
    launches: float


def kernel_seconds(call: Callable[[int], Any], *, warmup: float = WARMUP) -> float:
    """GPU seconds of all kernels and copies of a call, which takes its number; 0 without a GPU.
    What comes from the host does not count: it is not the op's.

    Of the last calls in a profile that begins with `warmup` seconds of them: a GPU also idles while
    a profiler starts.
    """
    if jax.default_backend() != "gpu":
        return 0.0
    events = _last_calls(call, gpu_events, warmup)
    own = (each for name, each in events.items() if not name.startswith("MemcpyH2D"))
    return sum(length for each in own for _, length in each) * 1e-9 / PROFILED


def launches(
    call: Callable[[int], Any], *, warmup: float = WARMUP, calls: int = PROFILED
) -> dict[KernelLaunch, KernelTimes]:
    """What the GPU ran in a call, counted as `kernel_seconds` does; empty without a GPU.

    Args:
        calls: that are counted; few are enough of a long one.
    """
    if jax.default_backend() != "gpu":
        return {}
    return {
        launch: KernelTimes(sum(length for _, length in each) * 1e-9 / calls, len(each) / calls)
        for launch, each in _last_calls(call, gpu_launches, warmup, calls).items()
        if not launch.kernel.startswith("MemcpyH2D")
    }


def _last_calls[Name](
    call: Callable[[int], Any],
    record: Callable[[Callable[[], Any]], dict[Name, list[tuple[float, float]]]],
    warmup: float,
    calls: int = PROFILED,
) -> dict[Name, list[tuple[float, float]]]:
    """The events of the last `calls` calls of a warm profile."""
    number = 0

    def some():
        nonlocal number
        for _ in range(calls):
            result = call(number)
            number += 1
        jax.block_until_ready(result)

    def run():
        begin = time.perf_counter()
        while time.perf_counter() - begin < warmup:
            some()
        some()

    some()  # compiles, records graphs
    before = number
    events = record(run)
    share = calls / (number - before)
    return {
        name: sorted(each)[len(each) - round(len(each) * share) :] for name, each in events.items()
    }


def profile(call: Callable[[], Any]) -> tuple[dict[str, float], float]:
    """(GPU seconds by kernel name, seconds from the first kernel to the end of the last)."""
    events = gpu_events(lambda: jax.block_until_ready(call()))
    every = [event for each in events.values() for event in each]
    if not every:
        return {}, 0.0
    span = max(start + length for start, length in every) - min(every)[0]
    spent = {name: sum(length for _, length in each) * 1e-9 for name, each in events.items()}
    return spent, span * 1e-9


def gpu_events(call: Callable[[], Any]) -> dict[str, list[tuple[float, float]]]:
    """(start, length) in ns of what the GPU ran in `call`, which waits for it, by name."""
    events: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for launch, each in gpu_launches(call).items():
        events[launch.kernel] += each
    return events


def gpu_launches(call: Callable[[], Any]) -> dict[KernelLaunch, list[tuple[float, float]]]:
    """The same by kernel and instruction."""
    return launches_in(recorded(call))


def recorded(call: Callable[[], Any]) -> jax.profiler.ProfileData:
    """A profile of `call`, which waits for what it starts."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            call()
        file = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)[0]
        return jax.profiler.ProfileData.from_serialized_xspace(Path(file).read_bytes())


def launches_in(
    data: jax.profiler.ProfileData, *, planes: str = "/device:GPU", lines: str = "Stream"
) -> dict[KernelLaunch, list[tuple[float, float]]]:
    """(start, length) in ns of the events on lines and planes with names that begin so."""
    events: dict[KernelLaunch, list[tuple[float, float]]] = defaultdict(list)
    with warnings.catch_warnings():
        # The first look at an event's stats makes a type, at which Python warns. Where warnings are
        # errors, jaxlib 0.11.2 ends the process there.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in data.planes:
            if plane.name.startswith(planes):
                for line in plane.lines:
                    if line.name.startswith(lines):
                        for event in line.events:
                            op = next((str(v) for k, v in event.stats if k == "hlo_op"), "")
                            launch = KernelLaunch(event.name, op)
                            events[launch].append((event.start_ns, event.duration_ns))
    return events
