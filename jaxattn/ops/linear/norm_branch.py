"""A residual stream beside its RMS norm, whose gradients one kernel adds up."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn.core.dispatch import Refusal, warn_of_gradient, with_gradient_of
from jaxattn.core.numerics.rms_norm import rms_norm
from jaxattn.core.reverse_mode import in_reverse_mode_only
from jaxattn.core.validation.varying_axes import match_varying_axes
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.linear.rms_norm_gradient import rms_norm_gradient

OP = "rms_norm_branch"


def rms_norm_branch(
    x: Float[Array, "*T F"],
    weight: Float[Array, " F"],
    *,
    eps: float,
    gradient_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "*T F"], Float[Array, "*T F"]]:
    """Returns (x, `rms_norm(x, weight, eps)` in float32), for a residual layer `x + f(norm(x))`.

    On a Hopper GPU a kernel computes the gradient of x by both ways in one pass. The function is
    then differentiable in reverse mode only. Elsewhere XLA computes the gradient in either mode.

    Args:
        gradient_dtype: Dtype to which the kernel's caller rounds the gradient of the norm, as the
            products behind it give that dtype. None does not round.
    """
    with jax.named_scope(OP):
        try:
            require_hopper(OP, interpret=False)
        except Refusal:
            return x, rms_norm(x, weight, eps)
        dtype = jnp.dtype(jnp.float32 if gradient_dtype is None else gradient_dtype)
        return _differentiable(*match_varying_axes((x, weight)), eps, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _branch(x: Array, weight: Array, eps: float, gradient_dtype: Any) -> tuple[Array, Array]:
    return x, rms_norm(x, weight, eps)


def _branch_fwd(
    x: Array, weight: Array, eps: float, gradient_dtype: Any
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    return _branch(x, weight, eps, gradient_dtype), (x, weight)


def _branch_bwd(
    eps: float, gradient_dtype: Any, residuals: tuple[Array, Array], cotangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    x, weight = residuals

    def by_xla(x: Array, weight: Array, of_stream: Array, of_y: Array) -> tuple[Array, Array]:
        _, pull = jax.vjp(lambda x, weight: (x, rms_norm(x, weight, eps)), x, weight)
        of_x, of_weight = pull((of_stream, of_y))
        return of_x, of_weight

    def by_kernel(x: Array, weight: Array, of_stream: Array, of_y: Array) -> tuple[Array, Array]:
        tokens, given, added = (each.reshape(-1, x.shape[-1]) for each in (x, of_y, of_stream))
        of_x, _, of_weight = rms_norm_gradient(
            tokens, weight, [given.astype(gradient_dtype)], added, eps=eps
        )
        return of_x.reshape(x.shape), of_weight.astype(weight.dtype)

    gradient = with_gradient_of(
        by_xla, by_kernel, because=f"{OP}: the gradient kernel has no gradient of its own"
    )
    with jax.named_scope(OP):
        try:
            return gradient(x, weight, *cotangents)
        except Refusal as refusal:
            if x.size:
                warn_of_gradient(str(refusal))
            return by_xla(x, weight, *cotangents)


_branch.defvjp(_branch_fwd, _branch_bwd)
_differentiable = in_reverse_mode_only(OP, _branch, instead="RMSNorm without a branch")
