"""The prompt tokens that a prefill step scores or pools, with their rows and results."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from jaxattn.engine.requests.outputs import PromptLogprobs
from jaxattn.engine.scheduling.request_state import RunningRequest
from jaxattn.engine.steps.pooling_step import wanted_ranges
from jaxattn.engine.steps.prefill_batch import PromptChunk, PromptLayout
from jaxattn.engine.steps.score_step import FEWEST, ScoreControls, ScoreStep, wanted_tokens

type _Places = tuple[RunningRequest, Int[np.ndarray, "n 2"]]


@dataclasses.dataclass(eq=False)
class PromptScores:
    """The tokens that a prefill step scores and pools.

    Attributes:
        layout: The layout of the step.
        score: The step that computes the scores.
        vocab_size: The vocabulary size of the model.
        rows: The rows whose tokens are scored, in the order of `wanted`, each with pairs: the index
            of the preceding token in the step, and the token itself.
        single_token_rows: The rows whose prompt is a single token. No token precedes it, so they
            need no call.
        pooled: The rows to pool, each with a range of the step's tokens.
        results: The results of `ScoreStep` and then of `PoolingStep`, once these are sent.
    """

    layout: PromptLayout
    score: ScoreStep
    vocab_size: int
    rows: dict[ScoreControls, list[_Places]] = dataclasses.field(default_factory=dict)
    single_token_rows: list[RunningRequest] = dataclasses.field(default_factory=list)
    pooled: list[tuple[RunningRequest, tuple[int, int]]] = dataclasses.field(default_factory=list)
    results: list[jax.Array] = dataclasses.field(default_factory=list)

    def add(
        self, row: RunningRequest, group: int, preceding: Sequence[PromptChunk], chunk: PromptChunk
    ) -> None:
        """Adds the tokens that the chunk scores or pools, if the request asked for them.

        Args:
            preceding: The chunks of the same data group that precede this one in the step.
        """
        cached = chunk.length - len(chunk.tokens)
        begin = self.layout.first_token(group, preceding) - cached
        if own := row.next_pooled(cached, chunk.length):
            self.pooled.append((row, (begin + own.start, begin + own.stop)))
        positions = row.next_scored(cached, len(chunk.tokens))
        if not positions:
            if len(row.prompt) == 1 and row.request.prompt_logprobs is not None:
                self.single_token_rows.append(row)
            return
        places = np.empty((len(positions), 2), np.int32)
        places[:, 0] = np.arange(positions.start, positions.stop) + (begin - 1)
        places[:, 1] = list(row.prompt[positions.start : positions.stop])
        # All tokens of a call share one set of controls, and other rows must not change a row's
        # scores, so each set has its own calls. Rows keep alternatives only if they asked for them.
        self.rows.setdefault(ScoreControls.of(row.request), []).append((row, places))

    @functools.cached_property
    def calls(self) -> list[tuple[ScoreControls, int, list[_Places]]]:
        """The calls of `ScoreStep` once all rows are added: (controls, tokens per call, rows)."""
        found, size = [], self.score.size(self.vocab_size)
        for controls, rows in self.rows.items():
            most = max(row.request.prompt_logprobs or 0 for row, _ in rows)
            asked = dataclasses.replace(controls, num_likeliest=most)
            found.append((asked, min(size, FEWEST) if asked.filtered else size, rows))
        return found

    @property
    def wanted(self) -> list[np.ndarray]:
        """The inputs of the calls of `ScoreStep`."""
        found, size = [], self.score.size(self.vocab_size)
        for controls, count, rows in self.calls:
            places = np.concatenate([own for _, own in rows])
            found += wanted_tokens(size, places, controls, count)
        return found

    @property
    def ranges(self) -> list[np.ndarray]:
        """The inputs of the calls of `PoolingStep`."""
        return wanted_ranges([own for _, own in self.pooled])

    def sums(self) -> list[tuple[RunningRequest, np.ndarray]]:
        """Waits for the pooled sums, and returns each row with the sum of its range."""
        if not self.pooled:
            return []
        told = np.concatenate([np.asarray(each) for each in self.results[-len(self.ranges) :]])
        return [(row, sum_) for (row, _), sum_ in zip(self.pooled, told, strict=False)]

    def read(self) -> list[tuple[RunningRequest, Int[np.ndarray, "n 2+2*most"]]]:
        """Waits for the scores, and returns each row with the lines of its next tokens."""
        row_scores = [(row, PromptLogprobs.NO_LINES) for row in self.single_token_rows]
        if not self.rows:
            return row_scores
        scored = iter(self.results[: len(self.results) - len(self.ranges)])
        for _, size, rows in self.calls:
            count = sum(len(places) for _, places in rows)
            calls = itertools.islice(scored, -(-count // size))
            lines, first = np.concatenate([np.asarray(each) for each in calls]), 0
            for row, places in rows:
                row_scores.append((row, lines[first : first + len(places)]))
                first += len(places)
        return row_scores
