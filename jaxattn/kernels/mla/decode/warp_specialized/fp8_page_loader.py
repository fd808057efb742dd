"""The loads of FP8 pages in `mla_decode`, by warpgroups 1 and 2.

TMA copies a page as it is stored to separate buffers. Each warpgroup then widens the columns that
it will multiply, once, to where the products read them. Both products are then those of a bfloat16
cache. Widening is exact: for a cache with one scale it gives the numbers without the scale, for a
block-scaled cache the numbers times their scale, a power of two. Shared memory has room for two
widened pages and one stored page:

    page i        multiplied by P; then page i + 2 is widened into its place, quarter by quarter
    page i + 1    multiplied by the queries meanwhile
    page i + 2    as it is stored; a quarter that was widened makes room for page i + 3's

P K is thus not held back: the widening after it overlaps with Q K^T and the softmax of page i + 1.
Rope columns have three places, and are widened during P K. Q K^T takes the quarters in the order in
which they are widened, and waits for each.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.hopper.instructions import warpgroup_barrier
from jaxattn.kernels.mla.decode.latent_tile import QUARTER, RANK, SCALE_BYTES
from jaxattn.kernels.mla.decode.warp_specialized.cta_context import MlaDecodeCta
from jaxattn.kernels.mla.decode.warp_specialized.fp8_dequantization import dequantize_tile
from jaxattn.kernels.mla.decode.warp_specialized.page_loader import PageLoader
from jaxattn.kernels.mla.decode.warp_specialized.smem import PAGES, RAW

AHEAD = 2  # widened pages


class Fp8PageLoader(PageLoader):
    """The loader of FP8 pages. `pages`: the page that shared memory holds as stored, and the one
    after it."""

    def __init__(self, block: MlaDecodeCta):
        super().__init__(block)
        self.raw, self.raw_loaded = self.shared.raw, self.shared.raw_loaded

    def begin(self) -> Any:
        ahead = self._found(self.part.first())
        first = self._page_of(ahead)
        for quarter in range(2):
            self._store(2 * self.half + quarter, first)
        self._store_rope(first)
        return lax.fori_loop(0, AHEAD, self._begin, self.later((first, ahead)))

    def _begin(self, i: jax.Array, pages: Any) -> Any:
        for quarter in range(2):
            self.refill(quarter, pages, i)
        self._next_rope(pages, i)
        return self.later(pages)

    def refill(self, quarter: int, pages: Any, into: jax.Array) -> None:
        page, following = pages[0], self._page_of(pages[1])
        tile, slot = 2 * self.half + quarter, self.slot_of(quarter, into)
        target, done = self.shared.kv.at[slot], self.shared.kv_loaded.at[slot]
        pl.when(page[1])(lambda: self._widen(tile, page, target, done, quarter))
        self._store(tile, following)

    def refill_rope(self, pages: Any, into: jax.Array) -> None:
        """Does nothing: `meanwhile` has refilled the rope columns."""

    def meanwhile(self, pages: Any, current_page: jax.Array) -> None:
        """Widens the next page's rope columns, to where P of the page before this one was."""
        self._next_rope(pages, current_page + AHEAD)

    def wait_for_warps(self) -> None:
        warpgroup_barrier(interpret=self.cut.interpret)

    def _next_rope(self, pages: Any, into: jax.Array) -> None:
        page, following = pages[0], self._page_of(pages[1])
        slot = lax.rem(into, PAGES)
        target, done = self.shared.rope.at[slot], self.shared.rope_loaded.at[slot]
        widen_it = lambda: self._widen(RAW - 1, page, target, done)  # noqa: E731
        pl.when(page[1] & self.is_right)(widen_it)
        self._store_rope(following)

    def clear_tail(self, values: list[Any], left: jax.Array) -> None:
        """Does nothing: the tail was cleared when the page was widened."""

    def _found(self, location: Any) -> Any:
        """As `PageLoader._found`, and the row's tokens from the page on."""
        position, page, stop = location
        length = self.part.lens_ref[self.part.some_row(position.row)]
        return location, (self.part.numbers(position.row, page, stop), length - page * PAGE)

    def _widen(
        self, tile: Any, page: Any, target: Any, done: Any, quarter: int | None = None
    ) -> None:
        """Widens a tile of the page, a quarter of the half or the rope columns, and zeroes what
        follows the row's end. The tile's stored bytes may then be overwritten."""
        stored, left = self.raw.at[tile], page[2][1]
        self._wait_for_raw(tile, quarter)
        scales = None
        if self.cut.latents.block_scaled:
            scales = self.shared.raw_scales.at[tile]
        dequantize_tile(stored, scales, target, left, tile, interpret=self.cut.interpret)
        plgpu.commit_smem()
        plgpu.barrier_arrive(done)

    def _wait_for_raw(self, tile: Any, quarter: int | None) -> None:
        del quarter
        plgpu.barrier_wait(self.raw_loaded.at[tile])

    def _store(self, tile: Any, page: Any) -> None:
        self._copy(tile, page, tile * QUARTER)

    def _store_rope(self, page: Any) -> None:
        """Copies the rope numbers: 128 bytes, or in e4m3 half as many and the 64 numbers before
        them."""
        last = self.part.kv_ref.shape[-1] - QUARTER
        pl.when(self.is_right)(lambda: self._copy(RAW - 1, page, last))

    def _copy(self, tile: Any, page: Any, first: Any) -> None:
        number, there, (numbers, _) = page
        pieces = [(self.raw, first, QUARTER)]
        if self.cut.latents.block_scaled:
            pieces.append((self.shared.raw_scales, RANK, SCALE_BYTES))

        def load() -> None:
            for j, source in enumerate(self.part.sources(numbers, number)):
                tokens = pl.ds(j * self.tokens, self.tokens)
                for target, begin, width in pieces:
                    some = source.at[:, pl.ds(begin, width)]
                    plgpu.copy_gmem_to_smem(some, target.at[tile, tokens], self.raw_loaded.at[tile])

        pl.when(there)(load)
