"""Grouped-query decode over TurboQuant pages: softmax(q K^T) V of each row's last S tokens.

Work is cut and merged as in gqa_decode: the same schedule, parts, partial results and combination.
The kernel rotates the queries and makes them two e4m3 terms; nothing dense is made of the cache.

Limits: D 64, 128 or 256, pages of 16, 32, 64 or 128 tokens, q bfloat16 or float16, any preset, S
and group.
Reference: `jaxattn.ops.turboquant.attention.turbo_attention` (implementation="xla"); tests:
tests/kernels/turboquant/test_decode.py.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.arena import Arena
from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.core.turboquant.codec import TurboFormat
from jaxattn.kernels.gqa.decode.cta import COMPILER_PARAMS, refs_of
from jaxattn.kernels.gqa.decode.smem import DTYPES, PAGE_SIZES
from jaxattn.kernels.gqa.decode.split_kv.outputs import GqaDecodeOutputs, GqaPacking
from jaxattn.kernels.gqa.decode.split_kv.tile_scheduler import PairSchedule, schedule_of
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.turboquant.mainloop import TurboDecodeConfig, TurboDecodeMainloop
from jaxattn.kernels.turboquant.smem import (
    REGISTERS,
    TurboDecodeSmem,
    coded_view,
    scratch_types,
    turbo_cta_resources,
)


def refuse(q: Any, kv_cache: Any, form: TurboFormat) -> None:
    """Raises `Refusal`, with the reason, where the kernel cannot run.

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
    q, sinks, gate = without_gradient("turbo_attention", (q, sinks, gate))
    if layer is None:
        kv_cache, layer = kv_cache[None], 0
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    batch, q_len, num_heads, dim = q.shape
    kv_heads, page_size = kv_cache.shape[2], form.page_size(kv_cache)
    packing = GqaPacking(batch, q_len, num_heads, dim, kv_heads)
    schedule = schedule_of(
        "turbo_attention", schedule, seq_lens, q_len=q_len, num_heads=num_heads,
        num_kv_heads=kv_heads, head_dim=dim, max_pages=block_tables.shape[1], page_size=page_size,
        window=window, interpret=interpret,
    )  # fmt: skip
    queries, gate = packing.flat(q), packing.flat(gate)
    cache = coded_view(kv_cache, form, page_size, interpret=interpret)
    line = schedule.line
    results = GqaDecodeOutputs(arena, schedule, packing, q.dtype, interpret=interpret)
    columns = packing.columns
    room = turbo_cta_resources(form, columns, page_size)
    cut = TurboDecodeConfig(
        q_len=q_len, group=packing.group, kv_heads=kv_heads, head_dim=dim, columns=columns,
        out_rows=packing.rows, parts=line.parts, first_rows=results.first_rows, scale=scale,
        window=window, soft_cap=soft_cap, page_size=page_size, consumers=room.consumers,
        registers=REGISTERS[room.consumers], interpret=interpret, form=form, room=room,
        batch_invariant=schedule.batch_invariant,
    )  # fmt: skip
    written = launch(
        lambda **refs: TurboDecodeMainloop(cut, *refs_of(refs, TurboDecodeSmem)).run(),
        name=f"turbo_decode_{form.preset}",
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
            **results.inputs,
        },
        outputs=results.outputs,
        scratch=scratch_types(form, columns, page_size, room)._asdict(),
        warpgroups=room.consumers + 1,
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
        detect_races=detect_races,
    )
    return results.finish(written, sinks, gate, interpret=interpret, detect_races=detect_races)
