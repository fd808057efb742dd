"""Launches of every kernel at sizes that models have: functions, and arguments as shapes."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jaxattn
import jaxattn.gdn
import jaxattn.gqa
import jaxattn.kda
import jaxattn.mla
from jaxattn import moe
from jaxattn.arena import Arena
from jaxattn.core.numerics.rope import RopeConfig, Rotation
from jaxattn.core.stacked_layer import StackedLayer
from jaxattn.core.turboquant.codec import TurboFormat
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import RmsNormPrologueParams
from jaxattn.kernels.linear.fp8_linear import linears_fp8_mosaic
from jaxattn.kernels.turboquant.cache.dequantization import turbo_unpack_mosaic
from jaxattn.kernels.turboquant.cache.key_mean import turbo_common_mosaic
from jaxattn.ops.linear.fp8_linear import gated_fp8_layer, linear_fp8_layer
from jaxattn.ops.linear.linear import gated_layer, heads_layer, linear_layer
from jaxattn.ops.linear.norm_linear import PendingNorm
from jaxattn.ops.linear.rms_norm import add_rms_norm_layer, rms_norm_layer
from jaxattn.ops.moe.router_logits import choose_experts
from jaxattn.ops.moe.router_shared_experts import router_shared_experts
from jaxattn.ops.moe.routing import Router, route
from jaxattn.ops.turboquant.key_mean import MOST, SAMPLES

# A function and its arguments, of which shapes will do.
Launch = tuple[Callable[..., Any], tuple[Any, ...]]
MOSAIC: Any = {"implementation": "mosaic_gpu"}


def x(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


f16, f32, ints = (partial(x, dtype=dtype) for dtype in (jnp.float16, jnp.float32, jnp.int32))


def decode(rows: int, heads: int) -> Launch:
    """By the schedule that does not depend on the batch."""

    def op(q: Any, cache: Any, tables: Any, lens: Any) -> Any:
        shape: Any = {"q_len": 2, "num_heads": heads, "max_pages": 64}
        schedule = jaxattn.mla.decode_schedule(lens, batch_invariant=True, **shape)
        return jaxattn.mla_decode(q, cache, tables, lens, scale=0.1, schedule=schedule, **MOSAIC)

    return op, (x(rows, 2, heads, 576), x(8, 64, 576), ints(rows, 64), ints(rows))


def grouped(
    rows: int,
    heads: tuple[int, int, int],
    page: int,
    q_len: int,
    fp8: bool = False,
    **options: Any,
) -> Launch:
    """Grouped-query decode of (H, Hk, D), of 8192 tokens a row; gated, and ragged of more tokens
    than one, where D is 256, and with sinks where it is 64."""
    count, kv_heads, dim = heads

    def op(*args: Any) -> Any:
        q, cache, tables, lens, new, sinks, gate, kv_scale = args
        more: Any = {"query_lens": new, "sinks": sinks, "gate": gate, **options, **MOSAIC}
        more["kv_scale"] = kv_scale
        return jaxattn.gqa.gqa_decode(q, cache, tables, lens, layer=1, **more)

    q, width = x(rows, q_len, count, dim), 8192 // page
    ragged = ints(rows) if q_len > 1 else None
    more = ragged, f32(count) if dim == 64 else None, q if dim == 256 else None
    cache = x(2, 64, 2, page, kv_heads, dim, dtype=jnp.float8_e4m3fn if fp8 else jnp.bfloat16)
    scales = f32(2, kv_heads) if fp8 else None
    return op, (q, cache, ints(rows, width), ints(rows), *more, scales)


def grouped_prefill(
    rows: int, heads: tuple[int, int, int], page: int, tokens: int, **options: Any
) -> Launch:
    """Grouped-query prefill of (H, Hk, D) on a prefix; gated where D is 256, with sinks where it
    is 64."""
    count, kv_heads, dim = heads

    def op(*args: Any) -> Any:
        more: Any = {"sinks": args[-2], "gate": args[-1], **options, **MOSAIC}
        return jaxattn.gqa.gqa_prefill(*args[:-2], layer=1, **more)

    q, kv = (x(rows, tokens, h, dim) for h in (count, kv_heads))
    paged = x(2, 64, 2, page, kv_heads, dim), ints(rows, 32768 // page), ints(rows), ints(rows)
    return op, (q, kv, kv, *paged, f32(count) if dim == 64 else None, q if dim == 256 else None)


def turbo(
    rows: int, heads: tuple[int, int, int], page: int, q_len: int, preset: str, **options: Any
) -> Launch:
    """Grouped-query attention over a TurboQuant cache, as `grouped`."""
    count, kv_heads, dim = heads
    form = TurboFormat(preset=preset, head_dim=dim)

    def op(*args: Any) -> Any:
        q, cache, tables, lens, new, sinks, gate = args
        more: Any = {"query_lens": new, "sinks": sinks, "gate": gate, **options, **MOSAIC}
        return jaxattn.gqa.turbo_attention(q, cache, tables, lens, form=form, layer=1, **more)

    q, width = x(rows, q_len, count, dim), 8192 // page
    cache = x(2, 64, kv_heads, page * form.slot_bytes, dtype=jnp.uint8)
    more = (ints(rows) if q_len > 1 else None, f32(count) if dim == 64 else None)
    return op, (q, cache, ints(rows, width), ints(rows), *more, q if dim == 256 else None)


def turbo_unpack(dim: int, page: int, preset: str) -> Launch:
    """Pages of codes as float16 keys and values."""
    form = TurboFormat(preset=preset, head_dim=dim)
    cache = x(4, 512, 8, page * form.slot_bytes, dtype=jnp.uint8)
    op = partial(turbo_unpack_mosaic, form=form)
    common = f32(2, 8, dim) if form.rotated else None
    return op, (cache, ints(2, 40), ints(2, 2), ints(1), common)


def turbo_common(dim: int, page: int, preset: str) -> Launch:
    """What the keys of rows have in common."""
    form = TurboFormat(preset=preset, head_dim=dim)
    cache = x(4, 512, 8, page * form.slot_bytes, dtype=jnp.uint8)
    op = partial(turbo_common_mosaic, form=form, samples=SAMPLES, most=MOST)
    return op, (cache, ints(2, 40), ints(2, 2), ints(1))


def turbo_append(rows: int, heads: tuple[int, int, int], q_len: int, preset: str) -> Launch:
    """New tokens on their way into a TurboQuant cache."""
    count, kv_heads, dim = heads
    form = TurboFormat(preset=preset, head_dim=dim)
    config = jaxattn.RopeConfig(dim=dim, interleaved=False)

    def op(*args: Any) -> Any:
        *new, positions = args
        turned = jaxattn.rotation(positions, config)
        return jaxattn.gqa.turbo_append(
            *new, form=form, rotation=turned, config=config, layer=1, **MOSAIC
        )

    q, kv = x(rows, q_len, count, dim), x(rows, q_len, kv_heads, dim)
    cache = x(2, 64, kv_heads, 64 * form.slot_bytes, dtype=jnp.uint8)
    weights, tables = f32(2, 2 * max(dim, 128)), ints(rows, 128)
    return op, (q, kv, kv, weights, cache, tables, ints(rows), ints(rows, q_len))


def append(width: int, interleaved: bool, made: Any) -> Launch:
    """In a stack of layers; of queries of that width, 0 for none, and a cache so `made`."""
    config = jaxattn.RopeConfig(interleaved=interleaved)

    def op(*args: Any) -> Any:
        lens, new, layer = args[-3:]
        options: Any = {"query_lens": new, "layer": layer, "config": config, **MOSAIC}
        options["rotation"] = jaxattn.rotation(lens[:, None] + jnp.arange(2), config)
        return jaxattn.mla_append(*args[:-2], **options)

    inputs = x(4, 2, 576), x(4, 2, width) if width else None, f32(3, 576 + width)
    return op, (*inputs, made(3, 8, 64, 576), ints(4, 8), ints(4), ints(4), ints())


def heads_append(
    heads: tuple[int, int, int], rotated: int, *, gated: bool = False, fp8: bool = False
) -> Launch:
    """Of (H, Hk, D), in a stack of layers."""
    count, kv_heads, dim = heads
    config = jaxattn.RopeConfig(dim=rotated, interleaved=False)

    def op(*args: Any) -> Any:
        *args, kv_scale, layer = args  # type: ignore[assignment]
        angles = jaxattn.rotation(args[-1][:, None] + jnp.arange(2), config)
        options: Any = {"config": config, "kv_scale": kv_scale, "layer": layer, **MOSAIC}
        return jaxattn.gqa.gqa_append(*args, rotation=angles, **options)

    new = x(4, 2, kv_heads, dim)
    cache = x(3, 8, 2, 64, kv_heads, dim, dtype=jnp.float8_e4m3fn if fp8 else jnp.bfloat16)
    inputs = x(4, 2, count, dim * (1 + gated)), new, new, f32(3, 2 * max(dim, 128)), cache
    return op, (*inputs, ints(4, 8), ints(4), f32(2, kv_heads) if fp8 else None, ints())


def attention(made: Any, tokens: int) -> Launch:
    """Of rows that are all whole, and keys of 192 dims."""
    q, v = made(2, tokens, 16, 192), made(2, tokens, 16, 128)
    return partial(jaxattn.mla.causal_attention, scale=0.1, **MOSAIC), (q, q, v)


def wide_attention(tokens: int) -> Launch:
    """Of 192 dims of a head and 64 that all share, and values of 256."""

    def op(q: Any, k: Any, v: Any, k_pe: Any) -> Any:
        return jaxattn.mla.causal_attention(q, k, v, k_pe=k_pe, scale=0.1, **MOSAIC)

    of_heads = (x(1, tokens, 20, dims) for dims in (256, 192, 256))
    return op, (*of_heads, x(1, tokens, 64))


def delta_net(rows: int, q_len: int, keys: int, values: int) -> Launch:
    """A layer in a pattern, of so many heads, its output in an arena."""
    channels = (2 * keys + values) * 128
    scratch = jaxattn.gdn.scratch(batch=rows, q_len=q_len, num_v_heads=values)

    def op(*args: Any) -> Any:
        arena, layer = jaxattn.Arena.allocate(scratch), StackedLayer(args[-1], 3, 1)
        options: Any = {"arena": arena, "layer": layer, **MOSAIC}
        return jaxattn.gated_delta_net_decode(*args[:-1], **options)

    inputs = x(rows, q_len, channels + values * 128), f32(rows, q_len, 2 * values)
    pools = x(6, rows, 3, channels), f32(6, rows, values, 128, 128)
    return op, (*inputs, f32(6, 2 * values + 128 + 4 * channels), *pools, ints(rows), ints())


def kimi_delta(rows: int, q_len: int, heads: int) -> Launch:
    """A layer of Kimi Delta Attention in a stack, of so many heads."""

    def op(*args: Any) -> Any:
        return jaxattn.kda.kimi_delta_attention_decode(*args[:-1], layer=args[-1], **MOSAIC)

    width = heads * 128
    inputs = x(rows, q_len, 3 * width), f32(rows, q_len, width), f32(rows, q_len, heads)
    weights = f32(6, heads + width + 128 + 4 * 3 * width)
    pools = x(6, rows, 3, 3 * width), f32(6, rows, heads, 128, 128)
    return op, (*inputs, x(rows, q_len, width), weights, *pools, ints(rows), ints())


def bare_decode(*args: Any) -> Any:
    """The last of what it is given are A_log and dt_bias; q and k are not normed."""
    options: Any = {"A_log": args[-2], "dt_bias": args[-1], "use_qk_l2norm": False, **MOSAIC}
    return jaxattn.gated_delta_rule_decode(*args[:-2], **options)


def delta_rule(made: Any, tokens: int, heads: int, scale: float) -> Launch:
    """Two sequences that start from zeros."""
    q, gates = made(2, tokens, heads // 2, 128), f32(2, tokens, heads)
    op = partial(jaxattn.chunk_gated_delta_rule, scale=scale, **MOSAIC)
    return op, (q, q, made(2, tokens, heads, 128), gates, gates)


def kimi_rule(sequences: int, tokens: int, heads: int) -> Launch:
    """Decays per channel, of sequences that start from zeros."""
    qkv, of_channels = x(sequences, tokens, heads, 128), f32(sequences, tokens, heads, 128)
    op = partial(jaxattn.kda.chunk_kda, **MOSAIC)
    return op, (qkv, qkv, qkv, of_channels, f32(sequences, tokens, heads))


def delta_rule_normed(sequences: int) -> Launch:
    """In a stack of pools of bfloat16; of few sequences the norm is XLA's."""

    def op(*args: Any) -> Any:
        *rule, ends, layer, gate, weight = args
        normed = jaxattn.gdn.OutputNorm(gate=gate, weight=weight)
        options: Any = dict(cu_seqlens=ends, layer=layer, output_norm=normed, **MOSAIC)
        return jaxattn.gated_delta_rule_prefill(*rule, **options)

    q, v, gates = x(1, 900, 2, 128), x(1, 900, 4, 128), f32(1, 900, 4)
    pool = x(3, sequences, 4, 128, 128), ints(sequences), ints(sequences + 1), ints()
    return op, (q, q, v, gates, gates, *pool, x(1, 900, 512), x(128))


