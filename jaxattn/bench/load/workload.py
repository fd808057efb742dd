"""Requests of a load test, with lengths of prompts and answers drawn from a seed.

The lengths of ShareGPT chats spread over two orders of magnitude: there are many short prompts and
a long tail, and the median answer is longer than the median prompt. Two log-normal distributions
with the medians and spreads below have that shape. The module needs no data set.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator

LEAST, MOST = 4, 1024
PROMPT = (90.0, 1.35)  # median in tokens, and the standard deviation of the logarithm
ANSWER = (150.0, 1.0)
WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line"
).split()


# Makes a prompt of the given number of tokens.
type PromptMaker = Callable[[random.Random, int], str | list[int]]


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """One request.

    Attributes:
        prompt: A text of about `tokens` tokens, or token ids.
        tokens: The number of prompt tokens.
        answer: The exact number of tokens to generate.
    """

    prompt: str | list[int]
    tokens: int
    answer: int


@dataclasses.dataclass(frozen=True)
class LengthDistribution:
    """Lengths of prompts and answers in tokens; None draws them like ShareGPT's, clipped
    to `max_length`."""

    prompt: int | None = None
    answer: int | None = None
    max_length: int = MOST

    def lengths(self, count: int, seed: int) -> Iterator[tuple[int, int]]:
        """Yields (prompt tokens, answer tokens); the same seed gives the same lengths."""
        rng = random.Random(seed)
        for _ in range(count):
            tokens = self.prompt or drawn(rng, *PROMPT, self.max_length)
            yield tokens, self.answer or drawn(rng, *ANSWER, self.max_length)

    def asks(
        self, count: int, seed: int, prompt_of: PromptMaker, draw: int = 0
    ) -> Iterator[LoadRequest]:
        """Yields requests that depend only on `seed` and `draw`, which selects the prompts."""
        rng = random.Random(f"{seed} {draw}")
        for tokens, answer in self.lengths(count, seed):
            yield LoadRequest(prompt_of(rng, tokens), tokens, answer)


def drawn(rng: random.Random, median: float, spread: float, max_length: int) -> int:
    """A length in tokens from a log-normal distribution, clipped to LEAST and `max_length`."""
    return min(max(round(rng.lognormvariate(math.log(median), spread)), LEAST), max_length)


def texts(characters: float) -> PromptMaker:
    """Makes texts for a tokenizer with this many characters per token."""
    return lambda luck, tokens: text(luck, round(tokens * characters))


def token_ids(vocab_size: int) -> PromptMaker:
    """Makes prompts of exactly the requested number of random token ids."""
    return lambda luck, tokens: [luck.randrange(vocab_size) for _ in range(tokens)]


def text(luck: random.Random, characters: int) -> str:
    """Random words, cut to `characters` characters."""
    found = [luck.choice(WORDS)]
    length = len(found[0])
    while length < characters:
        found.append(luck.choice(WORDS))
        length += 1 + len(found[-1])
    return " ".join(found)[: max(characters, 1)]
