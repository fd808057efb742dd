"""The mainloop of a warpgroup of `mla_decode_swap_ab` over the 16-bit pages of a piece.

wgmma reads K and V where TMA puts them. `SwapAbMainloop` is also the base class for the other
storage formats: the softmax between the two products is the same for all.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import BLOCK
from jaxattn.kernels.attention.packed_row_layouts import BY_COLUMN, SCORES
from jaxattn.kernels.attention.softmax_constants import MASKED
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.hopper.instructions import warpgroup_barrier
from jaxattn.kernels.hopper.store.transposed_store import store_transposed
from jaxattn.kernels.mla.decode.latent_tile import BLOCKS, RANK, ROPE
from jaxattn.kernels.mla.decode.swap_ab.cta_context import SwapAbCta
from jaxattn.kernels.mla.decode.swap_ab.smem import WARPGROUPS, over_out

type Accumulators = tuple[jax.Array, ...]


def over_keys(vector: jax.Array) -> jax.Array:
    """Broadcasts a number of each packed row over its scores."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (*vector.shape, PAGE), [0]), SCORES)


def iota(columns: int, dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (columns, PAGE), dimension, layout=SCORES)


def product(ref: Any, of_keys: Any, of_queries: Any) -> None:
    plgpu.wgmma(ref, of_keys, of_queries.transpose((1, 0)))


class SwapAbWorkTile(NamedTuple):
    """The share of a piece that one warpgroup takes. A piece is a row, or its portion in this
    part."""

    row: jax.Array
    first_page: jax.Array  # first page of the warpgroup
    stop: jax.Array  # end of the piece's pages (exclusive)
    num_pages: jax.Array  # number of pages, every other one from the first


