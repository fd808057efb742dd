"""The rows on the device: their state between steps, so that no step waits for the host.

    cursor     the last token, the number of cached tokens, and whether the row is active
    controls   the slot, the last position, the sampling parameters, the stop tokens
    tables     the pages

A decode step reads its rows from these arrays, and sampling advances them (`advance`). A row that
draws a stop token or reaches its limit becomes inactive at once, and is padding in later steps. The
host changes rows only by `update`, when they join or grow. A row that leaves is no longer among the
places of a step.

The places of a step are the indices of its rows: int32 [b], with -1 as padding. Steps that change
the arrays get them as donated arguments.
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

# The number of stop tokens that the device checks; the host checks a row's others one step late.
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
    """The columns of `DeviceBatch.cursor`."""

    token: Array
    length: Array
    active: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceBatch:
    """The rows of an engine.

    Attributes:
        cursor: int32 [B, 3]: the last token, which is not cached yet; the number of cached tokens;
            1 while the row is active.
        controls: int32 [B, 21]: INTEGERS, the bits of NUMBERS, stop tokens (-1 for none). `last` is
            the position of the last token that the row may generate, and `prompt` that of the first
            one. The history holds the known tokens before position `replayed`.
        biases: int32 [B, 2, 300]: tokens (2**31 - 1 for none), and the bits of their biases.
        tables: int32 [B, M]: the block tables.
        history: int32 [B, max_model_len]: the tokens of rows with penalties or a replay; of all
            rows if the engine speculates.
    """

    cursor: Int[Array, "B 3"]
    controls: Int[Array, "B F"]
    biases: Int[Array, "B 2 K"]
    tables: Int[Array, "B M"]
    history: Int[Array, "B L"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowIndices:
    """The batch of a decode step, as indices of rows.

    Attributes:
        rows: The rows of the engine, which the step only reads.
        indices: int32 [b], the indices of the step's rows.
    """

    rows: DeviceBatch
    indices: Int[Array, "b"]


def shapes(batch: int, width: int, longest: int) -> DeviceBatch:
    """Returns the shapes of an engine's rows."""

    def int32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *shape), jnp.int32)

    found = (int32(3), int32(CONTROLS), int32(2, MOST_BIASES), int32(width), int32(longest))
    return DeviceBatch(*found)  # type: ignore[arg-type]


class RowView(NamedTuple):
    """The rows at some places, gathered. A padding place reads 0."""

    indices: Int[Array, "b"]
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


def read(rows: DeviceBatch, row_indices: Int[Array, "b"]) -> RowView:
    """Gathers the rows at these places. Padding reads past the last row, which gives zeros."""
    at = jnp.where(row_indices < 0, len(rows.cursor), row_indices)
    arrays = (rows.cursor, rows.controls)
    cursor, controls = (x.at[at].get(mode="fill", fill_value=0) for x in arrays)
    return RowView(at, RowCursor(*cursor.T), controls)


def decode_batch(batch: RowIndices) -> DecodeBatch:
    """Returns the model's batch: the last token of each active row, and padding for the others."""
    found = read(batch.rows, batch.indices)
    active = found.cursor.active > 0
    tables = batch.rows.tables.at[found.indices].get(mode="fill", fill_value=0)
    return DecodeBatch(
        tokens=jnp.where(active, found.cursor.token, 0)[:, None],
        seq_lens=jnp.where(active, found.cursor.length + 1, 0),
        block_tables=tables,
        state_indices=jnp.where(active, found.integer("slot"), -1),
    )


# --- updates from the host


class BatchUpdateSize(NamedTuple):
    """The number of rows and pages of one `update`."""

    joins: int
    pages: int

    @property
    def width(self) -> int:
        """The values per joining row: its place, its length, controls and biases."""
        return 2 + CONTROLS + 2 * MOST_BIASES

    @property
    def size(self) -> int:
        return self.joins * self.width + 3 * self.pages


def packed(batch: int) -> BatchUpdateSize:
    """Returns the size of an update, enough for one round of an engine except for bursts."""
    return BatchUpdateSize(joins=min(batch, 8), pages=max(batch, 64))


def update(rows: DeviceBatch, packed_update: Int[Array, "n"]) -> DeviceBatch:
    """Adds joining rows, and pages as (row, column, page). Updates of row B have no effect."""
    size = packed(len(rows.cursor))
    joins = packed_update[: size.joins * size.width].reshape(size.joins, size.width)
    pages = packed_update[size.joins * size.width :].reshape(size.pages, 3)
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
