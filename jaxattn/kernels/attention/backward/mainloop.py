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
    DIMS,
    ROWS,
    WARPGROUPS,
    BackwardSmem,
    BackwardTileConfig,
)
from jaxattn.kernels.attention.backward.tile_scheduler import BackwardTileScheduler, KeyTile
from jaxattn.kernels.attention.backward.turns import (
    await_turn,
    look_at_turn,
    pass_turn,
)
from jaxattn.kernels.attention.softmax import LOG2E
from jaxattn.kernels.attention.work_queue import WorkQueue
from jaxattn.kernels.hopper.device import fence_proxy_async, warpgroup_barrier

TILE = plgpu.Layout.WGMMA
COLUMN = TILE.reduce(0)


class KeyTileGrads(NamedTuple):
    """A warpgroup's sums: float32 [64, 64] of each of its pieces."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


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
        dq: float32 [B, whole steps, H, D]. Where queries see key 0 the first tile's part is stored
            there, and the others' are added; else all are added to zeros.
        dk, dv: [B, T, Hk, Dk] and [B, T, Hk, Dv].
        dk_rest: [B, T, Hk, P], of the last of the keys' dims, where dk lacks them.
        turns: int32 [B, H, M, parts], whose turn it is to add to a part of dq.
    """

    dq: Any
    dk: Any
    dk_rest: Any
    dv: Any
    turns: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardConsumer:
    """One warpgroup of those that compute."""

    config: BackwardTileConfig
    tiles: BackwardTileScheduler
    memory: BackwardSmem
    scores: ScoreGradient
    dtype: Any
    wg: int
    first: Any
    outputs: BackwardOutputs
    interpret: bool

    @property
    def rows(self) -> Any:
        """Of the tile's keys, this warpgroup's."""
        return pl.ds(0 if self.config.by_dims else self.wg * ROWS, ROWS)

    def own(self, dims: int) -> list[int]:
        """The numbers of this warpgroup's pieces of dk or dv."""
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
        """acc += left right^T, piece by piece, of this warpgroup's rows of keys or values; returns
        the number of products."""
        for piece in range(left.shape[0]):
            plgpu.wgmma(acc, left.at[piece, self.rows], right.at[piece].transpose((1, 0)))
        return left.shape[0]

    def again(self, number: jax.Array) -> jax.Array:
        """0, of which the compiler does not know that it is the same in each step. What wgmma wants
        to know of an operand would else be made before the loop, and fill the registers."""
        return lax.shift_right_logical(number, jnp.int32(30))

    def multiply_keys(self, acc: Any, number: jax.Array) -> int:
        keys = self.memory.keys.at[self.again(number)]
        return self.multiply(acc, keys, self.memory.queries.at[self.slot(number)])

    def multiply_values(self, acc: Any, number: jax.Array) -> int:
        values = self.memory.values.at[self.again(number)]
        return self.multiply(acc, values, self.memory.outputs.at[self.output_slot(number)])

    def add(self, accs: Any, before: Any, left: Any, right: Any, dims: int) -> int:
        """accs = before + left right, of this warpgroup's pieces of `right`."""
        for acc, sums, piece in zip(accs, before, self.own(dims), strict=True):
            acc[...] = sums
            plgpu.wgmma(acc, left, right.at[piece])
        return len(before)

    def weights(
        self, products: jax.Array, tile: KeyTile, m: jax.Array, slot: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """As `ScoreGradient.weights` in the operands' dtype, 0 where a query does not see a key."""
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
        return p.astype(self.dtype), slope

    def gradient(self, p: jax.Array, slope: jax.Array | None, products: jax.Array) -> jax.Array:
        """dS of P, as it is multiplied, and dP - delta."""
        grads = products * p.astype(jnp.float32)
        grads = grads if slope is None else grads * slope
        return grads.astype(self.dtype)

    def begin_values(self, slot: jax.Array) -> jax.Array:
        """-delta: what a step's sums of dP begin with."""
        delta = plgpu.load(self.memory.row_stats.at[slot, 1], layout=COLUMN)
        return lax.broadcast_in_dim(-delta, (ROWS, self.config.queries), [1])

    def write_scores(self, grads: jax.Array, i: jax.Array) -> None:
        """dS to shared memory, where both warpgroups find the whole tile's."""
        memory = self.memory
        pl.when(i > 0)(lambda: plgpu.barrier_wait(memory.scores_read.at[0]))
        if not self.config.by_dims or self.wg == 0:  # of dims both have the same
            memory.scores.at[0, self.rows][...] = grads
        fence_proxy_async(interpret=self.interpret)
        plgpu.barrier_arrive(memory.scores_written.at[0])

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

    def multiply_scores(self, acc: Any, number: jax.Array, part: int) -> None:
        """A part of dQ: dS^T K."""
        rows, piece = divmod(part, self.config.pieces(self.config.dims))
        again = self.again(number)
        scores = self.memory.scores.at[again, :, pl.ds(rows * ROWS, ROWS)]
        plgpu.wgmma(acc, scores.transpose((1, 0)), self.memory.keys.at[again, piece])

    def turn_of(self, tile: KeyTile, i: jax.Array, part: int) -> Any:
        """The word that says whose turn it is to add to a part of step i's dQ."""
        head, m = self.tiles.step(tile, i)
        return self.outputs.turns.at[tile.row, head, m, pl.ds(part, 1)]

    def look_at_turns(self, tile: KeyTile, i: jax.Array) -> list[jax.Array]:
        """Of this warpgroup's parts of step i's dQ."""
        return [
            look_at_turn(self.turn_of(tile, i, part), tile.number, interpret=self.interpret)
            for part, _ in self.parts(i)
        ]

    def add_query_grads(
        self, tile: KeyTile, i: jax.Array, part: int, x: jax.Array, seen: jax.Array
    ) -> None:
        """Adds a part of step i's dQ to global memory, once the tiles of keys before have.

        Args:
            seen: of `look_at_turns`.
        """
        head, m = self.tiles.step(tile, i)
        rows, piece = divmod(part, self.config.pieces(self.config.dims))
        at = pl.ds(pl.multiple_of(m * self.config.queries + rows * ROWS, ROWS), ROWS)
        place = self.outputs.dq.at[tile.row, at, head, pl.ds(piece * DIMS, DIMS)]
        stores = tile.number == 0 if self.first is None else None
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

    def scopes(self) -> tuple[Any, ...]:
        """Of a step's products: dP, S, and the pieces of dV and of dK, and a part of dQ."""
        square, piece = (
            plgpu.ACC((ROWS, columns), jnp.float32) for columns in (self.config.queries, DIMS)
        )
        dims = self.config.values, self.config.dims
        sums = ([piece] * self.config.own_pieces(some) for some in dims)
        return square, square, *sums, piece

    def begin(self, number: jax.Array) -> Any:
        """Before a tile's first step: its scores."""
        plgpu.barrier_wait(self.memory.queries_loaded.at[self.slot(number)])

        def product(acc: Any) -> jax.Array:
            self.multiply_keys(acc, number)
            return plgpu.wgmma_accumulator_load(acc)

        return pl.run_scoped(product, plgpu.ACC((ROWS, self.config.queries), jnp.float32))

    def end(self, number: jax.Array, grads: KeyTileGrads) -> KeyTileGrads:
        """The sums after a tile's last step."""
        del number
        return grads

    def step(
        self, tile: KeyTile, done: jax.Array, i: jax.Array, carry: tuple[KeyTileGrads, Any]
    ) -> tuple[KeyTileGrads, Any]:
        """Step i, whose scores the carry has; the next one's are begun."""
        memory, config, (grads, scores) = self.memory, self.config, carry
        number = done + i
        slot, outputs = self.slot(number), self.output_slot(number)
        last = i + 1 == self.tiles.steps(tile)
        _, m = self.tiles.step(tile, i)
        first, *others = self.parts(i)
        turns = self.look_at_turns(tile, i)

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
            self.multiply_scores(dq_acc, number, first[0])
            # Of the last step: its own scores again, which nobody reads.
            following = jnp.where(last, number, number + 1)
            loaded = memory.queries_loaded.at[self.slot(following)]
            pl.when(jnp.logical_not(last))(lambda: plgpu.barrier_wait(loaded))
            count = self.multiply_keys(s_acc, following)
            dk = tuple(plgpu.wgmma_accumulator_load(acc, wait_n=count + 1) for acc in dk_accs)
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=count)
            if not others:
                plgpu.barrier_arrive(memory.scores_read.at[0])
            self.add_query_grads(tile, i, first[0], dq, turns[0])
            s = plgpu.wgmma_accumulator_load(s_acc)
            plgpu.barrier_arrive(memory.queries_read.at[slot])
            return KeyTileGrads(dk, dv), s

        carry = pl.run_scoped(products, *self.scopes())
        self.other_parts(tile, number, i, turns[1:])
        return carry

    def other_parts(
        self, tile: KeyTile, number: jax.Array, i: jax.Array, turns: list[jax.Array]
    ) -> None:
        """This warpgroup's parts of dQ but for the first."""
        others = self.parts(i)[1:]

        def add(part: int, turn: jax.Array) -> None:
            self.add_query_grads(tile, i, part, self.query_grads(number, part), turn)

        for (part, there), turn in zip(others, turns, strict=True):
            pl.when(True if there is None else there)(functools.partial(add, part, turn))
        if others:
            plgpu.barrier_arrive(self.memory.scores_read.at[0])

    def query_grads(self, number: jax.Array, part: int) -> jax.Array:
        def product(acc: Any) -> jax.Array:
            self.multiply_scores(acc, number, part)
            return plgpu.wgmma_accumulator_load(acc)

        return pl.run_scoped(product, plgpu.ACC((ROWS, DIMS), jnp.float32))

    def tile(self, tile: KeyTile, done: jax.Array) -> jax.Array:
        """All of a tile; `done` counts the steps."""
        memory, steps = self.memory, self.tiles.steps(tile)
        plgpu.barrier_wait(memory.tile_loaded.at[0])

        @pl.when(steps > 0)
        def _() -> None:
            carry = self.zeros(), self.begin(done)
            step = functools.partial(self.step, tile, done)
            grads, _ = lax.fori_loop(0, steps, step, carry)
            grads = self.end(done + steps - 1, grads)
            plgpu.barrier_wait(memory.scores_read.at[0])  # and all keys
            if not self.interpret:
                plgpu.wait_smem_to_gmem(0)
                self.end_turns(tile, steps)
            self.write(tile, grads)

        pl.when(steps == 0)(lambda: self.write(tile, self.zeros()))
        return done + steps

    def write(self, tile: KeyTile, grads: KeyTileGrads) -> None:
        """dK and dV, through the shared memory of the keys and values."""
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
            at = tile.row, pl.ds(pl.multiple_of(first, ROWS), ROWS), tile.head
            for stage, dims, _, ref, rest in kinds:
                for piece in self.own(dims):
                    begin, to = piece * DIMS, ref
                    if begin >= ref.shape[3]:
                        begin, to = begin - ref.shape[3], rest
                    place = to.at[*at, pl.ds(begin, DIMS)]
                    plgpu.copy_smem_to_gmem(stage.at[piece, self.rows], place)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(memory.tile_read.at[0])


