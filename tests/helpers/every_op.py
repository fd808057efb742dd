"""Each public op and module, once, on small NumPy arrays, for tests of what holds for all of them.

`arguments(**sizes)` gives each op's arguments by keyword. The arrays of an op that has a kernel are
those of scripts/cases/ops.py.
"""

import functools
from collections.abc import Callable
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
from scripts.cases.case import fill
from scripts.cases.ops import OPS as KERNELS
from scripts.cases.ops import PAGED
from scripts.cases.shape_spec import shapes

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
    """Makes an op of a module's method; `sizes` are the constructor's arguments."""

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


# Size names that differ between ops; a string is the name of the size with the value.
OF_MLA = dict(D=LATENT, latent=LATENT, nope=NOPE, rope=ROPE, rank=RANK, Dv=VALUES, W=7)
OF_MLA |= dict(ragged=True)
OF_GQA = dict(D=HEAD, sinks=True, gate=True, ragged=True, lengths=True)
OF_KDA = dict(H="Hv", D=DK, Dv=DK)
NO_OPTIONS: dict[str, Any] = {}
LAYER, SCALED, FINAL = dict(layer=1), dict(scale=0.3), dict(output_final_state=True, scale=0.5)
DECODED = dict(layer=1, scale=0.5)
MASKED = dict(scale=0.3, window=4, soft_cap=2.0)
NEW, SLOT = f"{PAGED} query_lens:i32[B]", "state_indices:i32[B]"
CACHE, PAIRS = "kv_cache[*L,N,C,D]", "kv_cache[*L,N,2,C,Hk,D]"
X, CHANNELS = "x[B,T,hidden]", "2*Hk*Dk+Hv*Dv"
POOLS = f"conv_state[*L,Z,taps-1,{CHANNELS}] ssm_state[*L,Z,Hv,Dv,Dk] {SLOT}"
KDA_POOLS = f"conv_state[*L,Z,taps-1,3*H*D] ssm_state[*L,Z,H,D,D] {SLOT}"
LENS = "query_lens:i32[B] seq_lens:i32[B]"


def _schedule(s: Any) -> dict[str, Any]:
    return dict(q_len=s["T"], num_heads=s["H"], max_pages=2, page_size=PAGE)


def _positions(s: Any) -> np.ndarray:
    return np.zeros((s["B"], s["T"]), np.int32)


def _turned(s: Any) -> dict[str, Any]:
    return dict(layer=1, eps=1e-6, rotation=rotation(_positions(s), CONFIG), config=CONFIG)


def _of_mla(s: Any) -> dict[str, Any]:
    return dict(sizes=dict(num_heads=s["H"]))


def _of_gqa(s: Any) -> dict[str, Any]:
    return dict(sizes=dict(num_heads=s["H"], num_kv_heads=s["Hk"]))


def _of_gdn(s: Any) -> dict[str, Any]:
    return dict(sizes=dict(num_k_heads=s["Hk"], num_v_heads=s["Hv"]))


