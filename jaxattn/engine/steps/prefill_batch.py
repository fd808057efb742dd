"""The packed array that a step with prompts is given, in one copy from the host.

Of each data group: what its prompts' rows are, their pages, the row of each line of tokens, the
tokens, and of each line of logits whose they are.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxattn.memory.engine_limits import Limits
from jaxattn.models.interface import PrefillBatch

# Of a prompt's row, before its pages: new tokens, length after them, slot, place, next token.
HEAD = 5


class PromptChunk(NamedTuple):
    """What a step reads of one row.

    Attributes:
        length: of the row, after the tokens.
        place: in the rows on the device, if its history is kept; otherwise -1.
        pages: int32 [M].
        following: the prompt's token behind these; -1 where they end it.
    """

    tokens: Sequence[int]
    length: int
    slot: int
    place: int
    pages: np.ndarray
    following: int = -1


class PackedPrompts(NamedTuple):
    """What a data group's part of the array holds.

    Attributes:
        histories: int32 [B], where the history of each prompt's row is kept; -1 where it is not.
        places: int32 [b], the row of each line of logits; -1 is none.
        sources: int32 [b], the prompt that the line is of; -1 is the row that decodes.
        following: int32 [B], the token behind each prompt's piece; -1 where it ends the prompt.
    """

    prompts: PrefillBatch
    histories: Array
    places: Array
    sources: Array
    following: Array

    @property
    def decoding(self) -> Array:
        """Places of the rows that decode, by line of logits; -1 of other lines."""
        return jnp.where(self.sources < 0, self.places, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLayout:
    """Where things are in the array [groups, n]; sizes are of a data group.

    Attributes:
        rows: prompts.
        lines: of tokens, `line` in each.
        width: pages of a row.
        logits: lines of logits.
        one_each: whether every line has a row of its own, as lines as long as a chunk have.
    """

    groups: int
    rows: int
    lines: int
    line: int
    width: int
    logits: int
    one_each: bool

    @classmethod
    def of(cls, limits: Limits, tokens: int) -> Self:
        """Of a step with so many prompt tokens of each data group."""
        lines = tokens // limits.line_tokens
        return cls(
            groups=limits.groups,
            rows=min(limits.prompt_rows, lines),
            lines=lines,
            line=limits.line_tokens,
            width=limits.table_width,
            logits=limits.rows_per_group,
            one_each=limits.chunks[-1] <= limits.line_tokens,
        )

    @property
    def tokens(self) -> int:
        """Of all data groups, padding included."""
        return self.groups * self.lines * self.line

    def first_token(self, group: int, before: Sequence[PromptChunk]) -> int:
        """Where the tokens of a data group's next chunk begin among those of all."""
        lines = group * self.lines + sum(self._lines_of(chunk) for chunk in before)
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
        """int32 [groups, n]: everything that a step wants of the host, in one array.

        Args:
            chunks: of each data group, at most `rows`.
            places, sources: int32 [groups * logits], as in `PackedPrompts`; None is -1 everywhere.
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
                    new, chunk.length, chunk.slot, chunk.place, chunk.following
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
        """A data group's part."""
        heads, owners, tokens, places, sources = self._views(packed)
        prompts = PrefillBatch(
            tokens=tokens,
            query_lens=heads[:, 0],
            seq_lens=heads[:, 1],
            block_tables=heads[:, HEAD:],
            state_indices=heads[:, 2],
            lines=None if self.one_each else owners,
        )
        return PackedPrompts(prompts, heads[:, 3], places, sources, heads[:, 4])

    def unpack_all(self, packed: Int[Array, "G n"]) -> list[PackedPrompts]:
        return [self.unpack(packed[group]) for group in range(self.groups)]

    def _views(self, whole: "np.ndarray | Array") -> list:
        ends = np.cumsum([int(np.prod(part)) for part in self._parts])
        begins = [0, *ends[:-1]]
        return [
            whole[begin:end].reshape(part)
            for begin, end, part in zip(begins, ends, self._parts, strict=True)
        ]


def by_lines(layout: PromptLayout, packed: Int[Array, "G n"]) -> tuple[Array, ...]:
    """(tokens [L, T], histories [L], lengths [L], news [L]) of all data groups' lines."""
    found = []
    for own in layout.unpack_all(packed):
        lines = own.prompts.layout
        histories = lines.of_row(own.histories, -1)
        found.append((own.prompts.tokens, histories, lines.seq_lens, lines.query_lens))
    return tuple(jnp.concatenate(each) for each in zip(*found, strict=True))
