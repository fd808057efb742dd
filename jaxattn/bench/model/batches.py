"""The batches of a run on the device: block tables, lengths and tokens in the engine's format.

All batches of a run share one page pool. Row b has the same pages in every batch, so a smaller
batch consists of the first rows of the largest.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.limits import LINE_TOKENS
from jaxattn.models.caches.layer_cache import CacheSize
from jaxattn.models.interface import DecodeBatch, PrefillBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchBatches:
    """The decode and prefill batches of a run.

    Attributes:
        rows: The numbers of rows of the decode steps.
        context: The number of tokens per row, including the new one.
        prompt: The number of prompt tokens to prefill in one row; 0 for no prefill.
        vocab: The vocabulary size; random tokens are below it.
        seed: The seed of block tables and tokens.
    """

    rows: tuple[int, ...]
    context: int
    prompt: int
    vocab: int
    seed: int = 0

    @property
    def most(self) -> int:
        return max(self.rows)

    @property
    def pages_per_row(self) -> int:
        return -(-self.context // PAGE_SIZE)

    @property
    def width(self) -> int:
        """M, the width of the block tables: the pages of the longest row, in decode or prefill."""
        return max(self.pages_per_row, -(-self.prompt // PAGE_SIZE))

    @property
    def size(self) -> CacheSize:
        return CacheSize(pages=max(self.most * self.pages_per_row, self.width), slots=self.most)

    def decode(self, rows: int, step: int) -> Any:
        """The batch of a decode step; each step has other tokens."""
        tokens = np.random.default_rng((self.seed, step)).integers(self.vocab, size=(self.most, 1))
        tables = np.zeros((self.most, self.width), np.int32)
        tables[:, : self.pages_per_row] = self._pages(self.most * self.pages_per_row).reshape(
            self.most, -1
        )
        slots = np.random.default_rng(self.seed).permutation(self.most)
        batch = DecodeBatch(
            tokens=_int32(tokens[:rows]),
            seq_lens=_int32(np.full(rows, self.context)),
            block_tables=_int32(tables[:rows]),
            state_indices=_int32(slots[:rows]),
        )
        return jax.device_put(batch)

    def chunks(self, chunk: int) -> list[Any]:
        """The batches that prefill the prompt by `chunk` tokens, in lines like the engine's.

        The last batch may have fewer tokens.
        """
        drawn = np.random.default_rng((self.seed, 0)).integers(self.vocab, size=self.prompt)
        tables = self._pages(self.width)[None]
        batches = []
        for begin in range(0, self.prompt, chunk):
            line = LINE_TOKENS if chunk % LINE_TOKENS == 0 else chunk
            tokens = np.zeros(chunk, np.int64)
            new = min(chunk, self.prompt - begin)
            tokens[:new] = drawn[begin : begin + new]
            used = np.arange(0, chunk, line) < new
            batch = PrefillBatch(
                tokens=_int32(tokens.reshape(-1, line)),
                lines=_int32(np.where(used, 0, 1)),
                query_lens=_int32([new]),
                seq_lens=_int32([begin + new]),
                block_tables=_int32(tables),
                state_indices=_int32([0]),
            )
            batches.append(jax.device_put(batch))
        return batches

    def _pages(self, count: int) -> np.ndarray:
        return np.random.default_rng(self.seed).permutation(self.size.pages)[:count]


def _int32(values: Any) -> Any:
    return np.asarray(values, np.int32)
