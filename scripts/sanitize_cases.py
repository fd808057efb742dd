"""Small launches of every kernel for scripts/sanitize.py: each an op and its arguments."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn import (
    Arena,
    chunk_gated_delta_rule,
    gated_delta_net_decode,
    gated_delta_rule_decode,
    gated_delta_rule_prefill,
    gqa,
    kda,
    mla,
    mla_append,
    mla_decode,
    moe,
)
from jaxattn.core.dispatch import Implementation
from jaxattn.core.numerics.rope import RopeConfig, rotation
from jaxattn.gdn import Checkpoints, OutputNorm
from jaxattn.mla import LatentFormat
from jaxattn.ops.mla.prefill import causal_attention, mla_prefill
from scripts import sanitize_gqa_cases

PAGE, RANK, DIM = 64, 512, 576
DRAWN = np.random.default_rng(0)

# (op, arguments) of a case, for an implementation.
Case = Callable[[Implementation], tuple[Callable[..., Any], tuple[Any, ...]]]


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Made by NumPy: nothing to compile."""
    return jax.device_put(DRAWN.normal(size=shape).astype(dtype))


def ints(values: Any) -> jax.Array:
    return jax.device_put(np.asarray(values, np.int32))


def pages_of(lens: list[int], page: int = PAGE) -> tuple[jax.Array, int]:
    """Block tables, with numbers of no page past a row's end; and how many pages there are."""
    needed = [-(-length // page) for length in lens]
    tables = np.full((len(lens), max(needed)), 2147480000, np.int32)
    last = np.cumsum(needed)
    for row, (count, end) in enumerate(zip(needed, last, strict=True)):
        tables[row, :count] = np.arange(end - count, end)[::-1]
    return ints(tables), int(last[-1])


def decode(
    lens: list[int],
    heads: int,
    q_len: int = 1,
    cache: str = "bfloat16",
    *,
    dim: int = DIM,
    page: int = PAGE,
    queries: list[int] | None = None,
    pair: bool = False,
    arena: bool = False,
    layers: int = 0,
) -> Case:
    """`queries` are the rows' `query_lens`; `layers` those of a stack, of which the last is read;
    `pair` gives q in two arrays."""

    def case(implementation: Implementation) -> Any:
        tables, pages = pages_of(lens, page)
        packed = cache if LatentFormat(cache).quantized else None
        scale = 0.05 if cache == "float8_e4m3fn" else None
        dtype = jnp.dtype("bfloat16" if packed else cache)
        shape = len(lens), q_len, heads

        def op(q: Any, latents: Any, tables: Any, lens: Any, query_lens: Any, arena: Any) -> Any:
            kv_cache = LatentFormat(packed).pack(latents, scale) if packed else latents
            return mla_decode(
                q, kv_cache, tables, lens, scale=0.07, kv_scale=scale, query_lens=query_lens,
                layer=layers - 1 if layers else None, arena=arena, implementation=implementation,
            )  # fmt: skip

        draw = functools.partial(normal, dtype=dtype)
        q = (draw(*shape, RANK), draw(*shape, dim - RANK)) if pair else draw(*shape, dim)
        latents = draw(*[layers][: layers > 0], pages, page, dim)
        scratch = mla.scratch(
            batch=len(lens), q_len=q_len, num_heads=heads, max_pages=tables.shape[1],
            page_size=page, dtype=dtype,
        )  # fmt: skip
        return op, (
            q, latents, tables, ints(lens),
            None if queries is None else ints(queries),
            Arena.allocate(scratch) if arena else None,
        )  # fmt: skip

    return case


def append(implementation: Implementation) -> Any:
    lens = [70, 0, 1, 128]
    tables, pages = pages_of(lens)
    config = RopeConfig()
    positions = np.maximum(np.asarray(lens)[:, None] - 2 + np.arange(2), 0)

    def op(kv: Any, q: Any, weights: Any, cache: Any, tables: Any, lens: Any, turn: Any) -> Any:
        return mla_append(
            kv, q, weights, cache, tables, lens,
            rotation=turn, config=config, implementation=implementation,
        )  # fmt: skip

    weights = normal(DIM + 256, dtype=jnp.float32)
    turn = jax.jit(functools.partial(rotation, config=config))(ints(positions))
    inputs = normal(4, 2, DIM), normal(4, 2, 256), weights, normal(pages, PAGE, DIM)
    return op, (*inputs, tables, ints(lens), turn)


def prefill(implementation: Implementation) -> Any:
    def op(q: Any, k: Any, v: Any, k_pe: Any, lengths: Any) -> Any:
        return causal_attention(
            q, k, v, scale=0.07, lengths=lengths, k_pe=k_pe, implementation=implementation
        )

    shape = 2, 300, 4
    k, v = (normal(*shape, 128) for _ in range(2))
    return op, (normal(*shape, 192), k, v, normal(2, 300, 64), ints([300, 77]))


def prefill_with_a_prefix(implementation: Implementation) -> Any:
    lens, new, heads = [300, 77, 200], [70, 77, 8], 4  # prefixes of some blocks, none, and more
    tables, pages = pages_of(lens)

    def op(q: Any, latent: Any, w_uk: Any, w_uv: Any, cache: Any, tables: Any, *lens: Any) -> Any:
        return mla_prefill(
            q, latent, w_uk, w_uv, cache, tables, *lens,
            scale=0.07, block=128, implementation=implementation,
        )  # fmt: skip

    rows = len(lens), max(new)
    inputs = normal(*rows, heads, 192), normal(*rows, DIM)
    weights = normal(heads, 128, RANK), normal(heads, RANK, 128)
    return op, (*inputs, *weights, normal(pages, PAGE, DIM), tables, ints(lens), ints(new))


def grouped_prefill(dim: int, page: int, window: int | None = None) -> Case:
    """Two query heads to a key-value head, prefixes of some pages and of none, and padding."""

    def case(implementation: Implementation) -> Any:
        lens, new = [300, 277, 200, 0], [270, 277, 8, 0]
        tables, pages = pages_of(lens, page)
        rows = len(lens), max(new)

        def op(*args: Any) -> Any:
            return gqa.gqa_prefill(*args, window=window, implementation=implementation)

        inputs = normal(*rows, 4, dim), normal(*rows, 2, dim), normal(*rows, 2, dim)
        return op, (*inputs, normal(pages, 2, page, 2, dim), tables, ints(lens), ints(new))

    return case


def delta_rule(
    lens: list[int],
    *,
    pool: bool = False,
    checkpoint_tokens: int = 0,
    split: int | None = None,
    norm: bool = False,
    channels: bool = False,
) -> Case:
    """In a pool, `checkpoint_tokens` keeps the states after every so many tokens, and `norm` norms
    the output. With `channels` every channel of a key decays by itself."""
    on_a_pool: Any = kda.kda_prefill if channels else gated_delta_rule_prefill
    on_arrays: Any = kda.chunk_kda if channels else chunk_gated_delta_rule

    def case(implementation: Implementation) -> Any:
        count, tokens, starts = len(lens), sum(lens), np.cumsum([0, *lens])
        q, k = (normal(1, tokens, 2, 128) for _ in range(2))
        v, of_gate = normal(1, tokens, 4, 128), (4, 128) if channels else (4,)
        g = -np.abs(normal(1, tokens, *of_gate, dtype=jnp.float32))
        beta = jax.device_put(np.full((1, tokens, 4), 0.5, np.float32))
        kept = max(lens) // checkpoint_tokens if checkpoint_tokens else 0

        def op(
            q: Any,
            k: Any,
            v: Any,
            g: Any,
            beta: Any,
            starts: Any,
            state: Any,
            slots: Any,
            kept: Any,
            gate: Any,
            weight: Any,
        ) -> Any:
            if pool:
                every = checkpoint_tokens
                return on_a_pool(
                    q, k, v, g, beta, state, slots, cu_seqlens=starts, split_tokens=split,
                    checkpoints=Checkpoints(slots=kept, tokens=every) if every else None,
                    output_norm=OutputNorm(gate=gate, weight=weight) if norm else None,
                    implementation=implementation,
                )  # fmt: skip
            return on_arrays(
                q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=starts,
                use_qk_l2norm=True, split_tokens=split, implementation=implementation,
            )  # fmt: skip

        states = normal(count * (1 + kept), 4, 128, 128, dtype=jnp.float32)
        slots = ints(np.arange(count)[::-1])
        checkpoints = ints(count + np.arange(count * kept).reshape(count, kept)) if kept else None
        gates = jax.device_put(np.asarray(g)), beta
        normed = (normal(1, tokens, 8 + 4 * 128), normal(128)) if norm else (None, None)
        return op, (q, k, v, *gates, ints(starts), states, slots, checkpoints, *normed)

    return case


def slots_of(rows: int, q_len: int, each: bool) -> tuple[jax.Array, jax.Array | None, int]:
    """Slots that are read, the last row's none, and those written: others of each token, if it is
    so wished, some of them none; and how many there are."""
    reads = np.arange(rows)
    reads[-1] = -1
    if not each:
        return ints(reads), None, rows
    writes = rows + np.arange(rows * q_len).reshape(rows, q_len)
    writes[0, 0] = -1
    return ints(reads), ints(writes), rows * (1 + q_len)


def delta_net(dtype: str, q_len: int = 1, rows: int = 3, *, each: bool = False) -> Case:
    """`each` keeps the states after every token."""

    def case(implementation: Implementation) -> Any:
        channels = (2 * 2 + 4) * 128
        reads, writes, slots = slots_of(rows, q_len, each)

        def op(
            qkvz: Any, ba: Any, weights: Any, conv: Any, state: Any, reads: Any, writes: Any
        ) -> Any:
            return gated_delta_net_decode(
                qkvz, ba, weights, conv, state, reads, write_indices=writes, layer=1,
                implementation=implementation,
            )  # fmt: skip

        return op, (
            normal(rows, q_len, channels + 4 * 128),
            normal(rows, q_len, 8, dtype=jnp.float32),
            normal(2, 2 * 4 + 128 + 4 * channels, dtype=jnp.float32),
            normal(2, slots, 3, channels),
            normal(2, slots, 4, 128, 128, dtype=jnp.dtype(dtype)),
            reads,
            writes,
        )

    return case


def bare_delta_rule(q_len: int, rows: int = 3, *, each: bool = False) -> Case:
    """The state's update alone, of q, k and v."""

    def case(implementation: Implementation) -> Any:
        reads, writes, slots = slots_of(rows, q_len, each)

        def op(q: Any, k: Any, v: Any, a: Any, b: Any, *rest: Any) -> Any:
            state, reads, writes, A_log, dt_bias = rest
            return gated_delta_rule_decode(
                q, k, v, a, b, state, reads, A_log=A_log, dt_bias=dt_bias, write_indices=writes,
                implementation=implementation,
            )  # fmt: skip

        q, k, v = (normal(rows, q_len, heads, 128) for heads in (2, 2, 4))
        gates, rates = (normal(rows, q_len, 4) for _ in range(2)), (normal(4), normal(4))
        state = normal(slots, 4, 128, 128, dtype=jnp.float32)
        return op, (q, k, v, *gates, state, reads, writes, *rates)

    return case


def mixture(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int = 256,
    width: int = 128,
    *,
    fp8: bool = False,
    arena: bool = False,
) -> Case:
    """Of the last of two layers; some tokens have no expert."""

    def case(implementation: Implementation) -> Any:
        stored = jnp.float8_e4m3fn if fp8 else jnp.bfloat16
        blocks = lambda size: -(-size // 128)  # noqa: E731

        def op(
            x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, scales: Any, arena: Any
        ) -> Any:
            return moe.mixture_of_experts(
                x, ids, weights, gate_up, down, **scales,
                layer=1, arena=arena, implementation=implementation,
            )  # fmt: skip

        ids = np.stack([DRAWN.permutation(experts)[:top_k] for _ in range(tokens)])
        ids[-1, 0] = -1
        shape = 2, experts
        scales = {
            "gate_up_scale": normal(*shape, 2, blocks(width), blocks(hidden), dtype=jnp.float32),
            "down_scale": normal(*shape, blocks(hidden), blocks(width), dtype=jnp.float32),
        }
        scratch = moe.scratch(
            tokens=tokens, top_k=top_k, experts=experts, hidden=hidden, expert_size=width, fp8=fp8
        )
        return op, (
            normal(tokens, hidden),
            ints(ids),
            normal(tokens, top_k, dtype=jnp.float32),
            normal(*shape, 2 * width, hidden, dtype=stored),
            normal(*shape, hidden, width, dtype=stored),
            scales if fp8 else {},
            Arena.allocate(scratch) if arena else None,
        )

    return case


def out_of_bounds(implementation: Implementation) -> Any:
    del implementation

    def body(x_ref: Any, at_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[pl.ds(at_ref[0], 128)]

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    return kernel, (normal(1024, dtype=jnp.float32), ints([2**31 - 1024]))


CASES: dict[str, Case] = {
    "mla_decode_few_rows": decode([200, 1, 700], 16),
    "mla_decode_many_rows": decode([65] * 139 + [3000], 16),
    "mla_decode_two_tiles": decode([300, 900], 128),
    "mla_decode_two_tokens": decode([300, 2], 64, q_len=2),
    "mla_decode_split": decode([4000], 128),
    "mla_decode_merged": decode([1500] * 15 + [9000], 128),
    "mla_decode_whole_rows": decode([65] * 140, 128),  # in an order of their own
    "mla_decode_nope": decode([300, 0, 2], 64, dim=RANK),
    "mla_decode_few_rows_nope": decode([300, 0, 2], 16, dim=RANK),
    "mla_decode_float16": decode([300, 0, 700], 64, cache="float16"),
    "mla_decode_few_rows_float16": decode([300, 0, 700], 16, cache="float16"),
    "mla_decode_ragged": decode([300, 2, 0, 64], 20, q_len=4, queries=[1, 4, 0, 2]),
    "mla_decode_few_rows_ragged": decode([300, 2, 0, 64], 4, q_len=4, queries=[1, 4, 0, 2]),
    "mla_decode_pages_of_16": decode([300, 17, 0], 64, page=16),
    "mla_decode_pages_of_128": decode([300, 129, 0], 64, page=128),
    "mla_decode_few_rows_pages_of_16": decode([300, 17, 0], 16, page=16),
    "mla_decode_few_rows_pages_of_128": decode([300, 129, 0], 16, page=128),
    "mla_decode_pair": decode([300, 2], 64, q_len=2, pair=True),
    "mla_decode_arena": decode([300, 0, 900], 20, arena=True),
    "mla_decode_few_rows_arena": decode([300, 0, 900], 9, arena=True),
    "mla_decode_stack": decode([300, 0, 70], 64, layers=3),
    "mla_decode_few_rows_stack": decode([300, 0, 70], 16, layers=3),
    "mla_decode_e4m3": decode([300, 700], 16, cache="float8_e4m3fn"),
    "mla_decode_block_scaled": decode([300, 700], 32, cache="uint8"),
    "mla_decode_e4m3_rows": decode([300, 0, 700], 128, cache="float8_e4m3fn"),
    "mla_decode_block_scaled_rows": decode([300, 700], 128, cache="uint8"),
    "mla_append": append,
    "mla_prefill": prefill,
    "mla_prefill_prefix": prefill_with_a_prefix,
    **sanitize_gqa_cases.CASES,
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
    "moe_e4m3": mixture(2, 6, 2, fp8=True),
    "moe_e4m3_sorted": mixture(40, 4, 2, fp8=True),
    "out_of_bounds": out_of_bounds,
}
