"""`mla_index` on a Hopper GPU: two launches, the tokens' scores and then each token's top k.

scores.py has the first launch and top_k.py the second. The scores pass through a scratch buffer in
global memory, which work_tiles.py bounds to `SCRATCH_BYTES`, 128 MiB: a call with more scores
processes groups of tokens one after another.

Limits: keys of 128 dims in pages of 16, 32, 64 or 128 tokens, bfloat16 or float16 as the queries,
or float8_e4m3fn in pages of 64 or 128 with a float32 scale per token, which is not negative; 8 to
128 heads, a multiple of 8; top_k 512, 1,024 or 2,048; rows of up to 2**26 tokens; any B and S. With
FP8 keys a scale of NaN makes the score NaN; NaN among the numbers may count as 480.
Reference: ops/mla/sparse/index.py. Tests: tests/kernels/mla/index/test_index.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.mla.decode.decode_schedule import PAGE_SIZES
from jaxattn.kernels.mla.index.scores import DIM, IndexScoreConfig, index_scores
from jaxattn.kernels.mla.index.top_k import top_k_places
from jaxattn.kernels.mla.index.work_tiles import IndexTiling, part_begins, visible_keys

TOP_K = (512, 1024, 2048)
MOST_HEADS = 128
# The most keys of a row: the scores of an item's 8 tokens then take 2**31 bytes, which a 32-bit
# word counts.
MOST_KEYS = 2**26
# With so few items each CTA finds its part itself: an XLA kernel before this one would take longer.
FEW_ITEMS = 8
FP8 = jnp.float8_e4m3fn


def refuse_index(
    q: Any, index_cache: Any, block_tables: Any, top_k: int, *, interpret: bool = False
) -> None:
    """Raises `Refusal`, with the reason, if the kernels do not serve these shapes.

    Args:
        q: [B, S, Hi, 128], an array or its shape.
        index_cache: [..., N, C, 128], an array or its shape.
        block_tables: [B, M], an array or its shape.
        interpret: Whether the call runs in the interpreter, where top_k may be any multiple of 128,
            for small tests.
    """
    heads, dim = q.shape[2:]
    page_size, width = index_cache.shape[-2:]
    dtype, keys = jnp.dtype(q.dtype), jnp.dtype(index_cache.dtype)
    halves = dtype in (jnp.bfloat16, jnp.float16)
    if not halves or keys not in (dtype, FP8):
        raise Refusal(
            "mla_index: the kernel needs q in bfloat16 or float16, and an index_cache in the same "
            f"dtype or float8_e4m3fn, got q {dtype.name}, index_cache {keys.name}"
        )
    if dim != DIM or width != DIM:
        raise Refusal(
            f"mla_index: the kernel needs keys of {DIM} dims, got q {q.shape}, index_cache "
            f"{index_cache.shape}"
        )
    if heads % 8 or not 0 < heads <= MOST_HEADS:
        raise Refusal(
            f"mla_index: the kernel needs 8 to {MOST_HEADS} index heads, a multiple of 8, but q "
            f"{q.shape} has {heads}"
        )
    sizes = tuple(size for size in PAGE_SIZES if keys != FP8 or size >= 64)
    if page_size not in sizes:
        raise Refusal(
            f"mla_index: the kernel needs pages of {', '.join(map(str, sizes))} tokens of a "
            f"{keys.name} cache, but index_cache {index_cache.shape} has {page_size}"
        )
    if block_tables.shape[1] * page_size > MOST_KEYS:
        raise Refusal(
            f"mla_index: the kernel supports rows of up to {MOST_KEYS:,} tokens, but block_tables "
            f"{block_tables.shape} with pages of {page_size} reach "
            f"{block_tables.shape[1] * page_size:,}; give narrower block_tables"
        )
    if top_k not in TOP_K and not (interpret and top_k % 128 == 0):
        raise Refusal(f"mla_index: the kernel needs top_k=512, 1024 or 2048, got {top_k}")


def mla_index_mosaic(
    q: jax.Array,
    weights: jax.Array,
    index_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    top_k: int,
    query_lens: jax.Array | None = None,
    layer: jax.Array | int | None = None,
    k_scale: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`jaxattn.mla.mla_index`, with the same arguments after the op has checked them."""
    require_hopper("mla_index", interpret=interpret)
    refuse_index(q, index_cache, block_tables, top_k, interpret=interpret)
    q, weights, index_cache, k_scale = without_gradient(
        "mla_index", (q, weights, index_cache, k_scale), "q weights index_cache k_scale"
    )
    if layer is None:
        index_cache, layer = index_cache[None], 0
        k_scale = None if k_scale is None else k_scale[None]
    batch, q_len, heads, _ = q.shape
    most_keys = block_tables.shape[1] * index_cache.shape[-2]
    tiling = IndexTiling.of(batch, q_len, heads, most_keys)
    config = IndexScoreConfig(
        tiling=tiling, top_k=top_k, page_size=index_cache.shape[-2], dtype=q.dtype,
        keys=index_cache.dtype, interpret=interpret,
    )  # fmt: skip
    rows_of: Any = {"lens_ref": seq_lens, "query_lens_ref": query_lens}
    grouped = [tiling.in_items(x) for x in (q, weights)]
    if tiling.items > FEW_ITEMS:
        new = jnp.full_like(seq_lens, q_len) if query_lens is None else query_lens
        token = jnp.arange(q_len, dtype=jnp.int32)
        visible = visible_keys(seq_lens[:, None], new[:, None], token, most_keys)
        grouped.append(tiling.in_items(visible))

    def group(number: Any, queries: Any, factors: Any, visible: Any = None) -> jax.Array:
        first = None if tiling.groups == 1 else (number * tiling.group).reshape(1)
        begins = None if visible is None else part_begins(visible, top_k, config.parts)
        scores = index_scores(
            config,
            q_ref=queries.reshape(tiling.group, tiling.columns, DIM),
            weights_ref=factors.reshape(tiling.group, tiling.columns),
            keys_ref=index_cache,
            scale_ref=k_scale,
            layer_ref=jnp.asarray(layer, jnp.int32).reshape(1),
            table_ref=block_tables,
            begins_ref=begins,
            first_ref=first,
            **rows_of,
            interpret=interpret,
        )
        places = top_k_places(
            tiling, top_k, scores_ref=scores, first_ref=first, **rows_of, interpret=interpret
        )
        return places.reshape(tiling.group, tiling.tokens, top_k)

    if tiling.groups == 1:
        return tiling.of_tokens(group(0, *(x[0] for x in grouped))[None])
    numbers = jnp.arange(tiling.groups, dtype=jnp.int32)
    return tiling.of_tokens(lax.map(lambda some: group(*some), (numbers, *grouped)))
