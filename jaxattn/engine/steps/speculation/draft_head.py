"""Drafts by the model's own draft head (multi-token prediction): it guesses as the model decodes.

    pair      a token, and what the output head read of the token before it
    draft     the head reads the pairs of the tokens that the last step gave, and guesses what
              follows; of several guesses each one reads the guess before it
    keep      the step keeps what the output head read of its tokens, for the next pairs

A pair needs a token that was sampled, so it waits for the next step: whichever executable sampled
the token. The head caches a pair where the first of its tokens is cached, in pages of its own layer
in the row's block table. A guess that was wrong is overwritten there, as are the model's.

The cache affects which drafts come, and so the speed, but never what a row says. It lacks the pairs
of steps without drafts, but for the last. The pair at the end of a cached prefix is that of the
first row, whose next token may be another.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxattn.engine.steps.device_batch import DeviceBatch, RowView, read
from jaxattn.engine.steps.speculation.verification import DraftTokens
from jaxattn.models.caches.layer_cache import DRAFT, DRAFT_HIDDEN, DRAFT_PAIRS, DecodeState
from jaxattn.models.interface import DecodeBatch, Model, PrefillBatch


@jax.named_scope("draft")
def guess(
    model: Model,
    params: Any,
    state: DecodeState,
    rows: DeviceBatch,
    places: Int[Array, "b"],
    drafts: int,
    checkpoints: int,
    **options: Any,
) -> tuple[DraftTokens, DecodeState]:
    """Guesses `drafts` tokens for each row at `places`, and caches the pairs that waited.

    Args:
        checkpoints: slots between those of rows and the spare ones.
    """
    found = read(rows, places)
    logits, hidden, state, there = _read_pairs(model, params, state, rows, found, **options)
    guessed = [jnp.argmax(logits, axis=-1).astype(jnp.int32)]
    for behind in range(1, drafts):
        batch = DecodeBatch(
            tokens=guessed[-1][:, None],
            seq_lens=jnp.where(there, found.cursor.length + behind, 0),
            block_tables=_tables(rows, found),
            state_indices=jnp.where(there, found.integer("slot"), -1),
        )
        only = jnp.zeros_like(found.at)
        logits, hidden, state = model.draft(params, state, batch, hidden[:, None], only, **options)
        guessed.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
    made = DraftTokens.of(rows, found, jnp.stack(guessed, axis=1), there, checkpoints)
    return made, state


@jax.named_scope("draft")
def read_pairs(
    model: Model,
    params: Any,
    state: DecodeState,
    rows: DeviceBatch,
    places: Int[Array, "b"],
    **options: Any,
) -> DecodeState:
    """The state in which the head has cached the pairs of rows that wait; it guesses nothing."""
    return _read_pairs(model, params, state, rows, read(rows, places), **options)[2]


def _read_pairs(
    model: Model, params: Any, state: DecodeState, rows: DeviceBatch, found: RowView, **options: Any
) -> tuple[Array, Array, DecodeState, Array]:
    """What `Model.draft` gives of the last of the pairs that wait, and which rows have any."""
    kept = state.caches[DRAFT]
    hidden = kept[DRAFT_HIDDEN].at[found.at].get(mode="fill", fill_value=0)
    pairs = kept[DRAFT_PAIRS].at[found.at].get(mode="fill", fill_value=0)
    there = (found.cursor.active > 0) & (pairs > 0)
    first = found.cursor.length - pairs  # where the first token of the first pair stands
    most = hidden.shape[1]
    # The second tokens; behind the last pair they are anything, and are cached where the next go.
    at = first[:, None] + 1 + jnp.arange(most)
    tokens = rows.history.at[found.at[:, None], at].get(mode="fill", fill_value=0)
    batch = DecodeBatch(
        tokens=jnp.where(there[:, None], tokens, 0),
        seq_lens=jnp.where(there, first + most, 0),
        block_tables=_tables(rows, found),
        state_indices=jnp.where(there, found.integer("slot"), -1),
    )
    last = jnp.maximum(pairs - 1, 0)
    return *model.draft(params, state, batch, hidden, last, **options), there


def _tables(rows: DeviceBatch, found: RowView) -> Int[Array, "b M"]:
    return rows.tables.at[found.at].get(mode="fill", fill_value=0)


@jax.named_scope("draft")
def read_prompts(
    model: Model,
    params: Any,
    state: DecodeState,
    prompts: PrefillBatch,
    following: Int[Array, "B"],
    hidden: Float[Array, "N hidden"],
    **options: Any,
) -> DecodeState:
    """The state in which the head has cached the pairs of a step's prompts.

    Args:
        following: int32 [B], the token behind each row's piece; -1 where the step ends its prompt,
            whose last pair waits.
        hidden: what the output head reads of each token.
    """
    tokens = jnp.roll(prompts.tokens.reshape(-1), -1)
    at = jnp.where(prompts.query_lens > 0, prompts.layout.last, tokens.size)
    tokens = tokens.at[at].set(jnp.maximum(following, 0), mode="drop")
    pairs = dataclasses.replace(prompts, tokens=tokens.reshape(prompts.tokens.shape))
    return model.draft_prompts(params, state, pairs, hidden, **options)


def keep(
    state: DecodeState,
    places: Int[Array, "b"],
    hidden: Float[Array, "b *S hidden"],
    pairs: Int[Array, "b"] | int = 1,
) -> DecodeState:
    """The state with what the output head read of a step's tokens, of rows at places.

    Args:
        hidden: of one token, or of S.
        pairs: how many of the S count.
    """
    kept = state.caches[DRAFT]
    at = jnp.where(places < 0, len(kept[DRAFT_PAIRS]), places)
    where = at if hidden.ndim == 3 else (at, 0)
    return state.replace(
        DRAFT,
        {
            DRAFT_HIDDEN: kept[DRAFT_HIDDEN].at[where].set(hidden, mode="drop"),
            DRAFT_PAIRS: kept[DRAFT_PAIRS].at[at].set(pairs, mode="drop"),
        },
    )
