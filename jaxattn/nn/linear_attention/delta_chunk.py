"""A chunk of each row's prompt, with its convolution and its gates."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.cache.state_pool import state_read, state_write
from jaxattn.kernels.gdn.prefill.launch import segment_tokens
from jaxattn.ops.gdn.causal_conv1d import causal_conv1d


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
        inputs: Float[Array, "B T Dc"],
        taps: Float[Array, "Dc W"],
        conv_state: Float[Array, "*L Z W-1 Dc"],
    ) -> tuple[Float[Array, "B T Dc"], Array]:
        """The causal convolution with SiLU, and the pool with each row's last inputs."""
        # Slot -1 reads as zeros, the start of a fresh row.
        read_slots = jnp.where(self.starts_row, -1, self.slots)
        previous_inputs = state_read(conv_state, read_slots, layer=self.layer).astype(inputs.dtype)
        if self.lines is not None:
            return self._convolve_lines(inputs, taps, previous_inputs, conv_state)
        with jax.named_scope("last_inputs"):
            window = jnp.concatenate([previous_inputs, inputs], axis=1)
            # The last inputs of the row, not those of the padded chunk.
            last = self.query_lens[:, None] + jnp.arange(taps.shape[1] - 1)
            last_inputs = jnp.take_along_axis(window, last[:, :, None], axis=1)
        mixed, _ = causal_conv1d(inputs, taps, initial_state=previous_inputs)
        return mixed, state_write(conv_state, last_inputs, self.slots, layer=self.layer)

    def _convolve_lines(
        self, inputs: Array, taps: Array, previous_inputs: Array, conv_state: Array
    ) -> tuple[Array, Array]:
        """Convolves lines; each continues from the line before, unless it is its row's first."""
        lines, history_len = self.lines, taps.shape[1] - 1
        assert lines is not None
        line_inputs, _ = lines.split(inputs)
        with jax.named_scope("last_inputs"):
            line_history = previous_inputs.at[lines.rows].get(mode="clip")
            if not lines.one_each:
                ends = jnp.pad(line_inputs[:-1, -history_len:], ((1, 0), (0, 0), (0, 0)))
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
            last_inputs = jnp.where((input_positions < 0)[..., None], history_inputs, new_inputs)
        mixed, _ = causal_conv1d(line_inputs, taps, initial_state=line_history)
        mixed = mixed.reshape(1, -1, mixed.shape[-1])
        mixed = jnp.pad(mixed, ((0, 0), (0, inputs.shape[1] - mixed.shape[1]), (0, 0)))
        return mixed, state_write(conv_state, last_inputs, self.slots, layer=self.layer)

    def gates(self, g: Array, beta: Array) -> tuple[Array, Array]:
        """Gates with no decay and no update at padding, which keep the state of its row."""
        of_g = self.valid.reshape(*self.valid.shape, *(1,) * (g.ndim - 2))
        return jnp.where(of_g, g, 0.0), jnp.where(self.valid[..., None], beta, 0.0)
