"""The base of delta-rule layers: weights, checks, and prefill of a chunk of rows' prompts."""

import abc
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxattn.arena import Arena
from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.dispatch import Implementation
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import (
    check_features,
    keep_concrete,
)
from jaxattn.nn.linear import Linear, normal
from jaxattn.nn.linear_attention.delta_chunk import DeltaChunk
from jaxattn.nn.linear_attention.state_checks import check_lengths, check_pools
from jaxattn.nn.norm import RMSNorm
from jaxattn.ops.attention.segments import SegmentBounds
from jaxattn.ops.gdn.chunk_xla import CLEARING_LOG_DECAY
from jaxattn.ops.gdn.gated_norm import gated_norm_of_sequences
from jaxattn.ops.gdn.packed_conv1d import causal_conv1d_of_segments
from jaxattn.ops.gdn.prefill_options import OutputNorm
from jaxattn.ops.linear.norm_linear import PendingNorm

# The name under which `jax.checkpoint` can save the output (`save_only_these_names`).
SAVED_NAME = "delta_out"


class DeltaProjections(NamedTuple):
    """The projections of a layer's input. Dc is the number of channels of its convolution."""

    mixed: Float[Array, "B T C"]  # q | k | v before the convolution, in the first Dc columns
    decays: Float[Array, "B T _"]  # the input of the layer's gates
    beta: Float[Array, "B T Hv"]  # before the sigmoid
    gate: Float[Array, "B T _"]  # of the output, in the last Hv * Dv columns


