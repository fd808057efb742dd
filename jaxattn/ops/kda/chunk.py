"""Kimi's delta rule over whole sequences, in chunks; in XLA by chunk_xla.py."""

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
    """Kimi's delta rule over whole sequences, in matmuls over chunks of tokens.

    Differentiable in reverse mode only: `jax.grad` and `jax.vjp` work, `jax.jvp` and `jax.jacfwd`
    raise TypeError. `recurrent_kda` supports both modes.

    Matmul operands have q's dtype, including keys and queries times their decays. States, gates,
    their sums and the chunk's inverse are float32.

    Args:
        q, k, v: one dtype, float32, bfloat16 or float16. Value head h uses key head
            `h // (Hv // Hk)`; published models have Hv = Hk.
        g: log decay of each channel of the key, <= 0, float32. Values may be arbitrarily small:
            -1000 or -inf clears the channel's part of the state, and 0 keeps this part exactly.
        beta, scale, initial_state, output_final_state, cu_seqlens, chunk_size, use_qk_l2norm,
            split_tokens, implementation: as in `jaxattn.gdn.chunk_gated_delta_rule`.

    Returns:
        `(o, final_state)`: o in v's dtype; final_state float32, or None unless asked for.

    Raises:
        TypeError: an argument is not an array or has a wrong dtype, or a size is not an integer; or
            the op is differentiated in forward mode.
        ValueError: a shape does not fit, or a concrete cu_seqlens decreases or passes T.
        Refusal: the requested implementation does not support the call; the message says why.

    Source: Kimi Linear (2025), in the chunk form of Yang, Kautz, Hatamizadeh (2024).
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
