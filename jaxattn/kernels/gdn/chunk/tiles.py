"""Tile sizes, scratch, copies and broadcasts of the chunked gated delta rule's kernels."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.instructions import swizzled

DIM = 128  # Dk and Dv
CHUNK = 64
# Rows of the vectors: -exp(G) |k|^-1, scale exp(G) |q|^-1, exp(G_last - G) |k|^-1, and exp(G_last)
# in every place. Without l2norm the inverse lengths are 1.
READ, OUT, WRITE, DECAY = range(4)
VECTORS = 4
# For the backward pass, these follow: beta, the running sum of the log2 decays, and log2 of scale
# |q|^-1 and |k|^-1. With decays per channel, beta follows the two halves of exp(G_last).
BETA, SUM, LOG_Q, LOG_K = range(VECTORS, VECTORS + 4)
BACKWARD_VECTORS = VECTORS + 4
CHANNEL_BETA = 2

# X and P are lower triangular and stored as [96, 32], a quarter less to write and read. Columns 0
# to 31 of all rows come first, then columns 32 to 63 of rows 32 to 63.
TRIANGLE = (96, 32)

TILE = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = TILE.reduce(1), TILE.reduce(0)


def compiler_params() -> Any:
    """Returns the parameters of all kernels here, in which only `commit_smem` and waits order
    stores to shared memory. A warpgroup commits its stores before other threads, wgmma or TMA read
    them. At least one such barrier is between a read and the next write of the same place. Data
    that only loads of another warpgroup read needs only the arrival at an mbarrier."""
    return plgpu.CompilerParams(
        approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
    )


def token_tiles(
    leading: tuple[int, ...], dtype: Any, *, interpret: bool, plain: bool = False
) -> Any:
    """Returns scratch [*leading, 64 tokens, 64] for rows that start at any token.

    A copy to `swizzled` tiles of 8 rows must start at a multiple of 8 rows in global memory. TMA
    can write the same bytes, seen without tiles, from any row. The kernel therefore gets two views
    (copied, operand), and with `plain` a third without the swizzle, for a few rows of an end. The
    interpreter has no bytes to share: all views are one array there.
    """
    shape = (*leading, CHUNK, 64)
    if interpret:
        return plgpu.SMEM(shape, dtype)
    rows = (plgpu.SwizzleTransform(128),)  # type: ignore[abstract]
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=rows),
        plgpu.SMEM(shape, dtype, transforms=swizzled(dtype)),
        *([plgpu.SMEM(shape, dtype)] if plain else []),
    )


def both_views(ref: Any, *, interpret: bool) -> tuple[Any, Any]:
    """The (copied, operand) views of a `token_tiles` scratch."""
    return (ref, ref) if interpret else ref


def copy_rows(source: Any, destination: Any, barrier: Any, first: Any = 0, halves: int = 2) -> None:
    """Copies halves, from the first, of [64, 128] rows from any token, into [halves, 64, 64]."""
    for half in range(halves):
        columns = source.at[:, pl.ds(64 * (first + half), 64)]
        plgpu.copy_gmem_to_smem(columns, destination.at[half], barrier)


def copy_vectors(source: Any, destination: Any, barrier: Any) -> None:
    """Copies the vectors of a chunk, as many as fit: those of the backward pass follow the
    others."""
    plgpu.copy_gmem_to_smem(source.at[pl.ds(0, destination.shape[0])], destination, barrier)


def triangles(stages: int, dtype: Any) -> Any:
    """Returns scratch for lower triangular matrices: columns 0 to 31 and 32 to 63 of all rows."""
    return plgpu.SMEM((stages, 2, CHUNK, 32), dtype, transforms=swizzled(dtype, 64))


def clear_triangles(smem: Any) -> None:
    """Zeroes the part that `copy_triangle` does not write."""
    for stage in range(smem.shape[0]):
        zeros = plgpu.layout_cast(jnp.zeros((CHUNK, 32), smem.dtype), TILE)
        smem.at[stage, 1][...] = zeros


def copy_triangle(source: Any, destination: Any, barrier: Any) -> None:
    plgpu.copy_gmem_to_smem(source.at[pl.ds(0, CHUNK)], destination.at[0], barrier)
    lower = destination.at[1, pl.ds(32, 32)]
    plgpu.copy_gmem_to_smem(source.at[pl.ds(CHUNK, 32)], lower, barrier)


def iota(shape: tuple[int, int], dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=TILE)


def zero_tile(dtype: Any = jnp.float32) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((CHUNK, CHUNK), dtype), TILE)


def over_rows(vector: jax.Array) -> jax.Array:
    """Broadcasts [64] by row to [64, 64]."""
    return lax.broadcast_in_dim(vector, (CHUNK, CHUNK), [0])


def over_columns(vector: jax.Array) -> jax.Array:
    """Broadcasts [n] by column to [64, n]."""
    return lax.broadcast_in_dim(vector, (CHUNK, *vector.shape), [1])
