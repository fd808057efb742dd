"""The gated feed-forward layer of both model families."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn.core.checks import check_features, check_sizes
from jaxattn.nn.linear import Linear
from jaxattn.ops.linear import gated_layer


class GatedMLP(nnx.Module):
    """SwiGLU, `down_proj(silu(gate_proj(x)) * up_proj(x))`: x [*T, hidden] -> float32, the same.

    Differentiable in reverse mode only: `jax.grad` works, `jax.jvp` raises TypeError.

    Raises:
        TypeError: x has no dtype of floats.
        ValueError: x has another last axis, or a size is not a positive integer; it is named.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        out_init_scale: float = 1.0,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_sizes("GatedMLP", hidden_size=hidden_size, intermediate_size=intermediate_size)
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate_proj = linear(hidden_size, intermediate_size, out_dtype=dtype)
        self.up_proj = linear(hidden_size, intermediate_size, out_dtype=dtype)
        self.down_proj = linear(intermediate_size, hidden_size, init_scale=out_init_scale)

    def __call__(self, x: Float[Array, "*T hidden"]) -> Float[Array, "*T hidden"]:
        check_features("GatedMLP", x, "hidden", "gate_proj", self.gate_proj.weight.shape, 0)
        with jax.named_scope("mlp"):
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
            weights = jax.nn.silu(self.gate_proj(x).astype(jnp.float32))
            return self.down_proj(weights * self.up_proj(x))
