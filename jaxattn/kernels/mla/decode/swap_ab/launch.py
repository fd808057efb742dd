"""MLA decode for few query rows and for FP8 caches: heads are the columns of the products (swap
AB).

`mla_decode` pads S * H packed rows to tiles of 64. Here a CTA takes the packed rows as they are, up
to 32; where there are more, another CTA reads the pages again. In kernel.py two warpgroups take in
turns the pages that attention/work_iterator.py assigns to the CTA. fp8_register_operands.py widens
FP8 pages. The schedule, the output and the split-KV combine are those of `mla_decode`.

Limits: R 512 and P 64 or 0 (D 576 or 512), pages of 16, 32, 64 or 128 tokens, any H and S. Queries
and cache of bfloat16 or float16; or, with P 64, bfloat16 queries and a float8_e4m3fn or uint8
(block-scaled) cache.
Reference: `jaxattn.mla.mla_decode` (implementation="xla"); tests:
tests/kernels/mla/decode/test_swap_ab.py.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import LatentFormat
from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.attention.split_kv_schedule import packed_rows
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.mla.decode.arguments import MlaDecodeCall
from jaxattn.kernels.mla.decode.latent_tile import RANK, ROPE
from jaxattn.kernels.mla.decode.outputs import MlaDecodeOutputs
from jaxattn.kernels.mla.decode.swap_ab.cta_context import SwapAbConfig, SwapAbRefs
from jaxattn.kernels.mla.decode.swap_ab.fp8_register_operands import order_queries
from jaxattn.kernels.mla.decode.swap_ab.kernel import SwapAbKernel
from jaxattn.kernels.mla.decode.swap_ab.smem import WARPGROUPS, scratch_types

# The 512 * 32 float32 numbers of the output take 128 registers of each thread of a warpgroup.
MOST_COLUMNS = 32


def block_columns(q_len: int, num_heads: int) -> tuple[int, int]:
    """Returns (packed rows of a CTA, a multiple of 8; CTAs that share a request's rows)."""
    rows = q_len * num_heads
    blocks = -(-rows // MOST_COLUMNS)
    return -(-rows // (8 * blocks)) * 8, blocks


def refuse_swap_ab(q: Any, kv_cache: Any, kv_lora_rank: int) -> None:
    """Raises `Refusal`, with the reason, if this kernel cannot run."""
    rank, rope = kv_lora_rank, q.shape[-1] - kv_lora_rank
    quantized = LatentFormat(kv_cache.dtype, rank, rope).quantized
    if rank != RANK or rope not in ((ROPE,) if quantized else (0, ROPE)):
        raise Refusal(
            "mla_decode: the kernel needs kv_lora_rank 512 and qk_rope_head_dim 64 (D=576), or 0 "
            f"with a 16-bit cache (D=512), got kv_lora_rank={rank} with D={rank + rope} and a "
            f"{kv_cache.dtype.name} cache"
        )
    if quantized:
        fits = q.dtype == jnp.bfloat16
    else:
        fits = q.dtype in (jnp.bfloat16, jnp.float16) and q.dtype == kv_cache.dtype
    if not fits:
        raise Refusal(
            "mla_decode: the kernel needs q and kv_cache both bfloat16 or both float16, or q "
            f"bfloat16 with an FP8 cache, got q {q.dtype.name}, kv_cache {kv_cache.dtype.name}"
        )


def mla_decode_swap_ab(call: MlaDecodeCall, *, interpret: bool) -> tuple[Any, ...]:
    """`mla_decode_mosaic` for a call that `refuse_swap_ab` accepts: its queries are in one array,
    and it has layers and a schedule."""
    assert not isinstance(call.q, tuple)
    batch, q_len, num_heads = call.shape
    columns, blocks = block_columns(q_len, num_heads)
    rows = q_len * num_heads

    packed = call.q.reshape(batch, rows, -1)
    packed = jnp.pad(packed, ((0, 0), (0, columns * blocks - rows), (0, 0)))
    if call.format.quantized and not interpret:
        packed = order_queries(packed)
    inputs = call.inputs()
    results = MlaDecodeOutputs(call, packed_rows(q_len, num_heads))
    cut = SwapAbConfig(
        q_len=q_len, num_heads=num_heads, columns=columns, parts=results.parts,
        out_rows=results.rows, first_rows=results.first_rows, scale=call.scale, dtype=call.dtype,
        page_size=call.page_size, latents=call.format, rope=call.rope, interpret=interpret,
    )  # fmt: skip
    written = launch(
        lambda **refs: SwapAbKernel(cut, SwapAbRefs(**refs)).run(),
        name="mla_decode_columns",
        # The last axis runs fastest: the CTAs of a row read the same pages while they are in L2.
        grid={"part": results.parts, "tile": blocks},
        inputs={"q_ref": packed, **inputs, **results.inputs},
        outputs=results.outputs,
        scratch=scratch_types(
            call.dtype, columns, call.page_size, call.format.dtype, with_rope=call.rope
        ),
        warpgroups=WARPGROUPS,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # reductions stay inside a warp
            unsafe_no_auto_barriers=True,  # the body synchronizes warps itself
            # The body names its layouts; layout inference does not find those of padded shared
            # memory.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )
    return results.finish(written, interpret=interpret)
