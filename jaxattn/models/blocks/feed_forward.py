"""The interface of feed-forwards, a gated MLP, and a mixture of experts."""

import abc
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxattn import moe
from jaxattn.arena import Arena, ArenaSpec
from jaxattn.core.dispatch import Implementation
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.core.numerics.swiglu import ClampedSwiGLU
from jaxattn.kernels.linear.cta import STEP
from jaxattn.models.blocks.mixer import Matrix, Stream
from jaxattn.models.caches.layer_cache import Arrays
from jaxattn.nn import GatedMLP, MixtureOfExperts
from jaxattn.nn.four_bit_linear import FourBitLinears
from jaxattn.nn.moe import ExpertShare, WeightFormat, experts_of_shared, stacked_names
from jaxattn.ops.linear.norm_linear import PendingNorm
from jaxattn.ops.moe.router_logits import split_biases, split_router
from jaxattn.ops.moe.routing import Router
from jaxattn.parallel import ALONE, Dimension, Parallel, rank

SHARED = "shared."  # prefix of the names of a shared MLP's linears


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForward(abc.ABC):
    """The part of a layer after the mixer: `module(x)` for normed tokens.

    Attributes:
        fp8: The names of the linears with FP8 weights (see `jaxattn.nn.Fp8Linear`), or
            `FourBitLinears` for 4 bits.
        norms: Whether `step` takes tokens as a `PendingNorm`.
        stacked: Names of parameters that a step reads from the stack of all repeats, because they
            are too large to be sliced out of it.
    """

    fp8: tuple[str, ...] | FourBitLinears = ()

    norms: ClassVar[bool] = False

    def matrices(self, stream: Stream) -> dict[str, Matrix]:
        """Returns the linears that may be among `fp8`."""
        return {}

    @property
    def stacked(self) -> tuple[str, ...]:
        return ()

    @property
    def summed_over(self) -> Dimension:
        """The GPUs whose partial outputs add up: "tensor" or "experts"."""
        return "tensor"

    @abc.abstractmethod
    def build(self, stream: Stream, rngs: nnx.Rngs) -> nnx.Module: ...

    def scratch(self, stream: Stream, tokens: int) -> ArenaSpec:
        """Returns the scratch of a decode step of so many tokens."""
        return ArenaSpec()

    def pack(self, stream: Stream, params: Mapping[str, Any]) -> dict[str, Array]:
        """Returns the parameters [repeats, ...] that steps read faster in another form, by name.

        Names are those of the parameters, such as "router" or "gate_proj.weight".
        """
        return {}

    def share(self, tokens: int) -> Any:
        """Returns this GPU's share of a step of `tokens` tokens, or None if it is the only GPU.

        A step computes the share before its loop over layers. In the loop, reading the number of
        the GPU would be a launch per layer that CUDA graphs cannot capture.
        """
        return None

    def step(
        self,
        module: Any,
        x: Array,
        valid: Array,
        stacks: Arrays,
        layer: LayerIndex,
        arena: Arena | None,
        implementation: Implementation | None,
        defer_sum: bool = False,
        share: Any = None,
    ) -> tuple[Any, Arena | None]:
        """Returns the output and the arena.

        Args:
            valid: Whether each token is not padding, as bools or numbers.
            stacks: The parameters in `stacked`, [repeats, ...] each.
            layer: The index of this layer in them.
            arena: None in prefill.
            defer_sum: Whether the output may be an `ExpertOutputs`, which the next norm sums up.
            share: The step's share; see `share`.
        """
        return module(x), arena


def _of_mlp(hidden: int, columns: int) -> dict[str, Matrix]:
    wide = Matrix(hidden, columns)
    return {"gate_proj": wide, "up_proj": wide, "down_proj": Matrix(columns, hidden)}


