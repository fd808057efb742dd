"""The body of `mla_decode_swap_ab`: two warpgroups that take a row's pages in turns.

Heads are the columns (N) of both products, so that the cost of few heads is that of few columns:

    scores^T [64 tokens, N] = K Q^T          K [64, 576] in shared memory
    out^T    [512, N]      += V^T P^T        V the same 64 tokens, seen transposed

The softmax reads the scores transposed through shared memory, so that half a warp holds the scores
of a head; P returns the same way. Each warpgroup has maxima, sums and an output of its own, and
epilogue.py merges them at the end of a row's piece.

TMA loads pages as they are stored. One class per storage format multiplies them: mainloop.py for
16-bit caches, fp8_mainloop.py for FP8 caches, and interpreter.py for the interpreter.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import BLOCK
from jaxattn.kernels.attention.packed_row_layouts import BY_ROW, SCORES
from jaxattn.kernels.attention.softmax_constants import EMPTY
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.attention.work_iterator import SchedulePosition, visible_keys
from jaxattn.kernels.hopper.instructions import issue_loads
from jaxattn.kernels.mla.decode.latent_tile import BLOCKS
from jaxattn.kernels.mla.decode.swap_ab.cta_context import SwapAbCta
from jaxattn.kernels.mla.decode.swap_ab.epilogue import merge
from jaxattn.kernels.mla.decode.swap_ab.fp8_mainloop import LEAST_UNIT, SwapAbFp8Mainloop
from jaxattn.kernels.mla.decode.swap_ab.interpreter import (
    InterpretedSwapAbFp8Mainloop,
    InterpretedSwapAbMainloop,
)
from jaxattn.kernels.mla.decode.swap_ab.mainloop import SwapAbMainloop, SwapAbWorkTile, iota
from jaxattn.kernels.mla.decode.swap_ab.smem import WARPGROUPS


class SwapAbKernel(SwapAbCta):
    """The two warpgroups of a CTA."""

    def run(self) -> None:
        self._load_first(*self.part.first_piece())
        begun = self.part.each_piece(self._piece, jnp.bool_(False))
        pl.when(jnp.logical_not(begun))(self._write_empty_rows)

    def _write_empty_rows(self) -> None:
        @pl.loop(self.index, self.refs.lens_ref.shape[0], step=self.cut.parts)
        def _each_row(row):
            @pl.when((self.part.pages_of(row) <= 0) & (self.wg == 0))
            def _():
                self.outputs.write_nothing(row, self.part.known(row))

    def _piece(
        self, position: SchedulePosition, start: jax.Array, steps: jax.Array, begun: jax.Array
    ) -> Any:
        """Computes a piece: the two warpgroups take its pages in turns, then merge their results.
        Rows without tokens are written while the first piece's copies run, because reading their
        lengths at the end would make the CTA longer."""
        row = position.row
        refs, scaled = self.refs, self.cut.latents.block_scaled
        pl.when(position.number != self.part.begin[0])(
            lambda: self._load_first(position, start, steps)
        )
        pages = self._pages(self._select_pages(position, start, steps))
        pl.when(jnp.logical_not(begun))(self._write_empty_rows)
        pages.see(*self._seen(row))
        plgpu.barrier_wait(refs.q_loaded)
        pages.take_queries()
        top, total, unit, accs = pages.each(self._empty())
        self.tops[self.wg], self.totals[self.wg] = top, total.sum(axis=1)
        if scaled:
            self.units[self.wg] = unit
        self.shared.meet()
        merge(
            accs, None if scaled else pages.unit_of_all, self.shared, self.outputs, row, steps,
            as_values=pages.as_values, interpret=self.cut.interpret,
        )  # fmt: skip
        return jnp.bool_(True)

    def _select_pages(
        self, position: SchedulePosition, start: jax.Array, steps: jax.Array
    ) -> SwapAbWorkTile:
        """The pages of a piece that this warpgroup takes."""
        num_pages = lax.div(steps + 1 - self.wg, WARPGROUPS)
        return SwapAbWorkTile(position.row, start + self.wg, start + steps, num_pages)

    def _load_first(self, position: SchedulePosition, start: jax.Array, steps: jax.Array) -> None:
        """Starts the copies of a piece's queries and first pages. Those of a part's first piece
        come before everything else, so that what is computed once for all pages overlaps with them.
        """
        pages = self._pages(self._select_pages(position, start, steps))
        numbers = pages.first_numbers()
        issue_loads(interpret=self.cut.interpret)  # together with the row's length
        pl.when(steps > 0)(lambda: self._load_queries(position.row))
        pages.load_first(numbers)

    def _pages(self, piece: SwapAbWorkTile) -> SwapAbMainloop:
        if self.cut.latents.quantized:
            return (InterpretedSwapAbFp8Mainloop if self.cut.interpret else SwapAbFp8Mainloop)(
                self, piece
            )
        return (InterpretedSwapAbMainloop if self.cut.interpret else SwapAbMainloop)(self, piece)

    def _load_queries(self, row: jax.Array) -> None:
        @pl.when(self.wg == 0)
        def _():
            for (begin, width), target in zip(self.cut.pieces, self.q_loads, strict=False):
                some = self.refs.q_ref.at[row, self.mine, pl.ds(begin, width)]
                plgpu.copy_gmem_to_smem(some, target.at[0], self.refs.q_loaded)

    def _seen(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the tokens of the row, and how many of them the packed row of each score sees."""
        cut, refs = self.cut, self.refs
        length = refs.lens_ref[row]
        queries = None if refs.query_lens_ref is None else refs.query_lens_ref[row]
        visible = visible_keys(
            self.tile * cut.columns + iota(cut.columns, 0), length, queries,
            q_len=cut.q_len, num_heads=cut.num_heads, layout=SCORES,
        )  # fmt: skip
        return length, visible

    def _empty(self) -> tuple[Any, ...]:
        """The maxima, sums, unit and output before the first page."""
        columns = self.cut.columns
        nothing = jnp.zeros((BLOCK, columns), jnp.float32)
        nothing = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA)
        return (
            plgpu.layout_cast(jnp.full((columns,), EMPTY, jnp.float32), BY_ROW),
            plgpu.layout_cast(jnp.zeros((columns, PAGE), jnp.float32), SCORES),
            plgpu.layout_cast(jnp.full((columns,), LEAST_UNIT, jnp.float32), BY_ROW),
            (nothing,) * BLOCKS,
        )
