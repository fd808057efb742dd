"""Checks of page tables with concrete numbers, before anything runs.

core/cache/state_pool.py has the same checks for slots of a state pool.
"""

from typing import Any

import jax
import numpy as np


def check_pages(
    op: str, tables: Any, lengths: Any, num_pages: int, page: int, cache: str = "kv_cache"
) -> None:
    """Raises ValueError if a row has, within its length, a page that does not exist.

    As with slots of a state pool, traced values are not checked.

    Args:
        tables: int32 [B, M], or a tracer.
        lengths: int32 [B] from 0 to M * page, or a tracer.
        cache: Name of the argument that holds the pages.
    """
    if isinstance(tables, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    tables, lengths = np.asarray(tables), np.asarray(lengths)
    owned = np.arange(tables.shape[1]) < -(-lengths // page)[:, None]
    missing = owned & ((tables < 0) | (tables >= num_pages))
    if missing.any():
        row, column = np.argwhere(missing)[0]
        raise ValueError(
            f"{op}: block_tables {tables.shape} holds page {tables[row, column]} at "
            f"[{row}, {column}], within row {row}'s {lengths[row]} tokens in pages of {page}; "
            f"{cache} has pages 0 to {num_pages - 1}"
        )


def check_write_conflicts(op: str, tables: Any, lengths: Any, num_new: Any, page: int) -> None:
    """Raises ValueError if a row writes a token to the place of another token, its own or not.

    Pages that are only read may be shared.

    Args:
        tables, lengths: Arrays that `check_pages` has accepted.
        num_new: Number of tokens written at the end of each row, or of all rows.
    """
    if any(isinstance(x, jax.core.Tracer) for x in (tables, lengths, num_new)):
        return
    tables, lengths, num_new = (np.asarray(x).astype(np.int64) for x in (tables, lengths, num_new))
    first = np.arange(tables.shape[1]) * page
    tokens_per_page = np.clip(lengths[:, None] - first, 0, page)  # number of tokens in each page
    first_written = np.maximum((lengths - num_new)[:, None] - first, 0)  # the first written place
    is_used, is_written = tokens_per_page > 0, first_written < tokens_per_page
    is_shared = is_used & np.isin(tables, tables[is_written])
    pages, counts = np.unique(tables[is_shared], return_counts=True)
    for number in pages[counts > 1]:
        entries = np.argwhere(is_shared & (tables == number))
        for row, column in entries[is_written[tuple(entries.T)]]:
            offset = first_written[row, column]
            conflicts = entries[tokens_per_page[tuple(entries.T)] > offset]
            conflicts = conflicts[(conflicts != (row, column)).any(axis=1)]
            if len(conflicts):
                other, other_column = conflicts[0]
                raise ValueError(
                    f"{op}: row {row} writes its token {first[column] + offset} to page {number}, "
                    f"place {offset}, where row {other} has its token "
                    f"{first[other_column] + offset}; rows must not share the pages that "
                    "they write to"
                )
