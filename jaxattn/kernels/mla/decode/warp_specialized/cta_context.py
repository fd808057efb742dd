"""The CTA of `mla_decode`: its configuration, its refs and its scratch."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import LatentFormat
from jaxattn.kernels.attention.split_kv_schedule import TILE
from jaxattn.kernels.attention.work_iterator import WorkIterator
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.mla.decode.latent_tile import QUARTER, RANK, ROPE
from jaxattn.kernels.mla.decode.warp_specialized.smem import MlaDecodeSmem, PageSlots, shared_types


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
        keys_from_list: Whether a row attends to the keys of a list (kernels/mla/sparse) instead of
            all keys.
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
    keys_from_list: bool = False

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
    scheduled_lens_ref: Any  # None: the schedule is the call's own
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
        "shared": shared_types(dtype, cut.latents, page_size, keys_from_list=cut.keys_from_list),
    }


class MlaDecodeCta:
    """A CTA that computes a tile of 64 packed rows of each row in its part."""

    def __init__(self, cut: MlaDecodeConfig, refs: MlaDecodeRefs):
        self.cut, self.refs = cut, refs
        self.wg, self.tile, self.index = (lax.axis_index(name) for name in ("wg", "tile", "part"))
        self.part = self.work_iterator()
        self.packed = pl.ds(self.tile * TILE, TILE)
        self.kv_scale: Any = 1.0 if refs.kv_scale_ref is None else refs.kv_scale_ref[0]

    def work_iterator(self) -> WorkIterator:
        return WorkIterator.of(self.refs, self.index)

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
