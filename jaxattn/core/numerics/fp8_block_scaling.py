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


def split_fp8(
    weights: Float[Array, "*B N K"],
) -> tuple[Float[Array, "*B 2*N K"], Float[Array, "*B 2*N/128 K/128"]]:
    """Splits 16-bit weights into FP8 rows of their first four bits, then FP8 rows of the rest.

    2 N must be 128, or N a multiple of 128. As bfloat16 has eight bits, numbers above an 896th of
    the largest in their 128 columns are exact, and the others are exact to 2**-17 of it.
    """
    *batch, rows, columns = weights.shape
    blocks = weights.astype(jnp.float32).reshape(*batch, rows, columns // BLOCK, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=(-3, -1), keepdims=True)
    # Powers of two, so that the numbers keep their bits.
    exponents = jnp.ceil(jnp.log2(jnp.where(largest == 0, 1, largest) / LARGEST))
    scales = jnp.exp2(exponents)
    scaled = (blocks / scales).reshape(weights.shape)
    first = scaled.astype(jnp.float8_e4m3fn)
    rest = (scaled - first.astype(jnp.float32)).astype(jnp.float8_e4m3fn)
    of_rows = jnp.broadcast_to(scales[..., 0], (*batch, 2 * rows // BLOCK, columns // BLOCK))
    return jnp.concatenate([first, rest], axis=-2), of_rows


def interleave_columns(numbers: Float[Array, "*B N K"]) -> Float[Array, "*B N K"]:
    """Reorders columns for products of a few tokens: 0, 8, 1, 9, then 2, 10, 3, 11, ... of each 16.

    A thread of wgmma multiplies columns 2 t, 2 t + 1 and those 8 further, which are then 4
    consecutive bytes.
    """
    return _turned(numbers, (2, 4, 2), (1, 2, 0))


def deinterleave_columns(numbers: Float[Array, "*B N K"]) -> Float[Array, "*B N K"]:
    """Inverts `interleave_columns`."""
    return _turned(numbers, (4, 2, 2), (2, 0, 1))


def _turned(
    numbers: Float[Array, "*B N K"], sides: tuple[int, ...], axes: tuple[int, ...]
) -> Float[Array, "*B N K"]:
    *batch, columns = numbers.shape
    groups = numbers.reshape(*batch, columns // 16, *sides)
    first = groups.ndim - len(sides)
    order = (*range(first), *(first + axis for axis in axes))
    return groups.transpose(order).reshape(numbers.shape)


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
