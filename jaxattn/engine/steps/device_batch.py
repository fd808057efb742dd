"""The batch on the device: the state of each row between steps, so that no step waits for the host.

    cursor     the last token, how many tokens are cached, and whether the row goes on
    controls   its slot, where it ends, how it samples, its stop tokens
    tables     its pages

A decode step reads its rows from here, and sampling advances them (`advance`): a row that draws a
stop token or reaches its limit is frozen there and then, and is padding in the steps that follow.
The host changes rows by `update` alone, when they come or grow; a row that leaves is no longer
among the places of a step.

Places say which rows a step is for: int32 [b], -1 is padding. All arrays are donated to the steps
that change them.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxattn.engine.requests.request import MOST_BIASES
from jaxattn.engine.sampling.sampler import SamplingBatch
from jaxattn.models.interface import DecodeBatch

# Stop tokens that the device knows; it learns of a row's others one step late.
STOPS = 8
INTEGERS = ("slot", "last", "prompt", "replayed", "top_k", "seed")
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "processed",
)
CONTROLS = len(INTEGERS) + len(NUMBERS) + STOPS


class RowCursor(NamedTuple):
    """Columns of `DeviceBatch.cursor`."""

    token: Array
    length: Array
    active: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceBatch:
    """The rows of an engine.

    Attributes:
        cursor: int32 [B, 3]: the last token, which is not cached yet; tokens that are cached;
            1 while the row goes on.
        controls: int32 [B, 21]: INTEGERS, the bits of NUMBERS, stop tokens (-1 is none). `last` is
            where the last token stands that the row may generate, `prompt` where its first does.
            Tokens before `replayed` are known: they are in the history.
        biases: int32 [B, 2, 300]: tokens (2**31 - 1 is none), and the bits of what is added.
        tables: int32 [B, M]: the pages of the row.
        history: int32 [B, max_model_len]: its tokens, of rows with penalties or a replay alone
            unless rows speculate.
    """

    cursor: Int[Array, "B 3"]
    controls: Int[Array, "B F"]
    biases: Int[Array, "B 2 K"]
    tables: Int[Array, "B M"]
    history: Int[Array, "B L"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowIndices:
    """The batch of a decode step: which rows.

    Attributes:
        rows: of the engine; read, not donated.
        places: int32 [b].
    """

    rows: DeviceBatch
    places: Int[Array, "b"]


def shapes(batch: int, width: int, longest: int) -> DeviceBatch:
    """The rows of an engine, as shapes."""

    def int32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *shape), jnp.int32)

    found = (int32(3), int32(CONTROLS), int32(2, MOST_BIASES), int32(width), int32(longest))
    return DeviceBatch(*found)  # type: ignore[arg-type]


class RowView(NamedTuple):
    """Rows at places, gathered. What a padding place reads is 0."""

    at: Int[Array, "b"]
    cursor: RowCursor
    controls: Int[Array, "b F"]

    def integer(self, name: str) -> Int[Array, "b"]:
        return self.controls[:, INTEGERS.index(name)]

    def number(self, name: str) -> Array:
        column = len(INTEGERS) + NUMBERS.index(name)
        return lax.bitcast_convert_type(self.controls[:, column], jnp.float32)

    @property
    def stops(self) -> Int[Array, "b stops"]:
        return self.controls[:, -STOPS:]

    @property
    def sampling(self) -> SamplingBatch:
        return SamplingBatch(
            temperature=self.number("temperature"),
            top_k=self.integer("top_k"),
            top_p=self.number("top_p"),
            min_p=self.number("min_p"),
            seeds=lax.bitcast_convert_type(self.integer("seed"), jnp.uint32),
        )


def read(rows: DeviceBatch, places: Int[Array, "b"]) -> RowView:
    """The rows at these places; those of padding are behind the last row, where nothing is."""
    at = jnp.where(places < 0, len(rows.cursor), places)
    arrays = (rows.cursor, rows.controls)
    cursor, controls = (x.at[at].get(mode="fill", fill_value=0) for x in arrays)
    return RowView(at, RowCursor(*cursor.T), controls)


def decode_batch(batch: RowIndices) -> DecodeBatch:
    """What the model decodes: the last token of each row that goes on, padding for the others."""
    found = read(batch.rows, batch.places)
    active = found.cursor.active > 0
    tables = batch.rows.tables.at[found.at].get(mode="fill", fill_value=0)
    return DecodeBatch(
        tokens=jnp.where(active, found.cursor.token, 0)[:, None],
        seq_lens=jnp.where(active, found.cursor.length + 1, 0),
        block_tables=tables,
        state_indices=jnp.where(active, found.integer("slot"), -1),
    )


# --- what the host sends


class BatchUpdateSize(NamedTuple):
    """How many rows and pages one `update` takes."""

    joins: int
    pages: int

    @property
    def width(self) -> int:
        """Of a joining row: its place, its length, controls and biases."""
        return 2 + CONTROLS + 2 * MOST_BIASES

    @property
    def size(self) -> int:
        return self.joins * self.width + 3 * self.pages


def packed(batch: int) -> BatchUpdateSize:
    """Of an engine of so many rows: what comes in one round, but for bursts."""
    return BatchUpdateSize(joins=min(batch, 8), pages=max(batch, 64))


def update(rows: DeviceBatch, sent: Int[Array, "n"]) -> DeviceBatch:
    """Rows that join, and pages: (row, column, page). A place of B is none."""
    size = packed(len(rows.cursor))
    joins = sent[: size.joins * size.width].reshape(size.joins, size.width)
    pages = sent[size.joins * size.width :].reshape(size.pages, 3)
    at, length = joins[:, 0], joins[:, 1]
    cursor = jnp.stack([jnp.zeros_like(length), length, jnp.ones_like(length)], axis=1)
    controls, biases = joins[:, 2 : 2 + CONTROLS], joins[:, 2 + CONTROLS :]
    return dataclasses.replace(
        rows,
        cursor=rows.cursor.at[at].set(cursor, mode="drop"),
        controls=rows.controls.at[at].set(controls, mode="drop"),
        biases=rows.biases.at[at].set(biases.reshape(-1, 2, MOST_BIASES), mode="drop"),
        tables=rows.tables.at[pages[:, 0], pages[:, 1]].set(pages[:, 2], mode="drop"),
    )
