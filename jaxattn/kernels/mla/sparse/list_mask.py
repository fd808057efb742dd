"""The mask of a token's list, for the MLA kernel's scores: the keys that the token attends to."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.split_kv_schedule import PAGE, TILE
from jaxattn.kernels.hopper.instructions import issue_loads
from jaxattn.kernels.mla.decode.warp_specialized.causal_mask import tile_iota
from jaxattn.kernels.mla.decode.warp_specialized.smem import LAYOUT
from jaxattn.kernels.mla.sparse.token_gather import read_page, seen_words


class ListMask:
    """The mask of 64 entries at a time, from page `start` of the list on: the same for all
    heads."""

    def __init__(self, block: Any, row: jax.Array, start: jax.Array):
        self.refs, self.row, self.start = block.refs, row, start
        self.interpret = block.cut.interpret
        self.visible = block.visible(row)

    def of_page(self, i: jax.Array) -> Any:
        """The page's entries, whose loads are in flight; in the interpreter bool [64]."""
        page = self.start + i
        if not self.interpret:
            entries = read_page(self.refs.indices_ref, self.row, page)
            issue_loads(interpret=False)  # issued before the scores, and not after them
            return entries
        positions = self.refs.indices_ref[self.row, pl.ds(page * PAGE, PAGE)]
        return (positions >= 0) & (positions < self.visible)

    def told(self, page: Any) -> Any:
        """Two words with a bit for each entry."""
        return page if self.interpret else seen_words(page, self.visible)

    def all_visible(self, seen: Any) -> jax.Array:
        return seen.all() if self.interpret else (seen[0] & seen[1]) == -1

    def seen(self, seen: Any) -> jax.Array:
        """bool [64, 64], the keys that each row sees."""
        if self.interpret:
            return jnp.broadcast_to(seen, (TILE, PAGE))
        key = tile_iota(1)
        low, high = (
            plgpu.layout_cast(lax.broadcast_in_dim(x, (TILE, PAGE), []), LAYOUT) for x in seen
        )
        words = jnp.where(key < 32, low, high)
        return (lax.shift_right_logical(words, key & 31) & 1) == 1
