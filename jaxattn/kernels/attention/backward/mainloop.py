"""The warpgroups of `attention_backward` that compute: a tile of keys against all of its queries.

    S = K Q^T         P = exp2(S - lse)             dV += P dO
    dP = V dO^T       dS = P (dP - delta)           dK += dS Q         dQ += dS^T K

A warpgroup has the rows of 64 keys, and keeps its sums of dK and dV in registers; P and dS go from
registers to the tensor cores. Both warpgroups' dS meet in shared memory, where each takes its share
of the step's dQ from. That is added to global memory by TMA, a query's tiles of keys one after
another (turns.py). During a warpgroup's exponentials the tensor cores have the other's products.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.backward.producer import BackwardProducer, BackwardSources
from jaxattn.kernels.attention.backward.smem import (
    ROWS,
    WARPGROUPS,
    BackwardSmem,
    BackwardTileConfig,
)
from jaxattn.kernels.attention.backward.tile_scheduler import BackwardTileScheduler, KeyTile
from jaxattn.kernels.attention.backward.turns import await_turn, pass_turn
from jaxattn.kernels.attention.softmax import LOG2E
from jaxattn.kernels.attention.work_queue import WorkQueue

TILE = plgpu.Layout.WGMMA
COLUMN = TILE.reduce(0)


class KeyTileGrads(NamedTuple):
    """A warpgroup's sums: float32 [64, dims] of each piece of the keys, and [64, Dv]."""

    keys: tuple[jax.Array, ...]
    values: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreGradient:
    """Weights of scores, and what a gradient of the scores has to be multiplied with."""

    scale: float
    soft_cap: float | None

    def weights(self, products: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """(exp(score - lse), d score / d product without the scale or None for 1); the lse is in
        powers of 2."""
        lse = lax.broadcast_in_dim(lse, products.shape, [1])
        if self.soft_cap is None:
            return jnp.exp2(products * (self.scale * LOG2E) - lse), None
        # tanh, whose approximate instruction is off by 2**-11 of the cap.
        power = 2 * LOG2E * self.scale / self.soft_cap
        capped = 1.0 - 2.0 / (jnp.exp2(products * power) + 1.0)
        return jnp.exp2(capped * (self.soft_cap * LOG2E) - lse), 1.0 - capped * capped


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardOutputs:
    """Where the gradients go.

    Attributes:
        dq: float32 [B, whole steps, H, D], 0 before.
        dk, dv: [B, T, Hk, Dk] and [B, T, Hk, Dv].
        dk_rest: [B, T, Hk, P], of the last of the keys' dims, where dk lacks them.
        turns: int32 [B, H, M, 2], whose turn it is to add to dq.
    """

    dq: Any
    dk: Any
    dk_rest: Any
    dv: Any
    turns: Any

    def key_grads(self, config: BackwardTileConfig) -> list[tuple[Any, int]]:
        """The reference of each piece of dk, and its first dim there."""
        if len(config.pieces) == 1:
            return [(self.dk, 0)]
        if self.dk_rest is None:
            return [(self.dk, 0), (self.dk, config.pieces[0])]
        return [(self.dk, 0), (self.dk_rest, 0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardConsumer:
    """One warpgroup of those that compute."""

    config: BackwardTileConfig
    tiles: BackwardTileScheduler
    memory: BackwardSmem
    scores: ScoreGradient
    dtype: Any
    wg: jax.Array
    first: Any
    outputs: BackwardOutputs
    interpret: bool

    @property
    def rows(self) -> Any:
        """Of the tile's keys, this warpgroup's."""
        return pl.ds(0 if self.config.by_dims else self.wg * ROWS, ROWS)

    def dims(self, count: int) -> Any:
        """Of the dims of keys or values, those of this warpgroup's sums, `count` of them."""
        return pl.ds(self.wg * count if self.config.by_dims else 0, count)

    def zeros(self) -> KeyTileGrads:
        def some(dims: int) -> jax.Array:
            return plgpu.layout_cast(jnp.zeros((ROWS, dims), jnp.float32), TILE)

        return KeyTileGrads(tuple(map(some, self.config.key_grads)), some(self.config.value_grads))

    def multiply_keys(self, acc: Any, slot: jax.Array) -> None:
        for keys, queries in zip(self.memory.keys, self.memory.queries, strict=True):
            plgpu.wgmma(acc, keys.at[self.rows], queries.at[slot].transpose((1, 0)))

    def multiply_values(self, acc: Any, slot: jax.Array) -> None:
        outputs = self.memory.outputs.at[slot]
        plgpu.wgmma(acc, self.memory.values.at[self.rows], outputs.transpose((1, 0)))

    def weights(
        self, products: jax.Array, tile: KeyTile, m: jax.Array, slot: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """As `ScoreGradient.weights`, 0 where a query does not see a key."""
        lse = plgpu.load(self.memory.row_stats.at[slot, 0], layout=COLUMN)
        p, slope = self.scores.weights(products, lse)
        shape, config = p.shape, self.config

        def mask(p: jax.Array) -> jax.Array:
            mine = 0 if config.by_dims else self.wg * ROWS
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE)
            key += tile.number * config.keys + mine
            query = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
            seen = key <= query + m * config.queries
            if self.first is not None:
                some = pl.ds(pl.multiple_of(m * config.queries, config.queries), config.queries)
                place = self.first.at[tile.row, some]
                first = plgpu.load(place, layout=COLUMN, optimized=False)
                seen &= key >= lax.broadcast_in_dim(first, shape, [1])
            return jnp.where(seen, p, 0.0)

        p = lax.cond(self.tiles.masked(tile, m), mask, lambda p: p, p)
        return p, slope

    def gradient(
        self, p: jax.Array, slope: jax.Array | None, products: jax.Array, slot: jax.Array
    ) -> jax.Array:
        """dS of P and dP."""
        delta = plgpu.load(self.memory.row_stats.at[slot, 1], layout=COLUMN)
        grads = p * (products - lax.broadcast_in_dim(delta, p.shape, [1]))
        grads = grads if slope is None else grads * slope
        return grads.astype(self.dtype)

    def write_scores(self, grads: jax.Array, i: jax.Array) -> None:
        """dS to shared memory, where both warpgroups find the whole tile's."""
        memory = self.memory
        pl.when(i > 0)(lambda: plgpu.barrier_wait(memory.scores_read.at[0]))
        if self.config.by_dims:  # both have the same

            @pl.when(self.wg == 0)
            def _() -> None:
                memory.scores[...] = grads

        else:
            memory.scores[self.rows] = grads
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.scores_written.at[0])

    def each_share(self, do: Any) -> None:
        """do(warpgroup's number, a Python one) in this warpgroup."""
        for wg in range(WARPGROUPS):
            pl.when(self.wg == wg)(functools.partial(do, wg))

    def share(self, wg: int) -> tuple[Any, Any]:
        """The operands of a warpgroup's part of dQ: dS^T and K."""
        row, piece, begin, dims = self.config.query_grads(wg)
        scores = self.memory.scores.at[:, pl.ds(row, ROWS)].transpose((1, 0))
        return scores, self.memory.keys[piece].at[:, pl.ds(begin, dims)]

    def dq_of(self, tile: KeyTile, i: jax.Array, wg: int) -> tuple[Any, Any]:
        """Where a warpgroup's part of step i's dQ goes, and the word that says whose turn it is."""
        head, m = self.tiles.step(tile, i)
        row, piece, begin, dims = self.config.query_grads(wg)
        rows = pl.ds(pl.multiple_of(m * self.config.queries, ROWS) + row, ROWS)
        begin += sum(self.config.pieces[:piece])
        place = self.outputs.dq.at[tile.row, rows, head, pl.ds(begin, dims)]
        return place, self.outputs.turns.at[tile.row, head, m, pl.ds(wg, 1)]

    def add_query_grads(self, tile: KeyTile, i: jax.Array, wg: int, grads: jax.Array) -> None:
        """Adds its part of step i's dQ to global memory, once the tiles of keys before have."""
        place, turn = self.dq_of(tile, i, wg)
        if self.interpret:
            place[...] = place[...] + grads
            return
        self.end_of_turn(tile, i, wg)
        stage = self.memory.query_grads[wg]
        stage[...] = grads
        plgpu.commit_smem()
        await_turn(turn, tile.number, interpret=self.interpret)
        plgpu.copy_smem_to_gmem(stage, place, reduction_op="add")

    def end_of_turn(self, tile: KeyTile, i: jax.Array, wg: int) -> None:
        """What was added before step i has reached global memory; the next tile may add there."""

        @pl.when(i > 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0)
            turn = self.dq_of(tile, i - 1, wg)[1]
            pass_turn(turn, interpret=self.interpret)

    def step(self, tile: KeyTile, done: jax.Array, i: jax.Array, grads: KeyTileGrads) -> KeyTileGrads:
        memory, config = self.memory, self.config
        slot = lax.rem(done + i, jnp.int32(config.stages))
        _, m = self.tiles.step(tile, i)
        plgpu.barrier_wait(memory.queries_loaded.at[slot])
        values = self.dims(config.value_grads)

        def products(s_acc: Any, dp_acc: Any, dv_acc: Any, *dk_accs: Any) -> KeyTileGrads:
            self.multiply_keys(s_acc, slot)
            plgpu.barrier_wait(memory.outputs_loaded.at[slot])
            self.multiply_values(dp_acc, slot)
            p, slope = self.weights(plgpu.wgmma_accumulator_load(s_acc, wait_n=1), tile, m, slot)
            dv_acc[...] = grads.values
            plgpu.wgmma(dv_acc, p.astype(self.dtype), memory.outputs.at[slot, :, values])
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
            ds = self.gradient(p, slope, dp, slot)
            self.write_scores(ds, i)
            for acc, before, queries in zip(dk_accs, grads.keys, memory.queries, strict=True):
                acc[...] = before
                plgpu.wgmma(acc, ds, queries.at[slot, :, self.dims(before.shape[1])])
            dv = plgpu.wgmma_accumulator_load(dv_acc, wait_n=len(dk_accs))
            plgpu.barrier_arrive(memory.outputs_read.at[slot])
            dk = tuple(plgpu.wgmma_accumulator_load(acc) for acc in dk_accs)
            plgpu.barrier_arrive(memory.queries_read.at[slot])
            return KeyTileGrads(dk, dv)

        scores = plgpu.ACC((ROWS, config.queries), jnp.float32)
        sums = [plgpu.ACC(x.shape, jnp.float32) for x in (grads.values, *grads.keys)]
        grads = pl.run_scoped(products, scores, scores, *sums)
        plgpu.barrier_wait(memory.scores_written.at[0])
        self.each_share(functools.partial(self._query_grads, tile, i))
        return grads

    def _query_grads(self, tile: KeyTile, i: jax.Array, wg: int) -> None:
        def product(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, *self.share(wg))
            return plgpu.wgmma_accumulator_load(acc)

        dims = self.config.query_grads(wg)[-1]
        dq = pl.run_scoped(product, plgpu.ACC((ROWS, dims), jnp.float32))
        plgpu.barrier_arrive(self.memory.scores_read.at[0])
        self.add_query_grads(tile, i, wg, dq)

    def tile(self, tile: KeyTile, done: jax.Array) -> jax.Array:
        """All of a tile; `done` counts the steps."""
        memory, steps = self.memory, self.tiles.steps(tile)
        plgpu.barrier_wait(memory.tile_loaded.at[0])
        step = functools.partial(self.step, tile, done)
        grads = lax.fori_loop(0, steps, step, self.zeros())

        @pl.when(steps > 0)
        def _() -> None:
            plgpu.barrier_wait(memory.scores_read.at[0])  # and all keys

        if not self.interpret:
            self.each_share(functools.partial(self.end_of_turn, tile, steps))
        self.write(tile, grads)
        return done + steps

    def write(self, tile: KeyTile, grads: KeyTileGrads) -> None:
        """dK and dV, through the shared memory of the keys and values."""
        memory, config, outputs = self.memory, self.config, self.outputs
        scaled = tuple(x * self.scores.scale for x in grads.keys)
        stages = [keys.at[self.rows, self.dims(x.shape[1])] for keys, x in zip(memory.keys, scaled, strict=True)]
        stages.append(memory.values.at[self.rows, self.dims(config.value_grads)])
        for stage, x in zip(stages, (*scaled, grads.values), strict=True):
            stage[...] = x.astype(self.dtype)
        plgpu.commit_smem()
        mine = tile.number * config.keys + (0 if config.by_dims else self.wg * ROWS)
        stores = mine < outputs.dv.shape[1]
        if config.by_dims:  # half a tile's dims are no one piece of memory: one warpgroup stores all
            plgpu.barrier_arrive(memory.scores_written.at[0])
            plgpu.barrier_wait(memory.scores_written.at[0])
            stores &= self.wg == 0

        @pl.when(stores)
        def _() -> None:
            at = pl.ds(pl.multiple_of(mine, ROWS), ROWS)
            places = [*outputs.key_grads(config), (outputs.dv, 0)]
            for stage, (ref, begin) in zip((*memory.keys, memory.values), places, strict=True):
                place = ref.at[tile.row, at, tile.head, pl.ds(begin, stage.shape[1])]
                plgpu.copy_smem_to_gmem(stage.at[self.rows], place)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(memory.tile_read.at[0])


class InterpretedBackwardConsumer(BackwardConsumer):
    """JAX 0.11.2's interpreter has no wgmma with operands in registers, and no sums that go on."""

    def step(self, tile: KeyTile, done: jax.Array, i: jax.Array, grads: KeyTileGrads) -> KeyTileGrads:
        memory, config = self.memory, self.config
        slot = lax.rem(done + i, jnp.int32(config.stages))
        _, m = self.tiles.step(tile, i)
        plgpu.barrier_wait(memory.queries_loaded.at[slot])
        plgpu.barrier_wait(memory.outputs_loaded.at[slot])

        def product(multiply: Any) -> jax.Array:
            def run(acc: Any) -> jax.Array:
                multiply(acc, slot)
                return plgpu.wgmma_accumulator_load(acc)

            return pl.run_scoped(run, plgpu.ACC((ROWS, config.queries), jnp.float32))

        def times(left: jax.Array, right: Any) -> jax.Array:
            return jnp.dot(left.astype(jnp.float32), right[...].astype(jnp.float32))

        p, slope = self.weights(product(self.multiply_keys), tile, m, slot)
        ds = self.gradient(p, slope, product(self.multiply_values), slot)
        values = memory.outputs.at[slot, :, self.dims(config.value_grads)]
        dv = grads.values + times(p.astype(self.dtype), values)
        self.write_scores(ds, i)
        dk = tuple(
            before + times(ds, queries.at[slot, :, self.dims(before.shape[1])])
            for before, queries in zip(grads.keys, memory.queries, strict=True)
        )
        plgpu.commit_smem()  # they are read as wgmma does not, before TMA writes over them
        plgpu.barrier_arrive(memory.outputs_read.at[slot])
        plgpu.barrier_arrive(memory.queries_read.at[slot])
        plgpu.barrier_wait(memory.scores_written.at[0])
        self.each_share(functools.partial(self._query_grads, tile, i))
        return KeyTileGrads(dk, dv)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardCta:
    """What a block does with its references.

    Attributes:
        blocks, items: resident blocks, and tiles in all.
    """

    config: BackwardTileConfig
    tiles: BackwardTileScheduler
    scores: ScoreGradient
    dtype: Any
    blocks: int
    items: int
    interpret: bool

    def run(self, **refs: Any) -> None:
        """`refs` are those of the operands, of the outputs, and of `BackwardSmem`."""
        config, wg = self.config, lax.axis_index("wg")
        memory = BackwardSmem(**{name: refs.pop(name) for name in BackwardSmem._fields})
        outputs = BackwardOutputs(
            **{each.name: refs.pop(each.name) for each in dataclasses.fields(BackwardOutputs)}
        )
        ranges, drawn, first = (refs.pop(name) for name in ("ranges", "drawn", "first"))
        each = functools.partial(self.each_tile, ranges, drawn, memory)

        @pl.when(wg < WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(config.compute_registers, action="increase")
            kind = InterpretedBackwardConsumer if self.interpret else BackwardConsumer
            consumer = kind(
                config=config, tiles=self.tiles, memory=memory, scores=self.scores,
                dtype=self.dtype, wg=wg, first=first, outputs=outputs, interpret=self.interpret,
            )  # fmt: skip
            each(False, consumer.tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == WARPGROUPS)
        def _load() -> None:
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            producer = BackwardProducer(
                config=config, tiles=self.tiles, sources=BackwardSources(**refs), memory=memory
            )
            producer.drain(each(True, producer.tile, (jnp.int32(0), jnp.int32(0))))

    def each_tile(
        self, ranges: Any, drawn: Any, memory: BackwardSmem, draws: bool, do: Any, carry: Any
    ) -> Any:
        """carry = do(tile, carry) for each of the block's; one warpgroup draws them."""
        block = lax.axis_index("block")
        run = lambda item, carry: do(self.tiles.at(item, ranges), carry)  # noqa: E731
        if self.items == self.blocks:
            return run(block, carry)
        turns = WorkQueue(
            drawn, memory.queue, block, blocks=self.blocks, items=self.items,
            interpret=self.interpret,
        )  # fmt: skip
        return turns.each(draws, run, carry)
