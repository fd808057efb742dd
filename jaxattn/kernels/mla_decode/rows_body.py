"""The body of `mla_decode`: what its three warpgroups do, page by page.

    0    scores = Q K^T, softmax; P and the rescaling of the rows to shared memory
    1    left  = rescale left  + P K[:, :256]
    2    right = rescale right + P K[:, 256:512]

The tensor cores take their work in the order

    Q K^T of page i + 1,   P K of page i, both halves,   Q K^T of page i + 2

so that the softmax of page i + 1 runs beside the second: warpgroups 1 and 2 hold their products
back until the next page's scores are done, the rest follows from who waits for what. A page is
needed for its scores, and then through those of the next page, until it was multiplied by P: three
are in shared memory, in quarters of 128 columns,

    columns 0:128      2 pages    warpgroup 1 reads them last, and then copies the page after next
    the others         3 pages    warpgroup 1 or 2 likewise, three pages on
    rope columns       3 pages    warpgroup 2, then; P takes their place once the scores are there

(a model without rotated dims has none of the last, and P has their place to itself). The first
quarter, for which there is no third place, comes last in Q K^T and first in P K. To have room for
so much, three quarters of Q live in warpgroup 0's registers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.machine import swizzled
from jaxattn.kernels.mla_decode.part import Part
from jaxattn.kernels.mla_decode.rows_scores import Scores
from jaxattn.kernels.mla_decode.rows_values import QUARTER, ROPE, Shared, Values, shared_types
from jaxattn.kernels.mla_decode.schedule import TILE

REGISTERS = 168  # of a thread: three warpgroups share 65,536


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

    def run(self) -> None:
        @pl.when(self.wg == 0)
        def _scores():
            plgpu.set_max_registers(REGISTERS, action="decrease")
            Scores(self).run()

        @pl.when((self.wg == 1) | (self.wg == 2))
        def _values():
            plgpu.set_max_registers(REGISTERS, action="increase")
            Values(self).run()

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
