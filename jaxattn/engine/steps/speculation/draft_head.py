"""Drafts by the model's own draft head (multi-token prediction), which runs in the decode step.

    pair      a token, and the output head's input for the token before it
    draft     the head reads the pairs of the last step's tokens and guesses the next token; each
              further guess reads the guess before it
    keep      the step keeps the output head's inputs for its tokens, for the next pairs

A pair needs a sampled token, so it waits for the next step, whichever executable sampled the token.
The head caches a pair at the position of its first token, in pages of its own layer in the row's
block table. A rejected guess is overwritten there, as it is in the model's caches.

The cache affects the drafts, and so the speed, but never the output. It lacks the pairs of steps
without drafts, except the last. The pair at the end of a cached prefix is that of the first row,
whose next token may differ.
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
    row_indices: Int[Array, "b"],
    drafts: int,
    checkpoints: int,
    **options: Any,
) -> tuple[DraftTokens, DecodeState]:
    """Guesses `drafts` tokens for each row at `row_indices`, and caches the pairs that waited.

    Args:
        checkpoints: The number of slots between the rows' slots and the spare ones.
    """
    view = read(rows, row_indices)
    logits, hidden, state, has_pair = _read_pairs(model, params, state, rows, view, **options)
    guessed = [jnp.argmax(logits, axis=-1).astype(jnp.int32)]
    for behind in range(1, drafts):
        batch = DecodeBatch(
            tokens=guessed[-1][:, None],
            seq_lens=jnp.where(has_pair, view.cursor.length + behind, 0),
            block_tables=_tables(rows, view),
            state_indices=jnp.where(has_pair, view.integer("slot"), -1),
        )
        only = jnp.zeros_like(view.indices)
        logits, hidden, state = model.draft(params, state, batch, hidden[:, None], only, **options)
        guessed.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
    made = DraftTokens.of(rows, view, jnp.stack(guessed, axis=1), has_pair, checkpoints)
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
    """Returns the state after the head has cached the waiting pairs, without a guess."""
    return _read_pairs(model, params, state, rows, read(rows, places), **options)[2]


def _read_pairs(
    model: Model, params: Any, state: DecodeState, rows: DeviceBatch, view: RowView, **options: Any
) -> tuple[Array, Array, DecodeState, Array]:
    """Returns `Model.draft` for the last waiting pair of each row, and which rows have any."""
    kept = state.caches[DRAFT]
    hidden = kept[DRAFT_HIDDEN].at[view.indices].get(mode="fill", fill_value=0)
    pairs = kept[DRAFT_PAIRS].at[view.indices].get(mode="fill", fill_value=0)
    has_pair = (view.cursor.active > 0) & (pairs > 0)
    first = view.cursor.length - pairs  # position of the first token of the first pair
    most = hidden.shape[1]
    # The second tokens of the pairs. After the last pair they are arbitrary, and the next pairs
    # overwrite them in the cache.
    at = first[:, None] + 1 + jnp.arange(most)
    tokens = rows.history.at[view.indices[:, None], at].get(mode="fill", fill_value=0)
    batch = DecodeBatch(
        tokens=jnp.where(has_pair[:, None], tokens, 0),
        seq_lens=jnp.where(has_pair, first + most, 0),
        block_tables=_tables(rows, view),
        state_indices=jnp.where(has_pair, view.integer("slot"), -1),
    )
    last = jnp.maximum(pairs - 1, 0)
    return *model.draft(params, state, batch, hidden, last, **options), has_pair


def _tables(rows: DeviceBatch, view: RowView) -> Int[Array, "b M"]:
    return rows.tables.at[view.indices].get(mode="fill", fill_value=0)


@jax.named_scope("draft")
def read_prompts(
    model: Model,
    params: Any,
    state: DecodeState,
    prompts: PrefillBatch,
    next_tokens: Int[Array, "B"],
    hidden: Float[Array, "N hidden"],
    **options: Any,
) -> DecodeState:
    """Returns the state after the head has cached the pairs of a step's prompts.

    Args:
        next_tokens: int32 [B], the token after each row's piece; -1 if the step ends the prompt,
            whose last pair then waits.
        hidden: The output head's input for each token.
    """
    tokens = jnp.roll(prompts.tokens.reshape(-1), -1)
    at = jnp.where(prompts.query_lens > 0, prompts.layout.last, tokens.size)
    tokens = tokens.at[at].set(jnp.maximum(next_tokens, 0), mode="drop")
    pairs = dataclasses.replace(prompts, tokens=tokens.reshape(prompts.tokens.shape))
    return model.draft_prompts(params, state, pairs, hidden, **options)


def keep(
    state: DecodeState,
    places: Int[Array, "b"],
    hidden: Float[Array, "b *S hidden"],
    pairs: Int[Array, "b"] | int = 1,
) -> DecodeState:
    """Returns the state with the output head's inputs for a step's tokens, for rows at `places`.

    Args:
        hidden: The inputs for one token, or for S tokens.
        pairs: The number of valid ones among the S.
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
