"""Kimi's delta rule token by token: the definition."""

from jaxtyping import Array, Float, Int

from jaxattn.core.dispatch import Implementation
from jaxattn.ops.gdn.recurrent import recurrent_rule


def recurrent_kda(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    g: Float[Array, "B T Hv Dk"],
    beta: Float[Array, "B T Hv"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "n Hv Dv Dk"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Array, " n+1"] | None = None,
    use_qk_l2norm: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "n Hv Dv Dk"] | None]:
    """Computes `chunk_kda` one token at a time, in float32: the definition of the rule.

    Use it for a few tokens, and as a reference. Arguments, results and errors are those of
    `chunk_kda`, except that `scale` may be traced. The op is differentiable in both modes; reverse
    mode saves one state per token. There is no kernel.
    """
    return recurrent_rule(
        "recurrent_kda",
        q,
        k,
        v,
        g,
        beta,
        channels=True,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm=use_qk_l2norm,
        implementation=implementation,
    )
