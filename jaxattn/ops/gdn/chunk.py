"""The gated delta rule over whole sequences, in chunks; chunk_xla.py has the XLA reference."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxattn.core.cache.state_pool import (
    as_offsets,
)
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.reverse_mode import in_reverse_mode_only
from jaxattn.core.validation.array_checks import (
    check_integer,
    floats,
    keep_concrete,
    maybe_floats,
    output_scale,
)
from jaxattn.core.validation.varying_axes import refuse_explicit_axes
from jaxattn.kernels.gdn.prefill.launch import gdn_prefill_mosaic, refuse_prefill
from jaxattn.ops.gdn.chunk_gradient import (
    chunk_gradient,
    matrices_of_both_passes,
    with_chunk_gradient,
)
from jaxattn.ops.gdn.chunk_xla import GATED, DeltaRule, gated_delta_rule_chunks
from jaxattn.ops.gdn.recurrent import _recurrent, check_sequence


def chunk_gated_delta_rule(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    g: Float[Array, "B T Hv"],
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
    """Computes the gated delta rule over whole sequences, by matmuls over chunks of tokens.

    The op is differentiable in reverse mode only: `jax.grad` and `jax.vjp` work, `jax.jvp` and
    `jax.jacfwd` raise TypeError. `recurrent_gated_delta_rule` supports both modes.

    Matmul operands have q's dtype; states, gates, their sums and the chunk's inverse are float32.

    Args:
        q, k, v: Arrays of one dtype: float32, bfloat16 or float16.
        g: float32 log decay, <= 0, of any strength: -1000 or -inf clears the state.
        beta: Writing strength after the sigmoid; float32 keeps its precision.
        scale: Factor of the output, a Python number. None means Dk**-0.5.
        initial_state: float32 state, value-first; None means zeros. n is B, or with cu_seqlens the
            number of sequences.
        output_final_state: Whether to return the state after each sequence's last token too.
            `jaxattn.gdn.gated_delta_rule_prefill` keeps states in a pool instead.
        cu_seqlens: Token offsets of n sequences packed in one row (B = 1), starting at 0. A
            zero-length sequence keeps its initial state bit for bit. Tokens past the last offset
            are padding: they may hold NaN and their output is 0.
        chunk_size: Number of tokens per chunk, a power of two from 16 to 128.
        use_qk_l2norm: Whether to normalize q and k to `x * rsqrt(sum(x^2) + 1e-6)` first.
        split_tokens: Number of tokens of a long sequence that one CTA of the kernel processes, a
            multiple of chunk_size; the exact state transitions join the pieces. None chooses a
            number from T, n and Hv only. 0 never splits. With 0 or any other fixed number, a
            sequence's bits do not depend on what it is packed with. "xla" never splits.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernel requires Dk = Dv = 128, chunk_size 64 and bfloat16 or float16 operands.

    If the kernel runs the forward pass, kernels also compute the gradient, and treat float16 as
    bfloat16. These kernels keep two bfloat16 matrices [Dv, Dk] per chunk and head: the state and
    its gradient. In bfloat16, if each sequence is a multiple of 64 tokens and cu_seqlens is
    concrete or None, the forward pass saves 14 KiB per chunk and head for the backward pass. "xla"
    keeps one float32 state per chunk and head. Both recompute everything else from the arguments;
    their other memory grows as T x (Dk + Dv + chunk_size) per head.

    Without cu_seqlens, a token with g = 0 and k = 0 or beta = 0 leaves the state unchanged (up to
    float32 rounding if the kernel splits). Use such tokens to pad rows to one length.

    Returns:
        `(o, final_state)`: o in v's dtype; final_state float32, or None unless requested.

    Raises:
        TypeError: An argument is not an array, has a wrong dtype, or should be an integer; or the
            op is differentiated in forward mode.
        ValueError: A shape does not fit, or a concrete cu_seqlens decreases or exceeds T.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    return chunk_rule(
        "chunk_gated_delta_rule",
        GATED,
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


def chunk_rule(
    op: str,
    rule: DeltaRule,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    cu_seqlens: Array | None,
    chunk_size: int,
    use_qk_l2norm: bool,
    split_tokens: int | None,
    implementation: Implementation | None,
) -> tuple[Array, Array | None]:
    """`chunk_gated_delta_rule` for either rule; `op` is the public name, for messages."""
    q, k, v, g, beta = floats(op, q=q, k=k, v=v, g=g, beta=beta)
    initial_state = maybe_floats(op, "initial_state", initial_state)
    ends = keep_concrete(cu_seqlens)
    check_sequence(op, q, k, v, g, beta, initial_state, ends, channels=rule.channels)
    cu_seqlens = as_offsets(ends)
    check_chunks(op, chunk_size, split_tokens)
    factor = output_scale(op, scale, k.shape[-1])
    refuse_explicit_axes(op, q, k, v, g, beta, initial_state, cu_seqlens)

    def reference(q, k, v, g, beta, initial_state, cu_seqlens):
        arguments = (q, k, v, g, beta, factor, initial_state, cu_seqlens, use_qk_l2norm)
        if k.shape[1] == 0:
            return _recurrent(*arguments)
        return gated_delta_rule_chunks(*arguments, chunk_size, operands=rule.operands)[:2]

    def mosaic(interpret: bool):
        refuse_prefill(op, q, v, chunk_size, interpret=interpret)
        known = None if isinstance(ends, jax.core.Tracer) else ends

        def kernel(matrices, q, k, v, g, beta, initial_state, cu_seqlens):
            return gdn_prefill_mosaic(
                q,
                k,
                v,
                g,
                beta,
                scale=factor,
                initial_state=initial_state,
                cu_seqlens=cu_seqlens if known is None else known,  # a tracer here
                use_qk_l2norm=use_qk_l2norm,
                segment=split_tokens,
                matrices=matrices,
                interpret=interpret,
            )

        options: Any = dict(scale=factor, use_qk_l2norm=use_qk_l2norm, interpret=interpret)

        def offsets(cu_seqlens):
            return cu_seqlens if known is None else np.asarray(known)

        def matrices(*arguments):
            *tokens, _, cu_seqlens = arguments
            return matrices_of_both_passes(rule, tuple(tokens), offsets(cu_seqlens), **options)

        def backward(arguments, intermediates, cotangents):
            *tokens, initial_state, cu_seqlens = arguments
            return chunk_gradient(
                rule,
                tuple(tokens),
                initial_state,
                offsets(cu_seqlens),
                intermediates,
                cotangents,
                **options,
            )

        return run(with_chunk_gradient(op, kernel, matrices, backward))

    def run(function):
        differentiable = in_reverse_mode_only(
            op, function, instead=op.replace("chunk", "recurrent")
        )
        with jax.named_scope(op):
            o, final = differentiable(q, k, v, g, beta, initial_state, cu_seqlens)
        return o, final if output_final_state else None

    return dispatch_kernel(op, implementation, mosaic, lambda: run(reference))


def check_chunks(op: str, chunk_size: int, split_tokens: int | None) -> None:
    check_integer(op, "chunk_size", chunk_size)
    if split_tokens is not None:
        check_integer(op, "split_tokens", split_tokens)
    if chunk_size not in (16, 32, 64, 128):
        raise ValueError(f"{op}: chunk_size must be 16, 32, 64 or 128, got {chunk_size}")
    if split_tokens is not None and (split_tokens < 0 or split_tokens % chunk_size):
        raise ValueError(
            f"{op}: split_tokens must be None, 0 or a multiple of {chunk_size=}, got {split_tokens}"
        )
