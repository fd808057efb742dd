"""RMS normalization, computed in float32 for any input dtype."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.layer_index import LayerIndex, split_layer_index
from jaxattn.core.numerics.rms_norm import rms_norm
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import (
    FLOATS,
    check_array,
    check_features,
    check_layer,
    finite,
)
from jaxattn.kernels.linear.rms_norm import op_of, rms_norm_mosaic


def rms_norm_layer(
    x: Float[Array, "*T F"],
    weights: Float[Array, "L F"],
    *,
    layer: int | Int[Array, ""] | LayerIndex,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*T F"]:
    """Computes `rms_norm(x, weights[layer], eps)` in a loop over layers, without copying the stack.

    Args:
        x: Tokens of F features.
        weights: The norm weights of all layers.
        layer: Index into the stack, a Python int, a traced scalar or a `LayerIndex`.
        dtype: Dtype of the result. None means x's.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernel requires F a multiple of 128, at most 8192. Differentiating it raises
            NotImplementedError.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    return _normed(x, None, weights, layer, eps, dtype, implementation)[1]


def add_rms_norm_layer(
    x: Float[Array, "*T F"],
    added: Float[Array, "*T F"],
    weights: Float[Array, "L F"],
    *,
    layer: int | Int[Array, ""] | LayerIndex,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*T F"], Float[Array, "*T F"]]:
    """Returns (`x + added` in float32, `rms_norm_layer` of the sum), in one launch.

    Args:
        x: Residual stream.
        added: Addend, in x's shape.

    Other arguments, limits and errors are those of `rms_norm_layer`.
    """
    check_array("add_rms_norm_layer", "x", x)
    check_array("add_rms_norm_layer", "added", added)
    if x.shape != added.shape:
        raise ValueError(
            f"add_rms_norm_layer: added {tuple(added.shape)} must have the shape of x "
            f"{tuple(x.shape)}"
        )
    return _normed(x, added, weights, layer, eps, dtype, implementation)


def _normed(
    x: Array,
    added: Array | None,
    weights: Array,
    layer: int | Array | LayerIndex,
    eps: float,
    dtype: DTypeLike | None,
    implementation: Implementation | None,
) -> tuple[Array, Array]:
    """Returns (the sum, or x if nothing is added; its norm)."""
    op = op_of(added)
    weights = OpArguments(op).check("weights", weights, "L F", FLOATS)
    check_features(op, x, "F", "weights", weights.shape, -1)
    eps = finite(op, "eps", eps)
    out_dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    first, affine, number = split_layer_index(layer)
    check_layer(op, "weights", weights.shape, number)

    def mosaic(interpret: bool) -> tuple[Array, Array]:
        total, normed = rms_norm_mosaic(
            x, weights, added=added, layer=first, affine=affine, eps=eps, dtype=out_dtype,
            interpret=interpret,
        )  # fmt: skip
        return x if total is None else total, normed

    def xla() -> tuple[Array, Array]:
        total = x if added is None else x.astype(jnp.float32) + added
        return total, rms_norm(total, weights[number], eps).astype(out_dtype)

    with jax.named_scope("rms_norm_layer"):
        return dispatch_kernel(op, implementation, mosaic, xla)
