"""A mixture of experts as a module: router, routed experts and shared experts."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxattn.arena import Arena
from jaxattn.core.checks import check_features
from jaxattn.core.dispatch import Implementation
from jaxattn.core.fp8_blocks import BLOCK, quantize
from jaxattn.core.layers import LayerOf
from jaxattn.nn.linear import normal
from jaxattn.nn.mlp import GatedMLP
from jaxattn.ops.moe import Router, mixture_of_experts, route, route_serves
from jaxattn.ops.router import router_logits

type WeightFormat = Literal["fp8"]


EXPERTS = ("gate_up_proj", "down_proj")


class Share(NamedTuple):
    """The experts of one of several GPUs, which are neighbours.

    Attributes:
        first: the number of its first routed expert.
        own_tokens: the tokens whose shared experts it computes, as each GPU has all of those.
    """

    first: Int[Array, ""] | int
    own_tokens: Bool[Array, "T"]


class MixtureOfExperts(nnx.Module):
    """x [*T, hidden] -> float32 [*T, hidden]: the token's routed experts and the shared ones.

    Parameters:
        router [hidden, E] float32, and with sigmoid scores correction_bias [E] float32
        shared_gate [hidden, 1] float32, with `shared_gate`
        gate_up_proj [E, 2 I, hidden], the gate's rows first, and down_proj [E, hidden, I]: [out,
        in], as they are published
        of FP8 experts also gate_up_scale [E, 2, ceil(I / 128), ceil(hidden / 128)], the gate's
        first, and down_scale [E, ceil(hidden / 128), ceil(I / 128)], float32 (`core.fp8_blocks`)
        shared: a `GatedMLP` of `shared_size` columns. Where these are a whole number of experts
        there is none: the last experts of both stacks are the shared ones, beyond the router's E.
        Every token takes them.

    Differentiable in reverse mode, in the chosen experts' weights too unless they are FP8.

    Args:
        expert_size: I, columns of each routed expert.
        router: how tokens choose.
        shared_size: columns of what every token takes; 0 for none.
        shared_gate: the shared experts' output is times sigmoid(x @ shared_gate) (Qwen3-Next).
        weight_format: "fp8" keeps the routed experts in FP8; None keeps all in `param_dtype`.
        own_experts: how many of the router's experts the stacks have, where other GPUs have the
            rest; None: all.
        dtype: the operands of every product but the router's and the gate's. Those are float32; in
            `step`, if `dtype` is bfloat16, they are two bfloat16 products (`ops/router.py`).

    Raises:
        ValueError: there is a gate, and nothing shared.
    """

    def __init__(
        self,
        hidden_size: int,
        expert_size: int,
        router: Router,
        *,
        shared_size: int = 0,
        shared_gate: bool = False,
        weight_format: WeightFormat | None = None,
        own_experts: int | None = None,
        out_init_scale: float = 1.0,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if shared_gate and not shared_size:
            raise ValueError("MixtureOfExperts: shared_gate=True needs a shared_size above 0")
        self.config, self.dtype = router, jnp.dtype(dtype)
        self.hidden_size, self.weight_format = hidden_size, weight_format
        self.always = experts_of_shared(expert_size, shared_size, weight_format)
        experts, stddev = router.experts, hidden_size**-0.5
        self.router = nnx.Param(normal(rngs, (hidden_size, experts), stddev, jnp.float32))
        if router.scores == "sigmoid":
            self.correction_bias = nnx.Param(jnp.zeros((experts,), jnp.float32))
        self.has_gate = shared_gate
        if shared_gate:
            self.shared_gate = nnx.Param(normal(rngs, (hidden_size, 1), stddev, jnp.float32))
        self.own_experts = experts if own_experts is None else own_experts
        experts = self.own_experts + self.always
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
        self.has_shared = bool(shared_size) and not self.always
        if self.has_shared:
            self.shared = GatedMLP(
                hidden_size,
                shared_size,
                out_init_scale=out_init_scale,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

    def __call__(self, x: Float[Array, "*T F"]) -> Float[Array, "*T F"]:
        names = stacked_names(self.weight_format, self.has_gate)
        stacks = {name: getattr(self, name)[...][None] for name in names}
        if self.weight_format is None:
            for name in EXPERTS:
                stacks[name] = stacks[name].astype(self.dtype)
        gate = self.shared_gate[...] if self.has_gate else None
        return self._sum(x, stacks, 0, *self._exact_logits(x, self.router[...], gate))[0]

    def step(
        self,
        x: Float[Array, "*T F"],
        stacks: Mapping[str, Array],
        layer: LayerOf,
        *,
        valid: Bool[Array, "*T"] | None = None,
        share: Share | None = None,
        arena: Arena | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "*T F"], Arena | None]:
        """The experts' sum in a loop over layers, and the arena. Not differentiable on a GPU.

        Args:
            stacks: the parameters `stacked_names` of all layers, [L, ...] each, in place of its
                own: the experts of a layer are too many bytes to be sliced out. The router and
                the gate may be one matrix, see `split_router`.
            layer: this layer's number in `stacks`.
            valid: whether a token is no padding; padding takes no expert.
            share: which experts are this GPU's, where others have the rest; the output is its part
                of the sum.
            arena: scratch of at least `jaxattn.moe.scratch(tokens=T, ...)`.
        """
        router, gate = stacks["router"], stacks.get("shared_gate")
        if self.dtype == jnp.bfloat16:
            columns = router_logits(x, router, layer, implementation, gates=gate)
            logits, opening = self._columns(columns)
        else:
            of_layer = None if gate is None else gate[layer.index]
            logits, opening = self._exact_logits(x, router[layer.index], of_layer)
        return self._sum(x, stacks, layer, logits, opening, valid, share, arena, implementation)

    def choose(
        self, logits: Float[Array, "T E"], implementation: Implementation | None
    ) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
        """The routed experts of each token, and their weights."""
        bias = self.correction_bias[...] if self.config.scores == "sigmoid" else None
        by = implementation if route_serves(self.config.experts) else "xla"
        return route(logits, bias, self.config, implementation=by)

    def _exact_logits(
        self, x: Array, router: Array, gate: Array | None
    ) -> tuple[Float[Array, "T E"], Float[Array, "T 1"] | None]:
        check_features("MixtureOfExperts", x, "F", "router", (self.hidden_size,), 0)
        weight = router if gate is None else jnp.concatenate([router, gate], axis=-1)
        tokens = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        return self._columns(jnp.matmul(tokens, weight, precision="highest"))

    def _columns(
        self, products: Float[Array, "T N"]
    ) -> tuple[Float[Array, "T E"], Float[Array, "T 1"] | None]:
        """The router's logits, and of the column behind them what the shared experts are times."""
        count = self.config.experts
        if not self.has_gate:
            return products, None
        return products[:, :count], jax.nn.sigmoid(products[:, count : count + 1])

    def _sum(
        self,
        x: Array,
        stacks: Mapping[str, Array],
        layer: int | LayerOf,
        logits: Array,
        opening: Array | None,
        valid: Array | None = None,
        share: Share | None = None,
        arena: Arena | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Array, Arena | None]:
        ids, weights = self.choose(logits, implementation)
        if share is not None:
            ids = ids - share.first
            ids = jnp.where((ids >= 0) & (ids < self.own_experts), ids, -1)
        if self.always:
            last = self.own_experts + jnp.arange(self.always, dtype=ids.dtype)
            last = jnp.broadcast_to(last, (len(ids), self.always))
            if share is not None:
                last = jnp.where(share.own_tokens[:, None], last, -1)
            ids = jnp.concatenate([ids, last], 1)
            opened = jnp.ones((len(ids), 1), weights.dtype) if opening is None else opening
            opened = jnp.broadcast_to(opened, (len(ids), self.always))
            weights = jnp.concatenate([weights, opened], 1)
        if valid is not None:
            ids = jnp.where(valid.reshape(-1, 1), ids, -1)
        found = mixture_of_experts(
            x.reshape(-1, x.shape[-1]).astype(self.dtype),
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
        if self.has_shared:
            shared = self.shared(x)
            gated = shared if opening is None else shared * opening.reshape(*x.shape[:-1], 1)
            y = y + gated
        return y, arena


def stacked_names(weight_format: WeightFormat | None, shared_gate: bool = False) -> tuple[str, ...]:
    """The parameters that a step reads out of a whole stack of layers."""
    names = ("router", *(("shared_gate",) if shared_gate else ()), *EXPERTS)
    return (*names, "gate_up_scale", "down_scale") if weight_format == "fp8" else names


def experts_of_shared(
    expert_size: int, shared_size: int, weight_format: WeightFormat | None
) -> int:
    """How many of the stack's experts are shared ones, which every token takes: 0 where their
    columns are no whole experts', or blocks of FP8 scales would lie across two."""
    count, rest = divmod(shared_size, expert_size)
    across = weight_format == "fp8" and count > 1 and expert_size % BLOCK
    return 0 if rest or across else count
