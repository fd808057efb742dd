"""The sampling fields of API requests, and the engine requests made from them."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jaxattn.engine.requests.request import Request
from jaxattn.server.decoding.token_rules import TokenLimits
from jaxattn.server.http.errors import bad
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.server.settings import (
    MOST_CHOICES,
    MOST_STOP_CHARACTERS,
    MOST_STOP_TOKENS,
    MOST_STOPS,
)
from jaxattn.text import SamplingDefaults

MOST_BIASES = 300
MOST_SALT = 256
MOST_ID = 2**31 - 1
GREEDY = 1e-5  # lower temperatures count as 0: logits divided by them could exceed float32
LEAST_TOP_P = 1e-6  # a smaller value may be 0 in float32
GOLDEN = 0x9E3779B1
# The names of the fields of the engine's requests.
ABLE = frozenset(field.name for field in dataclasses.fields(Request))
# Penalty -> (minimum, maximum, the value that changes nothing).
PENALTIES = {
    "presence_penalty": (-2.0, 2.0, 0.0),
    "frequency_penalty": (-2.0, 2.0, 0.0),
    "repetition_penalty": (0.01, 100.0, 1.0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of a request.

    Attributes:
        max_tokens: The requested maximum; None if the request sets none.
        choices: The number of continuations per prompt, which is the field `n`.
        temperature: The temperature; 0 samples greedily.
        top_p, min_p: The thresholds of nucleus and minimum-probability sampling.
        top_k: The number of most likely tokens to sample from; 0 for all.
        seed: The seed of the first choice. The other choices' seeds are derived from it.
        stops: The stop strings, which the server finds in the text.
        stop_tokens: Stop tokens in addition to the model's.
        ignore_eos: Whether to ignore the model's stop tokens.
        stop_included: Whether a stop string stays in the text.
        skip_special: Whether special tokens are left out of the text.
        limits: The restrictions of single tokens.
        request_fields: Further fields of the engine's requests, if they change the result.
    """

    max_tokens: int | None
    choices: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stops: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    ignore_eos: bool
    stop_included: bool
    skip_special: bool
    limits: TokenLimits
    request_fields: Mapping[str, Any]

    def ends(self, ends: Sequence[int]) -> tuple[int, ...]:
        """Returns the stop tokens of a row, where `ends` are the model's."""
        return self.stop_tokens if self.ignore_eos else (*self.stop_tokens, *ends)

    def request(
        self,
        prompt: Sequence[int],
        *,
        choice: int,
        id: int,
        max_new_tokens: int,
        model_stop_tokens: Sequence[int],
        **choice_fields: Any,
    ) -> Request:
        """Returns the engine request of one choice.

        Args:
            choice: The number of the choice.
            id: The id of the request.
            max_new_tokens: The maximum number of tokens that can follow the prompt.
            model_stop_tokens: The model's stop tokens.
            choice_fields: Further fields, only for this choice.
        """
        return Request(
            prompt,
            max_tokens=max_new_tokens
            if self.max_tokens is None
            else min(self.max_tokens, max_new_tokens),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=(self.seed + choice * GOLDEN) % 2**32,
            stop_tokens=self.ends(model_stop_tokens),
            id=id,
            **self.request_fields,
            **choice_fields,
        )


def read_sampling(
    fields: JsonFields,
    defaults: SamplingDefaults,
    max_tokens: int | None,
    logprobs: int | None = None,
    *,
    prompt_logprobs: int | None = None,
    vocab_size: int,
) -> SamplingParams:
    """Reads the sampling fields of a request.

    Args:
        defaults: The values of fields that the request does not set.
        max_tokens, logprobs, prompt_logprobs: The values that the endpoint has read itself,
            because these fields differ between the endpoints.
        vocab_size: The model's vocabulary size, which bounds the tokens of `logit_bias`.

    Raises:
        ApiError: 400 with the field's name.
    """
    temperature = _or(fields.number("temperature", 0, 100), defaults.temperature, 1.0)
    top_k = fields.integer("top_k", -1, MOST_ID)
    seed = fields.integer("seed", -(2**63), 2**63 - 1)
    ignore_eos = fields.flag("ignore_eos")
    return SamplingParams(
        max_tokens=max_tokens,
        choices=_or(fields.integer("n", 1, MOST_CHOICES), None, 1),
        temperature=temperature if temperature >= GREEDY else 0.0,
        top_p=max(_or(fields.number("top_p", 0, 1), defaults.top_p, 1.0), LEAST_TOP_P),
        top_k=max(_or(top_k, defaults.top_k, 0), 0),
        min_p=_or(fields.number("min_p", 0, 1), defaults.min_p, 0.0),
        seed=secrets.randbits(32) if seed is None else _folded(seed),
        stops=fields.texts("stop", MOST_STOPS, MOST_STOP_CHARACTERS),
        stop_tokens=fields.integers("stop_token_ids", MOST_STOP_TOKENS, MOST_ID),
        ignore_eos=ignore_eos,
        stop_included=fields.flag("include_stop_str_in_output"),
        skip_special=fields.flag("skip_special_tokens", True),
        limits=TokenLimits.read(fields, max_tokens, vocab_size),
        request_fields=_more(fields, defaults, logprobs, prompt_logprobs, vocab_size),
    )


def _folded(seed: int) -> int:
    """Maps an int64 seed to the engine's uint32. Seeds that fit into it do not change."""
    high, low = divmod(seed % 2**64, 2**32)
    return (low ^ high * GOLDEN) % 2**32


def _more(
    fields: JsonFields,
    defaults: SamplingDefaults,
    logprobs: int | None,
    prompt_logprobs: int | None,
    vocab_size: int,
) -> dict[str, Any]:
    """Returns penalties, biases, priority, salt and log-probabilities, if they have an effect."""
    found: dict[str, Any] = {}
    if logprobs is not None:
        found["logprobs"] = logprobs
    if prompt_logprobs is not None:
        found["prompt_logprobs"] = prompt_logprobs
    if priority := fields.integer("priority", -(2**31), MOST_ID):
        found["priority"] = priority
    salt = fields.text("cache_salt", MOST_SALT)
    if salt and "cache_salt" in ABLE:  # an engine without a prefix cache needs no salt
        found["cache_salt"] = salt
    for name, (lower, upper, neutral) in PENALTIES.items():
        value = _or(fields.number(name, lower, upper), getattr(defaults, name, None), neutral)
        if value != neutral:
            found[name] = value
    if bias := _bias(fields, vocab_size):
        found["logit_bias"] = bias
    for name in found:
        if name not in ABLE:
            raise bad(name, f"{name} is not supported by this engine; leave it out")
    return found


def _bias(fields: JsonFields, vocab_size: int) -> dict[int, float]:
    given = fields.object("logit_bias")
    if len(given.values) > MOST_BIASES:
        raise bad(
            "logit_bias",
            f"logit_bias has {len(given.values):,} tokens; at most {MOST_BIASES} are allowed",
        )
    found = {}
    for key in given.values:
        if not key.isascii() or not key.isdecimal() or len(key) > 10 or int(key) >= vocab_size:
            raise bad(
                "logit_bias",
                f"logit_bias must map token ids from 0 to {vocab_size - 1:,} to numbers; got the "
                f"key {key[:20]!r}",
            )
        bias = given.number(key, -100, 100)
        if bias:
            found[int(key)] = bias
    return found


def _or[T](given: T | None, default: T | None, plain: T) -> T:
    return given if given is not None else default if default is not None else plain
