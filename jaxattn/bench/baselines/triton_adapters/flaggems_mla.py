"""FlagGems' MLA decode with the argument order of `jax_triton`.

`jax_triton` passes inputs first, then outputs, so a kernel here calls the package's with its own
order. Import this module only if triton and flag_gems are installed. It contains no code of theirs.
"""

import triton
from flag_gems.fused import flash_mla

# The kernel without its heuristics; `attention` passes the constant that they would set.
ATTENTION = flash_mla.flash_mla_attn_kernel.fn


@triton.jit
def attention(
    q,
    cache,
    tables,
    lens,
    scale,
    out,
    heads: triton.language.constexpr,
    width: triton.language.constexpr,
    page: triton.language.constexpr,
    rank: triton.language.constexpr,
    dim: triton.language.constexpr,
    block_heads: triton.language.constexpr,
    block_tokens: triton.language.constexpr,
):
    ATTENTION(
        q,
        cache,
        tables,
        lens,
        out,
        scale,
        heads,
        heads * dim,
        dim,
        dim,
        width,
        heads * rank,
        rank,
        1,
        BLOCK_H=block_heads,
        BLOCK_N=block_tokens,
        EVEN_H=heads % block_heads == 0,
        PAGE_SIZE=page,
        HEAD_DIM_V=rank,
        HEAD_DIM=dim,
    )
