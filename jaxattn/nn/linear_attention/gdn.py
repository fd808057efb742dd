"""Qwen3-Next's gated delta net layer: one module for training, prefill and decoding."""

from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn import gdn
from jaxattn.core.validation.array_checks import check_sizes
from jaxattn.nn.fp8_linear import ExtraFp8Weights, linears_with_extra, new_linear
from jaxattn.nn.linear import linears
from jaxattn.nn.linear_attention.delta_rule import (
    DeltaLayer,
    DeltaProjections,
    init_conv_taps,
    init_decay_rates,
)
from jaxattn.nn.norm import RMSNorm
from jaxattn.ops.gdn.layer_decode import gated_delta_net_decode, pack_gdn_weights
from jaxattn.ops.gdn.prefill import gated_delta_rule_prefill
from jaxattn.ops.linear.norm_linear import PendingNorm


class GatedDeltaNet(DeltaLayer):
    """Gated delta rule with a short convolution and an output gate, without the layer's pre-norm.

    Differentiable in reverse mode only: `jax.grad` works, `jax.jvp` raises TypeError.

    Parameters (Dc = 2 * Hk * Dk + Hv * Dv):
        in_proj_qkvz [hidden, Dc + Hv * Dv]: columns q | k | v | z, head after head (Qwen3-Next's
            checkpoints interleave them per key head; reorder them when you load the model)
        in_proj_ba [hidden, 2 * Hv]: columns b | a
        conv1d [Dc, W]: causal and depthwise, over q, k and v
        A_log, dt_bias float32 [Hv]   norm [Dv]   out_proj [Hv * Dv, hidden]
    The gates g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b) are float32, and so is
    the state.

    Args:
        dtype: the operands of every matrix product (sums are float32), and the convolution state's
            dtype.
        param_dtype: the dtype that the weights other than A_log and dt_bias are stored in.
        out_init_scale: scale of the initial out_proj, for deep residual stacks.
        fp8: the names of the linears whose weights are FP8; see `Fp8Linear`.

    Raises:
        ValueError: a size is not a positive integer, `conv_width` is below 2, or `num_v_heads` is
            not a multiple of `num_k_heads`.
    """

    in_proj = "in_proj_qkvz"
    family = "gdn"
    chunk_rule = staticmethod(gdn.chunk_gated_delta_rule)
    prefill_rule = staticmethod(gated_delta_rule_prefill)

    def __init__(
        self,
        hidden_size: int,
        num_k_heads: int,
        num_v_heads: int,
        *,
        head_k_dim: int = 128,
        head_v_dim: int = 128,
        conv_width: int = 4,
        fp8: Collection[str] = (),
        eps: float = 1e-6,
        out_init_scale: float = 1.0,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_sizes(
            "GatedDeltaNet",
            hidden_size=hidden_size,
            num_k_heads=num_k_heads,
            num_v_heads=num_v_heads,
            head_k_dim=head_k_dim,
            head_v_dim=head_v_dim,
        )
        check_sizes("GatedDeltaNet", least=2, conv_width=conv_width)
        if num_v_heads % num_k_heads:
            raise ValueError(f"GatedDeltaNet: {num_v_heads=} must be a multiple of {num_k_heads=}")
        self.num_k_heads, self.num_v_heads = num_k_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.conv_dim = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
        self.conv_width = conv_width
        self.dtype = jnp.dtype(dtype)
        # in_proj_ba as two FP8 parts, in the stacks that a decode step reads.
        self.gates_in_stack: ExtraFp8Weights | None = None

        linear = partial(new_linear, fp8, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        value_dim = num_v_heads * head_v_dim
        width = self.conv_dim + value_dim
        self.in_proj_qkvz = linear("in_proj_qkvz", hidden_size, width, out_dtype=dtype)
        self.in_proj_ba = linear("in_proj_ba", hidden_size, 2 * num_v_heads)
        self.conv1d = init_conv_taps(rngs, self.conv_dim, conv_width, param_dtype)
        self.A_log = init_decay_rates(rngs, num_v_heads)
        self.dt_bias = nnx.Param(jnp.ones((num_v_heads,), jnp.float32))
        self.norm = RMSNorm(head_v_dim, eps=eps, param_dtype=param_dtype)
        self.out_proj = linear("out_proj", value_dim, hidden_size, init_scale=out_init_scale)

    def _projected_rows(self, x: Array | PendingNorm) -> tuple[tuple[Array, ...], dict[str, Any]]:
        with jax.named_scope("gdn_in_proj"):
            both = linears_with_extra(x, self.in_proj_qkvz, self.gates_in_stack)
        return both or self._projected(x), {"halves": both is not None}

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
        qkvz, ba = projected
        return gated_delta_net_decode(
            qkvz,
            ba,
            self.packed_weights() if weights is None else weights,
            conv_state,
            ssm_state,
            state_indices,
            eps=self.norm.eps,
            **options,
        )

    def packed_weights(self) -> Float[Array, "*L P"]:
        """The small weights of one layer or of a stack of layers, as decode reads them."""
        return pack_gdn_weights(
            self.A_log[...], self.dt_bias[...], self.norm.weight[...], self.conv1d[...]
        )

    def _projected(self, x: Array | PendingNorm) -> tuple[Array, ...]:
        with jax.named_scope("gdn_in_proj"):
            return linears(x, self.in_proj_qkvz, self.in_proj_ba)

    def _split(self, projected: tuple[Array, ...]) -> DeltaProjections:
        qkvz, ba = projected
        b, a = jnp.split(ba[..., : 2 * self.num_v_heads], 2, axis=-1)
        return DeltaProjections(qkvz, a, b, qkvz)

    def _gates(self, projections: DeltaProjections) -> tuple[Array, Array]:
        return gdn.gdn_gates(
            projections.decays, projections.beta, self.A_log[...], self.dt_bias[...]
        )

    def _split_heads(self, mixed: Array) -> tuple[Array, Array, Array]:
        key_dim = self.num_k_heads * self.head_k_dim
        q, k, v = jnp.split(mixed, [key_dim, 2 * key_dim], axis=-1)
        keys = (*mixed.shape[:2], self.num_k_heads, self.head_k_dim)
        values = (*mixed.shape[:2], self.num_v_heads, self.head_v_dim)
        return q.reshape(keys), k.reshape(keys), v.reshape(values)

    @property
    def _slot_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "conv_shape": (self.conv_width - 1, self.conv_dim),
            "state_shape": (self.num_v_heads, self.head_v_dim, self.head_k_dim),
        }
