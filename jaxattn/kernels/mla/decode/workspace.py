"""The arena workspace of both MLA decode kernels."""

from typing import Any

import jax.numpy as jnp

from jaxattn.arena import ArenaSpec
from jaxattn.core.validation.array_checks import check_sizes
from jaxattn.kernels.attention.split_kv_schedule import (
    PAGE,
    may_split,
    num_parts,
    num_steps,
    packed_rows,
)
from jaxattn.kernels.hopper.device import NUM_SMS
from jaxattn.kernels.mla.decode.latent_tile import RANK


def scratch(
    *,
    batch: int,
    q_len: int,
    num_heads: int,
    max_pages: int,
    page_size: int = PAGE,
    kv_lora_rank: int = RANK,
    dtype: Any = jnp.bfloat16,
) -> ArenaSpec:
    """Returns the scratch of `mla_decode` in the arena: its output, and float32 partial results of
    split rows.

    Args:
        batch: B, the rows of the bucket.
        q_len: S, the query tokens of a row.
        num_heads: H.
        max_pages: M, the width of the block tables; long rows of a small batch are split.
        page_size: C, the tokens of a page.
        kv_lora_rank: R.
        dtype: The queries' dtype.

    Returns:
        Region `out` [B, rows, R], where row s * H + h is head h of token s. S * H rows are rounded
        up to a multiple of 8, or of 64 if there are more than 24. If rows of the batch may be
        split, also region `partial_out` float32 [parts, 2, rows, R], which is at most 33 MiB for
        any batch. DeepSeek-R1 at 2048 rows needs 256 MiB for all layers.

    Raises:
        ValueError: A size is not a positive integer; the message names the size.
    """
    sizes = {"batch": batch, "q_len": q_len, "num_heads": num_heads, "kv_lora_rank": kv_lora_rank}
    check_sizes("mla.scratch", **sizes, max_pages=max_pages, page_size=page_size)
    steps = num_steps(max_pages, page_size)
    parts = num_parts(batch, q_len, num_heads, steps, NUM_SMS)
    rows = packed_rows(q_len, num_heads)
    return spec_of(batch, rows, kv_lora_rank, dtype, parts)


def spec_of(batch: int, rows: int, rank: int, dtype: Any, parts: int) -> ArenaSpec:
    regions: dict[str, Any] = {"out": ((batch, rows, rank), dtype)}
    if may_split(batch, parts):
        regions["partial_out"] = ((parts, 2, rows, rank), jnp.float32)
    return ArenaSpec.of("mla_decode", **regions)
