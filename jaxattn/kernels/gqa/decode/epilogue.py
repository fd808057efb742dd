"""The epilogue of a piece in `gqa_decode`: it merges all warpgroups' results and stores them.

The warpgroups exchange maxima, sums and outputs through shared memory. Each then writes its share
of the dims. A whole pair goes to the output, with its sinks and gate; a piece of a pair becomes a
partial result, which has neither.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.gate_and_sink import gated, with_sink
from jaxattn.kernels.attention.packed_row_layouts import BY_ROW, SCORES
from jaxattn.kernels.attention.softmax_constants import LOG2E
from jaxattn.kernels.attention.work_iterator import SchedulePosition
from jaxattn.kernels.gqa.decode.fp8_register_operands import GqaFp8Operands
from jaxattn.kernels.gqa.decode.load.packed_rows import WIDTH, PackedRows
from jaxattn.kernels.gqa.decode.split_kv.work_iterator import VALUES, HeadWorkIterator
from jaxattn.kernels.hopper.store.row_store import store
from jaxattn.kernels.hopper.store.transposed_store import store_transposed


class ExchangeSmemProtocol(Protocol):
    """The shared memory through which a CTA's w consumer warpgroups exchange results.

    Attributes:
        outputs: float32 [w, N, D and a margin].
        stats: float32 [3, w, N], maxima at 1 and sums at 2.
        consumer_barrier: The barrier at which all of them arrive.
    """

    @property
    def outputs(self) -> Any: ...
    @property
    def stats(self) -> Any: ...
    @property
    def consumer_barrier(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class GqaOutputTile:
    """The destinations of the results of a CTA's packed rows.

    Attributes:
        first_rows: First rows of the output, and of the partial results, in the arrays below.
        rows: Packed rows per pair in the partial results.
        columns: The CTA's packed rows, a `pl.ds`; `packed` has their rows in callers' arrays.
        out: [.., D], lse [B * S * H]: the arrays of whole pairs.
        partial, partial_lse: [.., D] and [2 * parts, rows], or None if there are none.
    """

    part: HeadWorkIterator
    first_rows: Sequence[int]
    rows: int
    head_dim: int
    columns: Any
    packed: PackedRows
    out: Any
    partial: Any
    lse: Any
    partial_lse: Any

    def at(self, pair: jax.Array) -> jax.Array:
        """Returns the first of a pair's rows in callers' arrays."""
        return self.packed.row_of(*self.part.row_and_head(pair))

    def write(self, pair: jax.Array, first_dim: Any, out: jax.Array) -> None:
        """Writes dims of a pair's output."""
        first_row = self.first_rows[0] + self.at(pair)
        self.packed.store(self.out, first_row, first_dim, out.astype(self.out.dtype))

    def write_lse(self, pair: jax.Array, lse: jax.Array) -> None:
        self.packed.store_numbers(self.lse, self.at(pair), lse)

    def at_partial(self, position: SchedulePosition) -> Any:
        begin = self.first_rows[1] + self.part.slot_at(position) * self.rows
        return pl.ds(begin + self.columns.start, self.columns.size)


