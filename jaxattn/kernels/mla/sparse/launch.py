"""MLA attention over a list of positions for each token, of a paged latent cache.

softmax(q K^T) K[:, :kv_lora_rank] with the K latents at a token's positions, each read once for 64
heads. As in `mla_decode`, whose body and outputs it uses, there is a CTA for each (part of the
schedule, tile of 64 heads); kernel.py has the differences. For few tokens the lists are split, and
decode/combine.py merges their pieces. A chunk of a prompt has so many tokens that no list is split.

Limits: R 512 and P 64 (D 576), pages of 16, 32, 64 or 128 tokens, bfloat16 and float16 caches with
queries of the same dtype, FP8 caches with bfloat16 queries; any H, S and K. Tiles have 64 heads,
and fewer heads take the time of 64. Reference: float64 in tests/kernels/mla/sparse/test_launch.py.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.arena import ArenaSpec
from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.attention.split_kv_schedule import (
    PAGE,
    TILE,
    Schedule,
    SplitThresholds,
    compute_max_pieces,
    make_schedule,
    merge_cost,
    num_tiles,
    row_cost,
)
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS, require_hopper
from jaxattn.kernels.mla.decode.arguments import MlaDecodeCall
from jaxattn.kernels.mla.decode.decode_schedule import INTERPRETED_SMS, PAGE_SIZES
from jaxattn.kernels.mla.decode.latent_tile import RANK, ROPE
from jaxattn.kernels.mla.decode.outputs import MlaDecodeOutputs
from jaxattn.kernels.mla.decode.warp_specialized.cta_context import (
    MlaDecodeConfig,
    MlaDecodeRefs,
    scratch_types,
)
from jaxattn.kernels.mla.decode.workspace import spec_of
from jaxattn.kernels.mla.index.work_tiles import visible_keys
from jaxattn.kernels.mla.sparse.kernel import MlaSparseKernel

OP = "mla_sparse"
# Pages of a piece of a split list. A block-scaled page takes 2.6 us; 16 pieces are merged in two
# turns.
THRESHOLDS = SplitThresholds(part=4, short=2)


def refuse(call: MlaDecodeCall) -> None:
    """Raises `Refusal`, with the reason, if the kernel does not serve these shapes."""
    kv_cache, kv_lora_rank = call.kv_cache, call.kv_lora_rank
    latents = call.format
    if kv_lora_rank != RANK or call.head_dim != RANK + ROPE:
        raise Refusal(
            f"{OP}: the kernel needs kv_lora_rank 512 and qk_rope_head_dim 64, got {kv_lora_rank=} "
            f"with q of {call.head_dim} dims"
        )
    if kv_cache.shape[-1] != latents.width:
        raise Refusal(
            f"{OP}: a {kv_cache.dtype.name} cache must have {latents.width} numbers per token, but "
            f"kv_cache is {kv_cache.shape}"
        )
    fits = call.dtype in (jnp.bfloat16, jnp.float16) and call.dtype == kv_cache.dtype
    if not (call.dtype == jnp.bfloat16 if latents.quantized else fits):
        raise Refusal(
            f"{OP}: the kernel needs q and kv_cache both bfloat16 or both float16, or q bfloat16 "
            f"with an FP8 cache, got q {call.dtype.name}, kv_cache {kv_cache.dtype.name}"
        )
    if call.page_size not in PAGE_SIZES:
        raise Refusal(
            f"{OP}: the kernel needs pages of 16, 32, 64 or 128 tokens, but kv_cache "
            f"{kv_cache.shape} has {call.page_size}"
        )
    tokens = int(np.prod(kv_cache.shape[:-1]))
    if tokens >= 2**31:
        raise Refusal(
            f"{OP}: the kernel indexes a cache's tokens with 32 bits, but kv_cache "
            f"{kv_cache.shape} has {tokens:,}; give it as several stacks of layers"
        )


def mla_sparse_mosaic(
    call: MlaDecodeCall,
    indices: jax.Array,
    sinks: jax.Array | None = None,
    *,
    batch_invariant: bool = False,
    output_by_tma: bool | None = None,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """Returns `call`'s attention of each token to only its list: (out [B, S, H, R], lse [B, S, H]),
    and the arena if the call has one.

    Args:
        indices: int32 [B, S, K] positions in the row, in any order. Negative ones and those beyond
            the token's own are ignored; a position that occurs twice counts twice.
        sinks: float32 [H], a logit without a value for each head.
        output_by_tma: As in `mla_decode_mosaic`; None: if no list is split. It then takes 417 us
            instead of 428 (block-scaled), 302 instead of 323 (bfloat16).
        batch_invariant: Whether lists are split only by B, S and K, all into the same number of
            equal pieces; with more tokens than CTAs none is. Otherwise the place of a token in the
            batch may decide.
    """
    require_hopper(OP, interpret=interpret)
    refuse(call)
    shape = call.shape
    tokens_of_row, num_heads = shape[1], shape[2]
    lists = _in_pages(indices.reshape(-1, indices.shape[-1]))
    rows, entries = lists.shape
    tiles = num_tiles(1, num_heads)
    num_sms = INTERPRETED_SMS if interpret else NUM_SMS
    schedule = _schedule(rows, entries // PAGE, tiles, num_sms, batch_invariant)
    whole = not _splits(rows, entries // PAGE, schedule.parts, batch_invariant)
    # With few tokens an XLA kernel would not pay off. All their lists have one length, which is not
    # read, so any constant serves, except one number for all, which XLA would write by a kernel.
    seen_by: dict[str, Any] = {"row_lens_ref": call.seq_lens, "row_queries_ref": call.query_lens}
    lengths = jnp.asarray(entries + np.arange(rows, dtype=np.int32) ** 2)
    if whole:
        seen_by = {"visible_ref": _visible(call)}
        lengths = _lengths(lists, seen_by["visible_ref"])
    call = _of_tokens(call, lengths, schedule).stacked()
    padded = None
    if sinks is not None:
        padded = jnp.pad(sinks.astype(jnp.float32), (0, tiles * TILE - num_heads))
    results = MlaDecodeOutputs(call, tiles * TILE, padded, split=not whole)
    if output_by_tma is None:
        output_by_tma = whole
    output_by_tma &= results.in_whole_tiles()
    cut = MlaDecodeConfig(
        q_len=1, num_heads=num_heads, tiles=tiles, parts=results.parts, scale=call.scale,
        dtype=call.dtype, latents=call.format, rope=True, first_rows=results.first_rows,
        output_by_tma=output_by_tma, interpret=interpret, keys_from_list=True,
    )  # fmt: skip
    assert not isinstance(call.q, tuple)
    packed = jnp.pad(call.q[:, 0], ((0, 0), (0, tiles * TILE - num_heads), (0, 0)))
    given = call.inputs() | {
        "q_ref": packed, "q_rope_ref": None,
        "indices_ref": lists, "sinks_ref": padded, **seen_by,
    }  # fmt: skip
    written = launch(
        lambda **refs: MlaSparseKernel(cut, MlaDecodeRefs(**refs), tokens_of_row, whole).run(),
        name=OP,
        grid={"part": results.parts, "tile": tiles},
        inputs={**given, **results.inputs},
        outputs=results.outputs,
        scratch=scratch_types(cut, call.page_size),
        warpgroups=3,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # row reductions stay inside a warp
            unsafe_no_auto_barriers=True,  # as in `mla_decode`
        ),
        interpret=interpret,
    )
    out, lse, *arena = results.finish(written, interpret=interpret)
    return out.reshape(*shape, RANK), lse.reshape(shape), *arena


def scratch(
    *,
    batch: int,
    q_len: int,
    num_heads: int,
    top_k: int,
    dtype: Any = jnp.bfloat16,
    batch_invariant: bool = False,
) -> ArenaSpec:
    """Returns the kernel's arena regions, as `jaxattn.mla.scratch` does for `mla_decode`."""
    rows, tiles = batch * q_len, num_tiles(1, num_heads)
    pages = -(-top_k // PAGE)
    parts = _parts(rows, pages, tiles, NUM_SMS)
    split = _splits(rows, pages, parts, batch_invariant)
    return spec_of(rows, tiles * TILE, RANK, dtype, parts if split else 1)


def _in_pages(lists: jax.Array) -> jax.Array:
    more = -lists.shape[-1] % PAGE
    return jnp.pad(lists, ((0, 0), (0, more)), constant_values=-1) if more else lists


def _visible(call: MlaDecodeCall) -> jax.Array:
    """Returns int32 [B * S], how many of its row's positions each token may see; 0 for padding."""
    token, most = jnp.arange(call.q_len, dtype=jnp.int32), call.max_pages * call.page_size
    queries: Any = call.q_len if call.query_lens is None else call.query_lens[:, None]
    return visible_keys(call.seq_lens[:, None], queries, token, most).reshape(-1)


def _lengths(lists: jax.Array, visible: jax.Array) -> jax.Array:
    """Returns int32 [rows], the entries of each list up to the last one that is attended to: an
    indexer's list ends early if the row has few tokens. Where lists are split, early ends would
    save no time, so all lists count as whole, also those of padding: entries that are not attended
    to are not read."""
    attended = lists.astype(jnp.uint32) < visible.astype(jnp.uint32)[:, None]
    entry = jnp.arange(1, lists.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(attended, entry, 0), axis=1)


def _of_tokens(call: MlaDecodeCall, lengths: jax.Array, schedule: Schedule) -> MlaDecodeCall:
    """Returns the call with each token as a row of its own, of `lengths` keys."""
    q = call.joined().q
    assert not isinstance(q, tuple)
    return dataclasses.replace(
        call, q=q.reshape(-1, 1, *q.shape[2:]), seq_lens=lengths, query_lens=None,
        schedule=schedule,
    )  # fmt: skip


def _parts(rows: int, pages: int, tiles: int, num_sms: int) -> int:
    worth = rows * (pages + row_cost(1, TILE)) // THRESHOLDS.short
    return max(1, min(num_sms // tiles, worth))


def _schedule(rows: int, pages: int, tiles: int, num_sms: int, batch_invariant: bool) -> Schedule:
    """Returns the schedule, a constant of the program because all lists have one length."""
    parts = _parts(rows, pages, tiles, num_sms)
    cuts, slots = _cuts(rows, pages, parts, batch_invariant)
    return Schedule(jnp.asarray(cuts), jnp.asarray(slots), None, pages)


def _splits(rows: int, pages: int, parts: int, batch_invariant: bool) -> bool:
    """Whether any list is split. If none is, CTAs share whole lists without a schedule."""
    return bool(_cuts(rows, pages, parts, batch_invariant)[1][1].any())


@functools.cache
def _cuts(rows: int, pages: int, parts: int, batch_invariant: bool) -> tuple[Any, Any]:
    make = functools.partial(
        make_schedule, parts=parts, max_pages=pages, row_cost=row_cost(1, TILE),
        merge_cost=merge_cost(1, TILE), thresholds=THRESHOLDS,
        pieces=compute_max_pieces(rows, parts) if batch_invariant else 0,
    )  # fmt: skip
    with jax.ensure_compile_time_eval():
        made = jax.jit(make)(np.full(rows, pages * PAGE, np.int32))
        return np.asarray(made.cuts), np.asarray(made.slots)