class WideBackwardConsumer(BackwardConsumer):
    """Of heads whose sums leave registers for one product of the scores alone.

    A step begins with its own scores. During its exponentials the tensor cores add the last step's
    part of dK, whose dS they read from shared memory.
    """

    def begin(self, number: jax.Array) -> Any:
        """Zeros in the place of dS: what the first step adds to dK."""
        del number
        mine = self.memory.scores.at[0, self.rows]
        mine[...] = plgpu.layout_cast(jnp.zeros(mine.shape, self.dtype), TILE)
        fence_proxy_async(interpret=False)
        warpgroup_barrier(interpret=False)

    def add_keys(self, accs: Any, before: Any, number: jax.Array) -> int:
        """A step's part of dK, out of shared memory."""
        scores = self.memory.scores.at[self.again(number), self.rows]
        queries = self.memory.queries.at[self.slot(number)]
        return self.add(accs, before, scores, queries, self.config.dims)

    def end(self, number: jax.Array, grads: KeyTileGrads) -> KeyTileGrads:
        def product(accs: Any) -> Any:
            self.add_keys(accs, grads.keys, number)
            return tuple(plgpu.wgmma_accumulator_load(acc) for acc in accs)

        keys = pl.run_scoped(product, self.scopes()[3])
        plgpu.barrier_arrive(self.memory.queries_read.at[self.slot(number)])
        return grads._replace(keys=keys)

    def step(
        self, tile: KeyTile, done: jax.Array, i: jax.Array, carry: tuple[KeyTileGrads, Any]
    ) -> tuple[KeyTileGrads, Any]:
        memory, config, (grads, _) = self.memory, self.config, carry
        number = done + i
        # Before the first step there is nothing to add: zeros times any queries.
        before = jnp.where(i == 0, number, number - 1)
        slot, outputs = self.slot(number), self.output_slot(number)
        _, m = self.tiles.step(tile, i)
        first, *others = self.parts(i)
        turns = self.look_at_turns(tile, i)

        def products(dp_acc: Any, s_acc: Any, dv_accs: Any, dk_accs: Any, dq_acc: Any) -> Any:
            plgpu.barrier_wait(memory.queries_loaded.at[slot])
            self.multiply_keys(s_acc, number)
            count = self.add_keys(dk_accs, grads.keys, before)
            scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=count)
            p, slope = self.weights(scores, tile, m, slot)
            plgpu.barrier_wait(memory.outputs_loaded.at[outputs])
            dp_acc[...] = self.begin_values(slot)
            more = self.multiply_values(dp_acc, number)
            count = self.add(dv_accs, grads.values, p, memory.outputs.at[outputs], config.values)
            dk = tuple(plgpu.wgmma_accumulator_load(acc, wait_n=count + more) for acc in dk_accs)
            read = memory.queries_read.at[self.slot(before)]
            pl.when(i > 0)(lambda: plgpu.barrier_arrive(read))
            ds = self.gradient(p, slope, plgpu.wgmma_accumulator_load(dp_acc, wait_n=count))
            self.write_scores(ds, i)
            plgpu.barrier_wait(memory.scores_written.at[0])
            self.multiply_scores(dq_acc, number, first[0])
            dv = tuple(plgpu.wgmma_accumulator_load(acc, wait_n=1) for acc in dv_accs)
            plgpu.barrier_arrive(memory.outputs_read.at[outputs])
            dq = plgpu.wgmma_accumulator_load(dq_acc)
            if not others:
                plgpu.barrier_arrive(memory.scores_read.at[0])
            self.add_query_grads(tile, i, first[0], dq, turns[0])
            return KeyTileGrads(dk, dv), None

        carry = pl.run_scoped(products, *self.scopes())
        self.other_parts(tile, number, i, turns[1:])
        return carry


