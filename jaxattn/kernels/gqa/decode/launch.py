"""Grouped-query decode over a paged cache: softmax(q K^T) V of each row's last S tokens.

The grid has one CTA for each (part of the schedule, tile of packed rows): as many as the GPU runs
at a time, or more if pairs are long. A CTA processes the pieces of (row, KV head) pairs in its
part. Its body is in mainloop.py and epilogue.py. The parts come from split_kv/decode_schedule.py,
and split_kv/combine.py merges the pairs that were split.

Limits: D 64, 128 or 256, pages of 16, 32, 64 or 128 tokens, q bfloat16 or float16, a cache of q's
dtype or float8_e4m3fn, any S and group.
Reference: `jaxattn.gqa.gqa_decode` (implementation="xla"); tests:
tests/kernels/gqa/decode/test_kernel.py.
"""

from typing import Any

from jaxattn.core.cache.formats import FP8
from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.gqa.decode.arguments import GqaDecodeCall
from jaxattn.kernels.gqa.decode.cta import COMPILER_PARAMS, refs_of
from jaxattn.kernels.gqa.decode.mainloop import GqaDecodeMainloop, GqaMainloopConfig
from jaxattn.kernels.gqa.decode.smem import (
    GqaDecodeSmem,
    cta_resources,
    product_dtype,
    refusal,
    scratch_types,
)
from jaxattn.kernels.gqa.decode.split_kv.outputs import GqaDecodeOutputs
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper


def refuse(q: Any, kv_cache: Any) -> None:
    """Raises `Refusal`, with the reason, if the kernel cannot run.

    Args:
        q: [B, S, H, D], an array or its shape.
        kv_cache: [..., N, 2, C, Hk, D], an array or its shape.
    """
    reason = refusal(q.dtype, kv_cache.dtype, q.shape[-1], kv_cache.shape[-3])
    if reason is not None:
        raise Refusal(f"gqa_decode: the kernel needs {reason}")


def gqa_decode_mosaic(call: GqaDecodeCall, *, interpret: bool = False) -> tuple[Any, ...]:
    """`jaxattn.gqa.gqa_decode` on a Hopper GPU, with the same arguments and results."""
    require_hopper("gqa_decode", interpret=interpret)
    refuse(call.q, call.kv_cache)
    call = call.stacked().scheduled(interpret=interpret)
    schedule, kv_cache = call.schedule, call.kv_cache
    assert schedule is not None
    operand_dtype, fp8 = product_dtype(call.q.dtype, kv_cache.dtype), kv_cache.dtype == FP8
    # FP8 is bound by instructions, which do not hide the start of a CTA.
    fine = None if fp8 else schedule.fine
    line = schedule.line if fine is None else fine.line
    queries, inputs = call.flat(call.q), call.inputs(line)
    cache = kv_cache.reshape(len(kv_cache), -1, call.page_size, call.kv_heads * call.head_dim)
    results = GqaDecodeOutputs(call, line, interpret=interpret)
    room = cta_resources(call.columns, call.head_dim, kv_cache.dtype, line.max_pages)
    cut = GqaMainloopConfig(
        **results.config(), consumers=room.consumers, registers=room.registers,
        dtype=operand_dtype, fp8=fp8, ahead=room.ahead,
    )  # fmt: skip
    memory = scratch_types(
        operand_dtype, kv_cache.dtype, call.columns, call.head_dim, call.page_size, room
    )
    written = launch(
        lambda **refs: GqaDecodeMainloop(cut, *refs_of(refs, GqaDecodeSmem)).run(),
        name="gqa_decode",
        # The last axis runs fastest: the tiles of a pair read the same pages while they are in L2.
        grid={"part": line.parts, "tile": call.tiles},
        inputs={
            "q_ref": queries,
            "kv_ref": cache,
            **inputs,
            "part_slots_ref": None if fine is None else fine.first_slots,
            **results.inputs,
        },
        outputs=results.outputs,
        scratch=memory._asdict(),
        warpgroups=room.consumers + 1,
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
    )
    return results.finish(written)
