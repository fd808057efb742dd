"""Tokens of prompts that a prefill step scores or pools: whose they are, and what was told."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxattn.engine.requests.outputs import Logprobs
from jaxattn.engine.sampling.logprobs import unpack_logprobs
from jaxattn.engine.scheduling.request_state import RunningRequest
from jaxattn.engine.steps.pooling_step import wanted_ranges
from jaxattn.engine.steps.prefill_batch import PromptChunk, PromptLayout
from jaxattn.engine.steps.score_step import ScoreStep, wanted_tokens


@dataclasses.dataclass(eq=False)
class PromptScores:
    """What a prefill step scores and pools.

    Attributes:
        layout: of the step.
        rows: whose tokens are scored, and how many of each.
        places: of each token: where the one before it is among the step's, and the token.
        pooled: rows of which a range of the step's tokens is pooled.
        told: of `ScoreStep` and then of `PoolingStep`, once they are sent.
    """

    layout: PromptLayout
    rows: list[tuple[RunningRequest, int]] = dataclasses.field(default_factory=list)
    places: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    pooled: list[tuple[RunningRequest, tuple[int, int]]] = dataclasses.field(default_factory=list)
    told: list[jax.Array] = dataclasses.field(default_factory=list)

    def add(
        self, row: RunningRequest, group: int, before: Sequence[PromptChunk], chunk: PromptChunk
    ) -> None:
        """The tokens behind those of a chunk, and those of the chunk, if they are asked for.

        Args:
            before: the chunks of its data group that the step reads before it.
        """
        cached = chunk.length - len(chunk.tokens)
        begin = self.layout.first_token(group, before) - cached
        if own := row.next_pooled(cached, chunk.length):
            self.pooled.append((row, (begin + own.start, begin + own.stop)))
        positions = row.next_scored(cached, len(chunk.tokens))
        if not positions:
            return
        self.places += [(begin + at - 1, row.prompt[at]) for at in positions]
        self.rows.append((row, len(positions)))

    @property
    def wanted(self) -> list[np.ndarray]:
        """What the calls of `ScoreStep` are given."""
        most = max((row.request.prompt_logprobs or 0 for row, _ in self.rows), default=0)
        return wanted_tokens(ScoreStep(self.layout.tokens), self.places, most)

    @property
    def ranges(self) -> list[np.ndarray]:
        """What the calls of `PoolingStep` are given."""
        return wanted_ranges([own for _, own in self.pooled])

    def sums(self) -> list[tuple[RunningRequest, np.ndarray]]:
        """Waits for what was pooled: of each row the sum of its range."""
        if not self.pooled:
            return []
        told = np.concatenate([np.asarray(each) for each in self.told[-len(self.ranges) :]])
        return [(row, sum_) for (row, _), sum_ in zip(self.pooled, told, strict=False)]

    def read(self) -> list[tuple[RunningRequest, list[Logprobs]]]:
        """Waits for what was scored: of each row its next tokens."""
        if not self.rows:
            return []
        scored = self.told[: len(self.told) - len(self.ranges)]
        lines, first, found = np.concatenate([np.asarray(each) for each in scored]), 0, []
        for row, count in self.rows:
            most = row.request.prompt_logprobs
            assert most is not None
            own = lines[first : first + count]
            found.append((row, [unpack_logprobs(x[1:], most, int(x[0])) for x in own]))
            first += count
        return found
