"""Products with matrices that stay FP8, as checkpoints publish them.

A weight is [out_features, in_features] with a float32 scale for each block of 128 x 128. For up to
256 tokens kernels read it in place, one byte per number. For more tokens XLA dequantizes one
layer's matrix to the compute dtype and multiplies by it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn.core.numerics.fp8_block_scaling import dequantize, quantize
from jaxattn.core.numerics.fp8_weight_layout import deinterleave_columns, interleave_columns
from jaxattn.nn.four_bit_linear import FourBitLinear, FourBitLinears
from jaxattn.nn.linear import Linear, LinearBias, StackedWeight, added_to, matmul, normal
from jaxattn.ops.linear.fp8_linear import gated_fp8_layer, linear_fp8_layer, refusal
from jaxattn.ops.linear.norm_linear import PendingNorm, tokens_of


class Fp8Linear(Linear):
    """`Linear` with a weight float8_e4m3fn [out_features, in_features] and its scales.

    The columns are in pairs (`jaxattn.core.numerics.fp8_weight_layout.interleave_columns`);
    `in_features` is a multiple of 16. The scale is float32 [ceil(out_features / 128),
    ceil(in_features / 128)]. Differentiable in x.
    """

    stacked: ClassVar[Mapping[str, str]] = {"weight": "in_stack", "scale": "scale_in_stack"}
    scale: nnx.Param

    def _new_weight(self, rngs: nnx.Rngs, stddev: float, dtype: DTypeLike) -> None:
        shape = (self.out_features, self.in_features)
        numbers, scales = quantize(normal(rngs, shape, stddev, jnp.float32))
        self.weight, self.scale = nnx.Param(interleave_columns(numbers)), nnx.Param(scales)
        self.scale_in_stack: StackedWeight | None = None

    def __call__(self, x: Float[Array, "*T K"] | PendingNorm) -> Float[Array, "*T N"]:
        x = tokens_of(x)
        if _served(x, self):
            return self.together(x, self)[0]
        wide = dequantize(deinterleave_columns(self.weight[...]), self.scale[...], self.dtype)
        return matmul(x, wide.T, self.dtype, self.out_dtype)

    @staticmethod
    def together(
        x: Float[Array, "*T K"] | PendingNorm,
        *modules: Any,
        biases: Sequence[LinearBias] = (),
        give: bool = False,
    ) -> tuple[Float[Array, "*T N"], ...]:
        if biases:
            return added_to(Fp8Linear.together(x, *modules, give=give), biases)
        weights, scales = _stacks(*modules)
        out_dtypes = [module.out_dtype for module in modules]
        if isinstance(x, PendingNorm):
            layer = weights[0].layer if weights else None
            numbers = [each.weights for each in weights]
            if layer and x.serves(numbers, layer, scales):
                return x.linears(
                    numbers, layer=layer, out_dtypes=out_dtypes, give=give, scales=scales
                )
            x = tokens_of(x)
        if not _served(x, *modules):
            return tuple(module(x) for module in modules)
        return linear_fp8_layer(
            x.astype(modules[0].dtype),
            [each.weights for each in weights],
            scales,
            layer=weights[0].layer,
            out_dtypes=out_dtypes,
            implementation=weights[0].implementation,
        )


class ExtraFp8Weights(NamedTuple):
    """FP8 weights outside any module, which share a launch with an `Fp8Linear`.

    Attributes:
        weights, scales: their stacks.
        out_dtype: the dtype of the products.
    """

    weights: StackedWeight
    scales: StackedWeight
    out_dtype: jnp.dtype


def linears_with_extra(
    x: Float[Array, "*T K"] | PendingNorm, module: Linear, extra: ExtraFp8Weights | None
) -> tuple[Float[Array, "*T N"], Float[Array, "*T M"]] | None:
    """The products with a module's weights and with `extra`, in one launch.

    None if the kernel does not support the call.
    """
    if extra is None or not isinstance(module, Fp8Linear):
        return None
    weights, scales = _stacks(module)
    if not weights:
        return None
    stacks = [weights[0].weights, extra.weights.weights]
    scales, layer = [*scales, extra.scales.weights], weights[0].layer
    out_dtypes = [module.out_dtype, extra.out_dtype]
    if isinstance(x, PendingNorm) and x.serves(stacks, layer, scales):
        y, extra_y = x.linears(stacks, layer=layer, out_dtypes=out_dtypes, scales=scales)
        return y, extra_y
    if not _served(tokens_of(x), module):
        return None
    y, extra_y = linear_fp8_layer(
        tokens_of(x).astype(module.dtype),
        stacks,
        scales,
        layer=layer,
        out_dtypes=out_dtypes,
        implementation=weights[0].implementation,
    )
    return y, extra_y


def gated(x: Float[Array, "*T K"], gate: Fp8Linear, up: Fp8Linear) -> Array | None:
    """`silu(gate(x)) * up(x)` in one launch, in gate's `out_dtype`.

    None if the kernel does not support the call.
    """
    if not _served(x, gate, up):
        return None
    (one, other), scales = _stacks(gate, up)
    return gated_fp8_layer(
        x.astype(gate.dtype),
        (one.weights, other.weights),
        (scales[0], scales[1]),
        layer=one.layer,
        out_dtype=gate.out_dtype,
        implementation=one.implementation,
    )


def new_linear(fp8: Collection[str], name: str, *sizes: int, **options: Any) -> Linear:
    """A linear, with an FP8 weight if `fp8` contains its name, or 4-bit for `FourBitLinears`."""
    if isinstance(fp8, FourBitLinears) and name in fp8:
        return FourBitLinear(*sizes, form=fp8.form, **options)
    kind = Fp8Linear if name in fp8 else Linear
    return kind(*sizes, **options)


def _stacks(*modules: Fp8Linear) -> tuple[list[StackedWeight], list[Array]]:
    """The stacks of the modules' weights and of their scales; both empty if a module has none."""
    weights = [module.in_stack for module in modules if module.in_stack is not None]
    scales = [module.scale_in_stack for module in modules if module.scale_in_stack is not None]
    if len(weights) < len(modules) or len(scales) < len(modules):
        return [], []
    return weights, [each.weights for each in scales]


def _served(x: Array, *modules: Fp8Linear) -> bool:
    """Whether the kernel supports x, rounded to the compute dtype, and these weights."""
    weights, _ = _stacks(*modules)
    if not weights or weights[0].implementation == "xla":
        return False
    tokens = x.size // x.shape[-1] if x.size else 0
    shape = tokens, x.shape[-1]
    return refusal(shape, modules[0].dtype, [each.weights for each in weights]) is None