@dataclasses.dataclass(frozen=True)
class GqaDecodeEpilogue[M: ExchangeSmemProtocol]:
    """The operands of the epilogue of one warpgroup.

    Attributes:
        wg: The index of this warpgroup, from 0.
        sinks: float32 [H], or None.
        gate: [B * S * H, D], or None.
        tiles: The operands of an FP8 cache, whose outputs are in their order; else None.
        kv_scale: float32 [2, Hk] of such a cache; else None.
    """

    wg: jax.Array
    memory: M
    outputs: GqaOutputTile
    sinks: Any
    gate: Any
    tiles: GqaFp8Operands | None
    kv_scale: Any
    interpret: bool

    def meet(self) -> None:
        """Makes the warpgroups wait for one another; each then sees what the others have
        written."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.memory.consumer_barrier)
        plgpu.barrier_wait(self.memory.consumer_barrier)


def merge(
    accs: tuple[jax.Array, ...],
    top: jax.Array,
    total: jax.Array,
    epilogue: GqaDecodeEpilogue[Any],
    position: SchedulePosition,
    steps: jax.Array,
    begins: jax.Array | None = None,
) -> None:
    """Writes a piece's result; all consumer warpgroups call it.

    Args:
        accs: This warpgroup's output, blocks of [dims, N] float32.
        top, total: The largest log2 of each packed row's weights, and their sum divided by 2**that.
        position, steps: The piece's place and number of steps.
        begins: The warpgroup that has the piece's first step: sums begin with it, so that their
            bits do not depend on which one it is. None: sums begin with the first warpgroup.
    """
    wg, memory, outputs, pair = epilogue.wg, epilogue.memory, epilogue.outputs, position.row
    consumers = memory.outputs.shape[0]
    columns, dims = outputs.columns.size, outputs.head_dim
    tops, totals = memory.stats.at[1], memory.stats.at[2]
    is_whole = steps == outputs.part.pages_of(pair)
    head = outputs.part.row_and_head(pair)[1]

    tops[wg], totals[wg] = top, total
    rows = accs[0].shape[0]
    for i, acc in enumerate(accs):
        if epilogue.tiles is not None and not epilogue.interpret:
            epilogue.tiles.store(memory.outputs.at[wg], acc, i)
            continue
        smem_block = memory.outputs.at[wg, :, pl.ds(i * rows, rows)]
        store_transposed(smem_block, acc, interpret=epilogue.interpret)
    epilogue.meet()

    wg_order: list[Any] = list(range(consumers))
    if begins is not None:
        wg_order = [lax.rem(begins + i, consumers) for i in wg_order]
    wg_tops = [plgpu.load(tops.at[i], layout=BY_ROW) for i in wg_order]
    wg_totals = [plgpu.load(totals.at[i], layout=BY_ROW) for i in wg_order]
    top = functools.reduce(jnp.maximum, wg_tops)
    factors = [jnp.exp2(one - top) for one in wg_tops]
    weighted_totals = [n * factor for n, factor in zip(wg_totals, factors, strict=True)]
    total = functools.reduce(jnp.add, weighted_totals)
    # A NaN total is not 0: a NaN among a row's own keys shows in its output. For a packed row that
    # sees no key the product is 0 * V, NaN where V is.
    empty = total == 0

    def lse_of(top: jax.Array, total: jax.Array) -> jax.Array:
        lse = (top + jnp.log2(total)) * (1 / LOG2E)
        return jnp.where(empty, -jnp.inf, lse)

    def output(
        final_top: jax.Array, final_total: jax.Array, first_dim: Any, width: int
    ) -> jax.Array:
        """Returns some dims of the output [N, width], relative to this maximum and sum."""

        def wide(vector: jax.Array) -> jax.Array:
            vector = lax.broadcast_in_dim(vector, (columns, width), [0])
            return plgpu.layout_cast(vector, SCORES)

        share = jnp.exp2(top - final_top) / final_total
        if epilogue.kv_scale is not None:
            share *= epilogue.kv_scale[VALUES, head]
        wg_outputs = [memory.outputs.at[i, :, pl.ds(first_dim, width)] for i in wg_order]
        loaded_outputs = [plgpu.load(x, layout=SCORES, optimized=False) for x in wg_outputs]
        share = jnp.where(empty, -1.0, share)
        shares = [wide(jnp.where(empty, -1.0, factor * share)) for factor in factors]
        out = functools.reduce(
            jnp.add, [x * wg_share for x, wg_share in zip(loaded_outputs, shares, strict=True)]
        )
        return jnp.where(shares[0] < 0, 0.0, out)

    def write(first_dim: Any, width: int) -> None:
        @pl.when(is_whole)
        def _whole():
            final_top, final_total = top, total
            if epilogue.sinks is not None:
                sink = outputs.packed.of_heads(epilogue.sinks, head)
                final_top, final_total = with_sink(top, total, sink)
            out = output(final_top, final_total, first_dim, width)
            if epilogue.gate is not None:
                gate = outputs.packed.load(epilogue.gate, outputs.at(pair), first_dim, width)
                is_empty_row = lax.broadcast_in_dim(
                    empty.astype(jnp.float32), (columns, width), [0]
                )
                is_empty_row = plgpu.layout_cast(is_empty_row, SCORES)
                out = jnp.where(is_empty_row > 0, 0.0, gated(out, gate))
            outputs.write(pair, first_dim, out)
            pl.when(wg == 0)(lambda: outputs.write_lse(pair, lse_of(final_top, final_total)))

        if outputs.partial is None:
            return

        @pl.when(jnp.logical_not(is_whole))
        def _piece():
            partial_index = outputs.at_partial(position), pl.ds(first_dim, width)
            outputs.partial[partial_index] = output(top, total, first_dim, width)

            @pl.when(wg == 0)
            def _lse():
                slot = outputs.part.slot_at(position)
                store(outputs.partial_lse.at[slot, outputs.columns], lse_of(top, total))

    dims_per_wg = -(-dims // (consumers * WIDTH)) * WIDTH
    if dims == consumers * dims_per_wg:
        write(wg * dims_per_wg, dims_per_wg)
    else:
        pl.when(wg < dims // dims_per_wg)(lambda: write(wg * dims_per_wg, dims_per_wg))
    epilogue.meet()


def write_nothing(outputs: GqaOutputTile, pair: jax.Array, known: jax.Array | None) -> None:
    """Writes 0 and an LSE of -inf for a pair without keys, and NaN if `known` is False: the
    schedule has another length."""
    count, dims = outputs.columns.size, outputs.head_dim
    zero, lowest = jnp.float32(0), jnp.float32(-jnp.inf)
    if known is not None:
        zero, lowest = (jnp.where(known, x, jnp.nan) for x in (zero, lowest))
    nothing = jnp.full((count, WIDTH), zero.astype(outputs.out.dtype))
    nothing = plgpu.layout_cast(nothing, SCORES)
    for first in range(0, dims, WIDTH):
        outputs.write(pair, first, nothing)
    lse = plgpu.layout_cast(jnp.full((count,), lowest), BY_ROW)
    outputs.write_lse(pair, lse)
