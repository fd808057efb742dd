"""Warpgroup 0 of `mla_decode`: scores and softmax of a piece's pages.

kernel.py describes the contents of shared memory and the order of the tensor cores' work.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.gate_and_sink import with_sink
from jaxattn.kernels.attention.softmax_constants import EMPTY, LOG2E, MASKED
from jaxattn.kernels.attention.split_kv_schedule import PAGE, TILE
from jaxattn.kernels.attention.work_iterator import SchedulePosition, nothing_or_nan
from jaxattn.kernels.hopper.instructions import fence_proxy_async
from jaxattn.kernels.hopper.reduce.online_softmax import PARTIAL, partial_sums, reference
from jaxattn.kernels.hopper.store.row_store import store
from jaxattn.kernels.mla.decode.latent_tile import QUARTER, RANK, ROPE
from jaxattn.kernels.mla.decode.warp_specialized.smem import LAYOUT, PAGES

BY_ROW = LAYOUT.reduce(1)


def _over_keys(vector: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(vector, (TILE, PAGE), [0])


def _prev_slot(slot: jax.Array) -> jax.Array:
    return jnp.where(slot == 0, PAGES - 1, slot - 1)


class QkSoftmaxWarpgroup:
    """Warpgroup 0: it loads a piece's queries, then computes P and the rescaling page by page."""

    def __init__(self, block: Any):
        self.block, self.cut, self.refs, self.part = block, block.cut, block.refs, block.part
        self.shared = block.refs.shared
        self.factor = block.kv_scale * (block.cut.scale * LOG2E)

    def run(self) -> None:
        zero = jnp.int32(0)
        queries = self._load_queries(self.part.settle(self.part.first()))
        num_pieces = self.part.each_piece(self._piece, (zero, zero, queries))[1]
        self.block.each_empty_row(self._write_nothing)  # during the last page's products with P

        @pl.when(num_pieces > 0)
        def _():
            plgpu.barrier_wait(self.shared.sums_read)

    def _load_queries(self, location: Any) -> Any:
        """Loads the queries of the row at a page that `settle` has found, if there is one. Returns
        their quarters in registers; if there is no such page, those of some row."""
        refs, interpret = self.refs, self.cut.interpret
        position, page, stop = location
        row = position.row

        @pl.when(page < stop)
        def _():
            plgpu.commit_smem()  # all four warps have read the previous queries
            first = self.block.queries(row, 0, QUARTER)
            plgpu.copy_gmem_to_smem(first, refs.q_smem, refs.q_loaded)
            if self.cut.rope:
                source = self.block.queries(row, RANK, ROPE)
                plgpu.copy_gmem_to_smem(source, refs.q_rope_smem, refs.q_loaded)
            for i in range(3) if interpret else ():
                source = self.block.queries(row, (1 + i) * QUARTER, QUARTER)
                plgpu.copy_gmem_to_smem(source, refs.q_others_smem.at[i], refs.q_loaded)

        if interpret:
            return ()
        row = self.part.some_row(row)
        quarters = [self.block.queries(row, (1 + i) * QUARTER, QUARTER) for i in range(3)]
        # Loads of 8 bytes and a shuffle: loads of 4 bytes per thread, as the products hold them,
        # would touch twice as many lines.
        loaded = [
            plgpu.load(x, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False) for x in quarters
        ]
        return tuple(plgpu.layout_cast(x, LAYOUT) for x in loaded)

    def _piece(
        self, position: SchedulePosition, start: jax.Array, steps: jax.Array, carry: Any
    ) -> Any:
        """Computes the scores and P of a piece's pages."""
        pages_before, pieces_before, q = carry
        plgpu.barrier_wait(self.refs.q_loaded)
        others = q or tuple(self.refs.q_others_smem.at[i] for i in range(3))
        pages = QkSoftmaxMainloop(self, position.row, start, pages_before, others)

        stop = start + steps
        following = self.part.settle((position, stop, stop))  # reads lengths early
        top, total = pages.run(steps)
        # A NaN total is not 0: a NaN among a row's own keys shows in its output. For a row that
        # sees no key the product is 0 * V, NaN where V is: a sum of -1 means write 0.
        empty = total == 0
        total = jnp.where(empty, -1.0, total)

        @pl.when(pieces_before > 0)
        def _():
            plgpu.barrier_wait(self.shared.sums_read)

        is_whole = lambda: steps == self.part.pages_in(pages.length)  # noqa: E731
        top, total, divisor = self._with_sinks(top, total, is_whole)
        self.shared.sums[...] = divisor
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.shared.sums_written)
        q = self._load_queries(following)
        lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * (1 / LOG2E))
        refs, packed = self.refs, self.block.packed
        self.part.write_lse(
            refs.lse_ref, refs.partial_lse_ref, packed, position.row, is_whole(), lse
        )
        return pages_before + steps, pieces_before + 1, q

    def _with_sinks(
        self, top: jax.Array, total: jax.Array, is_whole: Callable[[], jax.Array]
    ) -> Any:
        """Returns (maximum, sum, divisor of the output) of a whole row with its sinks; a split row
        gets them when its pieces are merged. `total` is negative where the row is empty."""
        if self.refs.sinks_ref is None:
            return top, total, total
        sinks = self.refs.sinks_ref.at[self.block.packed]
        sinks = plgpu.load(sinks, layout=BY_ROW, optimized=False)
        with_sinks = with_sink(top, jnp.maximum(total, 0.0), sinks)
        applies_sinks = is_whole() & (total > 0)
        divisor = total + jnp.exp2(sinks * LOG2E - top)  # relative to the maximum without the sink
        new_top, new_total = (
            jnp.where(applies_sinks, x, y) for x, y in zip(with_sinks, (top, total), strict=True)
        )
        return new_top, new_total, jnp.where(applies_sinks, divisor, total)

    def _write_nothing(self, row: jax.Array, known: jax.Array | None) -> None:
        lowest = nothing_or_nan(-jnp.inf, known, jnp.float32)
        empty_rows = plgpu.layout_cast(jnp.full((TILE,), lowest), BY_ROW)
        store(self.refs.lse_ref.at[row, self.block.packed], empty_rows)


