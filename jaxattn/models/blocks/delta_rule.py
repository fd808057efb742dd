"""Mixers with a recurrent state: the gated delta net and Kimi Delta Attention."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxattn import gdn, kda
from jaxattn.arena import Arena, ArenaSpec
from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.dispatch import Implementation
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.fp8_block_scaling import BLOCK
from jaxattn.core.numerics.fp8_weight_layout import interleave_columns, split_fp8
from jaxattn.kernels.linear.cta import ROWS
from jaxattn.models.blocks.mixer import Matrix, Mixer, Stream
from jaxattn.models.caches.cache_layouts import RecurrentState
from jaxattn.models.caches.layer_cache import Arrays
from jaxattn.models.interface import DecodeBatch, PrefillBatch
from jaxattn.nn import GatedDeltaNet, KimiDeltaAttention
from jaxattn.nn.fp8_linear import ExtraFp8Weights
from jaxattn.nn.linear import StackedWeight
from jaxattn.ops.linear.norm_linear import PendingNorm


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaMixer(Mixer):
    """A delta rule after a short convolution, with states in slots."""

    conv_width: int = 4

    cache_name = "delta"

    @property
    @abc.abstractmethod
    def conv_dim(self) -> int:
        """Dc, the number of channels of the convolution."""

    @property
    @abc.abstractmethod
    def state_shape(self) -> tuple[int, int, int]:
        """[Hv, Dv, Dk]."""

    @property
    @abc.abstractmethod
    def key_heads(self) -> int: ...

    def cache(self, stream: Stream, layers: int) -> RecurrentState:
        return RecurrentState(
            name=self.cache_name,
            layers=layers,
            conv_shape=(self.conv_width - 1, self.conv_dim),
            conv_dtype=jnp.dtype(stream.dtype),
            state_shape=self.state_shape,
            kind=type(self).__name__,
        )

    def scratch(
        self, stream: Stream, rows: int, *, q_len: int, max_pages: int, page_size: int
    ) -> ArenaSpec:
        heads, value_dim, _ = self.state_shape
        return gdn.scratch(
            batch=rows,
            q_len=q_len,
            num_v_heads=heads,
            head_v_dim=value_dim,
            dtype=jnp.dtype(stream.dtype),
        )

    def mixed(
        self,
        module: GatedDeltaNet | KimiDeltaAttention,
        x: Array,
        arrays: Arrays,
        arena: Arena | None,
        prompts: PrefillBatch,
        lines: PromptLines,
        rows: DecodeBatch | None,
        layer: LayerIndex,
        weights: Array | None,
        shared: object,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena | None]:
        row_options = None
        if rows is not None:
            row_options = {
                "state_indices": rows.state_indices,
                "write_indices": rows.write_indices,
                "weights": weights,
                "arena": arena,
            }
        y, conv_state, ssm_state, arena_after = module.mixed(
            x,
            arrays["conv_state"],
            arrays["ssm_state"],
            lines=lines,
            state_indices=prompts.state_indices,
            seq_lens=prompts.seq_lens,
            query_lens=prompts.query_lens,
            rows=row_options,
            layer=layer.index,
            implementation=implementation,
        )
        return y, {"conv_state": conv_state, "ssm_state": ssm_state}, arena_after

    def decode(
        self,
        module: GatedDeltaNet | KimiDeltaAttention,
        x: Array | PendingNorm,
        arrays: Arrays,
        arena: Arena,
        batch: DecodeBatch,
        layer: LayerIndex,
        weights: Array | None,
        shared: object,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena]:
        y, conv_state, ssm_state, arena_after = module.decode(
            x,
            arrays["conv_state"],
            arrays["ssm_state"],
            state_indices=batch.state_indices,
            write_indices=batch.write_indices,
            layer=layer,
            weights=weights,
            arena=arena,
            implementation=implementation,
        )
        assert arena_after is not None  # an arena was given
        return y, {"conv_state": conv_state, "ssm_state": ssm_state}, arena_after


def _small_weights(params: Any) -> list[Array]:
    """Returns A_log, dt_bias, the norm's weight and the convolution's taps of all repeats."""
    names = ("A_log", "dt_bias", "norm", "conv1d")
    leaves = (params[n]["weight"] if n == "norm" else params[n] for n in names)
    return [leaf[...] for leaf in leaves]


@jax.jit
def _two_parts(weights: Float[Array, "repeats K N"]) -> tuple[Array, Array]:
    numbers, scales = split_fp8(weights.swapaxes(1, 2))
    return interleave_columns(numbers), scales


def _widened_gates(stream: Stream, params: Any, name: str, columns: int) -> dict[str, Array]:
    """Pads the gates to a multiple of `columns`, so that one launch computes all projections.

    Decoding uses everything that the launch writes, without a slice.
    """
    gates = params[name]["weight"][...]
    more = -gates.shape[-1] % columns
    if stream.dtype != "bfloat16" or not more:
        return {}
    return {f"{name}.weight": jnp.pad(gates, ((0, 0), (0, 0), (0, more)))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GDN(DeltaMixer):
    """A gated delta net with states in slots, with Qwen3-Next's parameter names."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int = 128
    head_v_dim: int = 128

    norms = True
    kernels = {"gated_delta_rule_decode": "gdn_decode"}

    @property
    def conv_dim(self) -> int:
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_v_heads, self.head_v_dim, self.head_k_dim

    @property
    def key_heads(self) -> int:
        return self.num_k_heads

    def build(self, stream: Stream, rngs: nnx.Rngs) -> GatedDeltaNet:
        return GatedDeltaNet(
            stream.hidden_size,
            self.num_k_heads,
            self.num_v_heads,
            head_k_dim=self.head_k_dim,
            head_v_dim=self.head_v_dim,
            conv_width=self.conv_width,
            fp8=self.fp8,
            eps=stream.eps,
            **stream.dtypes,
            rngs=rngs,
        )

    def matrices(self, stream: Stream) -> dict[str, Matrix]:
        values = self.num_v_heads * self.head_v_dim
        # Checkpoints store q, k, v and z of one key head after another.
        together = self.head_k_dim, values // self.num_k_heads
        return {
            "in_proj_qkvz": Matrix(stream.hidden_size, self.conv_dim + values, together),
            "out_proj": Matrix(values, stream.hidden_size),
        }

    def pack(self, params: Any) -> Float[Array, "repeats W"]:
        return gdn.pack_gdn_weights(*_small_weights(params))

    def beside(self, stream: Stream, params: Any) -> tuple[Array, Array] | None:
        gates = 2 * self.num_v_heads
        whole = 2 * gates == BLOCK or gates % BLOCK == 0
        if stream.dtype != "bfloat16" or "in_proj_qkvz" not in self.fp8 or not whole:
            return None
        return _two_parts(params["in_proj_ba"]["weight"][...])

    def attach_extra_weights(
        self, module: Any, weights: StackedWeight, scales: StackedWeight
    ) -> None:
        module.gates_in_stack = ExtraFp8Weights(weights, scales, jnp.dtype(jnp.float32))

    def widened(self, stream: Stream, params: Any) -> dict[str, Array]:
        return _widened_gates(stream, params, "in_proj_ba", ROWS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDA(DeltaMixer):
    """Kimi Delta Attention with states in slots.

    Attributes:
        gate_rank: Rank of the projections to decays and output gate. None projects directly.
        lower_bound: Lower bound of the log decays. None means Kimi's gate.
    """

    num_heads: int
    head_dim: int = 128
    gate_rank: int | None = None
    lower_bound: float | None = None

    norms = True
    kernels = {"kimi_delta_attention_decode": "kda_decode"}

    @property
    def conv_dim(self) -> int:
        return 3 * self.num_heads * self.head_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.head_dim

    @property
    def key_heads(self) -> int:
        return self.num_heads

    def build(self, stream: Stream, rngs: nnx.Rngs) -> KimiDeltaAttention:
        return KimiDeltaAttention(
            stream.hidden_size,
            self.num_heads,
            head_dim=self.head_dim,
            conv_width=self.conv_width,
            gate_rank=self.gate_rank,
            lower_bound=self.lower_bound,
            eps=stream.eps,
            **stream.dtypes,
            rngs=rngs,
        )

    def pack(self, params: Any) -> Float[Array, "repeats W"]:
        return kda.pack_kda_weights(*_small_weights(params))

    def widened(self, stream: Stream, params: Any) -> dict[str, Array]:
        return _widened_gates(stream, params, "in_proj_b", ROWS)
