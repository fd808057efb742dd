"""FlagGems' MLA decode, in the order in which `jax_triton` gives arguments.

Inputs come first, then outputs: a kernel of its own calls the package's, which has them elsewhere.
Imported only where triton and flag_gems are installed. No code of theirs is here.
"""

import triton
from flag_gems.fused import flash_mla

# What its heuristic would set is given below.
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