class SwapAbMainloop:
    """The mainloop over the pages that a warpgroup takes of a piece.

    Attributes:
        depth: Pages in shared memory.
        as_values: Whether the output's dims are in the order of FP8 values.
    """

    depth = 1
    as_values = False

    def __init__(self, block: SwapAbCta, piece: SwapAbWorkTile):
        self.block, self.piece = block, piece
        self.cut, self.refs, self.part, self.wg = block.cut, block.refs, block.part, block.wg
        self.scores_type = plgpu.ACC((PAGE, block.cut.columns), jnp.float32)
        self.tokens = min(block.cut.page_size, PAGE)  # of a copy

    def first_numbers(self) -> list[list[jax.Array]]:
        """The page numbers in the cache of the first `depth` pages. They do not wait for the row's
        length: past the row's pages they may be any number."""
        first, most = self.piece.first_page, jnp.int32(self.part.max_pages)
        pages = [first + WARPGROUPS * k for k in range(self.depth)]
        return [self.part.numbers(self.piece.row, page, most) for page in pages]

    def load_first(self, numbers: list[list[jax.Array]]) -> None:
        pl.when(self.piece.num_pages > 0)(lambda: self._load(numbers[0], self.piece.first_page))

    def see(self, length: jax.Array, visible: jax.Array) -> None:
        self.length, self.visible = length, visible

    def take_queries(self) -> None:
        """Called when the queries are loaded: sets the factors of their scores."""
        self.of_rows: Any = self.block.factor

    @property
    def unit_of_all(self) -> Any:
        """The value that 1 stands for in the output."""
        return 1.0

    def each(self, empty: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the maxima, sums, unit and output over all pages."""
        piece = self.piece
        ahead = piece.first_page + WARPGROUPS * self.depth
        following = self.part.numbers(piece.row, ahead, piece.stop)
        return lax.fori_loop(0, piece.num_pages, self._page, (*empty, following))[:4]

    def _page(self, i: jax.Array, carry: Any) -> Any:
        """Processes the i-th page; `numbers` are the page numbers of the warpgroup's next one."""
        top, total, unit, accs, numbers = carry
        piece, slot = self.piece, self._slot(numbers)
        run = functools.partial(self._scores, slot=slot)
        scores = pl.run_scoped(run, self.scores_type)
        top, total, p, rescale, _ = self._online_softmax(i, top, total, scores)
        accs = self._add_values(accs, p, rescale, slot)
        page = piece.first_page + WARPGROUPS * (i + 1)
        warpgroup_barrier(interpret=self.cut.interpret)  # all four warps have read the page
        pl.when(i < piece.num_pages - 1)(lambda: self._load(numbers, page))
        following = self.part.numbers(piece.row, page + WARPGROUPS, piece.stop)
        return top, total, unit, accs, following

    def _slot(self, numbers: list[jax.Array]) -> jax.Array:
        """The warpgroup's page in shared memory, as an index that the compiler does not know to be
        constant. It would otherwise keep 68 descriptors of the page's tiles in registers."""
        # This is 0, because page numbers and lengths are not negative.
        zero = lax.shift_right_logical(numbers[0], 31)
        return jnp.minimum(self.wg + zero, WARPGROUPS - 1)

    def _load(self, numbers: list[jax.Array], page: jax.Array) -> None:
        """Copies all columns by one copy, which reads memory in its order: a separate copy of the
        rope columns took 1% longer."""
        for j, source in enumerate(self.part.sources(numbers, page)):
            to = self.block.kv_smem.at[self.wg, pl.ds(j * self.tokens, self.tokens)]
            plgpu.copy_gmem_to_smem(source, to, self.refs.loaded.at[self.wg])

    def _scores(self, ref: Any, *, slot: jax.Array) -> jax.Array:
        """Returns scores^T [64 tokens, N] of the page, after waiting for it."""
        q, q_rope = self.block.q_operands
        plgpu.barrier_wait(self.refs.loaded.at[self.wg])
        page = self.block.kv_smem.at[slot]
        product(ref, page.at[:, pl.ds(0, RANK)], q.at[0])
        if self.cut.rope:
            product(ref, page.at[:, pl.ds(RANK, ROPE)], q_rope.at[0])
        return ref[...]

    def _online_softmax(
        self, i: jax.Array, top: jax.Array, total: jax.Array, scores: jax.Array,
        meanwhile: Callable[[], Any] = lambda: None,
    ) -> Any:  # fmt: skip
        """Returns the new maxima and sums, page i's P and rescaling, and the result of
        `meanwhile`."""
        page = self.piece.first_page + WARPGROUPS * i
        here = self.refs.score_smem.at[self.wg, :, pl.ds(0, PAGE)]
        store_transposed(here, scores, interpret=self.cut.interpret)
        warpgroup_barrier(interpret=self.cut.interpret)
        left = self.length - page * PAGE
        self._clear_tail(left)
        done = meanwhile()
        scores = plgpu.load(here, layout=SCORES, optimized=False) * self.of_rows
        seen = iota(self.cut.columns, 1) + page * PAGE < self.visible
        scores = jnp.where(seen, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        p = jnp.exp2(scores - over_keys(new_top))
        rescale = jnp.exp2(top - new_top)
        return new_top, total * over_keys(rescale) + p, p, rescale, done

    def _clear_tail(self, left: jax.Array) -> None:
        """Zeroes the tokens past the end of the sequence before they are read as values: they may
        be NaN, and 0 * NaN is NaN. The products have already read them as keys."""

        @pl.when(left < PAGE)
        def _():
            for start in range(0, RANK, ROPE):
                some = self.block.kv_smem.at[self.wg].at[:, pl.ds(start, ROPE)]
                inside = plgpu.broadcasted_iota(
                    jnp.int32, (PAGE, ROPE), 0, layout=plgpu.Layout.WGMMA
                )
                kept = plgpu.load(some, layout=plgpu.Layout.WGMMA)
                some[...] = jnp.where(inside < left, kept, jnp.zeros((), self.cut.dtype))

    def _add_values(
        self, accs: Accumulators, p: jax.Array, rescale: jax.Array, slot: jax.Array
    ) -> Accumulators:
        """Returns the rescaled output plus P V, block by block."""

        def run(*refs: Any) -> Accumulators:
            now = self._store_p(accs, p, rescale)
            for ref, acc in zip(refs, now, strict=True):
                ref[...] = acc
            for i, ref in enumerate(refs):
                values = self.block.kv_smem.at[slot].at[:, pl.ds(i * BLOCK, BLOCK)]
                plgpu.wgmma(ref, values.transpose((1, 0)), self._transpose_p(0))
            return tuple(ref[...] for ref in refs)

        return self._with_accumulators(run)

    def _store_p(self, accs: Accumulators, p: jax.Array, rescale: jax.Array) -> Accumulators:
        """Stores P for the products, and returns the rescaled output."""
        self.refs.p_smem[self.wg, 0] = p.astype(self.cut.dtype)
        self.block.rescale_smem[self.wg] = rescale
        plgpu.commit_smem()
        return self._rescaled(accs)

    def _with_accumulators(self, run: Callable[..., Accumulators]) -> Accumulators:
        out_type = plgpu.ACC((BLOCK, self.cut.columns), jnp.float32)
        return pl.run_scoped(run, *[out_type] * BLOCKS)

    def _rescaled(self, accs: Accumulators) -> Accumulators:
        here = self.block.rescale_smem.at[self.wg]
        rescale = over_out(plgpu.load(here, layout=BY_COLUMN))
        return tuple(acc * rescale for acc in accs)

    def _transpose_p(self, version: int, zero: Any = 0) -> Any:
        return self.refs.p_smem.at[self.wg + zero, version].transpose((1, 0))
