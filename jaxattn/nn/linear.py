"""Matrix products of the modules: operands in the compute dtype, sums in float32.

Products that are added to the residual stream stay float32, like the stream, so that devices with
different summation orders stay close together over many layers. A product that feeds the next
product rounds its own result to the compute dtype, which halves the bytes that a decode step
writes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn.core.dispatch import Implementation
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.rope import RopeConfig, Rotation
from jaxattn.core.reverse_mode import in_reverse_mode_only
from jaxattn.core.validation.array_checks import check_features, check_sizes
from jaxattn.core.validation.varying_axes import match_varying_axes
from jaxattn.ops.linear.linear import (
    heads_layer,
    heads_serve,
    kernel_serves,
    linear_layer,
)
from jaxattn.ops.linear.norm_linear import PendingNorm, tokens_of


def matmul(
    x: Float[Array, "*T K"],
    weight: Float[Array, "K N"],
    dtype: DTypeLike,
    out_dtype: DTypeLike = jnp.float32,
) -> Float[Array, "*T N"]:
    """`x @ weight`, both rounded to `dtype`, summed in float32 and returned as `out_dtype`.

    Differentiable in reverse mode only; the gradient is differentiable in both modes. In the
    backward pass the incoming gradient is rounded to `dtype` as well, so that training runs on the
    tensor cores throughout; the gradient of a float32 weight is accumulated and kept in float32.
    """
    check_features("matmul", x, "K", "weight", tuple(weight.shape), 0)
    # One axis of tokens: XLA's CPU backend (jax 0.11.2) has no bfloat16 product summed in float32
    # for every layout that several axes can lead to ("Unsupported element type for DotThunk").
    tokens, weight = match_varying_axes((x.reshape(-1, x.shape[-1]), weight))
    dtypes = tuple(jnp.dtype(d) for d in (dtype, out_dtype, x.dtype, weight.dtype))
    out = _differentiable(tokens, weight, dtypes)
    return out.reshape(*x.shape[:-1], weight.shape[-1])


def _dot(a: Array, b: Array, contract: tuple[int, int], out_dtype=jnp.float32) -> Array:
    # XLA's default for float32 on a GPU is TF32, but a float32 model needs full precision.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: Array, weight: Array, dtypes) -> Array:
    return _matmul_fwd(x, weight, dtypes)[0]


def _matmul_fwd(x: Array, weight: Array, dtypes):
    dtype, out_dtype, *_ = dtypes
    x, weight = x.astype(dtype), weight.astype(dtype)
    return _dot(x, weight, (1, 0), out_dtype), (x, weight)


def _matmul_bwd(dtypes, residuals, gradient):
    dtype, _, x_dtype, weight_dtype = dtypes
    x, weight = residuals
    gradient = gradient.astype(dtype)
    # Where possible, the product itself rounds its sums, which saves a float32 array.
    x_sums, weight_sums = (
        to if to == dtype else jnp.float32 for to in (x_dtype, weight_dtype)
    )  # fmt: skip
    dx = _dot(gradient, weight, (1, 1), x_sums).astype(x_dtype)
    return dx, _dot(x, gradient, (0, 0), weight_sums).astype(weight_dtype)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)
_differentiable = in_reverse_mode_only("matmul", _matmul, forward_over_reverse=True)


@dataclasses.dataclass(frozen=True, eq=False)
class StackedWeight:
    """The stack that contains a module's weight, for a decode step.

    The kernel multiplies where it supports the call, and XLA otherwise, for any `implementation`.

    Attributes:
        weights: the weights of all layers, [L, in_features, out_features], or [L, H, K, N] per
            head.
        layer: this module's layer.
        implementation: implementation of the product.
    """

    weights: Float[Array, "L *H K N"]
    layer: LayerIndex
    implementation: Implementation | None

    def of_heads(
        self,
        x: Float[Array, "*T H K"],
        turned: tuple[Rotation, RopeConfig] | None = None,
        spare_heads: int = 0,
    ) -> Float[Array, "*T H N"] | None:
        """`heads_layer` by the kernel, or None if the kernel does not support the call."""
        rope_dim = 0 if turned is None else turned[1].dim
        if self.implementation == "xla" or not heads_serve(x, self.weights, rope_dim):
            return None
        return heads_layer(
            x,
            self.weights,
            layer=self.layer,
            rotary=turned,
            spare_heads=spare_heads,
            implementation=self.implementation,
        )

    def serves(
        self, x: Array, dtype: jnp.dtype, *others: "StackedWeight", gated: bool = False
    ) -> bool:
        """Whether the kernel supports x, which it rounds to `dtype`, and these weights."""
        if self.implementation == "xla" or self.weights.dtype != dtype:
            return False
        return kernel_serves(x, [each.weights for each in (self, *others)], gated=gated)


class Linear(nnx.Module):
    """`x [*T, in_features] -> [*T, out_features]` in `out_dtype`, without a bias.

    The weight is [in_features, out_features], of standard deviation init_scale / sqrt(in_features).

    Differentiable in reverse mode only: `jax.grad` works, `jax.jvp` raises TypeError.

    Raises:
        TypeError: the dtype of x is not a floating dtype.
        ValueError: the last axis of x has a wrong size, or a size is not a positive integer; the
            message names the size.
    """

    # Maps each parameter that a step reads from a stack to the attribute with its `StackedWeight`.
    stacked: ClassVar[Mapping[str, str]] = {"weight": "in_stack"}
    weight: nnx.Param

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_scale: float = 1.0,
        dtype: DTypeLike = jnp.bfloat16,
        out_dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_sizes("Linear", in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.dtype, self.out_dtype = jnp.dtype(dtype), jnp.dtype(out_dtype)
        self.in_stack: StackedWeight | None = None
        self._new_weight(rngs, init_scale * in_features**-0.5, param_dtype)

    def _new_weight(self, rngs: nnx.Rngs, stddev: float, dtype: DTypeLike) -> None:
        shape = (self.in_features, self.out_features)
        self.weight = nnx.Param(normal(rngs, shape, stddev, dtype))

    def __call__(self, x: Float[Array, "*T K"] | PendingNorm) -> Float[Array, "*T N"]:
        x = tokens_of(x)
        if self.in_stack is not None and self.in_stack.serves(x, self.dtype):
            return self.together(x, self)[0]
        return matmul(x, self.weight[...], self.dtype, self.out_dtype)

    @staticmethod
    def together(
        x: Float[Array, "*T K"] | PendingNorm,
        *modules: Any,
        biases: "Sequence[LinearBias]" = (),
        give: bool = False,
    ) -> tuple[Float[Array, "*T N"], ...]:
        """`module(x)` for each of `modules`, which all have this class; see `linears`.

        Args:
            biases: one bias for each module, or none.
            give: whether a `PendingNorm` x keeps the normed token for other readers.
        """
        stacked_weights = [module.in_stack for module in modules if module.in_stack is not None]
        out_dtypes = [module.out_dtype for module in modules]
        stacks = [each.in_stack.weights for each in biases if each.in_stack is not None]
        stacked_biases = stacks if stacks and len(stacks) == len(modules) else None
        # For `added_to`, if the launch does not add them.
        separate_biases = () if stacked_biases else biases
        if stacked_biases:
            out_dtypes = [each.out_dtype for each in biases]
        if isinstance(x, PendingNorm):
            weights = [place.weights for place in stacked_weights]
            if len(stacked_weights) == len(modules) and x.serves(weights, stacked_weights[0].layer):
                outputs = x.linears(
                    weights, layer=stacked_weights[0].layer, out_dtypes=out_dtypes, give=give,
                    biases=stacked_biases,
                )  # fmt: skip
                return added_to(outputs, separate_biases)
            x = tokens_of(x)
        if len(stacked_weights) < len(modules) or not stacked_weights[0].serves(
            x, modules[0].dtype, *stacked_weights[1:]
        ):
            return added_to(tuple(module(x) for module in modules), biases)
        outputs = linear_layer(
            x,
            [place.weights for place in stacked_weights],
            layer=stacked_weights[0].layer,
            biases=stacked_biases,
            out_dtypes=out_dtypes,
            implementation=stacked_weights[0].implementation,
        )
        return added_to(outputs, separate_biases)


@dataclasses.dataclass(frozen=True, eq=False)
class LinearBias:
    """A bias that is added to the float32 output of a linear.

    Attributes:
        numbers: [out_features].
        in_stack: the stack [L, out_features] that contains it, for a decode step.
        out_dtype: dtype of the sum.
    """

    numbers: Float[Array, "N"]
    in_stack: StackedWeight | None
    out_dtype: DTypeLike = jnp.float32


def added_to(
    products: Sequence[Float[Array, "*T N"]], biases: Sequence[LinearBias]
) -> tuple[Float[Array, "*T N"], ...]:
    """Adds the biases, if any, to the products."""
    if not biases:
        return tuple(products)
    pairs = zip(products, biases, strict=True)
    return tuple((y + b.numbers.astype(jnp.float32)).astype(b.out_dtype) for y, b in pairs)


def linears(
    x: Float[Array, "*T K"] | PendingNorm,
    *modules: Linear,
    biases: Sequence[LinearBias] = (),
    split: bool = False,
) -> tuple[Float[Array, "*T N"], ...]:
    """`module(x)` for each module, in one launch if the weights are in stacks and x has few tokens.

    If x is a `PendingNorm`, the launch computes the norm too, if it can. Modules of different
    classes, such as those with FP8 weights, have separate launches.

    Args:
        biases: one for each module, or none; the launch of the products adds them if it can.
        split: whether each module has its own K features of x, in order; x is then an array.
    """
    if split:
        return added_to(_split(tokens_of(x), *modules), biases)
    kinds: dict[type[Linear], list[int]] = {}
    for number, module in enumerate(modules):
        kinds.setdefault(type(module), []).append(number)
    outputs: dict[int, Array] = {}
    for kind, numbers in kinds.items():
        same_kind_modules = [modules[number] for number in numbers]
        has_more = len(outputs) + len(same_kind_modules) < len(modules)
        same_kind_biases = [biases[number] for number in numbers] if biases else []
        results = kind.together(x, *same_kind_modules, biases=same_kind_biases, give=has_more)
        outputs |= zip(numbers, results, strict=True)
        x = tokens_of(x) if has_more else x  # no other launch computes the norm again
    return tuple(outputs[number] for number in range(len(modules)))


def _split(x: Float[Array, "*T K"], *modules: Linear) -> tuple[Float[Array, "*T N"], ...]:
    """`module(part)` for each module and its part of x, in one launch if all are in stacks."""
    parts = jnp.split(x, len(modules), axis=-1)
    stacked_weights = [module.in_stack for module in modules if module.in_stack is not None]
    plain = len(stacked_weights) == len(modules) and all(
        type(module) is Linear for module in modules
    )
    if not plain or not stacked_weights[0].serves(parts[0], modules[0].dtype, *stacked_weights[1:]):
        return tuple(module(part) for module, part in zip(modules, parts, strict=True))
    return linear_layer(
        x,
        [place.weights for place in stacked_weights],
        layer=stacked_weights[0].layer,
        out_dtypes=[module.out_dtype for module in modules],
        split=True,
        implementation=stacked_weights[0].implementation,
    )


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float, dtype: DTypeLike) -> Array:
    """Initial weights: a normal distribution truncated at twice its width, with this `stddev`."""
    draw = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32)
    # 0.8796: the standard deviation of a unit normal truncated at 2.
    return (draw * (stddev / 0.8796256610342398)).astype(dtype)
