"""Timing on one device, defined in the same way for every bench.

`us` or `ms` is the GPU time of an op's kernels, from a profile. It counts all that the op's
executable runs, except copies from the host.
`call us` or `call ms` is the time per call in a long loop of calls, including the gaps between
kernels. XLA makes a CUDA graph of each iteration, as a baseline makes one of its calls. The loop's
start and end are excluded.
Both are taken after a warm-up. Without a GPU, both come from the loop.
"""

import glob
import math
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

ROTATE_BYTES = 256 * 2**20  # total size of the rotated inputs, several times the 60 MB of L2
# Seconds of calls before the timed ones, as in Triton's do_bench. A busy H200 soon runs at its
# power limit: a prefill of 0.43 ms takes 7% more after 0.3 s, and 24% after 1 s.
WARMUP = 0.025
PROFILED = 10  # calls in a profile whose kernels are counted
# An iteration of a loop has two small kernels of its own and starts with a graph launch. So it has
# as many calls as a baseline's graph, or fewer long ones, because it holds their results to the
# end.
TOGETHER, TURN_SECONDS = 32, 1e-3
LOOP_SECONDS = 0.05  # of the timed calls


def rotation(nbytes: int, max_inputs: int = 128) -> int:
    """Number of inputs of `nbytes` to take in turn, so that L2 holds none when it is read."""
    return max(1, min(max_inputs, -(-ROTATE_BYTES // nbytes)))


def wall(call: Callable[[], Any]) -> float:
    """Seconds until the arrays that `call` returns are ready."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def warm(call: Callable[[], Any], seconds: float) -> None:
    """Compiles, then keeps calling for `seconds`."""
    wall(call)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        wall(call)


def seconds(call: Callable[[], Any], *, repeats: int = 7, warmup: float = WARMUP) -> float:
    """Median wall time of `call`, which returns arrays.

    The first call, which compiles, and `warmup` seconds of calls are not counted.
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
    """Median wall time of `more` minus that of `call`, run alternately; both return arrays."""
    warm(call, warmup)
    return statistics.median(-wall(call) + wall(more) for _ in range(repeats))


class TimedOp:
    """An op to time, compiled once by itself, for result and profile, and once in a loop.

    Every call gets the given operands, bit for bit.

    Args:
        call: (operands, state, layer) -> (result, state).
        operands: Sets of operands, which profiled calls take in turn; a loop uses only the first.
            They are neither written nor donated.
        state: The arrays that the op updates in place, donated from call to call.
        layers: Call i gets layer `i % layers` as an int32 scalar on the device. The host has just
            written the scalar, so it is in L2, like the counter of a loop over layers.
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
        """(kernel seconds of a call, seconds per call in a loop); without a GPU, both are equal."""
        kernels = kernel_seconds(self)
        loop = self.loop_seconds(kernels)
        return kernels or loop, loop

    def time(self) -> float:
        """The first of `times()`; compiles a loop only if there is no GPU."""
        return kernel_seconds(self) or self.loop_seconds(0.0)

    def loop_seconds(self, kernels: float) -> float:
        """Seconds per call in a loop; `kernels` is the kernel time of a call, or 0 without a GPU.

        The loop's executable is dispatched once, then three times in a row. Both times contain the
        same start and end, up to a millisecond, so the difference is the time of exactly two loops.
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
        """Returns (operands, state) -> (a number from the last iteration's results, state).

        Args:
            turns: Iterations of the loop on the device.
            together: Calls per iteration, of which call i gets layer `i % layers`.
        """
        call = jax.jit(self._call)  # traced once

        def step(carry, _):
            operands, layers, seen, state = carry
            results, before = [], seen
            for i in range(together):
                # The barrier makes a call's operands depend on the previous call's result. So XLA
                # can neither merge calls nor move them out of the loop, which passes the operands
                # on unchanged.
                operands, layers, kept = lax.optimization_barrier((operands, layers, before))
                results.append(kept)
                before, state = call(operands, state, layers[i % self.layers])
            results.append(lax.optimization_barrier(before))
            # After a barrier, one number of a result requires the whole result.
            firsts = [jax.tree.leaves(result)[0] for result in results[1:]]
            numbers = [first[(0,) * first.ndim].astype(jnp.float32) for first in firsts]
            return (operands, layers, sum(numbers), state), None

        def run(operands, state):
            # Scalars on the device that no iteration changes, so the loop's graph is recorded once,
            # and XLA does not know a call's layer.
            layers = tuple(map(jnp.int32, range(min(self.layers, together))))
            carry = operands, lax.optimization_barrier(layers), jnp.float32(0), state
            (_, _, seen, state), _ = lax.scan(step, carry, length=turns)
            return seen, state

        return run


def turns_of(kernels: float, layers: int) -> tuple[int, int]:
    """(iterations, calls per iteration) for half of LOOP_SECONDS, with each layer equally often."""
    most = min(TOGETHER, max(1, int(TURN_SECONDS / kernels)))
    together = layers * math.ceil(most / layers)
    return math.ceil(LOOP_SECONDS / 2 / (kernels * together)), together


def columns(unit: str, times: tuple[float, float]) -> dict[str, float]:
    """A row's `us` and `call us`, or `ms` and `call ms`, from `TimedOp.times()`."""
    scale = {"us": 1e6, "ms": 1e3}[unit]
    return {unit: times[0] * scale, f"call {unit}": times[1] * scale}


class KernelLaunch(NamedTuple):
    """A kernel or copy that the GPU ran.

    Attributes:
        kernel: The kernel's name.
        op: The HLO instruction that launched it; "" if the profile does not record it.
    """

    kernel: str
    op: str


class KernelTimes(NamedTuple):
    """The GPU seconds and the launches of a kernel per call."""

    seconds: float
    launches: float


def kernel_seconds(call: Callable[[int], Any], *, warmup: float = WARMUP) -> float:
    """GPU seconds of a call's kernels and copies, except copies from the host; 0 without a GPU.

    `call` takes the number of the call. The profile begins with `warmup` seconds of calls, because
    a GPU idles while a profiler starts; only the last calls count.
    """
    if jax.default_backend() != "gpu":
        return 0.0
    events = _last_calls(call, gpu_events, warmup)
    own = (each for name, each in events.items() if not name.startswith("MemcpyH2D"))
    return sum(length for each in own for _, length in each) * 1e-9 / PROFILED


def launches(
    call: Callable[[int], Any], *, warmup: float = WARMUP, calls: int = PROFILED
) -> dict[KernelLaunch, KernelTimes]:
    """The GPU's work in a call, counted like `kernel_seconds`; empty without a GPU.

    Args:
        calls: The number of calls that count; a few suffice for a long call.
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

    some()  # compiles and records CUDA graphs
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
    """(start, length) in ns of what `call`, which must block, runs on the GPU, by kernel name."""
    events: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for launch, each in gpu_launches(call).items():
        events[launch.kernel] += each
    return events


def gpu_launches(call: Callable[[], Any]) -> dict[KernelLaunch, list[tuple[float, float]]]:
    """Like `gpu_events`, by kernel and instruction."""
    return launches_in(recorded(call))


def recorded(call: Callable[[], Any]) -> jax.profiler.ProfileData:
    """A profile of `call`, which waits for the work that it starts."""
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
    """(start, length) in ns of the events on planes and lines whose names start with these."""
    events: dict[KernelLaunch, list[tuple[float, float]]] = defaultdict(list)
    with warnings.catch_warnings():
        # The first access to an event's stats creates a type, for which Python warns. Where
        # warnings are errors, jaxlib 0.11.2 ends the process there.
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
