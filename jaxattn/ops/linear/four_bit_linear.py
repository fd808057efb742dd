"""Products of tokens with a layer's 4-bit matrices, which are read in place from their stacks.

    q, k = linear_four_bit_layer(x, (q_proj, k_proj), form, layer=l)
    h = gated_four_bit_layer(x, (gate_proj, up_proj), form, layer=l)

Matrices [N, K] are stored as tiles with their scales (`core.numerics.four_bit_tiles`). For up to
256 tokens a kernel reads them in place. XLA's product, which is meant for many tokens, dequantizes
a layer's matrix and rounds it to the tokens' dtype.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxattn.core.dispatch import Implementation
from jaxattn.core.numerics.four_bit_tiles import FourBitFormat, dequantize
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.kernels.linear.four_bit_linear import OP, linears_four_bit_mosaic
from jaxattn.ops.linear.linear import Layer
from jaxattn.ops.linear.quantized_products import check_gate_and_up, quantized_products


def linear_four_bit_layer(
    x: Float[Array, "*T K"],
    weights: Sequence[UInt8[Array, "L r c B"]],
    form: FourBitFormat,
    *,
    layer: Layer,
    out_dtypes: Sequence[DTypeLike] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*T N"], ...]:
    """Computes `x @ weight[layer].T` for each stack of tiles, summed in float32.

    Args:
        x: Tokens. The kernel supports bfloat16, and float16 if scales are not bfloat16.
        weights: Stacks of tiles, with any N each and one K.
        form: Format of the tiles.
        layer: Index into the stacks, a Python int, a traced scalar or a `LayerIndex`.
        out_dtypes: Dtypes of the results. None means float32.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernel requires 1 to 256 tokens and N of at least 128. The gradient is that of
            "xla".

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    dtypes = [jnp.dtype(d) for d in out_dtypes or [jnp.float32] * len(weights)]
    return tuple(_linears(x, list(weights), form, layer, dtypes, False, implementation))


def gated_four_bit_layer(
    x: Float[Array, "*T K"],
    weights: tuple[UInt8[Array, "L r c B"], UInt8[Array, "L r c B"]],
    form: FourBitFormat,
    *,
    layer: Layer,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: Implementation | None = None,
) -> Float[Array, "*T N"]:
    """Computes `silu(gate) * up` of the products with both matrices, in float32 and rounded once.

    Arguments, limits and errors are those of `linear_four_bit_layer`; gate comes before up.
    """
    check_gate_and_up(OP, weights)
    dtypes = [jnp.dtype(out_dtype)]
    return _linears(x, list(weights), form, layer, dtypes, True, implementation)[0]


def _linears(
    x: Array,
    weights: list[Array],
    form: FourBitFormat,
    layer: Layer,
    out_dtypes: list[Any],
    gated: bool,
    implementation: Implementation | None,
) -> list[Array]:
    _check(x, weights, form)
    return quantized_products(
        OP, x, (weights,), layer, out_dtypes, gated=gated,
        kernel=partial(linears_four_bit_mosaic, form=form), product=partial(_product, form=form),
        implementation=implementation,
    )  # fmt: skip


def _check(x: Array, weights: list[Array], form: FourBitFormat) -> None:
    arguments = OpArguments(OP)
    if not isinstance(form, FourBitFormat):
        raise TypeError(f"{OP}: form must be a FourBitFormat, got {type(form).__name__}")
    for place, weight in enumerate(weights):
        arguments.check(f"weights[{place}]", weight, f"L r{place} c B", ("uint8",))
        inner = form.matrix(weight.shape)[1]
        if weight.shape[-1] != form.tile_bytes or x.shape[-1] != inner:
            raise ValueError(
                f"{OP}: weights[{place}] {list(weight.shape)} must be [L, N / 64, K / "
                f"{form.columns}, {form.tile_bytes}] for x {list(x.shape)} in {form}"
            )


def _product(x: Array, weights: Array, layer: Array, *, form: FourBitFormat) -> Array:
    tiles = lax.dynamic_index_in_dim(weights, layer, keepdims=False)
    # XLA's default for float32 on a GPU is TF32, which is too coarse for a float32 model.
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    wide = dequantize(tiles, form, x.dtype)
    return jnp.matmul(x, wide.T, precision=exact, preferred_element_type=jnp.float32)
