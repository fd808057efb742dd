"""vLLM's store and decode of a TurboQuant cache with the argument order of `jax_triton`.

`jax_triton` passes inputs first, then outputs, so kernels here call the package's with their own
order. An array that is updated in place appears as an input and as an output. Import this module
only if triton and vllm are installed. It contains no code of theirs.
"""

import triton
from vllm.v1.attention.ops import (
    triton_decode_attention,
    triton_turboquant_decode,
    triton_turboquant_store,
)

SCORES = triton_turboquant_decode._tq_decode_stage1
MERGE = triton_decode_attention._fwd_kernel_stage2
STORE_E4M3 = triton_turboquant_store._tq_fused_store_fp8
STORE_LEVELS = triton_turboquant_store._tq_fused_store_mse


@triton.jit
def pieces(
    q,
    cache,
    tables,
    lens,
    levels,
    out,
    heads: triton.language.constexpr,
    kv_heads: triton.language.constexpr,
    dim: triton.language.constexpr,
    page: triton.language.constexpr,
    width: triton.language.constexpr,
    slot: triton.language.constexpr,
    splits: triton.language.constexpr,
    key_bits: triton.language.constexpr,
    key_bytes: triton.language.constexpr,
    packed_key: triton.language.constexpr,
    value_bits: triton.language.constexpr,
    value_bytes: triton.language.constexpr,
    scale: triton.language.constexpr,
    tokens: triton.language.constexpr,
    rotated: triton.language.constexpr,
):
    SCORES(
        q,
        cache,
        tables,
        lens,
        levels,
        out,
        heads * dim,
        dim,
        page * kv_heads * slot,
        kv_heads * slot,
        slot,
        width,
        heads * splits * (dim + 1),
        splits * (dim + 1),
        dim + 1,
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        BLOCK_SIZE=page,
        NUM_KV_SPLITS=splits,
        KV_GROUP_SIZE=heads // kv_heads,
        MSE_BITS=key_bits,
        MSE_BYTES=key_bytes,
        KPS=packed_key,
        VQB=value_bits,
        VAL_DATA_BYTES=value_bytes,
        ATTN_SCALE=scale,
        BLOCK_D=dim,
        BLOCK_KV=tokens,
        KEY_FP8=0 if rotated else 1,
        NORM_CORRECTION=1 if rotated else 0,
        FP8_E4B15=0,
    )


@triton.jit
def merged(
    pieces,
    lens,
    out,
    lse,
    heads: triton.language.constexpr,
    dim: triton.language.constexpr,
    splits: triton.language.constexpr,
):
    MERGE(
        pieces,
        out,
        lse,
        lens,
        heads * splits * (dim + 1),
        splits * (dim + 1),
        dim + 1,
        heads * dim,
        dim,
        heads,
        NUM_KV_SPLITS=splits,
        BLOCK_DV=dim,
        Lv=dim,
        OUTPUT_FP16=0,
    )


@triton.jit
def stored_levels(
    unit,
    norms,
    values,
    borders,
    slots,
    before,
    cache,
    kv_heads: triton.language.constexpr,
    dim: triton.language.constexpr,
    page: triton.language.constexpr,
    slot: triton.language.constexpr,
    key_bits: triton.language.constexpr,
    key_bytes: triton.language.constexpr,
    packed_key: triton.language.constexpr,
    value_bits: triton.language.constexpr,
    value_bytes: triton.language.constexpr,
    rounded_bytes: triton.language.constexpr,
):
    STORE_LEVELS(
        unit,
        norms,
        values,
        borders,
        cache,
        slots,
        stride_cache_block=page * kv_heads * slot,
        stride_cache_pos=kv_heads * slot,
        stride_cache_head=slot,
        D=dim,
        H=kv_heads,
        BLOCK_SIZE=page,
        BLOCK_D=dim,
        MSE_BYTES=key_bytes,
        KPS=packed_key,
        VQB=value_bits,
        VAL_DATA_BYTES=value_bytes,
        BLOCK_VAL=rounded_bytes,
        MSE_BITS=key_bits,
        N_CENTROIDS=2**key_bits,
        BLOCK_GRP=dim // 8,
    )


@triton.jit
def stored_e4m3(
    keys,
    values,
    slots,
    before,
    cache,
    kv_heads: triton.language.constexpr,
    dim: triton.language.constexpr,
    page: triton.language.constexpr,
    slot: triton.language.constexpr,
    packed_key: triton.language.constexpr,
    value_bits: triton.language.constexpr,
    value_bytes: triton.language.constexpr,
    rounded_bytes: triton.language.constexpr,
):
    STORE_E4M3(
        keys,
        values,
        cache,
        slots,
        stride_cache_block=page * kv_heads * slot,
        stride_cache_pos=kv_heads * slot,
        stride_cache_head=slot,
        D=dim,
        H=kv_heads,
        BLOCK_SIZE=page,
        BLOCK_D=dim,
        KPS=packed_key,
        VQB=value_bits,
        VAL_DATA_BYTES=value_bytes,
        BLOCK_VAL=rounded_bytes,
        BLOCK_GRP=dim // 8,
        FP8_E4B15=0,
    )
