"""A mixture of experts as a module: router, routed experts and shared experts."""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxattn.core.checks import check_features
from jaxattn.core.layers import LayerOf
from jaxattn.nn.linear import normal
from jaxattn.nn.mlp import GatedMLP
from jaxattn.ops.moe import Router, mixture_of_experts, route


class MixtureOfExperts(nnx.Module):
    """x [*T, hidden] -> float32 [*T, hidden]: the token's routed experts and the shared ones.

    Parameters:
        router [hidden, E] float32, and with sigmoid scores correction_bias [E] float32
        gate_up_proj [E, 2 I, hidden], the gate's rows first, and down_proj [E, hidden, I]: [out,
        in], as they are published
        shared: a `GatedMLP` of `shared_size` columns, if there is one

    Differentiable in reverse mode, in the chosen experts' weights too.

    Args:
        expert_size: I, columns of each routed expert.
        router: how tokens choose.
        shared_size: columns of what every token takes; 0 for none.
        dtype: the operands of every product but the router's, which is float32.
    """

    STACKED = ("gate_up_proj", "down_proj")  # parameters that a step reads out of a whole stack

    def __init__(
        self,
        hidden_size: int,
        expert_size: int,
        router: Router,
        *,
        shared_size: int = 0,
        out_init_scale: float = 1.0,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config, self.dtype = router, jnp.dtype(dtype)
        experts, stddev = router.experts, hidden_size**-0.5
        self.router = nnx.Param(normal(rngs, (hidden_size, experts), stddev, jnp.float32))
        if router.scores == "sigmoid":
            self.correction_bias = nnx.Param(jnp.zeros((experts,), jnp.float32))
        shape = (experts, 2 * expert_size, hidden_size)
        self.gate_up_proj = nnx.Param(normal(rngs, shape, stddev, param_dtype))
        down = out_init_scale * expert_size**-0.5
        shape = (experts, hidden_size, expert_size)
        self.down_proj = nnx.Param(normal(rngs, shape, down, param_dtype))
        self.has_shared = bool(shared_size)
        if shared_size:
            self.shared = GatedMLP(
                hidden_size,
                shared_size,
                out_init_scale=out_init_scale,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

    def __call__(
        self,
        x: Float[Array, "*T F"],
        *,
        stacks: Mapping[str, Array] | None = None,
        layer: LayerOf | None = None,
        valid: Bool[Array, "*T"] | None = None,
    ) -> Float[Array, "*T F"]:
        """The experts' sum.

        Args:
            stacks: the parameters `STACKED` of all layers, [L, ...] each, in place of its own: the
                experts of a layer are too many bytes to be sliced out.
            layer: this layer's number in `stacks`.
            valid: whether a token is no padding; padding takes no routed expert.
        """
        check_features("MixtureOfExperts", x, "F", "router", self.router.shape, 0)
        tokens = x.reshape(-1, x.shape[-1])
        wide = tokens.astype(jnp.float32)
        logits = jnp.matmul(wide, self.router[...], precision="highest")
        bias = self.correction_bias[...] if self.config.scores == "sigmoid" else None
        ids, weights = route(logits, bias, self.config)
        if valid is not None:
            ids = jnp.where(valid.reshape(-1, 1), ids, -1)
        if stacks is None:
            stacks = {name: getattr(self, name)[...].astype(self.dtype) for name in self.STACKED}
        y = mixture_of_experts(
            tokens, ids, weights, stacks["gate_up_proj"], stacks["down_proj"], layer=layer
        )
        y = y.reshape(x.shape)
        return y + self.shared(x) if self.has_shared else y