class DeltaLayer(nnx.Module):
    """A layer with a pool of convolution inputs and a pool of states.

    Attributes:
        in_proj: the name of its first projection.
        family: the first word of its scopes in a profile.
        chunk_rule: the recurrence over whole sequences, which has a gradient.
        prefill_rule: the recurrence over a chunk, which updates the states in slots.
        sigmoid_gate: whether the output is gated by sigmoid rather than SiLU.
        dtype: dtype of the operands of every matrix product.
    """

    in_proj: ClassVar[str]
    family: ClassVar[str]
    chunk_rule: ClassVar[Callable[..., tuple[Array, Any]]]
    prefill_rule: ClassVar[Callable[..., tuple[Array, Array]]]
    sigmoid_gate: ClassVar[bool] = False
    dtype: jnp.dtype
    conv1d: nnx.Param
    norm: RMSNorm
    out_proj: Linear

    @property
    @abc.abstractmethod
    def _slot_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of a slot in each pool, `conv_shape` and `state_shape`."""

    @abc.abstractmethod
    def _projected(self, x: Array | PendingNorm) -> tuple[Array, ...]:
        """The projections of tokens [B, T, hidden]."""

    def _projected_rows(self, x: Array | PendingNorm) -> tuple[tuple[Array, ...], dict[str, Any]]:
        """The projections of the tokens of `decode`, and options of `_advance`."""
        return self._projected(x), {}

    @abc.abstractmethod
    def _split(self, projected: tuple[Array, ...]) -> DeltaProjections:
        """Splits the projections into their parts."""

    @abc.abstractmethod
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
        """`decode` between the projections: (y [B, S, Hv Dv], the pools, the arena if given)."""

    @abc.abstractmethod
    def _split_heads(self, mixed: Float[Array, "B T Dc"]) -> tuple[Array, Array, Array]:
        """q and k [B, T, Hk, Dk], v [B, T, Hv, Dv]."""

    @abc.abstractmethod
    def _gates(self, projections: DeltaProjections) -> tuple[Array, Array]:
        """The log decays and beta, both float32."""

    def __call__(
        self,
        x: Float[Array, "B T hidden"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        cu_seqlens: Int[Array, " n+1"] | None = None,
    ) -> Float[Array, "B T hidden"]:
        """Whole sequences from a zero state. Returns float32.

        Args:
            segment_ids: the sequence of each token, if rows hold several. The ids must not decrease
                along a row. Neither state nor convolution passes from one sequence to the next. A
                NaN or an infinity makes the outputs of its token and of later tokens in its
                sequence NaN, and no others.
            cu_seqlens: offsets of n sequences packed in one row (B = 1) instead, starting at 0.
                Tokens from the last offset on are padding.

        Raises:
            TypeError, ValueError: an argument has a wrong dtype or shape, or a wrong concrete
                value; the message names the argument.
        """
        op, ends = type(self).__name__, keep_concrete(cu_seqlens)
        self._check_tokens(op, x)
        arguments = OpArguments(op)
        if segment_ids is not None:
            arguments.check_shape("x", x, "B T hidden")
        bounds = SegmentBounds.checked(arguments, x, None, segment_ids, ends)
        x, is_nan = bounds.isolated(x, self.dtype)
        # One cast of x, so that the gradients of its products are summed in this dtype.
        projections = self._split(self._projected(x.astype(self.dtype)))
        g, beta = self._gates(projections)
        q, k, v, gate = self._convolved(projections.mixed, bounds)
        projection = None if gate is None else projections.mixed
        gate = projections.gate if gate is None else gate
        if segment_ids is not None:
            assert bounds.first is not None  # always set with segment_ids
            begins = jnp.equal(bounds.first, jnp.arange(x.shape[1]))
            begins = begins.reshape(begins.shape + (1,) * (g.ndim - 2))
            g = jnp.where(begins, CLEARING_LOG_DECAY, g)
        o, _ = type(self).chunk_rule(q, k, v, g, beta, use_qk_l2norm=True, cu_seqlens=ends)
        o = checkpoint_name(o, SAVED_NAME)
        weight, eps = self.norm.weight[...], self.norm.eps
        normed = gated_norm_of_sequences(
            o, gate, weight, eps=eps, sigmoid=self.sigmoid_gate, projection=projection
        )
        y = self._project_out(normed)
        return y if is_nan is None else jnp.where(is_nan[..., None], jnp.nan, y)

    def _convolved(self, mixed: Array, bounds: SegmentBounds) -> tuple[Array | None, ...]:
        """q, k and v split into heads, and the columns after them, or None.

        Each is a separate array, and so is its gradient, because XLA concatenates such gradients
        slowly.
        """
        taps, heads = self.conv1d[...], self._head_shapes(mixed)
        widths = [math.prod(shape[2:]) for shape in heads]
        if more := mixed.shape[2] - len(taps):
            widths.append(more)
        parts = causal_conv1d_of_segments(mixed, taps, bounds.first, tuple(widths))
        q, k, v = (part.reshape(shape) for part, shape in zip(parts, heads, strict=False))
        return q, k, v, parts[3] if more else None

    def _head_shapes(self, mixed: Array) -> list[tuple[int, ...]]:
        """The shapes of q, k and v, split into heads, for the projections of some tokens."""
        convolved = jax.ShapeDtypeStruct((*mixed.shape[:2], len(self.conv1d)), mixed.dtype)
        return [each.shape for each in jax.eval_shape(self._split_heads, convolved)]

    def prefill(
        self,
        x: Float[Array, "B T hidden"],
        conv_state: Float[Array, "..."],
        ssm_state: Float[Array, "..."],
        *,
        state_indices: Int[Array, "B"],
        seq_lens: Int[Array, "B"],
        query_lens: Int[Array, "B"],
        layer: int | Int[Array, ""] | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T hidden"], Array, Array]:
        """A chunk of each row's prompt, from the states in its slot to the states after the chunk.

        A row with `seq_lens == query_lens` is fresh: it starts from zero, whatever an earlier row
        left in its slot. Slot -1, or `query_lens` 0, is a padding row.

        Args:
            x: the chunk, left-aligned; tokens from `query_lens[b]` on are padding.
            conv_state: [L, Z, W - 1, Dc] with `layer`, or [Z, W - 1, Dc]. Dc is the first dim of
                `conv1d`.
            ssm_state: float32 or bfloat16 [L, Z, Hv, Dv, Dk] with `layer`, or [Z, Hv, Dv, Dk].
            seq_lens: the row's length after this chunk.
            query_lens: new tokens of each row, at most T and at most its seq_lens.

        Returns:
            (float32 [B, T, hidden], conv_state, ssm_state). The output at padding is exactly 0.

        Raises:
            TypeError, ValueError: an argument has a wrong dtype or shape, or a wrong concrete
                value; the message names the argument.
        """
        op = f"{type(self).__name__}.prefill"
        pools, lens = (conv_state, ssm_state), (seq_lens, query_lens)
        chunk = self._check_chunk(op, x, pools, state_indices, lens, layer)
        projected = self._projected(x)
        y, conv_state, ssm_state = self._run_chunk(
            projected, chunk, conv_state, ssm_state, implementation
        )
        out = self._project_out(y)
        # A padding token's gate is undefined.
        return jnp.where(chunk.valid[..., None], out, 0), conv_state, ssm_state

    def _run_chunk(
        self,
        projected: tuple[Array, ...],
        chunk: "DeltaChunk",
        conv_state: Array,
        ssm_state: Array,
        implementation: Implementation | None,
    ) -> tuple[Array, Array, Array]:
        """(the input of out_proj, the pools) for a chunk, after its projections."""
        projections = self._split(projected)
        heads = self._head_shapes(projections.mixed)
        widths = tuple(math.prod(shape[2:]) for shape in heads)
        parts, conv_state = chunk.convolve(
            projections.mixed, self.conv1d[...], conv_state, widths, implementation
        )
        q, k, v = (part.reshape(shape) for part, shape in zip(parts, heads, strict=True))
        y, ssm_state = type(self).prefill_rule(
            q,
            k,
            v,
            *chunk.gates(*self._gates(projections)),
            ssm_state,
            chunk.slots,
            has_initial_state=~chunk.starts_row,
            layer=chunk.layer,
            **chunk.options,
            split_tokens=chunk.split_tokens(v.shape[2]),
            output_norm=OutputNorm(
                gate=projections.gate, weight=self.norm.weight[...], eps=self.norm.eps
            ),
            implementation=implementation,
        )
        return y, conv_state, ssm_state

    def mixed(
        self,
        x: Float[Array, "1 N hidden"],
        conv_state: Float[Array, "..."],
        ssm_state: Float[Array, "..."],
        *,
        lines: PromptLines,
        state_indices: Int[Array, "B"],
        seq_lens: Int[Array, "B"],
        query_lens: Int[Array, "B"],
        rows: Mapping[str, Any] | None,
        layer: int | Int[Array, ""] | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "1 N hidden"], Array, Array, Any]:
        """Pieces of B rows' prompts in lines, followed by one token of each decoding row. One
        product projects all tokens.

        Args:
            x: the tokens of all lines, and of `rows`.
            lines: which tokens each row has.
            state_indices, seq_lens, query_lens: slots and lengths of the lines' rows, as in
                `prefill`.
            rows: the keywords of `decode`; None if there are no other rows.

        Returns:
            (float32 [1, N, hidden], conv_state, ssm_state, the arena or None).
        """
        projected = self._projected(x)
        chunk = DeltaChunk.packed(lines, x.shape[1], state_indices, seq_lens, query_lens, layer)
        prompt_implementation = implementation if implementation == "xla" else None
        # The recurrence runs over the whole list, although the end belongs to none of its rows:
        # cutting the end off would copy the rest.
        y, conv_state, ssm_state = self._run_chunk(
            projected, chunk, conv_state, ssm_state, prompt_implementation
        )
        y, arenas = y.reshape(*y.shape[:2], -1), [None]
        if rows is not None:
            # A barrier, as in attention: the prompts read the pools before the rows write to them.
            y, conv_state, ssm_state = lax.optimization_barrier((y, conv_state, ssm_state))
            decode_y, conv_state, ssm_state, *arenas = self._advance(
                tuple(lines.split(each)[1] for each in projected),
                conv_state,
                ssm_state,
                layer=layer,
                implementation=implementation,
                **rows,
            )
            decode_start = x.shape[1] - len(decode_y)
            y = y.at[0, decode_start:].set(decode_y[:, 0].astype(y.dtype), indices_are_sorted=True)
        is_decode_token = jnp.arange(x.shape[1]) >= lines.valid.size
        out = jnp.where((chunk.valid | is_decode_token)[..., None], self._project_out(y), 0)
        return out, conv_state, ssm_state, arenas[0] if arenas else None

    def decode(
        self,
        x: Float[Array, "B S hidden"] | PendingNorm,
        conv_state: Float[Array, "..."],
        ssm_state: Float[Array, "..."],
        *,
        state_indices: Int[Array, "B"],
        write_indices: Int[Array, "B"] | Int[Array, "B S"] | None = None,
        layer: int | Int[Array, ""] | LayerIndex | None = None,
        weights: Float[Array, "*L P"] | None = None,
        arena: Arena | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B S hidden"], Array, Array, Arena | None]:
        """Decodes the next S tokens of each row, and updates the states in its slot in place.

        Args:
            conv_state, ssm_state: as in `prefill`.
            state_indices: -1 is a padding row.
            write_indices: the slots that are written, if not those that were read, [B] or [B, S];
                see `jaxattn.gdn.gated_delta_net_decode`.
            weights: `packed_weights()`, made once when the model is loaded, or the stack of all
                layers, which `layer` indexes. None packs the weights in this call.

        Returns:
            (float32 [B, S, hidden], conv_state, ssm_state, the arena or None).
            A padding row's output is exactly 0 and its states are neither read nor written.
        """
        op, pools = f"{type(self).__name__}.decode", (conv_state, ssm_state)
        state_indices = self._check_decode(op, x, pools, state_indices, layer)
        projected, options = self._projected_rows(x)
        y, conv_state, ssm_state, *arenas = self._advance(
            projected,
            conv_state,
            ssm_state,
            state_indices=state_indices,
            write_indices=write_indices,
            layer=layer,
            weights=weights,
            arena=arena,
            implementation=implementation,
            **options,
        )
        return self._project_out(y), conv_state, ssm_state, arenas[0] if arenas else None

    def _project_out(self, y: Float[Array, "B T *Hv_Dv"]) -> Float[Array, "B T hidden"]:
        with jax.named_scope(f"{self.family}_out_proj"):
            return self.out_proj(y.reshape(*y.shape[:2], math.prod(y.shape[2:])))

    def _check_tokens(self, op: str, x: Any) -> None:
        hidden = getattr(self, self.in_proj).in_features
        check_features(op, x, "hidden", self.in_proj, (hidden,), 0)
        if len(x.shape) != 3:
            raise ValueError(f"{op}: x must be [B, T, {hidden}], got {tuple(x.shape)}")

    def _check_chunk(
        self, op: str, x: Any, pools: tuple[Any, Any], slots: Any, lens: tuple[Any, Any], layer: Any
    ) -> DeltaChunk:
        """Checks the arguments and returns the chunk of x.

        Args:
            pools: the pools of convolution inputs and of states.
            lens: seq_lens and query_lens.

        Raises:
            TypeError, ValueError: an argument does not fit; the message names it.
        """
        self._check_tokens(op, x)
        slots, seq_lens, query_lens = map(keep_concrete, (slots, *lens))
        check_pools(op, x, *pools, slots, layer, **self._slot_shapes)
        check_lengths(op, x, slots, seq_lens, query_lens)
        return DeltaChunk.of(x.shape[1], slots, seq_lens, query_lens, layer)

    def _check_decode(self, op: str, x: Any, pools: tuple[Any, Any], slots: Any, layer: Any) -> Any:
        """Checks the arguments and returns the slots of x's rows.

        Raises:
            TypeError, ValueError: an argument does not fit; the message names it.
        """
        self._check_tokens(op, x)
        if x.shape[1] == 0:
            raise ValueError(f"{op}: x must have at least one token per row, got {tuple(x.shape)}")
        slots = keep_concrete(slots)
        check_pools(op, x, *pools, slots, layer, **self._slot_shapes)
        return slots


def init_conv_taps(rngs: nnx.Rngs, channels: int, width: int, dtype: DTypeLike) -> nnx.Param:
    """Random taps of a convolution over `width` tokens."""
    return nnx.Param(normal(rngs, (channels, width), width**-0.5, dtype))


def init_decay_rates(rngs: nnx.Rngs, num_heads: int) -> nnx.Param:
    """A_log of the paper's decay rates, uniform in (0, 16), but away from 0, whose log is -inf."""
    rates = jax.random.uniform(rngs.params(), (num_heads,), jnp.float32, minval=1e-3, maxval=16.0)
    return nnx.Param(jnp.log(rates))
