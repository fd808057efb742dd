"""FLA's recurrence with the argument order of `jax_triton`.

`jax_triton` passes inputs first, then outputs, so a kernel here calls the package's with its own
order. Import this module only if triton and fla are installed. It contains no code of theirs.
"""

import triton
from fla.ops.gated_delta_rule import fused_recurrent

# The kernel without its heuristics; `recurrence` passes the constants that they would set.
RECURRENCE = fused_recurrent.fused_recurrent_gated_delta_rule_fwd_kernel.fn


@triton.jit
def recurrence(
    q,
    k,
    v,
    g,
    beta,
    before,
    scale,
    tokens,
    out,
    after,
    key_heads: triton.language.constexpr,
    value_heads: triton.language.constexpr,
    dim: triton.language.constexpr,
    columns: triton.language.constexpr,
):
    RECURRENCE(
        q,
        k,
        v,
        g,
        None,
        None,
        beta,
        None,
        None,
        out,
        before,
        after,
        None,
        scale,
        tokens,
        H=key_heads,
        HV=value_heads,
        K=dim,
        V=dim,
        BK=dim,
        BV=columns,
        USE_G=True,
        USE_GK=False,
        USE_GV=False,
        USE_QK_L2NORM_IN_KERNEL=True,
        IS_BETA_HEADWISE=True,
        USE_INITIAL_STATE=True,
        STORE_FINAL_STATE=True,
        STATE_V_FIRST=True,
        IS_VARLEN=False,
        USE_GATE_IN_KERNEL=False,
        HAS_DT_BIAS=False,
        APPLY_BETA_SIGMOID=False,
        ALLOW_NEG_EIGVAL=False,
    )
