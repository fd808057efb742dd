"""Peak rates of this GPU in this run: copies, reads and matrix products.

Each ceiling is taken in two ways, as an op's times are. In a burst, by a profile: beside `us`. In
a long loop, in which the card reaches its power limit: beside `call us`. A share of a ceiling holds
a time against one of the same way.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.bench.harness.timing import kernel_seconds, seconds

# Operations of a long loop at a time: what starts one, up to a millisecond, hides behind others.
AT_A_TIME = 32
ROW = 8192  # numbers of which a read makes one


def copied(size: int) -> tuple[Callable[[int], jax.Array], float]:
    """A copy on the device of `size` bfloat16 numbers, and the bytes that it reads and writes."""
    x = jax.random.normal(jax.random.key(0), (size,), jnp.bfloat16)
    copy = jax.jit(jnp.copy)
    return lambda i: copy(x), 2 * x.nbytes


def read(size: int) -> tuple[Callable[[int], jax.Array], float]:
    """The largest number of each row of ROW bfloat16 numbers, and the bytes that it reads."""
    rows = max(1, size // ROW)
    x = jax.random.normal(jax.random.key(0), (rows, min(size, ROW)), jnp.bfloat16)
    largest = jax.jit(lambda x: jnp.max(x, axis=1))
    return lambda i: largest(x), x.nbytes


def factors(n: int) -> tuple[jax.Array, jax.Array]:
    """Two random bfloat16 matrices [n, n]."""
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) / n**0.5 for i in (0, 1))
    return a, b


def multiplied(n: int) -> tuple[Callable[[int], jax.Array], float]:
    """An n^3 bfloat16 product of random matrices, float32 accumulation, and its FLOP."""
    a, b = factors(n)
    product = jax.jit(jnp.matmul)
    return lambda i: product(a, b), 2.0 * n**3


def copy_bandwidth(size: int = 2**29) -> float:
    """Bytes read plus written per second, by copies in a long loop."""
    call, nbytes = copied(size)

    def many():
        for i in range(AT_A_TIME):
            y = call(i)  # 32 GiB at most, if none makes room for the next
        return y

    return AT_A_TIME * nbytes / seconds(many)


def matmul_rate(n: int = 8192) -> float:
    """FLOP per second of products in a long loop."""
    a, b = factors(n)
    matmul = jax.jit(lambda a, b: jax.lax.fori_loop(0, AT_A_TIME, lambda _, a: a @ b, a))
    return AT_A_TIME * 2 * n**3 / seconds(lambda: matmul(a, b))


def burst_peaks(size: int = 2**29, n: int = 8192) -> dict[str, float]:
    """The same of kernels in a burst, and of reads alone, which pass the rate of copies."""

    def rate(call: Callable[[int], jax.Array], amount: float) -> float:
        return amount / (kernel_seconds(call) or seconds(lambda: call(0)))

    return {
        "copy_GB_s": rate(*copied(size)) / 1e9,
        "read_GB_s": rate(*read(size)) / 1e9,
        "matmul_TFLOP_s": rate(*multiplied(n)) / 1e12,
    }


def ceilings() -> dict[str, Any]:
    """Of long loops by name, and of bursts under "burst"."""
    return {
        "copy_GB_s": copy_bandwidth() / 1e9,
        "matmul_TFLOP_s": matmul_rate() / 1e12,
        "burst": burst_peaks(),
    }


def peak_fractions(row: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A row's GB/s and TFLOP/s, which are of a burst, as fractions of the bursts' ceilings.

    The share of its roof is the greater of the two, of the one that binds. Memory's ceiling is the
    better of copies and reads.
    """
    burst = facts["burst"]
    memory = row["GB/s"] / max(burst["copy_GB_s"], burst["read_GB_s"])
    matmul = row["TFLOP/s"] / burst["matmul_TFLOP_s"]
    binds = "memory" if memory > matmul else "matmul"
    share = f"{max(memory, matmul):.1%} {binds}"
    return {"of memory": memory, "of matmul": matmul, "% of roof": share}