class QkSoftmaxMainloop:
    """The mainloop over a piece's pages."""

    def __init__(
        self,
        scores: QkSoftmaxWarpgroup,
        row: jax.Array,
        start: jax.Array,
        before: jax.Array,
        others: Any,
    ):
        """`before`: the pages of earlier pieces; `others`: the second and later quarters of the
        queries."""
        self.scores, self.before, self.others = scores, before, others
        self.places = scores.cut.places
        self.length = scores.refs.lens_ref[row]
        self.mask = scores.block.mask(row, start, self.length)

    def run(self, steps: jax.Array) -> Any:
        """Computes P and the rescaling of all pages for warpgroups 1 and 2. Returns the rows'
        maxima and sums.

        A page's P is handed over when the first products of the next page's scores are in flight,
        so that the tensor cores need not wait for the hand-over.
        """
        zero = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), BY_ROW)
        sums = plgpu.layout_cast(jnp.zeros((TILE, PARTIAL), jnp.float32), LAYOUT)
        slot = lax.rem(self.before, PAGES)
        top, sums, slot = lax.fori_loop(0, steps, self._step, (zero + EMPTY, sums, slot))
        self._signal_p_written(_prev_slot(slot))
        return top, sums.sum(axis=1)

    def _step(self, i: jax.Array, carry: Any) -> Any:
        """Stores page i's P and rescaling, and hands over those of the page before."""
        top, sums, slot = carry
        shared, page = self.scores.shared, self.mask.of_page(i)
        last = lambda: pl.when(i > 0)(lambda: self._signal_p_written(_prev_slot(slot)))  # noqa: E731
        scores = self._product(i, slot, last)

        if self.places.held_back:

            @pl.when(i > 0)
            def _():
                plgpu.barrier_arrive(shared.scores_done.at[slot])

        new_top, p, added = self._softmax(scores, self.mask.told(page), top)
        rescale = jnp.exp2(top - new_top)
        # P overwrites the keys' rope columns: a warp that has waited for its wgmma knows that the
        # whole warpgroup's is done.
        shared.rope[slot], shared.rescale[slot] = p, rescale
        sums = sums * lax.broadcast_in_dim(rescale, sums.shape, [0]) + added
        return new_top, sums, jnp.where(slot == PAGES - 1, 0, slot + 1)

    def _signal_p_written(self, slot: jax.Array) -> None:
        fence_proxy_async(interpret=self.scores.cut.interpret)
        plgpu.barrier_arrive(self.scores.shared.p_written.at[slot])

    def _product(self, i: jax.Array, slot: jax.Array, meanwhile: Callable[[], None]) -> jax.Array:
        """Computes Q K^T, each quarter after it has arrived; `meanwhile` overlaps with the first
        one's products.

        `slot` is the page's remainder by PAGES: if it were computed here, the first product would
        wait for it.
        """
        shared, refs, places = self.scores.shared, self.scores.refs, self.places

        def add(acc: Any, quarter: int) -> None:
            if quarter < 0:
                slot_index, q = slot, refs.q_rope_smem
                columns, loaded = shared.rope.at[slot_index], shared.rope_loaded
            else:
                number = places.slots[quarter]
                slot_index = slot if number == PAGES else lax.rem(self.before + i, number)
                slot_index += places.firsts[quarter]
                q = self.others[quarter - 1] if quarter else refs.q_smem
                columns, loaded = shared.kv.at[slot_index], shared.kv_loaded
            plgpu.barrier_wait(loaded.at[slot_index])
            plgpu.wgmma(acc, q, columns.transpose((1, 0)))

        def run(acc: Any) -> jax.Array:
            first, *others = [x for x in places.order if x >= 0 or self.scores.cut.rope]
            add(acc, first)
            meanwhile()
            for quarter in others:
                add(acc, quarter)
            return acc[...]

        return pl.run_scoped(run, plgpu.ACC((TILE, PAGE), jnp.float32))

    def _softmax(self, scores: jax.Array, page: Any, top: jax.Array) -> Any:
        """Returns the new maxima, P, and its sums. A mask is applied to pages that some row does
        not see as a whole."""
        cut, factor = self.scores.cut, self.scores.factor
        if cut.latents.quantized:  # a traced scale may be negative
            scores, factor = scores * factor, 1.0

        # Rounding and sums are in both branches: there they overlap with the exponentials.
        def finished(new_top: jax.Array, p: jax.Array) -> Any:
            return new_top, p.astype(cut.dtype), partial_sums(p, interpret=cut.interpret)

        def plain(scores: jax.Array) -> Any:
            new_top = reference(top, scores.max(axis=1) * factor)
            return finished(new_top, jnp.exp2(scores * factor - _over_keys(new_top)))

        def masked(scores: jax.Array) -> Any:
            scores = jnp.where(self.mask.seen(page), scores * factor, MASKED)
            new_top = reference(top, scores.max(axis=1))
            return finished(new_top, jnp.exp2(scores - _over_keys(new_top)))

        growing = cut.scale > 0 or cut.latents.quantized
        return lax.cond(self.mask.all_visible(page), plain if growing else masked, masked, scores)
