"""A residual stream and copies of its RMS norm, whose gradients one kernel adds up."""

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
    added: Float[Array, "*T F"] | None = None,
    eps: float,
    readers: int = 1,
    gradient_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "*T F"], tuple[Float[Array, "*T F"], ...]]:
    """Returns the stream `x + added` and `readers` copies of its norm, for residual layers.

    The copies have separate gradients. On a Hopper GPU a kernel adds them up with the stream's, and
    computes the gradients of x, of `added` and of the weight in one pass. The function is then
    differentiable in reverse mode only. Elsewhere XLA computes the gradients, in either mode.

    Args:
        added: The previous layer's output; None adds nothing.
        readers: The number of copies. Copies occupy no memory of their own.
        gradient_dtype: Dtype to which gradients of the copies and of `added` are rounded before and
            by the kernel, as the products beside the norm do. None rounds nothing.

    Raises:
        ValueError: `added` has another shape than x.
    """
    if added is not None and added.shape != x.shape:
        raise ValueError(
            f"{OP}: added {tuple(added.shape)} must have the shape of x {tuple(x.shape)}"
        )
    dtype = None if gradient_dtype is None else jnp.dtype(gradient_dtype)
    with jax.named_scope(OP):
        try:
            require_hopper(OP, interpret=False)
        except Refusal:
            return _in_xla(x, added, weight, eps, readers)
        return _differentiable(*match_varying_axes((x, added, weight)), eps, readers, dtype)


def _in_xla(
    x: Array, added: Array | None, weight: Array, eps: float, readers: int
) -> tuple[Array, tuple[Array, ...]]:
    total = x if added is None else x + added
    return total, (rms_norm(total, weight, eps),) * readers


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _branch(
    x: Array, added: Array | None, weight: Array, eps: float, readers: int, gradient_dtype: Any
) -> tuple[Array, tuple[Array, ...]]:
    return _in_xla(x, added, weight, eps, readers)


def _branch_fwd(
    x: Array, added: Array | None, weight: Array, eps: float, readers: int, gradient_dtype: Any
) -> tuple[Any, Any]:
    total, copies = _branch(x, added, weight, eps, readers, gradient_dtype)
    like = tuple(each if each is None else each[..., :0] for each in (x, added))  # their dtypes
    return (total, copies), (total, weight, like)


def _branch_bwd(
    eps: float, readers: int, gradient_dtype: Any, residuals: Any, cotangents: Any
) -> tuple[Array, Array | None, Array]:
    total, weight, (x, added) = residuals

    def by_xla(
        total: Array, weight: Array, of_total: Array, of_copies: tuple[Array, ...]
    ) -> tuple[Array, Array, Array]:
        def forward(total: Array, weight: Array) -> tuple[Array, tuple[Array, ...]]:
            return _in_xla(total, None, weight, eps, readers)

        _, pull = jax.vjp(forward, total, weight)
        of_x, of_weight = pull((of_total, of_copies))
        return of_x, of_x, of_weight

    def by_kernel(
        total: Array, weight: Array, of_total: Array, of_copies: tuple[Array, ...]
    ) -> tuple[Array, Array, Array]:
        flat, of_stream, *of_y = (
            each.reshape(-1, each.shape[-1]) for each in (total, of_total, *of_copies)
        )
        if gradient_dtype is not None:
            of_y = [each.astype(gradient_dtype) for each in of_y]
        rounded_to = None if added is None or gradient_dtype == total.dtype else gradient_dtype
        of_x, rounded, of_weight = rms_norm_gradient(
            flat, weight, of_y, of_stream, eps=eps, rounded_to=rounded_to
        )
        of_added = of_x if rounded is None else rounded
        of_x, of_added = of_x.reshape(total.shape), of_added.reshape(total.shape)
        return of_x, of_added.astype(total.dtype), of_weight.astype(weight.dtype)

    gradient = with_gradient_of(
        by_xla, by_kernel, because=f"{OP}: the gradient kernel has no gradient of its own"
    )
    given = total, weight, *cotangents
    with jax.named_scope(OP):
        try:
            of_x, of_added, of_weight = gradient(*given)
        except Refusal as refusal:
            if total.size:
                warn_of_gradient(str(refusal))
            of_x, of_added, of_weight = by_xla(*given)
    return of_x.astype(x.dtype), None if added is None else of_added.astype(added.dtype), of_weight


_branch.defvjp(_branch_fwd, _branch_bwd)
_differentiable = in_reverse_mode_only(OP, _branch, instead="call RMSNorm without a branch")
