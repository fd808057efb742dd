"""The arena workspace of `gqa_decode`."""

from typing import Any

import jax.numpy as jnp

from jaxattn.arena import ArenaSpec
from jaxattn.core.validation.array_checks import check_sizes, check_window
from jaxattn.kernels.gqa.decode.smem import block_columns, refusal
from jaxattn.kernels.gqa.decode.split_kv.decode_schedule import (
    check_groups,
    compute_max_steps,
    may_cut,
    num_parts,
)
from jaxattn.kernels.hopper.device import NUM_SMS


def scratch(
    *,
    batch: int,
    q_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_pages: int,
    page_size: int,
    window: int | None = None,
    dtype: Any = jnp.bfloat16,
    cache_dtype: Any = None,
) -> ArenaSpec:
    """Returns the scratch of `gqa_decode` in the arena: its output, and float32 partial results of
    split pairs.

    Args:
        batch: B, the rows of the bucket.
        q_len: S, the query tokens of a row.
        num_heads: H.
        num_kv_heads: Hk.
        head_dim: D.
        max_pages: M, the width of the block tables.
        page_size: C, the tokens of a page.
        window: The number of keys that a token sees; None means all, which needs at least as much
            scratch.
        dtype: The queries' dtype.
        cache_dtype: The dtype of keys and values; None means `dtype`.

    Returns:
        Region `out` [B, S, H, D]. If pairs may be split, also region `partial_out` float32
        [parts, 2, rows, D], with S * group rows, rounded up to a multiple of 8, and at most 132
        parts. For 32 query heads over 8 KV heads of 128 dims, the region takes 1 MiB for any batch
        and context. Empty for shapes and dtypes that the kernel does not support, because XLA
        allocates its own scratch.

    Raises:
        TypeError, ValueError: A size is not a positive integer; the message names the size.
    """
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    pages = {"max_pages": max_pages, "page_size": page_size}
    check_sizes("gqa.scratch", batch=batch, q_len=q_len, **heads, **pages)
    check_groups("gqa.scratch", num_heads, num_kv_heads)
    window = check_window("gqa.scratch", window)
    if refusal(dtype, cache_dtype or dtype, head_dim, page_size):
        return ArenaSpec()
    columns, tiles = block_columns(q_len * (num_heads // num_kv_heads), head_dim)
    steps = compute_max_steps(max_pages, page_size, q_len, window)
    pairs = batch * num_kv_heads
    parts = num_parts(
        pairs, steps, columns=columns, tiles=tiles, head_dim=head_dim, num_sms=NUM_SMS
    )
    split = may_cut(pairs, parts, steps)
    return spec_of((batch, q_len, num_heads, head_dim), columns * tiles, dtype, parts, split)


def spec_of(shape: tuple[int, ...], rows: int, dtype: Any, parts: int, split: bool) -> ArenaSpec:
    """Returns the arena spec for outputs [B, S, H, D], and `rows` packed rows per pair."""
    regions: dict[str, Any] = {"out": (shape, dtype)}
    if split:
        regions["partial_out"] = ((parts, 2, rows, shape[-1]), jnp.float32)
    return ArenaSpec.of("gqa_decode", **regions)
