"""The gated feed-forward layer."""

from collections.abc import Collection
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn.core.validation.array_checks import check_features, check_sizes
from jaxattn.nn.four_bit_linear import FourBitLinear, gated_four_bit
from jaxattn.nn.fp8_linear import Fp8Linear, gated, new_linear
from jaxattn.ops.linear.linear import gated_layer


class GatedMLP(nnx.Module):
    """SwiGLU of x [*T, hidden], `down_proj(silu(gate_proj(x)) * up_proj(x))`.

    The result is float32 and has x's shape.

    Differentiable in reverse mode only: `jax.grad` works, `jax.jvp` raises TypeError.

    Args:
        fp8: the names of the products whose weights are FP8; see `Fp8Linear`.

    Raises:
        TypeError: the dtype of x is not a floating dtype.
        ValueError: the last axis of x has a wrong size, or a size is not a positive integer; the
            message names the size.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        fp8: Collection[str] = (),
        out_init_scale: float = 1.0,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_sizes("GatedMLP", hidden_size=hidden_size, intermediate_size=intermediate_size)
        linear = partial(new_linear, fp8, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        wide = (hidden_size, intermediate_size)
        self.gate_proj = linear("gate_proj", *wide, out_dtype=dtype)
        self.up_proj = linear("up_proj", *wide, out_dtype=dtype)
        self.down_proj = linear("down_proj", *reversed(wide), init_scale=out_init_scale)

    def __call__(self, x: Float[Array, "*T hidden"]) -> Float[Array, "*T hidden"]:
        features = (self.gate_proj.in_features,)
        check_features("GatedMLP", x, "hidden", "gate_proj", features, 0)
        with jax.named_scope("mlp"):
            if isinstance(self.gate_proj, Fp8Linear) and isinstance(self.up_proj, Fp8Linear):
                fused_hidden = gated(x, self.gate_proj, self.up_proj)
                return self.down_proj(
                    self._swiglu_unfused(x) if fused_hidden is None else fused_hidden
                )
            if isinstance(self.gate_proj, FourBitLinear) and isinstance(
                self.up_proj, FourBitLinear
            ):
                fused_hidden = gated_four_bit(x, self.gate_proj, self.up_proj)
                return self.down_proj(
                    self._swiglu_unfused(x) if fused_hidden is None else fused_hidden
                )
            gate, up = self.gate_proj.in_stack, self.up_proj.in_stack
            if gate and up and gate.serves(x, self.gate_proj.dtype, up, gated=True):
                hidden = gated_layer(
                    x,
                    gate.weights,
                    up.weights,
                    layer=gate.layer,
                    out_dtype=self.down_proj.dtype,
                    implementation=gate.implementation,
                )
                return self.down_proj(hidden)
            # Rounding here keeps its gradient from being a float32 array.
            return self.down_proj(self._swiglu_unfused(x).astype(self.down_proj.dtype))

    def _swiglu_unfused(self, x: Array) -> Array:
        """`silu(gate) * up` as two products."""
        weights = jax.nn.silu(self.gate_proj(x).astype(jnp.float32))
        return weights * self.up_proj(x)
