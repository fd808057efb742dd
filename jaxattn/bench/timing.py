"""Times on one device: medians of repeated calls, and the two ceilings of the same run."""

import glob
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ROTATE_BYTES = 256 * 2**20  # inputs are rotated through this much, several times the L2 of 60 MB


def device_facts() -> dict[str, str]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "runtime": device.client.platform_version.splitlines()[0],
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def seconds(call: Callable[[], Any], *, repeats: int = 7, warmup: float = 0.3) -> float:
    """Median wall time of `call`, which returns arrays.

    Left out are the first call, which compiles, and `warmup` seconds of calls: an idle GPU takes
    that long to reach its clocks.
    """
    jax.block_until_ready(call())
    begin = time.perf_counter()
    while time.perf_counter() - begin < warmup:
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def per_call(op: Callable[[Any, Any], Any], carry: Any, *, calls: int = 16) -> float:
    """Seconds a call, of `calls` calls one after another in one executable.

    Args:
        op: (carry, call number) -> carry. Every call has to depend on the one before it, or XLA
            drops or merges calls.
        carry: arrays; donated, so that in-place ops stay in place.
    """

    # Four calls to an iteration hide the loop's own work; each is compiled, which takes seconds.
    def run(carry):
        numbers = jnp.arange(calls, dtype=jnp.int32)
        return jax.lax.scan(lambda c, i: (op(c, i), None), carry, numbers, unroll=4)[0]

    compiled = jax.jit(run, donate_argnums=0)
    held = [carry]

    def call():
        held[0] = compiled(held[0])
        return held[0]

    return seconds(call) / calls


def profile(call: Callable[[], Any]) -> tuple[dict[str, float], float]:
    """(GPU seconds by kernel name, seconds from the first kernel to the end of the last)."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        file = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)[0]
        data = jax.profiler.ProfileData.from_serialized_xspace(Path(file).read_bytes())
    events = [
        event
        for plane in data.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        spent[event.name] += event.duration_ns * 1e-9
    if not events:
        return spent, 0.0
    first, last = min(e.start_ns for e in events), max(e.start_ns + e.duration_ns for e in events)
    return spent, (last - first) * 1e-9


# Operations of a ceiling at a time: what starts one, up to a millisecond, hides behind the others.
AT_A_TIME = 32


def copy_bandwidth(size: int = 2**29) -> float:
    """Bytes read plus written per second, by device-to-device copies of `size` bfloat16 numbers."""
    x = jnp.ones((size,), jnp.bfloat16)
    copy = jax.jit(jnp.copy)

    def call():
        for _ in range(AT_A_TIME):
            y = copy(x)  # 32 GiB at most, if none makes room for the next
        return y

    return AT_A_TIME * 2 * x.nbytes / seconds(call)


def matmul_rate(n: int = 8192) -> float:
    """FLOP per second of n^3 bfloat16 products of random matrices, float32 accumulation."""
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) / n**0.5 for i in (0, 1))
    matmul = jax.jit(lambda a, b: jax.lax.fori_loop(0, AT_A_TIME, lambda _, a: a @ b, a))
    return AT_A_TIME * 2 * n**3 / seconds(lambda: matmul(a, b))


def ceilings() -> dict[str, float]:
    """What this GPU reaches in this run: copying, and multiplying matrices."""
    return {"copy_GB_s": copy_bandwidth() / 1e9, "matmul_TFLOP_s": matmul_rate() / 1e12}


def of_ceilings(row: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A row's GB/s and TFLOP/s as fractions of the run's ceilings, and the share of its roof: the
    greater of the two is the one that binds."""
    copy = row["GB/s"] / facts["copy_GB_s"]
    matmul = row["TFLOP/s"] / facts["matmul_TFLOP_s"]
    binds = "copy" if copy > matmul else "matmul"
    return {"of copy": copy, "of matmul": matmul, "% of roof": f"{max(copy, matmul):.1%} {binds}"}
