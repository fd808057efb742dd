"""The ops that cases call: each op's function, and its arrays as a line of text (shape_spec.py)."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn import gdn, gqa, kda, mla, moe
from jaxattn.arena import Arena
from jaxattn.core.numerics.rope import rotation
from jaxattn.kernels.turboquant.cache.dequantization import turbo_unpack_mosaic
from jaxattn.kernels.turboquant.cache.key_mean import turbo_common_mosaic
from jaxattn.ops.linear import fp8_linear, linear
from jaxattn.ops.linear.rms_norm import add_rms_norm_layer, rms_norm_layer
from jaxattn.ops.moe.routing import choose_experts
from scripts.cases import calls
from scripts.cases.calls import append_of, delta_rule_gradient, delta_rule_prefill, in_pattern
from scripts.cases.shape_spec import Shapes, shapes


def body(x_ref: Any, at_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[pl.ds(at_ref[0], 128)]


def _arena_of_decode(dtype: str, sizes: Mapping[str, Any]) -> Shapes:
    if not sizes.get("arena"):
        return {}
    spec = mla.scratch(
        batch=sizes["B"], q_len=sizes["T"], num_heads=sizes["H"], max_pages=sizes["P"],
        page_size=sizes["C"], dtype=dtype,
    )  # fmt: skip
    return {"arena": jax.eval_shape(lambda: Arena.allocate(spec))}


def _arena_of_experts(dtype: str, sizes: Mapping[str, Any]) -> Shapes:
    if not sizes.get("arena"):
        return {}
    spec = moe.scratch(
        tokens=sizes["B"], top_k=sizes["K"], experts=sizes["E"], hidden=sizes["F"],
        expert_size=sizes["W"], fp8=sizes.get("fp8", False),
    )  # fmt: skip
    return {"arena": jax.eval_shape(lambda: Arena.allocate(spec))}


def _angles(dtype: str, sizes: Mapping[str, Any]) -> Shapes:
    positions = jax.ShapeDtypeStruct((sizes["B"], sizes["T"]), jnp.int32)
    if not (config := sizes.get("angles")):
        return {}
    return {"rotation": jax.eval_shape(lambda at: rotation(at, config), positions)}


@dataclasses.dataclass(frozen=True)
class Op:
    """A function and its arrays.

    Attributes:
        call: The function.
        arrays: The arrays as a line of text for `shapes`, in the order of the lowered function.
        more: Makes arguments that are trees of arrays, given the case's dtype and sizes.
        kernel: Whether the function is a kernel itself, without an `implementation` argument.
    """

    call: Callable[..., Any]
    arrays: str
    more: Callable[[str, Mapping[str, Any]], Shapes] | None = None
    kernel: bool = False

    def shapes(self, dtype: str, sizes: Mapping[str, Any]) -> Shapes:
        found = shapes(self.arrays, dtype, sizes)
        return found | self.more(dtype, sizes) if self.more else found


LAYER = "layer:i32[]?layer"
PAGED = "block_tables:i32[B,P] seq_lens:i32[B]"
RAGGED = f"{PAGED} query_lens:i32[B]?ragged"
QKV = "q[B,T,H,D] k[B,T,Hk,D] v[B,T,Hk,D]"
PAIRS, CODES = "kv_cache:fp8[*L,N,2,C,Hk,D]", "kv_cache:u8[*L,N,Hk,C*slot]"
GATED = "sinks:f32[H]?sinks gate[B,T,H,D]?gate"
NORMS = "weights:f32[*L,2*max(D,128)]"
RULE = "q[B,T,Hk,Dk] k[B,T,Hk,Dk] v[B,T,Hv,Dv]"
LATENT = "q[B,T,H,D] k[B,T,H,Dk] v[B,T,H,Dv] k_pe[B,T,shared]?shared lengths:i32[B]?lengths"
DECAYS = "g:f32[B,T,Hv,*channels] beta:f32[B,T,Hv]"
PACKED = "cu_seqlens:i32[S+1]?S"
POOL = "state:state[*L,Z,Hv,Dv,Dk] state_indices:i32[S or B]"
OF_NORM = "checkpoints:i32[S,kept]?kept gate[B,T,gate]?gate weight[Dv]?gate"
SLOTS = "state_indices:i32[B] write_indices:i32[B,T]?each"
OF_RULE = f"{RULE} {DECAYS} {PACKED}"
CHUNKS = f"{OF_RULE} initial_state:f32[S,Hv,Dv,Dk]?S"
OF_DECODE = (
    f"{RULE} a:gates[B,T,Hv] b[B,T,Hv] {POOL} write_indices:i32[B,T]?each A_log:gates[Hv] "
    "dt_bias:gates[Hv]"
)
OF_EXPERTS = "gate_up:fp8[*L,E,2*W,F] down:fp8[*L,E,F,W]"
PRODUCTS = "weights[*L,F,_]@sizes"
FP8_PRODUCTS = "weights:e4m3[*L,_,F]@sizes scales:f32[*L,blocks(_),F//128]@sizes"
SUM = "stream:f32[1,F] added:f32[1,F] norms:f32[norms,F] layer:i32[]"

OPS: dict[str, Op] = {
    "mla_decode": Op(
        calls.mla_decode, f"q[B,T,H,_]@D kv_cache[*L,N,C,latent] {RAGGED}", _arena_of_decode
    ),
    "mla_index": Op(
        mla.mla_index,
        f"q[B,T,H,D] weights:f32[B,T,H] index_cache:fp8[*L,N,C,D] {RAGGED} k_scale:f32[*L,N,C]?fp8",
    ),
    "mla_sparse": Op(
        calls.mla_sparse,
        f"q[B,T,H,D] kv_cache:cache[*L,N,C,latent] {RAGGED} indices:i32[B,T,K] sinks:f32[H]?sinks",
    ),
    "mla_prefill": Op(
        mla.mla_prefill,
        "q[B,T,H,nope+rope] latent[B,T,rank+rope] w_uk[H,nope,rank] w_uv[H,rank,Dv] "
        f"kv_cache[*L,N,C,rank+rope] {PAGED} query_lens:i32[B]",
    ),
    "causal_attention": Op(mla.causal_attention, LATENT),
    "causal_attention_gradient": Op(calls.attention_gradient(mla.causal_attention), LATENT),
    "mla_append": Op(
        append_of(mla.mla_append),
        f"kv[B,T,D] q[B,T,W]?W weights:f32[*L,D+W] kv_cache:cache[*L,N,C,D] {RAGGED} {LAYER}",
        _angles,
    ),
    "gqa_decode": Op(
        gqa.gqa_decode, f"q[B,T,H,D] {PAIRS} {RAGGED} {GATED} kv_scale:f32[*L,Hk]?fp8"
    ),
    "gqa_prefill": Op(gqa.gqa_prefill, f"{QKV} {PAIRS} {PAGED} query_lens:i32[B] {GATED}"),
    "gqa_attention": Op(gqa.gqa_attention, f"{QKV} lengths:i32[B]?lengths {GATED}"),
    "gqa_attention_gradient": Op(
        calls.attention_gradient(gqa.gqa_attention), f"{QKV} lengths:i32[B]?lengths {GATED}"
    ),
    "gqa_append": Op(
        append_of(gqa.gqa_append),
        f"q[B,T,H,D*(1+gated)] k[B,T,Hk,D] v[B,T,Hk,D] {NORMS} {PAIRS} {PAGED} "
        f"kv_scale:f32[2,Hk]?fp8 {LAYER}",
    ),
    "gqa_append_and_decode": Op(
        calls.gqa_append_and_decode, f"{QKV} {PAIRS} {PAGED} sinks:f32[H]?sinks"
    ),
    "turbo_append_and_decode": Op(
        calls.gqa_append_and_decode, f"{QKV} {CODES} {PAGED} sinks:f32[H]?sinks"
    ),
    "turbo_attention": Op(gqa.turbo_attention, f"q[B,T,H,D] {CODES} {RAGGED} {GATED}"),
    "turbo_append": Op(
        append_of(gqa.turbo_append),
        f"{QKV} {NORMS}?normed {CODES} {PAGED} positions:i32[B,T]?normed",
    ),
    "turbo_unpack": Op(
        turbo_unpack_mosaic,
        "kv_cache:u8[4,512,8,C*slot] pages:i32[2,40] held:i32[2,2] layer:i32[1] "
        "common:f32[2,8,D]?common",
        kernel=True,
    ),
    "turbo_common": Op(
        turbo_common_mosaic,
        "kv_cache:u8[4,512,8,C*slot] block_tables:i32[2,40] held:i32[2,2] layer:i32[1]",
        kernel=True,
    ),
    "gated_delta_rule_decode": Op(gdn.gated_delta_rule_decode, OF_DECODE),
    "bare_decode": Op(calls.bare_decode, OF_DECODE),
    "gated_delta_net_decode": Op(
        calls.gated_delta_net_decode,
        "qkvz[B,T,2*(Hk*Dk+Hv*Dv)] ba:f32[B,T,2*Hv] "
        "weights:f32[*L,2*Hv+Dv+taps*(2*Hk*Dk+Hv*Dv)] conv_state[*L,Z,taps-1,2*Hk*Dk+Hv*Dv] "
        f"state:state[*L,Z,Hv,Dv,Dk] {SLOTS} {LAYER}",
    ),
    "chunk_gated_delta_rule": Op(gdn.chunk_gated_delta_rule, CHUNKS),
    "chunk_gated_delta_rule_gradient": Op(delta_rule_gradient(gdn.chunk_gated_delta_rule), CHUNKS),
    "causal_conv1d_gradient": Op(
        calls.convolution_gradient, "x[B,T,F] weight[F,taps] first:i32[B,T]", kernel=True
    ),
    "causal_conv1d_of_pieces": Op(
        calls.convolution_of_pieces,
        "x[B,T,C] weight[F,taps] initial_state[n,taps-1,F] position:i32[B,T] sequence:i32[B,T]",
    ),
    "gated_norm_gradient": Op(
        calls.gated_norm_gradient, "o[B,T,H,D] projection[B,T,C] weight:f32[D]", kernel=True
    ),
    "gated_delta_rule_prefill": Op(
        delta_rule_prefill(gdn.gated_delta_rule_prefill), f"{OF_RULE} {POOL} {OF_NORM}"
    ),
    "gated_delta_rule_prefill_of_a_stack": Op(
        delta_rule_prefill(gdn.gated_delta_rule_prefill),
        f"{RULE} {DECAYS} {POOL} {PACKED} {LAYER} {OF_NORM}",
    ),
    "kda_decode": Op(
        kda.kda_decode,
        f"{RULE} f:gates[B,T,Hv,Dk] b[B,T,Hv] {POOL} A_log:gates[Hv] dt_bias:gates[Hv,Dk]",
    ),
    "kimi_delta_attention_decode": Op(
        kda.kimi_delta_attention_decode,
        "qkv[B,T,3*H*D] f:f32[B,T,H*D] b:f32[B,T,H] gate[B,T,H*D] "
        "weights:f32[*L,H+H*D+D+taps*3*H*D] conv_state[*L,Z,taps-1,3*H*D] "
        f"state:f32[*L,Z,H,D,D] {SLOTS} {LAYER}",
    ),
    "chunk_kda": Op(kda.chunk_kda, CHUNKS),
    "chunk_kda_gradient": Op(delta_rule_gradient(kda.chunk_kda), CHUNKS),
    "kda_prefill": Op(delta_rule_prefill(kda.kda_prefill), f"{OF_RULE} {POOL} {OF_NORM}"),
    "mixture_of_experts": Op(
        moe.mixture_of_experts,
        f"x[B,F] ids:i32[B,K] weights:f32[B,K] {OF_EXPERTS} "
        "down_scale:f32[*L,E,blocks(F),blocks(W)]?fp8 "
        "gate_up_scale:f32[*L,E,2,blocks(W),blocks(F)]?fp8 "
        "gate_up_bias[*L,E,2*W]?biases down_bias[*L,E,F]?biases",
        _arena_of_experts,
    ),
    "gradient_of_experts": Op(
        calls.gradient_of_experts,
        f"x[B,F] ids:i32[B,K] weights:f32[B,K] {OF_EXPERTS} "
        "gate_up_bias[*L,E,2*W]?biases down_bias[*L,E,F]?biases",
    ),
    "route": Op(
        lambda logits, bias=None, **options: moe.route(logits, bias, **options),
        "logits:f32[B,E] bias:f32[E]?bias",
    ),
    "choose_experts": Op(
        lambda logits, **given: choose_experts(logits, None, **given),
        "logits:f32[B,2*(E+32)] valid:i32[B]",
    ),
    "shared_experts_and_mixture": Op(
        calls.shared_experts_and_mixture,
        f"x[1,F] halves[*L,F,128] bias:f32[*L,64]?bias {OF_EXPERTS} valid:i32[1]",
    ),
    "linear_layer": Op(in_pattern(linear.linear_layer), f"x[B,F] {LAYER} {PRODUCTS}"),
    "normed_linears": Op(calls.normed_linears, f"{SUM} {PRODUCTS}"),
    "gated_layer": Op(linear.gated_layer, "x[B,F] gate[*L,F,size] up[*L,F,size]"),
    "heads_layer": Op(
        calls.heads_layer, "x[B,H,D+rotated] angles:f32[B,2*rotated]?rotated weights[*L,H,D,size]"
    ),
    "linear_fp8_layer": Op(
        in_pattern(fp8_linear.linear_fp8_layer), f"x[B,F] {LAYER} {FP8_PRODUCTS}"
    ),
    "gated_fp8_layer": Op(in_pattern(fp8_linear.gated_fp8_layer), f"x[B,F] {LAYER} {FP8_PRODUCTS}"),
    "normed_fp8_linears": Op(calls.normed_fp8_linears, f"{SUM} {FP8_PRODUCTS}", kernel=True),
    "rms_norm_layer": Op(in_pattern(rms_norm_layer), f"x[*B,F] weights:f32[*L,F] {LAYER}"),
    "add_rms_norm_layer": Op(add_rms_norm_layer, "x:f32[B,F] added:f32[B,F] weights:f32[*L,F]"),
    "out_of_bounds": Op(
        plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32)),
        "x:f32[1024] at:i32[1]",
        kernel=True,
    ),
}
