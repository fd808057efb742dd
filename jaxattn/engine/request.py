"""What goes into an engine and what comes out of it."""

import contextlib
import dataclasses
import numbers
import operator
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt: token ids; for a model of bytes, `bytes`.
        max_tokens: how many to generate at most.
        temperature: 0 takes the most likely token.
        top_p: in (0, 1]; samples from the most likely tokens that together reach it.
        seed: with `id` and the token's position it decides every draw.
        stop_token: ends the row when it is generated, and is no part of the completion.
        id: names the request, in callbacks and for sampling; None is its place in the list.

    Raises:
        TypeError: an attribute is of another type; the message names it.
        ValueError: an attribute does not fit; the message names it.
    """

    prompt: Sequence[int]
    max_tokens: int = 160
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token: int | None = None
    id: int | None = None

    def __post_init__(self) -> None:
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            raise TypeError(
                "prompt must be token ids, got a str; for a model of bytes give prompt.encode()"
            )
        if hasattr(prompt, "dtype"):
            if prompt.dtype.kind not in "iu" or prompt.ndim != 1:
                raise TypeError(f"prompt must be integers [T], got {prompt.dtype} {prompt.shape}")
        elif not isinstance(prompt, Sequence):
            raise TypeError(f"prompt must be a sequence of token ids, got {prompt!r}")
        elif not isinstance(prompt, bytes):
            for place, token in enumerate(prompt):
                _check_integer(f"prompt[{place}]", token)
        for name in ("max_tokens", "seed", "stop_token", "id"):
            value = getattr(self, name)
            if value is not None or name in ("max_tokens", "seed"):
                _check_integer(name, value)
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not len(self.prompt):
            raise ValueError("prompt is empty; it needs at least one token")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1; got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more; got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; got {self.top_p}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1; got {self.seed}")
        if self.id is not None and not 0 <= self.id < 2**31:
            raise ValueError(f"id must be from 0 to 2**31 - 1; got {self.id}")


def _check_integer(name: str, value: Any) -> None:
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool):
            operator.index(value)
            return
    raise TypeError(f"{name} must be an integer, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Completion:
    """What became of a request.

    Attributes:
        tokens: what was generated, without the stop token.
        finish_reason: "stop", "length" (`max_tokens` or the model length), "interrupted" or
            "refused: ...".
        seconds_to_first_token: since `generate` began; None if there was none.
        seconds: until it was done.
    """

    request: Request
    tokens: tuple[int, ...]
    finish_reason: str
    seconds_to_first_token: float | None = None
    seconds: float = 0.0


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during `generate`; `completions` has all that was generated, in request order."""

    def __init__(self, completions: list[Completion]):
        super().__init__("interrupted")
        self.completions = completions


@dataclasses.dataclass
class Stats:
    """Of one `generate`. A request's first token comes from prefill: it is not a decoded one."""

    prompt_tokens: int = 0
    decoded_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decoded_tokens_per_second(self) -> float:
        """Over all the time that was not prefill: steps, scheduler and callbacks."""
        rest = self.seconds - self.prefill_seconds
        return self.decoded_tokens / rest if rest > 0 else 0.0
