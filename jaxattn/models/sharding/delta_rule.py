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
    ways = parallel.tensor
    if mixer.num_v_heads % ways:
        raise refuse("value heads", mixer.num_v_heads, "tensor", ways)
    if not divides(mixer.num_k_heads, ways):
        raise refuse("key heads", mixer.num_k_heads, "tensor", ways)
    keys = (mixer.num_k_heads, mixer.head_k_dim)
    values = (mixer.num_v_heads, mixer.head_v_dim)
    each = (mixer.num_v_heads, 1)
    per_head = (AxisSharding(-1, "tensor", (each,)),)
    return ShardedLayer(
        dataclasses.replace(
            mixer,
            num_k_heads=-(-mixer.num_k_heads // ways),
            num_v_heads=mixer.num_v_heads // ways,
        ),
        {
            "in_proj_qkvz": (AxisSharding(-1, "tensor", (keys, keys, values, values)),),
            "in_proj_ba": (AxisSharding(-1, "tensor", (each, each)),),
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
    wide, each = (heads, mixer.head_dim), (heads, 1)
    columns = (AxisSharding(-1, "tensor", (wide,)),)
    return ShardedLayer(
        dataclasses.replace(mixer, num_heads=heads // ways),
        {
            "in_proj_qkv": (AxisSharding(-1, "tensor", (wide, wide, wide)),),
            "in_proj_b": (AxisSharding(-1, "tensor", (each,)),),
            "in_proj_fg": (AxisSharding(-1, "tensor", (wide, wide)),),
            "f_b_proj": columns,
            "g_b_proj": columns,
            "conv1d": (AxisSharding(-2, "tensor", (wide, wide, wide)),),
            "A_log": (AxisSharding(-1, "tensor", (each,)),),
            "dt_bias": columns,
            "out_proj": (AxisSharding(-2, "tensor", (wide,)),),
        },
    )