def _layer_of(sizes: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    return lambda s: sizes(s) | LAYER


# For each op: its arrays, or None for those of its kernel; its options, or a function of the sizes;
# and its own sizes.
TABLE: dict[str, tuple[str | None, Any, dict[str, Any]]] = {
    "mla_decode": (None, dict(scale=0.3, kv_lora_rank=RANK, layer=1), OF_MLA),
    "mla_prefill": (None, SCALED | LAYER, OF_MLA),
    "mla_cache_write": (f"{CACHE} latent[B,T,D] {NEW}", LAYER, OF_MLA),
    "mla_append": (None, _turned, OF_MLA),
    "absorb_query": ("q_nope[B,T,H,nope] w_uk[H,nope,rank]", NO_OPTIONS, OF_MLA),
    "absorb_output": ("out[B,T,H,rank] w_uv[H,rank,Dv]", NO_OPTIONS, OF_MLA),
    "merge_attention_states": (
        "outs[B,T,H,Dv]@two lses[B,T,H]@two", NO_OPTIONS, OF_MLA | dict(two=(1, 1)),
    ),
    "causal_attention": (None, SCALED, dict(D=8, Dk=8, Dv=VALUES, lengths=True)),
    "pack_mla_weights": ("kv_norm[rank]", dict(rope_dim=ROPE), OF_MLA),
    "mla.decode_schedule": ("seq_lens:i32[B]", _schedule, {}),
    "mla.scratch": ("", lambda s: _schedule(s) | dict(batch=s["B"], kv_lora_rank=RANK), {}),
    "gqa_decode": (None, MASKED | LAYER, OF_GQA),
    "gqa_prefill": (None, MASKED | LAYER, OF_GQA),
    "gqa_attention": (None, MASKED, OF_GQA),
    "gqa_cache_write": (f"{PAIRS} k[B,T,Hk,D] v[B,T,Hk,D] {NEW}", LAYER, OF_GQA),
    "gqa.scratch": (
        "",
        lambda s: _schedule(s)
        | dict(batch=s["B"], num_kv_heads=s["Hk"], head_dim=HEAD, dtype=np.float32),
        {},
    ),
    "chunk_gated_delta_rule": (None, FINAL, {}),
    "recurrent_gated_delta_rule": (KERNELS["chunk_gated_delta_rule"].arrays, FINAL, {}),
    "gated_delta_rule_prefill": (None, DECODED, {}),
    "gated_delta_rule_decode": (None, DECODED, {}),
    "gated_delta_net_decode": (None, DECODED | dict(eps=1e-6), {}),
    "gdn_gates": ("a[B,T,Hv] b[B,T,Hv] A_log[Hv] dt_bias[Hv]", NO_OPTIONS, {}),
    "pack_gdn_weights": (
        f"A_log[Hv] dt_bias[Hv] norm[Dv] conv[{CHANNELS},taps]", NO_OPTIONS, {},
    ),
    "gdn.scratch": (
        "",
        lambda s: dict(
            batch=s["B"], q_len=s["T"], num_v_heads=s["Hv"], head_v_dim=DV, dtype=np.float32
        ),
        {},
    ),
    "chunk_kda": (None, FINAL, dict(channels=True)),
    "recurrent_kda": (KERNELS["chunk_kda"].arrays, FINAL, dict(channels=True)),
    "kda_prefill": (None, DECODED, dict(channels=True)),
    "kda_decode": (None, DECODED, {}),
    "kimi_delta_attention_decode": (None, DECODED | dict(eps=1e-6), OF_KDA),
    "kda_gates": ("f[B,T,Hv,Dk] b[B,T,Hv] A_log[Hv] dt_bias[Hv,Dk]", NO_OPTIONS, {}),
    "pack_kda_weights": (
        "A_log[H] dt_bias[H*D] norm[D] conv[3*H*D,taps]", NO_OPTIONS, OF_KDA,
    ),
    "causal_conv1d": ("x[B,T,F] weight[F,taps]", NO_OPTIONS, {}),
    "causal_conv1d_update": (
        f"x[B,T,F] weight[F,taps] conv_state[*L,Z,taps-1,F] {SLOT}", LAYER, {},
    ),
    "state_read": (f"pool[*L,Z,F] {SLOT}", LAYER, {}),
    "state_write": (f"pool[*L,Z,F] values[B,F] {SLOT}", LAYER, {}),
    "rms_norm_layer": ("x[B,T,F] weights[*L,F]", dict(layer=1, eps=1e-6), {}),
    "rotation": ("", lambda s: dict(positions=_positions(s), config=CONFIG), {}),
    "softmax_scale": ("", dict(qk_head_dim=192, config=CONFIG), {}),
    "RMSNorm": ("x[B,T,F]", lambda s: dict(sizes=dict(features=s["F"])), {}),
    "Linear": ("x[B,T,F]", lambda s: dict(sizes=dict(inputs=s["F"], outputs=3)), {}),
    "GatedMLP": ("x[B,T,F]", lambda s: dict(sizes=dict(hidden=s["F"], inner=3)), {}),
    "MultiHeadLatentAttention": (X, _of_mla, {}),
    "MultiHeadLatentAttention.prefill": (f"{X} {CACHE} {NEW}", _layer_of(_of_mla), OF_MLA),
    "MultiHeadLatentAttention.decode": (f"{X} {CACHE} {NEW}", _layer_of(_of_mla), OF_MLA),
    "GroupedQueryAttention": (X, _of_gqa, {}),
    "GroupedQueryAttention.prefill": (f"{X} {PAIRS} {NEW}", _layer_of(_of_gqa), OF_GQA),
    "GroupedQueryAttention.decode": (f"{X} {PAIRS} {NEW}", _layer_of(_of_gqa), OF_GQA),
    "GatedDeltaNet": (X, _of_gdn, {}),
    "GatedDeltaNet.prefill": (f"{X} {POOLS} {LENS}", _layer_of(_of_gdn), {}),
    "GatedDeltaNet.decode": (f"{X} {POOLS}", _layer_of(_of_gdn), {}),
    "KimiDeltaAttention": (X, _of_mla, OF_KDA),
    "KimiDeltaAttention.prefill": (f"{X} {KDA_POOLS} {LENS}", _layer_of(_of_mla), OF_KDA),
    "KimiDeltaAttention.decode": (f"{X} {KDA_POOLS}", _layer_of(_of_mla), OF_KDA),
}  # fmt: skip


@functools.cache
def _draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def arguments(
    name: str, *, batch: int = 2, tokens: int = 2, heads: int = 2, keys: int = 1, values: int = 2,
    features: int = 5,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of the named op, for B, T or S, H, Hk, Hv, and a norm's or convolution's features.

    Integers are int32 arrays, floats float32 arrays. `layer` is included if the op has one.
    """
    integers = {
        "block_tables": np.arange(2 * batch).reshape(batch, 2),
        "seq_lens": [5] * batch,
        "query_lens": [min(tokens, 5)] * batch,
        "lengths": [tokens] * batch,
        "state_indices": np.arange(batch),
    }
    sizes: dict[str, Any] = dict(B=batch, T=tokens, H=heads, Hk=keys, Hv=values, F=features)
    sizes |= dict(P=2, N=PAGES, C=PAGE, L=2, Z=SLOTS, Dk=DK, Dv=DV, taps=WIDTH, hidden=HIDDEN)
    arrays, options, own = TABLE[name]
    sizes |= {key: sizes[size] if isinstance(size, str) else size for key, size in own.items()}
    made = shapes(KERNELS[name].arrays if arrays is None else arrays, "float32", sizes)
    more = options(sizes) if callable(options) else options
    return fill(made, integers, _draw) | more
