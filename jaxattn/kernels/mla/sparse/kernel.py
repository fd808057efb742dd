"""The body of MLA attention over lists of positions: that of `mla_decode`, with keys from the
lists.

Each token is a row of its own, whose keys are the K entries of its list, 64 per page. The three
warpgroups, their shared memory and the order of their products are those of
warp_specialized/kernel.py. token_loader.py loads the keys, and list_mask.py masks them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.attention.work_iterator import WorkIterator
from jaxattn.kernels.mla.decode.warp_specialized.cta_context import MlaDecodeConfig, MlaDecodeRefs
from jaxattn.kernels.mla.decode.warp_specialized.kernel import MlaDecodeKernel
from jaxattn.kernels.mla.index.work_tiles import visible_keys
from jaxattn.kernels.mla.sparse.list_mask import ListMask
from jaxattn.kernels.mla.sparse.token_loader import (
    Fp8TokenLoader,
    TokenLoader,
    WideTokenLoader,
)


@dataclasses.dataclass(frozen=True)
class ListIterator(WorkIterator):
    """The iteration over a CTA's part of the tokens' lists.

    Attributes:
        most: Pages of a list.
        apart: 1, or if no list is split the distance between the part's tokens.
        whole: Whether no list is split. All then have `most` pages, and no length is read.
    """

    most: int
    apart: int
    whole: bool

    @property
    def max_pages(self) -> int:
        return self.most

    @property
    def stride(self) -> int:  # type: ignore[override]
        return self.apart

    def pages_of(self, row: jax.Array) -> jax.Array:
        return super().pages_of(row) if self.whole else jnp.int32(self.most)

    def pages_in(self, length: jax.Array) -> jax.Array:
        return super().pages_in(length) if self.whole else jnp.int32(self.most)

    @classmethod
    def of_lists(cls, refs: MlaDecodeRefs, index: Any, parts: int, whole: bool) -> "ListIterator":
        rows, entries = refs.indices_ref.shape
        part = WorkIterator.of(refs, index)
        given = {x.name: getattr(part, x.name) for x in dataclasses.fields(part)}
        if whole:
            number = lax.div(rows + parts - 1 - index, parts)
            given["begin"] = index, jnp.int32(0)
            given["end"] = index + number * parts, jnp.int32(0)
        return cls(**given, most=entries // PAGE, apart=parts if whole else 1, whole=whole)


class MlaSparseKernel(MlaDecodeKernel):
    """The three warpgroups of a CTA.

    Attributes:
        tokens_of_row: Tokens, which are rows here, that share a row of the block tables.
        whole: Whether no list is split. A CTA then has every n-th token, so that concurrent CTAs
            process neighboring tokens, whose lists have much in common in L2.
    """

    def __init__(self, cut: MlaDecodeConfig, refs: MlaDecodeRefs, tokens_of_row: int, whole: bool):
        self.tokens_of_row, self.whole = tokens_of_row, whole
        super().__init__(cut, refs)

    def work_iterator(self) -> WorkIterator:
        return ListIterator.of_lists(self.refs, self.index, self.cut.parts, self.whole)

    def page_loader(self) -> TokenLoader:
        return (Fp8TokenLoader if self.cut.latents.quantized else WideTokenLoader)(self)

    def visible(self, row: jax.Array) -> jax.Array:
        """The number of the row's positions that the token sees."""
        refs = self.refs
        if refs.visible_ref is not None:
            return refs.visible_ref[row]
        tokens = jnp.int32(self.tokens_of_row)
        place = lax.div(row, tokens)
        queries = tokens if refs.row_queries_ref is None else refs.row_queries_ref[place]
        most = refs.table_ref.shape[1] * self.part.page_size
        return visible_keys(refs.row_lens_ref[place], queries, lax.rem(row, tokens), most)

    def mask(self, row: Any, start: Any, length: Any) -> ListMask:
        del length  # the list's length
        return ListMask(self, row, start)
