"""A mixture of experts as a module: router, routed experts and shared experts."""

from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxattn.arena import Arena
from jaxattn.core.checks import check_features
from jaxattn.core.dispatch import Implementation
from jaxattn.core.fp8_blocks import quantize
from jaxattn.core.layers import LayerOf
from jaxattn.nn.linear import normal
from jaxattn.nn.mlp import GatedMLP
from jaxattn.ops.moe import Router, mixture_of_experts, route

type WeightFormat = Literal["fp8"]


class MixtureOfExperts(nnx.Module):
    """x [*T, hidden] -> float32 [*T, hidden]: the token's routed experts and the shared ones.

    Parameters:
        router [hidden, E] float32, and with sigmoid scores correction_bias [E] float32
        gate_up_proj [E, 2 I, hidden], the gate's rows first, and down_proj [E, hidden, I]: [out,
        in], as they are published
        of FP8 experts also gate_up_scale [E, 2, ceil(I / 128), ceil(hidden / 128)], the gate's
        first, and down_scale [E, ceil(hidden / 128), ceil(I / 128)], float32 (`core.fp8_blocks`)
        shared: a `GatedMLP` of `shared_size` columns, if there is one

    Differentiable in reverse mode, in the chosen experts' weights too unless they are FP8.

    Args:
        expert_size: I, columns of each routed expert.
        router: how tokens choose.
        shared_size: columns of what every token takes; 0 for none.
        weight_format: "fp8" keeps the routed experts in FP8; None keeps all in `param_dtype`.
        dtype: the operands of every product but the router's, which is float32.
    """

    def __init__(
        self,
        hidden_size: int,
        expert_size: int,
        router: Router,
        *,
        shared_size: int = 0,
        weight_format: WeightFormat | None = None,
        out_init_scale: float = 1.0,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config, self.dtype = router, jnp.dtype(dtype)
        self.weight_format = weight_format
        experts, stddev = router.experts, hidden_size**-0.5
        self.router = nnx.Param(normal(rngs, (hidden_size, experts), stddev, jnp.float32))
        if router.scores == "sigmoid":
            self.correction_bias = nnx.Param(jnp.zeros((experts,), jnp.float32))
        down = out_init_scale * expert_size**-0.5
        shape = (experts, 2, expert_size, hidden_size)
        gate_up = normal(rngs, shape, stddev, param_dtype)
        down_proj = normal(rngs, (experts, hidden_size, expert_size), down, param_dtype)
        if weight_format == "fp8":
            gate_up, scale = quantize(gate_up)
            self.gate_up_scale = nnx.Param(scale)
            down_proj, scale = quantize(down_proj)
            self.down_scale = nnx.Param(scale)
        self.gate_up_proj = nnx.Param(gate_up.reshape(experts, 2 * expert_size, hidden_size))
        self.down_proj = nnx.Param(down_proj)
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

    def __call__(self, x: Float[Array, "*T F"]) -> Float[Array, "*T F"]:
        names = stacked_names(self.weight_format)
        stacks = {name: getattr(self, name)[...][None] for name in names}
        if self.weight_format is None:
            stacks = {name: weight.astype(self.dtype) for name, weight in stacks.items()}
        return self.step(x, stacks, 0)[0]

    def step(
        self,
        x: Float[Array, "*T F"],
        stacks: Mapping[str, Array],
        layer: int | LayerOf,
        *,
        valid: Bool[Array, "*T"] | None = None,
        arena: Arena | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "*T F"], Arena | None]:
        """The experts' sum in a loop over layers, and the arena.

        Args:
            stacks: the parameters `stacked_names` of all layers, [L, ...] each, in place of its
                own: the experts of a layer are too many bytes to be sliced out.
            layer: this layer's number in `stacks`.
            valid: whether a token is no padding; padding takes no routed expert.
            arena: scratch of at least `jaxattn.moe.scratch(tokens=T, ...)`.
        """
        check_features("MixtureOfExperts", x, "F", "router", self.router.shape, 0)
        tokens = x.reshape(-1, x.shape[-1])
        wide = tokens.astype(jnp.float32)
        logits = jnp.matmul(wide, self.router[...], precision="highest")
        bias = self.correction_bias[...] if self.config.scores == "sigmoid" else None
        ids, weights = route(logits, bias, self.config)
        if valid is not None:
            ids = jnp.where(valid.reshape(-1, 1), ids, -1)
        found = mixture_of_experts(
            tokens.astype(self.dtype),
            ids,
            weights,
            stacks["gate_up_proj"],
            stacks["down_proj"],
            gate_up_scale=stacks.get("gate_up_scale"),
            down_scale=stacks.get("down_scale"),
            layer=layer,
            arena=arena,
            implementation=implementation,
        )
        y, arena = (found, None) if arena is None else found
        y = y.reshape(x.shape)
        return y + self.shared(x) if self.has_shared else y, arena


def stacked_names(weight_format: WeightFormat | None) -> tuple[str, ...]:
    """The parameters that a step reads out of a whole stack of layers."""
    names = ("gate_up_proj", "down_proj")
    return (*names, "gate_up_scale", "down_scale") if weight_format == "fp8" else names
