"""The consumer warpgroups of `attention_backward`: a tile of keys against all of its queries.

    S = K Q^T         P = exp2(S - lse)             dV += P dO
    dP = V dO^T       dS = P (dP - delta)           dK += dS Q         dQ += dS^T K

A warpgroup owns the rows of 64 keys, or half of the dims, and keeps its accumulators of dK and dV
in registers. P and dS are register operands of wgmma. Both warpgroups also write dS to shared
memory, from which each computes its share of the step's dQ; query_gradient.py has it added up.
While a step's dQ leaves the registers, the tensor cores compute the next step's scores, and during
its exponentials dP.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.backward.query_gradient import QueryGradient, again
from jaxattn.kernels.attention.backward.score_gradient import ScoreGradient
from jaxattn.kernels.attention.backward.smem import BackwardSmem
from jaxattn.kernels.attention.backward.tile_config import DIMS, ROWS, BackwardTileConfig
from jaxattn.kernels.attention.backward.tile_scheduler import BackwardTileScheduler, KeyTile
from jaxattn.kernels.hopper.instructions import fence_proxy_async

TILE = plgpu.Layout.WGMMA
COLUMN = TILE.reduce(0)


class KeyTileGrads(NamedTuple):
    """A warpgroup's accumulators, float32 [64, 64] for each of its pieces."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyTileOutputs:
    """The output refs of the gradients of keys and values.

    Attributes:
        dk, dv: [B, T, Hk, Dk] and [B, T, Hk, Dv].
        dk_rest: [B, T, Hk, P], the last dims of the keys' gradient where dk lacks them.
    """

    dk: Any
    dk_rest: Any
    dv: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardConsumer:
    """One consumer warpgroup."""

    config: BackwardTileConfig
    tiles: BackwardTileScheduler
    memory: BackwardSmem
    scores: ScoreGradient
    dtype: Any
    wg: int
    first_keys: Any
    outputs: KeyTileOutputs
    query_gradient: QueryGradient
    interpret: bool

    @property
    def rows(self) -> Any:
        """This warpgroup's slice of the tile's keys."""
        return pl.ds(0 if self.config.by_dims else self.wg * ROWS, ROWS)

    def own(self, dims: int) -> list[int]:
        """The indices of this warpgroup's pieces of dk or dv."""
        count = self.config.own_pieces(dims)
        return [self.wg * count + i if self.config.by_dims else i for i in range(count)]

    def zeros(self) -> KeyTileGrads:
        zero = plgpu.layout_cast(jnp.zeros((ROWS, DIMS), jnp.float32), TILE)
        keys, values = (
            (zero,) * self.config.own_pieces(dims)
            for dims in (self.config.dims, self.config.values)
        )
        return KeyTileGrads(keys, values)

    def slot(self, number: jax.Array) -> jax.Array:
        return lax.rem(number, jnp.int32(self.config.stages))

    def output_slot(self, number: jax.Array) -> jax.Array:
        return lax.rem(number, jnp.int32(self.config.output_stages))

    def multiply(self, acc: Any, left: Any, right: Any) -> int:
        """Issues acc += left right^T, piece by piece, for this warpgroup's rows of keys or values.
        Returns the number of wgmmas."""
        for piece in range(left.shape[0]):
            plgpu.wgmma(acc, left.at[piece, self.rows], right.at[piece].transpose((1, 0)))
        return left.shape[0]

    def multiply_keys(self, acc: Any, number: jax.Array) -> int:
        keys = self.memory.keys.at[again(number)]
        return self.multiply(acc, keys, self.memory.queries.at[self.slot(number)])

    def multiply_values(self, acc: Any, number: jax.Array) -> int:
        values = self.memory.values.at[again(number)]
        return self.multiply(acc, values, self.memory.outputs.at[self.output_slot(number)])

    def add(self, accs: Any, before: Any, left: Any, right: Any, dims: int) -> int:
        """Issues accs = before + left right for this warpgroup's pieces of `right`. Returns the
        number of wgmmas."""
        for acc, sums, piece in zip(accs, before, self.own(dims), strict=True):
            acc[...] = sums
            plgpu.wgmma(acc, left, right.at[piece])
        return len(before)

    def weights(
        self, products: jax.Array, tile: KeyTile, m: jax.Array, slot: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns `ScoreGradient.weights` in the operands' dtype, 0 where a query does not see a
        key."""
        lse = plgpu.load(self.memory.row_stats.at[slot, 0], layout=COLUMN)
        p, slope = self.scores.weights(products, lse)
        shape, config = p.shape, self.config

        def mask(p: jax.Array) -> jax.Array:
            row_offset = 0 if config.by_dims else self.wg * ROWS
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE)
            key += tile.number * config.keys + row_offset
            query = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
            is_visible = key <= query + m * config.queries
            if self.first_keys is not None:
                query_slice = pl.ds(
                    pl.multiple_of(m * config.queries, config.queries), config.queries
                )
                first_keys_ref = self.first_keys.at[tile.row, query_slice]
                first_key = plgpu.load(first_keys_ref, layout=COLUMN, optimized=False)
                is_visible &= key >= lax.broadcast_in_dim(first_key, shape, [1])
            return jnp.where(is_visible, p, 0.0)

        p = lax.cond(self.tiles.masked(tile, m), mask, lambda p: p, p)
        return p.astype(self.dtype), slope

    def gradient(self, p: jax.Array, slope: jax.Array | None, products: jax.Array) -> jax.Array:
        """Returns dS, in the dtype of the operands, from P and `products`, which hold dP -
        delta."""
        grads = products * p.astype(jnp.float32)
        grads = grads if slope is None else grads * slope
        return grads.astype(self.dtype)

    def begin_values(self, slot: jax.Array) -> jax.Array:
        """Returns -delta, the initial value of a step's accumulator of dP."""
        delta = plgpu.load(self.memory.row_stats.at[slot, 1], layout=COLUMN)
        return lax.broadcast_in_dim(-delta, (ROWS, self.config.queries), [1])

    def write_scores(self, grads: jax.Array, i: jax.Array) -> None:
        """Writes dS to shared memory, where both warpgroups find that of the whole tile."""
        memory = self.memory
        pl.when(i > 0)(lambda: plgpu.barrier_wait(memory.scores_read.at[0]))
        if not self.config.by_dims or self.wg == 0:  # `by_dims`: both have the same
            memory.scores.at[0, self.rows][...] = grads
        fence_proxy_async(interpret=self.interpret)
        plgpu.barrier_arrive(memory.scores_written.at[0])

    def scopes(self) -> tuple[Any, ...]:
        """The accumulators of a step: dP, S, the pieces of dV and of dK, and a part of dQ."""
        square, piece = (
            plgpu.ACC((ROWS, columns), jnp.float32) for columns in (self.config.queries, DIMS)
        )
        dims = self.config.values, self.config.dims
        sums = ([piece] * self.config.own_pieces(num_dims) for num_dims in dims)
        return square, square, *sums, piece

    def begin(self, number: jax.Array) -> Any:
        """Computes the scores of a tile's first step."""
        plgpu.barrier_wait(self.memory.queries_loaded.at[self.slot(number)])

        def product(acc: Any) -> jax.Array:
            self.multiply_keys(acc, number)
            return plgpu.wgmma_accumulator_load(acc)

        return pl.run_scoped(product, plgpu.ACC((ROWS, self.config.queries), jnp.float32))

    def end(self, number: jax.Array, grads: KeyTileGrads) -> KeyTileGrads:
        """Returns the accumulators after a tile's last step."""
        del number
        return grads

    def step(
        self, tile: KeyTile, done: jax.Array, i: jax.Array, carry: tuple[KeyTileGrads, Any]
    ) -> tuple[KeyTileGrads, Any]:
        """Runs step i, whose scores are in the carry, and issues the next step's scores."""
        memory, config, (grads, scores) = self.memory, self.config, carry
        number = done + i
        slot, outputs = self.slot(number), self.output_slot(number)
        last = i + 1 == self.tiles.steps(tile)
        _, m = self.tiles.step(tile, i)
        first, *others = self.query_gradient.parts(i)

        def products(dp_acc: Any, s_acc: Any, dv_accs: Any, dk_accs: Any, dq_acc: Any) -> Any:
            plgpu.barrier_wait(memory.outputs_loaded.at[outputs])
            dp_acc[...] = self.begin_values(slot)
            self.multiply_values(dp_acc, number)
            p, slope = self.weights(scores, tile, m, slot)
            count = self.add(dv_accs, grads.values, p, memory.outputs.at[outputs], config.values)
            ds = self.gradient(p, slope, plgpu.wgmma_accumulator_load(dp_acc, wait_n=count))
            self.write_scores(ds, i)
            count = self.add(dk_accs, grads.keys, ds, memory.queries.at[slot], config.dims)
            dv = tuple(plgpu.wgmma_accumulator_load(acc, wait_n=count) for acc in dv_accs)
            plgpu.barrier_arrive(memory.outputs_read.at[outputs])
            plgpu.barrier_wait(memory.scores_written.at[0])
            self.query_gradient.multiply(dq_acc, number, first[0])
            # The last step issues its own scores again, which nobody reads.
            following = jnp.where(last, number, number + 1)
            loaded = memory.queries_loaded.at[self.slot(following)]
            pl.when(jnp.logical_not(last))(lambda: plgpu.barrier_wait(loaded))
            count = self.multiply_keys(s_acc, following)
            dk = tuple(plgpu.wgmma_accumulator_load(acc, wait_n=count + 1) for acc in dk_accs)
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=count)
            if not others:
                plgpu.barrier_arrive(memory.scores_read.at[0])
            self.query_gradient.await_room(number)
            self.query_gradient.add(first[0], dq)
            s = plgpu.wgmma_accumulator_load(s_acc)
            plgpu.barrier_arrive(memory.queries_read.at[slot])
            return KeyTileGrads(dk, dv), s

        carry = pl.run_scoped(products, *self.scopes())
        self.query_gradient.add_others(number, i)
        return carry

    def tile(self, tile: KeyTile, done: jax.Array) -> jax.Array:
        """Runs the mainloop and epilogue of a tile; `done` counts the steps before it."""
        memory, steps = self.memory, self.tiles.steps(tile)
        plgpu.barrier_wait(memory.tile_loaded.at[0])

        @pl.when(steps > 0)
        def _() -> None:
            carry = self.zeros(), self.begin(done)
            step = functools.partial(self.step, tile, done)
            grads, _ = lax.fori_loop(0, steps, step, carry)
            grads = self.end(done + steps - 1, grads)
            plgpu.barrier_wait(memory.scores_read.at[0])  # both warpgroups have read all keys too
            self.write(tile, grads)

        pl.when(steps == 0)(lambda: self.write(tile, self.zeros()))
        return done + steps

    def write(self, tile: KeyTile, grads: KeyTileGrads) -> None:
        """Stores dK and dV, staged in the shared memory of the keys and values."""
        memory, config, outputs = self.memory, self.config, self.outputs
        scaled = tuple(x * self.scores.scale for x in grads.keys)
        kinds = (
            (memory.keys.at[0], config.dims, scaled, outputs.dk, outputs.dk_rest),
            (memory.values.at[0], config.values, grads.values, outputs.dv, None),
        )
        for stage, dims, sums, *_ in kinds:
            for piece, x in zip(self.own(dims), sums, strict=True):
                stage.at[piece, self.rows][...] = x.astype(self.dtype)
        plgpu.commit_smem()
        first = tile.number * config.keys + (0 if config.by_dims else self.wg * ROWS)

        @pl.when(first < outputs.dv.shape[1])
        def _store() -> None:
            rows_index = tile.row, pl.ds(pl.multiple_of(first, ROWS), ROWS), tile.head
            for stage, dims, _, ref, rest in kinds:
                for piece in self.own(dims):
                    begin, destination = piece * DIMS, ref
                    if begin >= ref.shape[3]:
                        begin, destination = begin - ref.shape[3], rest
                    destination_dims = destination.at[*rows_index, pl.ds(begin, DIMS)]
                    plgpu.copy_smem_to_gmem(stage.at[piece, self.rows], destination_dims)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(memory.tile_read.at[0])
