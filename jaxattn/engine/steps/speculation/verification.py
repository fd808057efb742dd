"""Verification of drafts: sampling after a row's last token and after each token of its draft.

    draft     prompt_lookup.py, draft_head.py
    decode    the last token and the draft, in one step of S tokens
    verify    a token is sampled after each of them as if there were no draft; draft tokens are
              accepted as long as they equal the sampled ones

With and without a draft, the seed and the position give the same key to a token. So with equal
logits, drafts do not change a row's tokens, only how many come at once. (A draft puts all
probability on one token. Rejection sampling, which accepts it with the model's probability and
otherwise draws from the rest, is then equal to drawing and comparing.)

Penalties depend on earlier tokens of the row, so a row with penalties gets no draft.

Token caches go by the row's length, so later steps overwrite the entries of rejected tokens.
Recurrent states do not, so the step keeps the states after each of its tokens, each in another slot
of the row. The row continues from one of them:

    slot of a row            the slot from the scheduler, in which its prompt is read
    batch + checkpoints + i  spare slots: the first of all rows, then the second of all rows
"""

import dataclasses
import functools
import operator
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxattn.engine.sampling.sampler import SamplingBatch, SamplingMode, sample
from jaxattn.engine.steps.device_batch import INTEGERS, DeviceBatch, RowView
from jaxattn.engine.steps.token_selection import FinishCode, ending, with_biases, with_penalties
from jaxattn.models.interface import DecodeBatch


class DraftTokens(NamedTuple):
    """The rows of a step and their drafts.

    Attributes:
        view: The rows.
        tokens: int32 [b, S], each row's last token and the draft after it.
        has_draft: bool [b], whether the row has a draft.
        slots: int32 [b, S], the slots for the states after each token; -1 for padding.
    """

    view: RowView
    tokens: Int[Array, "b S"]
    has_draft: Bool[Array, "b"]
    slots: Int[Array, "b S"]

    @property
    def active(self) -> Bool[Array, "b"]:
        return self.view.cursor.active > 0

    @classmethod
    def of(
        cls,
        rows: DeviceBatch,
        view: RowView,
        guessed: Int[Array, "b n"],
        has_guess: Bool[Array, "b"],
        checkpoints: int,
    ) -> Self:
        """Combines rows with guesses. Rows without `has_guess` or with penalties get no draft.

        Args:
            checkpoints: The number of slots between the rows' slots and the spare ones.
        """
        tokens = jnp.concatenate([view.cursor.token[:, None], guessed], axis=1)
        active = view.cursor.active > 0
        slots = _slots(view, len(rows.cursor), guessed.shape[1], checkpoints)
        slots = jnp.where(active[:, None], slots, -1)
        return cls(view, tokens, active & has_guess & ~_penalized(view), slots)


def _penalized(view: RowView) -> Bool[Array, "b"]:
    """Returns which rows have penalties, for which each draft token would have to be counted."""
    repeats = view.number("repetition_penalty") != 1
    taken = (view.number(name) != 0 for name in ("presence_penalty", "frequency_penalty"))
    return functools.reduce(operator.or_, taken, repeats)


def _slots(view: RowView, batch: int, drafts: int, checkpoints: int) -> Int[Array, "b S"]:
    """Returns each row's own slot and its spare ones. The current states may be in any of them."""
    now, spare = view.integer("slot"), batch + checkpoints
    first = jnp.where(now < batch, now, (now - spare) % batch)[:, None]
    return jnp.concatenate([first, spare + first + batch * jnp.arange(drafts)], axis=1)


def draft_batch(rows: DeviceBatch, draft: DraftTokens, *, recurrent: bool) -> DecodeBatch:
    """Returns the batch that the model decodes."""
    active, tokens = draft.active, draft.tokens
    return DecodeBatch(
        tokens=jnp.where(active[:, None], tokens, 0),
        seq_lens=jnp.where(active, draft.view.cursor.length + tokens.shape[1], 0),
        block_tables=rows.tables.at[draft.view.indices].get(mode="fill", fill_value=0),
        state_indices=jnp.where(active, draft.view.integer("slot"), -1),
        write_indices=draft.slots if recurrent else None,
    )


@jax.named_scope("verify")
def verify(
    rows: DeviceBatch, logits: Float[Array, "b S vocab"], draft: DraftTokens, level: SamplingMode
) -> tuple[DeviceBatch, Int[Array, "b S 2"]]:
    """Samples after each token, and accepts the correct part of the draft and one more token.

    Args:
        level: The sampling mode; log-probabilities are not supported.

    Returns:
        (the rows; int32 [b, S, 2]: the tokens, each with a `FinishCode`, which is IDLE for tokens
        that are not accepted).
    """
    view, active = draft.view, draft.active
    count, width = draft.tokens.shape
    position = view.cursor.length[:, None] + 1 + jnp.arange(width)
    every = jax.tree.map(lambda x: jnp.repeat(x, width), view.sampling)
    assert isinstance(every, SamplingBatch)
    if level >= SamplingMode.CONTROLS:
        logits = logits.at[:, 0].set(with_penalties(rows, view, logits[:, 0], position[:, 0]))
        add = functools.partial(with_biases, rows, view)
        logits = jax.vmap(add, in_axes=1, out_axes=1)(logits)
    flat = logits.reshape(count * width, -1)
    tokens = sample(flat, every, position.reshape(-1), level).reshape(count, width)
    end = ending(view, tokens, position)

    right = (tokens[:, :-1] == draft.tokens[:, 1:]) & (end[:, :-1] == FinishCode.NONE)
    right = lax.cumprod((right & draft.has_draft[:, None]).astype(jnp.int32), axis=1)
    is_accepted = jnp.concatenate([jnp.ones_like(right[:, :1]), right], axis=1) > 0
    is_accepted &= active[:, None]
    end = jnp.where(is_accepted, end, FinishCode.IDLE)

    of_last = jnp.maximum(is_accepted.sum(1) - 1, 0)[:, None]
    newest, ended, slot, stands = (
        jnp.take_along_axis(x, of_last, axis=1)[:, 0] for x in (tokens, end, draft.slots, position)
    )
    at = jnp.where(active, view.indices, len(rows.cursor))
    cursor = jnp.stack([newest, stands, (ended == FinishCode.NONE).astype(jnp.int32)], axis=1)
    column = INTEGERS.index("slot")
    told_at = jnp.where(is_accepted, position, rows.history.shape[1])
    rows = dataclasses.replace(
        rows,
        cursor=rows.cursor.at[at].set(cursor, mode="drop"),
        controls=rows.controls.at[at, column].set(slot, mode="drop"),
        history=rows.history.at[at[:, None], told_at].set(tokens, mode="drop"),
    )
    return rows, jnp.stack([tokens, end], axis=2)
