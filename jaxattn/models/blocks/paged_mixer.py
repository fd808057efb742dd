"""The base of mixers that attend over pages, with rows and pages divided over several GPUs."""

import abc
import dataclasses
from typing import Any

from jax import Array

from jaxattn.arena import Arena
from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer
from jaxattn.core.dispatch import ONLY_BY_NAME, Implementation
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.validation.array_checks import BoundedLengths
from jaxattn.models.blocks.mixer import Mixer
from jaxattn.models.caches.layer_cache import Arrays
from jaxattn.models.caches.symmetric_memory import (
    EXCHANGE,
    MEETING,
    buffer_arrays,
    has_buffer,
    symmetric_buffer,
)
from jaxattn.models.interface import DecodeBatch, PrefillBatch
from jaxattn.ops.linear.norm_linear import PendingNorm
from jaxattn.ops.mla.merge_buffer import merge_buffer_shape
from jaxattn.parallel import ALONE, ContextParallelPages, Parallel, gathered_in, pieces_of


def attended(parallel: Parallel, rows: int, q_len: int, heads: int) -> tuple[int, int, int]:
    """Returns (rows, tokens of each, heads) of one GPU's decode op.

    If each GPU has a part of each row's pages, it attends with all GPUs' heads, and every new token
    is a row of its own.
    """
    ways = parallel.context
    return (rows, q_len, heads) if ways == 1 else (rows * q_len, 1, heads * ways)


def spread_of(
    parallel: Parallel, batch: DecodeBatch, page_size: int
) -> ContextParallelPages | None:
    """Returns this GPU's view of a step's pages, or None if it has all of them."""
    return ContextParallelPages.of(
        parallel,
        batch.block_tables,
        batch.seq_lens,
        page_size=page_size,
        q_len=batch.tokens.shape[1],
    )


