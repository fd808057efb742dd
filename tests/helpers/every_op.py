"""Every public op and module once, on small NumPy arrays: what holds of all of them is tested here.

`arguments(**sizes)` gives each op's arguments by name; an op takes them as keywords.
"""

import functools
from typing import Any

import numpy as np
from flax import nnx

from jaxattn import gdn, gqa, kda, mla
from jaxattn.core.numerics.rope import RopeConfig, rotation, softmax_scale
from jaxattn.nn import (
    GatedDeltaNet,
    GatedMLP,
    GroupedQueryAttention,
    KimiDeltaAttention,
    Linear,
    MultiHeadLatentAttention,
    RMSNorm,
)
from jaxattn.ops.linear.rms_norm import rms_norm_layer

CONFIG = RopeConfig(dim=4)
HIDDEN, PAGES, PAGE, SLOTS = 16, 8, 4, 4
RANK, NOPE, ROPE, VALUES = 8, 6, 4, 5
LATENT = RANK + ROPE
DK, DV, WIDTH = 8, 6, 4
HEAD = 8  # of grouped-query attention


def mla_module(num_heads: int) -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(
        HIDDEN,
        num_heads,
        kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUES,
        dtype=np.float32,
        rngs=nnx.Rngs(0),
    )


def gdn_module(num_k_heads: int, num_v_heads: int) -> GatedDeltaNet:
    kwargs = dict(head_k_dim=DK, head_v_dim=DV, dtype=np.float32, rngs=nnx.Rngs(0))
    return GatedDeltaNet(HIDDEN, num_k_heads, num_v_heads, **kwargs)


def kda_module(num_heads: int) -> KimiDeltaAttention:
    kwargs = dict(head_dim=DK, gate_rank=3, dtype=np.float32, rngs=nnx.Rngs(0))
    return KimiDeltaAttention(HIDDEN, num_heads, **kwargs)


def gqa_module(num_heads: int, num_kv_heads: int) -> GroupedQueryAttention:
    return GroupedQueryAttention(
        HIDDEN,
        num_heads,
        num_kv_heads,
        HEAD,
        rope=CONFIG,
        qk_norm=True,
        gated=True,
        window=4,
        sinks=True,
        dtype=np.float32,
        rngs=nnx.Rngs(0),
    )


def module(make: Any, method: str = "__call__") -> Any:
    """An op of a module's method: the constructor's arguments are those in `sizes`."""

    def call(*, sizes: dict[str, Any], **kwargs: Any) -> Any:
        return getattr(make(**sizes), method)(**kwargs)

    return call


def mlp(hidden: int, inner: int) -> GatedMLP:
    return GatedMLP(hidden, inner, dtype=np.float32, rngs=nnx.Rngs(0))


def linear(inputs: int, outputs: int) -> Linear:
    return Linear(inputs, outputs, dtype=np.float32, rngs=nnx.Rngs(0))


