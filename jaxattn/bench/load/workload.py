"""Requests of a load test, with lengths of prompts and answers drawn from a seed.

The lengths of chats in ShareGPT are spread over two orders of magnitude: many short prompts, a long
tail, and answers that are longer than their prompts in the middle. Two log-normal distributions
with the medians and spreads below have that shape; no data set is fetched.
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


# A prompt of so many tokens.
type PromptMaker = Callable[[random.Random, int], str | list[int]]


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """One request.

    Attributes:
        prompt: a text of about `tokens` tokens, or token ids.
        answer: tokens to generate, exactly.
    """

    prompt: str | list[int]
    tokens: int
    answer: int


@dataclasses.dataclass(frozen=True)
class LengthDistribution:
    """Tokens of prompts and answers; None draws them as ShareGPT has them."""

    prompt: int | None = None
    answer: int | None = None
    most: int = MOST

    def lengths(self, count: int, seed: int) -> Iterator[tuple[int, int]]:
        """(tokens of a prompt, tokens of its answer), the same for the same seed."""
        luck = random.Random(seed)
        for _ in range(count):
            tokens = self.prompt or drawn(luck, *PROMPT, self.most)
            yield tokens, self.answer or drawn(luck, *ANSWER, self.most)

    def asks(
        self, count: int, seed: int, prompt_of: PromptMaker, draw: int = 0
    ) -> Iterator[LoadRequest]:
        """Requests that are the same for the same seed; each `draw` has other prompts."""
        luck = random.Random(f"{seed} {draw}")
        for tokens, answer in self.lengths(count, seed):
            yield LoadRequest(prompt_of(luck, tokens), tokens, answer)


def drawn(luck: random.Random, median: float, spread: float, most: int) -> int:
    """A number of tokens."""
    return min(max(round(luck.lognormvariate(math.log(median), spread)), LEAST), most)


def texts(characters: float) -> PromptMaker:
    """Texts, of a tokenizer whose tokens have so many characters."""
    return lambda luck, tokens: text(luck, round(tokens * characters))


def token_ids(vocab_size: int) -> PromptMaker:
    """Token ids: a prompt has exactly as many as are asked for."""
    return lambda luck, tokens: [luck.randrange(vocab_size) for _ in range(tokens)]


def text(luck: random.Random, characters: int) -> str:
    """Words of about so many characters in all, at least one."""
    found = [luck.choice(WORDS)]
    length = len(found[0])
    while length < characters:
        found.append(luck.choice(WORDS))
        length += 1 + len(found[-1])
    return " ".join(found)[: max(characters, 1)]
