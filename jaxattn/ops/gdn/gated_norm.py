"""The gated RMS norm of a delta layer's whole sequences, with a kernel for its gradient."""

import functools
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float

from jaxattn.core.dispatch import Refusal, gradient_or_xla, with_gradient_of
from jaxattn.core.numerics.rms_norm import gated_rms_norm
from jaxattn.core.reverse_mode import in_reverse_mode_only
from jaxattn.core.validation.varying_axes import match_varying_axes
from jaxattn.kernels.gdn.gated_norm_gradient import gated_norm_gradient
from jaxattn.kernels.hopper.device import require_hopper

OP = "gated_rms_norm"


def gated_norm_of_sequences(
    o: Float[Array, "*T H D"],
    gate: Float[Array, "*T N"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    sigmoid: bool = False,
    projection: Float[Array, "*T C"] | None = None,
) -> Float[Array, "*T H D"]:
    """Returns `gated_rms_norm(o, gate, weight, eps, sigmoid)`.

    On a Hopper GPU a kernel computes the gradient in one pass. The function is then differentiable
    in reverse mode only. Elsewhere XLA computes the gradient in either mode.

    Args:
        projection: An array whose last H * D columns are those of `gate`, if `gate` was sliced from
            it. The kernel reads the columns there, because XLA would copy the slice. The gradient
            goes to `gate` alone.
    """
    try:
        require_hopper(OP, interpret=False)
    except Refusal:
        return gated_rms_norm(o, gate, weight, eps, sigmoid)
    z = gate[..., gate.shape[-1] - o.shape[-2] * o.shape[-1] :]
    if projection is not None:
        projection = lax.stop_gradient(projection)
    return _differentiable(*match_varying_axes((o, z, weight, projection)), eps, sigmoid)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _gated(
    o: Array, z: Array, weight: Array, projection: Array | None, eps: float, sigmoid: bool
) -> Array:
    return gated_rms_norm(o, z, weight, eps, sigmoid)


def _gated_fwd(
    o: Array, z: Array, weight: Array, projection: Array | None, eps: float, sigmoid: bool
) -> tuple[Array, tuple[Any, ...]]:
    return _gated(o, z, weight, projection, eps, sigmoid), (o, z, weight, projection)


def _gated_bwd(
    eps: float, sigmoid: bool, residuals: tuple[Any, ...], of_y: Array
) -> tuple[Array, Array, Array, None]:
    def by_xla(
        o: Array, z: Array, weight: Array, projection: Array | None, of_y: Array
    ) -> tuple[Array, Array, Array]:
        norm = functools.partial(gated_rms_norm, eps=eps, sigmoid=sigmoid)
        _, pull = jax.vjp(norm, o, z, weight)
        of_o, of_z, of_weight = pull(of_y)
        return of_o, of_z, of_weight

    def by_kernel(
        o: Array, z: Array, weight: Array, projection: Array | None, of_y: Array
    ) -> tuple[Array, Array, Array]:
        gate = z if projection is None else projection
        heads, given = (each.reshape(-1, *o.shape[-2:]) for each in (o, of_y))
        of_o, of_z, of_weight = gated_norm_gradient(
            heads, gate.reshape(-1, gate.shape[-1]), weight, given, eps=eps, sigmoid=sigmoid
        )
        return of_o.reshape(o.shape), of_z.reshape(z.shape), of_weight.astype(weight.dtype)

    gradient = with_gradient_of(
        by_xla, by_kernel, because=f"{OP}: the gradient kernel has no gradient of its own"
    )
    with jax.named_scope(OP):
        return *gradient_or_xla(gradient, by_xla, (*residuals, of_y)), None


_gated.defvjp(_gated_fwd, _gated_bwd)
_differentiable = in_reverse_mode_only(OP, _gated)