OPS = {
    "mla_decode": mla.mla_decode,
    "mla_prefill": mla.mla_prefill,
    "mla_cache_write": mla.mla_cache_write,
    "mla_append": mla.mla_append,
    "absorb_query": mla.absorb_query,
    "absorb_output": mla.absorb_output,
    "merge_attention_states": mla.merge_attention_states,
    "causal_attention": mla.causal_attention,
    "pack_mla_weights": mla.pack_mla_weights,
    "mla.decode_schedule": mla.decode_schedule,
    "mla.scratch": mla.scratch,
    "gqa_decode": gqa.gqa_decode,
    "gqa_prefill": gqa.gqa_prefill,
    "gqa_attention": gqa.gqa_attention,
    "gqa_cache_write": gqa.gqa_cache_write,
    "gqa.scratch": gqa.scratch,
    "chunk_gated_delta_rule": gdn.chunk_gated_delta_rule,
    "recurrent_gated_delta_rule": gdn.recurrent_gated_delta_rule,
    "gated_delta_rule_prefill": gdn.gated_delta_rule_prefill,
    "gated_delta_rule_decode": gdn.gated_delta_rule_decode,
    "gated_delta_net_decode": gdn.gated_delta_net_decode,
    "gdn_gates": gdn.gdn_gates,
    "pack_gdn_weights": gdn.pack_gdn_weights,
    "gdn.scratch": gdn.scratch,
    "chunk_kda": kda.chunk_kda,
    "recurrent_kda": kda.recurrent_kda,
    "kda_prefill": kda.kda_prefill,
    "kda_decode": kda.kda_decode,
    "kimi_delta_attention_decode": kda.kimi_delta_attention_decode,
    "kda_gates": kda.kda_gates,
    "pack_kda_weights": kda.pack_kda_weights,
    "causal_conv1d": gdn.causal_conv1d,
    "causal_conv1d_update": gdn.causal_conv1d_update,
    "state_read": gdn.state_read,
    "state_write": gdn.state_write,
    "rms_norm_layer": rms_norm_layer,
    "rotation": rotation,
    "softmax_scale": softmax_scale,
    "RMSNorm": module(RMSNorm),
    "Linear": module(linear),
    "GatedMLP": module(mlp),
    "MultiHeadLatentAttention": module(mla_module),
    "MultiHeadLatentAttention.prefill": module(mla_module, "prefill"),
    "MultiHeadLatentAttention.decode": module(mla_module, "decode"),
    "GroupedQueryAttention": module(gqa_module),
    "GroupedQueryAttention.prefill": module(gqa_module, "prefill"),
    "GroupedQueryAttention.decode": module(gqa_module, "decode"),
    "GatedDeltaNet": module(gdn_module),
    "GatedDeltaNet.prefill": module(gdn_module, "prefill"),
    "GatedDeltaNet.decode": module(gdn_module, "decode"),
    "KimiDeltaAttention": module(kda_module),
    "KimiDeltaAttention.prefill": module(kda_module, "prefill"),
    "KimiDeltaAttention.decode": module(kda_module, "decode"),
}


