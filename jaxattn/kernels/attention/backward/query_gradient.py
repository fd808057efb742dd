"""The dQ of a step: each warpgroup's parts of dS^T K, and their sum in global memory."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.backward.dq_semaphore import await_turn, pass_turn
from jaxattn.kernels.attention.backward.smem import BackwardSmem
from jaxattn.kernels.attention.backward.tile_config import (
    DIMS,
    ROWS,
    WARPGROUPS,
    BackwardTileConfig,
)
from jaxattn.kernels.attention.backward.tile_scheduler import BackwardTileScheduler, KeyTile
from jaxattn.kernels.hopper.instructions import fence_proxy_async


def again(number: jax.Array) -> jax.Array:
    """Returns 0, without the compiler knowing that it is the same in each step. The compiler would
    otherwise compute the wgmma descriptors before the loop and fill the registers with them."""
    return lax.shift_right_logical(number, jnp.int32(30))


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryGradient:
    """A warpgroup's contribution to dQ, which `QueryGradientStorer` takes to global memory."""

    config: BackwardTileConfig
    memory: BackwardSmem
    wg: int
    interpret: bool

    def parts(self, i: jax.Array) -> list[tuple[int, jax.Array | None]]:
        """Returns this warpgroup's parts of step i's dQ, each with a predicate; None means
        always."""
        count = self.config.parts
        even = count // WARPGROUPS
        mine: list[tuple[int, jax.Array | None]]
        mine = [(self.wg * even + j, None) for j in range(even)]
        if count % WARPGROUPS:  # the warpgroups alternate on the odd part
            mine.append((count - 1, lax.rem(i, jnp.int32(WARPGROUPS)) == self.wg))
        return mine

    def multiply(self, acc: Any, number: jax.Array, part: int) -> None:
        """Issues a part of dQ: dS^T K."""
        rows, piece = divmod(part, self.config.pieces(self.config.dims))
        same = again(number)
        scores = self.memory.scores.at[same, :, pl.ds(rows * ROWS, ROWS)]
        plgpu.wgmma(acc, scores.transpose((1, 0)), self.memory.keys.at[same, piece])

    def add(self, part: int, x: jax.Array) -> None:
        """Hands over a part of a step's dQ. The caller has waited for its place in shared
        memory."""
        at = place_in_smem(self.config, part)
        self.memory.query_grads.at[at][...] = x
        fence_proxy_async(interpret=self.interpret)
        plgpu.barrier_arrive(self.memory.query_grads_written.at[at])

    def await_room(self, number: jax.Array) -> None:
        """Waits until the previous step's parts have left the places that this warpgroup uses.

        Both warpgroups wait for a place that they use in turns, before either hands over the step's
        first part. A thread must observe each completion of a barrier before the next one.
        """
        places = {place_in_smem(self.config, part) for part, _ in self.parts(number)}

        @pl.when(number > 0)
        def _() -> None:
            for at in sorted(places):
                plgpu.barrier_wait(self.memory.query_grads_read.at[at])

    def add_others(self, number: jax.Array, i: jax.Array) -> None:
        """Multiplies and hands over this warpgroup's parts of step i's dQ except the first."""
        (first, _), *others = self.parts(i)

        def add(part: int) -> None:
            self.add(part, self.product(number, part))

        for part, there in others:
            at = place_in_smem(self.config, part)
            if at == place_in_smem(self.config, first):
                plgpu.barrier_wait(self.memory.query_grads_read.at[at])
            pl.when(True if there is None else there)(functools.partial(add, part))
        if others:
            plgpu.barrier_arrive(self.memory.scores_read.at[0])

    def product(self, number: jax.Array, part: int) -> jax.Array:
        def product(acc: Any) -> jax.Array:
            self.multiply(acc, number, part)
            return plgpu.wgmma_accumulator_load(acc)

        return pl.run_scoped(product, plgpu.ACC((ROWS, DIMS), jnp.float32))


def place_in_smem(config: BackwardTileConfig, part: int) -> int:
    """The index of the shared-memory place from which a part of dQ is stored."""
    return next(at for at, parts in enumerate(config.places) if part in parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryGradientStorer:
    """Adds parts of dQ to global memory on the producer warpgroup, each key tile in its turn.

    Attributes:
        dq: float32 [B, whole steps, H, D].
        turns: int32 [B, H, M, parts], the tile whose turn it is to add to a part of dq.
        from_zero: Whether all queries see key 0. If so, the first tile stores its part and the
            other tiles add to it; otherwise all tiles add to zeros.
    """

    config: BackwardTileConfig
    tiles: BackwardTileScheduler
    memory: BackwardSmem
    dq: Any
    turns: Any
    from_zero: bool
    interpret: bool

    def begin(self, tile: KeyTile, i: jax.Array) -> None:
        """Begins to add the first part of each place, after the tiles of earlier keys have added
        theirs."""
        for parts in self.config.places:
            self.add(tile, i, parts[0])

    def end(self, tile: KeyTile, i: jax.Array) -> None:
        """Adds the other parts, and passes the turns to the next tile when all are in global
        memory."""
        places = self.config.places
        self.free(places)
        for n in range(1, max(map(len, places))):
            for parts in places:
                self.add(tile, i, parts[n])
            self.free(places)
        plgpu.wait_smem_to_gmem(0)
        if not self.interpret:
            for parts in places:
                for part in parts:
                    pass_turn(self.turn_of(tile, i, part))

    def add(self, tile: KeyTile, i: jax.Array, part: int) -> None:
        at, config = place_in_smem(self.config, part), self.config
        stage = self.memory.query_grads.at[at]
        head, m = self.tiles.step(tile, i)
        rows, piece = divmod(part, config.pieces(config.dims))
        queries = pl.ds(pl.multiple_of(m * config.queries + rows * ROWS, ROWS), ROWS)
        place = self.dq.at[tile.row, queries, head, pl.ds(piece * DIMS, DIMS)]
        stores = tile.number == 0 if self.from_zero else None
        plgpu.barrier_wait(self.memory.query_grads_written.at[at])
        if self.interpret:  # the interpreter runs one CTA, which has all turns
            before = place[...]
            place[...] = stage[...] + (before if stores is None else jnp.where(stores, 0, before))
            plgpu.commit_smem()
            return
        await_turn(self.turn_of(tile, i, part), tile.number)
        add = functools.partial(plgpu.copy_smem_to_gmem, stage, place, reduction_op="add")
        if stores is None:
            add()
        else:
            pl.when(stores)(lambda: plgpu.copy_smem_to_gmem(stage, place))
            pl.when(jnp.logical_not(stores))(add)

    def free(self, places: tuple[tuple[int, ...], ...]) -> None:
        """Frees the places when TMA has read their parts."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for parts in places:
            at = place_in_smem(self.config, parts[0])
            plgpu.barrier_arrive(self.memory.query_grads_read.at[at])

    def turn_of(self, tile: KeyTile, i: jax.Array, part: int) -> Any:
        """The semaphore word of a part of step i's dQ."""
        head, m = self.tiles.step(tile, i)
        return self.turns.at[tile.row, head, m, pl.ds(part, 1)]
