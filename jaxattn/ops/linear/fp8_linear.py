"""Products of tokens with a layer's FP8 matrices, which are read in place from their stacks.

    q, kv = linear_fp8_layer(x, (q_proj, kv_a_proj), (q_scale, kv_a_scale), layer=l)
    h = gated_fp8_layer(x, (gate_proj, up_proj), (gate_scale, up_scale), layer=l)

Matrices are [N, K], as in checkpoints, with a scale for each block of 128 x 128. At load time
`interleave_columns(numbers)` arranges columns in pairs. For up to 256 tokens kernels read the
matrices in place, one byte per number: one kernel for up to 32 tokens, another for more. XLA's
product, which is meant for many tokens, copies a layer's matrix out of the stack and rounds its
weights to the tokens' dtype.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn.core.dispatch import Implementation
from jaxattn.core.numerics.fp8_block_scaling import block_counts, dequantize
from jaxattn.core.numerics.fp8_weight_layout import deinterleave_columns
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import check_features
from jaxattn.kernels.linear import fp8_linear, fp8_medium_batch_linear
from jaxattn.kernels.linear.fp8_linear import OP, linears_fp8_mosaic
from jaxattn.kernels.linear.fp8_medium_batch_linear import many_linears_fp8_mosaic
from jaxattn.kernels.linear.linear import Shaped
from jaxattn.ops.linear.linear import Layer
from jaxattn.ops.linear.quantized_products import check_gate_and_up, quantized_products


def linear_fp8_layer(
    x: Float[Array, "*T K"],
    weights: Sequence[Float[Array, "L N K"]],
    scales: Sequence[Float[Array, "L N/128 K/128"]],
    *,
    layer: Layer,
    out_dtypes: Sequence[DTypeLike] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*T N"], ...]:
    """Computes `x @ (scale * weight)[layer].T` for each stack of weights, summed in float32.

    Args:
        x: Tokens. The kernels support bfloat16 and float16.
        weights: Stacks of float8_e4m3fn, with any N each and K a multiple of 16, with columns in
            pairs (`jaxattn.core.numerics.fp8_weight_layout.interleave_columns`).
        scales: float32 scales of blocks of 128 x 128 of each matrix; block counts are rounded up.
        layer: Index into the stacks, a Python int, a traced scalar or a `LayerIndex`.
        out_dtypes: Dtypes of the results. None means float32.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernels require 1 to 256 tokens, K a multiple of 128, and N a multiple of 64 and at
            least 128. They multiply exact FP8 numbers; "xla" rounds weights to x's dtype. The
            gradient is that of "xla".

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    dtypes = [jnp.dtype(d) for d in out_dtypes or [jnp.float32] * len(weights)]
    return tuple(_linears(x, list(weights), list(scales), layer, dtypes, False, implementation))


def gated_fp8_layer(
    x: Float[Array, "*T K"],
    weights: tuple[Float[Array, "L N K"], Float[Array, "L N K"]],
    scales: tuple[Float[Array, "L N/128 K/128"], Float[Array, "L N/128 K/128"]],
    *,
    layer: Layer,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: Implementation | None = None,
) -> Float[Array, "*T N"]:
    """Computes `silu(gate) * up` of the products with both matrices, in float32 and rounded once.

    Arguments, limits and errors are those of `linear_fp8_layer`; gate comes before up.
    """
    check_gate_and_up(OP, weights)
    dtypes = [jnp.dtype(out_dtype)]
    return _linears(x, list(weights), list(scales), layer, dtypes, True, implementation)[0]


def refusal(x: tuple[int, int], dtype: DTypeLike, weights: Sequence[Shaped]) -> str | None:
    """Returns why no kernel supports x [T, K] of this dtype and weights [L, N, K], or None."""
    few = x[0] <= fp8_linear.MOST_TOKENS
    return (fp8_linear if few else fp8_medium_batch_linear).refusal(x, dtype, weights)


def _linears(
    x: Array,
    weights: list[Array],
    scales: list[Array],
    layer: Layer,
    out_dtypes: list[Any],
    gated: bool,
    implementation: Implementation | None,
) -> list[Array]:
    _check(x, weights, scales)

    def kernel(tokens: Array, *args: Any, **kwargs: Any) -> list[Array]:
        few = tokens.shape[0] <= fp8_linear.MOST_TOKENS
        return (linears_fp8_mosaic if few else many_linears_fp8_mosaic)(tokens, *args, **kwargs)

    return quantized_products(
        OP, x, (weights, scales), layer, out_dtypes, gated=gated, kernel=kernel, product=_product,
        implementation=implementation,
    )  # fmt: skip


def _check(x: Array, weights: list[Array], scales: list[Array]) -> None:
    arguments = OpArguments(OP)
    if len(weights) != len(scales):
        raise ValueError(
            f"{OP}: {len(weights)} weights have {len(scales)} scales; give one for each weight"
        )
    for place, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
        arguments.check(f"weights[{place}]", weight, f"L N{place} K", ("float8_e4m3fn",))
        if weight.shape[-1] % 16:
            raise ValueError(
                f"{OP}: weights[{place}] must have K a multiple of 16, got {list(weight.shape)}"
            )
        check_features(OP, x, "K", f"weights[{place}]", weight.shape, 2)
        arguments.check(f"scales[{place}]", scale, f"L n{place} k", ("float32",))
        wanted = weight.shape[0], *block_counts(*weight.shape[1:])
        if scale.shape != wanted:
            raise ValueError(
                f"{OP}: scales[{place}] must be float32 {list(wanted)} for weights "
                f"{list(weight.shape)}, got {list(scale.shape)}"
            )


def _product(x: Array, weights: Array, scales: Array, layer: Array) -> Array:
    weight, scale = (
        lax.dynamic_index_in_dim(each, layer, keepdims=False) for each in (weights, scales)
    )
    # XLA's default for float32 on a GPU is TF32, which is too coarse for a float32 model.
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    wide = dequantize(deinterleave_columns(weight), scale, x.dtype)
    return jnp.matmul(x, wide.T, precision=exact, preferred_element_type=jnp.float32)
