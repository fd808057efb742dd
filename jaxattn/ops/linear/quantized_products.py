"""The common part of products of tokens with stacks of quantized matrices, FP8 or 4-bit."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxattn.core.dispatch import Implementation, dispatch_kernel, with_gradient_of
from jaxattn.core.layer_index import split_layer_index
from jaxattn.core.validation.array_checks import check_layer
from jaxattn.ops.linear.linear import Layer


def check_gate_and_up(op: str, weights: Sequence[Array]) -> None:
    """Raises ValueError unless there are two stacks of one shape."""
    shapes = [tuple(each.shape) for each in weights]
    if len(shapes) != 2 or shapes[0] != shapes[1]:
        raise ValueError(f"{op}: weights must be gate and up with the same shape, got {shapes}")


def quantized_products(
    op: str,
    x: Array,
    stacks: tuple[list[Array], ...],
    layer: Layer,
    out_dtypes: Sequence[Any],
    *,
    gated: bool,
    kernel: Callable[..., list[Array]],
    product: Callable[..., Array],
    implementation: Implementation | None,
) -> list[Array]:
    """Computes the products with all matrices, or silu of the first one's times the second's.

    Args:
        x: Tokens [*T, K].
        stacks: Lists of arrays with a leading layer axis: the weights and, if they are separate,
            the scales. Each product uses one array of each list.
        kernel: Function of tokens [T, K] and the lists, with the keywords of `linears_fp8_mosaic`.
            Its gradient is that of `product`.
        product: Function of tokens, one array of each list, and the layer; returns float32 [T, N].
    """
    first, affine, number = split_layer_index(layer)
    check_layer(op, "weights[0]", stacks[0][0].shape, number)

    def kernels(tokens: Array, first: Array, *stacks: list[Array], interpret: bool) -> list[Array]:
        return kernel(
            tokens, *stacks, layer=first, affine=affine, out_dtypes=out_dtypes, gated=gated,
            interpret=interpret,
        )  # fmt: skip

    def reference(tokens: Array, first: Array, *stacks: list[Array]) -> list[Array]:
        layer = affine[0] * first + affine[1]
        products = [product(tokens, *each, layer) for each in zip(*stacks, strict=True)]
        if gated:
            products = [jax.nn.silu(products[0]) * products[1]]
        return [y.astype(dtype) for y, dtype in zip(products, out_dtypes, strict=True)]

    operands: tuple[Any, ...] = (
        x.reshape(-1, x.shape[-1]), jnp.asarray(first, jnp.int32), *stacks,
    )  # fmt: skip

    def mosaic(interpret: bool) -> list[Array]:
        because = f"{op}: the kernels have no gradient with quantized weights"
        return with_gradient_of(reference, partial(kernels, interpret=interpret), because=because)(
            *operands
        )

    with jax.named_scope(op):
        found = dispatch_kernel(op, implementation, mosaic, lambda: reference(*operands))
    return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in found]
