"""A mixture of experts as a module: router, routed experts and shared experts."""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxattn.arena import Arena
from jaxattn.core.dispatch import Implementation
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics import four_bit_tiles
from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.core.numerics.fp8_block_scaling import BLOCK, quantize
from jaxattn.core.numerics.swiglu import ClampedSwiGLU
from jaxattn.core.validation.array_checks import check_features
from jaxattn.core.validation.varying_axes import match_varying_axes
from jaxattn.nn.linear import normal
from jaxattn.nn.mlp import GatedMLP
from jaxattn.ops.linear.norm_linear import ExpertOutputs, PendingNorm, tokens_of
from jaxattn.ops.moe.experts import RoutedToken, mixture_of_experts
from jaxattn.ops.moe.router_logits import router_products, sum_split_logits, training_logits
from jaxattn.ops.moe.router_shared_experts import router_shared_experts, supports_fused_router
from jaxattn.ops.moe.routing import Router, choose_experts, route_serves

type WeightFormat = Literal["fp8"] | FourBitFormat


EXPERTS = ("gate_up_proj", "down_proj")
BIASES = ("router_bias", "gate_up_bias", "down_bias")


class ExpertShare(NamedTuple):
    """The consecutive experts of one of several GPUs.

    Attributes:
        first_expert: the number of the GPU's first routed expert.
        shared_expert_tokens: the tokens for which this GPU computes the shared experts, which every
            GPU has.
    """

    first_expert: Int[Array, ""] | int
    shared_expert_tokens: Bool[Array, "T"]


