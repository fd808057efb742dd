"""The state update of a chunk: state in registers, and products with it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.numerics.matmul import ADDED_TO, STATE_TO, float16_scale
from jaxattn.kernels.gdn.chunk.tiles import (
    BY_COLUMN,
    CHUNK,
    DECAY,
    TILE,
    iota,
    over_columns,
    over_rows,
    zero_tile,
)
from jaxattn.kernels.gdn.chunk.wgmma_accumulator import WgmmaAccumulator
from jaxattn.kernels.hopper.store.unoptimized_store import store


def first_half(block: Any, halves: int) -> tuple[Any, Any]:
    """Returns the state of a CTA, and the first of its halves there."""
    index = block * halves
    return lax.div(index, jnp.int32(2)), lax.rem(index, jnp.int32(2))


def state_at(ref: Any, index: tuple[Any, ...], part: Any, half: int) -> Any:
    """Returns a warpgroup's rows of the state at `index`, half of their columns."""
    return ref.at[(*index, pl.ds(part * 64, 64), pl.ds(64 * half, 64))]


def load_state(ref: Any, index: tuple[Any, ...], part: Any) -> tuple[jax.Array, ...]:
    return tuple(
        plgpu.load(state_at(ref, index, part, half), layout=TILE, optimized=False).astype(
            jnp.float32
        )
        for half in range(2)
    )


def first_state(ref: Any, layer: Any, slot: Any, head: Any, part: Any) -> tuple[jax.Array, ...]:
    """Returns the state in a slot, or zeros for -1."""
    if ref.shape[1] == 0:
        return zero_tile(), zero_tile()
    return lax.cond(
        slot >= 0,
        lambda: load_state(ref, (layer, slot, head), part),
        lambda: (zero_tile(), zero_tile()),
    )


def store_state(
    state: tuple[jax.Array, ...], ref: Any, index: tuple[Any, ...], part: Any, *, interpret: bool
) -> None:
    for half in range(2):
        stored = state[half].astype(ref.dtype)
        store(state_at(ref, index, part, half), stored, interpret=interpret)


class ScaledOperand(NamedTuple):
    """Numbers rounded to be an operand. Rows that exceed float16's range are first divided by a
    power of two, and products with them are multiplied by it.

    Attributes:
        tiles: [64, 64] each, in the operands' dtype.
        by, back: float32 [64], factors of each row; None with other dtypes.
    """

    tiles: tuple[jax.Array, ...]
    by: jax.Array | None
    back: jax.Array | None

    @classmethod
    def of(cls, tiles: tuple[jax.Array, ...], dtype: Any, to: int) -> "ScaledOperand":
        by = back = None
        if jnp.dtype(dtype) == jnp.float16:
            tops = [jnp.max(jnp.abs(tile), axis=1) for tile in tiles]
            by, back = float16_scale(functools.reduce(jnp.maximum, tops), to)
        return cls(tuple(_rows_times(by, tile).astype(dtype) for tile in tiles), by, back)

    def divided(self, x: jax.Array) -> jax.Array:
        """Returns x divided like these rows, to be added to products with them."""
        return _rows_times(self.by, x)

    def widened(self, product: jax.Array) -> jax.Array:
        """Returns a product with these rows, as if they had not been divided."""
        return _rows_times(self.back, product)


def _rows_times(factor: jax.Array | None, tile: jax.Array) -> jax.Array:
    return tile if factor is None else over_rows(factor) * tile


class ChunkStateUpdate:
    """The work of both passes on a chunk, for a warpgroup's half of the state.

    With decays per channel there are two arrays of keys: times -exp(G) where they read the state,
    and times exp(G_last - G) where they are written to it. Queries are multiplied by exp(G). Then
    two vectors are left, the halves of exp(G_last).
    """

    def __init__(
        self, k_smem: Any, v_smem: Any, x_smem: Any, vectors: Any, dtype: Any, written: Any = None
    ):
        self.k, self.v, self.x, self.vectors = k_smem, v_smem, x_smem, vectors
        self.dtype, self.channels = dtype, written is not None
        self.written = written if self.channels else k_smem

    def vector(self, row: int) -> jax.Array:
        values = plgpu.load(self.vectors.at[row], layout=BY_COLUMN, optimized=False)
        return over_columns(values)

    def clear_tail(self, left: Any, wg: Any, halves: int, cleared: Any) -> None:
        """Zeroes keys and values past the end of the run, which may be NaN, and 0 * NaN is NaN. A
        CTA's `halves` warpgroups clear the keys together, and each its values.

        Only the last chunk of a run has such tokens. `cleared` completes once for each such run,
        and every warpgroup waits for each completion: no warpgroup can be two ahead of another.
        """

        @pl.when(left < CHUNK)
        def _():
            inside = iota((CHUNK, CHUNK), 0) < left
            # Keys arranged by chunk are 0 there.
            of_keys = () if self.channels else (wg,) if halves == 2 else (0, 1)
            keys = [self.k.at[half] for half in of_keys]
            for rows in (*keys, self.v):
                kept = plgpu.load(rows, layout=TILE)
                rows[...] = jnp.where(inside, kept, jnp.zeros((), self.dtype))
            plgpu.commit_smem()
            plgpu.barrier_arrive(cleared)
            plgpu.barrier_wait(cleared)

    def rounded(self, state: tuple[jax.Array, ...]) -> ScaledOperand:
        return ScaledOperand.of(state, self.dtype, STATE_TO)

    def times_transposed(self, acc: WgmmaAccumulator, state: ScaledOperand, rows: Any) -> None:
        """Issues acc += state rows^T, for keys or queries [2, 64, 64]."""
        for half in range(2):
            acc.add(state.tiles[half], rows.at[half].transpose((1, 0)))

    def values(self) -> jax.Array:
        """Returns V^T."""
        return plgpu.load(self.v.transpose((1, 0)), layout=TILE)

    def factor(self, row: int) -> jax.Array | None:
        """Returns a vector that multiplies a product; None if the product's operand already
        contains it."""
        return None if self.channels else self.vector(row)

    def residual(self, read: jax.Array | None, seen: jax.Array, values: jax.Array) -> ScaledOperand:
        """Returns W^T = V^T + read * (S K^T)."""
        w = values.astype(jnp.float32) + times(read, seen)
        return ScaledOperand.of((w,), self.dtype, ADDED_TO)

    def decayed(self, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        if self.channels:
            return tuple(self.vector(half) * columns for half, columns in enumerate(state))
        decay = self.vectors[DECAY, 0]
        return tuple(decay * half for half in state)

    def write(self, accs: list[WgmmaAccumulator], u: jax.Array, weight: jax.Array | None) -> None:
        """Issues accs += (write * U^T) K."""
        weighted = times(weight, u).astype(self.dtype)
        for half in range(2):
            accs[half].add(weighted, self.written.at[half])


def times(factor: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if factor is None else factor * x
