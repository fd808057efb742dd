"""Cases of models' sizes, which are lowered but not run."""

from typing import Any

from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.core.turboquant.codec import TurboFormat
from jaxattn.ops.moe.routing import Router
from jaxattn.ops.turboquant.key_mean import MOST, SAMPLES
from scripts.cases.case import KernelCase
from scripts.cases.small import turbo_format

Heads = tuple[int, int, int]  # (H, Hk, D)


def of_heads(heads: Heads) -> dict[str, Any]:
    """The sizes of heads, gated if D is 256, and with sinks if it is 64."""
    count, kv_heads, dim = heads
    return {"H": count, "Hk": kv_heads, "D": dim, "sinks": dim == 64, "gate": dim == 256}


def decode(rows: int, heads: int) -> KernelCase:
    """MLA decode with the batch-invariant schedule."""
    sizes = {"B": rows, "T": 2, "H": heads, "D": 576, "latent": 576, "P": 64, "N": 8}
    return KernelCase("mla_decode", sizes, options={"scale": 0.1, "invariant": True})


def indexed(rows: int, q_len: int, heads: int, count: int, **sizes: Any) -> KernelCase:
    """The indexer's top k for rows of 131,072 tokens, in a stack of layers."""
    sizes = {"B": rows, "T": q_len, "H": heads, "D": 128, "P": 2048, "N": 64, "L": 2} | sizes
    return KernelCase("mla_index", sizes, options={"top_k": count, "layer": 1})


def listed(
    rows: int, q_len: int, heads: int, count: int, cache: str = "bfloat16", **sizes: Any
) -> KernelCase:
    """Attention to `count` positions per token, for rows of 32,768 tokens in a stack."""
    width = 656 if cache == "uint8" else 576
    sizes = {
        "B": rows, "T": q_len, "H": heads, "D": 576, "K": count, "P": 512, "N": 64, "L": 2,
        "latent": width, "cache": cache,
    } | sizes  # fmt: skip
    return KernelCase("mla_sparse", sizes, options={"scale": 0.1, "layer": 1})


