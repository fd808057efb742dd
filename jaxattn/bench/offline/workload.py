"""The requests of an offline run: token ids and lengths of answers, the same for every engine."""

import dataclasses
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from jaxattn.bench.load.workload import LengthDistribution

FIXED, SHAREGPT = "fixed", "sharegpt"


@dataclasses.dataclass(frozen=True)
class OfflineRequest:
    """A prompt, and how many tokens answer it, whatever they are."""

    prompt: Sequence[int]
    answer: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfflineWorkload:
    """What an engine is asked for in a run.

    Attributes:
        requests, prompt, output: of the throughput runs: requests, tokens of each.
        mixes: of `FIXED`, which has these lengths, and `SHAREGPT`, which draws as many requests
            with the lengths of `LengthDistribution`.
        prompts: tokens of the prompts that are read one at a time.
        rows, context: of the decode steps; the row that began first has `context` tokens in the
            middle of the steps that are timed.
        repeats: runs of each kind but of decode steps, of which the median counts.
        seed: of lengths and token ids.
    """

    requests: int = 256
    prompt: int = 1024
    output: int = 256
    mixes: tuple[str, ...] = (FIXED,)
    prompts: tuple[int, ...] = (128, 1024, 8192)
    rows: tuple[int, ...] = (1, 32, 128)
    context: int = 4096
    repeats: int = 3
    seed: int = 0

    def lengths(self, mix: str) -> list[tuple[int, int]]:
        """(tokens of the prompt, tokens of the answer) of each request."""
        if mix == FIXED:
            return [(self.prompt, self.output)] * self.requests
        return list(LengthDistribution().lengths(self.requests, self.seed))

    def title(self, mix: str) -> str:
        if mix == FIXED:
            return f"{self.requests:,} requests of {self.prompt:,} + {self.output:,}"
        return f"{self.requests:,} requests as in ShareGPT"

    def draw(
        self, what: str, lengths: Sequence[tuple[int, int]], vocab_size: int, repeat: int = 0
    ) -> list[OfflineRequest]:
        """Requests of other token ids for each `what` and `repeat`: none is in a prefix cache."""
        seeds = self.seed, zlib.crc32(what.encode()), repeat
        luck = np.random.default_rng(seeds)
        low = min(10, vocab_size // 4)  # the first ones are often special
        return [
            OfflineRequest(luck.integers(low, vocab_size - low, tokens).tolist(), answer)
            for tokens, answer in lengths
        ]

    def runs(
        self, what: str, lengths: Sequence[tuple[int, int]], vocab_size: int
    ) -> Iterator[list[OfflineRequest]]:
        """The requests of each of the repeats."""
        for repeat in range(self.repeats):
            yield self.draw(what, lengths, vocab_size, repeat)
