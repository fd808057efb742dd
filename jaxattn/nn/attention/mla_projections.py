"""The parameters of multi-head latent attention, and its computations per token."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn import mla
from jaxattn.core.numerics.rope import RopeConfig, Rotation, rope, softmax_scale
from jaxattn.core.validation.array_checks import check_sizes
from jaxattn.nn.attention.paged_attention import PagedAttention
from jaxattn.nn.fp8_linear import new_linear
from jaxattn.nn.linear import StackedWeight, linears, normal
from jaxattn.nn.norm import RMSNorm
from jaxattn.ops.linear.norm_linear import PendingNorm
from jaxattn.ops.mla.append import pack_mla_weights


class LatentProjections(PagedAttention):
    """The parameters of `MultiHeadLatentAttention`, and its computations per token."""

    reads = ("kv_a_proj", "[hidden, R + P]")
    # Maps each parameter that a step reads from a stack to the attribute with its `StackedWeight`.
    stacked: ClassVar[Mapping[str, str]] = {"w_uk": "w_uk_in_stack", "w_uv": "w_uv_in_stack"}

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        q_lora_rank: int | None = None,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        rope: RopeConfig | None = None,
        gated: bool = False,
        fp8: Collection[str] = (),
        eps: float = 1e-6,
        out_init_scale: float = 1.0,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_sizes(
            "MultiHeadLatentAttention",
            hidden_size=hidden_size,
            num_heads=num_heads,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            **({} if q_lora_rank is None else {"q_lora_rank": q_lora_rank}),
        )
        self.rope = RopeConfig(dim=qk_rope_head_dim) if rope is None else rope
        if self.rope.dim != qk_rope_head_dim:
            raise ValueError(
                f"rope.dim must be qk_rope_head_dim={qk_rope_head_dim}; got {self.rope.dim}"
            )
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.qk_nope_head_dim, self.v_head_dim = qk_nope_head_dim, v_head_dim
        self.q_lora_rank = q_lora_rank
        self.dtype = jnp.dtype(dtype)
        self.w_uk_in_stack: StackedWeight | None = None
        self.w_uv_in_stack: StackedWeight | None = None
        qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.scale = softmax_scale(qk_head_dim, self.rope)

        linear = partial(new_linear, fp8, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        queries = num_heads * qk_head_dim
        if q_lora_rank is None:
            self.q_proj = linear("q_proj", hidden_size, queries, out_dtype=dtype)
        else:
            self.q_a_proj = linear("q_a_proj", hidden_size, q_lora_rank)
            self.q_a_norm = RMSNorm(q_lora_rank, eps=eps, param_dtype=param_dtype)
            self.q_b_proj = linear("q_b_proj", q_lora_rank, queries, out_dtype=dtype)
        latent_dim = kv_lora_rank + qk_rope_head_dim
        self.kv_a_proj = linear("kv_a_proj", hidden_size, latent_dim)
        self.kv_a_norm = RMSNorm(kv_lora_rank, eps=eps, param_dtype=param_dtype)
        stddev = kv_lora_rank**-0.5
        self.w_uk = nnx.Param(
            normal(rngs, (num_heads, qk_nope_head_dim, kv_lora_rank), stddev, param_dtype)
        )
        self.w_uv = nnx.Param(
            normal(rngs, (num_heads, kv_lora_rank, v_head_dim), stddev, param_dtype)
        )
        self.g_proj = linear("g_proj", hidden_size, num_heads) if gated else None
        heads = num_heads * v_head_dim
        self.o_proj = linear("o_proj", heads, hidden_size, init_scale=out_init_scale)

    def packed_weights(self) -> Float[Array, "*L W"]:
        """The norms' weights in decode's layout, for one layer or a stack of layers."""
        q_norm = None if self.q_lora_rank is None else self.q_a_norm.weight[...]
        return pack_mla_weights(self.kv_a_norm.weight[...], q_norm, rope_dim=self.rope.dim)

    def _down(self, x: Array | PendingNorm) -> tuple[Array, Array]:
        """The inputs of queries and latents: the outputs of the down-projections."""
        with jax.named_scope("mla_down_proj"):
            q_proj = self.q_proj if self.q_lora_rank is None else self.q_a_proj
            q, latents = linears(x, q_proj, self.kv_a_proj)
        return q, latents

    def _queries(self, x: Array, positions: Array | Rotation) -> tuple[Array, Array]:
        """(q_nope [B, T, H, nope], rotated q_pe [B, T, H, P]) in the compute dtype."""
        return self._apply_rope(self._heads(x, None), positions)

    def _heads(self, x: Array | PendingNorm, q_features: Array | None) -> Array:
        """The heads' queries before rotation, [B, T, H, nope + P].

        `q_features` is the output of q_proj, or the normed output of q_a_proj, if already computed.
        """
        with jax.named_scope("mla_q_proj"):
            if self.q_lora_rank is None:
                q = self.q_proj(x) if q_features is None else q_features
            elif q_features is None:
                q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
            else:
                q = self.q_b_proj(q_features)
            return q.reshape(*x.shape[:2], self.num_heads, -1)

    def _apply_rope(self, q: Array, positions: Array | Rotation) -> tuple[Array, Array]:
        """The two parts of the heads' queries, the second rotated, in the compute dtype."""
        with jax.named_scope("mla_q_proj"):
            q_nope, q_pe = jnp.split(q, [self.qk_nope_head_dim], axis=-1)
            q_pe = rope(q_pe, positions, self.rope)
            return q_nope.astype(self.dtype), q_pe.astype(self.dtype)

    def _latents(self, x: Array, positions: Array | Rotation) -> Array:
        """[B, T, R + P] in the compute dtype: the normed latent, then the shared rotated key."""
        with jax.named_scope("mla_kv_proj"):
            return self._latents_of(self.kv_a_proj(x), positions)

    def _latents_of(self, projected: Array, positions: Array | Rotation) -> Array:
        """Like `_latents`, for the output of kv_a_proj."""
        with jax.named_scope("mla_kv_proj"):
            compressed, k_pe = jnp.split(projected, [self.kv_lora_rank], axis=-1)
            k_pe = rope(k_pe, positions, self.rope)
            latent = jnp.concatenate([self.kv_a_norm(compressed), k_pe], axis=-1)
            return latent.astype(self.dtype)

    def _latent_queries(self, q: Array, rotation: Rotation, spare_heads: int = 0) -> list[Array]:
        """The queries for the latents and for the rotated dims: [B, S, H, R] and [B, S, H, P].

        If a kernel computes them, both are one array.

        Args:
            q: the heads' queries before rotation.
            spare_heads: the number of undefined heads that one array may have after the others.
        """
        both = self._absorbed(q, self.w_uk_in_stack, (rotation, self.rope), spare_heads)
        if both is not None:
            return [both]
        q_nope, q_pe = self._apply_rope(q, rotation)
        return [mla.absorb_query(q_nope, self.w_uk[...].astype(self.dtype)), q_pe]

    def _absorbed(
        self,
        x: Array,
        weight: StackedWeight | None,
        rope: tuple[Rotation, RopeConfig] | None = None,
        spare_heads: int = 0,
    ) -> Array | None:
        """Each head's product with its matrix in the stack, or None if no kernel supports it."""
        if weight is None or weight.weights.dtype != self.dtype or x.dtype != self.dtype:
            return None
        with jax.named_scope("absorb"):
            return weight.of_heads(x, rope, spare_heads)

    def _project_out(self, x: Array | PendingNorm, out: Array) -> Array:
        with jax.named_scope("mla_o_proj"):
            if self.g_proj is not None:
                # A select keeps a padding token's output 0 even if its gate is NaN.
                gate = jax.nn.sigmoid(self.g_proj(x))[..., None]
                out = jnp.where(out == 0, 0, out * gate).astype(out.dtype)
            return self.o_proj(out.reshape(*out.shape[:2], -1))
