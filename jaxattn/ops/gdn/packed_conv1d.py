"""The causal convolution of packed sequences, split into adjacent groups of columns.

A kernel reads the convolved columns where a projection has written them, and writes each group to
an array of its own, because slices of one array would be copied.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxattn.core.dispatch import (
    Implementation,
    Refusal,
    dispatch_kernel,
    gradient_or_xla,
    with_gradient_of,
    without_gradient,
)
from jaxattn.core.numerics.rounding_barrier import rounded
from jaxattn.core.reverse_mode import in_reverse_mode_only
from jaxattn.core.validation.varying_axes import match_varying_axes
from jaxattn.kernels.gdn.conv_forward import conv_forward, refuse
from jaxattn.kernels.gdn.conv_gradient import conv_gradient
from jaxattn.ops.gdn.causal_conv1d import activated, shifted_inputs, weighted_sum


def causal_conv1d_of_segments(
    x: Float[Array, "B T C"],
    weight: Float[Array, "Dc W"],
    first: Int[Array, "#B T"] | None,
    widths: tuple[int, ...],
) -> tuple[Float[Array, "B T _"], ...]:
    """`causal_conv1d` with SiLU for rows that hold one or several sequences, each from zeros.

    The function is differentiable in reverse mode only. The backward pass reads x once and writes
    the gradient of all its columns at once.

    Args:
        x: The input. Its first Dc columns are convolved; the others are returned unchanged.
        first: The first token of each token's sequence, as in `SegmentBounds`. None means token 0.
        widths: Number of columns of each returned array, C in all. If C > Dc, one of the arrays
            must begin at column Dc.
    """
    with jax.named_scope("causal_conv1d"):
        position = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        if first is not None:
            position = position - first
        return _differentiable(*match_varying_axes((x, weight), position), position, widths)


def causal_conv1d_of_pieces(
    x: Float[Array, "B T C"],
    weight: Float[Array, "Dc W"],
    initial_state: Float[Array, "n W-1 Dc"],
    position: Int[Array, "B T"],
    sequence: Int[Array, "B T"],
    widths: tuple[int, ...],
    reference: Callable[[], tuple[Array, ...]],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T _"], ...]:
    """`causal_conv1d` with SiLU of n sequences' next tokens, which lie anywhere in x.

    Args:
        x: The input. Its first Dc columns are convolved; the others are not returned.
        position: The index of each token in its sequence's tokens, which are adjacent in a row.
        sequence: The sequence of each token, from 0 to n - 1.
        widths: Number of columns of each returned array, Dc in all.
        reference: Computes the same without the kernel.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernel has no gradient.

    Raises:
        Refusal: The requested implementation does not support this call; the message says why.
    """
    op = "causal_conv1d"

    def mosaic(interpret: bool) -> tuple[Array, ...]:
        refuse(x.reshape(-1, x.shape[2]), weight.T, widths, interpret=interpret)
        # After the check, because XLA's form has a gradient.
        operands = without_gradient(
            op,
            (x, weight, initial_state),
            "x weight initial_state",
            train_with="the layer's __call__",
        )
        flat, history = operands[0].reshape(-1, x.shape[2]), operands[2].astype(x.dtype)
        places, sequences = (each.reshape(-1).astype(jnp.int32) for each in (position, sequence))
        parts = conv_forward(
            flat,
            operands[1].T,
            places,
            widths,
            history=(history, sequences),
            interpret=interpret,
        )
        return tuple(part.reshape(*x.shape[:2], -1) for part in parts)

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, reference)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _convolved(
    x: Array, weight: Array, position: Array, widths: tuple[int, ...]
) -> tuple[Array, ...]:
    begins = list(accumulate(widths[:-1], initial=0))
    own = tuple(n for n, begin in zip(widths, begins, strict=True) if begin < len(weight))

    def part(begin: int, end: int) -> Array:
        taps = shifted_inputs(x[..., begin:end], position, weight.shape[1])
        return activated(weighted_sum(taps, weight[begin:end]), None, "silu").astype(x.dtype)

    places, flat = jnp.broadcast_to(position, x.shape[:2]), x.reshape(-1, x.shape[2])
    try:
        parts = conv_forward(flat, weight.T, places.reshape(-1), own)
        parts = tuple(each.reshape(*x.shape[:2], -1) for each in parts)
    except Refusal:  # the gradient's warning names the reason
        parts = tuple(part(*bounds) for bounds in zip(begins, accumulate(own), strict=False))
    unchanged = (
        x[..., begin : begin + n]
        for n, begin in zip(widths[len(own) :], begins[len(own) :], strict=True)
    )
    return *parts, *unchanged


def _convolved_fwd(
    x: Array, weight: Array, position: Array, widths: tuple[int, ...]
) -> tuple[tuple[Array, ...], Any]:
    return _convolved(x, weight, position, widths), (x, weight, position)


def _convolved_bwd(
    widths: tuple[int, ...], residuals: tuple[Array, ...], of_parts: tuple[Array, ...]
) -> tuple[Array, Array, None]:
    weight, operands = residuals[1], (*residuals, of_parts)
    of_x, of_taps = gradient_or_xla(_gradient_by_kernel, _gradient_of_taps, operands)
    return of_x, of_taps.T.astype(weight.dtype), None


def _kernel_of_taps(
    x: Array, weight: Array, position: Array, of_parts: tuple[Array, ...]
) -> tuple[Array, Array]:
    places = jnp.broadcast_to(position, x.shape[:2]).reshape(-1)
    flat, *of_flat = (each.reshape(-1, each.shape[2]) for each in (x, *of_parts))
    of_x, of_taps = conv_gradient(flat, of_flat, weight.T, places)
    return of_x.reshape(x.shape), of_taps


def _gradient_of_taps(
    x: Array, weight: Array, position: Array, of_parts: tuple[Array, ...]
) -> tuple[Array, Array]:
    """Computes `conv_gradient` in XLA: of_x [B, T, C] and of_taps [W, Dc]."""
    (channels, width), of_y = weight.shape, jnp.concatenate(of_parts, axis=-1)
    taps = shifted_inputs(x[..., :channels], position, width)
    _, through_silu = jax.vjp(jax.nn.silu, weighted_sum(taps, weight))
    (of_total,) = through_silu(of_y[..., :channels].astype(jnp.float32))
    # Materialized once: XLA would recompute it in each kernel that reads it, or write float32.
    of_total = rounded(of_total, x.dtype)
    wide = of_total.astype(jnp.float32)
    of_taps = jnp.stack([(wide * tap.astype(jnp.float32)).sum((0, 1)) for tap in taps])

    def of_token_before(back: int) -> Array:
        met = jnp.where((position >= back)[..., None], of_total, 0)
        return jnp.pad(met, ((0, 0), (0, back), (0, 0)))[:, back:]

    of_x = weighted_sum([of_token_before(back) for back in reversed(range(width))], weight)
    return jnp.concatenate([of_x.astype(x.dtype), of_y[..., channels:]], axis=-1), of_taps


_gradient_by_kernel = with_gradient_of(
    _gradient_of_taps,
    _kernel_of_taps,
    because="causal_conv1d: the gradient kernel has no gradient of its own",
)
_convolved.defvjp(_convolved_fwd, _convolved_bwd)
_differentiable = in_reverse_mode_only(
    "causal_conv1d_of_segments", _convolved, instead="causal_conv1d"
)
