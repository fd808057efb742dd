"""Kimi Delta Attention as a layer: one module for training, prefill and decoding."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn import kda
from jaxattn.core.validation.array_checks import check_sizes
from jaxattn.nn.linear import Linear, linears
from jaxattn.nn.linear_attention.delta_rule import (
    DeltaLayer,
    DeltaProjections,
    init_conv_taps,
    init_decay_rates,
)
from jaxattn.nn.norm import RMSNorm
from jaxattn.ops.linear.norm_linear import PendingNorm


class KimiDeltaAttention(DeltaLayer):
    """Kimi's delta rule with short convolutions and an output gate, without the layer's pre-norm.

    Differentiable in reverse mode only: `jax.grad` works, `jax.jvp` raises TypeError.

    Parameters, where R is `gate_rank`:
        in_proj_qkv [hidden, 3 H D]: columns q | k | v, head after head
        in_proj_b [hidden, H]
        in_proj_fg [hidden, 2 H D]: columns f | g, of the decays and of the output's gate; with
            gate_rank in_proj_fg_a [hidden, 2 R], and f_b_proj and g_b_proj [R, H D]
        conv1d [3 H D, W]: causal and depthwise, the convolutions of q, k and v
        A_log float32 [H]   dt_bias float32 [H D]   norm [D]   out_proj [H D, hidden]
    The gates (`jaxattn.kda.kda_gates`) are float32, and so is the state.

    Args:
        gate_rank: rank of the projections to decays and output gate (Kimi-Linear: D); None projects
            directly (Ling-3.0).
        lower_bound: lower bound of the log decays (Ling-3.0: -5); None is Kimi's gate.
        dtype: the operands of every matrix product (sums are float32), and the convolution state's
            dtype.
        param_dtype: the dtype that the weights other than A_log and dt_bias are stored in.
        out_init_scale: scale of the initial out_proj, for deep residual stacks.

    Raises:
        ValueError: a size is not a positive integer, or `conv_width` is below 2.
    """

    in_proj = "in_proj_qkv"
    family = "kda"
    chunk_rule = staticmethod(kda.chunk_kda)
    prefill_rule = staticmethod(kda.kda_prefill)
    sigmoid_gate = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int = 128,
        conv_width: int = 4,
        gate_rank: int | None = None,
        lower_bound: float | None = None,
        eps: float = 1e-6,
        out_init_scale: float = 1.0,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "head_dim": head_dim}
        if gate_rank is not None:
            sizes["gate_rank"] = gate_rank
        check_sizes("KimiDeltaAttention", **sizes)
        check_sizes("KimiDeltaAttention", least=2, conv_width=conv_width)
        self.num_heads, self.head_dim, self.conv_width = num_heads, head_dim, conv_width
        self.gate_rank, self.lower_bound = gate_rank, lower_bound
        self.dtype = jnp.dtype(dtype)
        width = num_heads * head_dim
        self.conv_dim = 3 * width

        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.in_proj_qkv = linear(hidden_size, self.conv_dim, out_dtype=dtype)
        self.in_proj_b = linear(hidden_size, num_heads)
        if gate_rank is None:
            self.in_proj_fg = linear(hidden_size, 2 * width)
        else:
            self.in_proj_fg_a = linear(hidden_size, 2 * gate_rank, out_dtype=dtype)
            self.f_b_proj = linear(gate_rank, width)
            self.g_b_proj = linear(gate_rank, width, out_dtype=dtype)
        self.conv1d = init_conv_taps(rngs, self.conv_dim, conv_width, param_dtype)
        self.A_log = init_decay_rates(rngs, num_heads)
        self.dt_bias = nnx.Param(jnp.ones((width,), jnp.float32))
        self.norm = RMSNorm(head_dim, eps=eps, param_dtype=param_dtype)
        self.out_proj = linear(width, hidden_size, init_scale=out_init_scale)

    def _advance(
        self,
        projected: tuple[Array, ...],
        conv_state: Array,
        ssm_state: Array,
        *,
        state_indices: Any,
        weights: Array | None,
        **options: Any,
    ) -> tuple[Any, ...]:
        mixed, decays, beta, gate = projected
        return kda.kimi_delta_attention_decode(
            mixed,
            decays,
            beta,
            gate,
            self.packed_weights() if weights is None else weights,
            conv_state,
            ssm_state,
            state_indices,
            lower_bound=self.lower_bound,
            eps=self.norm.eps,
            **options,
        )

    def packed_weights(self) -> Float[Array, "*L P"]:
        """The small weights of one layer or of a stack of layers, as decode reads them."""
        return kda.pack_kda_weights(
            self.A_log[...], self.dt_bias[...], self.norm.weight[...], self.conv1d[...]
        )

    def _projected(self, x: Array | PendingNorm) -> tuple[Array, ...]:
        with jax.named_scope("kda_in_proj"):
            of_gates = self.in_proj_fg if self.gate_rank is None else self.in_proj_fg_a
            qkv, fg, b = linears(x, self.in_proj_qkv, of_gates, self.in_proj_b)
            if self.gate_rank is None:
                f, gate = jnp.split(fg, 2, axis=-1)
            else:
                f, gate = linears(fg, self.f_b_proj, self.g_b_proj, split=True)
            return qkv.astype(self.dtype), f, b, gate.astype(self.dtype)

    def _split(self, projected: tuple[Array, ...]) -> DeltaProjections:
        return DeltaProjections(*projected)

    def _gates(self, projections: DeltaProjections) -> tuple[Array, Array]:
        beta = projections.beta[..., : self.num_heads]  # packed parameters may be padded with zeros
        return kda.kda_gates(
            projections.decays.reshape(*beta.shape, self.head_dim),
            beta,
            self.A_log[...],
            self.dt_bias[...].reshape(self.num_heads, self.head_dim),
            lower_bound=self.lower_bound,
        )

    def _split_heads(self, mixed: Array) -> tuple[Array, Array, Array]:
        heads = (*mixed.shape[:2], self.num_heads, self.head_dim)
        q, k, v = jnp.split(mixed, 3, axis=-1)
        return q.reshape(heads), k.reshape(heads), v.reshape(heads)

    @property
    def _slot_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "conv_shape": (self.conv_width - 1, self.conv_dim),
            "state_shape": (self.num_heads, self.head_dim, self.head_dim),
        }
