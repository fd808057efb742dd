"""The consumer warpgroups of `gqa_prefill`: the softmax and both products of a tile's steps.

    scores_i = Q K_i^T      P_i = exp2(scores_i - row maxima)      o = rescaling o + P_i V_i

A warpgroup's step issues scores i + 1 and then P_i V_i to the tensor cores, and hands these on to
the next warpgroup. It then computes the softmax of scores i + 1 while P_i V_i still runs. During a
softmax the tensor cores thus have another warpgroup's products to do, and the rest of this one's. P
stays in registers. A warp rescales its output only when the maximum of one of its rows has grown
much (reduce/online_softmax.py). Without a window, the first steps have their own loop without
masks, as all rows see all their keys. Other steps have masks only where a row does not see a key.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.gate_and_sink import gated, with_sink
from jaxattn.kernels.attention.softmax_constants import EMPTY, LOG2E
from jaxattn.kernels.attention.work_queue import WorkQueue
from jaxattn.kernels.gqa.prefill.producer import GqaPrefillProducer, GqaPrefillSources
from jaxattn.kernels.gqa.prefill.smem import GqaPrefillSmem
from jaxattn.kernels.gqa.prefill.tile_config import ROWS, GqaPrefillTileConfig
from jaxattn.kernels.gqa.prefill.tile_scheduler import (
    FIRST,
    OFFSET,
    QUERIES,
    GqaKeyTile,
    GqaPrefillTileScheduler,
    GqaQueryTile,
)
from jaxattn.kernels.hopper.instructions import issue_loads
from jaxattn.kernels.hopper.reduce.online_softmax import reference, rescaled

TILE = plgpu.Layout.WGMMA
ROW = TILE.reduce(1)
CLEARED = 64  # dims of values that are cleared at a time


class PrefillSoftmaxState(NamedTuple):
    """A warpgroup's rows before a step's values are added.

    Attributes:
        p: [64, keys], the step's weights in the operands' dtype.
        top, total: [64], the reference, at most SLACK below the largest log2 of a weight so far;
            and the weights' sum divided by 2**reference.
        out: float32 [64, D], the sum of values so far divided by 2**top.
    """

    p: jax.Array
    top: jax.Array
    total: jax.Array
    out: jax.Array


def over(vector: jax.Array, width: int) -> jax.Array:
    return lax.broadcast_in_dim(vector, (ROWS, width), [0])


def zeros(*shape: int) -> jax.Array:
    layout = TILE if len(shape) == 2 else ROW
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def iota(shape: tuple[int, ...], dimension: int) -> jax.Array:
    layout = TILE if len(shape) == 2 else ROW
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreScaling:
    """The conversion of scores to logarithms of weights, to the base 2."""

    scale: float
    soft_cap: float | None

    @property
    def factor(self) -> float:
        """The factor of the result of `capped`."""
        return self.scale * LOG2E if self.soft_cap is None else self.soft_cap * LOG2E

    @property
    def power(self) -> float:
        """The factor f with 2**(f x) = exp(2 x / soft_cap)."""
        assert self.soft_cap is not None
        return 2 * LOG2E / self.soft_cap

    def capped(self, scores: jax.Array, shift: jax.Array | None) -> jax.Array:
        """Applies the soft cap. `shift` is added to each row's scores, already multiplied by
        `power`."""
        if self.soft_cap is None:
            return scores
        # tanh by exp2, since the approximate instruction is off by 2**-11 of the cap.
        powers = scores * (self.power * self.scale)
        if shift is not None:
            powers += over(shift, scores.shape[1])
        return 1.0 - 2.0 / (jnp.exp2(powers) + 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaPrefillConsumer:
    """One consumer warpgroup.

    Attributes:
        wg: The index of the warpgroup.
        sinks: float32 [heads, rows], for the packed rows of a head, or for 64 equal ones; or None.
        firsts: int32 [B, whole tiles], the first key that each packed row sees, or None.
        shift: float32 [B, heads, rows], as `ScoreScaling.capped` takes it, or None.
        gate: [B, R, heads, D], or None.
        out, lse: [B, R, heads, D] and float32 [B, heads, whole tiles].
    """

    config: GqaPrefillTileConfig
    tiles: GqaPrefillTileScheduler
    memory: GqaPrefillSmem
    scores: ScoreScaling
    head_dim: int
    dtype: Any
    wg: jax.Array
    sinks: Any
    firsts: Any
    shift: Any
    gate: Any
    out: Any
    lse: Any
    interpret: bool

    @property
    def stage(self) -> Any:
        """The shared memory through which the output leaves."""
        memory = self.memory
        return (memory.outputs if self.config.own_output else memory.queries).at[self.wg]

    def await_stage(self) -> None:
        """Waits until the last tile's output has left it; not needed if it is the queries' memory,
        whose loads already imply that."""
        if self.config.own_output:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def slot(self, number: jax.Array) -> jax.Array:
        return lax.rem(number, jnp.int32(self.config.stages))

    def signal_next_warpgroup(self) -> None:
        """Hands the tensor cores to the next warpgroup: the products that it issues run after this
        one's."""
        count = self.config.warpgroups
        following = lax.rem(self.wg + 1, jnp.int32(count))
        plgpu.barrier_arrive(self.memory.turn.at[following])

    def multiply_keys(self, acc: Any, number: jax.Array) -> None:
        queries, first = self.memory.queries.at[self.wg], 0
        for piece in self.memory.keys:
            dims = piece.shape[-1]
            some = queries.at[:, pl.ds(first, dims)]
            plgpu.wgmma(acc, some, piece.at[self.slot(number)].transpose((1, 0)))
            first += dims

    def first_scores(self, number: jax.Array) -> jax.Array:
        def product(acc: Any) -> jax.Array:
            self.multiply_keys(acc, number)
            self.signal_next_warpgroup()
            return plgpu.wgmma_accumulator_load(acc)

        return pl.run_scoped(product, plgpu.ACC((ROWS, self.config.keys), jnp.float32))

    def with_values(self, state: PrefillSoftmaxState, number: jax.Array) -> jax.Array:
        """Returns the output with a step's values, in the interpreter, whose wgmma takes no
        register operand."""
        values = self.memory.values[self.slot(number)].astype(jnp.float32)
        plgpu.commit_smem()  # plain loads, unlike wgmma, must end before TMA overwrites
        return state.out + jnp.dot(state.p.astype(jnp.float32), values)

    def seen(self, tile: GqaQueryTile, step: GqaKeyTile) -> jax.Array:
        """[64, keys], whether a row sees a key."""
        shape = (ROWS, self.config.keys)
        key = step.position + iota(shape, 1)
        row = self.first_row(tile) + iota(shape, 0)
        query = tile.prefix + tile.bounds[OFFSET] + self.tiles.token_of(row)
        seen = (key <= query) & (key < step.high) & (key >= tile.bounds[FIRST])
        if self.tiles.window is not None:
            seen &= key > query - self.tiles.window
        if self.firsts is not None:
            mine = self.firsts.at[tile.row, pl.ds(self.first_row(tile), ROWS)]
            seen &= key >= over(plgpu.load(mine, layout=ROW, optimized=False), shape[1])
        return seen

    def first_row(self, tile: GqaQueryTile) -> jax.Array:
        return pl.multiple_of(tile.start, ROWS) + self.wg * ROWS

    def softmax(
        self,
        scores: jax.Array,
        tile: GqaQueryTile,
        i: jax.Array,
        top: jax.Array,
        total: jax.Array,
        *,
        shift: jax.Array | None,
        seen: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns (weights float32, references, sums, rescaling of the output) with step i's
        scores. If they are `seen`, all of them count."""
        scores, keys = self.scores.capped(scores, shift), self.config.keys
        if not seen:
            step = self.tiles.step(tile, i)
            whole = self.tiles.all_visible(tile, step, self.first_row(tile), ROWS)
            mask = lambda s: jnp.where(self.seen(tile, step), s, -jnp.inf)  # noqa: E731
            scores = lax.cond(whole, lambda s: s, mask, scores)
        factor = self.scores.factor
        largest = jnp.maximum(top, scores.max(axis=1) * factor)
        new_top = reference(top, largest)
        rescale = jnp.exp2(top - new_top)
        p = jnp.exp2(scores * factor - over(new_top, keys))
        return p, new_top, total * rescale + p.sum(axis=1), rescale

    def clear(self, tile: GqaQueryTile, i: jax.Array, number: jax.Array) -> None:
        """Zeroes the values that no query of the tile may see: 0 * NaN is NaN. The warpgroups share
        the work and wait for each other."""
        step, memory = self.tiles.step(tile, i), self.memory
        shape = (self.config.keys, CLEARED)

        @pl.when(jnp.logical_not(self.tiles.all_keys_exist(tile, step)))
        def _() -> None:
            for part in range(self.head_dim // CLEARED):

                @pl.when(self.wg == part % self.config.warpgroups)
                def _(part: int = part) -> None:
                    dims = pl.ds(part * CLEARED, CLEARED)
                    some = memory.values.at[self.slot(number), :, dims]
                    key = step.position + iota(shape, 0)
                    inside = (key >= tile.low) & (key < step.high)
                    kept = plgpu.load(some, layout=TILE)
                    some[...] = jnp.where(inside, kept, jnp.zeros((), self.dtype))

            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.cleared)
            plgpu.barrier_wait(memory.cleared)

    def step(
        self,
        tile: GqaQueryTile,
        done: jax.Array,
        shift: jax.Array | None,
        i: jax.Array,
        state: PrefillSoftmaxState,
        *,
        seen: bool = False,
    ) -> PrefillSoftmaxState:
        """Adds step i's values, and computes the softmax of step i + 1. With `seen`, all scores of
        both steps count; otherwise the step checks that."""
        memory, number = self.memory, done + i
        plgpu.barrier_wait(memory.values_loaded.at[self.slot(number)])
        if not seen:
            self.clear(tile, i, number)
        plgpu.barrier_wait(memory.keys_loaded.at[self.slot(number + 1)])
        plgpu.barrier_wait(memory.turn.at[self.wg])
        following = functools.partial(
            self.softmax, tile=tile, i=i + 1, top=state.top, shift=shift, seen=seen
        )
        if self.interpret:
            out = self.with_values(state, number)
            plgpu.barrier_arrive(memory.values_read.at[self.slot(number)])
            scores = self.first_scores(number + 1)
            plgpu.barrier_arrive(memory.keys_read.at[self.slot(number + 1)])
            p, top, total, rescale = following(scores, total=state.total)
            return PrefillSoftmaxState(
                p.astype(self.dtype), top, total, rescaled(out, rescale, interpret=self.interpret)
            )

        def products(scores_acc: Any, out_acc: Any) -> PrefillSoftmaxState:
            self.multiply_keys(scores_acc, number + 1)
            out_acc[...] = state.out
            plgpu.wgmma(out_acc, state.p, memory.values.at[self.slot(number)])
            self.signal_next_warpgroup()
            scores = plgpu.wgmma_accumulator_load(scores_acc, wait_n=1)
            plgpu.barrier_arrive(memory.keys_read.at[self.slot(number + 1)])
            p, top, total, rescale = following(scores, total=state.total)
            issue_loads(interpret=False)  # otherwise ptxas waits for the values before the softmax
            out = plgpu.wgmma_accumulator_load(out_acc)
            plgpu.barrier_arrive(memory.values_read.at[self.slot(number)])
            return PrefillSoftmaxState(
                p.astype(self.dtype), top, total, rescaled(out, rescale, interpret=self.interpret)
            )

        return pl.run_scoped(
            products,
            plgpu.ACC((ROWS, self.config.keys), jnp.float32),
            plgpu.ACC((ROWS, self.head_dim), jnp.float32),
        )

    def last_values(
        self, tile: GqaQueryTile, done: jax.Array, state: PrefillSoftmaxState
    ) -> jax.Array:
        """Returns the output with the last step's values."""
        memory, i = self.memory, tile.steps - 1
        slot = self.slot(done + i)
        plgpu.barrier_wait(memory.values_loaded.at[slot])
        self.clear(tile, i, done + i)
        plgpu.barrier_wait(memory.turn.at[self.wg])
        if self.interpret:
            out = self.with_values(state, done + i)
            self.signal_next_warpgroup()
        else:

            def product(acc: Any) -> jax.Array:
                acc[...] = state.out
                plgpu.wgmma(acc, state.p, memory.values.at[slot])
                self.signal_next_warpgroup()
                return plgpu.wgmma_accumulator_load(acc)

            out = pl.run_scoped(product, plgpu.ACC((ROWS, self.head_dim), jnp.float32))
        plgpu.barrier_arrive(memory.values_read.at[slot])
        return out

    def write(self, tile: GqaQueryTile, top: jax.Array, total: jax.Array, out: jax.Array) -> None:
        """Writes the tile's rows: 0 and -inf where a row sees no key."""
        mine = self.first_row(tile)
        rows = pl.ds(mine, ROWS)
        token = self.tiles.token_of(mine + iota((ROWS,), 0))
        # A NaN total is not 0: a NaN among a row's own keys shows in its output.
        sees = (token >= tile.bounds[FIRST]) & (token < tile.bounds[QUERIES]) & (total != 0)
        new_top = top
        if self.sinks is not None:
            at = rows if self.tiles.packed > 1 else pl.ds(0, ROWS)
            sink = plgpu.load(self.sinks.at[tile.head, at], layout=ROW, optimized=False)
            new_top, total = with_sink(top, total, sink)
        lse = jnp.where(sees, (new_top + jnp.log2(total)) * (1 / LOG2E), -jnp.inf)
        share = over(jnp.where(sees, jnp.exp2(top - new_top) / total, 0.0), self.head_dim)
        out = out * share
        if self.gate is not None:
            plgpu.barrier_wait(self.memory.gate_loaded.at[self.wg])
            out = gated(out, plgpu.load(self.stage, layout=TILE))
        out = jnp.where(share != 0, out, 0.0)

        self.store(tile, lse, out)

    def store(self, tile: GqaQueryTile, lse: jax.Array, out: jax.Array) -> None:
        mine = self.first_row(tile)
        rows = pl.ds(mine, ROWS)

        @pl.when(mine < self.lse.shape[2])
        def _() -> None:
            self.lse[tile.row, tile.head, rows] = lse

        self.await_stage()
        self.stage[...] = out.astype(self.dtype)
        plgpu.commit_smem()

        @pl.when(mine < self.out.shape[1])
        def _() -> None:
            plgpu.copy_smem_to_gmem(self.stage, self.out.at[tile.row, rows, tile.head])

        if not self.config.own_output:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def tile(self, tile: GqaQueryTile, done: jax.Array) -> jax.Array:
        """Runs the mainloop and epilogue of a tile; `done` counts the steps before it."""
        memory, config = self.memory, self.config
        nothing = zeros(ROWS)

        @pl.when(tile.steps > 0)
        def _attend() -> None:
            plgpu.barrier_wait(memory.queries_loaded.at[self.wg])
            plgpu.barrier_wait(memory.keys_loaded.at[self.slot(done)])
            plgpu.barrier_wait(memory.turn.at[self.wg])
            scores = self.first_scores(done)
            plgpu.barrier_arrive(memory.keys_read.at[self.slot(done)])
            first, shift = jnp.int32(0), None
            if self.shift is not None:
                mine = pl.ds(self.first_row(tile), ROWS)
                place = self.shift.at[tile.row, tile.head, mine]
                shift = plgpu.load(place, layout=ROW, optimized=False)
            p, top, total, _ = self.softmax(
                scores, tile, first, nothing + EMPTY, nothing, shift=shift
            )
            state = PrefillSoftmaxState(
                p.astype(self.dtype), top, total, zeros(ROWS, self.head_dim)
            )
            step = functools.partial(self.step, tile, done, shift)
            if self.tiles.window is None:
                seen = self.tiles.count_unmasked_steps(tile, self.first_row(tile))
                first = jnp.clip(seen - 1, 0, tile.steps - 1)
                state = lax.fori_loop(0, first, functools.partial(step, seen=True), state)
            state = lax.fori_loop(first, tile.steps - 1, step, state)
            if config.own_output:
                plgpu.barrier_arrive(memory.queries_read.at[self.wg])
            if self.gate is not None:
                rows = pl.ds(self.first_row(tile), ROWS)
                gate = self.gate.at[tile.row, rows, tile.head]
                self.await_stage()
                plgpu.copy_gmem_to_smem(gate, self.stage, memory.gate_loaded.at[self.wg])
            out = self.last_values(tile, done, state)
            self.write(tile, state.top, state.total, out)
            if not config.own_output:
                plgpu.barrier_arrive(memory.queries_read.at[self.wg])

        @pl.when(tile.steps == 0)
        def _see_nothing() -> None:
            if not config.own_output:
                plgpu.barrier_wait(memory.queries_loaded.at[self.wg])
            self.store(tile, nothing - jnp.inf, zeros(ROWS, self.head_dim))
            if not config.own_output:
                plgpu.barrier_arrive(memory.queries_read.at[self.wg])

        return done + tile.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaPrefillCta:
    """The warp-specialized body of one CTA.

    Attributes:
        sharing: The number of heads of `q` that share a key-value head.
        copies: The number of boxes of a step of the cache.
        blocks, items: The number of resident CTAs, and of tiles in all.
    """

    config: GqaPrefillTileConfig
    tiles: GqaPrefillTileScheduler
    scores: ScoreScaling
    sharing: int
    copies: int
    head_dim: int
    dtype: Any
    blocks: int
    items: int
    interpret: bool

    def run(self, **refs: Any) -> None:
        """Runs the CTA; `refs` are those of the operands, of `out` and `lse`, and of
        `GqaPrefillSmem`."""
        config, wg = self.config, lax.axis_index("wg")
        memory = GqaPrefillSmem(**{name: refs.pop(name) for name in GqaPrefillSmem._fields})
        bounds, drawn = refs.pop("bounds"), refs.pop("drawn")
        named = ("sinks", "firsts", "shift", "gate", "out", "lse")
        results = {name: refs.pop(name) for name in named}
        at = functools.partial(self.tiles.at, bounds_ref=bounds, firsts_ref=results["firsts"])
        each = functools.partial(self.each_tile, at, drawn, memory)

        @pl.when(wg < config.warpgroups)
        def _compute() -> None:
            plgpu.set_max_registers(config.compute_registers, action="increase")
            computer = GqaPrefillConsumer(
                config=config, tiles=self.tiles, memory=memory, scores=self.scores,
                head_dim=self.head_dim, dtype=self.dtype, wg=wg, interpret=self.interpret,
                **results,
            )  # fmt: skip

            @pl.when(wg == config.warpgroups - 1)
            def _() -> None:
                plgpu.barrier_arrive(memory.turn.at[0])

            each(False, computer.tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

            # A thread that waits on a barrier must observe each of its completions.
            @pl.when(wg == 0)
            def _() -> None:
                plgpu.barrier_wait(memory.turn.at[0])

        @pl.when(wg == config.warpgroups)
        def _load() -> None:
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            sources = GqaPrefillSources(**refs, sharing=self.sharing)
            loader = GqaPrefillProducer(
                config=config, sources=sources, memory=memory, copies=self.copies
            )
            load = functools.partial(loader.tile, self.tiles)
            loader.drain(each(True, load, (jnp.int32(0), jnp.int32(0))))

    def each_tile(
        self, at: Any, drawn: Any, memory: GqaPrefillSmem, draws: bool, do: Any, carry: Any
    ) -> Any:
        """Runs carry = do(tile, carry) for each tile of the CTA; one warpgroup draws the tiles."""
        block = lax.axis_index("block")
        run = lambda item, carry: do(at(item), carry)  # noqa: E731
        if self.items == self.blocks:
            return run(block, carry)
        turns = WorkQueue(
            drawn, memory.queue, block, blocks=self.blocks, items=self.items,
            interpret=self.interpret,
        )  # fmt: skip
        return turns.each(draws, run, carry)
