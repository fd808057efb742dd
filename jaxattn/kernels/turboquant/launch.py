"""Grouped-query decode over TurboQuant pages: softmax(q K^T) V of each row's last S tokens.

Work is divided and combined as in gqa_decode: the same schedule, parts, partial results and
combine. The kernel rotates the queries and splits them into two e4m3 terms; it never dequantizes
the cache to memory.

Limits: D 64, 128 or 256, pages of 16, 32, 64 or 128 tokens, q bfloat16 or float16, any preset, S
and group.
Reference: `jaxattn.ops.turboquant.attention.turbo_attention` (implementation="xla"); tests:
tests/kernels/turboquant/test_decode.py.
"""

from typing import Any

from jaxattn.core.dispatch import Refusal
from jaxattn.core.turboquant.codec import TurboFormat
from jaxattn.kernels.gqa.decode.cta import COMPILER_PARAMS, refs_of
from jaxattn.kernels.gqa.decode.smem import DTYPES, PAGE_SIZES
from jaxattn.kernels.gqa.decode.split_kv.outputs import GqaDecodeOutputs
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.turboquant.arguments import TurboDecodeCall
from jaxattn.kernels.turboquant.mainloop import TurboDecodeConfig, TurboDecodeMainloop
from jaxattn.kernels.turboquant.smem import (
    REGISTERS,
    TurboDecodeSmem,
    coded_view,
    scratch_types,
    turbo_cta_resources,
)


def refuse(q: Any, kv_cache: Any, form: TurboFormat) -> None:
    """Raises `Refusal`, with the reason, if the kernel cannot run.

    Args:
        q: [B, S, H, D], an array or its shape.
        kv_cache: uint8 [..., Hk, C * slot_bytes], an array or its shape.
    """
    page = kv_cache.shape[-1] // form.slot_bytes
    if q.dtype not in DTYPES:
        reason = f"q in bfloat16 or float16, got {q.dtype.name}"
    elif page not in PAGE_SIZES:
        reason = f"pages of 16, 32, 64 or 128 tokens, got {page}"
    else:
        return
    raise Refusal(f"turbo_attention: the kernel needs {reason}")


def turbo_decode_mosaic(call: TurboDecodeCall, *, interpret: bool = False) -> tuple[Any, ...]:
    """`turbo_attention` on a Hopper GPU, with the same arguments and results; `gqa_decode`
    documents the arena and the schedule."""
    require_hopper("turbo_attention", interpret=interpret)
    refuse(call.q, call.kv_cache, call.form)
    call = call.stacked().scheduled(interpret=interpret)
    assert call.schedule is not None
    form, line = call.form, call.schedule.line
    queries, inputs = call.flat(call.q), call.inputs(line)
    cache = coded_view(call.kv_cache, form, call.page_size, interpret=interpret)
    results = GqaDecodeOutputs(call, line, interpret=interpret)
    room = turbo_cta_resources(form, call.columns, call.page_size)
    cut = TurboDecodeConfig(
        **results.config(), consumers=room.consumers, registers=REGISTERS[room.consumers],
        form=form, room=room,
    )  # fmt: skip
    written = launch(
        lambda **refs: TurboDecodeMainloop(cut, *refs_of(refs, TurboDecodeSmem)).run(),
        name=f"turbo_decode_{form.preset}",
        # The last axis runs fastest: the tiles of a pair read the same pages while they are in L2.
        grid={"part": line.parts, "tile": call.tiles},
        inputs={"q_ref": queries, "kv_ref": cache, **inputs, **results.inputs},
        outputs=results.outputs,
        scratch=scratch_types(form, call.columns, call.page_size, room)._asdict(),
        warpgroups=room.consumers + 1,
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
    )
    return results.finish(written)
