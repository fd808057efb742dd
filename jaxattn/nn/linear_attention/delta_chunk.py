"""A chunk of each row's prompt, with its convolution and its gates."""

import dataclasses
from collections.abc import Callable
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

# How a chunk is convolved in XLA, (the index of each token in its row's piece, its row), and the
# last inputs of each row.
type _Convolution = tuple[Callable[[], Array], tuple[Array, Array], Array]


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
        of_chunk = self._of_rows if self.lines is None else self._of_lines
        reference, places, last_inputs = of_chunk(inputs, taps, previous_inputs)
        parts = causal_conv1d_of_pieces(
            inputs,
            taps,
            previous_inputs,
            *places,
            widths,
            lambda: tuple(jnp.split(reference(), np.cumsum(widths)[:-1], axis=-1)),
            implementation="xla" if implementation == "xla" else None,
        )
        return parts, state_write(conv_state, last_inputs, self.slots, layer=self.layer)

    def _of_rows(self, inputs: Array, taps: Array, previous_inputs: Array) -> _Convolution:
        channels, history_len = len(taps), taps.shape[1] - 1
        with jax.named_scope("last_inputs"):
            # The last inputs of the row, not those of the padded chunk.
            at = self.query_lens[:, None] + jnp.arange(history_len) - history_len
            new = jnp.take_along_axis(inputs, jnp.maximum(at, 0)[..., None], axis=1)
            old = jnp.clip(at + history_len, 0, history_len - 1)[..., None]
            history = jnp.take_along_axis(previous_inputs, old, axis=1)
            last_inputs = jnp.where((at < 0)[..., None], history, new[..., :channels])

        def reference() -> Array:
            return causal_conv1d(inputs[..., :channels], taps, initial_state=previous_inputs)[0]

        rows, tokens = (jnp.arange(n, dtype=jnp.int32) for n in inputs.shape[:2])
        places = jnp.broadcast_arrays(tokens, rows[:, None])
        return reference, (places[0], places[1]), last_inputs

    def _of_lines(self, inputs: Array, taps: Array, previous_inputs: Array) -> _Convolution:
        lines, (channels, width) = self.lines, taps.shape
        history_len = width - 1
        assert lines is not None
        line_inputs, _ = lines.split(inputs)
        with jax.named_scope("last_inputs"):
            # Each line continues from the line before, unless it is its row's first.
            line_history = previous_inputs.at[lines.rows].get(mode="clip")
            if not lines.one_each:
                ends = line_inputs[:-1, -history_len:, :channels]
                ends = jnp.pad(ends, ((1, 0), (0, 0), (0, 0)))
                line_history = jnp.where((lines.begins > 0)[:, None, None], ends, line_history)
            # The last inputs of the row's last line, not those of its padding.
            last = jnp.maximum(self.query_lens - 1, 0) // lines.tokens
            line = jnp.minimum(lines.offsets[:-1] // lines.tokens + last, len(line_inputs) - 1)
            input_positions = (
                (self.query_lens - last * lines.tokens)[:, None]
                + jnp.arange(history_len)
                - history_len
            )
            history_inputs = jnp.take_along_axis(
                line_history[line],
                jnp.clip(input_positions + history_len, 0, history_len - 1)[..., None],
                axis=1,
            )
            new_inputs = line_inputs[line[:, None], jnp.maximum(input_positions, 0)]
            last_inputs = jnp.where(
                (input_positions < 0)[..., None], history_inputs, new_inputs[..., :channels]
            )

        def reference() -> Array:
            of_lines = line_inputs[..., :channels]
            mixed, _ = causal_conv1d(of_lines, taps, initial_state=line_history)
            mixed = mixed.reshape(1, -1, mixed.shape[-1])
            return jnp.pad(mixed, ((0, 0), (0, inputs.shape[1] - mixed.shape[1]), (0, 0)))

        return reference, lines.places(inputs.shape[1]), last_inputs

    def gates(self, g: Array, beta: Array) -> tuple[Array, Array]:
        """Gates with no decay and no update at padding, which keep the state of its row."""
        of_g = self.valid.reshape(*self.valid.shape, *(1,) * (g.ndim - 2))
        return jnp.where(of_g, g, 0.0), jnp.where(self.valid[..., None], beta, 0.0)
