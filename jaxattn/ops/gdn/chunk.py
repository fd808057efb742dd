"""Gated delta rule over whole sequences, in chunks; the XLA reference is in chunk_xla.py."""

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
    """Gated delta rule over whole sequences, in matmuls over chunks of tokens.

    Differentiable in reverse mode only: `jax.grad` and `jax.vjp` work, `jax.jvp` and `jax.jacfwd`
    raise TypeError. `recurrent_gated_delta_rule` supports both modes.

    Matmul operands have q's dtype; states, gates, their sums and the chunk's inverse are float32.

    Args:
        q, k, v: one dtype, float32, bfloat16 or float16.
        g: log decay, <= 0, float32. Values may be arbitrarily small: -1000 or -inf clears the
            state.
        beta: writing strength after the sigmoid; float32 keeps its precision.
        scale: factor on the output, a Python number, Dk**-0.5 if None.
        initial_state: float32, value-first; zeros if None. n is B, or with cu_seqlens the number
            of sequences.
        output_final_state: also return the state after each sequence's last token.
            `jaxattn.gdn.gated_delta_rule_prefill` takes states from a pool instead.
        cu_seqlens: token offsets of n sequences packed in one row (B = 1), starting at 0. A
            zero-length sequence keeps its initial state bit for bit. Tokens past the last offset
            are padding: they may hold NaN and their output is 0.
        chunk_size: tokens per chunk, a power of two from 16 to 128.
        use_qk_l2norm: normalize q and k to `x * rsqrt(sum(x^2) + 1e-6)` first.
        split_tokens: the number of tokens, a multiple of chunk_size, that one block of the kernel
            processes of a long sequence. The kernel joins the parts by their exact transitions.
            With None, the op chooses from T, n and Hv. 0 never splits. With 0 or any fixed number,
            a sequence's bits do not depend on the other packed sequences. "xla" never splits.
        implementation: None, "mosaic_gpu", "mosaic_gpu_interpret" or "xla". The kernel supports
            only Dk = Dv = 128, chunk_size 64 and bfloat16 or float16 operands.

    If the kernel runs the forward pass, kernels also compute the gradient, and convert float16 to
    bfloat16. They store two bfloat16 arrays [Dv, Dk] per chunk and head: the state and its
    gradient. In bfloat16, if each sequence is a multiple of 64 tokens and cu_seqlens is concrete or
    None, the forward pass also stores 14 KiB per chunk and head for the backward pass. "xla" stores
    one float32 state per chunk and head. Both implementations recompute the rest of the forward
    pass from the arguments. Their other temporary memory grows as T x (Dk + Dv + chunk_size) per
    head.

    Without cu_seqlens, a token with g = 0, and with k = 0 or beta = 0, leaves the state unchanged
    (up to float32 rounding if the kernel splits). You can pad rows of different lengths with such
    tokens.

    Returns:
        `(o, final_state)`: o in v's dtype; final_state float32, or None unless asked for.

    Raises:
        TypeError: an argument is not an array or has a wrong dtype, or a size is not an integer; or
            the op is differentiated in forward mode.
        ValueError: a shape does not fit, or a concrete cu_seqlens decreases or passes T.
        Refusal: the requested implementation does not support the call; the message says why.
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
    """`chunk_gated_delta_rule` of either rule; `op` is the public name, for messages."""
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
                cu_seqlens=cu_seqlens if known is None else known,  # here a tracer
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

        def backward(arguments, made, cotangents):
            *tokens, initial_state, cu_seqlens = arguments
            return chunk_gradient(
                rule,
                tuple(tokens),
                initial_state,
                offsets(cu_seqlens),
                made,
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
