"""Layouts of FP8 weights for the kernels: halves of 16-bit weights, and the order of columns."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxattn.core.numerics.fp8_block_scaling import BLOCK, LARGEST


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
    return _transpose_groups(numbers, (2, 4, 2), (1, 2, 0))


def deinterleave_columns(numbers: Float[Array, "*B N K"]) -> Float[Array, "*B N K"]:
    """Inverts `interleave_columns`."""
    return _transpose_groups(numbers, (4, 2, 2), (2, 0, 1))


def _transpose_groups(
    numbers: Float[Array, "*B N K"], sides: tuple[int, ...], axes: tuple[int, ...]
) -> Float[Array, "*B N K"]:
    *batch, columns = numbers.shape
    groups = numbers.reshape(*batch, columns // 16, *sides)
    first = groups.ndim - len(sides)
    order = (*range(first), *(first + axis for axis in axes))
    return groups.transpose(order).reshape(numbers.shape)
