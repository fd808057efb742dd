"""A decoder of blocks, in which each segment of layers is one scan over one donated state.

Weights, caches and states are stacks with the repeat or the layer as the first axis. The scan
carries the whole `DecodeState` and passes every op the whole stack with the layer's index. Nothing
is sliced out of a cache, and all layers share one arena. A step of one token on a GPU unrolls 16 to
128 repeats, or up to 32 layers. Layers then follow one another, and a layer's output need not
become an array if the next launch can compute it.
"""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxattn.core.dispatch import Implementation
from jaxattn.core.validation.array_checks import keep_concrete
from jaxattn.models.blocks import Block
from jaxattn.models.caches.layer_cache import Arrays, DecodeState
from jaxattn.models.interface import DecodeBatch, PrefillBatch
from jaxattn.models.network.decode_layer_step import DecodeStep, LayerPosition
from jaxattn.models.network.decoder_layer import LEAST_ROWS, DraftLayers, LayerGroup, norm_of
from jaxattn.models.network.decoder_spec import DecoderSpec
from jaxattn.models.network.layer_scan import (
    attach_weight_stacks,
    in_repeat,
    linear_stacks_of,
    scan_layers,
)
from jaxattn.models.network.layer_segments import LayerSegment
from jaxattn.models.network.mixed_layer_step import MixedStep
from jaxattn.models.network.packed_params import vectors_of
from jaxattn.models.network.residual_collectives import ResidualCollectives, StepTokens
from jaxattn.nn.linear import Linear, StackedWeight, matmul, normal
from jaxattn.ops.linear.norm_linear import array_of
from jaxattn.parallel import all_reduce, rank

# A step of one token unrolls segments of many repeats, which gain the most, or of few layers.
# Lowering and compile time grow with the layers.
MANY_REPEATS, MOST_UNROLLED, FEW_LAYERS = 16, 128, 32
# Layers per iteration of the loop. DeepSeek-V2-Lite's 26 then take two iterations: its step takes 4
# s to compile, compared with 2.5 s for one layer per iteration.
MOST_TOGETHER = 13