class MixtureOfExperts(nnx.Module):
    """x [*T, hidden] -> float32 [*T, hidden]: the sum of each token's routed and shared experts.

    Parameters:
        router [hidden, E] float32, and with sigmoid scores correction_bias [E] float32
        with `biases`: router_bias [E] float32, gate_up_bias [E, 2 I], down_bias [E, hidden]
        with `shared_gate`: shared_gate [hidden, 1] float32
        gate_up_proj [E, 2 I, hidden], the gate's rows first, and down_proj [E, hidden, I]: [out,
        in], as in checkpoints
        with FP8 experts: gate_up_scale [E, 2, ceil(I / 128), ceil(hidden / 128)], the gate's first,
        and down_scale [E, ceil(hidden / 128), ceil(I / 128)], float32
        (`core.numerics.fp8_block_scaling`)
        4-bit experts are tiles with their scales, uint8 (`core.numerics.four_bit_tiles`):
        gate_up_proj [E, 2, I / 64, hidden / C, bytes], down_proj [E, hidden / 64, I / C, bytes]
        shared: a `GatedMLP` of `shared_size` columns, unless both stacks hold the shared experts
        (`experts_of_shared`), which requires that `shared_size` is a multiple of I. The last
        experts of the stacks, after the router's E, are then the shared experts, and every token
        uses them.

    Differentiable in reverse mode, also in the chosen experts' weights, unless these are quantized.

    Args:
        expert_size: I, columns of each routed expert.
        router: the `Router`, which chooses the experts of a token.
        shared_size: columns of the shared experts, which every token uses; 0 for none.
        shared_gate: the shared experts' output is multiplied by sigmoid(x @ shared_gate)
            (Qwen3-Next).
        biases: the router's logits and both products of each expert have biases (gpt-oss).
        activation: activation of the routed experts; None is silu(gate) * up.
        bias_parts: the number of GPUs that each add a part of down_bias, because each GPU has some
            columns of an expert.
        weight_format: "fp8" keeps the routed experts in FP8, and a `FourBitFormat` in 4 bits; None
            keeps all weights in `param_dtype`.
        own_experts: the number of the router's experts in the stacks, if other GPUs have the rest;
            None: all experts.
        fp8: the `fp8` argument of a separate shared MLP; see `GatedMLP`.
        dtype: dtype of the operands of all products, except for the products of the router and the
            gate, which are float32. If `dtype` is bfloat16, `step` computes each product of the
            router and the gate as two bfloat16 products, and a call of the module as three
            (`moe/router_logits.py`). The gradient of a call has bfloat16 products.

    Raises:
        ValueError: `shared_gate` is given without shared experts, or `biases` or `activation` with
            shared experts.
    """

    def __init__(
        self,
        hidden_size: int,
        expert_size: int,
        router: Router,
        *,
        shared_size: int = 0,
        shared_gate: bool = False,
        biases: bool = False,
        activation: ClampedSwiGLU | None = None,
        bias_parts: int = 1,
        weight_format: WeightFormat | None = None,
        own_experts: int | None = None,
        fp8: Collection[str] = (),
        out_init_scale: float = 1.0,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if shared_gate and not shared_size:
            raise ValueError("MixtureOfExperts: shared_gate=True needs a shared_size above 0")
        if shared_size and (biases or activation is not None):
            raise ValueError(
                "MixtureOfExperts: biases and activation are not supported with shared experts; "
                f"got {shared_size=}"
            )
        self.activation, self.bias_parts = activation, bias_parts
        self.config, self.dtype = router, jnp.dtype(dtype)
        self.hidden_size, self.weight_format = hidden_size, weight_format
        self.always = experts_of_shared(expert_size, shared_size, weight_format)
        experts, stddev = router.experts, hidden_size**-0.5
        self.router = nnx.Param(normal(rngs, (hidden_size, experts), stddev, jnp.float32))
        self.has_bias = router.scores == "sigmoid"
        if self.has_bias:
            self.correction_bias = nnx.Param(jnp.zeros((experts,), jnp.float32))
        self.has_biases = biases
        if biases:
            num_local_experts = experts if own_experts is None else own_experts
            self.router_bias = nnx.Param(jnp.zeros((experts,), jnp.float32))
            self.gate_up_bias = nnx.Param(
                jnp.zeros((num_local_experts, 2 * expert_size), param_dtype)
            )
            self.down_bias = nnx.Param(jnp.zeros((num_local_experts, hidden_size), param_dtype))
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
        if self.form is None:
            gate_up = gate_up.reshape(experts, 2 * expert_size, hidden_size)
        else:
            gate_up, down_proj = (
                four_bit_tiles.quantize(each, self.form) for each in (gate_up, down_proj)
            )
        self.gate_up_proj = nnx.Param(gate_up)
        self.down_proj = nnx.Param(down_proj)
        self.has_shared = bool(shared_size) and not self.always
        if self.has_shared:
            self.shared = GatedMLP(
                hidden_size,
                shared_size,
                fp8=fp8,
                out_init_scale=out_init_scale,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

    @property
    def form(self) -> FourBitFormat | None:
        """The format of 4-bit experts."""
        return self.weight_format if isinstance(self.weight_format, FourBitFormat) else None

    def __call__(self, x: Float[Array, "*T F"]) -> Float[Array, "*T F"]:
        names = stacked_names(self.weight_format, self.has_gate, self.has_bias, self.has_biases)
        stacks = {name: getattr(self, name)[...][None] for name in names}
        if self.weight_format is None:
            for name in EXPERTS:
                stacks[name] = stacks[name].astype(self.dtype)
        gate = self.shared_gate[...] if self.has_gate else None
        bias = self.router_bias[...] if self.has_biases else None
        only = LayerIndex(jnp.int32(0), 1, 0)
        return self._sum(x, stacks, only, self._exact_logits(x, self.router[...], gate, bias))[0]

    def step(
        self,
        x: Float[Array, "*T F"] | PendingNorm,
        stacks: Mapping[str, Array],
        layer: LayerIndex,
        *,
        valid: Bool[Array, "*T"] | Int[Array, "*T"] | None = None,
        share: ExpertShare | None = None,
        arena: Arena | None = None,
        apart: bool = False,
        implementation: Implementation | None = None,
    ) -> tuple[Any, Arena | None]:
        """The sum of one layer's experts, for a loop over layers, and the arena.

        This method is not differentiable on a GPU.

        Args:
            stacks: the parameters `stacked_names` of all layers, each [L, ...], which replace the
                module's own. Slicing one layer's experts out of the stack would copy too many
                bytes. The router and the gate may be one matrix, see `split_router`.
            layer: the index of this layer in `stacks`.
            valid: whether a token is not padding, as a bool or a number; padding uses no expert.
            share: the experts of this GPU, if other GPUs have the rest; the output is then the
                GPU's part of the sum.
            arena: scratch of at least `jaxattn.moe.scratch(tokens=T, ...)`.
            apart: whether the result may be an `ExpertOutputs`; see `mixture_of_experts`.
        """
        router, gate = stacks["router"], stacks.get("shared_gate")
        bias = stacks.get("router_bias")
        is_bfloat16 = self.dtype == jnp.bfloat16
        can_fuse_router = (
            arena is not None and share is None and not self.has_biases and self.form is None
        )
        if isinstance(x, PendingNorm):
            shape = jax.ShapeDtypeStruct((x.size // x.shape[-1], x.shape[-1]), self.dtype)
            fuses_router = can_fuse_router and self._supports_fused_router(shape, stacks)
            if fuses_router and arena is not None:
                return self._run_fused_router(x, stacks, layer, valid, arena, apart, implementation)
            if is_bfloat16 and x.serves([router], layer):
                (logits,) = x.linears(
                    (router,), layer=layer, out_dtypes=[jnp.float32], give=True,
                    biases=None if bias is None else [bias],
                )  # fmt: skip
                logits = logits.reshape(shape.shape[0], -1)
                return self._sum(
                    tokens_of(x), stacks, layer, logits, is_bfloat16, valid, share, arena, apart,
                    implementation,
                )  # fmt: skip
            x = tokens_of(x)
        tokens = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        if arena is not None and can_fuse_router and self._supports_fused_router(tokens, stacks):
            return self._run_fused_router(x, stacks, layer, valid, arena, apart, implementation)
        if is_bfloat16:
            logits = router_products(x, router, layer, implementation, gates=gate, biases=bias)
        else:
            layer_gate = None if gate is None else gate[layer.index]
            layer_bias = None if bias is None else bias[layer.index]
            logits = self._exact_logits(x, router[layer.index], layer_gate, layer_bias)
        return self._sum(
            x, stacks, layer, logits, is_bfloat16, valid, share, arena, apart, implementation
        )

    def _run_fused_router(
        self,
        x: Array | PendingNorm,
        stacks: Mapping[str, Array],
        layer: LayerIndex,
        valid: Array | None,
        arena: Arena,
        apart: bool,
        implementation: Implementation | None,
    ) -> tuple[Any, Arena | None]:
        token = x if isinstance(x, PendingNorm) else x.reshape(1, -1).astype(self.dtype)
        ids, weights, listed, arena = self.open(token, stacks, layer, valid, arena, implementation)
        normed = tokens_of(token).reshape(1, -1)
        y, new_arena = self._mixed(
            normed, ids, weights, listed, stacks, layer, arena, apart, implementation
        )
        return y if isinstance(y, ExpertOutputs) else y.reshape(x.shape), new_arena

    def choose(
        self,
        logits: Float[Array, "T N"],
        halves: bool,
        always: int,
        valid: Array | None,
        biases: Float[Array, "L E"] | None,
        layer: LayerIndex,
        x: Array | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Int[Array, "T K"], Float[Array, "T K"], RoutedToken | None]:
        """The experts of each token and their weights, see `choose_experts`."""
        return choose_experts(
            logits,
            biases,
            self.config,
            layer=None if biases is None else layer,
            halves=halves,
            always=always,
            gated=self.has_gate,
            valid=valid,
            x=x,
            implementation=implementation if route_serves(self.config.experts) else "xla",
        )

    def open(
        self,
        tokens: Float[Array, "1 F"] | PendingNorm,
        stacks: Mapping[str, Array],
        layer: LayerIndex,
        valid: Array | None,
        arena: Arena,
        implementation: Implementation | None,
    ) -> tuple[Int[Array, "1 K"], Float[Array, "1 K"], RoutedToken | None, Arena]:
        """The experts and weights of each token, and the other results of
        `router_shared_experts`."""
        return router_shared_experts(
            tokens,
            stacks["router"],
            stacks.get("correction_bias"),
            stacks["gate_up_proj"],
            self.config,
            layer=layer,
            always=self.always,
            valid=None if valid is None else valid.reshape(-1),
            arena=arena,
            implementation=implementation,
        )

    def _exact_logits(
        self, x: Array, router: Array, gate: Array | None, bias: Array | None
    ) -> Float[Array, "T N"]:
        check_features("MixtureOfExperts", x, "F", "router", (self.hidden_size,), 0)
        weight = router if gate is None else jnp.concatenate([router, gate], axis=-1)
        tokens = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        if self.dtype == jnp.bfloat16:
            wide = weight.astype(jnp.float32)  # the gradient is cast back to the parameter's dtype
            logits = training_logits(*match_varying_axes((tokens, wide)))
        else:
            logits = jnp.matmul(tokens, weight, precision="highest")
        return logits if bias is None else logits + jnp.pad(bias, (0, weight.shape[1] - len(bias)))

    def _shared_expert_gate(self, logits: Float[Array, "T N"], halves: bool) -> Float[Array, "T 1"]:
        """The factor of the shared experts' output."""
        if not self.has_gate:
            return jnp.ones((len(logits), 1), jnp.float32)
        count = self.config.experts
        columns = sum_split_logits(logits) if halves else logits
        return jax.nn.sigmoid(columns[:, count : count + 1])

    def _choose_local_experts(
        self,
        logits: Array,
        halves: bool,
        valid: Array | None,
        biases: Array | None,
        layer: LayerIndex,
        share: ExpertShare,
        implementation: Implementation | None,
    ) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
        """`choose` on one of several GPUs; ids are indices of the GPU's own experts."""
        ids, weights, _ = self.choose(
            logits, halves, self.always, valid, biases, layer, implementation=implementation
        )
        # `choose` gives padding -1 and puts the shared experts after the routed ones.
        routed, always = ids - share.first_expert, ids - self.config.experts
        own = (routed >= 0) & (routed < self.own_experts)
        last = jnp.where(share.shared_expert_tokens[:, None], self.own_experts + always, -1)
        return jnp.where(always >= 0, last, jnp.where(own, routed, -1)), weights

    def _sum(
        self,
        x: Array,
        stacks: Mapping[str, Array],
        layer: LayerIndex,
        logits: Array,
        halves: bool = False,
        valid: Array | None = None,
        share: ExpertShare | None = None,
        arena: Arena | None = None,
        apart: bool = False,
        implementation: Implementation | None = None,
    ) -> tuple[Any, Arena | None]:
        valid = None if valid is None else valid.reshape(-1)
        biases = stacks.get("correction_bias")
        tokens, listed = x.reshape(-1, x.shape[-1]).astype(self.dtype), None
        if share is None:
            ids, weights, listed = self.choose(
                logits,
                halves,
                self.always,
                valid,
                biases,
                layer,
                x=tokens if arena is not None and len(tokens) == 1 else None,
                implementation=implementation,
            )
        else:
            ids, weights = self._choose_local_experts(
                logits, halves, valid, biases, layer, share, implementation
            )
        apart = apart and not self.has_shared
        y, arena = self._mixed(
            tokens, ids, weights, listed, stacks, layer, arena, apart, implementation
        )
        if isinstance(y, ExpertOutputs):
            return y, arena
        y = y.reshape(x.shape)
        if self.has_shared:
            shared_expert_gate = self._shared_expert_gate(logits, halves).reshape(*x.shape[:-1], 1)
            y = y + self.shared(x) * shared_expert_gate
        return y, arena

    def _supports_fused_router(self, tokens: Any, stacks: Mapping[str, Array]) -> bool:
        """Whether one launch supports the choice of experts and the shared experts' gate and up."""
        return supports_fused_router(
            tokens, stacks["router"], stacks["gate_up_proj"], self.config, self.always
        )

    def _mixed(
        self,
        tokens: Float[Array, "T F"],
        ids: Array,
        weights: Array,
        listed: RoutedToken | None,
        stacks: Mapping[str, Array],
        layer: LayerIndex,
        arena: Arena | None,
        apart: bool,
        implementation: Implementation | None,
    ) -> tuple[Any, Arena | None]:
        """The output of the chosen experts, and the arena."""
        down_bias = stacks.get("down_bias")
        if down_bias is not None and self.bias_parts > 1:
            down_bias = down_bias / self.bias_parts
        result = mixture_of_experts(
            tokens,
            ids,
            weights,
            stacks["gate_up_proj"],
            stacks["down_proj"],
            gate_up_scale=stacks.get("gate_up_scale"),
            down_scale=stacks.get("down_scale"),
            gate_up_bias=stacks.get("gate_up_bias"),
            down_bias=down_bias,
            activation=self.activation,
            form=self.form,
            layer=layer,
            arena=arena,
            listed=listed,
            apart=apart,
            implementation=implementation,
        )
        return (result, None) if arena is None else result


def stacked_names(
    weight_format: WeightFormat | None,
    shared_gate: bool = False,
    bias: bool = False,
    biases: bool = False,
) -> tuple[str, ...]:
    """The parameters that a step reads from the stack of all layers."""
    gate = ("shared_gate",) if shared_gate else ()
    names = ("router", *gate, *(("correction_bias",) if bias else ()), *EXPERTS)
    names = (*names, *BIASES) if biases else names
    return (*names, "gate_up_scale", "down_scale") if weight_format == "fp8" else names


def experts_of_shared(
    expert_size: int, shared_size: int, weight_format: WeightFormat | None
) -> int:
    """The number of shared experts that are stored in the stack, which every token uses.

    It is 0 if `shared_size` is not a whole number of experts, or if blocks of FP8 scales would span
    two experts. Checkpoints with 4-bit experts store the shared experts as floats, so it is 0 too.
    """
    if isinstance(weight_format, FourBitFormat):
        return 0
    count, rest = divmod(shared_size, expert_size)
    across = weight_format == "fp8" and count > 1 and expert_size % BLOCK
    return 0 if rest or across else count
