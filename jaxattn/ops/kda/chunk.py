"""Kimi's delta rule over whole sequences, in chunks; chunk_xla.py has the XLA path."""

from jaxtyping import Array, Float, Int

from jaxattn.core.dispatch import Implementation
from jaxattn.ops.gdn.chunk import chunk_rule
from jaxattn.ops.kda.chunk_xla import KIMI


def chunk_kda(
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
    chunk_size: int = 64,
    use_qk_l2norm: bool = False,
    split_tokens: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "n Hv Dv Dk"] | None]:
    """Computes Kimi's delta rule over whole sequences, by matmuls over chunks of tokens.

    The op is differentiable in reverse mode only: `jax.grad` and `jax.vjp` work, `jax.jvp` and
    `jax.jacfwd` raise TypeError. `recurrent_kda` supports both modes.

    Matmul operands have q's dtype, including keys and queries times their decays. States, gates,
    their sums and the chunk's inverse are float32.

    Args:
        q, k, v: Arrays of one dtype: float32, bfloat16 or float16. Value head h uses key head
            `h // (Hv // Hk)`; published models have Hv = Hk.
        g: float32 log decay of each channel of the key, <= 0, of any strength: -1000 or -inf clears
            the channel's part of the state, and 0 keeps it exactly.
        beta, scale, initial_state, output_final_state, cu_seqlens, chunk_size, use_qk_l2norm,
            split_tokens, implementation: As in `jaxattn.gdn.chunk_gated_delta_rule`.

    Returns:
        `(o, final_state)`: o in v's dtype; final_state float32, or None unless requested.

    Raises:
        TypeError: An argument is not an array, has a wrong dtype, or should be an integer; or the
            op is differentiated in forward mode.
        ValueError: A shape does not fit, or a concrete cu_seqlens decreases or exceeds T.
        Refusal: The requested implementation does not support this call; the message says why.

    Source: Kimi Linear (2025), in the chunked form of Yang, Kautz, Hatamizadeh (2024).
    """
    return chunk_rule(
        "chunk_kda",
        KIMI,
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        use_qk_l2norm=use_qk_l2norm,
        split_tokens=split_tokens,
        implementation=implementation,
    )
