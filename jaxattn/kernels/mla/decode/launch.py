"""MLA decode over a paged latent cache: softmax(q K^T) K[:, :kv_lora_rank], K read once.

The grid has one CTA for each (part of the schedule, tile of 64 packed rows of S tokens x H heads),
as many CTAs as run at a time. A CTA processes the pieces of rows that its part holds.
warp_specialized/kernel.py describes its body, attention/split_kv_schedule.py makes the parts, and
combine.py merges the rows that were split.

Limits: R 512 and P 64 or 0 (D 576 or 512), pages of 16, 32, 64 or 128 tokens, bfloat16 or float16,
any H and S. Few packed rows, and FP8 caches with up to 32, go to swap_ab/launch.py.
Reference: `jaxattn.mla.mla_decode` (implementation="xla"); tests:
tests/kernels/mla/decode/test_warp_specialized.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import LatentFormat
from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.attention.split_kv_schedule import TILE, few_rows, num_tiles
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import plain_copies, require_hopper
from jaxattn.kernels.mla.decode.arguments import MlaDecodeCall
from jaxattn.kernels.mla.decode.decode_schedule import PAGE_SIZES, scheduled
from jaxattn.kernels.mla.decode.latent_tile import RANK, ROPE
from jaxattn.kernels.mla.decode.outputs import MlaDecodeOutputs
from jaxattn.kernels.mla.decode.swap_ab.launch import (
    MOST_COLUMNS,
    mla_decode_swap_ab,
    refuse_swap_ab,
)
from jaxattn.kernels.mla.decode.warp_specialized.cta_context import (
    MlaDecodeConfig,
    MlaDecodeRefs,
    scratch_types,
)
from jaxattn.kernels.mla.decode.warp_specialized.kernel import MlaDecodeKernel


def takes_split_queries(num_heads: int) -> bool:
    """Whether the kernel takes the two parts of the queries separately: its tiles then have whole
    heads."""
    return num_heads % TILE == 0


def uses_swap_ab(q_len: int, num_heads: int, kv_cache: Any) -> bool:
    """Whether the swap-AB kernel, with heads as columns, serves the call: few packed rows, or an
    FP8 cache with as many as fit one CTA."""
    format = LatentFormat(kv_cache.dtype)
    if format.quantized:
        # The swap-AB kernel copies a block-scaled page as one piece of memory, this kernel as boxes
        # of a tensor.
        return q_len * num_heads <= MOST_COLUMNS and (plain_copies() or not format.block_scaled)
    return few_rows(q_len, num_heads)


def refuse(q: Any, kv_cache: Any, kv_lora_rank: int) -> None:
    """Raises `Refusal`, with the reason, if no kernel serves these shapes.

    Args:
        q: [B, S, H, D], an array or its shape.
        kv_cache: [..., N, C, Ds], an array or its shape.
    """
    _, q_len, heads, _ = q.shape
    if uses_swap_ab(q_len, heads, kv_cache):
        refuse_swap_ab(q, kv_cache, kv_lora_rank)
    else:
        _refuse_rows(q.dtype, kv_cache, kv_lora_rank)


def refuse_assembler(kv_cache: Any) -> None:
    """Raises `Refusal` if `columns` was requested and the assembler cannot copy the cache's
    pages."""
    if LatentFormat(kv_cache.dtype).block_scaled and not plain_copies():
        raise Refusal(
            "mla_decode: columns=True with a block-scaled cache needs the ptxas of CUDA 13, which "
            "jaxattn[cuda13] installs; leave columns out to use the other kernel"
        )


def _refuse_rows(dtype: Any, kv_cache: Any, kv_lora_rank: int) -> None:
    format = LatentFormat(kv_cache.dtype, RANK, ROPE)
    widths = (format.width,) if format.quantized else (RANK, RANK + ROPE)
    if kv_lora_rank != RANK or kv_cache.shape[-1] not in widths:
        raise Refusal(
            "mla_decode: the kernel needs kv_lora_rank 512 and qk_rope_head_dim 64, or 0 with a "
            f"16-bit cache, got {kv_lora_rank=} with kv_cache {kv_cache.shape}"
        )
    fits = dtype in (jnp.bfloat16, jnp.float16) and dtype == kv_cache.dtype
    if not (dtype == jnp.bfloat16 if format.quantized else fits):
        raise Refusal(
            "mla_decode: the kernel needs q and kv_cache both bfloat16 or both float16, or q "
            f"bfloat16 with an FP8 cache, got q {dtype.name}, kv_cache {kv_cache.dtype.name}"
        )


def mla_decode_mosaic(
    call: MlaDecodeCall,
    *,
    columns: bool | None = None,
    output_by_tma: bool | None = None,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """`jaxattn.mla.mla_decode` on a Hopper GPU; returns the result of `MlaDecodeOutputs.finish`.

    `columns` selects the swap-AB kernel, whose products have heads as columns, for queries in one
    array. None selects it for up to 32 packed rows of an FP8 cache, and for so few packed rows that
    it is faster, by a twentieth to a sixth.
    `output_by_tma` (see warp_specialized/cta_context.py) is faster by up to 8 us where most rows
    are whole, and slower by 3 us where they are split; None chooses by B.
    """
    require_hopper("mla_decode", interpret=interpret)
    if columns is None:
        columns = uses_swap_ab(call.q_len, call.num_heads, call.kv_cache)
    if columns:
        call = call.joined()  # the heads do not fill a tile
        refuse_swap_ab(call.q, call.kv_cache, call.kv_lora_rank)
        if not interpret:
            refuse_assembler(call.kv_cache)
    else:
        _refuse_rows(call.dtype, call.kv_cache, call.kv_lora_rank)
    if call.page_size not in PAGE_SIZES:
        raise Refusal(
            "mla_decode: the kernel needs pages of 16, 32, 64 or 128 tokens, but kv_cache "
            f"{call.kv_cache.shape} has {call.page_size}"
        )
    call = scheduled(call.stacked(), interpret=interpret)
    if columns:
        return mla_decode_swap_ab(call, interpret=interpret)
    tiles = num_tiles(call.q_len, call.num_heads)
    q_ref, q_rope_ref = _in_tiles(call, tiles * TILE)
    results = MlaDecodeOutputs(call, tiles * TILE)
    if output_by_tma is None:
        output_by_tma = 2 * call.batch >= results.parts
    output_by_tma &= results.in_whole_tiles()
    cut = MlaDecodeConfig(
        q_len=call.q_len, num_heads=call.num_heads, tiles=tiles, parts=results.parts,
        scale=call.scale, dtype=call.dtype, latents=call.format, rope=call.rope,
        first_rows=results.first_rows, output_by_tma=output_by_tma, interpret=interpret,
    )  # fmt: skip
    written = launch(
        lambda **refs: MlaDecodeKernel(cut, MlaDecodeRefs(**refs)).run(),
        name="mla_decode",
        # The last axis runs fastest: the tiles of a row read the same pages while they are in L2.
        grid={"part": results.parts, "tile": tiles},
        inputs={"q_ref": q_ref, "q_rope_ref": q_rope_ref, **call.inputs(), **results.inputs},
        outputs=results.outputs,
        scratch=scratch_types(cut, call.page_size),
        warpgroups=3,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # row reductions stay inside a warp
            # The body synchronizes warps itself, before they read what another warp has stored.
            # Automatic barriers would cost a tenth of the softmax.
            unsafe_no_auto_barriers=True,
        ),
        interpret=interpret,
    )
    return results.finish(written, interpret=interpret)


def _in_tiles(call: MlaDecodeCall, rows: int) -> tuple[jax.Array, jax.Array | None]:
    """Returns the queries in the form of `MlaDecodeRefs`, `rows` packed rows per request, and their
    rotated dims if these are separate."""
    if isinstance(call.q, tuple):
        return call.q[0].transpose(2, 0, 1, 3), call.q[1]  # the layout of the absorbed product
    batch, q_len, heads = call.given
    packed = call.q.reshape(batch, q_len * heads, -1)
    return jnp.pad(packed, ((0, 0), (0, rows - q_len * heads), (0, 0))), None
