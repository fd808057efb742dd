"""A and P of a chunk whose channels decay by themselves, out of tiles of scaled keys and queries.

Of each size of halves, 1 to 32 tokens, there is a tile of keys and one of queries, see
channel_factors.py. Row i of a block's second half meets column j of its first half in a product of
the two tiles' rows. Halves of up to 8 tokens are within a warp's 16 rows, whose `mma` multiplies
them; the last two sizes are wgmmas of a few columns.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn_prefill.chunk_body import own_products
from jaxattn.kernels.gdn_prefill.tiles import CHUNK, TILE, iota

SIZES = (1, 2, 4, 8, 16, 32)  # of halves
WITHIN_A_WARP = 8


class Scores(NamedTuple):
    """Of queries or of keys with keys: what is right of a warp's own 16 columns is 0."""

    own: jax.Array  # float32 [64, 16], each warp's own 16 columns
    beside: tuple[jax.Array, ...]  # [64, 16] twice, columns 0 and 32 on, for rows 16 and 48 on
    below: jax.Array | None  # [64, 32], columns 0 to 31, for rows 32 on

    def columns(self) -> list[jax.Array]:
        """Of the whole [64, 64], 16 side by side."""
        assert self.below is not None
        frame = lax.div(iota((CHUNK, 16), 0), jnp.int32(16))
        below = [lax.slice(self.below, (0, at), (CHUNK, at + 16)) for at in (0, 16)]
        zero = jnp.zeros_like(self.own)
        of_rows = (
            (self.own, self.beside[0], below[0], below[0]),
            (zero, self.own, below[1], below[1]),
            (zero, zero, self.own, self.beside[1]),
            (zero, zero, zero, self.own),
        )
        found = []
        for values in of_rows:
            column = values[0]
            for n in range(1, 4):
                if values[n] is not values[n - 1]:
                    column = jnp.where(frame >= n, values[n], column)
            found.append(column)
        return found


def halves(tile: Any) -> list[jax.Array]:
    """A tile [2, 64, 64] in registers."""
    return [plgpu.load(tile.at[half], layout=TILE) for half in range(2)]


def within_warps(
    scores: tuple[jax.Array, jax.Array], size: int, k_tile: Any, q_tile: Any, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Products of queries and of keys [64, 16], with those of halves of `size` added."""
    keys, queries = halves(k_tile), halves(q_tile)
    row, column = lax.rem(iota((CHUNK, 16), 0), jnp.int32(16)), iota((CHUNK, 16), 1)
    half, of_column = lax.div(row, jnp.int32(size)), lax.div(column, jnp.int32(size))
    meets = (lax.rem(half, jnp.int32(2)) == 1) & (of_column == half - 1)
    of_queries, of_keys = scores
    products = own_products(queries, keys, interpret=interpret)
    of_queries = jnp.where(meets, products, of_queries)
    products = own_products(keys, keys, interpret=interpret)
    return of_queries, jnp.where(meets, products, of_keys)


def between_warps(size: int, k_tile: Any, q_tile: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    """Products of queries and of keys [64, size] with the keys of every first half."""
    firsts = range(0, CHUNK, 2 * size)

    def products(*accs: Any) -> list[jax.Array]:
        turn = iter(accs)
        for tile in (q_tile, k_tile):
            for first in firsts:
                acc = next(turn)
                for half in range(2):
                    columns = k_tile.at[half, pl.ds(first, size)].transpose((1, 0))
                    plgpu.wgmma(acc, tile.at[half], columns)
        return [acc[...] for acc in accs]

    accs = [plgpu.ACC((CHUNK, size), jnp.float32)] * (2 * len(firsts))
    found = pl.run_scoped(products, *accs)
    return found[: len(firsts)], found[len(firsts) :]
