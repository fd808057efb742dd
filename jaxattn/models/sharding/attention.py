"""Attention on several GPUs: by heads, and its pages by heads or by the position in a row.

MLA's latents and an indexer's keys have no heads. Each GPU of a group holds all of them, or with
`context` a part of each row's pages. For grouped-query attention a GPU holds the key-value heads of
its queries; GPUs that share a row's pages hold the same ones.
"""

import dataclasses

from jaxattn.models.blocks.gqa import GQA
from jaxattn.models.blocks.mixer import Stream
from jaxattn.models.blocks.mla import MLA
from jaxattn.models.blocks.sparse_mla import SparseMLA
from jaxattn.models.sharding.axis_sharding import (
    AxisSharding,
    ShardedLayer,
    ShardingError,
    divides,
    refuse,
    shard_layer,
)
from jaxattn.parallel import Parallel


@shard_layer.register
def shard_mla(mixer: MLA, stream: Stream, parallel: Parallel) -> ShardedLayer[MLA]:
    """Divides MLA by heads; the projections to latents are whole on every GPU."""
    heads, ways = mixer.num_heads, parallel.tensor
    if heads % ways:
        raise refuse("attention heads", heads, "tensor", ways)
    if isinstance(mixer, SparseMLA) and mixer.sinks and parallel.context > 1:
        raise spread_refused(parallel, "sinks")
    queries = (heads, mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
    by_columns = (AxisSharding(-1, "tensor", (queries,)),)
    by_heads = (AxisSharding(-3, "tensor", ((heads, 1),)),)
    return ShardedLayer(
        dataclasses.replace(mixer, num_heads=heads // ways, parallel=parallel),
        {
            "q_proj": by_columns,
            "q_b_proj": by_columns,
            "g_proj": (AxisSharding(-1, "tensor", ((heads, 1),)),),
            "sinks": (AxisSharding(-1, "tensor", ((heads, 1),)),),
            "w_uk": by_heads,
            "w_uv": by_heads,
            "o_proj": (AxisSharding(-2, "tensor", ((heads, mixer.v_head_dim),)),),
        },
    )


@shard_layer.register
def shard_gqa(mixer: GQA, stream: Stream, parallel: Parallel) -> ShardedLayer[GQA]:
    """Divides grouped-query attention by heads."""
    heads, kv_heads, dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    num_shards, num_kv_shards = parallel.tensor, parallel.size("heads")
    if heads % num_shards:
        raise refuse("attention heads", heads, "tensor", num_shards)
    if not divides(kv_heads, num_kv_shards):
        raise refuse("key-value heads", kv_heads, "tensor / context", num_kv_shards)
    if parallel.context > 1 and (mixer.window is not None or mixer.sinks):
        raise spread_refused(parallel, "sinks" if mixer.window is None else "a window")
    if parallel.context > 1 and mixer.coded is not None:
        raise ShardingError(
            f"context={parallel.context} spreads a row's pages over GPUs, which "
            f"{mixer.coded.preset} does not support; use context=1 or another cache_format"
        )
    shared = -(-kv_heads // num_kv_shards)
    if not divides(shared, parallel.context):
        raise refuse(
            "key-value heads of GPUs that share pages", shared, "context", parallel.context
        )
    if heads // num_shards % shared:
        raise ShardingError(
            f"context={parallel.context} with tensor={num_shards} leaves a GPU "
            f"{heads // num_shards} query heads, which is not a multiple of the {shared} key-value "
            "heads of the GPUs that share its pages; use a smaller context"
        )
    queries = (heads, dim * (2 if mixer.gated else 1))
    query_sharding = (AxisSharding(-1, "tensor", (queries,)),)
    key_sharding = (AxisSharding(-1, "heads", ((kv_heads, dim),)),)
    return ShardedLayer(
        dataclasses.replace(
            mixer,
            num_heads=heads // num_shards,
            num_kv_heads=shared,
            parallel=parallel,
        ),
        {
            "q_proj": query_sharding,
            "k_proj": key_sharding,
            "v_proj": key_sharding,
            "q_bias": query_sharding,
            "k_bias": key_sharding,
            "v_bias": key_sharding,
            "q_heads_norm": query_sharding,
            "k_heads_norm": key_sharding,
            "kv_scale": (AxisSharding(-1, "heads", ((kv_heads, 1),)),),
            "sinks": (AxisSharding(-1, "tensor", ((heads, 1),)),),
            "o_proj": (AxisSharding(-2, "tensor", ((heads, dim),)),),
        },
    )


def spread_refused(parallel: Parallel, feature: str) -> ShardingError:
    return ShardingError(
        f"context={parallel.context} spreads a row's pages over GPUs, which attention with "
        f"{feature} does not support; use context=1"
    )
