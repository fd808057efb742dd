"""FP8 matrices with a scale for each block of 128 x 128 numbers, as DeepSeek-V3 publishes them.

A weight is its number times its block's scale. Blocks at the edges may be smaller: a matrix [N, K]
has scales [ceil(N / 128), ceil(K / 128)].
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

BLOCK = 128
LARGEST = 448.0  # of float8_e4m3fn


def block_counts(*sizes: int) -> tuple[int, ...]:
    """Returns the number of blocks that cover each size."""
    return tuple(-(-size // BLOCK) for size in sizes)


def dequantize(
    numbers: Float[Array, "*B N K"], scales: Float[Array, "*B n k"], dtype: DTypeLike
) -> Float[Array, "*B N K"]:
    """Returns the weights: products in float32, rounded once to `dtype`."""
    rows, columns = numbers.shape[-2:]
    wide = jnp.repeat(jnp.repeat(scales, BLOCK, axis=-2), BLOCK, axis=-1)
    return (numbers.astype(jnp.float32) * wide[..., :rows, :columns]).astype(dtype)


def quantize(
    weights: Float[Array, "*B N K"],
) -> tuple[Float[Array, "*B N K"], Float[Array, "*B n k"]]:
    """Returns (float8_e4m3fn numbers, float32 scales); a block's largest number becomes 448."""
    *batch, rows, columns = weights.shape
    counts = block_counts(rows, columns)
    edges = [(0, count * BLOCK - size) for count, size in zip(counts, (rows, columns), strict=True)]
    padded = jnp.pad(weights.astype(jnp.float32), [(0, 0)] * len(batch) + edges)
    blocks = padded.reshape(*batch, counts[0], BLOCK, counts[1], BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=(-3, -1)) / LARGEST
    # A block of zeros has scale 0, and any number times it is 0.
    divisors = jnp.where(scales == 0, 1, scales)[..., :, None, :, None]
    numbers = jnp.clip(blocks / divisors, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
    return numbers.reshape(padded.shape)[..., :rows, :columns], scales
