"""Grouped-query decode over a paged cache: softmax(q K^T) V of each row's last S tokens.

A block for each (part of the schedule, tile of packed rows), as many as the GPU runs at a time; a
block goes through the pieces of (row, KV head) pairs that its part holds. What it does is in
body.py and merge.py; schedule.py makes the parts, and combine.py merges the pairs that were cut.

Limits: D 64, 128 or 256, pages of 16, 32, 64 or 128 tokens, q bfloat16 or float16, a cache of q's
dtype or float8_e4m3fn, any S and group.
Reference: `jaxattn.gqa.gqa_decode` (implementation="xla"); tests:
tests/kernels/gqa_decode/test_kernel.py.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.arena import Arena
from jaxattn.core.dispatch import Refusal
from jaxattn.core.formats import FP8
from jaxattn.kernels.gqa_decode.body import make_body
from jaxattn.kernels.gqa_decode.combine import combine
from jaxattn.kernels.gqa_decode.fp8 import half_queries
from jaxattn.kernels.gqa_decode.memory import (
    CONSUMERS,
    block_columns,
    product_dtype,
    refusal,
    scratch_types,
    steps_ahead,
)
from jaxattn.kernels.gqa_decode.schedule import PairSchedule, decode_schedule, may_cut, most_steps
from jaxattn.kernels.gqa_decode.scratch import spec_of
from jaxattn.kernels.hopper.machine import interpret_mode, require_hopper


def refuse(q: Any, kv_cache: Any) -> None:
    """Raises `Refusal`, with the reason, where the kernel cannot run.

    Args:
        q: [B, S, H, D], an array or its shape.
        kv_cache: [..., N, 2, C, Hk, D], likewise.
    """
    reason = refusal(q.dtype, kv_cache.dtype, q.shape[-1], kv_cache.shape[-3])
    if reason is not None:
        raise Refusal(f"gqa_decode: the kernel wants {reason}")


def gqa_decode_mosaic(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    kv_scale: jax.Array | None = None,
    layer: jax.Array | int | None = None,
    query_lens: jax.Array | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    gate: jax.Array | None = None,
    arena: Arena | None = None,
    schedule: PairSchedule | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[Any, ...]:
    """`jaxattn.gqa.gqa_decode` on a Hopper GPU; arguments and results are documented there.

    `kv_scale` is float32 [2, Hk] with a float8_e4m3fn cache, and None with others.
    """
    require_hopper("gqa_decode", interpret=interpret)
    refuse(q, kv_cache)
    if layer is None:
        kv_cache, layer = kv_cache[None], 0
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    batch, q_len, num_heads, dim = q.shape
    layers, num_pages, _, page_size, kv_heads, _ = kv_cache.shape
    max_pages, dtype = block_tables.shape[1], q.dtype
    operand_dtype, fp8 = product_dtype(dtype, kv_cache.dtype), kv_cache.dtype == FP8
    group, pairs = num_heads // kv_heads, batch * kv_heads
    shape: dict[str, Any] = {"q_len": q_len, "num_kv_heads": kv_heads, "window": window}
    if schedule is None:
        schedule = decode_schedule(
            seq_lens, num_heads=num_heads, head_dim=dim, max_pages=max_pages,
            page_size=page_size, interpret=interpret, **shape,
        )  # fmt: skip
    steps = most_steps(max_pages, page_size, q_len, window)
    schedule.check("gqa_decode", batch=batch, steps=steps, **shape)
    line = schedule.line
    columns, tiles = block_columns(q_len * group, dim)
    rows = columns * tiles

    def packed(x: jax.Array) -> jax.Array:
        """[B, S, H, D] as [pairs, rows, D]."""
        x = x.reshape(batch, q_len, kv_heads, group, dim).swapaxes(1, 2)
        x = x.reshape(pairs, q_len * group, dim)
        return jnp.pad(x, ((0, 0), (0, rows - q_len * group), (0, 0)))

    if sinks is not None:
        sinks = jnp.tile(sinks.reshape(kv_heads, group), (1, q_len))
        sinks = jnp.pad(sinks, ((0, 0), (0, rows - q_len * group)))
    gate = None if gate is None else packed(gate)
    cache = kv_cache.reshape(layers, 2 * num_pages, page_size, kv_heads * dim)
    queries, factors, value_scale = packed(q), None, None
    if fp8:
        assert kv_scale is not None
        queries, factors = half_queries(queries)
        factors *= jnp.tile(kv_scale[0], batch)[:, None] * scale
        value_scale = kv_scale[1]
    operands = [queries, cache, layer, block_tables, seq_lens, line.cuts]
    given = (line.order, query_lens, sinks, gate, factors, value_scale)
    operands += [x for x in given if x is not None]

    split = may_cut(pairs, line.parts, line.max_pages)
    spec = spec_of(pairs, rows, dim, dtype, line.parts, split)
    regions = dict(spec.regions)
    names = ["out", *(["partial_out"] if split else [])]
    if arena is None:
        kinds = [regions[name] for name in names]
        lanes = [(jnp.empty((math.prod(x.shape) // dim, dim), x.dtype), 0) for x in kinds]
    else:
        lanes = [arena.lane(spec, name, width=dim) for name in names]
    refs, first_rows = [jax.new_ref(lane) for lane, _ in lanes], [first for _, first in lanes]
    counts = [pairs, *([2 * line.parts] if split else [])]

    body = make_body(
        q_len=q_len, group=group, kv_heads=kv_heads, head_dim=dim, columns=columns, out_rows=rows,
        parts=line.parts, scale=scale, window=window, soft_cap=soft_cap,
        dtype=operand_dtype, fp8=fp8, page_size=page_size,
        ahead=steps_ahead(columns, dim, kv_cache.dtype), split=split,
        ordered=line.order is not None, ragged=query_lens is not None,
        sinks=sinks is not None, gated=gate is not None, interpret=interpret,
    )  # fmt: skip
    kernel = plgpu.kernel(
        functools.partial(body, first_rows),
        out_type=tuple(jax.ShapeDtypeStruct((count, rows), jnp.float32) for count in counts),
        scratch_types=scratch_types(operand_dtype, kv_cache.dtype, columns, dim, page_size),
        # The last axis runs fastest: the tiles of a pair read the same pages while in L2.
        grid=(line.parts, tiles),
        grid_names=("part", "tile"),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name="gqa_decode",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # reductions stay inside a warp
            unsafe_no_auto_barriers=True,  # the body says where warps wait for each other
            # The body names its layouts; those of padded shared memory are not found by inference.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret_mode(interpret, detect_races=detect_races),
    )
    with jax.enable_x64(False):  # the kernel's integers are int32
        lses = kernel(*operands, *refs)
    lse = lses[0]
    if split:
        lse = combine(
            refs, first_rows, lse, lses[1], line, sinks, gate,
            kv_heads=kv_heads, interpret=interpret, detect_races=detect_races,
        )  # fmt: skip

    written = {name: jax.freeze(ref) for name, ref in zip(names, refs, strict=True)}
    if arena is None:
        out = written["out"].reshape(pairs, rows, dim)
    else:
        for name, lane in written.items():
            arena = arena.with_lane(spec, name, lane)
        out = arena.read(spec, "out")

    def unpacked(x: jax.Array) -> jax.Array:
        x = x[:, : q_len * group].reshape(batch, kv_heads, q_len, group, *x.shape[2:])
        return x.swapaxes(1, 2).reshape(batch, q_len, num_heads, *x.shape[4:])

    out, lse = unpacked(out), unpacked(lse)
    return (out, lse) if arena is None else (out, lse, arena)
