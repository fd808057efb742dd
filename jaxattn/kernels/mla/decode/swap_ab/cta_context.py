"""The CTA of `mla_decode_swap_ab`: its configuration and its refs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from jaxattn.core.cache.formats import LatentFormat
from jaxattn.kernels.attention.softmax_constants import LOG2E
from jaxattn.kernels.attention.work_iterator import WorkIterator
from jaxattn.kernels.mla.decode.latent_tile import RANK, ROPE
from jaxattn.kernels.mla.decode.swap_ab.epilogue import SwapAbExchange, SwapAbOutputTile


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapAbConfig:
    """The static properties of a launch, known when it is traced.

    Attributes:
        columns: N, the packed rows (query token, head) of a CTA.
        parts: Parts of the schedule.
        out_rows: Packed rows that the output keeps per request.
        first_rows: `MlaDecodeOutputs.first_rows`.
        page_size: Tokens of a page of the cache; a "page" in these files is 64 tokens.
        latents: The cache's format.
        rope: Whether a latent has rotated dims after its 512.
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
        """The (first column, width) of each copy of queries."""
        return ((0, RANK), (RANK, ROPE))[: 1 + self.rope]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapAbRefs:
    """The refs of a CTA: operands and results, then its shared memory and barriers."""

    q_ref: Any
    kv_ref: Any
    layer_ref: Any
    table_ref: Any
    lens_ref: Any
    cuts_ref: Any
    order_ref: Any  # None: a schedule without an order
    scheduled_lens_ref: Any  # None: the schedule is the call's own
    kv_scale_ref: Any  # for a cache with one scale, else None
    query_lens_ref: Any  # None: every row has all S tokens
    out_ref: Any
    partial_ref: Any  # None: no row is split
    lse_ref: Any
    partial_lse_ref: Any
    pages_smem: Any  # a piece's pages; in the epilogue, its two outputs
    q_smem: Any  # Q; for an FP8 cache as loaded and as the products read it
    q_rope_smem: Any  # the same for its rope columns
    score_smem: Any
    p_smem: Any
    stats_smem: Any  # float32 [4, 2, N]: rescaling or unit, maxima, sums; factors of the scores
    q_loaded: Any
    warpgroup_barrier: Any
    loaded: Any  # a page has been loaded


class SwapAbCta:
    """A CTA that computes `columns` packed rows of each row in its part."""

    def __init__(self, cut: SwapAbConfig, refs: SwapAbRefs):
        self.cut, self.refs = cut, refs
        self.wg, self.tile, self.index = (lax.axis_index(name) for name in ("wg", "tile", "part"))
        self.part = WorkIterator.of(refs, self.index)
        self.kv_scale: Any = 1.0 if refs.kv_scale_ref is None else refs.kv_scale_ref[0]
        self.factor = self.kv_scale * (cut.scale * LOG2E)
        self.mine = pl.ds(self.tile * cut.columns, cut.columns)
        self.kv_smem, sum_smem = refs.pages_smem
        both = refs.q_smem, refs.q_rope_smem
        # Queries as TMA loads them, and as the products read them.
        self.q_loads, self.q_operands = (
            zip(*both, strict=True) if cut.latents.quantized else (both, both)
        )
        # In the epilogue the units and outputs reuse the memory of the rescaling and the pages.
        self.tops, self.totals, self.units = (refs.stats_smem.at[i] for i in (1, 2, 0))
        self.rescale_smem, self.q_factor_smem = refs.stats_smem.at[0], refs.stats_smem.at[3, 0]
        self.shared = SwapAbExchange(
            self.wg, refs.warpgroup_barrier, self.tops, self.totals, self.units, sum_smem
        )
        self.outputs = SwapAbOutputTile(
            self.part, cut.first_rows, cut.out_rows, self.mine,
            refs.out_ref, refs.partial_ref, refs.lse_ref, refs.partial_lse_ref,
        )  # fmt: skip
