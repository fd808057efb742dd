"""Structured outputs: JSON, JSON of a schema, a regular expression, or calls of tools.

llguidance says before each token which ones may come. The engine asks a `GrammarMatcher` in the
device thread; compiling a grammar happens in a thread of texts, within the limits below.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
import orjson

from jaxattn.server.decoding.sampling_params import ABLE
from jaxattn.server.http.errors import ApiError, bad
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.text import Tokenizer

MOST_CHARACTERS = 2**16
KINDS = ("text", "json_object", "json_schema", "regex")
# What compiling and one mask may cost; more is refused, or ends the row.
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
)


class GrammarVocabulary:
    """A tokenizer's tokens, as llguidance knows them.

    Args:
        tokenizer: the model's. One without a stop token cannot end a text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    @functools.cached_property
    def known(self) -> llguidance.LLTokenizer:
        """Made when the first grammar comes: a vocabulary takes a second."""
        ends = list(self._tokenizer.stop_tokens)
        wrapper = llguidance.TokenizerWrapper(_LLGuidanceTokens(self._tokenizer))
        return llguidance.LLTokenizer(wrapper, eos_token=ends)

    def matchers(self, grammar: str, param: str, count: int) -> list["GrammarMatcher"]:
        """The states of new texts, of a grammar that is compiled once.

        Raises:
            ApiError: 400, the grammar is damaged, too large, asks for what is not supported, or
                no text follows it.
        """
        matcher = llguidance.LLMatcher(self.known, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds what compiling does not: no first token
        if matcher.is_error():
            raise _unfollowed(param, matcher)
        return [GrammarMatcher(matcher.deep_copy(), param) for _ in range(count)]


class _LLGuidanceTokens:
    """What `llguidance.TokenizerWrapper` reads."""

    def __init__(self, tokenizer: Tokenizer):
        ends = tokenizer.stop_tokens
        self.eos_token_id, self.bos_token_id = ends[0], None
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = list(ends)
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class GrammarMatcher:
    """One row's state; the engine's `Grammar`.

    Args:
        param: the field that asked for the grammar.
    """

    def __init__(self, matcher: llguidance.LLMatcher, param: str):
        self._matcher, self._param = matcher, param

    @property
    def error(self) -> ApiError | None:
        """Why the text could not go on by the grammar; None if it could."""
        return _unfollowed(self._param, self._matcher) if self._matcher.is_error() else None

    def mask(self, words: np.ndarray) -> None:
        """Writes which tokens may come next, in the bits of int32 [ceil(vocab / 32)].

        None may where a limit was passed: the row ends, and others go on.
        """
        if self._matcher.is_error():
            return
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():  # llguidance then allows the stop tokens: no answer ends so
            return
        count = min(len(words), len(allowed))
        words[:count] = allowed[:count]

    def accept(self, token: int) -> bool:
        """Goes on with a token; whether the text does. After an error the next mask ends it."""
        self._matcher.consume_token(token)
        return self._matcher.is_error() or not self._matcher.is_stopped()


def _unfollowed(param: str, matcher: llguidance.LLMatcher) -> ApiError:
    """Status 400 with llguidance's words, without its state."""
    said = " ".join(matcher.get_error().split("<state>")[0].split())[:300]
    said = said.replace("NoExtensionBias", "no text follows it")
    return bad(param, f"{param} cannot be followed: {said}; change or simplify it")


def read_grammar(fields: JsonFields, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """(the grammar that the answer has to follow, the field that asks for it), or None.

    `response_format` and `tool_choice` ask for one.

    Raises:
        ApiError: 400 with the field's name.
    """
    format_ = fields.object("response_format")
    kind = format_.chosen("type", KINDS) or "text"
    choice = fields.values.get("tool_choice")
    called = choice not in (None, "auto", "none")
    if kind == "text" and not called:
        return None
    param = "tool_choice" if called else "response_format"
    if "grammar" not in ABLE:
        raise bad(param, f"{param} asks for a grammar, and this engine follows none")
    if kind != "text" and called:
        raise bad("tool_choice", "response_format and tool_choice cannot both rule an answer")
    grammar = _of_calls(fields, tools) if called else _of_format(format_, kind)
    if len(grammar) > MOST_CHARACTERS:
        raise bad(param, f"{param} has a grammar of more than {MOST_CHARACTERS:,} characters")
    return grammar, param


def _of_format(fields: JsonFields, kind: str) -> str:
    if kind == "regex":
        pattern = fields.text("pattern", MOST_CHARACTERS)
        if not pattern:
            raise fields.wrong("pattern", "a regular expression")
        return llguidance.LLMatcher.grammar_from_regex(pattern)
    schema: dict[str, Any] = {"type": "object"}
    if kind == "json_schema":
        given = fields.object("json_schema")
        if not given.given("schema"):
            raise given.wrong("schema", "a JSON schema")
        schema = dict(given.object("schema").values)
    return _of_schema(schema, fields.where)


def _of_calls(fields: JsonFields, tools: Sequence[Mapping[str, Any]]) -> str:
    """One call of a tool, written as Hermes has it: any tool, or the one that is named."""
    choice = fields.values["tool_choice"]
    names = [tool["function"]["name"] for tool in tools]
    if choice != "required":
        named = fields.object("tool_choice").object("function").text("name", 128)
        if named not in names:
            raise bad("tool_choice", f"tool_choice names {named!r}, and tools has {names}")
        names = [named]
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
        if tool["function"]["name"] in names
    ]
    try:
        schema = orjson.dumps({"anyOf": calls}).decode()
    except orjson.JSONEncodeError as error:
        raise bad("tools", f"tools has parameters that cannot be followed: {error}") from error
    lark = f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {schema}\n'
    return llguidance.grammar_from("lark", lark)


def _of_schema(schema: dict[str, Any], param: str) -> str:
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(schema)
    except ValueError as error:
        raise bad(param, f"{param} has a schema that cannot be followed: {error}") from error
