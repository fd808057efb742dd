"""The CTA of `gqa_decode` and `turbo_decode`: its operands and its warpgroups' roles.

One producer warpgroup loads, and walks the part ahead of the others. The consumer warpgroups take a
part's steps, 64 tokens each, in turns, from piece to piece. A subclass for each storage format of
the cache reads and multiplies it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.packed_row_layouts import BY_ROW, SCORES
from jaxattn.kernels.attention.softmax_constants import EMPTY, LOG2E, MASKED
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.attention.work_iterator import SchedulePosition, visible_keys
from jaxattn.kernels.gqa.decode.epilogue import (
    GqaDecodeEpilogue,
    GqaOutputTile,
    merge,
    write_nothing,
)
from jaxattn.kernels.gqa.decode.fp8_register_operands import GqaFp8Operands
from jaxattn.kernels.gqa.decode.load.packed_rows import WIDTH, PackedRows
from jaxattn.kernels.gqa.decode.smem import ACROSS, QUERIES
from jaxattn.kernels.gqa.decode.split_kv.combine import SplitKvCombine, chunks_of
from jaxattn.kernels.gqa.decode.split_kv.semaphore import SplitSemaphore
from jaxattn.kernels.gqa.decode.split_kv.work_iterator import HeadWorkIterator

COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    reduction_scratch_bytes=0,  # reductions stay inside a warp
    unsafe_no_auto_barriers=True,  # the body synchronizes warps itself
    # The body names its layouts; layout inference does not find those of padded shared memory.
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaDecodeConfig:
    """The static properties of a launch, known when it is traced.

    Attributes:
        group: Query heads that share a KV head.
        columns: N, the packed rows s * group + j of a CTA.
        out_rows: Packed rows per pair in the partial results.
        parts: Parts of the schedule.
        first_rows: `GqaDecodeOutputs.first_rows`.
        scale: The scale of all scores; each packed row may also have a factor of its own.
        consumers: w, the consumer warpgroups, which take steps in turns.
        registers: Registers per thread of the producer, and of each consumer; None: all warpgroups
            keep what they have.
        batch_invariant: Whether the schedule is batch-invariant.
    """

    q_len: int
    group: int
    kv_heads: int
    head_dim: int
    columns: int
    out_rows: int
    parts: int
    first_rows: Sequence[int]
    scale: float
    window: int | None
    soft_cap: float | None
    page_size: int
    consumers: int
    registers: tuple[int, int] | None
    batch_invariant: bool
    interpret: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaDecodeRefs:
    """The refs of a CTA's operands and results. Queries are in the form that the CTA's loader
    takes."""

    q_ref: Any
    kv_ref: Any
    layer_ref: Any
    table_ref: Any
    lens_ref: Any
    scheduled_lens_ref: Any  # None: the schedule is the call's own
    cuts_ref: Any
    order_ref: Any  # None: a schedule without an order
    query_lens_ref: Any  # None: every row has all S tokens
    sinks_ref: Any  # float32 [H]
    gate_ref: Any  # [B * S * H, D]
    kv_scale_ref: Any = None  # float32 [2, Hk], for an FP8 cache
    # `OversubscribedSchedule.first_slots`; None: the pieces of part i have slots 2 i and 2 i + 1.
    part_slots_ref: Any = None
    out_ref: Any  # [.., D]
    partial_ref: Any  # None: no pair is split
    lse_ref: Any  # float32 [B * S * H]
    partial_lse_ref: Any
    slots_ref: Any  # of the schedule; None: no pair is split, or another launch merges
    arrived_ref: Any  # `SplitSemaphore`; None in the same cases


def refs_of[M](refs: Mapping[str, Any], memory: Callable[..., M]) -> tuple[GqaDecodeRefs, M]:
    """Splits a launch's refs, by name, into those of operands and results, and the shared
    memory."""
    names = {field.name for field in dataclasses.fields(GqaDecodeRefs)}
    shared = {name: ref for name, ref in refs.items() if name not in names}
    return GqaDecodeRefs(**{name: ref for name, ref in refs.items() if name in names}), memory(
        **shared
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaDecodeTile:
    """A pair's steps in a part, as a consumer warpgroup sees them.

    Attributes:
        done: Steps of the part before the piece.
        first_step: The first of the piece's steps that this warpgroup takes.
        first_token: The first token of the piece.
        length: Tokens of the pair's row.
        begin: The first key that any of its query tokens sees, if `GqaDecodeCta.first_key` returns
            it.
        visible: [N, 64], the number of keys that the packed row of each score sees.
        min_visible: The least of these numbers in a row without padding; 0 in other rows.
        factor: The factor of the scores, a number or [N, 64].
        queries_at: The index, of two places in shared memory, of the piece's queries.
    """

    done: jax.Array
    first_step: jax.Array
    first_token: jax.Array
    length: jax.Array
    begin: jax.Array | None
    visible: jax.Array
    min_visible: jax.Array
    factor: Any
    queries_at: jax.Array


class GqaDecodeCta[C: GqaDecodeConfig, M]:
    """A CTA that computes `columns` packed rows of each pair in its part.

    A subclass reads its cache: the producer warpgroup runs `load`, and the consumers run `empty`,
    `step` and `result` on a piece's steps.
    """

    def __init__(self, cut: C, refs: GqaDecodeRefs, memory: M):
        self.cut, self.refs, self.memory = cut, refs, memory
        self.wg, self.tile, self.index = (lax.axis_index(name) for name in ("wg", "tile", "part"))
        self.part = self.pairs()
        self.mine = pl.ds(self.tile * cut.columns, cut.columns)
        self.rows = PackedRows(
            q_len=cut.q_len, group=cut.group, kv_heads=cut.kv_heads, columns=cut.columns,
            first_row=self.tile * cut.columns, interpret=cut.interpret,
        )  # fmt: skip
        outputs = GqaOutputTile(
            self.part, cut.first_rows, cut.out_rows, cut.head_dim, self.mine, self.rows,
            refs.out_ref, refs.partial_ref, refs.lse_ref, refs.partial_lse_ref,
        )  # fmt: skip
        self.epilogue = GqaDecodeEpilogue[Any](
            self.wg, memory, outputs, refs.sinks_ref, refs.gate_ref, self.tiles(),
            refs.kv_scale_ref, cut.interpret,
        )  # fmt: skip

    def load(self) -> None:
        """Runs all copies of the part, and `write_empty_rows`, in the producer warpgroup."""
        raise NotImplementedError

    def empty(self) -> Any:
        """Returns a piece's state before its first step."""
        raise NotImplementedError

    def step(self, piece: GqaDecodeTile, i: jax.Array, state: Any) -> Any:
        """Returns the state after the `i`-th of the piece's steps that this warpgroup takes."""
        raise NotImplementedError

    def steps(self, piece: GqaDecodeTile, num_steps: jax.Array, state: Any) -> Any:
        """Returns the state after `num_steps` of these steps."""
        return lax.fori_loop(0, num_steps, functools.partial(self.step, piece), state)

    def result(self, state: Any) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
        """Returns (output in blocks [dims, N], largest log2 of weights [N], their sums [N, 64])."""
        raise NotImplementedError

    def tiles(self) -> GqaFp8Operands | None:
        """The operands of an FP8 cache, or None."""
        return None

    def first_key(self, pair: jax.Array) -> jax.Array | None:
        """The key before which nobody sees keys, whose values must be cleared; None: nothing to
        clear."""
        return None

    def first_step(self, done: jax.Array) -> jax.Array:
        """Returns the first of a piece's steps that this warpgroup takes."""
        consumers = self.cut.consumers
        return lax.rem(self.wg + consumers - lax.rem(done, consumers), consumers)

    def pairs(self) -> HeadWorkIterator:
        return HeadWorkIterator(**self.of_pairs())

    def of_pairs(self) -> dict[str, Any]:
        """The fields of `HeadWorkIterator`."""
        cut, refs, cuts_ref = self.cut, self.refs, self.refs.cuts_ref
        begin, end = ((cuts_ref[0, i], cuts_ref[1, i]) for i in (self.index, self.index + 1))
        layer = jnp.clip(refs.layer_ref[0], 0, refs.kv_ref.shape[0] - 1)
        first_slot = 2 * self.index
        if refs.part_slots_ref is not None:
            first_slot = refs.part_slots_ref[self.index]
        prefetch_refs = (cuts_ref, refs.part_slots_ref, refs.slots_ref, refs.arrived_ref)
        return dict(
            begin=begin, end=end, lens_ref=refs.lens_ref, table_ref=refs.table_ref,
            kv_ref=refs.kv_ref, layer=layer, index=self.index,
            order_ref=refs.order_ref, kv_heads=cut.kv_heads, head_dim=cut.head_dim,
            q_len=cut.q_len, window=cut.window, query_lens_ref=refs.query_lens_ref,
            scheduled_lens_ref=refs.scheduled_lens_ref, first_slot=first_slot,
            prefetch_refs=tuple(ref for ref in prefetch_refs if ref is not None),
        )  # fmt: skip

    def run(self) -> None:
        cut = self.cut

        @pl.when(self.wg == cut.consumers)
        def _load() -> None:
            if cut.registers is not None:
                plgpu.set_max_registers(cut.registers[0], action="decrease")
            self.load()

        @pl.when(self.wg < cut.consumers)
        def _compute() -> None:
            if cut.registers is not None:
                plgpu.set_max_registers(cut.registers[1], action="increase")
            self.compute()

    def compute(self) -> None:
        """Processes each piece of the part."""
        nothing = (jnp.int32(0), jnp.int32(0))
        self.part.each_piece(self._piece, nothing)

    def write_empty_rows(self) -> None:
        """Writes the results of rows without keys, and NaN for rows whose length differs from the
        schedule's. The CTAs take these rows in turns."""
        rows, kv_heads = self.refs.lens_ref.shape[0], self.cut.kv_heads

        @pl.loop(self.index, rows, step=self.cut.parts)
        def _each(row):
            first = row * kv_heads
            known = self.part.known(first)

            @pl.when(self.part.pages_of(first) <= 0)
            def _():
                @pl.loop(first, first + kv_heads)
                def _each_pair(pair):
                    write_nothing(self.epilogue.outputs, pair, known)

    def _piece(
        self, position: SchedulePosition, start: jax.Array, steps: jax.Array, carry: Any
    ) -> Any:
        """Processes this warpgroup's steps of a piece, and merges the results of all warpgroups."""
        (number, done), pair = carry, position.row
        piece = self._opened(pair, start, number, done)
        consumers, memory = self.cut.consumers, self.epilogue.memory
        num_steps = lax.div(steps + (consumers - 1) - piece.first_step, consumers)
        accs, top, total = self.result(self.steps(piece, num_steps, self.empty()))
        begins = lax.rem(done, consumers) if self.cut.batch_invariant else None
        merge(accs, top, total.sum(axis=1), self.epilogue, position, steps, begins)
        if self.refs.slots_ref is not None:
            is_whole = steps == self.part.pages_of(pair)
            pl.when(jnp.logical_not(is_whole))(lambda: self._combine(pair))
        # Only here is it known that all four warps have observed the arrival of the queries.
        plgpu.barrier_arrive(memory.queries_read.at[piece.queries_at])
        return number + 1, done + steps

    def _opened(
        self, pair: jax.Array, start: jax.Array, number: jax.Array, done: jax.Array
    ) -> GqaDecodeTile:
        """Returns a piece after waiting for its queries."""
        cut, part = self.cut, self.part
        length, queries = part.length_of(pair), part.queries_of(pair)
        begin = self.first_key(pair)
        first_token = (start + part.first_step_of(pair)) * PAGE
        visible = visible_keys(
            self.rows.first_row + self.iota(0), length, queries,
            q_len=cut.q_len, num_heads=cut.group, layout=SCORES,
        )  # fmt: skip
        min_visible = length - (cut.q_len - 1)
        if queries is not None:
            min_visible = jnp.where(queries == cut.q_len, min_visible, 0)
        queries_at = lax.rem(number, QUERIES)
        plgpu.barrier_wait(self.epilogue.memory.queries_loaded.at[queries_at])
        return GqaDecodeTile(
            done=done, first_step=self.first_step(done), first_token=first_token, length=length,
            begin=begin, visible=visible, min_visible=min_visible,
            factor=self.factor(pair, queries_at),
            queries_at=queries_at,
        )  # fmt: skip

    def _combine(self, pair: jax.Array) -> None:
        """Counts a piece that was written; if it is the last one to arrive, merges the pair's
        partial results."""
        refs, outputs, cut = self.refs, self.epilogue.outputs, self.cut
        # The semaphore reuses the memory of the rescaling, which is over; each warpgroup has its
        # own.
        arrivals = SplitSemaphore(refs.arrived_ref, self.epilogue.memory.stats.at[0])
        slots = [refs.slots_ref[i, pair] for i in range(refs.slots_ref.shape[0])]
        tiles = cut.out_rows // cut.columns
        pl.when(self.wg == 0)(lambda: arrivals.count(pair * tiles + self.tile, slots[1]))
        self.epilogue.meet()

        @pl.when(arrivals.last(self.wg))
        def _merge() -> None:
            combination = SplitKvCombine(
                first_rows=cut.first_rows, rows=cut.out_rows, out=outputs.out, lse=outputs.lse,
                partial=outputs.partial, partial_lse=outputs.partial_lse,
                sinks=self.epilogue.sinks, gate=self.epilogue.gate,
            )  # fmt: skip
            row, head = self.part.row_and_head(pair)
            chunks = chunks_of(cut.head_dim, cut.consumers)
            shares = cut.head_dim // (chunks * WIDTH)

            @pl.loop(self.wg, shares * (cut.columns // ACROSS), step=cut.consumers)
            def _each(i: jax.Array) -> None:
                first = self.rows.first_row + lax.div(i, shares) * ACROSS
                eight = dataclasses.replace(self.rows, columns=ACROSS, first_row=first)
                first_dim = lax.rem(i, shares) * (chunks * WIDTH)
                combination.write(row, head, slots, eight, first_dim, chunks)

    def factor(self, pair: jax.Array, queries_at: jax.Array) -> Any:
        """Returns the factor of a pair's scores, whose queries are at place `queries_at`."""
        return self.cut.scale

    def softened(
        self, scores: jax.Array, factor: Any, piece: GqaDecodeTile, token: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (which scores count, log2 of their weights) for the 64 keys from `token` on."""
        cut = self.cut
        if cut.soft_cap is None:
            scores = scores * (factor * LOG2E)
        else:
            # tanh by exp2, since the approximate instruction is off by 2**-11 of the cap.
            power = jnp.exp2(scores * (factor * (2 * LOG2E / cut.soft_cap)))
            scores = (1.0 - 2.0 / (power + 1.0)) * (cut.soft_cap * LOG2E)
        seen = self.seen(piece, token)
        return seen, jnp.where(seen, scores, MASKED)

    def all_visible(self, piece: GqaDecodeTile, token: jax.Array) -> jax.Array:
        """Whether each packed row sees all of the 64 keys from `token` on."""
        seen = token + PAGE <= piece.min_visible
        if self.cut.window is not None:
            seen &= token >= piece.length - self.cut.window
        return seen

    def seen(self, piece: GqaDecodeTile, token: jax.Array) -> jax.Array:
        """Returns which of the 64 keys from `token` on each packed row sees."""
        key = self.iota(1) + token
        seen = key < piece.visible
        if self.cut.window is not None:
            seen &= key >= piece.visible - self.cut.window
        return seen

    def over_keys(self, vector: jax.Array) -> jax.Array:
        """Broadcasts a number of each packed row over its scores."""
        wide = lax.broadcast_in_dim(vector, (self.cut.columns, PAGE), [0])
        return plgpu.layout_cast(wide, SCORES)

    def iota(self, dimension: int) -> jax.Array:
        shape = (self.cut.columns, PAGE)
        return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=SCORES)

    def init_max(self) -> jax.Array:
        """The maxima of logarithms before the first step."""
        return plgpu.layout_cast(jnp.full((self.cut.columns,), EMPTY, jnp.float32), BY_ROW)

    def init_sum(self) -> jax.Array:
        """The sums of weights before the first step."""
        return plgpu.layout_cast(jnp.zeros((self.cut.columns, PAGE), jnp.float32), SCORES)

    def init_output(self, dims: int) -> jax.Array:
        """A block of the output, with `dims` dims, before the first step."""
        nothing = jnp.zeros((dims, self.cut.columns), jnp.float32)
        return plgpu.layout_cast(nothing, plgpu.Layout.WGMMA)
