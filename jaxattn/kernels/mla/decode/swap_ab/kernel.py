"""The body of `mla_decode_swap_ab`: two warpgroups that take a row's pages in turns.

Heads are the columns of both products, so that a few of them cost a few columns:

    scores^T [64 tokens, N] = K Q^T          K [64, 576] in shared memory
    out^T    [512, N]      += V^T P^T        V the same 64 tokens, seen transposed

The softmax runs over the scores turned round through shared memory, so that a head's lie in half a
warp; P goes back the same way. Each warpgroup has maxima, sums and an output of its own, and at
the end of a row's piece epilogue.py makes one result of the two.

Pages come by TMA as they are stored. How they meet the queries is one class for each way to store
them: mainloop.py of 16-bit caches, fp8_mainloop.py of FP8 ones. What the interpreter does in
their place is in interpreter.py.
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
from jaxattn.kernels.attention.work_partition import SchedulePosition, visible_keys
from jaxattn.kernels.hopper.instructions import issue_loads
from jaxattn.kernels.mla.decode.swap_ab.cta_context import SwapAbCta
from jaxattn.kernels.mla.decode.swap_ab.epilogue import merge
from jaxattn.kernels.mla.decode.swap_ab.fp8_mainloop import LEAST_UNIT, SwapAbFp8Mainloop
from jaxattn.kernels.mla.decode.swap_ab.interpreter import (
    InterpretedSwapAbFp8Mainloop,
    InterpretedSwapAbMainloop,
)
from jaxattn.kernels.mla.decode.swap_ab.mainloop import SwapAbMainloop, SwapAbWorkTile, iota
from jaxattn.kernels.mla.decode.swap_ab.smem import WARPGROUPS
from jaxattn.kernels.mla.decode.warp_specialized.smem import BLOCKS


class SwapAbKernel(SwapAbCta):
    """The two warpgroups of a block."""

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
        self, place: SchedulePosition, start: jax.Array, steps: jax.Array, begun: jax.Array
    ) -> Any:
        """Scores and values of its pages, the two warpgroups' in turns, and one result of both.
        Rows without tokens are written beside the first piece's copies: to read their lengths at a
        block's end would make it longer."""
        row = place.row
        refs, scaled = self.refs, self.cut.latents.block_scaled
        pl.when(place.number != self.part.begin[0])(lambda: self._load_first(place, start, steps))
        pages = self._pages(self._mine(place, start, steps))
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

    def _mine(self, place: SchedulePosition, start: jax.Array, steps: jax.Array) -> SwapAbWorkTile:
        """What this warpgroup takes of a piece."""
        taken = lax.div(steps + 1 - self.wg, WARPGROUPS)
        return SwapAbWorkTile(place.row, start + self.wg, start + steps, taken)

    def _load_first(self, place: SchedulePosition, start: jax.Array, steps: jax.Array) -> None:
        """A piece's queries and first pages. Those of a part's first piece come before all else:
        what is worked out once for all pages is so while they are on the way."""
        pages = self._pages(self._mine(place, start, steps))
        numbers = pages.first_numbers()
        issue_loads(interpret=self.cut.interpret)  # beside the row's length
        pl.when(steps > 0)(lambda: self._load_queries(place.row))
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
        """Tokens of the row, and how many of them each score's packed row sees."""
        cut, refs = self.cut, self.refs
        length = refs.lens_ref[row]
        queries = None if refs.query_lens_ref is None else refs.query_lens_ref[row]
        visible = visible_keys(
            self.tile * cut.columns + iota(cut.columns, 0), length, queries,
            q_len=cut.q_len, num_heads=cut.num_heads, layout=SCORES,
        )  # fmt: skip
        return length, visible

    def _empty(self) -> tuple[Any, ...]:
        """Maxima, sums, unit and output before the first page."""
        columns = self.cut.columns
        nothing = jnp.zeros((BLOCK, columns), jnp.float32)
        nothing = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA)
        return (
            plgpu.layout_cast(jnp.full((columns,), EMPTY, jnp.float32), BY_ROW),
            plgpu.layout_cast(jnp.zeros((columns, PAGE), jnp.float32), SCORES),
            plgpu.layout_cast(jnp.full((columns,), LEAST_UNIT, jnp.float32), BY_ROW),
            (nothing,) * BLOCKS,
        )
