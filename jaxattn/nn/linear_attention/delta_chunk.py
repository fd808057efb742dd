"""A chunk of each row's prompt, with its convolution and its gates."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.cache.state_pool import state_read, state_write
from jaxattn.core.dispatch import Implementation
from jaxattn.kernels.gdn.prefill.launch import segment_tokens
from jaxattn.ops.gdn.causal_conv1d import causal_conv1d
from jaxattn.ops.gdn.packed_conv1d import causal_conv1d_of_pieces


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """The pieces of rows' prompts that a convolution in XLA treats as sequences.

    Attributes:
        inputs: the tokens of each piece.
        history: the inputs before each piece.
        last: the last piece of each row.
        lens: the number of tokens of a row's last piece; the rest is padding.
        position, row: the index of each token in its row's pieces, and its row.
    """

    inputs: Float[Array, "P T C"]
    history: Float[Array, "P W-1 Dc"]
    last: Int[Array, " B"]
    lens: Int[Array, " B"]
    position: Int[Array, "..."]
    row: Int[Array, "..."]

    def last_inputs(self, channels: int) -> Float[Array, "B W-1 Dc"]:
        """The last inputs of each row, not those of its padding."""
        history_len = self.history.shape[1]
        at = self.lens[:, None] + jnp.arange(history_len) - history_len
        old = jnp.clip(at + history_len, 0, history_len - 1)[..., None]
        history = jnp.take_along_axis(self.history[self.last], old, axis=1)
        if not self.inputs.shape[1]:  # of which nothing can be gathered
            return history
        new = self.inputs[self.last[:, None], jnp.maximum(at, 0)]
        return jnp.where((at < 0)[..., None], history, new[..., :channels])


@dataclasses.dataclass(frozen=True)
class DeltaChunk:
    """A chunk of each row's prompt, left-aligned.

    Attributes:
        slots: slots in both pools; -1 for padding rows and rows without a new token.
        starts_row: whether a row starts here, from zeros.
        valid: whether a token belongs to a row.
        query_lens: the number of new tokens of each row.
        layer: index into the stacks of pools.
        lines: the lines of rows that are packed in one list, where `valid` is [1, T]; else None.
    """

    slots: Int[Array, " B"]
    starts_row: Bool[Array, " B"]
    valid: Bool[Array, "B T"]
    query_lens: Int[Array, " B"]
    layer: int | Array | None
    lines: PromptLines | None = None

    @classmethod
    def of(
        cls, tokens: int, slots: Any, seq_lens: Any, query_lens: Any, layer: int | Array | None
    ) -> Self:
        slots = jnp.where(query_lens > 0, slots, -1)
        valid = (jnp.arange(tokens) < query_lens[:, None]) & (slots >= 0)[:, None]
        return cls(slots, seq_lens == query_lens, valid, query_lens, layer)

    @classmethod
    def packed(
        cls,
        lines: PromptLines,
        tokens: int,
        slots: Any,
        seq_lens: Any,
        query_lens: Any,
        layer: Any,
    ) -> Self:
        """The chunk of rows whose lines fill the beginning of a list of `tokens` tokens.

        The padding of a row's last line belongs to the row.
        """
        slots = jnp.where(query_lens > 0, slots, -1)
        valid = lines.valid & (lines.of_row(slots, -1) >= 0)[:, None]
        valid = jnp.pad(valid.reshape(1, -1), ((0, 0), (0, tokens - valid.size)))
        return cls(slots, seq_lens == query_lens, valid, query_lens, layer, lines)

    @property
    def options(self) -> dict[str, Any]:
        """The recurrence's options for a list of rows."""
        return {} if self.lines is None else {"cu_seqlens": self.lines.offsets}

    def split_tokens(self, value_heads: int) -> int | None:
        """Tokens per block, if one row may have all tokens of a step; None lets the op choose."""
        if self.lines is None:
            return None
        return segment_tokens(self.lines.valid.size, 1, value_heads)

    def convolve(
        self,
        inputs: Float[Array, "B T C"],
        taps: Float[Array, "Dc W"],
        conv_state: Float[Array, "*L Z W-1 Dc"],
        widths: tuple[int, ...],
        implementation: Implementation | None,
    ) -> tuple[tuple[Float[Array, "B T _"], ...], Array]:
        """The causal convolution with SiLU, and the pool with each row's last inputs.

        Args:
            inputs: the first Dc columns are convolved.
            widths: number of columns of each convolved array, Dc in all.
        """
        # Slot -1 reads as zeros, the start of a fresh row.
        read_slots = jnp.where(self.starts_row, -1, self.slots)
        previous_inputs = state_read(conv_state, read_slots, layer=self.layer).astype(inputs.dtype)
        channels = len(taps)
        with jax.named_scope("last_inputs"):
            split = self._split_rows if self.lines is None else self._split_lines
            pieces = split(inputs, previous_inputs, channels)
            last_inputs = pieces.last_inputs(channels)

        def reference() -> tuple[Array, ...]:
            of_pieces = pieces.inputs[..., :channels]
            mixed, _ = causal_conv1d(of_pieces, taps, initial_state=pieces.history)
            if self.lines is not None:
                mixed = mixed.reshape(1, -1, channels)
                mixed = jnp.pad(mixed, ((0, 0), (0, inputs.shape[1] - mixed.shape[1]), (0, 0)))
            return tuple(jnp.split(mixed, np.cumsum(widths)[:-1], axis=-1))

        parts = causal_conv1d_of_pieces(
            inputs,
            taps,
            previous_inputs,
            pieces.position,
            pieces.row,
            widths,
            reference,
            implementation="xla" if implementation == "xla" else None,
        )
        return parts, state_write(conv_state, last_inputs, self.slots, layer=self.layer)

    def _split_rows(self, inputs: Array, previous_inputs: Array, channels: int) -> "_Pieces":
        """Each row's tokens are one piece."""
        del channels
        rows, tokens = (jnp.arange(n, dtype=jnp.int32) for n in inputs.shape[:2])
        position, row = jnp.broadcast_arrays(tokens, rows[:, None])
        return _Pieces(inputs, previous_inputs, rows, self.query_lens, position, row)

    def _split_lines(self, inputs: Array, previous_inputs: Array, channels: int) -> "_Pieces":
        """Each line continues from the line before, unless it is its row's first."""
        lines, history_len = self.lines, previous_inputs.shape[1]
        assert lines is not None
        line_inputs, _ = lines.split(inputs)
        history = previous_inputs.at[lines.rows].get(mode="clip")
        if not lines.one_each:
            ends = line_inputs[:-1, -history_len:, :channels]
            ends = jnp.pad(ends, ((1, 0), (0, 0), (0, 0)))
            history = jnp.where((lines.begins > 0)[:, None, None], ends, history)
        before_last = jnp.maximum(self.query_lens - 1, 0) // lines.tokens
        line = jnp.minimum(lines.offsets[:-1] // lines.tokens + before_last, len(line_inputs) - 1)
        lens = self.query_lens - before_last * lines.tokens
        return _Pieces(line_inputs, history, line, lens, *lines.places(inputs.shape[1]))

    def gates(self, g: Array, beta: Array) -> tuple[Array, Array]:
        """Gates with no decay and no update at padding, which keep the state of its row."""
        of_g = self.valid.reshape(*self.valid.shape, *(1,) * (g.ndim - 2))
        return jnp.where(of_g, g, 0.0), jnp.where(self.valid[..., None], beta, 0.0)
