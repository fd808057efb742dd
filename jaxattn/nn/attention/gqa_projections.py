"""The parameters of grouped-query attention, and its computations per token."""

from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxattn import gqa
from jaxattn.core.numerics.rope import QueryScaling, RopeConfig, Rotation, rope
from jaxattn.core.validation.array_checks import check_sizes
from jaxattn.nn.attention.paged_attention import PagedAttention
from jaxattn.nn.fp8_linear import new_linear
from jaxattn.nn.linear import LinearBias, StackedWeight, linears
from jaxattn.nn.norm import RMSNorm
from jaxattn.ops.linear.norm_linear import PendingNorm
from jaxattn.parallel import ALONE, Parallel, all_reduce


class GroupedQueryProjections(PagedAttention):
    """The parameters of `GroupedQueryAttention`, and its computations per token."""

    reads = ("k_proj", "[hidden, Hk * D]")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rope: RopeConfig,
        qk_norm: bool = False,
        heads_norm: bool = False,
        gated: bool = False,
        biases: bool = False,
        out_bias: bool = False,
        query_scaling: QueryScaling | None = None,
        window: int | None = None,
        sinks: bool = False,
        scaled_cache: bool = False,
        fp8: Collection[str] = (),
        eps: float = 1e-6,
        out_init_scale: float = 1.0,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        norm_dtype: DTypeLike | None = None,
        parallel: Parallel = ALONE,
        rngs: nnx.Rngs,
    ):
        check_sizes(
            "GroupedQueryAttention",
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            **({} if window is None else {"window": window}),
        )
        if num_heads % num_kv_heads:
            raise ValueError(
                "GroupedQueryAttention: num_heads must be a multiple of num_kv_heads, got "
                f"{num_heads=}, {num_kv_heads=}"
            )
        if rope.dim > head_dim:
            raise ValueError(
                f"GroupedQueryAttention: rope.dim must be at most {head_dim=}; got {rope.dim}"
            )
        for option, other_option, both_set in (
            ("qk_norm", "query_scaling", qk_norm and query_scaling is not None),
            ("heads_norm", "qk_norm", heads_norm and qk_norm),
            ("heads_norm", "gated", heads_norm and gated),
        ):
            if both_set:
                raise ValueError(
                    f"GroupedQueryAttention: {option} cannot be combined with {other_option}"
                )
        self.rope, self.window, self.gated, self.qk_norm = rope, window, gated, qk_norm
        self.query_scaling, self.parallel = query_scaling, parallel
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.dtype, self.eps = jnp.dtype(dtype), eps

        linear = partial(new_linear, fp8, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        q_features = head_dim * (2 if gated else 1)
        kv_sizes = hidden_size, num_kv_heads * head_dim
        # Numbers that get a bias, a norm or a factor stay float32 until then, so they round only
        # once.
        q_dtype, k_dtype, v_dtype = (
            jnp.float32 if changed else dtype
            for changed in (biases or heads_norm or query_scaling, biases or heads_norm, biases)
        )
        self.q_proj = linear("q_proj", hidden_size, num_heads * q_features, out_dtype=q_dtype)
        self.k_proj = linear("k_proj", *kv_sizes, out_dtype=k_dtype)
        self.v_proj = linear("v_proj", *kv_sizes, out_dtype=v_dtype)
        self.biases = biases
        if biases:
            self.q_bias = nnx.Param(jnp.zeros(num_heads * q_features, param_dtype))
            self.k_bias = nnx.Param(jnp.zeros(num_kv_heads * head_dim, param_dtype))
            self.v_bias = nnx.Param(jnp.zeros(num_kv_heads * head_dim, param_dtype))
        norm = partial(RMSNorm, eps=eps, param_dtype=norm_dtype or param_dtype)
        if qk_norm:
            self.q_norm, self.k_norm = norm(head_dim), norm(head_dim)
        self.heads_norm = heads_norm
        if heads_norm:
            self.q_heads_norm = norm(num_heads * head_dim)
            self.k_heads_norm = norm(num_kv_heads * head_dim)
        self.has_sinks = sinks
        if sinks:
            self.sinks = nnx.Param(jnp.zeros(num_heads, jnp.float32))
        self.scaled_cache = scaled_cache
        if scaled_cache:
            self.kv_scale = nnx.Param(jnp.ones((2, num_kv_heads), jnp.float32))
        heads = num_heads * head_dim
        self.o_proj = linear("o_proj", heads, hidden_size, init_scale=out_init_scale)
        self.out_bias = out_bias
        if out_bias:
            self.o_bias = nnx.Param(jnp.zeros(hidden_size, param_dtype))
        self.q_bias_in_stack: StackedWeight | None = None
        self.k_bias_in_stack: StackedWeight | None = None
        self.v_bias_in_stack: StackedWeight | None = None
        self.o_bias_in_stack: StackedWeight | None = None

    @property
    def stacked(self) -> dict[str, str]:
        """Like `Linear.stacked`, for the biases."""
        names = ["q_bias", "k_bias", "v_bias"] if self.biases else []
        if self.out_bias:
            names.append("o_bias")
        return {name: f"{name}_in_stack" for name in names}

    def packed_weights(self) -> Float[Array, "W"] | None:
        """The weights of the query and key norms in `decode`'s layout; None without norms."""
        if not self.qk_norm:
            return None
        return gqa.pack_gqa_weights(self.q_norm.weight[...], self.k_norm.weight[...])

    @property
    def _scale(self) -> Array | None:
        return self.kv_scale[...] if self.scaled_cache else None

    @property
    def _masking(self) -> dict[str, Any]:
        return {"window": self.window, "sinks": self.sinks[...] if self.has_sinks else None}

    def _projected(
        self, x: Array | PendingNorm, positions: Int[Array, "B T"] | None = None
    ) -> tuple[Array, Array, Array]:
        """(q [B, T, H, D], or [B, T, H, 2 D] with gates; k and v [B, T, Hk, D])."""
        with jax.named_scope("gqa_qkv_proj"):
            added = self._biases("q_bias", "k_bias", "v_bias") if self.biases else ()
            q, k, v = linears(x, self.q_proj, self.k_proj, self.v_proj, biases=added)
            if self.heads_norm:
                q, k = self._normed(q, self.q_heads_norm), self._normed(k, self.k_heads_norm)
            if self.query_scaling is not None and positions is not None:
                q = q * self.query_scaling.factor(positions)[..., None]
            q = q.astype(self.dtype).reshape(*x.shape[:2], self.num_heads, -1)
            k, v = (
                y.astype(self.dtype).reshape(*x.shape[:2], self.num_kv_heads, self.head_dim)
                for y in (k, v)
            )
            return q, k, v

    def _biases(self, *names: str) -> list[LinearBias]:
        """These bias parameters, with the stacks in which a decode step finds them.

        The sum is rounded to the compute dtype unless a norm or a factor follows.
        """
        needs_float32 = {"q_bias": self.heads_norm or self.query_scaling, "k_bias": self.heads_norm}
        return [
            LinearBias(
                getattr(self, name)[...],
                getattr(self, f"{name}_in_stack"),
                jnp.float32 if name == "o_bias" or needs_float32.get(name) else self.dtype,
            )
            for name in names
        ]

    def _normed(self, x: Float[Array, "B T N"], norm: RMSNorm) -> Float[Array, "B T N"]:
        """The norm over all heads, of which each GPU has an equal number."""
        if self.parallel.tensor == 1:
            return norm(x)
        squares = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
        total = all_reduce(squares, self.parallel, "tensor", jnp.float32)
        scale = jax.lax.rsqrt(total / self.parallel.tensor + norm.eps)
        return x.astype(jnp.float32) * scale * norm.weight[...].astype(jnp.float32)

    def _apply_rope(
        self,
        q: Array,
        k: Array,
        v: Array,
        positions: Array | Rotation,
        dtype: DTypeLike | None = None,
    ) -> tuple[Array, Array, Array, Array | None]:
        """(q [B, T, H, D], k and v [B, T, Hk, D], gate [B, T, H, D] or None) from `_projected`.

        `dtype` is the dtype of the results, such as the cache's; None is the compute dtype.
        """
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        q, gate = jnp.split(q, 2, axis=-1) if self.gated else (q, None)
        with jax.named_scope("gqa_norm_and_rope"):
            if self.qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            q, k = self._apply_partial_rope(q, positions), self._apply_partial_rope(k, positions)
        return q.astype(dtype), k.astype(dtype), v.astype(dtype), gate

    def _apply_partial_rope(self, x: Array, positions: Array | Rotation) -> Array:
        """Rotates the first `rope.dim` dims."""
        rotated = rope(x[..., : self.rope.dim], positions, self.rope)
        return jnp.concatenate([rotated, x[..., self.rope.dim :]], axis=-1)

    def _project_out(self, out: Array) -> Array:
        with jax.named_scope("gqa_o_proj"):
            x = out.reshape(*out.shape[:2], -1)
            if self.out_bias and self.parallel.tensor == 1:
                return linears(x, self.o_proj, biases=self._biases("o_bias"))[0]
            y = self.o_proj(x)
            if not self.out_bias:
                return y
            # An all-reduce sums the GPUs' outputs, so each adds its part.
            return y + self.o_bias[...].astype(jnp.float32) / self.parallel.tensor
