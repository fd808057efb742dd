"""The key mean of a row, which is taken off all of its keys.

A softmax does not change where one number is taken off all scores of a query, so it does not change
where one vector is taken off all keys. Real models have dims that are large and nearly the same in
every key. float16 would round these by far more than all else; what differs between keys is small.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jaxattn.core.turboquant.code_gather import page_codes
from jaxattn.core.turboquant.codec import TurboFormat, hadamard, key_numbers
from jaxattn.core.turboquant.slot_layout import GROUP

# Groups of 16 tokens, spread evenly over the row, whose mean it is: 128 tokens add a 128th to the
# square of what differs.
SAMPLES = 8
# The mean's largest number: what float16 has of keys is cut by no more.
MOST = 1024.0


def common_key(
    form: TurboFormat,
    stack: UInt8[Array, "L N Hk bytes"],
    block_tables: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    begins: Int[Array, "B"] | None,
    layer: Any,
) -> Float[Array, "B Hk D"]:
    """The mean of some of each row's tokens [begins, lengths), float32 and finite.

    It depends on the row's own tokens alone, and on none of them much. Keys that are NaN or
    infinite do not count, and neither do pages that do not exist. Of nothing it is 0.

    Args:
        form: a format that rotates keys.
        layer: int32 [1].
    """
    _, count, kv_heads, nbytes = stack.shape
    page, width = form.page_size(stack), block_tables.shape[1]
    lengths = jnp.minimum(lengths, width * page)
    first = jnp.zeros_like(lengths) if begins is None else begins
    groups = jnp.maximum(-(-lengths // GROUP) - first // GROUP, 0)[:, None]
    odd = 2 * jnp.arange(SAMPLES, dtype=jnp.int32) + 1
    group = (first // GROUP)[:, None] + odd * groups // (2 * SAMPLES)  # [B, n]
    column = jnp.clip(group * GROUP // page, 0, width - 1)
    pages = jnp.take_along_axis(block_tables, column, axis=1)
    there = (pages >= 0) & (pages < count)
    by_group = stack.reshape(-1, count, kv_heads, page // GROUP, nbytes * GROUP // page)
    at = jnp.clip(layer[0], 0, stack.shape[0] - 1)
    some = by_group[at, jnp.where(there, pages, 0), :, group % (page // GROUP)]
    codes = page_codes(form, some)  # [B, n, Hk, 16, D]
    assert codes.norm is not None
    token = GROUP * group[..., None] + jnp.arange(GROUP)
    own = there[..., None] & (token >= first[:, None, None]) & (token < lengths[:, None, None])
    norm = codes.norm.astype(jnp.float32)
    counts = own[:, :, None] & jnp.isfinite(norm)
    # A key that is much longer than others of its group counts as twice as long as the shortest; so
    # one that is alone in it does not count, but where the row has one group.
    alone = (jnp.sum(counts, axis=3, keepdims=True) == 1) & (groups > 1)[:, None, :, None]
    counts &= ~alone
    least = jnp.min(jnp.where(counts, norm, jnp.inf), axis=3, keepdims=True)
    norm = jnp.minimum(norm, 2 * least)
    total = jnp.where(counts, norm, 0)[..., None] * key_numbers(form, codes.keys)
    most = jnp.maximum(jnp.sum(counts, axis=(1, 3)), 1)
    mean = jnp.sum(total, axis=(1, 3)) / most[..., None]
    # Rotated back: a product, written as a sum for XLA to make one kernel of.
    turned = jnp.sum(mean[..., None, :] * hadamard(form.head_dim), axis=-1)
    return jnp.clip(turned, -MOST, MOST)
