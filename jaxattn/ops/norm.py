"""RMS normalisation, in float32 whatever comes in."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxattn.core.checks import FLOATS, Arguments, check_features, check_layer, finite
from jaxattn.core.dispatch import Implementation, dispatch
from jaxattn.core.layers import LayerOf, taken_apart
from jaxattn.core.norms import rms_norm
from jaxattn.kernels.rms_norm import rms_norm_mosaic


def rms_norm_layer(
    x: Float[Array, "*T F"],
    weights: Float[Array, "L F"],
    *,
    layer: int | Int[Array, ""] | LayerOf,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*T F"]:
    """`rms_norm(x, weights[layer], eps)` in a loop over layers: nothing is copied out of the stack.

    Args:
        x: tokens of F features.
        weights: all layers'.
        layer: index into the stack, a Python int, a traced scalar, or the place in a pattern.
        dtype: of the result; x's, if None.
        implementation: None, "mosaic_gpu", "mosaic_gpu_interpret" or "xla". The kernel has F a
            multiple of 128, at most 8192, and no gradient: to differentiate by it raises
            NotImplementedError.

    Raises:
        ValueError, TypeError: an argument's dtype or shape does not fit; it is named.
        Refusal: the named implementation refuses, and says why.
    """
    op = "rms_norm_layer"
    weights = Arguments(op).check("weights", weights, "L F", FLOATS)
    check_features(op, x, "F", "weights", weights.shape, -1)
    eps = finite(op, "eps", eps)
    out_dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    first, affine, number = taken_apart(layer)
    check_layer(op, "weights", weights.shape, number)

    def mosaic(interpret: bool) -> Array:
        return rms_norm_mosaic(
            x, weights, layer=first, affine=affine, eps=eps, dtype=out_dtype, interpret=interpret
        )

    with jax.named_scope(op):
        return dispatch(
            op,
            implementation,
            {
                "mosaic_gpu": lambda: mosaic(False),
                "mosaic_gpu_interpret": lambda: mosaic(True),
                "xla": lambda: rms_norm(x, weights[number], eps).astype(out_dtype),
            },
        )
