"""Products with matrices that stay 4 bits, as checkpoints publish them.

A weight is stored in tiles together with its scales (`core.numerics.four_bit_tiles`). For up to 256
tokens a kernel reads the tiles in place. For more tokens XLA dequantizes one layer's matrix to the
compute dtype and multiplies by it.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn.core.numerics.four_bit_tiles import FourBitFormat, dequantize, quantize
from jaxattn.kernels.linear.four_bit_linear import refusal
from jaxattn.nn.linear import Linear, LinearBias, StackedWeight, added_to, matmul, normal
from jaxattn.ops.linear.four_bit_linear import gated_four_bit_layer, linear_four_bit_layer
from jaxattn.ops.linear.norm_linear import PendingNorm, tokens_of


@dataclasses.dataclass(frozen=True)
class FourBitLinears(Collection[str]):
    """The names of linears with 4-bit weights.

    Attributes:
        names: the names.
        form: the format of all their weights.
    """

    names: tuple[str, ...]
    form: FourBitFormat

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class FourBitLinear(Linear):
    """`Linear` with a 4-bit weight [out_features, in_features] as uint8 tiles.

    Differentiable in x.
    """

    def __init__(self, *sizes: int, form: FourBitFormat, **options: Any):
        self.form = form
        super().__init__(*sizes, **options)

    def _new_weight(self, rngs: nnx.Rngs, stddev: float, dtype: DTypeLike) -> None:
        shape = (self.out_features, self.in_features)
        self.weight = nnx.Param(quantize(normal(rngs, shape, stddev, jnp.float32), self.form))

    def __call__(self, x: Float[Array, "*T K"] | PendingNorm) -> Float[Array, "*T N"]:
        x = tokens_of(x)
        if _served(x, self):
            return self.together(x, self)[0]
        wide = dequantize(self.weight[...], self.form, self.dtype)
        return matmul(x, wide.T, self.dtype, self.out_dtype)

    @staticmethod
    def together(
        x: Float[Array, "*T K"] | PendingNorm,
        *modules: Any,
        biases: Sequence[LinearBias] = (),
        give: bool = False,
    ) -> tuple[Float[Array, "*T N"], ...]:
        if biases:
            return added_to(FourBitLinear.together(x, *modules, give=give), biases)
        x = tokens_of(x)
        if not _served(x, *modules):
            return tuple(module(x) for module in modules)
        weights = _stacks(*modules)
        return linear_four_bit_layer(
            x.astype(modules[0].dtype),
            [each.weights for each in weights],
            modules[0].form,
            layer=weights[0].layer,
            out_dtypes=[module.out_dtype for module in modules],
            implementation=weights[0].implementation,
        )


def gated_four_bit(x: Float[Array, "*T K"], gate: FourBitLinear, up: FourBitLinear) -> Array | None:
    """`silu(gate(x)) * up(x)` in one launch, in gate's `out_dtype`.

    None if the kernel does not support the call.
    """
    if not _served(x, gate, up):
        return None
    one, other = _stacks(gate, up)
    return gated_four_bit_layer(
        x.astype(gate.dtype),
        (one.weights, other.weights),
        gate.form,
        layer=one.layer,
        out_dtype=gate.out_dtype,
        implementation=one.implementation,
    )


def _stacks(*modules: FourBitLinear) -> list[StackedWeight]:
    """The stacks of the modules' weights; empty if a module has none."""
    weights = [module.in_stack for module in modules if module.in_stack is not None]
    return weights if len(weights) == len(modules) else []


def _served(x: Array, *modules: FourBitLinear) -> bool:
    """Whether the kernel supports x, rounded to the compute dtype, and these weights."""
    weights = _stacks(*modules)
    if not weights or weights[0].implementation == "xla" or not x.size:
        return False
    shape, form = (x.size // x.shape[-1], x.shape[-1]), modules[0].form
    one_form = all(module.form == form for module in modules)
    of_all = [each.weights for each in weights]
    return one_form and refusal(shape, modules[0].dtype, of_all, form) is None
