"""Shared memory of `mla_decode`, and the refs of its CTA.

kernel.py describes when a page is where.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import BLOCK, LatentFormat
from jaxattn.kernels.attention.split_kv_schedule import PAGE, TILE, copies_of
from jaxattn.kernels.attention.work_partition import WorkPartition
from jaxattn.kernels.hopper.instructions import swizzled

RANK, ROPE = 512, 64
HALF, QUARTER = RANK // 2, RANK // 4
LAYOUT = plgpu.Layout.WGMMA
PAGES = 3  # pages for which there are rope columns, P and rescalings
# Tiles of 128 bytes of each token in which an FP8 page is copied: one per quarter, and the last
# 128.
RAW = 5
BLOCKS = RANK // BLOCK  # blocks of 128 dims, each with a scale in a block-scaled cache
SCALE_BYTES = 4 * BLOCKS
# A tile's rows are as wide as the swizzle. (A tiling would need the cache's rows to be a multiple
# of it.)
SWIZZLED = (plgpu.SwizzleTransform(QUARTER),)  # type: ignore[abstract]


@dataclasses.dataclass(frozen=True)
class PageSlots:
    """The places in shared memory of the pages that the products read.

    Attributes:
        slots: For each quarter of 128 columns, the number of pages that there is room for.
        order: The order of the quarters in Q K^T; -1 stands for the rope columns.
        held_back: Whether a page is multiplied by P only when the next page's scores are done.
    """

    slots: tuple[int, int, int, int]
    order: tuple[int, ...]
    held_back: bool

    @property
    def firsts(self) -> tuple[int, ...]:
        """For each quarter, the place of its first page."""
        return tuple(sum(self.slots[:quarter]) for quarter in range(len(self.slots)))

    @classmethod
    def of(cls, latents: LatentFormat) -> "PageSlots":
        """The places for a cache format; kernel.py explains those of 16 bits, fp8_page_loader.py
        those of FP8."""
        if latents.quantized:
            return cls((2, 2, 2, 2), (2, 0, 3, 1, -1), held_back=False)
        return cls((2, 3, 3, 3), (3, 2, 1, -1, 0), held_back=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlaDecodeSmem:
    """The memory that the three warpgroups share, arrays and then barriers."""

    kv: Any  # [place, 64, 128], quarters of pages
    rope: Any  # [PAGES, 64, 64], rope columns of pages, then P
    rescale: Any  # float32 [PAGES, 64], of the rows, applied before the page is added
    sums: Any  # float32 [64], sums of a piece's rows at its end; negative where one sees no key
    kv_loaded: Any
    rope_loaded: Any
    p_written: Any  # P and the rescaling
    p_read: Any  # arrived at by warpgroup 1, where rope columns take P's place
    scores_done: Any  # except for a piece's first page
    sums_written: Any
    sums_read: Any  # arrived at by both
    # RAW tiles, or one fewer for gathered block-scaled tokens, whose rope columns need none.
    raw: Any  # FP8 [tiles, 64, 128], the next page as it is stored; else None
    raw_loaded: Any
    raw_scales: Any  # bytes [tiles, 64, 16], the tokens' scales for each tile; else None


def shared_types(
    dtype: Any, latents: LatentFormat, page_size: int, *, gathered: bool = False
) -> MlaDecodeSmem:
    tiled, copies, places = swizzled(dtype), copies_of(page_size), PageSlots.of(latents)
    kv_places = sum(places.slots)
    # Arrivals of the warpgroup that has widened or gathered, or of the copies.
    arrivals = 1 if latents.quantized or gathered else copies
    stored: dict[str, Any] = {"raw": None, "raw_loaded": None, "raw_scales": None}
    # The rope columns of gathered block-scaled tokens are copied to where they are read.
    tiles = RAW - (gathered and latents.block_scaled)
    if latents.quantized:
        raw = plgpu.SMEM((tiles, PAGE, QUARTER), latents.dtype, transforms=SWIZZLED)
        pieces = copies * (1 + latents.block_scaled)
        loaded = plgpu.Barrier(num_arrivals=pieces, num_barriers=RAW)
        stored |= {"raw": raw, "raw_loaded": None if gathered else loaded}
    if latents.block_scaled:
        stored["raw_scales"] = plgpu.SMEM((tiles, PAGE, SCALE_BYTES), latents.dtype)
    return MlaDecodeSmem(
        kv=plgpu.SMEM((kv_places, PAGE, QUARTER), dtype, transforms=tiled),
        rope=plgpu.SMEM((PAGES, PAGE, ROPE), dtype, transforms=tiled),
        rescale=plgpu.SMEM((PAGES, TILE), jnp.float32),
        sums=plgpu.SMEM((TILE,), jnp.float32),
        kv_loaded=plgpu.Barrier(num_arrivals=arrivals, num_barriers=kv_places),
        rope_loaded=plgpu.Barrier(num_arrivals=arrivals, num_barriers=PAGES),
        p_written=plgpu.Barrier(num_barriers=PAGES),
        p_read=plgpu.Barrier(num_barriers=PAGES),
        scores_done=plgpu.Barrier(num_barriers=PAGES),
        sums_written=plgpu.Barrier(),
        sums_read=plgpu.Barrier(num_arrivals=2),
        **stored,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaDecodeConfig:
    """The static properties of a launch, known when it is traced.

    Attributes:
        tiles: Tiles of 64 packed rows per request.
        parts: Parts of the schedule.
        latents: The cache's format.
        rope: Whether there are rope columns: D is 576, or 512 without them.
        first_rows: `MlaDecodeOutputs.first_rows`.
        output_by_tma: Whether a whole row's output leaves through its last page's slot, or by
            stores of four bytes from registers.
        gathered: Whether a row attends to the keys of a list (kernels/mla/sparse) instead of all
            keys.
    """

    q_len: int
    num_heads: int
    tiles: int
    parts: int
    scale: float
    dtype: Any
    latents: LatentFormat
    rope: bool
    first_rows: Sequence[int]
    output_by_tma: bool
    interpret: bool
    gathered: bool = False

    @property
    def places(self) -> PageSlots:
        return PageSlots.of(self.latents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaDecodeRefs:
    """The refs of a CTA: operands and results, then its shared memory and barriers."""

    q_ref: Any  # [B, rows, D], or for the absorbed product [H, B, S, R] with whole tiles of heads
    q_rope_ref: Any  # [B, S, H, P], the rotated columns of the latter; else None
    kv_ref: Any
    layer_ref: Any
    table_ref: Any
    lens_ref: Any
    cuts_ref: Any
    order_ref: Any  # None: a schedule without an order
    made_of_ref: Any  # None: the schedule is the call's own
    kv_scale_ref: Any  # for a cache with one scale, else None
    query_lens_ref: Any  # None: every row has all S tokens
    out_ref: Any
    partial_ref: Any  # None: no row is split
    lse_ref: Any
    partial_lse_ref: Any
    q_others_smem: Any  # the interpreter's; the GPU holds these quarters in registers
    q_smem: Any  # Q's first quarter
    q_rope_smem: Any  # its rope columns
    q_loaded: Any
    shared: MlaDecodeSmem
    # Only for chosen keys: positions [rows, K]; how many keys each row may see; or, instead of
    # that, the lengths of the batch's rows, and their query tokens if they have fewer. And the
    # layer's sinks [rows of the tiles], or None.
    indices_ref: Any = None
    visible_ref: Any = None
    row_lens_ref: Any = None
    row_queries_ref: Any = None
    sinks_ref: Any = None


def scratch_types(cut: MlaDecodeConfig, page_size: int) -> dict[str, Any]:
    dtype, tiled = cut.dtype, swizzled(cut.dtype)
    # The interpreter has no register operands: all of Q is in shared memory there.
    others = plgpu.SMEM((3, TILE, QUARTER), dtype, transforms=tiled) if cut.interpret else None
    # TMA needs its destination in one piece: the columns of Q and of pages are separate arrays.
    return {
        "q_others_smem": others,
        "q_smem": plgpu.SMEM((TILE, QUARTER), dtype, transforms=tiled),
        "q_rope_smem": plgpu.SMEM((TILE, ROPE), dtype, transforms=tiled),
        "q_loaded": plgpu.Barrier(num_arrivals=(3 if cut.interpret else 0) + 1 + cut.rope),
        "shared": shared_types(dtype, cut.latents, page_size, gathered=cut.gathered),
    }


class MlaDecodeCta:
    """A CTA that computes a tile of 64 packed rows of each row in its part."""

    def __init__(self, cut: MlaDecodeConfig, refs: MlaDecodeRefs):
        self.cut, self.refs = cut, refs
        self.wg, self.tile, self.index = (lax.axis_index(name) for name in ("wg", "tile", "part"))
        self.part = self.partition()
        self.packed = pl.ds(self.tile * TILE, TILE)
        self.kv_scale: Any = 1.0 if refs.kv_scale_ref is None else refs.kv_scale_ref[0]

    def partition(self) -> WorkPartition:
        return WorkPartition.of(self.refs, self.index)

    def each_empty_row(self, write: Callable[[jax.Array, jax.Array | None], None]) -> None:
        """Calls write(row, known) for this CTA's share of the rows without tokens, and of the rows
        for which the schedule has another length: `known` is False for the latter."""

        @pl.loop(self.index, self.refs.lens_ref.shape[0], step=self.cut.parts)
        def _each(row):
            pl.when(self.part.pages_of(row) <= 0)(lambda: write(row, self.part.known(row)))

    def queries(self, row: jax.Array, first: int, width: int) -> Any:
        """Some columns of the tile's queries."""
        refs, tiles_of_heads = self.refs, self.cut.num_heads // TILE
        if refs.q_rope_ref is None:
            return refs.q_ref.at[row, self.packed, pl.ds(first, width)]
        token = lax.div(self.tile, tiles_of_heads)
        heads = pl.ds(lax.rem(self.tile, tiles_of_heads) * TILE, TILE)
        if first == RANK:
            return refs.q_rope_ref.at[row, token, heads]
        return refs.q_ref.at[heads, row, token, pl.ds(first, width)]

    def rows_of(self, row: jax.Array) -> Any:
        """A row's rows of the output."""
        return self._tile_of(self.cut.first_rows[0], row)

    def partial_rows_of(self, row: jax.Array) -> Any:
        """The rows of its piece's partial result."""
        return self._tile_of(self.cut.first_rows[1], self.part.partial_slot(row))

    def _tile_of(self, first: int, index: jax.Array) -> Any:
        return pl.ds(first + (index * self.cut.tiles + self.tile) * TILE, TILE)
