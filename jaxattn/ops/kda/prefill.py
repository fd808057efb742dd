"""Kimi's chunked delta rule on a state pool: prompts start from slots and end in slots."""

from jaxtyping import Array, Bool, Float, Int

from jaxattn.core.dispatch import Implementation
from jaxattn.ops.gdn.prefill import prefill_rule
from jaxattn.ops.gdn.prefill_options import Checkpoints, OutputNorm
from jaxattn.ops.kda.chunk_xla import KIMI


def kda_prefill(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    g: Float[Array, "B T Hv Dk"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "*L Z Hv Dv Dk"],
    state_indices: Int[Array, " n"],
    *,
    write_indices: Int[Array, " n"] | None = None,
    has_initial_state: Bool[Array, " n"] | None = None,
    cu_seqlens: Int[Array, " n+1"] | None = None,
    layer: int | Int[Array, ""] | None = None,
    checkpoints: Checkpoints | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    use_qk_l2norm: bool = True,
    split_tokens: int | None = None,
    output_norm: OutputNorm | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "*L Z Hv Dv Dk"]]:
    """`chunk_kda` that reads and writes each sequence's state in a pool.

    The op is differentiable in reverse mode only, and only with "xla".

    Args:
        q, k, v, g, beta, cu_seqlens, scale, chunk_size, split_tokens: As in `chunk_kda`; n is B, or
            with cu_seqlens the number of sequences.
        state, state_indices, write_indices, has_initial_state, layer, checkpoints: As in
            `jaxattn.gdn.gated_delta_rule_prefill`.
        use_qk_l2norm: Whether to normalize q and k to `x * rsqrt(sum(x^2) + 1e-6)` first.
        output_norm: If given, o becomes `o / rms(o) * weight * sigmoid(z)` over Dv, in float32. z
            is in the gate's last Hv * Dv columns, head after head.

    Returns:
        `(o, state)`; o is `[B, T, Hv, Dv]` in v's dtype.

    Raises:
        TypeError: An argument is not an array, has a wrong dtype, or should be an integer.
        ValueError: A shape does not fit, a concrete cu_seqlens decreases or exceeds T, or concrete
            slots lie outside the pool or collide.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    return prefill_rule(
        "kda_prefill",
        KIMI,
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices,
        write_indices=write_indices,
        has_initial_state=has_initial_state,
        cu_seqlens=cu_seqlens,
        layer=layer,
        checkpoints=checkpoints,
        scale=scale,
        chunk_size=chunk_size,
        use_qk_l2norm=use_qk_l2norm,
        split_tokens=split_tokens,
        output_norm=output_norm,
        implementation=implementation,
    )
