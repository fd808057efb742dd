"""The requests of an offline run: token ids and answer lengths, the same for every engine."""

import dataclasses
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from jaxattn.bench.load.workload import LengthDistribution

FIXED, SHAREGPT = "fixed", "sharegpt"


@dataclasses.dataclass(frozen=True)
class OfflineRequest:
    """A prompt as token ids, and the exact number of tokens to generate."""

    prompt: Sequence[int]
    answer: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfflineWorkload:
    """The requests that an engine gets in a run.

    Attributes:
        requests, prompt, output: The number of requests in a throughput run, and the tokens of each
            prompt and answer.
        mixes: `FIXED` for the lengths above, `SHAREGPT` for as many requests with lengths drawn
            from `LengthDistribution`, or both.
        prompts: The lengths of the prompts that run one at a time.
        rows, context: The rows of the decode steps, and the tokens of the row that began first, in
            the middle of the timed steps.
        repeats: The number of runs of each kind except decode steps; the median counts.
        seed: The seed of lengths and token ids.
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
        """(prompt tokens, answer tokens) of each request."""
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
        """Requests with new token ids for each `what` and `repeat`, so no prefix cache has them."""
        seeds = self.seed, zlib.crc32(what.encode()), repeat
        luck = np.random.default_rng(seeds)
        low = min(10, vocab_size // 4)  # the first ids are often special tokens
        return [
            OfflineRequest(luck.integers(low, vocab_size - low, tokens).tolist(), answer)
            for tokens, answer in lengths
        ]

    def runs(
        self, what: str, lengths: Sequence[tuple[int, int]], vocab_size: int
    ) -> Iterator[list[OfflineRequest]]:
        """Yields the requests of each repeat."""
        for repeat in range(self.repeats):
            yield self.draw(what, lengths, vocab_size, repeat)
