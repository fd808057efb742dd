"""Requests of a load test, with lengths of prompts and answers drawn from a seed.

The lengths of chats in ShareGPT are spread over two orders of magnitude: many short prompts, a long
tail, and answers that are longer than their prompts in the middle. Two log-normal distributions
with the medians and spreads below have that shape; no data set is fetched.
"""

import dataclasses
import math
import random
from collections.abc import Iterator

LEAST, MOST = 4, 1024
PROMPT = (90.0, 1.35)  # median in tokens, and the standard deviation of the logarithm
ANSWER = (150.0, 1.0)
WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line"
).split()


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """One request.

    Attributes:
        prompt: a text of about `tokens` tokens.
        answer: tokens to generate, exactly.
    """

    prompt: str
    tokens: int
    answer: int


@dataclasses.dataclass(frozen=True)
class LengthDistribution:
    """Tokens of prompts and answers; None draws them as ShareGPT has them."""

    prompt: int | None = None
    answer: int | None = None
    most: int = MOST

    def asks(self, count: int, seed: int, characters: float) -> Iterator[LoadRequest]:
        """Requests that are the same for the same seed.

        Args:
            characters: of a token, as the server's tokenizer divides `text`.
        """
        luck = random.Random(seed)
        for _ in range(count):
            tokens = self.prompt or drawn(luck, *PROMPT, self.most)
            answer = self.answer or drawn(luck, *ANSWER, self.most)
            yield LoadRequest(text(luck, round(tokens * characters)), tokens, answer)


def drawn(luck: random.Random, median: float, spread: float, most: int) -> int:
    """A number of tokens."""
    return min(max(round(luck.lognormvariate(math.log(median), spread)), LEAST), most)


def text(luck: random.Random, characters: int) -> str:
    """Words of about so many characters in all, at least one."""
    found = [luck.choice(WORDS)]
    length = len(found[0])
    while length < characters:
        found.append(luck.choice(WORDS))
        length += 1 + len(found[-1])
    return " ".join(found)[: max(characters, 1)]
