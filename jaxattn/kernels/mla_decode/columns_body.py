"""The body of `mla_decode_columns`: two warpgroups that take a row's pages in turns.

Heads are the columns of both products, so that a few of them cost a few columns:

    scores^T [64 tokens, N] = K Q^T          K [64, 576] in shared memory
    out^T    [512, N]      += V^T P^T        V the same 64 tokens, seen transposed

The softmax runs over the scores turned round through shared memory, so that a head's lie in half a
warp; P goes back the same way. Each warpgroup has maxima, sums and an output of its own, and at
the end of a row's piece columns_merge.py makes one result of the two.

Pages come by TMA as they are stored. How they meet the queries is one class for each way to store
them: columns_pages.py of 16-bit caches, columns_fp8.py of FP8 ones. What the interpreter does in
their place is in columns_interpreted.py.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.formats import BLOCK, LatentFormat
from jaxattn.kernels.mla_decode.columns_fp8 import LEAST_UNIT, FP8Pages
from jaxattn.kernels.mla_decode.columns_interpreted import InterpretedFP8Pages, InterpretedPages
from jaxattn.kernels.mla_decode.columns_memory import BY_ROW, SCORES, WARPGROUPS
from jaxattn.kernels.mla_decode.columns_merge import Outputs, Shared, merge
from jaxattn.kernels.mla_decode.columns_pages import Pages, Piece, iota
from jaxattn.kernels.mla_decode.fp8_fragments import BLOCKS
from jaxattn.kernels.mla_decode.part import Part, Place, visible_keys
from jaxattn.kernels.mla_decode.rows_scores import EMPTY, LOG2E
from jaxattn.kernels.mla_decode.rows_values import RANK, ROPE
from jaxattn.kernels.mla_decode.schedule import PAGE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """What is known of a launch when it is traced.

    Attributes:
        columns: N, packed rows (query token, head) of a block.
        parts: of the schedule.
        out_rows: packed rows that the output keeps of a request.
        first_rows: `Results.first_rows`.
        page_size: tokens of a page of the cache; a "page" in these files is 64 tokens.
        latents: the cache's format.
        rope: whether a latent has rotated dims behind its 512.
    """

    q_len: int
    num_heads: int
    columns: int
    parts: int
    out_rows: int
    first_rows: Sequence[int]
    scale: float
    dtype: Any
    page_size: int
    latents: LatentFormat
    rope: bool
    interpret: bool

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Where a copy of queries or of a page begins, and its width."""
        return ((0, RANK), (RANK, ROPE))[: 1 + self.rope]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs:
    """What a block works on: operands and results, then its shared memory and barriers."""

    q_ref: Any
    kv_ref: Any
    layer_ref: Any
    table_ref: Any
    lens_ref: Any
    cuts_ref: Any
    order_ref: Any  # None: a schedule without an order
    kv_scale_ref: Any  # of a cache with one scale, else None
    query_lens_ref: Any  # None: every row has all S tokens
    out_ref: Any
    partial_ref: Any  # None: no row is split
    lse_ref: Any
    partial_lse_ref: Any
    pages_smem: Any  # a piece's pages, and in their place its two outputs
    rope_smem: Any  # the pages' rope columns, of a 16-bit cache that has such
    q_smem: Any  # Q; of an FP8 cache as it comes, and as the products take it
    q_rope_smem: Any  # likewise
    score_smem: Any
    p_smem: Any
    stats_smem: Any  # float32 [4, 2, N]: rescaling or unit, maxima, sums; factors of the scores
    q_loaded: Any
    both_there: Any
    loaded: Any  # a page


class Block:
    """`columns` packed rows of the rows in a part."""

    def __init__(self, cut: Cut, refs: Refs):
        self.cut, self.refs = cut, refs
        self.wg, self.tile, self.index = (lax.axis_index(name) for name in ("wg", "tile", "part"))
        self.part = Part.of(
            refs.cuts_ref, refs.order_ref, self.index, refs.lens_ref, refs.table_ref, refs.kv_ref,
            refs.layer_ref,
        )  # fmt: skip
        self.kv_scale: Any = 1.0 if refs.kv_scale_ref is None else refs.kv_scale_ref[0]
        self.factor = self.kv_scale * (cut.scale * LOG2E)
        self.mine = pl.ds(self.tile * cut.columns, cut.columns)
        self.kv_smem, sum_smem = refs.pages_smem
        both = refs.q_smem, refs.q_rope_smem
        # Queries as they come and as the products take them.
        self.q_loads, self.q_operands = (
            zip(*both, strict=True) if cut.latents.quantized else (both, both)
        )
        # At a piece's end, in the place of its rescaling and its pages: units and outputs.
        self.tops, self.totals, self.units = (refs.stats_smem.at[i] for i in (1, 2, 0))
        self.rescale_smem, self.q_factor_smem = refs.stats_smem.at[0], refs.stats_smem.at[3, 0]
        self.shared = Shared(self.wg, refs.both_there, self.tops, self.totals, self.units, sum_smem)
        self.outputs = Outputs(
            self.part, cut.first_rows, cut.out_rows, self.mine,
            refs.out_ref, refs.partial_ref, refs.lse_ref, refs.partial_lse_ref,
        )  # fmt: skip

    def run(self) -> None:
        self.part.each_piece(self._piece)

        @pl.loop(self.index, self.refs.lens_ref.shape[0], step=self.cut.parts)
        def _each_empty_row(row):
            @pl.when((self.part.pages_of(row) <= 0) & (self.wg == 0))
            def _():
                self.outputs.write_nothing(row)

    def _piece(self, place: Place, start: jax.Array, steps: jax.Array, carry: Any) -> Any:
        """Scores and values of its pages, the two warpgroups' in turns, and one result of both."""
        row, stop = place.row, start + steps
        refs, scaled = self.refs, self.cut.latents.block_scaled
        self._load_queries(row)
        piece = Piece(row, start + self.wg, stop, lax.div(steps + 1 - self.wg, WARPGROUPS))
        pages = self._pages(piece)
        pages.load_first()
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
        return carry

    def _pages(self, piece: Piece) -> Pages:
        if self.cut.latents.quantized:
            return (InterpretedFP8Pages if self.cut.interpret else FP8Pages)(self, piece)
        return (InterpretedPages if self.cut.interpret else Pages)(self, piece)

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
