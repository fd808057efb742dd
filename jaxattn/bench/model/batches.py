"""The batches of a run: tables, lengths and tokens as the engine has them, on the device.

All batches of a run share one pool of pages. Row b has the same pages in every batch, so a batch
of fewer rows is the beginning of the largest.
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
    """What a run decodes and reads.

    Attributes:
        rows: of each decode step.
        context: tokens of each row, the new one included.
        prompt: tokens that prefill reads, of one row; 0 for no prefill.
        vocab: tokens are drawn below it.
        seed: of tables and tokens.
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
        """M: pages of the longest row, as an engine for both has it."""
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
        """The batches that read the prompt, `chunk` tokens at a time, in lines as an engine packs
        them; the last may be shorter."""
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
