"""Grammars: what a matcher lets through is what was asked for; others are refused with words."""

import json
import random
import re
import socket

import llguidance
import numpy as np
import pytest

from jaxattn.engine.requests.outputs import Completion, FinishReason
from jaxattn.engine.requests.request import Request
from jaxattn.server.decoding import structured_outputs
from jaxattn.server.decoding.grammars import grammar_matcher
from jaxattn.server.decoding.grammars.answer_grammar import AnswerGrammar
from jaxattn.server.decoding.grammars.grammar_matcher import GrammarVocabulary
from jaxattn.server.decoding.message_events import MessageParts
from jaxattn.server.decoding.message_format import MessageFormat
from jaxattn.server.decoding.output_collector import failure
from jaxattn.server.decoding.structured_outputs import read_grammar
from jaxattn.server.decoding.tool_choice import read_tools
from jaxattn.server.http.errors import ApiError
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.text import ByteTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")
]


PLAIN = MessageFormat.of("")  # without thoughts


def asked_for(body, format_=PLAIN, prompt_end="", special=ByteTokenizer.special_tokens):
    """The grammar of a request."""
    fields = JsonFields(body)
    return read_grammar(fields, AnswerGrammar(special, format_, prompt_end), read_tools(fields))


@pytest.fixture(autouse=True)
def able(monkeypatch):
    """An engine whose requests take a grammar."""
    monkeypatch.setattr(structured_outputs, "ABLE", structured_outputs.ABLE | {"grammar"})


@pytest.fixture(scope="module")
def vocabulary():
    return GrammarVocabulary(ByteTokenizer())


def written(vocabulary, body, seed, *where):
    """A text of tokens that are drawn from those allowed; white space is avoided."""
    [matcher] = vocabulary.matchers(*asked_for(body, *where), 1)
    luck = random.Random(seed)
    found = bytearray()
    for _ in range(2000):
        words = np.zeros(8, np.int32)
        matcher.mask(words)
        allowed = [token for token in range(256) if words[token // 32] >> token % 32 & 1]
        assert allowed
        plain = [token for token in allowed if chr(token) not in " \t\r\n"] or allowed
        # A number may have no end of digits, and a text of its own none of characters.
        ends = [token for token in plain if chr(token) in ',}"\0'] if luck.random() < 0.5 else []
        token = luck.choice(ends or plain)
        more = matcher.accept(token)
        if token:
            found.append(token)
        if not more:
            return found.decode()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(5))
def test_a_schema_is_followed(vocabulary, seed):
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    found = json.loads(written(vocabulary, {"response_format": asked}, seed))
    assert isinstance(found["a"], int) and found["b"] in "xy" and len(found) == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_pattern_is_followed(vocabulary, seed):
    asked = {"type": "regex", "pattern": "[a-c]{2,5}-(one|two)"}
    assert re.fullmatch(asked["pattern"], written(vocabulary, {"response_format": asked}, seed))


@pytest.mark.parametrize(
    "choice, names",
    [("required", "fg"), ({"type": "function", "function": {"name": "g"}}, "g")],
    ids=["any", "named"],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_call_of_a_tool_can_be_read(vocabulary, choice, names, seed):
    body = {"tool_choice": choice, "tools": TOOLS, "parallel_tool_calls": False}
    parser, parts = PLAIN.parser(read_tools(JsonFields(body))), MessageParts()
    parts.add([*parser.feed(written(vocabulary, body, seed)), *parser.finish()])
    [call] = parts.calls
    assert parts.content == "" and call.name in names
    assert set(json.loads(call.arguments)) == {"a", "b"}


@pytest.mark.parametrize(
    "asked",
    [
        {"type": "regex", "pattern": "a{3,"},
        {"type": "regex"},
        {"type": "regex", "pattern": "x" * 70_000},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "no such type"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "https://example.org/x"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},  # no text is one
        {"type": "yaml"},
    ],
)
def test_what_cannot_be_followed_is_400(vocabulary, asked):
    with pytest.raises(ApiError) as refused:
        vocabulary.matchers(*asked_for({"response_format": asked}), 1)
    assert refused.value.status == 400 and refused.value.param.startswith("response_format")


def test_a_text_that_passes_a_limit_allows_no_token_and_says_why(vocabulary, monkeypatch):
    """llguidance then allows a stop token, which would end a part of an answer as if whole."""
    few = llguidance.LLParserLimits(max_lexer_states=40)
    monkeypatch.setattr(grammar_matcher, "LIMITS", few)
    asked = {"type": "regex", "pattern": "[ab]*a[ab]{20}!"}
    [matcher] = vocabulary.matchers(*asked_for({"response_format": asked}), 1)
    luck = random.Random(0)
    for _ in range(200):
        words = np.zeros(8, np.int32)
        matcher.mask(words)
        if not words.any():
            break
        assert matcher.accept(ord(luck.choice("ab")))
    request = Request(b"x", grammar=matcher)
    error = failure(Completion(request, (), FinishReason.NOT_FINITE, "no number"))
    assert error.status == 400 and error.param == "response_format"
    assert "too many states" in error.message and "<state>" not in error.message


def test_an_engine_without_grammars_says_so(monkeypatch):
    monkeypatch.setattr(structured_outputs, "ABLE", frozenset())
    with pytest.raises(ApiError, match="this engine does not support grammars"):
        asked_for({"response_format": {"type": "json_object"}})
    assert asked_for({"response_format": {"type": "text"}}) is None


def test_texts_of_one_grammar_go_on_each_for_itself(vocabulary):
    asked = {"type": "regex", "pattern": "ab|cd"}
    structured_outputs = asked_for({"response_format": asked})
    first, second = vocabulary.matchers(*structured_outputs, 2)
    assert first.accept(ord("a"))
    for matcher, wanted in ((first, "b"), (second, "ac")):
        words = np.zeros(8, np.int32)
        matcher.mask(words)
        allowed = [chr(token) for token in range(256) if words[token // 32] >> token % 32 & 1]
        assert allowed == list(wanted)


def test_a_schema_fetches_nothing(vocabulary):
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.2)
        schema = {"$ref": f"http://127.0.0.1:{elsewhere.getsockname()[1]}/schema"}
        asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        structured_outputs = asked_for({"response_format": asked})
        with pytest.raises(ApiError, match="retrieving it failed"):
            vocabulary.matchers(*structured_outputs, 1)
        with pytest.raises(TimeoutError):
            elsewhere.accept()
