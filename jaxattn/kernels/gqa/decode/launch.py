"""Grouped-query decode over a paged cache: softmax(q K^T) V of each row's last S tokens.

A block for each (part of the schedule, tile of packed rows), as many as the GPU runs at a time, or
more where pairs are long. A block goes through the pieces of (row, KV head) pairs of its part. What
it does is in mainloop.py and epilogue.py; split_kv/tile_scheduler.py makes the parts, and
split_kv/combine.py merges the pairs that were cut.

Limits: D 64, 128 or 256, pages of 16, 32, 64 or 128 tokens, q bfloat16 or float16, a cache of q's
dtype or float8_e4m3fn, any S and group.
Reference: `jaxattn.gqa.gqa_decode` (implementation="xla"); tests:
tests/kernels/gqa/decode/test_kernel.py.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.arena import Arena
from jaxattn.core.cache.formats import FP8
from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.kernels.gqa.decode.cta import COMPILER_PARAMS, refs_of
from jaxattn.kernels.gqa.decode.mainloop import GqaDecodeMainloop, GqaMainloopConfig
from jaxattn.kernels.gqa.decode.smem import (
    GqaDecodeSmem,
    cta_resources,
    product_dtype,
    refusal,
    scratch_types,
)
from jaxattn.kernels.gqa.decode.split_kv.outputs import GqaDecodeOutputs, GqaPacking
from jaxattn.kernels.gqa.decode.split_kv.tile_scheduler import PairSchedule, schedule_of
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper


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
    q, kv_cache, kv_scale, sinks, gate = without_gradient(
        "gqa_decode", (q, kv_cache, kv_scale, sinks, gate)
    )
    if layer is None:
        kv_cache, layer = kv_cache[None], 0
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    batch, q_len, num_heads, dim = q.shape
    layers, num_pages, _, page_size, kv_heads, _ = kv_cache.shape
    operand_dtype, fp8 = product_dtype(q.dtype, kv_cache.dtype), kv_cache.dtype == FP8
    packing = GqaPacking(batch, q_len, num_heads, dim, kv_heads)
    schedule = schedule_of(
        "gqa_decode", schedule, seq_lens, q_len=q_len, num_heads=num_heads, num_kv_heads=kv_heads,
        head_dim=dim, max_pages=block_tables.shape[1], page_size=page_size, window=window,
        interpret=interpret,
    )  # fmt: skip
    queries, gate = packing.flat(q), packing.flat(gate)
    cache = kv_cache.reshape(layers, 2 * num_pages, page_size, kv_heads * dim)
    # FP8 takes its instructions' time, and a block's start is not hidden there.
    fine = None if fp8 else schedule.fine
    results = GqaDecodeOutputs(arena, schedule, packing, q.dtype, fine=fine, interpret=interpret)
    line = results.line
    columns = packing.columns
    room = cta_resources(columns, dim, kv_cache.dtype, line.max_pages)
    cut = GqaMainloopConfig(
        q_len=q_len, group=packing.group, kv_heads=kv_heads, head_dim=dim, columns=columns,
        out_rows=packing.rows, parts=line.parts, first_rows=results.first_rows,
        scale=scale, window=window, soft_cap=soft_cap, page_size=page_size,
        consumers=room.consumers, registers=room.registers, interpret=interpret,
        batch_invariant=schedule.batch_invariant,
        dtype=operand_dtype, fp8=fp8, ahead=room.ahead,
    )  # fmt: skip
    memory = scratch_types(operand_dtype, kv_cache.dtype, columns, dim, page_size, room)
    written = launch(
        lambda **refs: GqaDecodeMainloop(cut, *refs_of(refs, GqaDecodeSmem)).run(),
        name="gqa_decode",
        # The last axis runs fastest: the tiles of a pair read the same pages while in L2.
        grid={"part": line.parts, "tile": packing.tiles},
        inputs={
            "q_ref": queries,
            "kv_ref": cache,
            "layer_ref": layer,
            "table_ref": block_tables,
            "lens_ref": seq_lens,
            "made_of_ref": schedule.seq_lens,
            "cuts_ref": line.cuts,
            "order_ref": line.order,
            "query_lens_ref": query_lens,
            "sinks_ref": sinks,
            "gate_ref": gate,
            "kv_scale_ref": kv_scale,
            "part_slots_ref": None if fine is None else fine.first_slots,
            **results.inputs,
        },
        outputs=results.outputs,
        scratch=memory._asdict(),
        warpgroups=room.consumers + 1,
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
        detect_races=detect_races,
    )
    return results.finish(written, sinks, gate, interpret=interpret, detect_races=detect_races)
