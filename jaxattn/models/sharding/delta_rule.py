"""Delta rules on several GPUs: divided by value heads, with the key heads that they read.

A state is a row's whole history, so only heads can divide it. If there are fewer key heads than
GPUs, each GPU holds one, and computes its share of the convolution itself.
"""

import dataclasses

from jaxattn.models.blocks.delta_rule import GDN, KDA
from jaxattn.models.blocks.mixer import Stream
from jaxattn.models.sharding.axis_sharding import (
    AxisSharding,
    ShardedLayer,
    divides,
    refuse,
    shard_layer,
)
from jaxattn.parallel import Parallel


@shard_layer.register
def shard_gdn(mixer: GDN, stream: Stream, parallel: Parallel) -> ShardedLayer[GDN]:
    """Divides a gated delta net by heads; a GPU's columns q | k | v | z are q | k | v | z again."""
    num_shards = parallel.tensor
    if mixer.num_v_heads % num_shards:
        raise refuse("value heads", mixer.num_v_heads, "tensor", num_shards)
    if not divides(mixer.num_k_heads, num_shards):
        raise refuse("key heads", mixer.num_k_heads, "tensor", num_shards)
    keys = (mixer.num_k_heads, mixer.head_k_dim)
    values = (mixer.num_v_heads, mixer.head_v_dim)
    head_values = (mixer.num_v_heads, 1)
    per_head = (AxisSharding(-1, "tensor", (head_values,)),)
    return ShardedLayer(
        dataclasses.replace(
            mixer,
            num_k_heads=-(-mixer.num_k_heads // num_shards),
            num_v_heads=mixer.num_v_heads // num_shards,
        ),
        {
            "in_proj_qkvz": (AxisSharding(-1, "tensor", (keys, keys, values, values)),),
            "in_proj_ba": (AxisSharding(-1, "tensor", (head_values, head_values)),),
            "conv1d": (AxisSharding(-2, "tensor", (keys, keys, values)),),
            "A_log": per_head,
            "dt_bias": per_head,
            "out_proj": (AxisSharding(-2, "tensor", (values,)),),
        },
    )


@shard_layer.register
def shard_kda(mixer: KDA, stream: Stream, parallel: Parallel) -> ShardedLayer[KDA]:
    """Divides Kimi Delta Attention by heads; the narrow side of its low-rank gates stays whole."""
    ways, heads = parallel.tensor, mixer.num_heads
    if heads % ways:
        raise refuse("heads", heads, "tensor", ways)
    head_columns, head_values = (heads, mixer.head_dim), (heads, 1)
    columns = (AxisSharding(-1, "tensor", (head_columns,)),)
    return ShardedLayer(
        dataclasses.replace(mixer, num_heads=heads // ways),
        {
            "in_proj_qkv": (
                AxisSharding(-1, "tensor", (head_columns, head_columns, head_columns)),
            ),
            "in_proj_b": (AxisSharding(-1, "tensor", (head_values,)),),
            "in_proj_fg": (AxisSharding(-1, "tensor", (head_columns, head_columns)),),
            "f_b_proj": columns,
            "g_b_proj": columns,
            "conv1d": (AxisSharding(-2, "tensor", (head_columns, head_columns, head_columns)),),
            "A_log": (AxisSharding(-1, "tensor", (head_values,)),),
            "dt_bias": columns,
            "out_proj": (AxisSharding(-2, "tensor", (head_columns,)),),
        },
    )