def grouped(
    rows: int, heads: Heads, page: int, q_len: int, fp8: bool = False, **options: Any
) -> KernelCase:
    """Grouped-query decode of 8,192 tokens per row; ragged if `q_len` is above 1."""
    sizes = {"B": rows, "T": q_len, "P": 8192 // page, "N": 64, "C": page, "L": 2}
    sizes |= of_heads(heads) | {"ragged": q_len > 1, "fp8": fp8}
    return KernelCase("gqa_decode", sizes, options={"layer": 1, **options})


def grouped_prefill(rows: int, heads: Heads, page: int, tokens: int, **options: Any) -> KernelCase:
    """Grouped-query prefill after a prefix."""
    sizes = {"B": rows, "T": tokens, "P": 32768 // page, "N": 64, "C": page, "L": 2}
    return KernelCase("gqa_prefill", sizes | of_heads(heads), options={"layer": 1, **options})


def turbo(
    rows: int, heads: Heads, page: int, q_len: int, preset: str, **options: Any
) -> KernelCase:
    """Grouped-query attention over a TurboQuant cache, like `grouped`."""
    form = turbo_format(preset, heads[2])
    sizes = {"B": rows, "T": q_len, "P": 8192 // page, "N": 64, "C": page, "L": 2}
    sizes |= of_heads(heads) | {"ragged": q_len > 1, "slot": form.slot_bytes}
    return KernelCase("turbo_attention", sizes, options={"form": form, "layer": 1, **options})


def turbo_unpack(dim: int, page: int, preset: str) -> KernelCase:
    """The conversion of pages of codes to float16 keys and values."""
    form: TurboFormat = turbo_format(preset, dim)
    sizes = {"C": page, "slot": form.slot_bytes, "D": dim, "common": form.rotated}
    return KernelCase("turbo_unpack", sizes, options={"form": form}, bare=True)


def turbo_common(dim: int, page: int, preset: str) -> KernelCase:
    """The common part of the keys of rows."""
    form = turbo_format(preset, dim)
    sizes = {"C": page, "slot": form.slot_bytes}
    options = {"form": form, "samples": SAMPLES, "max_abs": MOST}
    return KernelCase("turbo_common", sizes, options=options, bare=True)


def turbo_append(rows: int, heads: Heads, q_len: int, preset: str) -> KernelCase:
    """The append of new tokens to a TurboQuant cache."""
    count, kv_heads, dim = heads
    form = turbo_format(preset, dim)
    sizes = {"B": rows, "T": q_len, "H": count, "Hk": kv_heads, "D": dim, "P": 128, "N": 64}
    options = {"form": form, "config": RopeConfig(dim=dim, interleaved=False), "layer": 1}
    return KernelCase(
        "turbo_append", sizes | {"L": 2, "slot": form.slot_bytes, "normed": True}, options=options
    )


def append(width: int, interleaved: bool, cache: str) -> KernelCase:
    """MLA's append in a stack of layers, for queries of `width` (0 for none) and a cache dtype."""
    sizes = {"B": 4, "T": 2, "D": 576, "W": width, "P": 8, "N": 8, "L": 3, "cache": cache}
    options: dict[str, Any] = {"config": RopeConfig(interleaved=interleaved)}
    options |= {} if width else {"q": None}
    return KernelCase("mla_append", sizes | {"ragged": True, "layer": True}, options=options)


def heads_append(heads: Heads, rotated: int, **sizes: Any) -> KernelCase:
    """Grouped-query append in a stack of layers."""
    count, kv_heads, dim = heads
    sizes |= {"B": 4, "T": 2, "H": count, "Hk": kv_heads, "D": dim, "P": 8, "N": 8, "L": 3}
    options = {"config": RopeConfig(dim=rotated, interleaved=False)}
    return KernelCase("gqa_append", sizes | {"layer": True}, options=options)


def attention(dtype: str, tokens: int) -> KernelCase:
    """Attention of full rows with keys of 192 dims."""
    sizes = {"B": 2, "T": tokens, "H": 16, "D": 192, "Dk": 192}
    return KernelCase("causal_attention", sizes, dtype, {"scale": 0.1}, bare=True)


def wide_attention(tokens: int) -> KernelCase:
    """Attention with 192 dims per head, 64 shared dims, and values of 256."""
    sizes = {"B": 1, "T": tokens, "H": 20, "D": 256, "Dk": 192, "Dv": 256, "shared": 64}
    return KernelCase("causal_attention", sizes, options={"scale": 0.1})


def delta_net(rows: int, q_len: int, keys: int, values: int) -> KernelCase:
    """Decode of a delta net layer in a pattern, with its output in an arena."""
    sizes = {"B": rows, "T": q_len, "Hk": keys, "Hv": values, "Z": rows, "L": 6, "layer": True}
    options = {"arena": True, "pattern": (3, 1)}
    return KernelCase("gated_delta_net_decode", sizes, options=options)


def kimi_delta(rows: int, q_len: int, heads: int) -> KernelCase:
    """Decode of a Kimi Delta Attention layer in a stack."""
    sizes = {"B": rows, "T": q_len, "H": heads, "D": 128, "Z": rows, "L": 6, "layer": True}
    return KernelCase("kimi_delta_attention_decode", sizes)


def delta_rule(dtype: str, tokens: int, heads: int, scale: float) -> KernelCase:
    """The chunked gated delta rule for two sequences that start from zeros."""
    sizes = {"B": 2, "T": tokens, "Hk": heads // 2, "Hv": heads}
    return KernelCase("chunk_gated_delta_rule", sizes, dtype, {"scale": scale}, bare=True)


def kimi_rule(sequences: int, tokens: int, heads: int) -> KernelCase:
    """Chunked KDA for sequences that start from zeros."""
    sizes = {"B": sequences, "T": tokens, "Hk": heads, "Hv": heads, "channels": True}
    return KernelCase("chunk_kda", sizes, bare=True)


def delta_rule_normed(sequences: int) -> KernelCase:
    """Prefill with a stack of bfloat16 pools; for few sequences XLA computes the norm."""
    sizes = {"B": 1, "T": 900, "Hk": 2, "Hv": 4, "Z": sequences, "S": sequences}
    sizes |= {"gate": 512, "L": 3, "layer": True}
    return KernelCase("gated_delta_rule_prefill_of_a_stack", sizes | {"state": "bfloat16"})


def norm(features: int) -> KernelCase:
    """The norm of a layer in a pattern."""
    sizes = {"B": (2, 3), "F": features, "L": 6, "layer": True}
    return KernelCase("rms_norm_layer", sizes, options={"pattern": (3, 1)})


def routing(tokens: int, experts: int, top_k: int, **options: Any) -> KernelCase:
    """Routing by sigmoids with a bias if experts have groups, else by a softmax."""
    scores: Any = "sigmoid" if options else "softmax"
    router = Router(experts=experts, top_k=top_k, scores=scores, **options)
    sizes = {"B": tokens, "E": experts, "bias": bool(options)}
    return KernelCase("route", sizes, options={"router": router}, bare=True)


def choosing(tokens: int, experts: int) -> KernelCase:
    """The choice of experts from a router in halves, with a shared expert's gate."""
    router = Router(experts=experts, top_k=8, scores="softmax", normalize=True)
    options = {"router": router, "halves": True, "always": 1, "gated": True}
    return KernelCase("choose_experts", {"B": tokens, "E": experts}, options=options)


def opening(scores: Any, always: int, width: int) -> KernelCase:
    """A token's router, choice and shared experts, followed by its other experts."""
    router = Router(experts=64, top_k=4, scores=scores)
    sizes = {"E": 64 + always, "W": width, "F": 2048, "L": 4, "bias": scores == "sigmoid"}
    options = {"always": always, "router": router}
    return KernelCase("shared_experts_and_mixture", sizes, options=options)


def linears(tokens: int, inner: int, *sizes: int, dtype: str = "bfloat16") -> KernelCase:
    """Products with one stack of layers for each of the sizes."""
    given = {"B": tokens, "F": inner, "sizes": sizes, "L": 4, "layer": True}
    return KernelCase("linear_layer", given, dtype, {"pattern": (2, 1)})


def fp8_linears(tokens: int, inner: int, *sizes: int, gated: bool = False) -> KernelCase:
    """Like `linears`, with FP8 matrices, or with FP8 gate and up."""
    given = {"B": tokens, "F": inner, "sizes": sizes, "L": 4, "layer": True}
    op = "gated_fp8_layer" if gated else "linear_fp8_layer"
    return KernelCase(op, given, options={"pattern": (2, 1)})


def normed(op: str, norms: int, inner: int, *sizes: int) -> KernelCase:
    """Products after a norm, with a stack of `norms` norms."""
    return KernelCase(op, {"F": inner, "sizes": sizes, "norms": norms, "L": 4})


def turned_heads(tokens: int, heads: int) -> KernelCase:
    """Products of heads, followed by rotated dims."""
    sizes = {"B": tokens, "H": heads, "D": 128, "size": 512, "L": 2, "rotated": 64}
    return KernelCase("heads_layer", sizes, options={"layer": 1})


def gated(tokens: int, inner: int, size: int) -> KernelCase:
    """silu(gate) * up of two products."""
    sizes = {"B": tokens, "F": inner, "size": size, "L": 4}
    return KernelCase("gated_layer", sizes, options={"layer": 2}, bare=True)


LARGE: dict[str, KernelCase] = {
    "mla_decode_invariant": decode(3, 64),
    "mla_decode_whole_rows_invariant": decode(200, 64),
    "mla_decode_few_rows_invariant": decode(3, 8),
    "mla_index": indexed(1, 1, 64, 2048),
    "mla_index_tokens": indexed(32, 3, 32, 1024, ragged=True),
    "mla_index_chunk": indexed(1, 4096, 64, 2048, P=576),
    "mla_sparse": listed(128, 2, 128, 2048),
    "mla_sparse_cut": listed(1, 2, 128, 2048, sinks=True),
    "mla_sparse_block_scaled": listed(128, 2, 128, 2048, "uint8"),
    "mla_sparse_chunk": listed(1, 4096, 64, 1000, ragged=True, C=16),
    "mla_index_fp8": indexed(32, 1, 64, 512, fp8=True),
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
    "mla_append_halves": append(1536, False, "bfloat16"),
    "mla_append_no_queries": append(0, True, "float16"),
    "mla_prefill_resident": attention("bfloat16", 2100),
    "mla_prefill_wide": wide_attention(8192),
    "mla_prefill_float16": attention("float16", 300),
    "gdn_decode_eight_heads_a_key": delta_net(2, 1, 2, 16),
    "gdn_decode_sixteen_heads_a_key": delta_net(40, 2, 1, 16),
    "gdn_decode_bare_as_given": KernelCase(
        "bare_decode", {"B": 9, "T": 1, "Hk": 2, "Hv": 4, "Z": 9}, bare=True
    ),
    "kda_decode_few_states": kimi_delta(1, 1, 32),
    "kda_decode_large_tiles": kimi_delta(8, 1, 32),
    "kda_decode": kimi_delta(128, 1, 32),
    "kda_decode_tokens": kimi_delta(16, 4, 32),
    "kda_prefill": kimi_rule(8, 1024, 32),
    "kda_prefill_segments": kimi_rule(1, 8192, 8),
    "gdn_prefill_float16": delta_rule("float16", 300, 4, -0.1),
    "gdn_prefill_short_of_a_chunk": delta_rule("bfloat16", 20, 40, 0.1),
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
    "linear_normed": normed("normed_linears", 4, 2048, 3072, 576),
    "linear_two_matrices": linears(13, 2048, 3072, 576, dtype="float16"),
    "linear_fp8_one_token": fp8_linears(1, 2048, 12288),
    "linear_fp8_matrices": fp8_linears(16, 2048, 8192, 512, 512),
    "linear_fp8_normed": normed("normed_fp8_linears", 8, 2048, 12288),
    "linear_fp8_gated": fp8_linears(32, 2048, 512, 512, gated=True),
    "linear_fp8_many": fp8_linears(128, 2048, 12288, 128),
    "linear_fp8_many_parts": fp8_linears(256, 4096, 2048),
    "linear_fp8_many_gated": fp8_linears(128, 7168, 2048, 2048, gated=True),
    "linear_gated": gated(32, 2048, 1408),
    "linear_gated_few_columns": gated(3, 512, 128),
    "rms_norm": norm(640),
    "rms_norm_wide": norm(7168),
    "rms_norm_added": KernelCase(
        "add_rms_norm_layer", {"B": 3, "F": 640, "L": 4}, options={"layer": 1}, bare=True
    ),
}
