"""Selection of each row's next token between two forward passes, and the end of rows."""

import dataclasses
import enum
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.engine.sampling.logprobs import logprobs
from jaxattn.engine.sampling.penalties import biased, penalized
from jaxattn.engine.sampling.sampler import NOT_FINITE, SamplingMode, draw
from jaxattn.engine.steps.device_batch import DeviceBatch, RowView, read

# Rows that are sampled at a time, so that scratch does not grow with larger batches.
BLOCK = 256


class FinishCode(enum.IntEnum):
    """The state of a row after a step. IDLE: it was padding, or had ended before."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    NOT_FINITE = 3
    IDLE = 4


def advance(
    rows: DeviceBatch,
    logits: Float[Array, "b vocab"],
    row_indices: Int[Array, "b"],
    *,
    level: SamplingMode,
    keeps_history: bool = False,
    replays: bool = False,
) -> tuple[DeviceBatch, Int[Array, "b n"]]:
    """Chooses the next token of each row at `row_indices`, and deactivates the rows that end with
    it.

    Args:
        keeps_history: Whether every row has a history, instead of only those with penalties.
        replays: Whether rows may have known tokens, which replace the sampled ones.

    Returns:
        (the rows; int32 [b, 2]: the token and a `FinishCode`; in `SamplingMode.LOGPROBS` followed
        by `logprobs`). The rows come first, because JAX gives a donated buffer to the first result
        of its shape, and block tables of two pages have the shape of the second.
    """
    found = read(rows, row_indices)
    active = found.cursor.active > 0
    position = found.cursor.length + 1
    choose = functools.partial(_sample_tokens, rows, level=level, replays=replays)
    chosen = (
        choose(found, logits) if level == SamplingMode.GREEDY else _in_blocks(choose, found, logits)
    )
    tokens = chosen[:, 0]
    end = jnp.where(active, ending(found, tokens, position), FinishCode.IDLE)
    told = jnp.concatenate([tokens[:, None], end[:, None], chosen[:, 1:]], axis=1)

    at = jnp.where(active, found.indices, len(rows.cursor))
    cursor = jnp.stack([tokens, position, (end == FinishCode.NONE).astype(jnp.int32)], axis=1)
    rows = dataclasses.replace(rows, cursor=rows.cursor.at[at].set(cursor, mode="drop"))
    # A row with penalties has been sampled in CONTROLS or a higher mode since it joined.
    if keeps_history or level >= SamplingMode.CONTROLS:
        history = rows.history.at[at, position].set(tokens, mode="drop")
        rows = dataclasses.replace(rows, history=history)
    return rows, told


def _sample_tokens(
    rows: DeviceBatch,
    found: RowView,
    logits: Float[Array, "b vocab"],
    *,
    level: SamplingMode,
    replays: bool,
) -> Int[Array, "b n"]:
    """Returns the next token of each row, in `SamplingMode.LOGPROBS` followed by `logprobs`."""
    position = found.cursor.length + 1
    raw = logits
    if level >= SamplingMode.CONTROLS:
        logits = with_biases(rows, found, with_penalties(rows, found, logits, position))
    tokens, drawn_from = draw(logits, found.sampling, position, level)
    if replays:
        known = rows.history.at[found.indices, position].get(mode="fill", fill_value=0)
        replayed = (position < found.integer("replayed")) & (tokens != NOT_FINITE)
        tokens = jnp.where(replayed, known, tokens)
    if level < SamplingMode.LOGPROBS:
        return tokens[:, None]
    processed = found.number("processed")[:, None] > 0
    told = logprobs(jnp.where(processed, drawn_from, raw), tokens)
    return jnp.concatenate([tokens[:, None], told], axis=1)


def _in_blocks(
    choose: Callable[[RowView, Array], Int[Array, "r n"]],
    found: RowView,
    logits: Float[Array, "b vocab"],
) -> Int[Array, "b n"]:
    """Applies `choose` to all rows, `BLOCK` of them at a time."""
    count = len(logits)
    if count <= BLOCK:
        return choose(found, logits)

    def block(i: Array, chosen: Array) -> Array:
        # The last block overlaps the one before it if blocks do not divide the batch.
        first = jnp.minimum(i * BLOCK, count - BLOCK)
        some = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, BLOCK), (found, logits))
        return lax.dynamic_update_slice_in_dim(chosen, choose(*some), first, axis=0)

    width = jax.eval_shape(choose, found, logits).shape[1]
    return lax.fori_loop(0, -(-count // BLOCK), block, jnp.zeros((count, width), jnp.int32))


def ending(
    found: RowView, tokens: Int[Array, "b *S"], position: Int[Array, "b *S"]
) -> Int[Array, "b *S"]:
    """Returns the `FinishCode` of each row with a token at a position."""

    def of_row(x: Array) -> Array:
        return x.reshape(len(x), *(1,) * (tokens.ndim - 1), *x.shape[1:])

    end = jnp.where(position >= of_row(found.integer("last")), FinishCode.LENGTH, FinishCode.NONE)
    stops = (tokens[..., None] == of_row(found.stops)).any(-1)
    end = jnp.where(stops, FinishCode.STOP, end)
    return jnp.where(tokens == NOT_FINITE, FinishCode.NOT_FINITE, end)


def with_penalties(
    rows: DeviceBatch, found: RowView, logits: Float[Array, "b vocab"], position: Int[Array, "b"]
) -> Float[Array, "b vocab"]:
    """Returns the logits of the token at a position, with the penalties of its row."""
    return penalized(
        logits,
        rows.history,
        found.indices,
        found.integer("prompt"),
        position,
        repetition=found.number("repetition_penalty"),
        presence=found.number("presence_penalty"),
        frequency=found.number("frequency_penalty"),
    )


def with_biases(
    rows: DeviceBatch, found: RowView, logits: Float[Array, "b vocab"]
) -> Float[Array, "b vocab"]:
    """Returns the logits with the biases of the rows' requests."""
    biases = rows.biases.at[found.indices].get(mode="fill", fill_value=0)
    return biased(logits, biases[:, 0], lax.bitcast_convert_type(biases[:, 1], jnp.float32))


def remember(
    rows: DeviceBatch,
    tokens: Int[Array, "P T"],
    places: Int[Array, "P"],
    lengths: Int[Array, "P"],
    news: Int[Array, "P"],
) -> DeviceBatch:
    """Writes the chunk of a prompt into the histories of its rows.

    Args:
        places: The row of each line; -1 is padding.
        lengths: The length of each row after the chunk.
        news: The number of tokens of the chunk.
    """
    column = jnp.arange(tokens.shape[1])
    keeps = (places >= 0)[:, None] & (column < news[:, None])
    row = jnp.where(keeps, places[:, None], len(rows.cursor))
    at = (lengths - news)[:, None] + column
    history = rows.history.at[row, at].set(tokens, mode="drop")
    return dataclasses.replace(rows, history=history)
