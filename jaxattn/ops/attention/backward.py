"""Gradients of causal attention: gate, sinks and padding around the backward kernel, and residuals.

Besides its operands the backward pass reads the saved output and LSE, so no forward kernel runs
twice. Under `jax.checkpoint` both have the names in `RESIDUALS`, for policies such as
`jax.checkpoint_policies.save_only_these_names`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxattn.core.dispatch import without_gradient
from jaxattn.core.reverse_mode import in_reverse_mode_only
from jaxattn.kernels.attention.backward.launch import attention_backward

RESIDUALS = ("attention_out", "attention_lse")


class CausalOperands(NamedTuple):
    """The differentiable operands of causal attention, and the bounds of its sequences.

    Attributes:
        q: [B, T, H, D].
        k, v: [B, T, Hk, D] and [B, T, Hk, Dv].
        k_rest: [B, T, P], the last of the keys' dims if all heads share them, or None.
        sinks, gate: As for `gqa_decode`.
        lengths, first: Those of `SegmentBounds`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    k_rest: jax.Array | None
    sinks: jax.Array | None
    gate: jax.Array | None
    lengths: jax.Array
    first: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalScoring:
    """The static options of causal attention.

    Attributes:
        scale, window, soft_cap: As for `gqa_decode`.
        all_valid: Whether every row is known to have T valid tokens, so that there is no padding.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    all_valid: bool

    def first_visible(self, first: jax.Array | None, tokens: int) -> jax.Array | None:
        """Returns the first key that each token sees, with the window applied, [B, T] or [1, T]."""
        if self.window is None:
            return first
        begin = jnp.maximum(jnp.arange(tokens, dtype=jnp.int32) - (self.window - 1), 0)[None]
        return begin if first is None else jnp.maximum(first, begin)


type Attend = Callable[[CausalOperands], tuple[jax.Array, jax.Array]]


def with_backward_kernel(
    op: str, forward: Attend, scores: CausalScoring, *, interpret: bool
) -> Attend:
    """Gives `forward`, which returns (out, lse) by a kernel, the backward kernel's gradient."""
    differentiable = jax.custom_vjp(forward)

    def keep(operands: CausalOperands) -> Any:
        # Not `forward`, so that a second differentiation raises this function's error too.
        out, lse = map(checkpoint_name, differentiable(operands), RESIDUALS)
        return (out, lse), (operands, out, lse)

    def backward(residuals: Any, cotangents: Any) -> tuple[CausalOperands]:
        operands = without_gradient(f"the gradient of {op}", (*residuals, *cotangents))
        return (_backward(scores, interpret, *operands),)

    differentiable.defvjp(keep, backward)
    return in_reverse_mode_only(op, differentiable, instead="pass implementation='xla'")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(
    scores: CausalScoring,
    interpret: bool,
    operands: CausalOperands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
) -> CausalOperands:
    """Returns the operands' gradients, with None for operands without one."""
    q, k, v, k_rest, sinks, gate, lengths, first = operands
    is_valid = (jnp.arange(q.shape[1]) < lengths[:, None])[..., None]

    def kept(x: jax.Array) -> jax.Array:
        """Returns x with zeros for padding, which may be NaN."""
        return (
            x
            if scores.all_valid
            else jnp.where(is_valid.reshape(is_valid.shape[:2] + (1,) * (x.ndim - 2)), x, 0)
        )

    d_out, d_lse = map(kept, (d_out, d_lse))
    product = d_out.astype(jnp.float32) * out.astype(jnp.float32)
    # The sum is the same for the output before the gate: the factor that the gate divides out of
    # one array multiplies the other.
    delta = product.sum(axis=-1) - d_lse
    d_gate = None
    if gate is not None:
        opens = jax.nn.sigmoid(kept(gate).astype(q.dtype).astype(jnp.float32))
        d_gate = kept(product * (1 - opens)).astype(gate.dtype)
        d_out = (d_out * opens).astype(q.dtype)
    d_sinks = None
    if sinks is not None:
        # A sink is a key without a value: its score's gradient is its weight times -delta.
        weight = jnp.exp(sinks - jnp.where(lse == -jnp.inf, jnp.inf, lse))
        d_sinks = -(weight * delta).sum(axis=(0, 1))
    grads = attention_backward(
        kept(q), kept(k), kept(v), d_out, lse, delta, lengths,
        scale=scores.scale, soft_cap=scores.soft_cap, first=scores.first_visible(first, q.shape[1]),
        k_rest=None if k_rest is None else kept(k_rest), interpret=interpret,
    )  # fmt: skip
    d_rest = None if k_rest is None else grads.dk_rest.astype(k_rest.dtype)  # type: ignore[union-attr]
    return CausalOperands(grads.dq, grads.dk, grads.dv, d_rest, d_sinks, d_gate, None, None)  # type: ignore[arg-type]
