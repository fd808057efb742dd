"""dQ of a step: each warpgroup's parts of dS^T K, and their way into one sum in global memory."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.backward.smem import (
    DIMS,
    ROWS,
    WARPGROUPS,
    BackwardSmem,
    BackwardTileConfig,
)
from jaxattn.kernels.attention.backward.tile_scheduler import BackwardTileScheduler, KeyTile
from jaxattn.kernels.attention.backward.turns import await_turn, look_at_turn, pass_turn
from jaxattn.kernels.hopper.device import fence_proxy_async, warpgroup_barrier


def again(number: jax.Array) -> jax.Array:
    """0, of which the compiler does not know that it is the same in each step. What wgmma wants to
    know of an operand would else be made before the loop, and fill the registers."""
    return lax.shift_right_logical(number, jnp.int32(30))


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryGradient:
    """What a warpgroup adds to dQ.

    Attributes:
        dq: float32 [B, whole steps, H, D]. Where queries see key 0 the first tile's part is stored
            there, and the others' are added; else all are added to zeros.
        turns: int32 [B, H, M, parts], whose turn it is to add to a part of dq.
        from_zero: whether all queries see key 0.
    """

    config: BackwardTileConfig
    tiles: BackwardTileScheduler
    memory: BackwardSmem
    dq: Any
    turns: Any
    from_zero: bool
    wg: int
    interpret: bool

    def parts(self, i: jax.Array) -> list[tuple[int, jax.Array | None]]:
        """This warpgroup's parts of step i's dQ, and whether it has them; None is always."""
        count = self.config.parts
        even = count // WARPGROUPS
        mine: list[tuple[int, jax.Array | None]]
        mine = [(self.wg * even + j, None) for j in range(even)]
        if count % WARPGROUPS:  # the odd one in turns
            mine.append((count - 1, lax.rem(i, jnp.int32(WARPGROUPS)) == self.wg))
        return mine

    def each_part(self, i: jax.Array, do: Any) -> None:
        """do(part) for each that this warpgroup has of step i."""
        for part, there in self.parts(i):
            if there is None:
                do(part)
            else:
                pl.when(there)(functools.partial(do, part))

    def multiply(self, acc: Any, number: jax.Array, part: int) -> None:
        """A part of dQ: dS^T K."""
        rows, piece = divmod(part, self.config.pieces(self.config.dims))
        same = again(number)
        scores = self.memory.scores.at[same, :, pl.ds(rows * ROWS, ROWS)]
        plgpu.wgmma(acc, scores.transpose((1, 0)), self.memory.keys.at[same, piece])

    def turn_of(self, tile: KeyTile, i: jax.Array, part: int) -> Any:
        """The word that says whose turn it is to add to a part of step i's dQ."""
        head, m = self.tiles.step(tile, i)
        return self.turns.at[tile.row, head, m, pl.ds(part, 1)]

    def look(self, tile: KeyTile, i: jax.Array) -> list[jax.Array]:
        """Of this warpgroup's parts of step i's dQ."""
        return [
            look_at_turn(self.turn_of(tile, i, part), tile.number, interpret=self.interpret)
            for part, _ in self.parts(i)
        ]

    def add(self, tile: KeyTile, i: jax.Array, part: int, x: jax.Array, seen: jax.Array) -> None:
        """Adds a part of step i's dQ to global memory, once the tiles of keys before have.

        Args:
            seen: of `look`.
        """
        head, m = self.tiles.step(tile, i)
        rows, piece = divmod(part, self.config.pieces(self.config.dims))
        at = pl.ds(pl.multiple_of(m * self.config.queries + rows * ROWS, ROWS), ROWS)
        place = self.dq.at[tile.row, at, head, pl.ds(piece * DIMS, DIMS)]
        stores = tile.number == 0 if self.from_zero else None
        if self.interpret:
            before = place[...]
            place[...] = x + (before if stores is None else jnp.where(stores, 0, before))
            return
        stage = self.memory.query_grads.at[self.wg]
        first = part == self.parts(i)[0][0]
        plgpu.wait_smem_to_gmem(0, wait_read_only=not first)
        stage[...] = x
        fence_proxy_async(interpret=False)
        warpgroup_barrier(interpret=False)
        if first:
            self.end_turns(tile, i)
        await_turn(self.turn_of(tile, i, part), tile.number, seen)
        add = functools.partial(plgpu.copy_smem_to_gmem, stage, place, reduction_op="add")
        if stores is None:
            add()
        else:
            pl.when(stores)(lambda: plgpu.copy_smem_to_gmem(stage, place))
            pl.when(jnp.logical_not(stores))(add)

    def end_turns(self, tile: KeyTile, i: jax.Array) -> None:
        """What was added in the step before i is in global memory; the next tile may add there."""

        def end(part: int) -> None:
            pass_turn(self.turn_of(tile, i - 1, part))

        pl.when(i > 0)(lambda: self.each_part(i - 1, end))

    def add_others(
        self, tile: KeyTile, number: jax.Array, i: jax.Array, turns: list[jax.Array]
    ) -> None:
        """This warpgroup's parts of dQ but for the first."""
        others = self.parts(i)[1:]

        def add(part: int, turn: jax.Array) -> None:
            self.add(tile, i, part, self.product(number, part), turn)

        for (part, there), turn in zip(others, turns, strict=True):
            pl.when(True if there is None else there)(functools.partial(add, part, turn))
        if others:
            plgpu.barrier_arrive(self.memory.scores_read.at[0])

    def product(self, number: jax.Array, part: int) -> jax.Array:
        def product(acc: Any) -> jax.Array:
            self.multiply(acc, number, part)
            return plgpu.wgmma_accumulator_load(acc)

        return pl.run_scoped(product, plgpu.ACC((ROWS, DIMS), jnp.float32))
