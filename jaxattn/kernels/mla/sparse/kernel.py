"""The body of MLA attention over lists of positions: `mla_decode`'s, which finds its keys there.

Each token is a row of its own, whose keys are the K entries of its list, 64 a page. The three
warpgroups, their shared memory and the order of their products are warp_specialized/kernel.py's;
token_producer.py brings the keys, and list_mask.py says which count.
"""

from typing import Any

from jaxattn.kernels.attention.tile_scheduler import PAGE
from jaxattn.kernels.attention.work_partition import WorkPartition
from jaxattn.kernels.mla.decode.warp_specialized.kernel import MlaDecodeKernel
from jaxattn.kernels.mla.decode.warp_specialized.smem import MlaDecodeConfig, MlaDecodeRefs
from jaxattn.kernels.mla.sparse.list_mask import ListMask
from jaxattn.kernels.mla.sparse.token_producer import (
    Fp8TokenProducer,
    TokenProducer,
    WideTokenProducer,
)


class ListPartition(WorkPartition):
    """A part of the tokens' lists."""

    @property
    def max_pages(self) -> int:
        return 2**31 // PAGE - 1  # a list's length says how many it has


class MlaSparseKernel(MlaDecodeKernel):
    """The three warpgroups of a block.

    Attributes:
        tokens_of_row: rows here that share a row of the block tables.
    """

    partition = ListPartition

    def __init__(self, cut: MlaDecodeConfig, refs: MlaDecodeRefs, tokens_of_row: int):
        super().__init__(cut, refs)
        self.tokens_of_row = tokens_of_row

    def page_producer(self) -> TokenProducer:
        return (Fp8TokenProducer if self.cut.latents.quantized else WideTokenProducer)(self)

    def mask(self, row: Any, start: Any, length: Any) -> ListMask:
        del length  # of the list
        return ListMask(self, row, start)
