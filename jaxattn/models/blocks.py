"""The blocks that decoders are built of: a mixer of tokens and a feed-forward, each with its norm.

A `Block` is a description, equal to every block that does the same; a list of blocks is a model
(`decoder.py`). Its mixer says what the engine has to know: its cache, its scratch, the values that
all its layers share in a step, and the small weights that decoding reads from one stack.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxattn import gdn, gqa, mla, moe
from jaxattn.arena import Arena, ArenaSpec
from jaxattn.core.dispatch import Implementation
from jaxattn.core.formats import LatentFormat
from jaxattn.core.layers import LayerOf
from jaxattn.core.rope import RopeConfig
from jaxattn.models.base import Arrays, DecodeBatch, LayerCache, PrefillBatch
from jaxattn.models.caches import KeyValuePages, LatentPages, RecurrentState
from jaxattn.nn import (
    GatedDeltaNet,
    GatedMLP,
    GroupedQueryAttention,
    MixtureOfExperts,
    MultiHeadLatentAttention,
)
from jaxattn.nn.moe import WeightFormat, experts_of_shared, stacked_names
from jaxattn.ops.moe import Router
from jaxattn.ops.router import split_router


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """What all blocks of a model have in common.

    Attributes:
        dtype: operands of the matrix products. The residual stream is float32.
        param_dtype: what the weights are stored in.
        norm_dtype: what weights of norms are stored in; None is `param_dtype`. Those that a
            checkpoint stores as w of 1 + w are exact in float32 alone.
        out_init_scale: of initial outputs, so that the sum over all branches stays of order 1.
    """

    hidden_size: int
    eps: float
    dtype: str
    param_dtype: str
    out_init_scale: float = 1.0
    norm_dtype: str | None = None

    @property
    def dtypes(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "out_init_scale": self.out_init_scale,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixer(abc.ABC):
    """What mixes the tokens of a row: attention, or a recurrence.

    Attributes:
        cache_name: the mixers of one cache are equal.
    """

    @property
    @abc.abstractmethod
    def cache_name(self) -> str: ...

    @property
    @abc.abstractmethod
    def kernels(self) -> Mapping[str, str]:
        """Decode op -> its kernel's name in a compiled step."""

    @abc.abstractmethod
    def build(self, stream: Stream, rngs: nnx.Rngs) -> nnx.Module:
        """The module with its parameters; `module(x)` is the whole sequence, for training."""

    @abc.abstractmethod
    def cache(self, stream: Stream, layers: int) -> LayerCache: ...

    @abc.abstractmethod
    def scratch(
        self, stream: Stream, rows: int, *, q_len: int, max_pages: int, page_size: int
    ) -> ArenaSpec: ...

    @abc.abstractmethod
    def prefill(
        self,
        module: Any,
        x: Array,
        arrays: Arrays,
        batch: PrefillBatch,
        layer: LayerOf,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays]:
        """The chunk's output and the cache's arrays; `x` is normed."""

    @abc.abstractmethod
    def decode(
        self,
        module: Any,
        x: Array,
        arrays: Arrays,
        arena: Arena,
        batch: DecodeBatch,
        layer: LayerOf,
        weights: Array | None,
        shared: Any,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena]:
        """The new tokens' output, the cache's arrays and the arena; `x` is normed."""

    def shared(
        self, module: Any, arrays: Arrays, batch: DecodeBatch, implementation: Any
    ) -> dict[str, Any]:
        """What every layer of a decode step needs; inside the loop XLA would make it in each."""
        return {}

    def pack(self, params: Any) -> Float[Array, "repeats W"] | None:
        """The small weights of one place in a pattern, a row for each repeat."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLA(Mixer):
    """Multi-head latent attention over pages of latents, in DeepSeek's names.

    Attributes:
        cache_dtype: of the pages; None is the compute dtype, "uint8" is block-scaled FP8.
        lora_norm_eps: of the norms of latents and low-rank queries; None is the stream's.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig
    cache_dtype: str | None = None
    lora_norm_eps: float | None = None

    cache_name = "latents"
    kernels = {"mla_decode": "mla_decode"}

    def build(self, stream: Stream, rngs: nnx.Rngs) -> MultiHeadLatentAttention:
        return MultiHeadLatentAttention(
            stream.hidden_size,
            self.num_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            rope=self.rope,
            eps=stream.eps if self.lora_norm_eps is None else self.lora_norm_eps,
            **stream.dtypes,
            rngs=rngs,
        )

    def cache(self, stream: Stream, layers: int) -> LatentPages:
        dtype = self.cache_dtype or stream.dtype
        latents = LatentFormat(dtype, self.kv_lora_rank, self.qk_rope_head_dim)
        return LatentPages(name=self.cache_name, layers=layers, format=latents)

    def scratch(
        self, stream: Stream, rows: int, *, q_len: int, max_pages: int, page_size: int
    ) -> ArenaSpec:
        return mla.scratch(
            batch=rows,
            q_len=q_len,
            num_heads=self.num_heads,
            kv_lora_rank=self.kv_lora_rank,
            dtype=jnp.dtype(stream.dtype),
            max_pages=max_pages,
            page_size=page_size,
        )

    def prefill(
        self,
        module: MultiHeadLatentAttention,
        x: Array,
        arrays: Arrays,
        batch: PrefillBatch,
        layer: LayerOf,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays]:
        y, kv_cache = module.prefill(
            x,
            arrays["kv_cache"],
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            query_lens=batch.query_lens,
            layer=layer.index,
            implementation=implementation,
        )
        return y, {"kv_cache": kv_cache}

    def decode(
        self,
        module: MultiHeadLatentAttention,
        x: Array,
        arrays: Arrays,
        arena: Arena,
        batch: DecodeBatch,
        layer: LayerOf,
        weights: Array | None,
        shared: dict[str, Any],
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena]:
        y, kv_cache, after = module.decode(
            x,
            arrays["kv_cache"],
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            layer=layer.index,
            weights=weights,
            arena=arena,
            implementation=implementation,
            **shared,
        )
        assert after is not None  # an arena came in
        return y, {"kv_cache": kv_cache}, after

    def shared(
        self,
        module: MultiHeadLatentAttention,
        arrays: Arrays,
        batch: DecodeBatch,
        implementation: Any,
    ) -> dict[str, Any]:
        q_len = batch.tokens.shape[1]
        schedule = mla.decode_schedule(
            batch.seq_lens,
            q_len=q_len,
            num_heads=self.num_heads,
            max_pages=batch.block_tables.shape[1],
            page_size=arrays["kv_cache"].shape[2],
            batch_invariant=True,  # what a row is answered does not depend on who else asks
            interpret=implementation == "mosaic_gpu_interpret",
        )
        return {"schedule": schedule, "rotation": module.decode_rotation(batch.seq_lens, q_len)}

    def pack(self, params: Any) -> Float[Array, "repeats W"]:
        kv_norm = params["kv_a_norm"]["weight"][...]
        q_norm = params["q_a_norm"]["weight"][...] if "q_a_norm" in params else None
        return mla.pack_mla_weights(kv_norm, q_norm, rope_dim=self.qk_rope_head_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GQA(Mixer):
    """Grouped-query attention over pages of keys and values, in Qwen3's names.

    Attributes:
        rope: rotates the first `rope.dim` dims of a head.
        qk_norm: RMS norms of each head's query and key.
        gated: the output is multiplied by sigmoid(gate).
        window: keys that a token sees, its own included; None is all before it.
        sinks: each head has a logit without a value in its softmax.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    qk_norm: bool = False
    gated: bool = False
    window: int | None = None
    sinks: bool = False

    kernels = {"gqa_decode": "gqa_decode"}

    @property
    def cache_name(self) -> str:
        of_window = "" if self.window is None else f" of the last {self.window}"
        return f"keys and values{of_window}"

    @property
    def array(self) -> str:
        """The name of the cache's array: layers of another window have another."""
        return "kv_cache" if self.window is None else f"kv_cache_{self.window}"

    def build(self, stream: Stream, rngs: nnx.Rngs) -> GroupedQueryAttention:
        return GroupedQueryAttention(
            stream.hidden_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            rope=self.rope,
            qk_norm=self.qk_norm,
            gated=self.gated,
            window=self.window,
            sinks=self.sinks,
            eps=stream.eps,
            norm_dtype=stream.norm_dtype,
            **stream.dtypes,
            rngs=rngs,
        )

    def cache(self, stream: Stream, layers: int) -> KeyValuePages:
        return KeyValuePages(
            name=self.cache_name,
            layers=layers,
            heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=jnp.dtype(stream.dtype),
            array=self.array,
        )

    def scratch(
        self, stream: Stream, rows: int, *, q_len: int, max_pages: int, page_size: int
    ) -> ArenaSpec:
        return gqa.scratch(
            batch=rows,
            q_len=q_len,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=jnp.dtype(stream.dtype),
            max_pages=max_pages,
            page_size=page_size,
        )

    def prefill(
        self,
        module: GroupedQueryAttention,
        x: Array,
        arrays: Arrays,
        batch: PrefillBatch,
        layer: LayerOf,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays]:
        y, kv_cache = module.prefill(
            x,
            arrays[self.array],
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            query_lens=batch.query_lens,
            layer=layer,
            implementation=implementation,
        )
        return y, {self.array: kv_cache}

    def decode(
        self,
        module: GroupedQueryAttention,
        x: Array,
        arrays: Arrays,
        arena: Arena,
        batch: DecodeBatch,
        layer: LayerOf,
        weights: Array | None,
        shared: dict[str, Any],
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena]:
        y, kv_cache, after = module.decode(
            x,
            arrays[self.array],
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            layer=layer,
            arena=arena,
            implementation=implementation,
            **shared,
        )
        assert after is not None  # an arena came in
        return y, {self.array: kv_cache}, after

    def shared(
        self,
        module: GroupedQueryAttention,
        arrays: Arrays,
        batch: DecodeBatch,
        implementation: Any,
    ) -> dict[str, Any]:
        q_len = batch.tokens.shape[1]
        schedule = gqa.decode_schedule(
            batch.seq_lens,
            q_len=q_len,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_pages=batch.block_tables.shape[1],
            page_size=arrays[self.array].shape[3],
            window=self.window,
            batch_invariant=True,  # what a row is answered does not depend on who else asks
            interpret=implementation == "mosaic_gpu_interpret",
        )
        return {"schedule": schedule, "rotation": module.decode_rotation(batch.seq_lens, q_len)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GDN(Mixer):
    """A gated delta net over state slots, in Qwen3-Next's names."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int = 128
    head_v_dim: int = 128
    conv_width: int = 4

    cache_name = "delta"
    kernels = {"gated_delta_rule_decode": "gdn_decode"}

    @property
    def conv_dim(self) -> int:
        """Dc: channels of the convolution."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    def build(self, stream: Stream, rngs: nnx.Rngs) -> GatedDeltaNet:
        return GatedDeltaNet(
            stream.hidden_size,
            self.num_k_heads,
            self.num_v_heads,
            head_k_dim=self.head_k_dim,
            head_v_dim=self.head_v_dim,
            conv_width=self.conv_width,
            eps=stream.eps,
            **stream.dtypes,
            rngs=rngs,
        )

    def cache(self, stream: Stream, layers: int) -> RecurrentState:
        return RecurrentState(
            name=self.cache_name,
            layers=layers,
            conv_shape=(self.conv_width - 1, self.conv_dim),
            conv_dtype=jnp.dtype(stream.dtype),
            state_shape=(self.num_v_heads, self.head_v_dim, self.head_k_dim),
        )

    def scratch(
        self, stream: Stream, rows: int, *, q_len: int, max_pages: int, page_size: int
    ) -> ArenaSpec:
        return gdn.scratch(
            batch=rows,
            q_len=q_len,
            num_v_heads=self.num_v_heads,
            head_v_dim=self.head_v_dim,
            dtype=jnp.dtype(stream.dtype),
        )

    def prefill(
        self,
        module: GatedDeltaNet,
        x: Array,
        arrays: Arrays,
        batch: PrefillBatch,
        layer: LayerOf,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays]:
        y, conv_state, ssm_state = module.prefill(
            x,
            arrays["conv_state"],
            arrays["ssm_state"],
            state_indices=batch.state_indices,
            seq_lens=batch.seq_lens,
            query_lens=batch.query_lens,
            layer=layer.index,
            implementation=implementation,
        )
        return y, {"conv_state": conv_state, "ssm_state": ssm_state}

    def decode(
        self,
        module: GatedDeltaNet,
        x: Array,
        arrays: Arrays,
        arena: Arena,
        batch: DecodeBatch,
        layer: LayerOf,
        weights: Array | None,
        shared: Any,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena]:
        y, conv_state, ssm_state, after = module.decode(
            x,
            arrays["conv_state"],
            arrays["ssm_state"],
            state_indices=batch.state_indices,
            layer=layer,
            weights=weights,
            arena=arena,
            implementation=implementation,
        )
        assert after is not None  # an arena came in
        return y, {"conv_state": conv_state, "ssm_state": ssm_state}, after

    def pack(self, params: Any) -> Float[Array, "repeats W"]:
        names = ("A_log", "dt_bias", "norm", "conv1d")
        leaves = (params[n]["weight"] if n == "norm" else params[n] for n in names)
        return gdn.pack_gdn_weights(*(leaf[...] for leaf in leaves))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForward(abc.ABC):
    """What follows the mixer: `module(x)` of normed tokens.

    Attributes:
        stacked: parameters that a step reads out of the stack of all repeats, which are too many
            bytes to be sliced out of it.
    """

    @property
    def stacked(self) -> tuple[str, ...]:
        return ()

    @abc.abstractmethod
    def build(self, stream: Stream, rngs: nnx.Rngs) -> nnx.Module: ...

    def scratch(self, stream: Stream, tokens: int) -> ArenaSpec:
        """Of a decode step of so many tokens."""
        return ArenaSpec()

    def pack(self, stream: Stream, params: Mapping[str, Any]) -> dict[str, Array]:
        """Those parameters, [repeats, ...], that the steps read faster in another form."""
        return {}

    def step(
        self,
        module: Any,
        x: Array,
        valid: Array,
        stacks: Arrays,
        layer: LayerOf,
        arena: Arena | None,
        implementation: Implementation | None,
    ) -> tuple[Array, Arena | None]:
        """The output and the arena.

        Args:
            valid: whether a token is no padding.
            stacks: the parameters `stacked`, [repeats, ...] each.
            layer: the number of this layer in them.
            arena: None in prefill.
        """
        return module(x), arena


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP(FeedForward):
    """A gated MLP of `intermediate_size` columns."""

    intermediate_size: int

    def build(self, stream: Stream, rngs: nnx.Rngs) -> GatedMLP:
        return GatedMLP(stream.hidden_size, self.intermediate_size, **stream.dtypes, rngs=rngs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE(FeedForward):
    """Routed experts of `expert_size` columns and shared ones of `shared_size` columns in all.

    Attributes:
        shared_gate: what is shared is times a sigmoid of the token.
        weight_format: of the routed experts; "fp8" is FP8 in blocks, None the stream's dtype.
    """

    expert_size: int
    router: Router
    shared_size: int = 0
    shared_gate: bool = False
    weight_format: WeightFormat | None = None

    @property
    def stacked(self) -> tuple[str, ...]:
        return stacked_names(self.weight_format, self.shared_gate)

    @property
    def always(self) -> int:
        """Experts of the stack, the last, that every token takes: the shared ones."""
        return experts_of_shared(self.expert_size, self.shared_size, self.weight_format)

    def pack(self, stream: Stream, params: Mapping[str, Any]) -> dict[str, Array]:
        if stream.dtype != "bfloat16":
            return {}
        router = params["router"][...]
        if not self.shared_gate:
            return {"router": split_router(router)}
        gate = params["shared_gate"][...]
        return {"router": split_router(router, gate), "shared_gate": gate[:, :0]}

    def build(self, stream: Stream, rngs: nnx.Rngs) -> MixtureOfExperts:
        return MixtureOfExperts(
            stream.hidden_size,
            self.expert_size,
            self.router,
            shared_size=self.shared_size,
            shared_gate=self.shared_gate,
            weight_format=self.weight_format,
            **stream.dtypes,
            rngs=rngs,
        )

    def step(
        self,
        module: MixtureOfExperts,
        x: Array,
        valid: Array,
        stacks: Arrays,
        layer: LayerOf,
        arena: Arena | None,
        implementation: Implementation | None,
    ) -> tuple[Array, Arena | None]:
        return module.step(
            x, stacks, layer, valid=valid, arena=arena, implementation=implementation
        )

    def scratch(self, stream: Stream, tokens: int) -> ArenaSpec:
        return moe.scratch(
            tokens=tokens,
            top_k=self.router.top_k + self.always,
            experts=self.router.experts + self.always,
            hidden=stream.hidden_size,
            expert_size=self.expert_size,
            dtype=jnp.dtype(stream.dtype),
            fp8=self.weight_format == "fp8",
        )


@dataclasses.dataclass(frozen=True)
class Block:
    """One layer: norm, mixer, norm, feed-forward on a float32 residual stream."""

    mixer: Mixer
    feed_forward: FeedForward
