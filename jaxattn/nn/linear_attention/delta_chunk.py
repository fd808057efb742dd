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
        fresh: whether a row starts here, from zeros.
        valid: whether a token belongs to a row.
        query_lens: the number of new tokens of each row.
        layer: index into the stacks of pools.
        lines: the lines of rows that are packed in one list, where `valid` is [1, T]; else None.
    """

    slots: Int[Array, " B"]
    fresh: Bool[Array, " B"]
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
        reads = jnp.where(self.fresh, -1, self.slots)
        before = state_read(conv_state, reads, layer=self.layer).astype(inputs.dtype)
        if self.lines is not None:
            return self._convolve_lines(inputs, taps, before, conv_state)
        with jax.named_scope("last_inputs"):
            window = jnp.concatenate([before, inputs], axis=1)
            # The last inputs of the row, not those of the padded chunk.
            last = self.query_lens[:, None] + jnp.arange(taps.shape[1] - 1)
            after = jnp.take_along_axis(window, last[:, :, None], axis=1)
        mixed, _ = causal_conv1d(inputs, taps, initial_state=before)
        return mixed, state_write(conv_state, after, self.slots, layer=self.layer)

    def _convolve_lines(
        self, inputs: Array, taps: Array, before: Array, conv_state: Array
    ) -> tuple[Array, Array]:
        """Convolves lines; each continues from the line before, unless it is its row's first."""
        lines, back = self.lines, taps.shape[1] - 1
        assert lines is not None
        own, _ = lines.split(inputs)
        with jax.named_scope("last_inputs"):
            started = before.at[lines.rows].get(mode="clip")
            if not lines.one_each:
                ends = jnp.pad(own[:-1, -back:], ((1, 0), (0, 0), (0, 0)))
                started = jnp.where((lines.begins > 0)[:, None, None], ends, started)
            # The last inputs of the row's last line, not those of its padding.
            last = jnp.maximum(self.query_lens - 1, 0) // lines.tokens
            line = jnp.minimum(lines.offsets[:-1] // lines.tokens + last, len(own) - 1)
            at = (self.query_lens - last * lines.tokens)[:, None] + jnp.arange(back) - back
            old = jnp.take_along_axis(
                started[line], jnp.clip(at + back, 0, back - 1)[..., None], axis=1
            )
            new = own[line[:, None], jnp.maximum(at, 0)]
            after = jnp.where((at < 0)[..., None], old, new)
        mixed, _ = causal_conv1d(own, taps, initial_state=started)
        mixed = mixed.reshape(1, -1, mixed.shape[-1])
        mixed = jnp.pad(mixed, ((0, 0), (0, inputs.shape[1] - mixed.shape[1]), (0, 0)))
        return mixed, state_write(conv_state, after, self.slots, layer=self.layer)

    def gates(self, g: Array, beta: Array) -> tuple[Array, Array]:
        """Gates with no decay and no update at padding, which keep the state of its row."""
        of_g = self.valid.reshape(*self.valid.shape, *(1,) * (g.ndim - 2))
        return jnp.where(of_g, g, 0.0), jnp.where(self.valid[..., None], beta, 0.0)
