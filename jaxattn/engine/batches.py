"""The arrays that a step is given: rows of the scheduler, and padding up to the bucket."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxattn.engine.sampling import SamplingBatch
from jaxattn.engine.scheduler import Row
from jaxattn.engine.steps import EntryPoint
from jaxattn.models.base import DecodeBatch, PrefillBatch


def padding(entry: EntryPoint, width: int) -> Any:
    """A batch without rows, for block tables of `width` pages."""
    tables = np.zeros((entry.rows, width), np.int32)
    tokens = np.zeros((entry.rows, entry.tokens), np.int32)
    none, slots = _int32([0] * entry.rows), _int32([-1] * entry.rows)
    batch: Any = (
        PrefillBatch(*map(_given, (tokens, none, none, tables, slots)))
        if entry.kind == "prefill"
        else DecodeBatch(*map(_given, (tokens, none, tables, slots)))
    )
    return batch, sampling([None] * entry.rows)


def prefill_batch(
    entry: EntryPoint, row: Row, tokens: Sequence[int], tables: np.ndarray
) -> tuple[PrefillBatch, SamplingBatch]:
    """The row's chunk `tokens`, which `row.cached` counts already; `tables` are of all rows."""
    batch = PrefillBatch(
        tokens=_int32([[*tokens, *[0] * (entry.tokens - len(tokens))]]),
        query_lens=_int32([len(tokens)]),
        seq_lens=_int32([row.cached]),
        block_tables=_given(tables[[row.index]]),
        state_indices=_int32([row.slot]),
    )
    return batch, sampling([row])


def decode_batch(
    entry: EntryPoint, running: Sequence[Row], tables: np.ndarray
) -> tuple[DecodeBatch, SamplingBatch]:
    """The last token of each row, counted by `row.cached`; the bucket's rest is padding."""
    rows = [*running, *[None] * (entry.rows - len(running))]
    batch = DecodeBatch(
        tokens=_int32([[row.tokens[-1] if row else 0] * entry.tokens for row in rows]),
        seq_lens=_int32([row.cached if row else 0 for row in rows]),
        # What stands in a padding row's table, or past a row's pages, is never read.
        block_tables=_given(tables[[row.index if row else 0 for row in rows]]),
        state_indices=_int32([row.slot if row else -1 for row in rows]),
    )
    return batch, sampling(rows)


def sampling(rows: Sequence[Row | None]) -> SamplingBatch:
    requests = [row.request if row else None for row in rows]

    def column(name: str, padding: float, dtype: Any) -> Any:
        return np.array([getattr(r, name) if r else padding for r in requests], dtype)

    return SamplingBatch(
        temperature=column("temperature", 0, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1, np.float32),
        min_p=column("min_p", 0, np.float32),
        seeds=column("drawn_from", 0, np.uint32),
    )


def _int32(values: Any) -> Any:
    """A copy on the host: the step takes it to the device."""
    return np.array(values, np.int32)


def _given(array: np.ndarray) -> Any:
    """A NumPy array where a step's signature has JAX's."""
    return array