@functools.cache
def _draw(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def arguments(
    name: str, *, batch: int = 2, tokens: int = 2, heads: int = 2, keys: int = 1, values: int = 2,
    features: int = 5,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of the named op: B, T or S, H, Hk, Hv, and the features of a norm or convolution.

    Integers are int32 arrays, floats float32 ones. `layer` is given where the op has one.
    """

    def draw(*shape: int) -> np.ndarray:
        return _draw(shape, sum(shape))

    def ints(*numbers: int) -> np.ndarray:
        return np.array(numbers, np.int32)

    stack = draw(2, PAGES, PAGE, LATENT)
    paged = dict(
        block_tables=np.arange(2 * batch, dtype=np.int32).reshape(batch, 2),
        seq_lens=ints(*[5] * batch),
        layer=1,
    )
    new = dict(query_lens=ints(*[min(tokens, 5)] * batch))
    qkv = dict(
        q=draw(batch, tokens, keys, DK),
        k=draw(batch, tokens, keys, DK) / 4,
        v=draw(batch, tokens, values, DV),
    )
    gates = dict(
        g=-abs(draw(batch, tokens, values)), beta=1 / (1 + np.exp(draw(batch, tokens, values)))
    )
    channels = 2 * keys * DK + values * DV
    pool = dict(state=draw(2, SLOTS, values, DV, DK), layer=1)
    slots = dict(state_indices=np.arange(batch, dtype=np.int32))
    A_log, dt_bias = draw(values), draw(values)
    mla_sizes = dict(sizes=dict(num_heads=heads))
    gqa_sizes = dict(sizes=dict(num_heads=heads, num_kv_heads=keys))
    pairs = draw(2, PAGES, 2, PAGE, keys, HEAD)
    grouped = dict(
        q=draw(batch, tokens, heads, HEAD),
        scale=0.3,
        window=4,
        soft_cap=2.0,
        sinks=draw(heads),
        gate=draw(batch, tokens, heads, HEAD),
    )
    of_keys = draw(batch, tokens, keys, HEAD)
    gdn_sizes = dict(sizes=dict(num_k_heads=keys, num_v_heads=values))
    x = dict(x=draw(batch, tokens, HIDDEN))
    pools = dict(
        conv_state=draw(2, SLOTS, WIDTH - 1, channels),
        ssm_state=draw(2, SLOTS, values, DV, DK),
        layer=1,
    )
    of_channels = dict(g=-abs(draw(batch, tokens, values, DK)), beta=gates["beta"])
    kda_sizes, width = dict(sizes=dict(num_heads=values)), values * DK
    kda_pools = dict(
        conv_state=draw(2, SLOTS, WIDTH - 1, 3 * width),
        ssm_state=draw(2, SLOTS, values, DK, DK),
        layer=1,
    )
    schedule = dict(q_len=tokens, num_heads=heads, max_pages=2, page_size=PAGE)
    make = {
        "mla_decode": lambda: (
            paged
            | new
            | dict(
                q=draw(batch, tokens, heads, LATENT), kv_cache=stack, scale=0.3, kv_lora_rank=RANK
            )
        ),
        "mla_prefill": lambda: (
            paged
            | new
            | dict(
                q=draw(batch, tokens, heads, NOPE + ROPE),
                latent=draw(batch, tokens, LATENT),
                w_uk=draw(heads, NOPE, RANK),
                w_uv=draw(heads, RANK, VALUES),
                kv_cache=stack,
                scale=0.3,
            )
        ),
        "mla_cache_write": lambda: (
            paged | new | dict(kv_cache=stack, latent=draw(batch, tokens, LATENT))
        ),
        "mla_append": lambda: (
            paged
            | new
            | dict(
                kv=draw(batch, tokens, LATENT),
                q=draw(batch, tokens, 7),
                weights=draw(2, LATENT + 7),
                kv_cache=stack,
                rotation=rotation(np.zeros((batch, tokens), np.int32), CONFIG),
                config=CONFIG,
                eps=1e-6,
            )
        ),
        "absorb_query": lambda: dict(
            q_nope=draw(batch, tokens, heads, NOPE), w_uk=draw(heads, NOPE, RANK)
        ),
        "absorb_output": lambda: dict(
            out=draw(batch, tokens, heads, RANK), w_uv=draw(heads, RANK, VALUES)
        ),
        "merge_attention_states": lambda: dict(
            outs=[draw(batch, tokens, heads, VALUES)] * 2, lses=[draw(batch, tokens, heads)] * 2
        ),
        "causal_attention": lambda: dict(
            q=draw(batch, tokens, heads, 8),
            k=draw(batch, tokens, heads, 8),
            v=draw(batch, tokens, heads, VALUES),
            scale=0.3,
            lengths=ints(*[tokens] * batch),
        ),
        "pack_mla_weights": lambda: dict(kv_norm=draw(RANK), rope_dim=ROPE),
        "mla.decode_schedule": lambda: dict(seq_lens=paged["seq_lens"]) | schedule,
        "mla.scratch": lambda: dict(batch=batch, kv_lora_rank=RANK) | schedule,
        "gqa_decode": lambda: paged | new | grouped | dict(kv_cache=pairs),
        "gqa_prefill": lambda: (
            paged | new | grouped | dict(kv_cache=pairs, k=of_keys, v=of_keys / 2)
        ),
        "gqa_attention": lambda: (
            grouped | dict(k=of_keys, v=of_keys / 2, lengths=ints(*[tokens] * batch))
        ),
        "gqa_cache_write": lambda: paged | new | dict(kv_cache=pairs, k=of_keys, v=of_keys / 2),
        "gqa.scratch": lambda: (
            dict(batch=batch, num_kv_heads=keys, head_dim=HEAD, dtype=np.float32) | schedule
        ),
        "chunk_gated_delta_rule": lambda: qkv | gates | dict(output_final_state=True, scale=0.5),
        "recurrent_gated_delta_rule": lambda: (
            qkv | gates | dict(output_final_state=True, scale=0.5)
        ),
        "gated_delta_rule_prefill": lambda: qkv | gates | pool | slots | dict(scale=0.5),
        "gated_delta_rule_decode": lambda: (
            qkv
            | pool
            | slots
            | dict(a=gates["g"], b=gates["beta"], A_log=A_log, dt_bias=dt_bias, scale=0.5)
        ),
        "gated_delta_net_decode": lambda: (
            pool
            | slots
            | dict(
                qkvz=draw(batch, tokens, channels + values * DV),
                ba=draw(batch, tokens, 2 * values),
                weights=draw(2, 2 * values + DV + WIDTH * channels),
                conv_state=pools["conv_state"],
                scale=0.5,
                eps=1e-6,
            )
        ),
        "gdn_gates": lambda: dict(a=gates["g"], b=gates["beta"], A_log=A_log, dt_bias=dt_bias),
        "pack_gdn_weights": lambda: dict(
            A_log=A_log, dt_bias=dt_bias, norm=draw(DV), conv=draw(channels, WIDTH)
        ),
        "gdn.scratch": lambda: dict(
            batch=batch, q_len=tokens, num_v_heads=values, head_v_dim=DV, dtype=np.float32
        ),
        "chunk_kda": lambda: qkv | of_channels | dict(output_final_state=True, scale=0.5),
        "recurrent_kda": lambda: qkv | of_channels | dict(output_final_state=True, scale=0.5),
        "kda_prefill": lambda: qkv | of_channels | pool | slots | dict(scale=0.5),
        "kda_decode": lambda: (
            qkv
            | pool
            | slots
            | dict(
                f=of_channels["g"],
                b=gates["beta"],
                A_log=A_log,
                dt_bias=draw(values, DK),
                scale=0.5,
            )
        ),
        "kimi_delta_attention_decode": lambda: (
            slots
            | dict(
                qkv=draw(batch, tokens, 3 * width),
                f=draw(batch, tokens, width),
                b=draw(batch, tokens, values),
                gate=draw(batch, tokens, width),
                weights=draw(2, values + width + DK + WIDTH * 3 * width),
                conv_state=kda_pools["conv_state"],
                state=kda_pools["ssm_state"],
                layer=1,
                scale=0.5,
                eps=1e-6,
            )
        ),
        "kda_gates": lambda: dict(
            f=of_channels["g"], b=gates["beta"], A_log=A_log, dt_bias=draw(values, DK)
        ),
        "pack_kda_weights": lambda: dict(
            A_log=A_log, dt_bias=draw(width), norm=draw(DK), conv=draw(3 * width, WIDTH)
        ),
        "causal_conv1d": lambda: dict(x=draw(batch, tokens, features), weight=draw(features, 4)),
        "causal_conv1d_update": lambda: (
            slots
            | dict(
                x=draw(batch, tokens, features),
                weight=draw(features, WIDTH),
                conv_state=draw(2, SLOTS, WIDTH - 1, features),
                layer=1,
            )
        ),
        "state_read": lambda: slots | dict(pool=draw(2, SLOTS, features), layer=1),
        "state_write": lambda: (
            slots | dict(pool=draw(2, SLOTS, features), values=draw(batch, features), layer=1)
        ),
        "rms_norm_layer": lambda: dict(
            x=draw(batch, tokens, features), weights=draw(2, features), layer=1, eps=1e-6
        ),
        "rotation": lambda: dict(positions=np.zeros((batch, tokens), np.int32), config=CONFIG),
        "softmax_scale": lambda: dict(qk_head_dim=192, config=CONFIG),
        "RMSNorm": lambda: dict(x=draw(batch, tokens, features), sizes=dict(features=features)),
        "Linear": lambda: dict(
            x=draw(batch, tokens, features), sizes=dict(inputs=features, outputs=3)
        ),
        "GatedMLP": lambda: dict(
            x=draw(batch, tokens, features), sizes=dict(hidden=features, inner=3)
        ),
        "MultiHeadLatentAttention": lambda: x | mla_sizes,
        "MultiHeadLatentAttention.prefill": lambda: (
            x | mla_sizes | paged | new | dict(kv_cache=stack)
        ),
        "MultiHeadLatentAttention.decode": lambda: (
            x | mla_sizes | paged | new | dict(kv_cache=stack)
        ),
        "GroupedQueryAttention": lambda: x | gqa_sizes,
        "GroupedQueryAttention.prefill": lambda: x | gqa_sizes | paged | new | dict(kv_cache=pairs),
        "GroupedQueryAttention.decode": lambda: x | gqa_sizes | paged | new | dict(kv_cache=pairs),
        "GatedDeltaNet": lambda: x | gdn_sizes,
        "GatedDeltaNet.prefill": lambda: (
            x | gdn_sizes | pools | slots | new | dict(seq_lens=paged["seq_lens"])
        ),
        "GatedDeltaNet.decode": lambda: x | gdn_sizes | pools | slots,
        "KimiDeltaAttention": lambda: x | kda_sizes,
        "KimiDeltaAttention.prefill": lambda: (
            x | kda_sizes | kda_pools | slots | new | dict(seq_lens=paged["seq_lens"])
        ),
        "KimiDeltaAttention.decode": lambda: x | kda_sizes | kda_pools | slots,
    }
    return make[name]()
