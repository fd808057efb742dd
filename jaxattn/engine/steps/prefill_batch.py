"""The packed array that a prefill step is given: what its rows read, in one copy from the host."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int

from jaxattn.models.interface import PrefillBatch

# Of a row's line, before its pages and tokens: new tokens, length after them, slot, place.
HEAD = 4


class PromptChunk(NamedTuple):
    """What one row reads in a prefill step.

    Attributes:
        length: of the row, after the tokens.
        place: in the rows on the device, if its history is kept; otherwise -1.
        pages: int32 [M].
    """

    tokens: Sequence[int]
    length: int
    slot: int
    place: int
    pages: np.ndarray


def prefill_width(tokens: int, table_width: int) -> int:
    """int32 numbers of a row's line."""
    return HEAD + table_width + tokens


def packed_chunks(
    rows: int, tokens: int, table_width: int, chunks: Sequence[PromptChunk | None]
) -> np.ndarray:
    """int32 [rows, n]: everything a prefill step wants of the host, in one array.

    A chunk that is None is padding.
    """
    packed = np.zeros((rows, prefill_width(tokens, table_width)), np.int32)
    packed[:, 2:HEAD] = -1
    for line, chunk in zip(packed, chunks, strict=False):
        if chunk is None:
            continue
        new = len(chunk.tokens)
        line[:HEAD] = new, chunk.length, chunk.slot, chunk.place
        line[HEAD : HEAD + table_width] = chunk.pages
        line[HEAD + table_width : HEAD + table_width + new] = list(chunk.tokens)
    return packed


def prefill_batch(packed: Int[Array, "P n"], table_width: int) -> PrefillBatch:
    """The model's batch, of packed chunks."""
    return PrefillBatch(
        tokens=packed[:, HEAD + table_width :],
        query_lens=packed[:, 0],
        seq_lens=packed[:, 1],
        block_tables=packed[:, HEAD : HEAD + table_width],
        state_indices=packed[:, 2],
    )


def history_rows(packed: Int[Array, "P n"]) -> Int[Array, "P"]:
    """Where the history of each packed row is kept; -1 where it is not."""
    return packed[:, 3]
