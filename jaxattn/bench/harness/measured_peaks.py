"""Peak rates of this GPU in this run: copies, reads and matrix products.

Each peak rate is measured in two ways, like an op's times. A profiled burst is compared with `us`.
A long loop, in which the GPU reaches its power limit, is compared with `call us`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.bench.harness.timing import kernel_seconds, seconds

# Operations in flight at a time: an operation's launch, up to a millisecond, overlaps with others.
AT_A_TIME = 32
ROW = 8192  # numbers that a read reduces to one


def copied(size: int) -> tuple[Callable[[int], jax.Array], float]:
    """A copy on the device of `size` bfloat16 numbers, and the bytes that it reads and writes."""
    x = jax.random.normal(jax.random.key(0), (size,), jnp.bfloat16)
    copy = jax.jit(jnp.copy)
    return lambda i: copy(x), 2 * x.nbytes


def read(size: int) -> tuple[Callable[[int], jax.Array], float]:
    """A maximum over each row of ROW bfloat16 numbers, and the bytes that it reads."""
    rows = max(1, size // ROW)
    x = jax.random.normal(jax.random.key(0), (rows, min(size, ROW)), jnp.bfloat16)
    largest = jax.jit(lambda x: jnp.max(x, axis=1))
    return lambda i: largest(x), x.nbytes


def factors(n: int) -> tuple[jax.Array, jax.Array]:
    """Two random bfloat16 matrices [n, n]."""
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) / n**0.5 for i in (0, 1))
    return a, b


def multiplied(n: int) -> tuple[Callable[[int], jax.Array], float]:
    """An n^3 bfloat16 product of random matrices, accumulated in float32, and its FLOP."""
    a, b = factors(n)
    product = jax.jit(jnp.matmul)
    return lambda i: product(a, b), 2.0 * n**3


def copy_bandwidth(size: int = 2**29) -> float:
    """Bytes read plus written per second by copies in a long loop."""
    call, nbytes = copied(size)

    def many():
        for i in range(AT_A_TIME):
            y = call(i)  # at most 32 GiB, if no result is freed before the next
        return y

    return AT_A_TIME * nbytes / seconds(many)


def matmul_rate(n: int = 8192) -> float:
    """FLOP per second of products in a long loop."""
    a, b = factors(n)
    matmul = jax.jit(lambda a, b: jax.lax.fori_loop(0, AT_A_TIME, lambda _, a: a @ b, a))
    return AT_A_TIME * 2 * n**3 / seconds(lambda: matmul(a, b))


def burst_peaks(size: int = 2**29, n: int = 8192) -> dict[str, float]:
    """Peak rates in a burst: copies, products, and pure reads, which are faster than copies."""

    def rate(call: Callable[[int], jax.Array], amount: float) -> float:
        return amount / (kernel_seconds(call) or seconds(lambda: call(0)))

    return {
        "copy_GB_s": rate(*copied(size)) / 1e9,
        "read_GB_s": rate(*read(size)) / 1e9,
        "matmul_TFLOP_s": rate(*multiplied(n)) / 1e12,
    }


def ceilings() -> dict[str, Any]:
    """Peak rates of long loops by name, and those of bursts under "burst"."""
    return {
        "copy_GB_s": copy_bandwidth() / 1e9,
        "matmul_TFLOP_s": matmul_rate() / 1e12,
        "burst": burst_peaks(),
    }


def peak_fractions(row: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A row's GB/s and TFLOP/s, measured in a burst, as fractions of the burst peaks.

    `% of roof` is the greater of both fractions, with the name of the resource that binds. The peak
    rate of memory is the better of copies and reads.
    """
    burst = facts["burst"]
    memory = row["GB/s"] / max(burst["copy_GB_s"], burst["read_GB_s"])
    matmul = row["TFLOP/s"] / burst["matmul_TFLOP_s"]
    binds = "memory" if memory > matmul else "matmul"
    share = f"{max(memory, matmul):.1%} {binds}"
    return {"of memory": memory, "of matmul": matmul, "% of roof": share}