class InterpretedBackwardConsumer(BackwardConsumer):
    """JAX 0.11.2's interpreter has no wgmma with operands in registers, and no sums that go on."""

    def begin(self, number: jax.Array) -> Any:
        del number

    def step(
        self, tile: KeyTile, done: jax.Array, i: jax.Array, carry: tuple[KeyTileGrads, Any]
    ) -> tuple[KeyTileGrads, Any]:
        memory, config, (grads, _) = self.memory, self.config, carry
        number = done + i
        slot, outputs = self.slot(number), self.output_slot(number)
        _, m = self.tiles.step(tile, i)
        plgpu.barrier_wait(memory.queries_loaded.at[slot])
        plgpu.barrier_wait(memory.outputs_loaded.at[outputs])

        def product(multiply: Any) -> jax.Array:
            def run(acc: Any) -> jax.Array:
                multiply(acc, number)
                return plgpu.wgmma_accumulator_load(acc)

            return pl.run_scoped(run, plgpu.ACC((ROWS, config.queries), jnp.float32))

        def added(before: Any, left: jax.Array, right: Any, dims: int) -> tuple[jax.Array, ...]:
            left = left.astype(jnp.float32)
            of_each = (right.at[piece][...].astype(jnp.float32) for piece in self.own(dims))
            return tuple(x + jnp.dot(left, y) for x, y in zip(before, of_each, strict=True))

        p, slope = self.weights(product(self.multiply_keys), tile, m, slot)
        products = product(self.multiply_values) + self.begin_values(slot)
        ds = self.gradient(p, slope, products)
        dv = added(grads.values, p, memory.outputs.at[outputs], config.values)
        self.write_scores(ds, i)
        dk = added(grads.keys, ds, memory.queries.at[slot], config.dims)
        plgpu.commit_smem()  # they are read as wgmma does not, before TMA writes over them
        plgpu.barrier_arrive(memory.outputs_read.at[outputs])
        plgpu.barrier_arrive(memory.queries_read.at[slot])
        plgpu.barrier_wait(memory.scores_written.at[0])
        first, *others = self.parts(i)
        turns = self.look_at_turns(tile, i)
        self.add_query_grads(tile, i, first[0], self.query_grads(number, first[0]), turns[0])
        if not others:
            plgpu.barrier_arrive(memory.scores_read.at[0])
        self.other_parts(tile, number, i, turns[1:])
        return KeyTileGrads(dk, dv), None


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
            kind = BackwardConsumer if config.ahead else WideBackwardConsumer
            kind = InterpretedBackwardConsumer if self.interpret else kind
            # The code of each warpgroup is its own: places in shared memory that depended on the
            # warpgroup would take the registers of the sums.
            for number in range(WARPGROUPS):
                consumer = kind(
                    config=config, tiles=self.tiles, memory=memory, scores=self.scores,
                    dtype=self.dtype, wg=number, first=first, outputs=outputs,
                    interpret=self.interpret,
                )  # fmt: skip

                @pl.when(wg == number)
                def _(consumer: BackwardConsumer = consumer) -> None:
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
