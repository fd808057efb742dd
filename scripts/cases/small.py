"""Small cases that run on a GPU under a tool, and in XLA: short, empty or ragged rows."""

import dataclasses
import warnings
from typing import Any

import numpy as np

from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.core.numerics.swiglu import ClampedSwiGLU
from jaxattn.core.turboquant.codec import TurboFormat
from scripts.cases.case import KernelCase

RANK = 512
DRAWN = np.random.default_rng(0)


def pages_of(lens: list[int], page: int = 64) -> tuple[dict[str, int], dict[str, Any]]:
    """Sizes and values of tables, in which entries past a row's end are invalid page numbers."""
    needed = [-(-length // page) for length in lens]
    tables = np.full((len(lens), max(needed)), 2147480000)
    last = np.cumsum(needed)
    for row, (count, end) in enumerate(zip(needed, last, strict=True)):
        tables[row, :count] = np.arange(end - count, end)[::-1]
    sizes = {"B": len(lens), "P": max(needed), "N": int(last[-1]), "C": page}
    return sizes, {"block_tables": tables, "seq_lens": lens}


def turbo_format(preset: str, dim: int) -> TurboFormat:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the cache format")  # of 3 bits
        return TurboFormat(preset=preset, head_dim=dim)


def decode(
    lens: list[int],
    heads: int,
    q_len: int = 1,
    cache: str = "bfloat16",
    *,
    page: int = 64,
    D: int | tuple[int, int] = 576,
    queries: list[int] | None = None,
    layers: int = 0,
    **sizes: Any,
) -> KernelCase:
    """MLA decode with queries of D dims, in two arrays if D is two numbers.

    `queries` are the rows' `query_lens`. If `layers` form a stack, the op reads the last.
    """
    paged, values = pages_of(lens, page)
    options: dict[str, Any] = {"scale": 0.07, "layer": layers - 1 if layers else None}
    if quantized := cache in ("float8_e4m3fn", "uint8"):
        scale = 0.05 if cache == "float8_e4m3fn" else None
        options |= {"packed": cache, "kv_scale": scale}
    if queries:
        values["query_lens"], sizes["ragged"] = queries, True
    latent = sum(D) if isinstance(D, tuple) else D
    sizes |= paged | {"T": q_len, "H": heads, "D": D, "latent": latent, "L": layers}
    return KernelCase("mla_decode", sizes, "bfloat16" if quantized else cache, options, values)


def indexed(
    lens: list[int],
    heads: int,
    count: int = 512,
    q_len: int = 1,
    *,
    page: int = 64,
    queries: list[int] | None = None,
    **sizes: Any,
) -> KernelCase:
    """The indexer's top k; `queries` are the rows' `query_lens`."""
    paged, values = pages_of(lens, page)
    if queries:
        values["query_lens"], sizes["ragged"] = queries, True
    sizes |= paged | {"T": q_len, "H": heads, "D": 128}
    return KernelCase("mla_index", sizes, options={"top_k": count}, values=values)


def listed(
    lens: list[int],
    heads: int,
    count: int,
    q_len: int = 1,
    cache: str = "bfloat16",
    *,
    page: int = 64,
    queries: list[int] | None = None,
    **sizes: Any,
) -> KernelCase:
    """Attention to `count` positions per token: some twice, negative or beyond the token's own."""
    paged, values = pages_of(lens, page)
    drawn = np.random.default_rng(0).integers(-9, max(lens), (len(lens), q_len, count))
    values |= {"indices": drawn}
    if queries:
        values["query_lens"], sizes["ragged"] = queries, True
    options: dict[str, Any] = {"scale": 0.07}
    if cache == "float8_e4m3fn":
        options["kv_scale"] = 0.05
    dtype = "float16" if cache == "float16" else "bfloat16"
    if cache == "uint8":
        options["packed"], cache = cache, dtype
    sizes |= paged | {"T": q_len, "H": heads, "D": 576, "K": count, "latent": 576, "cache": cache}
    return KernelCase("mla_sparse", sizes, dtype, options, values)


def append() -> KernelCase:
    paged, values = pages_of([70, 0, 1, 128])
    config = RopeConfig()
    sizes = {"T": 2, "D": 576, "W": 256, "angles": config, **paged}
    return KernelCase("mla_append", sizes, options={"config": config}, values=values)


def prefill(tokens: int = 300, heads: int = 4, *, gradient: bool = False) -> KernelCase:
    sizes = {"B": 2, "T": tokens, "H": heads, "D": 192, "Dk": 128, "Dv": 128, "shared": 64}
    values = {"lengths": [tokens, 77]}
    op = "causal_attention_gradient" if gradient else "causal_attention"
    return KernelCase(op, sizes | {"lengths": True}, options={"scale": 0.07}, values=values)


def gradient_of_groups(dim: int, tokens: int = 150, **options: Any) -> KernelCase:
    """Both passes of attention over at least two tiles of keys, with two query heads per key head.

    A row is padding. The case is small, because racecheck needs minutes for 50 us of GPU time.
    """
    sizes = {"B": 3, "T": tokens, "H": 2, "Hk": 1, "D": dim, "lengths": True}
    values = {"lengths": [tokens, 0, 77]}
    return KernelCase("gqa_attention_gradient", sizes, options=options, values=values)


def prefill_with_a_prefix() -> KernelCase:
    """Prefill after prefixes of different lengths, one of them empty."""
    paged, values = pages_of([300, 77, 200])
    options = {"scale": 0.07, "block": 128}
    return KernelCase(
        "mla_prefill", {"T": 77, "H": 4, **paged}, options=options,
        values=values | {"query_lens": [70, 77, 8]},
    )  # fmt: skip


def grouped_prefill(dim: int, page: int, window: int | None = None) -> KernelCase:
    """Prefill with two query heads per KV head, prefixes of some pages and none, and padding."""
    paged, values = pages_of([300, 277, 200, 0], page)
    sizes = {"T": 277, "H": 4, "Hk": 2, "D": dim, **paged}
    values |= {"query_lens": [270, 277, 8, 0]}
    return KernelCase("gqa_prefill", sizes, options={"window": window}, values=values)


def append_and_decode(
    dim: int, *, fp8: bool = False, preset: str | None = None, window: int | None = None
) -> KernelCase:
    """Append and attention of a 70-token chunk in three rows, and of their last two tokens.

    One row is empty, and one is long enough to be split.
    """
    paged, values = pages_of([70, 0, 860])
    config = RopeConfig(dim=dim, interleaved=False)
    options: dict[str, Any] = {"layer": 1, "window": window, "config": config, "gated": dim == 256}
    sizes: dict[str, Any] = {"T": 70, "H": 8, "Hk": 2, "D": dim, "L": 2, "sinks": dim == 64}
    if fp8:
        options["kv_scale"] = 0.5
    op = "turbo_append_and_decode" if preset else "gqa_append_and_decode"
    if preset:
        options["form"] = turbo_format(preset, dim)
        sizes["slot"] = options["form"].slot_bytes
    return KernelCase(op, sizes | paged | {"fp8": fp8}, options=options, values=values)


def delta_rule(
    lens: list[int],
    *,
    pool: bool = False,
    checkpoint_tokens: int = 0,
    split: int | None = None,
    norm: bool = False,
    channels: bool = False,
    gradient: bool = False,
    heads: int = 2,
) -> KernelCase:
    """The chunked rule; `channels` selects KDA, with a decay per key channel.

    With `pool`, `checkpoint_tokens` is the interval of checkpoints, and `norm` norms the output.
    """
    count = len(lens)
    sizes = {"B": 1, "T": sum(lens), "Hk": heads, "Hv": 2 * heads, "S": count}
    sizes |= {"channels": channels}
    values: dict[str, Any] = {"cu_seqlens": np.cumsum([0, *lens])}
    options: dict[str, Any] = {"split_tokens": split}
    if not pool:
        options |= {"output_final_state": True, "use_qk_l2norm": True}
        op = "chunk_kda" if channels else "chunk_gated_delta_rule"
        return KernelCase(
            f"{op}_gradient" if gradient else op, sizes, options=options, values=values
        )
    kept = max(lens) // checkpoint_tokens if checkpoint_tokens else 0
    sizes |= {"Z": count * (1 + kept), "kept": kept, "gate": 8 + 4 * 128 if norm else 0}
    values |= {"state_indices": np.arange(count)[::-1]}
    values |= {"checkpoints": count + np.arange(count * kept).reshape(count, kept)}
    op = "kda_prefill" if channels else "gated_delta_rule_prefill"
    return KernelCase(op, sizes, options=options | {"tokens": checkpoint_tokens}, values=values)


def convolution(lens: list[int], channels: int, dtype: str = "bfloat16") -> KernelCase:
    """Gradients of a delta layer's convolution, for sequences in one row."""
    first = np.repeat(np.cumsum([0, *lens[:-1]]), lens)[None]
    sizes = {"B": 1, "T": sum(lens), "F": channels}
    return KernelCase("causal_conv1d_gradient", sizes, dtype, values={"first": first})


def convolved_pieces(lens: list[int], channels: int) -> KernelCase:
    """A delta layer's convolution of pieces of several prompts in one row."""
    position = np.concatenate([np.arange(n) for n in lens])[None]
    sequence = np.repeat(np.arange(len(lens)), lens)[None]
    sizes = {"B": 1, "T": sum(lens), "C": channels + 128, "F": channels, "n": len(lens)}
    values = {"position": position, "sequence": sequence}
    return KernelCase("causal_conv1d_of_pieces", sizes, values=values)


def gated_norm(tokens: int, heads: int, columns: int, *, sigmoid: bool = False) -> KernelCase:
    """Gradients of a gated norm, whose gate is the end of a projection of that many columns."""
    sizes = {"B": 1, "T": tokens, "H": heads, "D": 128, "C": columns}
    return KernelCase("gated_norm_gradient", sizes, options={"sigmoid": sigmoid}, values={})


def slots_of(rows: int, q_len: int, each: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sizes and indices of slots to read (the last row has none) and to write.

    With `each`, every token writes to another slot, or to none.
    """
    reads = np.arange(rows)
    reads[-1] = -1
    writes = rows + np.arange(rows * q_len).reshape(rows, q_len)
    writes[0, 0] = -1
    sizes = {"B": rows, "T": q_len, "Z": rows * (1 + q_len if each else 1), "each": each}
    return sizes, {"state_indices": reads, "write_indices": writes}


def delta_net(dtype: str, q_len: int = 1, rows: int = 3, *, each: bool = False) -> KernelCase:
    """Decode of a delta net with states of this dtype; `each` stores them after every token."""
    slots, values = slots_of(rows, q_len, each)
    sizes = {"Hk": 2, "Hv": 4, "L": 2, "state": dtype, **slots}
    return KernelCase("gated_delta_net_decode", sizes, options={"layer": 1}, values=values)


def bare_delta_rule(q_len: int, rows: int = 3, *, each: bool = False) -> KernelCase:
    """Only the update of the state, given q, k and v."""
    slots, values = slots_of(rows, q_len, each)
    return KernelCase("gated_delta_rule_decode", {"Hk": 2, "Hv": 4, **slots}, values=values)


def mixture(
    tokens: int, experts: int, top_k: int, hidden: int = 256, width: int = 128, **sizes: Any
) -> KernelCase:
    """The experts of the last of two layers; some tokens have no expert."""
    ids = np.stack([DRAWN.permutation(experts)[:top_k] for _ in range(tokens)])
    ids[-1, 0] = -1
    sizes |= {"B": tokens, "E": experts, "K": top_k, "F": hidden, "W": width, "L": 2}
    return KernelCase("mixture_of_experts", sizes, options={"layer": 1}, values={"ids": ids})


def biased_mixture(tokens: int, *sizes: int) -> KernelCase:
    """gpt-oss's experts, with biases and a clamped activation."""
    case = mixture(tokens, *sizes, biases=True)
    activation = ClampedSwiGLU(alpha=1.702, limit=7.0)
    return dataclasses.replace(case, options={**case.options, "activation": activation})


def gradient_of(case: KernelCase) -> KernelCase:
    """Both passes of the experts."""
    return dataclasses.replace(case, op="gradient_of_experts")


SMALL: dict[str, KernelCase] = {
    "mla_decode_few_rows": decode([200, 1, 700], 16),
    "mla_decode_many_rows": decode([65] * 139 + [3000], 16),
    "mla_decode_two_tiles": decode([300, 900], 128),
    "mla_decode_two_tokens": decode([300, 2], 64, q_len=2),
    "mla_decode_split": decode([4000], 128),
    "mla_decode_merged": decode([1500] * 15 + [9000], 128),
    "mla_decode_whole_rows": decode([65] * 140, 128),  # in another order
    "mla_decode_nope": decode([300, 0, 2], 64, D=RANK),
    "mla_decode_few_rows_nope": decode([300, 0, 2], 16, D=RANK),
    "mla_decode_float16": decode([300, 0, 700], 64, cache="float16"),
    "mla_decode_few_rows_float16": decode([300, 0, 700], 16, cache="float16"),
    "mla_decode_ragged": decode([300, 2, 0, 64], 20, q_len=4, queries=[1, 4, 0, 2]),
    "mla_decode_few_rows_ragged": decode([300, 2, 0, 64], 4, q_len=4, queries=[1, 4, 0, 2]),
    "mla_decode_pages_of_16": decode([300, 17, 0], 64, page=16),
    "mla_decode_pages_of_128": decode([300, 129, 0], 64, page=128),
    "mla_decode_few_rows_pages_of_16": decode([300, 17, 0], 16, page=16),
    "mla_decode_few_rows_pages_of_128": decode([300, 129, 0], 16, page=128),
    "mla_decode_pair": decode([300, 2], 64, q_len=2, D=(RANK, 64)),
    "mla_decode_arena": decode([300, 0, 900], 20, arena=True),
    "mla_decode_few_rows_arena": decode([300, 0, 900], 9, arena=True),
    "mla_decode_stack": decode([300, 0, 70], 64, layers=3),
    "mla_decode_few_rows_stack": decode([300, 0, 70], 16, layers=3),
    "mla_decode_e4m3": decode([300, 700], 16, cache="float8_e4m3fn"),
    "mla_decode_block_scaled": decode([300, 700], 32, cache="uint8"),
    "mla_decode_e4m3_rows": decode([300, 0, 700], 128, cache="float8_e4m3fn"),
    "mla_decode_block_scaled_rows": decode([300, 700], 128, cache="uint8"),
    "mla_index": indexed([700, 0, 600], 8),
    "mla_index_ragged": indexed([1300, 40, 600], 32, 1024, 3, page=16, queries=[3, 1, 0]),
    "mla_index_chunk": indexed([700, 90], 64, q_len=90, page=128),
    "mla_index_cluster": indexed([33000], 64, 2048),
    "mla_index_e4m3": indexed([700, 600], 64, q_len=2, fp8=True),
    "mla_index_e4m3_rows": indexed([700, 600, 0] * 4, 32, page=128, fp8=True),
    "mla_sparse": listed([300, 0], 16, 448, sinks=True),
    "mla_sparse_ragged": listed([150, 70], 128, 100, 2, "float16", page=16, queries=[1, 2]),
    "mla_sparse_chunk": listed([200, 150], 128, 100, 150, page=32, queries=[150, 90]),
    "mla_sparse_e4m3": listed([300, 0], 64, 448, 2, "float8_e4m3fn", page=128),
    "mla_sparse_block_scaled": listed([700, 300], 32, 448, cache="uint8"),
    "mla_sparse_block_scaled_chunk": listed([200, 150], 64, 100, 150, "uint8", sinks=True),
    "mla_append": append(),
    "mla_prefill": prefill(),
    "mla_prefill_prefix": prefill_with_a_prefix(),
    "mla_gradient": prefill(150, 1, gradient=True),
    "gqa_gradient": gradient_of_groups(128),
    "gqa_gradient_window": gradient_of_groups(64, 300, window=100, soft_cap=9.0),
    "gqa_gradient_256": gradient_of_groups(256),
    "gqa_append_decode": append_and_decode(128),
    "gqa_append_decode_window": append_and_decode(64, window=100),
    "gqa_append_decode_e4m3": append_and_decode(256, fp8=True),
    "turbo_append_decode_k8v4": append_and_decode(128, preset="k8v4"),
    "turbo_append_decode_4bit": append_and_decode(64, preset="4bit_nc"),
    "turbo_append_decode_k3v4": append_and_decode(128, preset="k3v4_nc"),
    "gqa_prefill": grouped_prefill(128, 64),
    "gqa_prefill_window": grouped_prefill(64, 16, window=100),
    "gqa_prefill_256": grouped_prefill(256, 128),
    "gdn_prefill_short": delta_rule([63, 0, 1, 200]),
    "gdn_prefill_pool": delta_rule([63, 130], pool=True),
    "gdn_prefill_checkpoints": delta_rule([63, 0, 130, 200], pool=True, checkpoint_tokens=64),
    "gdn_prefill_many": delta_rule([70] * 140),
    "gdn_prefill_segments": delta_rule([8192]),
    "gdn_prefill_pool_segments": delta_rule([63, 0, 700], pool=True, split=128),
    "gdn_prefill_checkpoints_segments": delta_rule(
        [63, 0, 700], pool=True, checkpoint_tokens=64, split=128
    ),
    "kda_prefill_short": delta_rule([63, 0, 1, 200], channels=True),
    "kda_prefill_pool": delta_rule([63, 130], pool=True, checkpoint_tokens=64, channels=True),
    "kda_prefill_split": delta_rule([700], split=128, channels=True),
    "gdn_gradient": delta_rule([63, 0, 1, 200], gradient=True),
    "gdn_gradient_whole": delta_rule([128, 64], heads=1, gradient=True),
    "gdn_gradient_many": delta_rule([70] * 40, gradient=True),
    "kda_gradient": delta_rule([63, 0, 1, 200], channels=True, gradient=True),
    "conv_forward": convolved_pieces([1, 90, 3, 40], 256),
    "conv_gradient": convolution([1, 90, 3, 40], 256),
    "conv_gradient_float16": convolution([70], 128, "float16"),
    "gated_norm_gradient": gated_norm(70, 8, 1280),
    "gated_norm_gradient_padded": gated_norm(9, 3, 384, sigmoid=True),
    "gdn_prefill_norm": delta_rule([63, 0, 1, 130] * 9, pool=True, norm=True),
    "gdn_decode_few_states": delta_net("bfloat16"),
    "gdn_decode_few_states_float32": delta_net("float32"),
    "gdn_decode_float32": delta_net("float32", rows=9),
    "gdn_decode_bfloat16": delta_net("bfloat16", rows=9),
    "gdn_decode_two_heads_a_block": delta_net("bfloat16", rows=150),
    "gdn_decode_tokens": delta_net("float32", q_len=4),
    "gdn_decode_each_token": delta_net("float32", q_len=4, each=True),
    "gdn_decode_few_states_bare": bare_delta_rule(1),
    "gdn_decode_few_states_each_token": delta_net("bfloat16", each=True),
    "gdn_decode_bare": bare_delta_rule(1, rows=9),
    "gdn_decode_bare_each_token": bare_delta_rule(3, each=True),
    "moe_few_tokens": mixture(3, 6, 2),
    "moe_sorted": mixture(70, 5, 3, width=192),
    "moe_many_tokens": mixture(900, 3, 2),
    "moe_arena": mixture(9, 6, 2, arena=True),
    "moe_biases": biased_mixture(1, 6, 4, 2880, 192),
    "moe_biases_sorted": biased_mixture(33, 4, 2, 192, 64),
    "moe_gradient": gradient_of(mixture(70, 5, 3, width=192)),
    "moe_gradient_biases": gradient_of(biased_mixture(33, 4, 2, 192, 128)),
    "moe_e4m3": mixture(2, 6, 2, fp8=True),
    "moe_e4m3_sorted": mixture(40, 4, 2, fp8=True),
    "out_of_bounds": KernelCase("out_of_bounds", {}, values={"at": [2**31 - 1024]}, bare=True),
}
