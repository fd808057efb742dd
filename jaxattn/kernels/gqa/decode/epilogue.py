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
        both_there: The barrier at which all of them arrive.
    """

    @property
    def outputs(self) -> Any: ...
    @property
    def stats(self) -> Any: ...
    @property
    def both_there(self) -> Any: ...


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
        at = self.first_rows[0] + self.at(pair)
        self.packed.store(self.out, at, first_dim, out.astype(self.out.dtype))

    def write_lse(self, pair: jax.Array, lse: jax.Array) -> None:
        self.packed.store_numbers(self.lse, self.at(pair), lse)

    def at_partial(self, place: SchedulePosition) -> Any:
        begin = self.first_rows[1] + self.part.slot_at(place) * self.rows
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
        plgpu.barrier_arrive(self.memory.both_there)
        plgpu.barrier_wait(self.memory.both_there)


def merge(
    accs: tuple[jax.Array, ...],
    top: jax.Array,
    total: jax.Array,
    epilogue: GqaDecodeEpilogue[Any],
    place: SchedulePosition,
    steps: jax.Array,
    begins: jax.Array | None = None,
) -> None:
    """Writes a piece's result; all consumer warpgroups call it.

    Args:
        accs: This warpgroup's output, blocks of [dims, N] float32.
        top, total: The largest log2 of each packed row's weights, and their sum divided by 2**that.
        place, steps: The piece's place and number of steps.
        begins: The warpgroup that has the piece's first step: sums begin with it, so that their
            bits do not depend on which one it is. None: sums begin with the first warpgroup.
    """
    wg, memory, outputs, pair = epilogue.wg, epilogue.memory, epilogue.outputs, place.row
    consumers = memory.outputs.shape[0]
    columns, dims = outputs.columns.size, outputs.head_dim
    tops, totals = memory.stats.at[1], memory.stats.at[2]
    whole = steps == outputs.part.pages_of(pair)
    head = outputs.part.row_and_head(pair)[1]

    tops[wg], totals[wg] = top, total
    rows = accs[0].shape[0]
    for i, acc in enumerate(accs):
        if epilogue.tiles is not None and not epilogue.interpret:
            epilogue.tiles.store(memory.outputs.at[wg], acc, i)
            continue
        to = memory.outputs.at[wg, :, pl.ds(i * rows, rows)]
        store_transposed(to, acc, interpret=epilogue.interpret)
    epilogue.meet()

    every: list[Any] = list(range(consumers))
    if begins is not None:
        every = [lax.rem(begins + i, consumers) for i in every]
    every_top = [plgpu.load(tops.at[i], layout=BY_ROW) for i in every]
    every_total = [plgpu.load(totals.at[i], layout=BY_ROW) for i in every]
    top = functools.reduce(jnp.maximum, every_top)
    factors = [jnp.exp2(one - top) for one in every_top]
    weighed = [n * factor for n, factor in zip(every_total, factors, strict=True)]
    total = functools.reduce(jnp.add, weighed)
    # A NaN total is not 0: a NaN among a row's own keys shows in its output. For a packed row that
    # sees no key the product is 0 * V, NaN where V is.
    empty = total == 0

    def lse_of(top: jax.Array, total: jax.Array) -> jax.Array:
        lse = (top + jnp.log2(total)) * (1 / LOG2E)
        return jnp.where(empty, -jnp.inf, lse)

    def output(top_now: jax.Array, total_now: jax.Array, first: Any, width: int) -> jax.Array:
        """Returns some dims of the output [N, width], relative to this maximum and sum."""

        def wide(vector: jax.Array) -> jax.Array:
            vector = lax.broadcast_in_dim(vector, (columns, width), [0])
            return plgpu.layout_cast(vector, SCORES)

        share = jnp.exp2(top - top_now) / total_now
        if epilogue.kv_scale is not None:
            share *= epilogue.kv_scale[VALUES, head]
        some = [memory.outputs.at[i, :, pl.ds(first, width)] for i in every]
        both = [plgpu.load(x, layout=SCORES, optimized=False) for x in some]
        share = jnp.where(empty, -1.0, share)
        shares = [wide(jnp.where(empty, -1.0, factor * share)) for factor in factors]
        out = functools.reduce(jnp.add, [x * by for x, by in zip(both, shares, strict=True)])
        return jnp.where(shares[0] < 0, 0.0, out)

    def write(first: Any, width: int) -> None:
        @pl.when(whole)
        def _whole():
            top_now, total_now = top, total
            if epilogue.sinks is not None:
                sink = outputs.packed.of_heads(epilogue.sinks, head)
                top_now, total_now = with_sink(top, total, sink)
            out = output(top_now, total_now, first, width)
            if epilogue.gate is not None:
                gate = outputs.packed.load(epilogue.gate, outputs.at(pair), first, width)
                dead = lax.broadcast_in_dim(empty.astype(jnp.float32), (columns, width), [0])
                dead = plgpu.layout_cast(dead, SCORES)
                out = jnp.where(dead > 0, 0.0, gated(out, gate))
            outputs.write(pair, first, out)
            pl.when(wg == 0)(lambda: outputs.write_lse(pair, lse_of(top_now, total_now)))

        if outputs.partial is None:
            return

        @pl.when(jnp.logical_not(whole))
        def _piece():
            to = outputs.at_partial(place), pl.ds(first, width)
            outputs.partial[to] = output(top, total, first, width)

            @pl.when(wg == 0)
            def _lse():
                slot = outputs.part.slot_at(place)
                store(outputs.partial_lse.at[slot, outputs.columns], lse_of(top, total))

    each = -(-dims // (consumers * WIDTH)) * WIDTH
    if dims == consumers * each:
        write(wg * each, each)
    else:
        pl.when(wg < dims // each)(lambda: write(wg * each, each))
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
