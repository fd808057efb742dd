"""Grouped-query decode over TurboQuant pages: softmax(q K^T) V of each row's last S tokens.

Work is cut and merged as in gqa_decode: the same schedule, parts, partial results and combination.
Queries are rotated and made two e4m3 terms by XLA, once a call; nothing dense is made of the cache.

Limits: D 64, 128 or 256, pages of 16, 32, 64 or 128 tokens, q bfloat16 or float16, any preset, S
and group.
Reference: `jaxattn.ops.gqa.turboquant.turbo_attention` (implementation="xla"); tests:
tests/kernels/gqa_turbo/test_decode.py.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.arena import Arena
from jaxattn.core.dispatch import Refusal
from jaxattn.core.turboquant import TurboFormat, rotate
from jaxattn.kernels.gqa_decode.combine import combine
from jaxattn.kernels.gqa_decode.memory import DTYPES, PAGE_SIZES, block_columns
from jaxattn.kernels.gqa_decode.schedule import PairSchedule, decode_schedule, may_cut, most_steps
from jaxattn.kernels.gqa_decode.scratch import spec_of
from jaxattn.kernels.gqa_turbo.body import make_body
from jaxattn.kernels.gqa_turbo.fragments import query_terms
from jaxattn.kernels.gqa_turbo.memory import coded_view, room_of, scratch_types
from jaxattn.kernels.hopper.machine import interpret_mode, require_hopper


def refuse(q: Any, kv_cache: Any, form: TurboFormat) -> None:
    """Raises `NotImplementedError`, with the reason, where the kernel cannot run.

    Args:
        q: [B, S, H, D], an array or its shape.
        kv_cache: uint8 [..., Hk, C * slot_bytes], likewise.
    """
    page = kv_cache.shape[-1] // form.slot_bytes
    if q.dtype not in DTYPES:
        reason = f"q of bfloat16 or float16, and got {q.dtype.name}"
    elif page not in PAGE_SIZES:
        reason = f"pages of 16, 32, 64 or 128 tokens, and got {page}"
    else:
        return
    raise Refusal(f"turbo_attention: the kernel wants {reason}")


def turbo_decode_mosaic(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    form: TurboFormat,
    scale: float,
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
    """`turbo_attention` on a Hopper GPU; arguments and results are documented there, the arena and
    the schedule at `gqa_decode`."""
    require_hopper("turbo_attention", interpret=interpret)
    refuse(q, kv_cache, form)
    if layer is None:
        kv_cache, layer = kv_cache[None], 0
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    batch, q_len, num_heads, dim = q.shape
    kv_heads = kv_cache.shape[2]
    page_size, max_pages, dtype = form.page_size(kv_cache), block_tables.shape[1], q.dtype
    group, pairs = num_heads // kv_heads, batch * kv_heads
    shape: dict[str, Any] = {"q_len": q_len, "num_kv_heads": kv_heads, "window": window}
    if schedule is None:
        schedule = decode_schedule(
            seq_lens, num_heads=num_heads, head_dim=dim, max_pages=max_pages,
            page_size=page_size, interpret=interpret, **shape,
        )  # fmt: skip
    steps = most_steps(max_pages, page_size, q_len, window)
    schedule.check("turbo_attention", batch=batch, steps=steps, **shape)
    line = schedule.line
    columns, tiles = block_columns(q_len * group, dim)
    rows = columns * tiles

    def packed(x: jax.Array) -> jax.Array:
        """[B, S, H, D] as [pairs, rows, D]."""
        x = x.reshape(batch, q_len, kv_heads, group, dim).swapaxes(1, 2)
        x = x.reshape(pairs, q_len * group, dim)
        return jnp.pad(x, ((0, 0), (0, rows - q_len * group), (0, 0)))

    queries, factors = _operands(packed(q), form, tiles)
    if sinks is not None:
        sinks = jnp.tile(sinks.reshape(kv_heads, group), (1, q_len))
        sinks = jnp.pad(sinks, ((0, 0), (0, rows - q_len * group)))
    gate = None if gate is None else packed(gate)
    cache = coded_view(kv_cache, form, page_size, interpret=interpret)
    operands = [queries, cache, layer, block_tables, seq_lens, line.cuts, factors * scale]
    operands += [x for x in (line.order, query_lens, sinks, gate) if x is not None]

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
        form=form, q_len=q_len, group=group, kv_heads=kv_heads, columns=columns, out_rows=rows,
        parts=line.parts, window=window, soft_cap=soft_cap, page_size=page_size, split=split,
        ordered=line.order is not None, ragged=query_lens is not None,
        sinks=sinks is not None, gated=gate is not None, interpret=interpret,
    )  # fmt: skip
    kernel = plgpu.kernel(
        functools.partial(body, first_rows),
        out_type=tuple(jax.ShapeDtypeStruct((count, rows), jnp.float32) for count in counts),
        scratch_types=scratch_types(form, columns, page_size),
        # The last axis runs fastest: the tiles of a pair read the same pages while in L2.
        grid=(line.parts, tiles),
        grid_names=("part", "tile"),
        num_threads=room_of(form, columns, page_size).consumers + 1,
        thread_name="wg",
        kernel_name=f"turbo_decode_{form.preset}",
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


def _operands(q: jax.Array, form: TurboFormat, tiles: int) -> tuple[jax.Array, jax.Array]:
    """Of packed queries [pairs, rows, D]: e4m3 [pairs, 2 rows, D], of each tile its first terms and
    then its second ones, and the factors of their scores [pairs, rows]."""
    pairs, rows, dim = q.shape
    wide = rotate(q) if form.rotated else q.astype(jnp.float32)
    *terms, factors = query_terms(wide)
    by_tile = [x.reshape(pairs, tiles, rows // tiles, dim) for x in terms]
    return jnp.concatenate(by_tile, axis=2).reshape(pairs, 2 * rows, dim), factors
