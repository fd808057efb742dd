"""The epilogue of a piece in `mla_decode_swap_ab`: it merges two warpgroups' results and stores
them.

Each warpgroup has the maxima and sums of all packed rows over the pages it took, and an output of
its own. The warpgroups exchange all of these through shared memory. Each then adds up the outputs
of half of the packed rows and writes them: a whole row to the output, a piece of a row as a partial
result.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import BLOCK
from jaxattn.kernels.attention.packed_row_layouts import BY_COLUMN, BY_ROW
from jaxattn.kernels.attention.softmax_constants import LOG2E
from jaxattn.kernels.attention.work_iterator import WorkIterator, nothing_or_nan
from jaxattn.kernels.hopper.store.row_store import store
from jaxattn.kernels.hopper.store.transposed_store import store_transposed
from jaxattn.kernels.mla.decode.latent_tile import RANK
from jaxattn.kernels.mla.decode.swap_ab.fp8_register_operands import store_output
from jaxattn.kernels.mla.decode.swap_ab.smem import OUTPUTS, WARPGROUPS, over_out


@dataclasses.dataclass(frozen=True)
class SwapAbExchange:
    """The shared memory through which the two warpgroups exchange their results.

    Attributes:
        wg: The index of this warpgroup, 0 or 1.
        warpgroup_barrier: The barrier at which both arrive.
        tops, totals: float32 [2, N], the largest log2 of each packed row's weights, and their sums
            divided by 2**that.
        units: float32 [2, N], the value that 1 stands for in each output; block-scaled caches only.
        outputs: float32 [2, N, 512 and a margin].
    """

    wg: jax.Array
    warpgroup_barrier: Any
    tops: Any
    totals: Any
    units: Any
    outputs: Any

    def meet(self) -> None:
        """Makes the two warpgroups wait for each other; each then sees what the other has
        written."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.warpgroup_barrier)
        plgpu.barrier_wait(self.warpgroup_barrier)

    def reduce_stats(self, layout: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the maximum and sum of each packed row."""
        tops = [plgpu.load(self.tops.at[i], layout=layout) for i in range(WARPGROUPS)]
        totals = [plgpu.load(self.totals.at[i], layout=layout) for i in range(WARPGROUPS)]
        top = functools.reduce(jnp.maximum, tops)
        parts = [n * jnp.exp2(t - top) for n, t in zip(totals, tops, strict=True)]
        return top, functools.reduce(jnp.add, parts)


@dataclasses.dataclass(frozen=True)
class SwapAbOutputTile:
    """The destinations of the results of a CTA's packed rows.

    Attributes:
        first_rows: `MlaDecodeOutputs.first_rows`.
        rows: Packed rows that the arrays keep per request.
        columns: The CTA's packed rows, a `pl.ds`.
        out, lse: The arrays of whole rows.
        partial, partial_lse: The partial results, or None if there are none.
    """

    part: WorkIterator
    first_rows: Sequence[int]
    rows: int
    columns: Any
    out: Any
    partial: Any
    lse: Any
    partial_lse: Any

    def write(
        self, row: jax.Array, is_whole: jax.Array, first_row: jax.Array, out: jax.Array
    ) -> None:
        """Writes `out` [n, 512], the CTA's packed rows from `first_row` on."""
        row_offset, num_rows = self.columns.start + first_row, out.shape[0]

        @pl.when(is_whole)
        def _whole():
            begin = self.first_rows[0] + row * self.rows + row_offset
            self.out[pl.ds(begin, num_rows), :] = out.astype(self.out.dtype)

        if self.partial is not None:

            @pl.when(jnp.logical_not(is_whole))
            def _piece():
                begin = self.first_rows[1] + self.part.partial_slot(row) * self.rows + row_offset
                self.partial[pl.ds(begin, num_rows), :] = out

    def write_lse(self, row: jax.Array, is_whole: jax.Array, lse: jax.Array) -> None:
        self.part.write_lse(self.lse, self.partial_lse, self.columns, row, is_whole, lse)

    def write_nothing(self, row: jax.Array, known: jax.Array | None) -> None:
        """Writes 0 and an LSE of -inf for a row without keys; NaN if `known` is False, that is, if
        the schedule was made for another length."""
        count = self.columns.size
        begin = self.first_rows[0] + row * self.rows + self.columns.start
        zero = nothing_or_nan(0.0, known, self.out.dtype)
        empty_rows = plgpu.layout_cast(jnp.full((count, RANK), zero), OUTPUTS)
        self.out[pl.ds(begin, count), :] = empty_rows
        lowest = nothing_or_nan(-jnp.inf, known, jnp.float32)
        empty = plgpu.layout_cast(jnp.full((count,), lowest), BY_ROW)
        store(self.lse.at[row, self.columns], empty)


def merge(
    accs: tuple[jax.Array, ...],
    unit: Any,
    shared: SwapAbExchange,
    outputs: SwapAbOutputTile,
    row: jax.Array,
    steps: jax.Array,
    *,
    as_values: bool,
    interpret: bool,
) -> None:
    """Writes a piece's result. Both warpgroups call it after `meet`, when their maxima and sums are
    there.

    Args:
        accs: This warpgroup's output, blocks of [128, N] float32.
        unit: The value that 1 stands for in `accs`; None: `shared.units`.
        row, steps: The piece's row and number of pages.
        as_values: Whether the output's dims are in the order of FP8 values.
    """
    wg, whole = shared.wg, steps == outputs.part.pages_of(row)
    # A NaN total is not 0: a NaN among a row's own keys shows in its output. For a row that sees no
    # key the product is 0 * V, NaN where V is.
    top, total = shared.reduce_stats(BY_COLUMN)
    own = plgpu.load(shared.tops.at[wg], layout=BY_COLUMN)
    share = over_out(jnp.where(total == 0, -1.0, jnp.exp2(own - top) / total))
    if unit is None:
        unit = over_out(plgpu.load(shared.units.at[wg], layout=BY_COLUMN))
    for i, acc in enumerate(accs):
        some = jnp.where(share < 0, 0.0, acc * share * unit)
        if as_values:
            store_output(shared.outputs.at[wg], some, i)
        else:
            to = shared.outputs.at[wg, :, pl.ds(i * BLOCK, BLOCK)]
            store_transposed(to, some, interpret=interpret)
    shared.meet()

    half = outputs.columns.size // WARPGROUPS
    mine = pl.ds(wg * half, half)
    both = [
        plgpu.load(shared.outputs.at[i, mine, pl.ds(0, RANK)], layout=OUTPUTS, optimized=False)
        for i in range(WARPGROUPS)
    ]
    outputs.write(row, whole, wg * half, functools.reduce(jnp.add, both))

    @pl.when(wg == 0)
    def _lse():
        top, total = shared.reduce_stats(BY_ROW)
        lse = (top + jnp.log2(total)) * (1 / LOG2E)
        outputs.write_lse(row, whole, jnp.where(total == 0, -jnp.inf, lse))

    shared.meet()
