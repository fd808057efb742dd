"""The packed input of a step with prompts, which one copy brings to the device.

For each data group it has the prompts' rows, their pages, the row of each line of tokens, the
tokens, and the row and source of each line of logits.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxattn.limits import Limits
from jaxattn.models.interface import PrefillBatch

# The numbers of a prompt's row before its pages: new tokens, length after them, slot, place, next
# token.
HEAD = 5


class PromptChunk(NamedTuple):
    """The prompt tokens that a step reads of one row.

    Attributes:
        length: The length of the row after these tokens.
        history_row: The index of the row on the device, if it keeps a history; otherwise -1.
        pages: int32 [M], the row's block table.
        next_token: The prompt's next token after these; -1 if the prompt ends with them.
    """

    tokens: Sequence[int]
    length: int
    slot: int
    history_row: int
    pages: np.ndarray
    next_token: int = -1


class PackedPrompts(NamedTuple):
    """The unpacked part of a data group.

    Attributes:
        history_rows: int32 [B], the row that keeps each prompt's history; -1 for none.
        row_indices: int32 [b], the row of each line of logits; -1 for none.
        sources: int32 [b], the prompt of each line of logits; -1 for a row that decodes.
        next_tokens: int32 [B], the token after each prompt's piece; -1 if the prompt ends with it.
    """

    prompts: PrefillBatch
    history_rows: Array
    row_indices: Array
    sources: Array
    next_tokens: Array

    @property
    def decoding(self) -> Array:
        """The decoding row of each line of logits; -1 for other lines."""
        return jnp.where(self.sources < 0, self.row_indices, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLayout:
    """The layout of the packed array [groups, n]; sizes are per data group.

    Attributes:
        rows: The number of prompts.
        lines: The number of lines of tokens, of `line` tokens each.
        width: The number of pages per row.
        logits: The number of lines of logits.
        one_line_per_row: Whether each line has a row of its own, because no chunk is longer than a
            line.
    """

    groups: int
    rows: int
    lines: int
    line: int
    width: int
    logits: int
    one_line_per_row: bool

    @classmethod
    def of(cls, limits: Limits, tokens: int) -> Self:
        """Returns the layout of a step with `tokens` prompt tokens per data group."""
        lines = tokens // limits.line_tokens
        return cls(
            groups=limits.groups,
            rows=min(limits.prompt_rows, lines),
            lines=lines,
            line=limits.line_tokens,
            width=limits.table_width,
            logits=limits.rows_per_group,
            one_line_per_row=limits.chunks[-1] <= limits.line_tokens,
        )

    @property
    def tokens(self) -> int:
        """The tokens of all data groups, including padding."""
        return self.groups * self.lines * self.line

    def first_token(self, group: int, preceding: Sequence[PromptChunk]) -> int:
        """Returns the index of the first token of a data group's next chunk, among all groups."""
        lines = group * self.lines + sum(self._lines_of(chunk) for chunk in preceding)
        return lines * self.line

    def _lines_of(self, chunk: PromptChunk) -> int:
        return -(-len(chunk.tokens) // self.line)

    @property
    def _parts(self) -> list[tuple[int, ...]]:
        return [
            (self.rows, HEAD + self.width),
            (self.lines,),
            (self.lines, self.line),
            (self.logits,),
            (self.logits,),
        ]

    @property
    def shape(self) -> tuple[int, int]:
        return self.groups, sum(int(np.prod(part)) for part in self._parts)

    def pack(
        self,
        chunks: Sequence[Sequence[PromptChunk]] = (),
        places: np.ndarray | None = None,
        sources: np.ndarray | None = None,
    ) -> np.ndarray:
        """Packs all that a step needs from the host into one array, int32 [groups, n].

        Args:
            chunks: The chunks of each data group, at most `rows`.
            places, sources: int32 [groups * logits], see `PackedPrompts`; None means all -1.
        """
        packed = np.zeros(self.shape, np.int32)
        for group, whole in enumerate(packed):
            heads, owners, tokens, own_places, own_sources = self._views(whole)
            heads[:, 2:HEAD] = own_places[:] = own_sources[:] = -1
            owners[:] = self.rows
            line = 0
            for row, chunk in enumerate(chunks[group] if chunks else ()):
                new = len(chunk.tokens)
                heads[row, :HEAD] = (
                    new, chunk.length, chunk.slot, chunk.history_row, chunk.next_token
                )  # fmt: skip
                heads[row, HEAD:] = chunk.pages
                behind = line + self._lines_of(chunk)
                owners[line:behind] = row
                tokens[line:behind].reshape(-1)[:new] = list(chunk.tokens)
                line = behind
            part = slice(group * self.logits, (group + 1) * self.logits)
            if places is not None:
                own_places[:] = places[part]
            if sources is not None:
                own_sources[:] = sources[part]
        return packed

    def unpack(self, packed: Int[Array, "n"]) -> PackedPrompts:
        """Unpacks a data group's part."""
        heads, owners, tokens, places, sources = self._views(packed)
        prompts = PrefillBatch(
            tokens=tokens,
            query_lens=heads[:, 0],
            seq_lens=heads[:, 1],
            block_tables=heads[:, HEAD:],
            state_indices=heads[:, 2],
            lines=None if self.one_line_per_row else owners,
        )
        return PackedPrompts(prompts, heads[:, 3], places, sources, heads[:, 4])

    def unpack_all(self, packed: Int[Array, "G n"]) -> list[PackedPrompts]:
        return [self.unpack(packed[group]) for group in range(self.groups)]

    def _views(self, group_array: "np.ndarray | Array") -> list:
        ends = np.cumsum([int(np.prod(part)) for part in self._parts])
        begins = [0, *ends[:-1]]
        return [
            group_array[begin:end].reshape(part)
            for begin, end, part in zip(begins, ends, self._parts, strict=True)
        ]


def by_lines(layout: PromptLayout, packed: Int[Array, "G n"]) -> tuple[Array, ...]:
    """Returns (tokens [L, T], histories [L], lengths [L], news [L]) of all data groups' lines."""
    found = []
    for own in layout.unpack_all(packed):
        lines = own.prompts.layout
        histories = lines.of_row(own.history_rows, -1)
        found.append((own.prompts.tokens, histories, lines.seq_lens, lines.query_lens))
    return tuple(jnp.concatenate(each) for each in zip(*found, strict=True))
