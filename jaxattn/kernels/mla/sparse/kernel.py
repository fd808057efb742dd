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
        num_list_pages: Pages of a list.
        part_stride: 1, or if no list is split the distance between the part's tokens.
        is_unsplit: Whether no list is split. All then have `num_list_pages` pages, and no
            length is read.
    """

    num_list_pages: int
    part_stride: int
    is_unsplit: bool

    @property
    def max_pages(self) -> int:
        return self.num_list_pages

    @property
    def stride(self) -> int:  # type: ignore[override]
        return self.part_stride

    def pages_of(self, row: jax.Array) -> jax.Array:
        return super().pages_of(row) if self.is_unsplit else jnp.int32(self.num_list_pages)

    def pages_in(self, length: jax.Array) -> jax.Array:
        return super().pages_in(length) if self.is_unsplit else jnp.int32(self.num_list_pages)

    @classmethod
    def of_lists(
        cls, refs: MlaDecodeRefs, index: Any, parts: int, is_unsplit: bool
    ) -> "ListIterator":
        rows, entries = refs.indices_ref.shape
        part = WorkIterator.of(refs, index)
        fields = {x.name: getattr(part, x.name) for x in dataclasses.fields(part)}
        if is_unsplit:
            number = lax.div(rows + parts - 1 - index, parts)
            fields["begin"] = index, jnp.int32(0)
            fields["end"] = index + number * parts, jnp.int32(0)
        return cls(
            **fields,
            num_list_pages=entries // PAGE,
            part_stride=parts if is_unsplit else 1,
            is_unsplit=is_unsplit,
        )


class MlaSparseKernel(MlaDecodeKernel):
    """The three warpgroups of a CTA.

    Attributes:
        tokens_of_row: Tokens, which are rows here, that share a row of the block tables.
        is_unsplit: Whether no list is split. A CTA then has every n-th token, so that concurrent
            CTAs process neighboring tokens, whose lists have much in common in L2.
    """

    def __init__(
        self, cut: MlaDecodeConfig, refs: MlaDecodeRefs, tokens_of_row: int, is_unsplit: bool
    ):
        self.tokens_of_row, self.is_unsplit = tokens_of_row, is_unsplit
        super().__init__(cut, refs)

    def work_iterator(self) -> WorkIterator:
        return ListIterator.of_lists(self.refs, self.index, self.cut.parts, self.is_unsplit)

    def page_loader(self) -> TokenLoader:
        return (Fp8TokenLoader if self.cut.latents.quantized else WideTokenLoader)(self)

    def visible(self, row: jax.Array) -> jax.Array:
        """The number of the row's positions that the token sees."""
        refs = self.refs
        if refs.visible_ref is not None:
            return refs.visible_ref[row]
        tokens = jnp.int32(self.tokens_of_row)
        request = lax.div(row, tokens)
        num_queries = tokens if refs.row_queries_ref is None else refs.row_queries_ref[request]
        max_tokens = refs.table_ref.shape[1] * self.part.page_size
        return visible_keys(
            refs.row_lens_ref[request], num_queries, lax.rem(row, tokens), max_tokens
        )

    def mask(self, row: Any, start: Any, length: Any) -> ListMask:
        del length  # the list's length
        return ListMask(self, row, start)
