"""What `mla_decode` keeps in shared memory, and what a block of it has in hand.

rows_body.py says when a page is where.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.machine import swizzled
from jaxattn.kernels.mla_decode.part import Part
from jaxattn.kernels.mla_decode.schedule import PAGE, TILE, copies_of

RANK, ROPE = 512, 64
HALF, QUARTER = RANK // 2, RANK // 4
# Of each quarter: pages that there is room for, and the first one's place.
SLOTS, FIRST_SLOT = (2, 3, 3, 3), (0, 2, 5, 8)
PAGES = max(SLOTS)

LAYOUT = plgpu.Layout.WGMMA


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """What the three warpgroups share, arrays and then barriers."""

    kv: Any  # [place, 64, 128], quarters of pages
    rope: Any  # [PAGES, 64, 64], rope columns of pages, then P
    rescale: Any  # float32 [PAGES, 64], of the rows, before the page is added
    sums: Any  # float32 [64], of a piece's rows at its end; negative where one sees no key
    kv_loaded: Any
    rope_loaded: Any
    p_written: Any  # and the rescaling
    p_read: Any  # by warpgroup 1, where rope columns take its place
    scores_done: Any  # but of a piece's first page
    sums_written: Any
    sums_read: Any  # by both


def shared_types(dtype: Any, page_size: int) -> Shared:
    tiled, copies = swizzled(dtype), copies_of(page_size)
    return Shared(
        kv=plgpu.SMEM((sum(SLOTS), PAGE, QUARTER), dtype, transforms=tiled),
        rope=plgpu.SMEM((PAGES, PAGE, ROPE), dtype, transforms=tiled),
        rescale=plgpu.SMEM((PAGES, TILE), jnp.float32),
        sums=plgpu.SMEM((TILE,), jnp.float32),
        kv_loaded=plgpu.Barrier(num_arrivals=copies, num_barriers=sum(SLOTS)),
        rope_loaded=plgpu.Barrier(num_arrivals=copies, num_barriers=PAGES),
        p_written=plgpu.Barrier(num_barriers=PAGES),
        p_read=plgpu.Barrier(num_barriers=PAGES),
        scores_done=plgpu.Barrier(num_barriers=PAGES),
        sums_written=plgpu.Barrier(),
        sums_read=plgpu.Barrier(num_arrivals=2),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """What is known of a launch when it is traced.

    Attributes:
        tiles: of 64 packed rows, of a request.
        parts: of the schedule.
        rope: whether there are rope columns: D 576, or 512.
        first_rows: `Results.first_rows`.
        output_by_tma: whether a whole row's output leaves through its last page's slot, or by
            stores of four bytes from registers.
    """

    q_len: int
    num_heads: int
    tiles: int
    parts: int
    scale: float
    dtype: Any
    rope: bool
    first_rows: Sequence[int]
    output_by_tma: bool
    interpret: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs:
    """What a block works on: operands and results, then its shared memory and barriers."""

    q_ref: Any  # [B, rows, D], or of the absorbed product [H, B, S, R] with whole tiles of heads
    q_rope_ref: Any  # then the rotated columns, [B, S, H, P]; else None
    kv_ref: Any
    layer_ref: Any
    table_ref: Any
    lens_ref: Any
    cuts_ref: Any
    order_ref: Any  # None: a schedule without an order
    query_lens_ref: Any  # None: every row has all S tokens
    out_ref: Any
    partial_ref: Any  # None: no row is split
    lse_ref: Any
    partial_lse_ref: Any
    q_others_smem: Any  # the interpreter's, of what registers hold elsewhere
    q_smem: Any  # Q's first quarter
    q_rope_smem: Any  # its rope columns
    q_loaded: Any
    shared: Shared


def scratch_types(dtype: Any, page_size: int, rope: bool, interpret: bool) -> dict[str, Any]:
    tiled = swizzled(dtype)
    # The interpreter has no register operands: there all of Q is in shared memory.
    others = plgpu.SMEM((3, TILE, QUARTER), dtype, transforms=tiled) if interpret else None
    # TMA wants its destination in one piece: the columns of Q and of pages lie apart.
    return {
        "q_others_smem": others,
        "q_smem": plgpu.SMEM((TILE, QUARTER), dtype, transforms=tiled),
        "q_rope_smem": plgpu.SMEM((TILE, ROPE), dtype, transforms=tiled),
        "q_loaded": plgpu.Barrier(num_arrivals=(3 if interpret else 0) + 1 + rope),
        "shared": shared_types(dtype, page_size),
    }


class Block:
    """A tile of 64 packed rows of the rows in a part."""

    def __init__(self, cut: Cut, refs: Refs):
        self.cut, self.refs = cut, refs
        self.wg, self.tile, self.index = (lax.axis_index(name) for name in ("wg", "tile", "part"))
        self.part = Part.of(
            refs.cuts_ref, refs.order_ref, self.index, refs.lens_ref, refs.table_ref, refs.kv_ref,
            refs.layer_ref,
        )  # fmt: skip
        self.packed = pl.ds(self.tile * TILE, TILE)

    def each_empty_row(self, write: Callable[[jax.Array], None]) -> None:
        """Calls write(row) for this block's share of the rows without tokens."""

        @pl.loop(self.index, self.refs.lens_ref.shape[0], step=self.cut.parts)
        def _each(row):
            pl.when(self.part.pages_of(row) <= 0)(lambda: write(row))

    def rows_of(self, row: jax.Array) -> Any:
        """A row's rows of the output."""
        return self._tile_of(self.cut.first_rows[0], row)

    def partial_rows_of(self, row: jax.Array) -> Any:
        """Those of its piece's partial result."""
        return self._tile_of(self.cut.first_rows[1], self.part.partial_slot(row))

    def _tile_of(self, first: int, index: jax.Array) -> Any:
        return pl.ds(first + (index * self.cut.tiles + self.tile) * TILE, TILE)