def norm(features: int) -> Launch:
    """Of a layer in a pattern."""

    def op(tokens: Any, weights: Any, repeat: Any) -> Any:
        return rms_norm_layer(tokens, weights, layer=StackedLayer(repeat, 3, 1), **MOSAIC)

    return op, (x(2, 3, features), f32(6, features), ints())


def routing(tokens: int, experts: int, top_k: int, **options: Any) -> Launch:
    """By sigmoids with a bias where experts have groups, else by a softmax."""
    scores: Any = "sigmoid" if options else "softmax"
    router = Router(experts=experts, top_k=top_k, scores=scores, **options)
    bias = f32(experts) if options else None
    return lambda logits, bias: route(logits, bias, router, **MOSAIC), (f32(tokens, experts), bias)


def linears(tokens: int, inner: int, *sizes: int, made: Any = x) -> Launch:
    """Of one stack of layers for each of the sizes."""

    def op(tokens: Any, layer: Any, *weights: Any) -> Any:
        return linear_layer(tokens, weights, layer=StackedLayer(layer, 2, 1), **MOSAIC)

    return op, (made(tokens, inner), ints(), *[made(4, inner, size) for size in sizes])


def fp8_linears(tokens: int, inner: int, *sizes: int, gated: bool = False) -> Launch:
    """As `linears`, of FP8 matrices, or gate and up of them."""

    def op(tokens: Any, layer: Any, weights: Any, scales: Any) -> Any:
        product = gated_fp8_layer if gated else linear_fp8_layer
        return product(tokens, weights, scales, layer=StackedLayer(layer, 2, 1), **MOSAIC)

    weights = tuple(x(4, size, inner, dtype=jnp.float8_e4m3fn) for size in sizes)
    scales = tuple(f32(4, -(-size // 128), inner // 128) for size in sizes)
    return op, (x(tokens, inner), ints(), weights, scales)


def normed_fp8_linears(inner: int, *sizes: int) -> Launch:
    """As `fp8_linears`, with a norm that comes before the products."""

    def op(stream: Any, added: Any, norms: Any, layer: Any, weights: Any, scales: Any) -> Any:
        return linears_fp8_mosaic(
            stream, weights, scales, layer=layer, out_dtypes=[jnp.bfloat16] * len(sizes),
            norm=RmsNormPrologueParams(added=added, weights=norms, affine=(2, 1), eps=1e-6),
        )  # fmt: skip

    weights = tuple(x(4, size, inner, dtype=jnp.float8_e4m3fn) for size in sizes)
    scales = tuple(f32(4, -(-size // 128), inner // 128) for size in sizes)
    return op, (f32(1, inner), f32(1, inner), f32(8, inner), ints(), weights, scales)


def normed_linears(inner: int, *sizes: int) -> Launch:
    """A token's residual sum, its norm, and the products that read it, in one launch."""

    def op(stream: Any, added: Any, norms: Any, layer: Any, *weights: Any) -> Any:
        place = StackedLayer(layer, 2, 1)
        token = PendingNorm(
            stream, added, norms, layer=place, eps=1e-6, dtype=jnp.bfloat16, **MOSAIC
        )
        assert token.serves(weights, place)
        return token.linears(weights, layer=place, out_dtypes=[jnp.bfloat16] * len(weights))

    tokens = f32(1, inner), f32(1, inner), f32(4, inner)
    return op, (*tokens, ints(), *[x(4, inner, size) for size in sizes])


def turned_heads(tokens: int, heads: int) -> Launch:
    """Products of heads, with rotated dims behind them."""

    def op(q: Any, angles: Any, weights: Any) -> Any:
        turned = Rotation(angles), RopeConfig(dim=64, interleaved=True)
        return heads_layer(q, weights, layer=1, turned=turned, **MOSAIC)

    return op, (x(tokens, heads, 192), f32(tokens, 128), x(2, heads, 128, 512))


def choosing(tokens: int, experts: int) -> Launch:
    """Of a router in halves, with a shared expert's gate."""
    router = Router(experts=experts, top_k=8, scores="softmax", normalize=True)

    def op(logits: Any, valid: Any) -> Any:
        options: Any = {"halves": True, "always": 1, "gated": True, **MOSAIC}
        return choose_experts(logits, None, router, valid=valid, **options)

    return op, (f32(tokens, 2 * (experts + 32)), ints(tokens))


def opening(scores: Literal["softmax", "sigmoid"], always: int, width: int) -> Launch:
    """A token's router, choice and shared experts, and then the rest of its experts."""
    router = Router(experts=64, top_k=4, scores=scores)
    spec = moe.scratch(
        tokens=1, top_k=4 + always, experts=64 + always, hidden=2048, expert_size=width
    )
    layer = StackedLayer(jnp.int32(1), 2, 1)

    def op(x: Any, halves: Any, bias: Any, gate_up: Any, down: Any, valid: Any) -> Any:
        ids, weights, listed, arena = router_shared_experts(
            x, halves, bias, gate_up, router, layer=layer, always=always, valid=valid,
            arena=Arena.allocate(spec), **MOSAIC,
        )  # fmt: skip
        return moe.mixture_of_experts(
            x, ids, weights, gate_up, down, layer=layer, arena=arena, listed=listed, **MOSAIC
        )[0]

    experts = (4, 64 + always)
    stacks = x(4, 2048, 128), f32(4, 64) if scores == "sigmoid" else None
    of_experts = x(*experts, 2 * width, 2048), x(*experts, 2048, width)
    return op, (x(1, 2048), *stacks, *of_experts, ints(1))


def gated(tokens: int, inner: int, size: int) -> Launch:
    """gate and up, and silu of one times the other."""
    return partial(gated_layer, layer=2, **MOSAIC), (x(tokens, inner), *[x(4, inner, size)] * 2)


EXTRA: dict[str, Launch] = {
    "mla_decode_invariant": decode(3, 64),
    "mla_decode_whole_rows_invariant": decode(200, 64),
    "mla_decode_few_rows_invariant": decode(3, 8),
    "gqa_decode": grouped(64, (32, 8, 128), 64, 1),
    "gqa_decode_pages_of_16": grouped(1, (32, 8, 128), 16, 1, soft_cap=30.0),
    "gqa_decode_many_columns": grouped(8, (64, 8, 128), 64, 8),
    "gqa_decode_gate": grouped(64, (16, 2, 256), 64, 1),
    "gqa_decode_gate_tokens": grouped(64, (16, 2, 256), 128, 3),
    "gqa_decode_sinks": grouped(64, (64, 8, 64), 64, 1),
    "gqa_decode_window": grouped(64, (64, 8, 64), 64, 1, window=128),
    "gqa_decode_fp8": grouped(64, (32, 8, 128), 64, 1, fp8=True),
    "gqa_decode_fp8_gate": grouped(64, (16, 2, 256), 64, 1, fp8=True),
    "gqa_decode_fp8_sinks": grouped(64, (64, 8, 64), 16, 1, fp8=True),
    "gqa_decode_fp8_many_columns": grouped(8, (64, 8, 128), 64, 8, fp8=True),
    "turbo_decode_k8v4": turbo(64, (32, 8, 128), 64, 1, "k8v4"),
    "turbo_decode_4bit_nc": turbo(64, (32, 8, 128), 64, 1, "4bit_nc"),
    "turbo_decode_k3v4_nc": turbo(64, (32, 8, 128), 64, 1, "k3v4_nc"),
    "turbo_decode_3bit_nc": turbo(64, (32, 8, 128), 64, 1, "3bit_nc"),
    "turbo_decode_pages_of_16": turbo(1, (32, 8, 128), 16, 1, "4bit_nc", soft_cap=30.0),
    "turbo_decode_gate_tokens": turbo(64, (16, 2, 256), 128, 3, "k8v4"),
    "turbo_decode_gate": turbo(64, (16, 2, 256), 64, 1, "4bit_nc"),
    "turbo_prefill_4bit_nc": turbo(1, (32, 8, 128), 64, 2048, "4bit_nc"),
    "turbo_prefill_gate": turbo(2, (16, 2, 256), 64, 300, "k3v4_nc"),
    "turbo_prefill_sinks": turbo(2, (64, 8, 64), 64, 300, "3bit_nc", window=128),
    "turbo_prefill_soft_cap": turbo(1, (32, 8, 128), 64, 512, "4bit_nc", soft_cap=30.0),
    "turbo_unpack_4bit_nc": turbo_unpack(128, 64, "4bit_nc"),
    "turbo_unpack_k8v4": turbo_unpack(64, 64, "k8v4"),
    "turbo_unpack_3bit_nc": turbo_unpack(256, 128, "3bit_nc"),
    "turbo_common_4bit_nc": turbo_common(128, 64, "4bit_nc"),
    "turbo_common_3bit_nc": turbo_common(256, 128, "3bit_nc"),
    "turbo_append_4bit_nc": turbo_append(64, (32, 8, 128), 1, "4bit_nc"),
    "turbo_append_k8v4": turbo_append(1, (64, 8, 64), 300, "k8v4"),
    "turbo_append_3bit_nc": turbo_append(4, (16, 2, 256), 2, "3bit_nc"),
    "turbo_decode_sinks": turbo(64, (64, 8, 64), 64, 1, "3bit_nc", window=128),
    "gqa_append": heads_append((32, 8, 128), 128),
    "gqa_append_gate": heads_append((16, 2, 256), 64, gated=True, fp8=True),
    "gqa_append_pairs_of_heads": heads_append((64, 8, 64), 64, fp8=True),
    "gqa_prefill_128": grouped_prefill(1, (32, 8, 128), 64, 8192),
    "gqa_prefill_pages_of_16": grouped_prefill(1, (32, 8, 128), 16, 8192, soft_cap=30.0),
    "gqa_prefill_few_tokens": grouped_prefill(8, (40, 8, 128), 128, 16),
    "gqa_prefill_gate": grouped_prefill(1, (16, 2, 256), 64, 8192),
    "gqa_prefill_sinks": grouped_prefill(1, (64, 8, 64), 64, 8192, window=128),
    "mla_append_halves": append(1536, False, x),
    "mla_append_no_queries": append(0, True, f16),
    "mla_prefill_resident": attention(x, 2100),
    "mla_prefill_wide": wide_attention(8192),
    "mla_prefill_float16": attention(f16, 300),
    "gdn_decode_eight_heads_a_key": delta_net(2, 1, 2, 16),
    "gdn_decode_sixteen_heads_a_key": delta_net(40, 2, 1, 16),
    "gdn_decode_bare_as_given": (
        bare_decode,
        (*[x(9, 1, h, 128) for h in (2, 2, 4)], *[x(9, 1, 4)] * 2, f32(9, 4, 128, 128), ints(9))
        + (x(4), x(4)),
    ),
    "kda_decode_few_states": kimi_delta(1, 1, 32),
    "kda_decode_large_tiles": kimi_delta(8, 1, 32),
    "kda_decode": kimi_delta(128, 1, 32),
    "kda_decode_tokens": kimi_delta(16, 4, 32),
    "kda_prefill": kimi_rule(8, 1024, 32),
    "kda_prefill_segments": kimi_rule(1, 8192, 8),
    "gdn_prefill_float16": delta_rule(f16, 300, 4, -0.1),
    "gdn_prefill_short_of_a_chunk": delta_rule(x, 20, 40, 0.1),
    "gdn_prefill_norm_stack": delta_rule_normed(36),
    "gdn_prefill_norm_few": delta_rule_normed(2),
    "moe_route_softmax": routing(5, 64, 6),
    "moe_route_groups": routing(
        33, 256, 8, groups=8, top_groups=4, best_of_group=2, normalize=True, scale=2.5
    ),
    "moe_route_halves": choosing(3, 256),
    "moe_open": opening("softmax", 2, 1408),
    "moe_open_bias": opening("sigmoid", 1, 1536),
    "linear_heads_turned": turned_heads(3, 16),
    "linear_one_token": linears(1, 2048, 3072),
    "linear_normed": normed_linears(2048, 3072, 576),
    "linear_two_matrices": linears(13, 2048, 3072, 576, made=f16),
    "linear_fp8_one_token": fp8_linears(1, 2048, 12288),
    "linear_fp8_matrices": fp8_linears(16, 2048, 8192, 512, 512),
    "linear_fp8_normed": normed_fp8_linears(2048, 12288),
    "linear_fp8_gated": fp8_linears(32, 2048, 512, 512, gated=True),
    "linear_fp8_many": fp8_linears(128, 2048, 12288, 128),
    "linear_fp8_many_parts": fp8_linears(256, 4096, 2048),
    "linear_fp8_many_gated": fp8_linears(128, 7168, 2048, 2048, gated=True),
    "linear_gated": gated(32, 2048, 1408),
    "linear_gated_few_columns": gated(3, 512, 128),
    "rms_norm": norm(640),
    "rms_norm_wide": norm(7168),
    "rms_norm_added": (
        partial(add_rms_norm_layer, layer=1, **MOSAIC),
        (f32(3, 640), f32(3, 640), f32(4, 640)),
    ),
}
