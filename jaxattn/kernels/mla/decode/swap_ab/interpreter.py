"""Stand-ins in the interpreter for wgmma and fp8_register_operands.py; they sum in another order.

The interpreter of JAX 0.11.2 supports neither register operands nor stores to an accumulator.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.core.cache.formats import BLOCK, BYTES, FP8
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.mla.decode.latent_tile import BLOCKS, RANK, ROPE, SCALE_BYTES
from jaxattn.kernels.mla.decode.swap_ab.fp8_mainloop import SwapAbFp8Mainloop
from jaxattn.kernels.mla.decode.swap_ab.fp8_register_operands import (
    FLOAT_BIAS,
    QUERY_EXPONENT,
    ROPE_EXCESS,
)
from jaxattn.kernels.mla.decode.swap_ab.mainloop import Accumulators, SwapAbMainloop, over_keys


def half_queries(q: jax.Array, scaled: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries [..., 576] in the products' dtypes, and the factors of their scores.

    Args:
        q: bfloat16, in any order of the 512 and of the 64 columns.
        scaled: Whether the cache is block-scaled, with bfloat16 rope numbers.

    Returns:
        float16 [..., 512]; float16 or, if `scaled`, bfloat16 [..., 64]; float32 [...]. Each row is
        divided by a power of two. Then its largest number of the 512 is 2**8 or more and less than
        2**9, or that of the 64 is 2**14 or more and less than 2**15. Rows of numbers next to
        float32's smallest or largest are divided by less.
    """
    wide = q.astype(jnp.float32)

    def exponent(x: jax.Array) -> jax.Array:
        largest = jnp.max(jnp.abs(x), axis=-1)
        return lax.shift_right_logical(lax.bitcast_convert_type(largest, jnp.int32), 23)

    def power(biased: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(lax.shift_left(biased, 23), jnp.float32)

    found = jnp.maximum(exponent(wide[..., :RANK]), exponent(wide[..., RANK:]) - ROPE_EXCESS)
    found = jnp.clip(found, QUERY_EXPONENT + 1, 2 * FLOAT_BIAS)
    wide = wide * power(2 * FLOAT_BIAS + QUERY_EXPONENT - found)[..., None]
    numbers = wide[..., :RANK].astype(jnp.float16)
    rope = wide[..., RANK:].astype(jnp.bfloat16 if scaled else jnp.float16)
    return numbers, rope, power(found - QUERY_EXPONENT)


def plain_numbers(page: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a page's numbers without scales, float32 [4, 64, 128], and rope [64, 64]. The page
    has tiles [5, 64, 128], or tokens as in a block-scaled cache."""
    if page.dtype == BYTES:
        numbers = lax.bitcast_convert_type(page[:, :RANK], FP8)
        numbers = numbers.reshape(PAGE, BLOCKS, BLOCK).transpose(1, 0, 2)
        rope = page[:, RANK + SCALE_BYTES :].reshape(PAGE, ROPE, 2)
        rope = lax.bitcast_convert_type(rope, jnp.bfloat16)
    else:
        numbers, rope = page[:BLOCKS], page[BLOCKS, :, -ROPE:]
    return numbers.astype(jnp.float32), rope.astype(jnp.float32)


def plain_scales(page: jax.Array) -> jax.Array:
    """Returns the scales float32 [64, 4] of a block-scaled page."""
    scales = page[:, RANK : RANK + SCALE_BYTES].reshape(PAGE, BLOCKS, 4)
    return lax.bitcast_convert_type(scales, jnp.float32)


def plain_scores(page: jax.Array, queries: jax.Array, of_rope: jax.Array) -> jax.Array:
    """Returns the scores float32 [64, N] of a page and `half_queries`."""
    numbers, rope = plain_numbers(page)
    blocks = queries.astype(jnp.float32).reshape(-1, BLOCKS, BLOCK)
    products = jnp.einsum("btd,nbd->btn", numbers, blocks)
    if page.dtype == BYTES:
        products *= plain_scales(page).T[:, :, None]
    return products.sum(axis=0) + rope @ of_rope.astype(jnp.float32).T


class InterpretedSwapAbMainloop(SwapAbMainloop):
    def _add_values(
        self, accs: Accumulators, p: jax.Array, rescale: jax.Array, slot: jax.Array
    ) -> Accumulators:
        wide = lambda x: x[...].astype(jnp.float32)  # noqa: E731
        accs, values = self._store_p(accs, p, rescale), self.block.kv_smem.at[slot]
        return tuple(
            acc
            + jnp.dot(wide(values)[:, i * BLOCK : (i + 1) * BLOCK].T, wide(self._transpose_p(0)))
            for i, acc in enumerate(accs)
        )


class InterpretedSwapAbFp8Mainloop(SwapAbFp8Mainloop):
    as_values = False
    blocks_ahead = 0

    def take_queries(self) -> None:
        both = jnp.concatenate([x[0] for x in self.block.q_loads], axis=1)
        *self.queries, of_rows = half_queries(both, self.scaled)
        self.of_rows = over_keys(of_rows * self.block.factor)

    def _values(self, slot: jax.Array, block: int) -> Any:
        """No block is widened while the scores are exchanged."""

    def _scores_of(self, slot: jax.Array, left: jax.Array) -> jax.Array:
        del left
        return plain_scores(self.block.kv_smem[self.wg, slot], *self.queries)

    def _scales(self, slot: jax.Array, unit: jax.Array, left: jax.Array) -> Any:
        inside = jnp.arange(PAGE)[:, None] < left
        numbers = jnp.where(inside, plain_scales(self.block.kv_smem[self.wg, slot]), 0)
        wide = [jnp.broadcast_to(x, (self.cut.columns, PAGE)) for x in numbers.T]
        return wide, jnp.full_like(unit, jnp.nanmax(numbers))

    def _add_scaled(
        self, accs: Accumulators, p: jax.Array, rescale: jax.Array,
        scales: list[jax.Array] | None, begun: list[jax.Array], slot: jax.Array, left: jax.Array,
    ) -> Accumulators:  # fmt: skip
        inside = jnp.arange(PAGE)[:, None] < left
        numbers, _ = plain_numbers(self.block.kv_smem[self.wg, slot])
        numbers = jnp.where(inside, numbers, 0)
        out: list[jax.Array] = []

        def add(i: int, p_here: Any) -> None:
            out[i] += jnp.dot(numbers[i].T, p_here[...].astype(jnp.float32))

        self._each_block(accs, p, rescale, scales, lambda: 0, out.extend, add)
        return tuple(out)
