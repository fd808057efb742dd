"""Log-probabilities of given texts by a model's decode steps, and by its prefill.

Both run the model's own steps over a donated state, as the engine does. The next token is given
rather than sampled, so the model processes the same texts with every cache format.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.core.dispatch import Implementation
from jaxattn.models.caches.layer_cache import CacheSize, DecodeState
from jaxattn.models.interface import (
    DecodeBatch,
    PrefillBatch,
    init_state,
    jit_step,
    scratch_spec,
)
from jaxattn.models.network.decoder_model import DecoderModel

type Told = tuple[Float[Array, "B"], Int[Array, "B"]]


@dataclasses.dataclass(frozen=True)
class TextScores:
    """Scores of each token after a row's first.

    Attributes:
        logprobs: float32 [rows, tokens - 1], the token's log-probability.
        best: int32 [rows, tokens - 1], the likeliest token at its position.
    """

    logprobs: Float[np.ndarray, "R T"]
    best: Int[np.ndarray, "R T"]


class TextScorer:
    """Scores rows of one length.

    Args:
        params: The parameters, not packed.
        rows: The number of rows that a step processes together.
        context: The number of tokens per row.
        chunk: The number of tokens per prefill chunk.
    """

    def __init__(
        self,
        model: DecoderModel,
        params: Any,
        *,
        rows: int,
        context: int,
        chunk: int,
        implementation: Implementation | None = None,
    ):
        self.model, self.rows, self.implementation = model, rows, implementation
        self.params = jax.jit(model.pack)(params)
        self.chunk = min(chunk, context)
        pages = -(-context // PAGE_SIZE)
        self._tables = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
        size, spec = (
            CacheSize(pages=rows * pages, slots=rows),
            scratch_spec(model, rows, max_pages=pages),
        )
        # A new state for each batch of texts, because a decode step does not zero the slots.
        self._new_state = jax.jit(lambda: init_state(model, size, spec))
        self._decode, self._prefill = jit_step(self._decoded), jit_step(self._read, prefill=True)

    def by_decode(self, texts: Int[np.ndarray, "R T"]) -> TextScores:
        """Scores the texts by decode steps, with one token of each row per step."""

        def run(tokens: Int[np.ndarray, "B T"]) -> Told:
            return self._decode(self.params, self._new_state(), tokens)[0]

        return self._together(texts, run)

    def by_prefill(self, texts: Int[np.ndarray, "R T"]) -> TextScores:
        """Scores the texts by prefill, with one chunk of each row per step."""

        def run(tokens: Int[np.ndarray, "B T"]) -> Told:
            state, found = self._new_state(), []
            for start in range(0, tokens.shape[1] - 1, self.chunk):
                # The last chunk may be shorter and is padded.
                chunk_tokens = tokens[:, start : start + self.chunk + 1]
                padded = np.zeros((self.rows, self.chunk + 1), np.int32)
                padded[:, : chunk_tokens.shape[1]] = chunk_tokens
                num_new_tokens = np.int32(chunk_tokens.shape[1] - 1)
                scores, state = self._prefill(
                    self.params, state, padded, np.int32(start), num_new_tokens
                )
                found.append([np.asarray(each)[:, :num_new_tokens] for each in scores])
            return tuple(np.concatenate(each, axis=1) for each in zip(*found, strict=True))  # type: ignore[return-value]

        return self._together(texts, run)

    def _together(self, texts: Any, run: Callable[[Any], Told]) -> TextScores:
        """Runs `self.rows` texts at a time; copies of the first text fill up the last batch."""
        found = []
        for start in range(0, len(texts), self.rows):
            batch_texts = texts[start : start + self.rows]
            full_batch = np.concatenate(
                [batch_texts, np.repeat(texts[:1], self.rows - len(batch_texts), axis=0)]
            )
            found.append([np.asarray(each)[: len(batch_texts)] for each in run(full_batch)])
        logprobs, best = (np.concatenate(each) for each in zip(*found, strict=True))
        return TextScores(logprobs, best)

    def _decoded(
        self, params: Any, state: DecodeState, tokens: Int[Array, "B T"]
    ) -> tuple[Told, DecodeState]:
        """The scores of each token except the first, [B, T - 1], by T - 1 decode steps."""

        def step(state: DecodeState, position: Array) -> tuple[DecodeState, Told]:
            now, following = (
                lax.dynamic_slice_in_dim(tokens, position + behind, 1, axis=1) for behind in (0, 1)
            )
            lens = jnp.full(self.rows, position + 1, jnp.int32)
            batch = DecodeBatch(now, lens, jnp.asarray(self._tables), jnp.arange(self.rows))
            logits, state = self.model.decode(
                params, state, batch, implementation=self.implementation
            )
            return state, _told(logits, following[:, 0])

        state, scores = lax.scan(step, state, jnp.arange(tokens.shape[1] - 1))
        return (scores[0].T, scores[1].T), state

    def _read(
        self,
        params: Any,
        state: DecodeState,
        tokens: Int[Array, "B T+1"],
        start: Int[Array, ""],
        num_new_tokens: Int[Array, ""],
    ) -> tuple[Told, DecodeState]:
        """The scores of the tokens after those of a chunk, [B, T]; the head runs per column."""
        query_lens = jnp.full(self.rows, num_new_tokens, jnp.int32)
        batch = PrefillBatch(
            tokens[:, :-1],
            query_lens,
            start + query_lens,
            jnp.asarray(self._tables),
            jnp.arange(self.rows),
        )
        chosen = self.implementation if self.implementation == "xla" else None
        hidden, state = self.model.prefill_hidden(params, state, batch, implementation=chosen)

        def column(pair: tuple[Array, Array]) -> Told:
            return _told(self.model.head(params, pair[0]), pair[1])

        scores = lax.map(column, (hidden.swapaxes(0, 1), tokens[:, 1:].T))
        return (scores[0].T, scores[1].T), state


def _told(logits: Float[Array, "B vocab"], following: Int[Array, "B"]) -> Told:
    """The log-probabilities of the following tokens, and the likeliest tokens."""
    own = jnp.take_along_axis(logits, following[:, None], axis=1)[:, 0]
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return own - jax.nn.logsumexp(logits, axis=-1), best