def _without(prefix: str, names: tuple[str, ...] | FourBitLinears) -> Collection[str]:
    """Returns the names without their prefix."""
    short = tuple(name.removeprefix(prefix) for name in names)
    return FourBitLinears(short, names.form) if isinstance(names, FourBitLinears) else short


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP(FeedForward):
    """A gated MLP of `intermediate_size` columns."""

    intermediate_size: int

    def build(self, stream: Stream, rngs: nnx.Rngs) -> GatedMLP:
        return GatedMLP(
            stream.hidden_size, self.intermediate_size, fp8=self.fp8, **stream.dtypes, rngs=rngs
        )

    def matrices(self, stream: Stream) -> dict[str, Matrix]:
        return _of_mlp(stream.hidden_size, self.intermediate_size)

    def pack(self, stream: Stream, params: Mapping[str, Any]) -> dict[str, Array]:
        """Pads columns with zeros to a multiple of the kernels' step; their products add exactly 0.

        The kernel reads a layer's matrices in place, whereas XLA's products copy them out of the
        stacks.
        """
        if stream.dtype != "bfloat16" or self.intermediate_size % STEP == 0:
            return {}

        def padded(name: str, axis: int) -> Array:
            weight = params[name]["weight"][...]
            more = -weight.shape[axis] % STEP
            return jnp.pad(weight, [(0, more if i == axis else 0) for i in range(weight.ndim)])

        axes = {"gate_proj": 2, "up_proj": 2, "down_proj": 1}
        return {f"{name}.weight": padded(name, axis) for name, axis in axes.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE(FeedForward):
    """Routed experts of `expert_size` columns, and shared experts of `shared_size` columns in all.

    Attributes:
        shared_gate: Whether the shared experts' output is multiplied by a sigmoid of the token.
        biases: Whether the router's logits and both products of each expert have biases.
        activation: Activation of the experts. None means silu(gate) * up.
        weight_format: Format of the routed experts: "fp8" for FP8 in blocks, a `FourBitFormat` for
            tiles of 4 bits, None for the stream's dtype.
        parallel: The layout of the GPUs that share the layer; each has some columns and some
            experts.
    """

    expert_size: int
    router: Router
    shared_size: int = 0
    shared_gate: bool = False
    biases: bool = False
    activation: ClampedSwiGLU | None = None
    weight_format: WeightFormat | None = None
    parallel: Parallel = ALONE

    norms = True

    @property
    def own_experts(self) -> int:
        """The number of routed experts on one GPU."""
        return self.router.experts // self.parallel.size("expert")

    @property
    def form(self) -> FourBitFormat | None:
        """The 4-bit format of the experts, or None."""
        return self.weight_format if isinstance(self.weight_format, FourBitFormat) else None

    @property
    def stacked(self) -> tuple[str, ...]:
        sigmoid = self.router.scores == "sigmoid"
        return stacked_names(self.weight_format, self.shared_gate, sigmoid, self.biases)

    @property
    def summed_over(self) -> Dimension:
        return "experts"

    @property
    def always(self) -> int:
        """The number of shared experts, the last of the stack, which every token uses."""
        return experts_of_shared(self.expert_size, self.shared_size, self.weight_format)

    def pack(self, stream: Stream, params: Mapping[str, Any]) -> dict[str, Array]:
        if stream.dtype != "bfloat16":
            return {}
        router = params["router"][...]
        if self.shared_gate:
            gate = params["shared_gate"][...]
            return {"router": split_router(router, gate), "shared_gate": gate[:, :0]}
        halves = split_router(router)
        if not self.biases:
            return {"router": halves}
        biases = split_biases(params["router_bias"][...], halves.shape[-1])
        return {"router": halves, "router_bias": biases}

    def build(self, stream: Stream, rngs: nnx.Rngs) -> MixtureOfExperts:
        return MixtureOfExperts(
            stream.hidden_size,
            self.expert_size,
            self.router,
            shared_size=self.shared_size,
            shared_gate=self.shared_gate,
            biases=self.biases,
            activation=self.activation,
            bias_parts=self.parallel.size("columns"),
            weight_format=self.weight_format,
            own_experts=self.own_experts,
            fp8=_without(SHARED, self.fp8),
            **stream.dtypes,
            rngs=rngs,
        )

    def matrices(self, stream: Stream) -> dict[str, Matrix]:
        if not self.shared_size or self.always:
            return {}
        found = _of_mlp(stream.hidden_size, self.shared_size)
        return {f"{SHARED}{name}": matrix for name, matrix in found.items()}

    def step(
        self,
        module: MixtureOfExperts,
        x: Array | PendingNorm,
        valid: Array,
        stacks: Arrays,
        layer: LayerIndex,
        arena: Arena | None,
        implementation: Implementation | None,
        defer_sum: bool = False,
        share: ExpertShare | None = None,
    ) -> tuple[Any, Arena | None]:
        return module.step(
            x,
            stacks,
            layer,
            valid=valid,
            share=share,
            arena=arena,
            apart=defer_sum,
            implementation=implementation,
        )

    def share(self, tokens: int) -> ExpertShare | None:
        """Returns this GPU's experts and its part of the tokens, or None if it has all experts."""
        groups = self.parallel.size("expert")
        if groups == 1:
            return None
        number = rank(self.parallel, "expert")
        own_tokens = jnp.arange(tokens) * groups // tokens == number
        return ExpertShare(number * self.own_experts, own_tokens)

    def scratch(self, stream: Stream, tokens: int) -> ArenaSpec:
        met = self.parallel.data if self.parallel.experts_meet else 1
        return moe.scratch(
            tokens=tokens * met,
            top_k=self.router.top_k + self.always,
            experts=self.own_experts + self.always,
            hidden=stream.hidden_size,
            expert_size=self.expert_size,
            dtype=jnp.dtype(stream.dtype),
            fp8=self.weight_format == "fp8",
            form=self.form,
        )
