"""The causal mask of `mla_decode`: the keys that packed rows see, from the bottom right."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.split_kv_schedule import PAGE, TILE
from jaxattn.kernels.attention.work_iterator import visible_keys
from jaxattn.kernels.mla.decode.warp_specialized.cta_context import MlaDecodeCta
from jaxattn.kernels.mla.decode.warp_specialized.smem import LAYOUT


def tile_iota(dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (TILE, PAGE), dimension, layout=LAYOUT)


class CausalMask:
    """The mask of the pages of a row's piece, which begins at page `start` of the row."""

    def __init__(self, block: MlaDecodeCta, row: jax.Array, start: jax.Array, length: jax.Array):
        cut, refs = block.cut, block.refs
        self.start, self.q_len = start, cut.q_len
        self.length = length
        self.queries = None if refs.query_lens_ref is None else refs.query_lens_ref[row]
        self.visible = visible_keys(
            block.tile * TILE + tile_iota(0), length, self.queries,
            q_len=cut.q_len, num_heads=cut.num_heads, layout=LAYOUT,
        )  # fmt: skip

    def of_page(self, i: jax.Array) -> Any:
        """The mask data of the piece's page i, which is read before the page's scores are
        issued."""
        return i

    def told(self, page: Any) -> Any:
        """The mask data after the scores are done."""
        return page

    def all_visible(self, i: Any) -> jax.Array:
        """Whether every row sees the whole page."""
        seen = (self.start + i + 1) * PAGE <= self.length - (self.q_len - 1)
        return seen if self.queries is None else seen & (self.queries == self.q_len)

    def seen(self, i: Any) -> jax.Array:
        """bool [64, 64], the keys that each row sees."""
        return tile_iota(1) + (self.start + i) * PAGE < self.visible