class DecoderNetwork(nnx.Module):
    """Maps token ids to logits. The parameters of a segment are stacked, [repeats, ...] each."""

    def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs):
        self.spec = spec
        stream = spec.stream
        rows = spec.head_columns if spec.tie_embeddings else spec.vocab_size
        shape = (rows, stream.hidden_size)
        # A tied head needs logits of order 1 from a normed stream, and a plain embedding a stream
        # of order 1.
        stddev = stream.hidden_size**-0.5 if spec.tie_embeddings else 1.0
        self.embedding = nnx.Param(normal(rngs, shape, stddev, stream.param_dtype))
        self.segments = nnx.List([self._stack(segment, rngs) for segment in spec.segments])
        self.norm = norm_of(stream)
        if not spec.tie_embeddings:
            self.lm_head = Linear(
                stream.hidden_size,
                spec.head_columns,
                dtype=stream.dtype,
                param_dtype=stream.param_dtype,
                rngs=rngs,
            )
        if spec.draft_head:
            self.draft_layers = DraftLayers(stream, rngs=rngs)

    @property
    def collectives(self) -> ResidualCollectives:
        return ResidualCollectives(self.spec)

    def _stack(self, segment: LayerSegment[Block], rngs: nnx.Rngs) -> LayerGroup:
        keys = jax.random.split(rngs.params(), segment.repeats)
        stream = self.spec.stream
        build = nnx.vmap(lambda key: LayerGroup(segment.pattern, stream, rngs=nnx.Rngs(params=key)))
        return build(keys)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        cu_seqlens: Int[Array, " n+1"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        saved: Callable[..., bool] | None = None,
    ) -> Float[Array, "B T vocab"]:
        """Returns float32 logits of whole sequences; differentiable.

        Args:
            segment_ids, cu_seqlens, positions: The sequences packed in rows; see the attention
                layers of `jaxattn.nn`. Each sequence gets the logits that it would get in a row of
                its own.
            saved: A policy of `jax.checkpoint_policies`, which selects what a repeat of layers
                saves for its backward pass; the rest is recomputed. None saves everything.

        Raises:
            TypeError, ValueError: An argument's dtype, shape or concrete value does not fit; a
                layer names it.
        """
        packed = {
            name: given if name == "positions" else keep_concrete(given)
            for name, given in (
                ("segment_ids", segment_ids), ("cu_seqlens", cu_seqlens), ("positions", positions)
            )
            if given is not None
        }  # fmt: skip
        found = (mixer.handed_on_whole(*tokens.shape) for mixer in self.spec.mixers.values())
        handed_on = next((each for each in found if each is not None), None)
        carry = self._embed(tokens), handed_on
        for stack in self.segments[: len(self.spec.layer_segments)]:
            graphdef, params = nnx.split(stack)

            def body(carry: Any, params: nnx.State, graphdef=graphdef) -> tuple[Any, None]:
                x, handed_on = carry
                return nnx.merge(graphdef, params)(x, packed, handed_on), None

            if saved is not None:
                body = jax.checkpoint(body, policy=saved)
            carry, _ = lax.scan(body, carry, params)
        return self.head(self.norm(carry[0]))

    def mixed(
        self,
        state: DecodeState,
        prompts: PrefillBatch,
        rows: DecodeBatch | None,
        *,
        vectors: tuple[Array, ...] | None = None,
        weights: dict[str, Array] | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "1 N hidden"], DecodeState]:
        """Returns `head`'s input for each token (at padding, that of a zero stream), and the state.

        Computations per token use one flat list: the prompts' lines, followed by one token of each
        of `rows`. The mixers separate the two.

        Args:
            weights: The small weights of decoding, by cache.
        """
        lines = prompts.layout
        ids, valid = prompts.tokens.reshape(1, -1), lines.valid.reshape(1, -1)
        shared, overlong = {}, None
        if rows is not None:
            rows, overlong = self._drop_overflowing_rows(state, rows)
            shared = self._shared(state, rows, implementation)
            ids = lines.join(prompts.tokens, rows.tokens)
            valid = lines.join(lines.valid, (rows.seq_lens > 0)[:, None])
        tokens = StepTokens.of(self.collectives, valid)
        x = self._embed(ids, valid)
        if overlong is not None:
            marked = lines.join(jnp.zeros_like(lines.valid), overlong[:, None])
            x = jnp.where(marked[..., None], jnp.nan, x)
        step = MixedStep(
            collectives=self.collectives,
            prompts=prompts,
            lines=lines,
            rows=rows,
            tokens=tokens,
            shared=shared,
            vectors=vectors,
            weights=weights,
            implementation=implementation,
        )
        x, state = self._mixed_segments(range(len(self.spec.layer_segments)), step, x, state)
        # The head's product rounds to this dtype, so its input is kept no wider.
        return self.norm(x).astype(self.spec.stream.dtype), state

    def draft_mixed(
        self,
        state: DecodeState,
        prompts: PrefillBatch,
        hidden: Float[Array, "N hidden"],
        *,
        vectors: tuple[Array, ...] | None = None,
        implementation: Implementation | None = None,
    ) -> DecodeState:
        """Returns the state after the draft head has cached the prompts' tokens.

        Args:
            prompts: The prompts, with each token replaced by the one that follows it.
            hidden: The head's input for each token.
        """
        lines = prompts.layout
        ids, valid = prompts.tokens.reshape(1, -1), lines.valid.reshape(1, -1)
        tokens = StepTokens.of(self.collectives, valid)
        x = self._draft_stream(ids, hidden[None], valid)
        step = MixedStep(
            collectives=self.collectives,
            prompts=prompts,
            lines=lines,
            tokens=tokens,
            vectors=vectors,
            implementation=implementation,
        )
        numbers = range(len(self.spec.layer_segments), len(self.spec.segments))
        return self._mixed_segments(numbers, step, x, state)[1]

    def _mixed_segments(
        self, numbers: range, step: MixedStep, x: Array, state: DecodeState
    ) -> tuple[Array, DecodeState]:
        """Returns the stream and the state after some segments, in a step with prompts."""
        state = self._handing_on(state, step.prompts, step.rows)
        for number in numbers:
            segment = self.spec.segments[number]
            graphdef, params, stacks = self._split(number)

            def body(carry, xs, graphdef=graphdef, stacks=stacks, number=number, segment=segment):
                following, *xs = xs
                pattern = nnx.merge(graphdef, self._unpack(number, *xs))
                for place, layer in enumerate(pattern.layers):
                    position = LayerPosition(segment, place, following)
                    carry = step.layer(layer, position, stacks[place], *carry)
                return carry

            packed = None if step.vectors is None else step.vectors[number]
            x, state = scan_layers(segment.repeats, body, (x, state), (params, packed))
        return x, state.handing_on({})

    def decode(
        self,
        state: DecodeState,
        batch: DecodeBatch,
        *,
        weights: dict[str, Array] | None = None,
        norms: Array | None = None,
        extra_weights: dict[tuple[int, int], tuple[Array, Array]] | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B S hidden"], DecodeState]:
        """Returns `head`'s input for new tokens (at padding, of a zero stream), and the state."""
        batch, overlong = self._drop_overflowing_rows(state, batch)
        step = self._decode_step(state, batch, weights, norms, implementation)
        x = self._embed(batch.tokens, step.tokens.valid > 0)
        if overlong is not None:
            x = jnp.where(overlong[:, None, None], jnp.nan, x)
        numbers = range(len(self.spec.layer_segments))
        x, state = self._decode_segments(numbers, step, x, state, extra_weights)
        return self.norm(x), state

    def draft(
        self,
        state: DecodeState,
        batch: DecodeBatch,
        hidden: Float[Array, "B S hidden"],
        last_indices: Int[Array, "B"],
        *,
        weights: dict[str, Array] | None = None,
        norms: Array | None = None,
        extra_weights: dict[tuple[int, int], tuple[Array, Array]] | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B hidden"], Float[Array, "B hidden"], DecodeState]:
        """Runs the draft head on each row's tokens; returns its results for the token at
        `last_indices`.

        Args:
            batch: The tokens that follow those of `hidden`, at the positions of the latter.
            hidden: The head's input for cached tokens, or this method's second result for a guess.
            last_indices: int32 [B], below S.

        Returns:
            (`head`'s input for the guess, the `hidden` for the next guess, the state).
        """
        assert self.spec.draft_head is not None
        batch, _ = self._drop_overflowing_rows(state, batch)
        step = self._decode_step(state, batch, weights, norms, implementation)
        x = self._draft_stream(batch.tokens, hidden, step.tokens.valid > 0)
        numbers = range(len(self.spec.layer_segments), len(self.spec.segments))
        x, state = self._decode_segments(numbers, step, x, state, extra_weights)
        x = jnp.take_along_axis(x, last_indices[:, None, None], axis=1)[:, 0]
        normed = self.draft_layers.norm(x)
        handed = normed if self.spec.draft_head.returns_normed else x
        return normed, handed.astype(self.spec.stream.dtype), state

    def _draft_stream(self, tokens: Array, hidden: Array, valid: Array) -> Array:
        """Returns the input of the draft head's block; 0 at padding."""
        x = self.draft_layers(self._embed(tokens, valid), hidden.astype(jnp.float32))
        return jnp.where(valid[..., None], x, 0)

    def _decode_step(
        self,
        state: DecodeState,
        batch: DecodeBatch,
        weights: dict[str, Array] | None,
        norms: Array | None,
        implementation: Implementation | None,
    ) -> DecodeStep:
        shared = self._shared(state, batch, implementation)
        # A number for the kernels: converting a bool inside the loop would be a launch in each
        # layer.
        valid = jnp.broadcast_to((batch.seq_lens > 0)[:, None], batch.tokens.shape)
        valid = valid.astype(jnp.int32)
        return DecodeStep(
            collectives=self.collectives,
            batch=batch,
            tokens=StepTokens.of(self.collectives, valid),
            shared=shared,
            packed=weights or {},
            norms=norms,
            fused=norms is not None and self._fused(valid.size),
            implementation=implementation,
        )

    def _decode_segments(
        self,
        numbers: range,
        step: DecodeStep,
        x: Array,
        state: DecodeState,
        extra_weights: dict[tuple[int, int], tuple[Array, Array]] | None,
    ) -> tuple[Array, DecodeState]:
        """Returns the stream and the state after some segments."""
        added = x.dtype if step.fused else self.collectives.added_dtype(x)
        state = self._handing_on(state, None, step.batch)
        carry = x, self.collectives.part(jnp.zeros_like(x, added), step.fused), state
        for number in numbers:
            carry = self._decode_segment(number, step, extra_weights or {}, carry, added)
        x, y, state = carry
        state = state.handing_on({})
        return x + (self.collectives.local_total(y) if step.fused else y), state

    def _decode_segment(
        self,
        number: int,
        step: DecodeStep,
        extra_weights: dict[tuple[int, int], tuple[Array, Array]],
        carry: tuple[Array, Any, DecodeState],
        addend_dtype: DTypeLike,
    ) -> tuple[Array, Array, DecodeState]:
        """Returns (the stream, the pending addend, the state) after a segment's repeats.

        Args:
            extra_weights: Stacks of weights in addition to a mixer's own, by segment and place in
                its pattern.
            addend_dtype: Dtype of the pending addend.
        """
        segment, implementation = self.spec.segments[number], step.implementation
        graphdef, params, stacks = self._split(number)
        linear_stacks = linear_stacks_of(self.segments[number])
        others = {place: own for (s, place), own in extra_weights.items() if s == number}
        unrolled = self._unrolled(segment, step.tokens.valid.size, implementation)

        def body(
            carry: tuple[Array, Any, DecodeState], xs: tuple[Array, nnx.State]
        ) -> tuple[Array, Any, DecodeState]:
            following, params = xs
            pattern = nnx.merge(graphdef, params)
            attach_weight_stacks(pattern, linear_stacks, following, implementation)
            for place, own in others.items():
                places = (StackedWeight(each, in_repeat(following), implementation) for each in own)
                segment.pattern[place].mixer.attach_extra_weights(
                    pattern.layers[place].mixer, *places
                )
            for place, layer in enumerate(pattern.layers):
                where = LayerPosition(segment, place, following)
                carry = step.layer(layer, where, stacks[place], carry, unrolled)
            x, y, state = carry
            return x, y if unrolled else y.astype(addend_dtype), state

        x, y, state = carry
        y = y if unrolled else array_of(y, x.shape).astype(addend_dtype)
        together = self._choose_unroll(segment, step.fused)
        x, y, state = scan_layers(
            segment.repeats, body, (x, y, state), (params,), unrolled, together
        )
        return x, array_of(y, x.shape).astype(addend_dtype), state

    def _split(self, number: int) -> tuple[nnx.GraphDef, nnx.State, list[dict[str, Array]]]:
        """Returns (structure, the scan's slices, the unsliced stacks per place in the pattern)."""
        graphdef, params = nnx.split(self.segments[number])
        stacks: list[dict[str, Array]] = []
        for place, block in enumerate(self.spec.segments[number].pattern):
            mlp: Any = params["layers"][place]["mlp"]
            names = block.feed_forward.stacked
            stacks.append({name: mlp[name][...] for name in names})
            for name in names:  # the module that the body creates holds an empty matrix
                empty = mlp[name][...][:, :0]
                mlp[name] = mlp[name].replace(empty if empty.ndim > 2 else empty[..., None])
        return graphdef, params, stacks

    def _drop_overflowing_rows(
        self, state: DecodeState, batch: DecodeBatch
    ) -> tuple[DecodeBatch, Bool[Array, "B"] | None]:
        """Returns the batch without rows longer than their block tables, and which rows these are.

        Tokens of such rows become NaN, because a finite output would be wrong. No layer checks
        again.
        """
        found = (m.most_tokens(state.caches[name], batch) for name, m in self.spec.mixers.items())
        most = min((each for each in found if each is not None), default=None)
        if most is None:
            return batch, None
        overlong = batch.seq_lens > most
        lens = jnp.where(overlong, 0, batch.seq_lens)
        return dataclasses.replace(batch, seq_lens=lens), overlong

    def _handing_on(
        self, state: DecodeState, prompts: PrefillBatch | None, rows: DecodeBatch | None
    ) -> DecodeState:
        """Returns the state with the arrays that layers of this step pass on."""
        found: Arrays = {}
        for name, mixer in self.spec.mixers.items():
            found |= mixer.handed_on(state.caches[name], prompts, rows)
        return state.handing_on(found)

    def _shared(
        self, state: DecodeState, batch: DecodeBatch, implementation: Implementation | None
    ) -> dict[str, Any]:
        """Returns the values that the layers of each cache share in a step, by the cache's name."""
        found = {}
        for number, segment in enumerate(self.spec.segments):
            for place, block in enumerate(segment.pattern):
                name = block.mixer.cache_name
                if name not in found:
                    module = self.segments[number].layers[place].mixer
                    found[name] = block.mixer.shared(
                        module, state.caches[name], batch, implementation
                    )
        return found

    def _fused(self, tokens: int) -> bool:
        """Returns whether a step of so many tokens sums over the GPUs in its norms."""
        fits = self.spec.sums_fused and tokens <= self.spec.summed_tokens
        return fits and jax.process_count() == 1  # as the kernel requires

    def _unrolled(
        self, segment: LayerSegment[Block], tokens: int, implementation: Implementation | None
    ) -> bool:
        """Returns whether a step's repeats follow one another without a loop.

        This holds for steps of one token on one GPU, where launches that only count would take 3 to
        6% of the step. On several GPUs one long CUDA graph costs more than the launches, because
        each GPU waits for the others at the first sum. On four H200s a sum takes 12.5 us, compared
        with 4.7 us in a loop.
        """
        by_kernels = jax.default_backend() == "gpu" and implementation != "xla"
        one = tokens == 1 == self.spec.parallel.gpus
        few = 1 < segment.repeats and segment.repeats * len(segment.pattern) <= FEW_LAYERS
        many = MANY_REPEATS <= segment.repeats <= MOST_UNROLLED
        return one and by_kernels and (few or many)

    def _choose_unroll(self, segment: LayerSegment[Block], fused: bool) -> int:
        """Returns the number of repeats per iteration of a step's loop.

        Steps on several GPUs with fused sums have several, and thus CUDA graphs of more layers:
        H200s were idle for 2 to 6 us between the graphs of two layers.
        """
        most = max(1, MOST_TOGETHER // len(segment.pattern)) if fused else 1
        return max(n for n in range(1, most + 1) if segment.repeats % n == 0)

    def _unpack(self, number: int, params: nnx.State, vectors: Array | None) -> nnx.State:
        """Returns one repeat's parameters with the vectors that `pack_params` took out."""
        if vectors is None:
            return params
        shapes = vectors_of(abstract(self.spec)[1]["segments"][number], self.spec.segments[number])
        widths = [shape.shape[1] for shape in shapes]
        # One copy out of the stack: without the barrier XLA makes one copy per width.
        vectors = lax.optimization_barrier(vectors)
        pieces = iter(jnp.split(vectors, np.cumsum(widths)[:-1]))
        # An empty matrix is the rest that `_split` left of a stack.
        return jax.tree.map(
            lambda leaf: next(pieces) if leaf.ndim == 1 and not leaf.size else leaf, params
        )

    def _embed(self, tokens: Array, valid: Array | None = None) -> Array:
        """Returns the float32 residual stream [B, T, hidden]; 0 at padding, for any token ids."""
        with jax.named_scope("embed"):
            if valid is not None:
                tokens = jnp.where(valid, tokens, 0)
            x = self._lookup_embedding(tokens).astype(jnp.float32)
            return x if valid is None else jnp.where(valid[..., None], x, 0)

    def _lookup_embedding(self, tokens: Array) -> Array:
        """Returns rows of the embedding; if it is sharded, from the GPU that has them."""
        rows, parallel = self.embedding[...], self.spec.parallel
        if len(rows) == self.spec.vocab_size:
            return rows[tokens]
        place = tokens - rank(parallel, "tensor") * len(rows)
        own = (place >= 0) & (place < len(rows))
        found = jnp.where(own[..., None], rows[jnp.where(own, place, 0)], 0)
        return all_reduce(found, parallel, "tensor", found.dtype)

    def head(self, x: Float[Array, "*B hidden"]) -> Float[Array, "*B vocab"]:
        """Returns float32 logits of the normed stream."""
        with jax.named_scope("lm_head"):
            rows = x.reshape(-1, x.shape[-1])
            # For one row XLA makes a float32 copy of the whole head, 0.3 ms of DeepSeek-V2-Lite's
            # step (H200). For eight rows its product reads the head once.
            few = max(LEAST_ROWS - len(rows), 0)
            rows = jnp.pad(rows, ((0, few), (0, 0)))
            if self.spec.tie_embeddings:
                y = matmul(rows, self.embedding[...].T, jnp.dtype(self.spec.stream.dtype))
            else:
                y = self.lm_head(rows)
            return y[: len(y) - few].reshape(*x.shape[:-1], -1)


@cache
def abstract(spec: DecoderSpec) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the decoder's structure and its parameters' shapes and dtypes; allocates nothing."""
    return nnx.split(nnx.eval_shape(lambda: DecoderNetwork(spec, rngs=nnx.Rngs(0))))
