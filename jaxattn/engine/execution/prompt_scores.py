"""Tokens of prompts that a prefill step scores: whose they are, and what was told of them."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxattn.engine.requests.outputs import Logprobs
from jaxattn.engine.sampling.logprobs import unpack_logprobs
from jaxattn.engine.scheduling.request_state import RunningRequest
from jaxattn.engine.steps.prefill_batch import PromptChunk, PromptLayout
from jaxattn.engine.steps.score_step import ScoreStep, wanted_tokens


@dataclasses.dataclass(eq=False)
class PromptScores:
    """What a prefill step scores.

    Attributes:
        layout: of the step.
        rows: whose tokens they are, and how many of each.
        places: of each token: where the one before it is among the step's, and the token.
        told: of `ScoreStep`, once it is sent.
    """

    layout: PromptLayout
    rows: list[tuple[RunningRequest, int]] = dataclasses.field(default_factory=list)
    places: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    told: list[jax.Array] = dataclasses.field(default_factory=list)

    def add(
        self, row: RunningRequest, group: int, before: Sequence[PromptChunk], chunk: PromptChunk
    ) -> None:
        """The tokens behind those of a chunk, if they are asked for.

        Args:
            before: the chunks of its data group that the step reads before it.
        """
        cached = chunk.length - len(chunk.tokens)
        positions = row.next_scored(cached, len(chunk.tokens))
        if not positions:
            return
        first = self.layout.first_token(group, before) - cached - 1
        self.places += [(first + at, row.prompt[at]) for at in positions]
        self.rows.append((row, len(positions)))

    @property
    def wanted(self) -> list[np.ndarray]:
        """What the calls of `ScoreStep` are given."""
        most = max((row.request.prompt_logprobs or 0 for row, _ in self.rows), default=0)
        return wanted_tokens(ScoreStep(self.layout.tokens), self.places, most)

    def read(self) -> list[tuple[RunningRequest, list[Logprobs]]]:
        """Waits for what was told: of each row its next tokens."""
        if not self.told:
            return []
        lines, first, found = np.concatenate([np.asarray(each) for each in self.told]), 0, []
        for row, count in self.rows:
            most = row.request.prompt_logprobs
            assert most is not None
            own = lines[first : first + count]
            found.append((row, [unpack_logprobs(x[1:], most, int(x[0])) for x in own]))
            first += count
        return found
