"""The body of `mla_decode`: the roles of its three warpgroups, page by page.

    0    scores = Q K^T, softmax; P and the rescaling of the rows to shared memory
    1    left  = rescale left  + P K[:, :256]
    2    right = rescale right + P K[:, 256:512]

The tensor cores take their work in the order

    Q K^T of page i + 1,   P K of page i, both halves,   Q K^T of page i + 2

so that the softmax of page i + 1 overlaps with P K of page i. Warpgroups 1 and 2 hold their
products back until the next page's scores are done; the barriers imply the rest of the order. A
page is needed for its scores, and then through those of the next page, until it was multiplied by
P. So three pages are in shared memory, in quarters of 128 columns:

    columns 0:128      2 pages    warpgroup 1 reads them last, and then copies the page after next
    the others         3 pages    warpgroup 1 or 2 likewise, three pages on
    rope columns       3 pages    warpgroup 2, then; P takes their place once the scores are there

(A model without rotated dims has no rope columns, and P has their place to itself.) The first
quarter, for which there is no third place, comes last in Q K^T and first in P K. To make room for
all this, three quarters of Q live in warpgroup 0's registers.
"""

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.mla.decode.warp_specialized.causal_mask import CausalMask
from jaxattn.kernels.mla.decode.warp_specialized.cta_context import MlaDecodeCta
from jaxattn.kernels.mla.decode.warp_specialized.fp8_page_loader import Fp8PageLoader
from jaxattn.kernels.mla.decode.warp_specialized.page_loader import PageLoader
from jaxattn.kernels.mla.decode.warp_specialized.pv_warpgroup import PvWarpgroup
from jaxattn.kernels.mla.decode.warp_specialized.qk_softmax_warpgroup import QkSoftmaxWarpgroup

REGISTERS = 168  # registers per thread: three warpgroups share 65,536


class MlaDecodeKernel(MlaDecodeCta):
    """The three warpgroups of a CTA."""

    def page_loader(self) -> PageLoader:
        return (Fp8PageLoader if self.cut.latents.quantized else PageLoader)(self)

    def mask(self, row: Any, start: Any, length: Any) -> Any:
        """The mask of the piece that begins at page `start` of a row of `length` tokens."""
        return CausalMask(self, row, start, length)

    def run(self) -> None:
        @pl.when(self.wg == 0)
        def _scores():
            plgpu.set_max_registers(REGISTERS, action="decrease")
            QkSoftmaxWarpgroup(self).run()

        @pl.when((self.wg == 1) | (self.wg == 2))
        def _values():
            plgpu.set_max_registers(REGISTERS, action="increase")
            PvWarpgroup(self).run()