def addressing(
    batch: DecodeBatch, shared: dict[str, Any], most_tokens: int | None
) -> dict[str, Any]:
    """Returns the places where this GPU writes new tokens, and the lengths of rows."""
    spread, lens = shared["spread"], batch.seq_lens
    return {
        "block_tables": batch.block_tables if spread is None else spread.places,
        "seq_lens": lens if most_tokens is None else BoundedLengths(lens, most_tokens),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedMixer(Mixer):
    """Attention over pages, which may be divided over several GPUs.

    Attributes:
        parallel: The layout of the GPUs that share the layer; each has some of the heads.
    """

    parallel: Parallel = ALONE

    @property
    def array(self) -> str:
        """The name of the cache's array."""
        return "kv_cache"

    @property
    @abc.abstractmethod
    def exchanged(self) -> tuple[int, int, int]:
        """(heads of this GPU, width of attention's input per head, width of its output)."""

    @abc.abstractmethod
    def options_of_step(self, **sizes: Any) -> dict[str, Any]:
        """Keyword arguments of the module's `decode` that all layers of a step share.

        Args:
            sizes: The keyword arguments that every kind of schedule takes.
        """

    def shared(
        self, module: Any, arrays: Arrays, batch: DecodeBatch, implementation: Any
    ) -> dict[str, Any]:
        q_len, page_size = batch.tokens.shape[1], self.page_size(arrays)
        spread = spread_of(self.parallel, batch, page_size)
        _, together, heads = attended(self.parallel, 1, q_len, self.exchanged[0])
        options = self.options_of_step(
            seq_lens=batch.seq_lens if spread is None else spread.lens,
            q_len=together,
            num_heads=heads,
            max_pages=batch.block_tables.shape[1],
            page_size=page_size,
            interpret=implementation == "mosaic_gpu_interpret",
        )
        rotation = module.decode_rotation(batch.seq_lens, q_len)
        return {**options, "rotation": rotation, "spread": spread}

    def exchanging(
        self, shared: dict[str, Any], arrays: Arrays, implementation: Implementation | None
    ) -> dict[str, Any]:
        """Returns `shared` with the arrays' symmetric buffer, if any, in `shared["spread"]`."""
        spread = shared["spread"]
        if spread is None or not has_buffer(arrays, EXCHANGE) or implementation in ONLY_BY_NAME:
            return shared
        mailbox = symmetric_buffer(arrays, EXCHANGE)
        options: dict[str, Any] = {"pieces": (pieces_of(*self.exchanged) or (1, 0))[0]}
        rows, max_pages = spread.tables.shape
        heads, numbers, _ = self.exchanged
        gathered = gathered_in(heads * numbers)
        if (
            has_buffer(arrays, MEETING)
            and gathered
            and rows * gathered[0] <= mailbox.inbox.shape[2]
        ):
            size: Any = dict(max_pages=max_pages, page_size=self.page_size(arrays))
            if merge_buffer_shape(rows, heads * spread.ways, **size):
                options = {"pieces": gathered[0], "merge": symmetric_buffer(arrays, MEETING)}
        spread = spread.exchanging(mailbox, implementation=implementation, **options)
        return {**shared, "spread": spread}

    def mixed(
        self,
        module: Any,
        x: Array,
        arrays: Arrays,
        arena: Arena | None,
        prompts: PrefillBatch,
        lines: PromptLines,
        rows: DecodeBatch | None,
        layer: LayerIndex,
        weights: Array | None,
        shared: dict[str, Any],
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena | None]:
        row_options: dict[str, Any] | None = None
        if rows is not None:
            row_options = {
                **addressing(rows, shared, self.most_tokens(arrays, rows)),
                "weights": weights,
                "arena": arena,
                **self.exchanging(shared, arrays, implementation),
            }
        y, *results = module.mixed(
            x,
            arrays[self.array],
            **self.get_decode_extras(arrays, mixed=True),
            lines=lines,
            block_tables=prompts.block_tables,
            seq_lens=prompts.seq_lens,
            query_lens=prompts.query_lens,
            rows=row_options,
            layer=self.in_cache(layer),
            parallel=self.parallel,
            implementation=implementation,
        )
        return y, *self.arrays_of(results)

    def decode(
        self,
        module: Any,
        x: Array | PendingNorm,
        arrays: Arrays,
        arena: Arena,
        batch: DecodeBatch,
        layer: LayerIndex,
        weights: Array | None,
        shared: dict[str, Any],
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena]:
        y, *results = module.decode(
            x,
            arrays[self.array],
            **self.get_decode_extras(arrays, mixed=False),
            **addressing(batch, shared, self.most_tokens(arrays, batch)),
            layer=self.in_cache(layer),
            weights=weights,
            arena=arena,
            implementation=implementation,
            **self.exchanging(shared, arrays, implementation),
        )
        arrays, after = self.arrays_of(results)
        assert after is not None  # an arena was given
        return y, arrays, after

    def in_cache(self, layer: LayerIndex) -> Any:
        """Returns the layer in the form that the module expects."""
        return layer

    def get_decode_extras(self, arrays: Arrays, *, mixed: bool) -> dict[str, Any]:
        """Returns further arguments of the module's `decode`, or with `mixed` of its `mixed`."""
        return {}

    def arrays_of(self, results: list[Any]) -> tuple[Arrays, Arena | None]:
        """Returns (the arrays, the arena) from the results of `mixed` or `decode` after y."""
        kv_cache, after, *sent = results
        return {self.array: kv_cache, **self.exchanged_by(sent)}, after

    def exchanged_by(self, buffers: list[SymmetricBuffer]) -> Arrays:
        """Returns the arrays of the mailboxes through which rows were sent, if any."""
        found = zip(buffers, (EXCHANGE, MEETING), strict=False)
        return {
            name: array for each, of in found for name, array in buffer_arrays(each, of).items()
        }

    @property
    def meeting(self) -> tuple[int, int] | None:
        """(tokens, features) of the mailbox that merges outputs of few rows, or None."""
        return None

    @abc.abstractmethod
    def page_size(self, arrays: Arrays) -> int:
        """Returns the number of tokens per page of the cache's arrays."""

    def most_tokens(self, arrays: Arrays, batch: DecodeBatch) -> int | None:
        return batch.block_tables.shape[1] * self.page_size(arrays) * self.parallel.context
