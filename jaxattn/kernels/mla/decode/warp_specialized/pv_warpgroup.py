"""Warpgroups 1 and 2 of `mla_decode`: they load the pages and multiply them by P.

Each has half of the output's columns, and multiplies the same columns of a page: two quarters of
128. The contents of shared memory and the order of the tensor cores' work are described in
kernel.py; page_loader.py and fp8_page_loader.py load the pages.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.split_kv_schedule import PAGE, TILE
from jaxattn.kernels.attention.work_iterator import SchedulePosition, nothing_or_nan
from jaxattn.kernels.hopper.instructions import wgmma
from jaxattn.kernels.hopper.reduce.online_softmax import rescaled, zero_empty_rows
from jaxattn.kernels.hopper.store.row_store import store, store_first_rows
from jaxattn.kernels.mla.decode.latent_tile import QUARTER
from jaxattn.kernels.mla.decode.warp_specialized.smem import LAYOUT, PAGES


class PvWorkTile(NamedTuple):
    """A row, or its portion in this part."""

    start: jax.Array  # first page
    steps: jax.Array  # pages
    length: jax.Array  # tokens of the row
    before: jax.Array  # pages of earlier pieces


class PvWarpgroup:
    """Warpgroup 1 or 2, with its half of the columns, over all of the part's pages."""

    def __init__(self, block: Any):
        self.block, self.cut, self.refs, self.part = block, block.cut, block.refs, block.part
        self.shared = block.refs.shared
        self.pages = block.page_loader()
        self.is_right, self.columns = self.pages.is_right, self.pages.columns
        self.zero = plgpu.layout_cast(jnp.zeros((TILE, QUARTER), jnp.float32), LAYOUT)

    def run(self) -> None:
        pages = self.pages.begin()
        # Done while the first copies run: reading these rows' lengths at the end would make the CTA
        # longer.
        self.block.each_empty_row(self._write_nothing)
        self.part.each_piece(self._piece, (jnp.int32(0), pages))

    def _write_nothing(self, row: jax.Array, known: jax.Array | None) -> None:
        zero = nothing_or_nan(0.0, known, self.cut.dtype)
        empty_rows = plgpu.layout_cast(jnp.full((TILE, QUARTER), zero), LAYOUT)
        for columns in self.columns:
            store(self.refs.out_ref.at[self.block.rows_of(row), columns], empty_rows)

    def _piece(
        self, position: SchedulePosition, start: jax.Array, steps: jax.Array, carry: Any
    ) -> Any:
        pages_before, pages = carry
        length = self.part.lens_ref[position.row]
        page = functools.partial(self._page, PvWorkTile(start, steps, length, pages_before))
        accs, pages = lax.fori_loop(0, steps, page, ((self.zero, self.zero), pages))
        plgpu.barrier_wait(self.shared.sums_written)
        total = plgpu.load(self.shared.sums, layout=LAYOUT.reduce(1))
        plgpu.barrier_arrive(self.shared.sums_read)
        accs = tuple(zero_empty_rows(acc, total, interpret=self.cut.interpret) for acc in accs)
        factor = self.block.kv_scale * jnp.abs(1 / total)
        factor = lax.broadcast_in_dim(factor, (TILE, QUARTER), [0])
        is_whole = steps == self.part.pages_in(length)
        last = pages_before + steps - 1
        pl.when(is_whole)(lambda: self._write(position.row, accs, factor, last))
        if self.cut.output_by_tma:
            self.pages.refill(0, pages, last)
            self.pages.refill(1, pages, last)
            if self.cut.rope:
                self.pages.refill_rope(pages, last)
            self.pages.hand_over(pages, last)
            pages = self.pages.later(pages)
        if self.refs.partial_ref is not None:

            @pl.when(jnp.logical_not(is_whole))
            def _():
                rows, cut = self.block.partial_rows_of(position.row), self.cut
                num_rows: Any = cut.q_len * cut.num_heads  # packed rows of the tile that are used
                num_rows -= 0 if cut.tiles == 1 else self.block.tile * TILE
                destinations = [self.refs.partial_ref.at[rows, columns] for columns in self.columns]
                scaled_accs = [acc * factor for acc in accs]
                store_first_rows(destinations, scaled_accs, num_rows, interpret=cut.interpret)

        return pages_before + steps, pages

    def _page(self, piece: PvWorkTile, i: jax.Array, carry: Any) -> Any:
        """Processes the piece's page i: rescales the output, adds P V, and starts the next
        copies."""
        accs, pages = carry
        cut, shared = self.cut, self.shared
        page_index = piece.before + i
        slot = lax.rem(page_index, PAGES)
        values = [shared.kv.at[self.pages.slot_of(quarter, page_index)] for quarter in range(2)]
        plgpu.barrier_wait(shared.p_written.at[slot])
        self.pages.hand_over_first(pages, page_index)
        rescale = plgpu.load(shared.rescale.at[slot], layout=LAYOUT.reduce(1))
        accs = tuple(rescaled(acc, rescale, interpret=cut.interpret) for acc in accs)
        num_tokens_left = piece.length - (piece.start + i) * PAGE
        self.pages.clear_tail(values, num_tokens_left)
        has_next = i < piece.steps - 1

        if cut.places.held_back:

            @pl.when(has_next)
            def _():
                plgpu.barrier_wait(shared.scores_done.at[lax.rem(page_index + 1, PAGES)])

        # The last page's place is loaded again only after the output has left through it.
        may_refill = has_next if cut.output_by_tma else jnp.bool_(True)

        def refill_first() -> None:
            self.pages.wait_for_warps()
            pl.when(may_refill)(lambda: self.pages.refill(0, pages, page_index))

        accs = self._multiplied(
            accs, shared.rope.at[slot], values, refill_first,
            meanwhile=lambda: self.pages.meanwhile(pages, page_index),
        )  # fmt: skip

        if cut.rope:

            @pl.when(jnp.logical_not(self.is_right))
            def _():
                plgpu.barrier_arrive(shared.p_read.at[slot])

        self.pages.wait_for_warps()
        pl.when(may_refill)(lambda: self.pages.refill(1, pages, page_index))
        if cut.rope:  # the rope columns take P's place; without them it is freed with the quarters

            @pl.when(self.is_right)
            def _():
                plgpu.barrier_wait(shared.p_read.at[slot])
                pl.when(may_refill)(lambda: self.pages.refill_rope(pages, page_index))

        if self.pages.signals_arrival:
            pl.when(may_refill)(lambda: self.pages.hand_over(pages, page_index))
        return accs, self.pages.later(pages, may_refill)

    def _multiplied(
        self, accs: Any, p: Any, values: Any, between: Callable[[], None], *,
        meanwhile: Callable[[], None],
    ) -> Any:  # fmt: skip
        """Returns accs + P K for both quarters. `meanwhile` overlaps with both products, and
        `between` runs when the first one is done."""
        if self.cut.interpret:
            shape = (TILE, QUARTER)
            meanwhile()
            acc_values = zip(accs, values, strict=True)
            results = [wgmma(acc, p, tile, shape=shape, interpret=True) for acc, tile in acc_values]
            between()
            return tuple(results)

        def run(*refs: Any) -> Any:
            for ref, acc in zip(refs, accs, strict=True):
                ref[...] = acc
            for ref, tile in zip(refs, values, strict=True):
                plgpu.wgmma(ref, p, tile)
            meanwhile()
            plgpu.wgmma_wait(1)
            between()
            plgpu.wgmma_wait(0)
            return tuple(ref[...] for ref in refs)

        return pl.run_scoped(run, *[plgpu.ACC((TILE, QUARTER), jnp.float32)] * 2)

    def _write(self, row: jax.Array, accs: Any, factor: jax.Array, last: jax.Array) -> None:
        """Writes a whole row's output; by TMA, through the place of its last page."""
        cut = self.cut
        for quarter, (columns, acc) in enumerate(zip(self.columns, accs, strict=True)):
            destination = self.refs.out_ref.at[self.block.rows_of(row), columns]
            if not cut.output_by_tma:
                store(destination, (acc * factor).astype(cut.dtype))
                continue
            stage = self.shared.kv.at[self.pages.slot_of(quarter, last)]
            stage[...] = (acc * factor).astype(cut.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stage, destination)
        if cut.output_by_tma:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
