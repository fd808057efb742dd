"""A decoder of blocks as the engine serves it: its parameters, its caches and its steps."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxattn.arena import ArenaSpec
from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.core.dispatch import Implementation
from jaxattn.models.blocks import GQA, MLA, Block, Mixer
from jaxattn.models.blocks.cache_format_override import reformatted
from jaxattn.models.caches.layer_cache import DecodeState, LayerCache
from jaxattn.models.interface import DecodeBatch, Model, PrefillBatch
from jaxattn.models.network.decoder_network import DecoderNetwork, abstract
from jaxattn.models.network.decoder_spec import DecoderSpec
from jaxattn.models.network.packed_params import PackedParams, pack_params
from jaxattn.nn import token_logprobs
from jaxattn.parallel import Parallel, ShardedVocabulary


@partial(jax.jit, static_argnums=0)
def _init_params(spec: DecoderSpec, key: Array) -> nnx.State:
    return nnx.state(DecoderNetwork(spec, rngs=nnx.Rngs(params=key)))


@dataclasses.dataclass(frozen=True)
class DecoderModel(Model):
    """A decoder of blocks, as the engine serves it.

    The steps accept parameters packed (`pack`) or unpacked.

    Attributes:
        tokens: Number of tokens, if the embedding has more rows. None means that they are equal.
    """

    spec: DecoderSpec
    tokens: int | None = None

    @property
    def vocab_size(self) -> int:
        return self.tokens or self.spec.vocab_size

    @property
    def parallel(self) -> Parallel:
        return self.spec.parallel

    @property
    def vocabulary(self) -> ShardedVocabulary:
        columns = self.vocab_size if self.parallel.tensor == 1 else self.spec.head_columns
        return ShardedVocabulary.of(columns, self.parallel)

    @property
    def max_position_embeddings(self) -> int:
        return self.spec.max_position_embeddings

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        return self.spec.caches

    @property
    def kernels(self) -> dict[str, str]:
        return {op: k for mixer in self.spec.mixers.values() for op, k in mixer.kernels.items()}

    def scratch(
        self, rows: int, *, max_pages: int, q_len: int = 1, page_size: int = PAGE_SIZE
    ) -> tuple[ArenaSpec, ...]:
        sizes = dict(q_len=q_len, max_pages=max_pages, page_size=page_size)
        stream = self.spec.stream
        feed_forwards = dict.fromkeys(block.feed_forward for block in self.spec.blocks)
        return (
            *(mixer.scratch(stream, rows, **sizes) for mixer in self.spec.mixers.values()),
            *(each.scratch(stream, rows * q_len) for each in feed_forwards),
        )

    def param_shapes(self) -> nnx.State:
        return abstract(self.spec)[1]

    def with_dtype(self, dtype: str) -> "DecoderModel":
        """Returns the model with products and weights of another dtype, bfloat16 or float32."""
        stream = dataclasses.replace(self.spec.stream, dtype=dtype, param_dtype=dtype)
        return DecoderModel(dataclasses.replace(self.spec, stream=stream), self.tokens)

    def with_cache_format(self, name: str, native_layers: int = 0) -> "DecoderModel":
        """See `Model.with_cache_format`.

        An FP8 cache of keys and values adds their scales to the parameters. Native layers split the
        layers into other segments.
        """
        count = self.spec.layers  # the draft head uses the format of most layers
        layers = reformatted(self.spec.blocks[:count], name, native_layers)
        return self._with_blocks((*layers, *reformatted(self.spec.blocks[count:], name)))

    def with_batch_invariance(self) -> "DecoderModel":
        """See `Model.with_batch_invariance`."""

        def changed(mixer: Mixer) -> Mixer:
            if not isinstance(mixer, MLA):
                return mixer
            return dataclasses.replace(mixer, batch_invariant=True)

        return self._with_mixers(changed)

    def for_cpu(self) -> "DecoderModel":
        """See `Model.for_cpu`."""

        def changed(mixer: Mixer) -> Mixer:
            if not isinstance(mixer, GQA) or mixer.cache_format != "fp8":
                return mixer
            return dataclasses.replace(mixer, fp8_bits=True)

        return self._with_mixers(changed)

    def _with_mixers(self, changed: Callable[[Mixer], Mixer]) -> "DecoderModel":
        return self._with_blocks(
            tuple(
                dataclasses.replace(block, mixer=changed(block.mixer)) for block in self.spec.blocks
            )
        )

    def _with_blocks(self, blocks: tuple[Block, ...]) -> "DecoderModel":
        if blocks == self.spec.blocks:
            return self
        return DecoderModel(dataclasses.replace(self.spec, blocks=blocks), self.tokens)

    def with_tokens(self, tokens: int) -> "DecoderModel":
        """Returns the model with `tokens` tokens; further rows of its embedding are padding.

        The steps omit the logits of padding, so nothing can sample them.

        Raises:
            ValueError: The embedding has fewer rows.
        """
        if not 0 < tokens <= self.spec.vocab_size:
            raise ValueError(
                f"tokens must be from 1 to the {self.spec.vocab_size:,} rows of the embedding; "
                f"got {tokens:,}"
            )
        return DecoderModel(self.spec, tokens)

    def with_fused_sums(self, tokens: int | None = None) -> "DecoderModel":
        """Returns the model with fused sums: on several GPUs, a kernel sums outputs of small steps.

        In decode steps of up to `tokens` tokens, one launch replaces XLA's all-reduce and a norm
        (`jaxattn.ops.collectives.all_reduce_norm`). The kernel requires bfloat16, one process, and
        `data` 1 or data groups of one GPU with experts over all GPUs; otherwise the steps use XLA's
        all-reduce.

        Args:
            tokens: The most tokens of a data group. None means as many as send 2 MiB from each GPU,
                at most 256.
        """
        return DecoderModel(dataclasses.replace(self.spec, fused_tokens=tokens), self.tokens)

    def without_peer_memory(self) -> "DecoderModel":
        return self.with_fused_sums(0)

    def init_params(self, key: Array) -> nnx.State:
        """Returns random parameters."""
        return _init_params(self.spec, key)

    def bind(self, params: nnx.State) -> DecoderNetwork:
        """Returns the module with these parameters, for training: `model.bind(params)(tokens)`."""
        return nnx.merge(abstract(self.spec)[0], params)

    def token_logprobs(
        self,
        params: nnx.State,
        tokens: Int[Array, "B T"],
        *,
        scored: Float[Array, "B T"] | None = None,
        **options: Any,
    ) -> Float[Array, "B T"]:
        """Returns the float32 log-probability of each token given those before it; differentiable.

        Args:
            scored: An engine's scores of the tokens; see `jaxattn.nn.token_logprobs`.
            options: Keyword arguments of `DecoderNetwork.__call__`. In packed rows, the
                log-probability of a sequence's first token is meaningless.
        """
        logits = self._of_tokens(self.bind(params)(tokens, **options))
        return token_logprobs(logits, tokens, scored=scored)

    def pack(self, params: Any) -> PackedParams:
        return pack_params(params, self.spec.segments, self.spec.stream)

    def copies(self, params: Any) -> Any:
        if not isinstance(params, PackedParams):
            return ()
        if self.spec.parallel.gpus > 1:
            return params.copies
        # Zeros that widen matrices; on several GPUs the arrays may contain all shares.
        own, held = (
            sum(leaf.size for leaf in jax.tree.leaves(each))
            for each in (self.param_shapes(), (params.params, params.vectors))
        )
        return *params.copies, jax.ShapeDtypeStruct((held - own,), jnp.float32)

    def prefill_hidden(
        self,
        params: nnx.State | PackedParams,
        state: DecodeState,
        batch: PrefillBatch,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "L T hidden"], DecodeState]:
        hidden, state = self.mixed_hidden(params, state, batch, None, implementation=implementation)
        return hidden.reshape(*batch.tokens.shape, -1), state

    def mixed(
        self,
        params: nnx.State | PackedParams,
        state: DecodeState,
        prompts: PrefillBatch,
        rows: DecodeBatch | None,
        sources: Int[Array, "b"],
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "b vocab"], DecodeState, Float[Array, "N hidden"]]:
        hidden, state = self.mixed_hidden(
            params, state, prompts, rows, implementation=implementation
        )
        at = prompts.sampled(sources, beside_rows=rows is not None)
        return self.head(params, hidden[at]), state, hidden[: prompts.tokens.size]

    def mixed_hidden(
        self,
        params: nnx.State | PackedParams,
        state: DecodeState,
        prompts: PrefillBatch,
        rows: DecodeBatch | None,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "N hidden"], DecodeState]:
        stacks: dict[str, Any] = {}
        if isinstance(params, PackedParams):
            stacks = {"vectors": params.vectors, "weights": params.weights}
            params = params.params
        decoder = self.bind(params)
        hidden, state = decoder.mixed(state, prompts, rows, **stacks, implementation=implementation)
        return hidden[0], state

    @property
    def hidden_shape(self) -> jax.ShapeDtypeStruct:
        stream = self.spec.stream
        return jax.ShapeDtypeStruct((stream.hidden_size,), jnp.dtype(stream.dtype))

    def head(
        self, params: nnx.State | PackedParams, hidden: Float[Array, "N hidden"]
    ) -> Float[Array, "N vocab"]:
        own = params.params if isinstance(params, PackedParams) else params
        return self._of_tokens(self.bind(own).head(hidden))

    def decode(
        self,
        params: nnx.State | PackedParams,
        state: DecodeState,
        batch: DecodeBatch,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B vocab"], DecodeState]:
        logits, state, _ = self._decode(params, state, batch, implementation)
        return self._of_tokens(logits[:, -1]), state

    def decode_each(
        self,
        params: nnx.State | PackedParams,
        state: DecodeState,
        batch: DecodeBatch,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B S vocab"], DecodeState, Float[Array, "B S hidden"]]:
        logits, state, hidden = self._decode(params, state, batch, implementation)
        return self._of_tokens(logits), state, hidden

    @property
    def has_draft_head(self) -> bool:
        return self.spec.draft_head is not None

    def draft(
        self,
        params: nnx.State | PackedParams,
        state: DecodeState,
        batch: DecodeBatch,
        hidden: Float[Array, "B S hidden"],
        last_indices: Int[Array, "B"],
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B vocab"], Float[Array, "B hidden"], DecodeState]:
        decoder, stacks = self._decoding(params)
        read, handed, state = decoder.draft(
            state, batch, hidden, last_indices, **stacks, implementation=implementation
        )
        return self._of_tokens(decoder.head(read)), handed, state

    def draft_prompts(
        self,
        params: nnx.State | PackedParams,
        state: DecodeState,
        prompts: PrefillBatch,
        hidden: Float[Array, "N hidden"],
        *,
        implementation: Implementation | None = None,
    ) -> DecodeState:
        vectors = params.vectors if isinstance(params, PackedParams) else None
        own = params.params if isinstance(params, PackedParams) else params
        return self.bind(own).draft_mixed(
            state, prompts, hidden, vectors=vectors, implementation=implementation
        )

    def _decode(
        self, params: Any, state: DecodeState, batch: DecodeBatch, implementation: Any
    ) -> tuple[Float[Array, "B S rows"], DecodeState, Float[Array, "B S hidden"]]:
        """Returns each token's logits, padding included, the state, and the head's input."""
        decoder, stacks = self._decoding(params)
        hidden, state = decoder.decode(state, batch, **stacks, implementation=implementation)
        return decoder.head(hidden), state, hidden.astype(self.spec.stream.dtype)

    def _decoding(self, params: Any) -> tuple[DecoderNetwork, dict[str, Any]]:
        """Returns the decoder, and the packed parameters that its decode steps read."""
        if not isinstance(params, PackedParams):
            return self.bind(params), {}
        stacks = {
            "weights": params.weights,
            "norms": params.norms,
            "extra_weights": params.extra_weights,
        }
        return self.bind(params.params), stacks

    def _of_tokens(self, logits: Array) -> Array:
        """Returns the logits [..., vocab] without padding rows of the embedding.

        On several GPUs the shape stays the same, and padding becomes -inf.
        """
        parallel = self.spec.parallel
        if parallel.tensor == 1:
            return logits if self.tokens is None else logits[..., : self.tokens]
        ids = ShardedVocabulary.of(self.spec.head_columns, parallel).ids
        return jnp.where(ids < self.vocab_size, logits, -jnp.inf)
