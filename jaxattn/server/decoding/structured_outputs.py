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
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from jaxattn.server.decoding.grammars.answer_grammar import AnswerGrammar
from jaxattn.server.decoding.sampling_params import ABLE
from jaxattn.server.decoding.tool_choice import ToolChoice
from jaxattn.server.http.errors import ApiError, bad
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.text import Tokenizer

MOST_CHARACTERS = 2**16
NO_TOOLS = ToolChoice()
KINDS = ("text", "json_object", "json_schema", "regex")
# Of vLLM's `structured_outputs`; each has been a field `guided_...` of a request, too.
STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
MOST_TEXTS = 1024
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
        marks: around thoughts. Those that are a token count as special: a mask of any text up to
            such a token takes 10 us, and up to the letters of a mark 2 ms.

    Attributes:
        special_tokens: id -> text of tokens that are no part of a string.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str] = ()):
        self._tokenizer = tokenizer
        ids = {tokenizer.token_id(mark): mark for mark in marks}
        marked = {id: mark for id, mark in ids.items() if id is not None}
        self.special_tokens: Mapping[int, str] = {**tokenizer.special_tokens, **marked}

    @functools.cached_property
    def known(self) -> llguidance.LLTokenizer:
        """Made when the first grammar comes: a vocabulary takes a second."""
        ends = list(self._tokenizer.stop_tokens)
        wrapper = llguidance.TokenizerWrapper(
            _LLGuidanceTokens(self._tokenizer, sorted(self.special_tokens))
        )
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

    def __init__(self, tokenizer: Tokenizer, special: list[int]):
        ends = tokenizer.stop_tokens
        self.eos_token_id, self.bos_token_id = ends[0], None
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = special
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


def read_grammar(
    fields: JsonFields,
    answer: AnswerGrammar,
    choice: ToolChoice = NO_TOOLS,
) -> tuple[str, str] | None:
    """(the grammar that the answer has to follow, the field that asks for it), or None.

    `response_format`, `tool_choice`, and vLLM's `structured_outputs` ask for one.

    Args:
        answer: writes it.
        choice: of tools.

    Raises:
        ApiError: 400 with the field's name.
    """
    format_ = fields.object("response_format")
    kind = format_.chosen("type", KINDS) or "text"
    called = choice.mode == "required"
    structured = _structured(fields)
    asking = [structured.where] if structured is not None else []
    asking += ["response_format"] * (kind != "text") + ["tool_choice"] * called
    if not asking:
        return None
    param = "tool_choice" if called else asking[0]
    if "grammar" not in ABLE:
        raise bad(param, f"{param} asks for a grammar, and this engine follows none")
    if len(asking) > 1:
        raise bad(param, f"{asking[0]} and {asking[-1]} cannot both rule an answer")
    if structured is not None:
        grammar = _of_structured(structured, answer)
    else:
        grammar = answer.calls(choice) if called else _of_format(format_, kind, answer)
    if len(grammar) > MOST_CHARACTERS:
        raise bad(param, f"{param} has a grammar of more than {MOST_CHARACTERS:,} characters")
    return llguidance.grammar_from("lark", grammar), param


def _of_format(fields: JsonFields, kind: str, answer: AnswerGrammar) -> str:
    if kind == "regex":
        pattern = fields.text("pattern", MOST_CHARACTERS)
        if not pattern:
            raise fields.wrong("pattern", "a regular expression")
        return answer.pattern(pattern)
    schema: dict[str, Any] = {"type": "object"}
    if kind == "json_schema":
        given = fields.object("json_schema")
        if not given.given("schema"):
            raise given.wrong("schema", "a JSON schema")
        schema = dict(given.object("schema").values)
    return answer.schema(schema, fields.where)


def _structured(fields: JsonFields) -> JsonFields | None:
    """vLLM's `structured_outputs`, or what an older field says; None where there is none."""
    found = fields.object("structured_outputs")
    for name in STRUCTURED:
        older = f"guided_{name}"
        if fields.given(older):
            found = JsonFields({name: fields.values[older]}, older)
    given = [name for name in STRUCTURED if found.given(name)]
    if not found.values:
        return None
    if len(given) != 1:
        raise bad(
            found.where,
            f"{found.where} must have one of {', '.join(STRUCTURED)}; got {given or 'none'}",
        )
    return found


def _of_structured(fields: JsonFields, answer: AnswerGrammar) -> str:
    """The grammar of the one constraint that `_structured` has found."""
    if (text := fields.text("regex", MOST_CHARACTERS)) is not None:
        return answer.pattern(text)
    if (text := fields.text("grammar", MOST_CHARACTERS)) is not None:
        return _lark(text, fields.where)
    if texts := fields.texts("choice", MOST_TEXTS, MOST_CHARACTERS):
        return answer.choices(texts)
    schema = fields.values.get("json")
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise fields.wrong("json", f"a JSON schema; it is no JSON ({error})") from None
    if schema is None:
        if not fields.flag("json_object"):
            raise fields.wrong("json_object", "true")
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise fields.wrong("json", "a JSON schema")
    return answer.schema(schema, fields.where)


def _lark(text: str, param: str) -> str:
    """A grammar in Lark, which may have been written in GBNF."""
    try:
        return any_to_lark(text)
    except (GbnfToLarkError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        raise bad(param, f"{param} has a grammar that cannot be read: {said}") from error
