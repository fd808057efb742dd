"""The mean key of a row, which is subtracted from all of its keys.

Subtracting one number from all scores of a query does not change their softmax, and neither does
subtracting one vector from all keys. Real models have dims that are large and nearly the same in
every key. Rounding such dims to float16 would be by far the largest error, whereas the differences
between keys are small.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jaxattn.core.turboquant.code_gather import page_codes
from jaxattn.core.turboquant.codec import TurboFormat, hadamard, key_numbers
from jaxattn.core.turboquant.slot_layout import GROUP

# Number of groups of 16 tokens, spread evenly over the row, that are averaged. 128 tokens add a
# 128th to the square of the differences.
SAMPLES = 8
# The mean is clipped to this magnitude, so it reduces float16's range for keys by no more.
MOST = 1024.0


def common_key(
    form: TurboFormat,
    stack: UInt8[Array, "L N Hk bytes"],
    block_tables: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    begins: Int[Array, "B"] | None,
    layer: Any,
) -> Float[Array, "B Hk D"]:
    """Returns the mean of a sample of each row's tokens [begins, lengths), float32 and finite.

    The mean depends only on the row's own tokens, and on none of them strongly. Keys that are NaN
    or infinite do not count, and neither do pages that do not exist. An empty sample gives 0.

    Args:
        form: A format that rotates keys.
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
    # The norm of a key counts as at most twice the shortest in its group. A key that is the only
    # one in its group does not count, unless the row has only one group.
    alone = (jnp.sum(counts, axis=3, keepdims=True) == 1) & (groups > 1)[:, None, :, None]
    counts &= ~alone
    least = jnp.min(jnp.where(counts, norm, jnp.inf), axis=3, keepdims=True)
    norm = jnp.minimum(norm, 2 * least)
    total = jnp.where(counts, norm, 0)[..., None] * key_numbers(form, codes.keys)
    most = jnp.maximum(jnp.sum(counts, axis=(1, 3)), 1)
    mean = jnp.sum(total, axis=(1, 3)) / most[..., None]
    # Rotated back by a product, written as a sum so that XLA emits one kernel.
    turned = jnp.sum(mean[..., None, :] * hadamard(form.head_dim), axis=-1)
    return jnp.clip(turned, -MOST, MOST)
