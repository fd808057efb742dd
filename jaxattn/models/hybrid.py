"""A hybrid decoder, scanned over the repeats of its pattern, that decodes in one donated state.

    step(params, state, batch) -> (logits, state)

Weights, latent caches and recurrent states are stacks with the repeat or the layer in front. The
scan carries the whole `DecodeState` and hands every op the whole stack with the layer's index:
nothing is sliced out of a cache, and the layer loop reuses one arena.
"""

import dataclasses
from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn import mla
from jaxattn.core.dispatch import Implementation
from jaxattn.core.layers import LayerOf
from jaxattn.kernels.rms_norm import norms_features
from jaxattn.models.config import HybridConfig
from jaxattn.models.packed import PackedParams
from jaxattn.models.state import (
    DecodeBatch,
    DecodeState,
    PrefillBatch,
)
from jaxattn.nn import GatedDeltaNet, GatedMLP, MultiHeadLatentAttention, RMSNorm
from jaxattn.nn.linear import Linear, matmul, normal
from jaxattn.ops.norm import rms_norm_layer


class GDNLayer(nnx.Module):
    """norm, gated delta net, norm, MLP on a float32 residual stream."""

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs):
        self.norm = _norm(config)
        self.gdn = GatedDeltaNet(
            config.hidden_size,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            head_k_dim=config.linear_key_head_dim,
            head_v_dim=config.linear_value_head_dim,
            conv_width=config.linear_conv_kernel_dim,
            eps=config.rms_norm_eps,
            **_residual_branch(config),
            rngs=rngs,
        )
        self.mlp_norm = _norm(config)
        self.mlp = _mlp(config, rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.gdn(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def prefill(self, x: Array, state: DecodeState, batch: PrefillBatch, layer, implementation):
        y, conv_state, ssm_state = self.gdn.prefill(
            self.norm(x),
            state.conv_state,
            state.ssm_state,
            state_indices=batch.state_indices,
            seq_lens=batch.seq_lens,
            query_lens=batch.query_lens,
            layer=layer,
            implementation=implementation,
        )
        x = x + y
        state = dataclasses.replace(state, conv_state=conv_state, ssm_state=ssm_state)
        return x + self.mlp(self.mlp_norm(x)), state

    def decode(
        self,
        x: Array,
        state: DecodeState,
        batch: DecodeBatch,
        layer,
        norms,
        weights,
        implementation,
    ):
        norm, mlp_norm = norms or (self.norm, self.mlp_norm)
        y, conv_state, ssm_state, arena = self.gdn.decode(
            norm(x),
            state.conv_state,
            state.ssm_state,
            state_indices=batch.state_indices,
            layer=layer,
            weights=weights,
            arena=state.arena,
            implementation=implementation,
        )
        x = x + y
        assert arena is not None
        state = dataclasses.replace(state, arena=arena, conv_state=conv_state, ssm_state=ssm_state)
        return x + self.mlp(mlp_norm(x)), state


class MLALayer(nnx.Module):
    """norm, MLA, norm, MLP on a float32 residual stream."""

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs):
        self.norm = _norm(config)
        self.mla = MultiHeadLatentAttention(
            config.hidden_size,
            config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            rope=config.rope,
            eps=config.rms_norm_eps,
            **_residual_branch(config),
            rngs=rngs,
        )
        self.mlp_norm = _norm(config)
        self.mlp = _mlp(config, rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.mla(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def prefill(self, x: Array, state: DecodeState, batch: PrefillBatch, layer, implementation):
        y, kv_cache = self.mla.prefill(
            self.norm(x),
            state.kv_cache,
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            query_lens=batch.query_lens,
            layer=layer,
            implementation=implementation,
        )
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), dataclasses.replace(state, kv_cache=kv_cache)

    def decode(
        self, x: Array, state: DecodeState, batch: DecodeBatch, layer, norms, shared, implementation
    ):
        norm, mlp_norm = norms or (self.norm, self.mlp_norm)
        y, kv_cache, arena = self.mla.decode(
            norm(x),
            state.kv_cache,
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            layer=layer,
            **shared,
            arena=state.arena,
            implementation=implementation,
        )
        assert arena is not None
        x = x + y
        state = dataclasses.replace(state, arena=arena, kv_cache=kv_cache)
        return x + self.mlp(mlp_norm(x)), state


class Repeat(nnx.Module):
    """One repeat of the pattern: the body of the scan."""

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs):
        self.gdn = nnx.List([GDNLayer(config, rngs=rngs) for _ in range(config.gdn_per_repeat)])
        self.mla = MLALayer(config, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        for layer in self.gdn:
            x = layer(x)
        return self.mla(x)

    def prefill(self, x: Array, state: DecodeState, batch: PrefillBatch, repeat, implementation):
        for j, layer in enumerate(self.gdn):
            index = repeat * len(self.gdn) + j
            x, state = layer.prefill(x, state, batch, index, implementation)
        return self.mla.prefill(x, state, batch, repeat, implementation)

    def decode(
        self,
        x: Array,
        state: DecodeState,
        batch: DecodeBatch,
        repeat,
        norm_weights,
        weights,
        shared,
        implementation,
    ):
        def norms(place: int) -> tuple[Callable, Callable] | None:
            """Of a layer, from the stack of all of them."""
            if norm_weights is None:
                return None
            norm = partial(
                rms_norm_layer,
                weights=norm_weights,
                eps=self.mla.norm.eps,
                dtype=self.mla.mla.dtype,
                implementation=implementation if norms_features(x.shape[-1]) else "xla",
            )
            norms_of_repeat = 2 * (len(self.gdn) + 1)
            first, second = (LayerOf(repeat, norms_of_repeat, 2 * place + i) for i in (0, 1))
            return partial(norm, layer=first), partial(norm, layer=second)

        for j, layer in enumerate(self.gdn):
            index = LayerOf(repeat, len(self.gdn), j)
            x, state = layer.decode(x, state, batch, index, norms(j), weights, implementation)
        return self.mla.decode(
            x, state, batch, repeat, norms(len(self.gdn)), shared, implementation
        )


class HybridDecoder(nnx.Module):
    """Token ids to logits. The parameters of `repeats` are stacked, [num_repeats, ...] each."""

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs):
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        # A tied head wants logits of order 1 from a normed stream, a plain embedding a stream of
        # order 1.
        stddev = config.hidden_size**-0.5 if config.tie_embeddings else 1.0
        self.embedding = nnx.Param(normal(rngs, shape, stddev, config.param_dtype))
        keys = jax.random.split(rngs.params(), config.num_repeats)
        self.repeats = nnx.vmap(lambda key: Repeat(config, rngs=nnx.Rngs(params=key)))(keys)
        self.norm = _norm(config)
        if not config.tie_embeddings:
            self.lm_head = Linear(
                config.hidden_size,
                config.vocab_size,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T vocab"]:
        """Float32 logits of whole sequences; differentiable."""
        graphdef, params = nnx.split(self.repeats)
        x, _ = lax.scan(
            lambda x, params: (nnx.merge(graphdef, params)(x), None), self._embed(tokens), params
        )
        return self._head(x)

    def prefill(
        self,
        state: DecodeState,
        batch: PrefillBatch,
        *,
        vectors: Array | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B vocab"], DecodeState]:
        """Float32 logits of each row's last token (0 for a padding row), and the state."""
        graphdef, params = nnx.split(self.repeats)

        def body(carry, params):
            x, state, repeat = carry
            x, state = nnx.merge(graphdef, self._unpack(*params)).prefill(
                x, state, batch, repeat, implementation
            )
            return (x, state, repeat + 1), None

        valid = jnp.arange(batch.tokens.shape[1]) < batch.query_lens[:, None]
        x = self._embed(batch.tokens, valid)
        (x, state, _), _ = lax.scan(body, (x, state, jnp.int32(0)), (params, vectors))
        last = jnp.maximum(batch.query_lens - 1, 0)[:, None, None]
        return self._head(jnp.take_along_axis(x, last, axis=1))[:, 0], state

    def decode(
        self,
        state: DecodeState,
        batch: DecodeBatch,
        *,
        gdn_weights: Array | None = None,
        mla_weights: Array | None = None,
        norm_weights: Array | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B S vocab"], DecodeState]:
        """Float32 logits of every new token (0 for a padding row), and the state."""
        graphdef, params = nnx.split(self.repeats)

        def body(carry, params):
            x, state, repeat = carry
            x, state = nnx.merge(graphdef, params).decode(
                x, state, batch, repeat, norm_weights, gdn_weights, shared, implementation
            )
            return (x, state, repeat + 1), None

        # Once for all layers: XLA would work them out in each.
        q_len = batch.tokens.shape[1]
        schedule = mla.decode_schedule(
            batch.seq_lens,
            q_len=q_len,
            num_heads=self.config.num_attention_heads,
            max_pages=batch.block_tables.shape[1],
            page_size=state.kv_cache.shape[2],
            batch_invariant=True,  # what a row is answered does not depend on who else asks
            interpret=implementation == "mosaic_gpu_interpret",
        )
        rotation = self.repeats.mla.mla.decode_rotation(batch.seq_lens, q_len)
        shared = {"schedule": schedule, "rotation": rotation, "weights": mla_weights}
        x = self._embed(batch.tokens, (batch.seq_lens > 0)[:, None])
        (x, state, _), _ = lax.scan(body, (x, state, jnp.int32(0)), params)
        return self._head(x), state

    def _unpack(self, params: nnx.State, vectors: Array | None) -> nnx.State:
        """One repeat's parameters, with the vectors that `pack_vectors` took out."""
        if vectors is None:
            return params
        shapes = jax.tree.leaves(abstract_model(self.config)[1]["repeats"])
        widths = [shape.shape[1] for shape in shapes if len(shape.shape) == 2]
        # One copy out of the stack: without the barrier XLA makes one for each width.
        vectors = lax.optimization_barrier(vectors)
        pieces = iter(jnp.split(vectors, np.cumsum(widths)[:-1]))
        return jax.tree.map(lambda leaf: next(pieces) if leaf.ndim == 1 else leaf, params)

    def _embed(self, tokens: Array, valid: Array | None = None) -> Array:
        """The float32 residual stream [B, T, hidden]; 0 at padding, whatever its tokens are."""
        with jax.named_scope("embed"):
            if valid is not None:
                tokens = jnp.where(valid, tokens, 0)
            x = self.embedding[...][tokens].astype(jnp.float32)
            return x if valid is None else jnp.where(valid[..., None], x, 0)

    def _head(self, x: Array) -> Array:
        with jax.named_scope("lm_head"):
            x = self.norm(x)
            if self.config.tie_embeddings:
                return matmul(x, self.embedding[...].T, self.config.compute_dtype)
            return self.lm_head(x)


def _norm(config: HybridConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, param_dtype=config.param_dtype)


def _residual_branch(config: HybridConfig) -> dict:
    """Dtypes, and initial outputs small enough that the sum over all branches stays of order 1."""
    branches = 2 * config.num_repeats * (config.gdn_per_repeat + 1)
    return dict(dtype=config.dtype, param_dtype=config.param_dtype, out_init_scale=branches**-0.5)


def _mlp(config: HybridConfig, rngs: nnx.Rngs) -> GatedMLP:
    branch = _residual_branch(config)
    return GatedMLP(config.hidden_size, config.intermediate_size, **branch, rngs=rngs)


@cache
def abstract_model(config: HybridConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The decoder's structure and its parameters' shapes and dtypes; allocates nothing."""
    return nnx.split(nnx.eval_shape(lambda: HybridDecoder(config, rngs=nnx.Rngs(0))))


@partial(jax.jit, static_argnums=0)
def init_params(config: HybridConfig, key: Array) -> nnx.State:
    """Random parameters in `config.param_dtype`."""
    return nnx.state(HybridDecoder(config, rngs=nnx.Rngs(params=key)))


def decode_step(
    config: HybridConfig,
    params: nnx.State | PackedParams,
    state: DecodeState,
    batch: DecodeBatch,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B vocab"], DecodeState]:
    """One token a row: float32 logits of its last token (0 for a padding row), and the state."""
    model, packed = _bind(config, params)
    packed.pop("vectors", None)  # all that decoding reads of them is in the other stacks
    logits, state = model.decode(state, batch, **packed, implementation=implementation)
    return logits[:, -1], state


def prefill_step(
    config: HybridConfig,
    params: nnx.State | PackedParams,
    state: DecodeState,
    batch: PrefillBatch,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B vocab"], DecodeState]:
    """A chunk of each row's prompt: logits of its last valid token, float32, and the state."""
    model, packed = _bind(config, params)
    vectors = packed.get("vectors")
    return model.prefill(state, batch, vectors=vectors, implementation=implementation)


def _bind(
    config: HybridConfig, params: nnx.State | PackedParams
) -> tuple[HybridDecoder, dict[str, Array | None]]:
    """The decoder with its parameters, and what is packed beside them."""
    graphdef = abstract_model(config)[0]
    if not isinstance(params, PackedParams):
        return nnx.merge(graphdef, params), {}
    names = ("vectors", "gdn_weights", "mla_weights", "norm_weights")
    return nnx.merge(graphdef, params.params), {name: getattr(params, name) for name in names}


def compiler_options(backend: str) -> dict[str, bool | int | str] | None:
    """Options for a `jax.jit` around a step; None where there is nothing to set.

    XLA's Triton matmuls copy each layer's weights out of the stack before they read them, and its
    dot merger does so to join two products with one left side. Rematerialization counts a state
    that fills the device twice, as argument and as result, and computes parts of the step again to
    save what is no temp at all.
    """
    if backend != "gpu":
        return None
    return {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_disable_hlo_passes": "rematerialization",
    }


def jit_step(
    step: Callable,
    config: HybridConfig,
    *,
    implementation: Implementation | None = None,
    backend: str | None = None,
) -> Callable:
    """A step jitted as (params, state, batch) -> (logits, state), the state donated.

    Args:
        step: `decode_step` or `prefill_step`.
        backend: "cpu" or "gpu", for the compiler options; None is JAX's default backend.
    """
    return jax.jit(
        partial(step, config, implementation=implementation),
        donate_argnums=1,
        compiler_options=compiler_options(backend or jax.default_backend()),
    )
