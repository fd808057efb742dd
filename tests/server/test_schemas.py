"""Each answer that a schema rules is valid by it: schemas of four kinds, and hard ones.

Texts are drawn at random from the tokens that a grammar allows.
"""

import json
import random
import re

import jsonschema
import llguidance
import numpy as np
import pytest

from jaxattn.server.decoding.grammars.answer_grammar import AnswerGrammar
from jaxattn.server.decoding.grammars.grammar_matcher import GrammarVocabulary
from jaxattn.server.decoding.message_events import MessageParts
from jaxattn.server.decoding.message_format import FORMATS, MessageFormat
from jaxattn.server.decoding.tool_choice import read_tools
from jaxattn.server.http.errors import ApiError
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.text import ByteTokenizer
from tests.helpers.schema_cases import DIALECTS, FLOAT32

CLOSING = frozenset(b'"}],/\0')
WHITE = frozenset(b" \t\r\n")
MOST = 6000  # bytes


class MarkedBytes(ByteTokenizer):
    """Bytes, and special tokens from 256 on."""

    def __init__(self, marks=()):
        self.vocab_size = 256 + len(marks)
        self.special_tokens = {0: "\0", **{256 + n: mark for n, mark in enumerate(marks)}}

    def token_bytes(self, token):
        return self.special_tokens.get(token, chr(0)).encode() if token > 255 else bytes([token])


BYTES = MarkedBytes()


@pytest.fixture(scope="module")
def vocabulary():
    return GrammarVocabulary(BYTES)


def matcher_of(vocabulary, grammar):
    grammar = llguidance.grammar_from("lark", grammar)
    [matcher] = vocabulary.matchers(grammar, "response_format", 1)
    return matcher


def tokens_allowed(matcher, tokenizer=BYTES):
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    matcher.mask(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def drawn(matcher, luck, tokenizer=BYTES, white=False):
    """A random text. A long one closes its strings and lists where it can."""
    found: list[int] = []
    while len(found) < MOST:
        allowed = tokens_allowed(matcher, tokenizer)
        assert allowed, matcher.error and matcher.error.message
        if not white:
            allowed = [token for token in allowed if token not in WHITE] or allowed
        ends = [token for token in allowed if token in CLOSING or token > 255]
        close = ends and luck.random() < (0.3 if len(found) < 300 else 0.97)
        found.append(luck.choice(ends if close else allowed))
        if not matcher.accept(found[-1]):
            break
    return b"".join(map(tokenizer.token_bytes, found)).removesuffix(b"\0").decode()


def grammar_of(schema):
    return AnswerGrammar(BYTES.special_tokens).schema(schema, "response_format")


def follows(vocabulary, schema, text):
    """Whether a text is an answer by the schema's grammar."""
    matcher = matcher_of(vocabulary, grammar_of(schema))
    for byte in text.encode():
        if byte not in tokens_allowed(matcher):
            return False
        matcher.accept(byte)
    return tokens_allowed(matcher) == [0] or 0 in tokens_allowed(matcher)


def check(vocabulary, dialect, seed):
    luck = random.Random(seed)
    schema = DIALECTS[dialect](luck)
    text = drawn(matcher_of(vocabulary, grammar_of(schema)), luck)
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    errors = [each.message for each in validator(schema).iter_errors(json.loads(text))]
    assert not errors, (errors, text, schema)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_answers_are_valid(vocabulary, dialect):
    for seed in range(8):
        check(vocabulary, dialect, seed)


@pytest.mark.slow(reason="a rarer schema whose answers are not valid; 8 of each kind run always")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_thousand_schemas(vocabulary, dialect):
    for seed in range(8, 258):
        check(vocabulary, dialect, seed)


# --- what llguidance alone does otherwise


@pytest.mark.parametrize(
    "schema, valid, not_valid",
    [
        ({"pattern": '^[^"]*$', "type": "string"}, ['"ab"', '"\\n"'], [r'"a\"b"']),
        ({"pattern": r'^[^"\\]+$', "type": "string"}, ['"ab"'], [r'"a\"b"', r'"a\\b"']),
        ({"pattern": r"^[\x00-!#-~]*$", "type": "string"}, ['"ab"'], [r'"a\"b"']),
        ({"pattern": r"^[^[&&]$", "type": "string"}, ['"a"', r'"\""'], ['"["', '"&"']),
        ({"pattern": "^[a-c]$", "type": "string"}, ['"b"'], ['"d"', '"-"']),
        (
            {"properties": {"ab": {"type": "integer"}, 'q"': {"type": "null"}}, "type": "object"},
            ['{"ab": 1}', r'{"q\"": null}', '{"c": "x"}'],
            [r'{"a\u0062": "x"}', '{"ab": "x"}', r'{"q\u0022": 1}', r'{"q\"": 1}'],
        ),
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            ["0", "-7", str(2**62)],
            [str(2**63), str(-(2**63) - 1), "9" * 30],
        ),
        ({"type": "integer", "maximum": 2**53 + 1}, [str(2**53)], [str(2**53 + 2)]),
        ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53)]),
        ({"type": "number", "minimum": -FLOAT32, "maximum": FLOAT32}, ["1.5", "-3"], ["1e39"]),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, ["1"], ["0"]),
        ({"type": "string", "format": "phone"}, ['"x"'], ["1"]),
        ({"type": "integer", "format": "date"}, ["1"], ['"x"']),
        ({"propertyNames": {"pattern": "^[a-z]$"}, "type": "object"}, ['{"a": 1}'], ['{"A": 1}']),
        (
            {"propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "null"}},
            ['{"a": null}', "{}"],
            ['{"b": null}', '{"a": 1}'],
        ),
        ({"const": 2**53}, [str(2**53)], [str(2**53 - 1)]),
        ({"type": "string", "x-guidance": {"lenient": True}}, ['"a"'], ["1"]),
    ],
)  # fmt: skip
def test_a_text_follows_a_schema_only_if_it_is_valid(vocabulary, schema, valid, not_valid):
    for text in valid:
        assert follows(vocabulary, schema, text), text
    for text in not_valid:
        assert not follows(vocabulary, schema, text), text


@pytest.mark.parametrize(
    "schema, said",
    [
        ({"const": 2**53 + 1}, "response_format.const is 9007199254740993, but"),
        ({"properties": {"id": {"enum": [1, 2**64]}}}, "properties.id.enum[1] is 1844674"),
        ({"const": {"a": [1.2345678901234567]}}, "const.a[0] is 1.2345678901234567"),
        ({"const": -(2**63)}, "const is -9223372036854775808"),  # llguidance ends the process
        ({"type": "integer", "minimum": 2**64}, "minimum is 18446744073709551616, but only"),
        ({"type": "integer", "maximum": -(2**63)}, "maximum is -9223372036854775808"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"oneOf": [{"type": "object"}, {"required": ["a"]}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)"}, "look-ahead"),
        ({"$ref": "#/$defs/none"}, "none"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(vocabulary, schema, said):
    with pytest.raises(ApiError) as refused:
        matcher_of(vocabulary, grammar_of(schema))
    assert refused.value.status == 400 and refused.value.param == "response_format"
    assert said in refused.value.message


def test_white_space_ends(vocabulary):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3}
    for seed in range(5):
        text = drawn(matcher_of(vocabulary, grammar_of(schema)), random.Random(seed), white=True)
        json.loads(text)
        assert max(map(len, re.findall(r"\s+", text)), default=0) <= 65


# --- tokens, thoughts and calls


def test_a_special_token_is_no_part_of_a_string():
    tokenizer = MarkedBytes(["<|mark|>"])
    grammar = AnswerGrammar(tokenizer.special_tokens).schema({"type": "string"}, "response_format")
    matcher = matcher_of(GrammarVocabulary(tokenizer), grammar)
    assert matcher.accept(ord('"'))
    assert ord("<") in tokens_allowed(matcher, tokenizer)
    assert 256 not in tokens_allowed(matcher, tokenizer)


TEMPLATE = "<think></think> <tool_call>"


@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")], ids=["letters", "tokens"])
@pytest.mark.parametrize("opened", [False, True], ids=["by the model", "by the template"])
def test_an_answer_begins_after_the_thoughts(marks, opened):
    tokenizer, format_ = MarkedBytes(marks), MessageFormat.of(TEMPLATE)
    end = "<|assistant|>\n<think>\n" if opened else "<|assistant|>\n"
    answer = AnswerGrammar(tokenizer.special_tokens, format_, end)
    grammar = answer.schema({"const": [True]}, "response_format")
    matcher = matcher_of(GrammarVocabulary(tokenizer), grammar)
    assert (ord("[") in tokens_allowed(matcher, tokenizer)) and 0 not in tokens_allowed(matcher)
    begin, close = ([256], [257]) if marks else (b"<think>", b"</think>")
    for token in [*(() if opened else begin), *b"Hm, [1", *close]:
        assert token in tokens_allowed(matcher, tokenizer) and matcher.accept(token)
    assert drawn(matcher, random.Random(0), tokenizer) == "[true]"


@pytest.mark.parametrize(
    "template, end",
    [(TEMPLATE, "<|assistant|>\n<think>\n\n</think>\n\n"), ("", "<|assistant|>\n")],
    ids=["closed by the template", "a model without thoughts"],
)
def test_an_answer_without_thoughts_begins_at_once(vocabulary, template, end):
    answer = AnswerGrammar(BYTES.special_tokens, MessageFormat.of(template), end)
    matcher = matcher_of(vocabulary, answer.schema({"const": [True]}, "response_format"))
    assert tokens_allowed(matcher) == [ord("[")]


def test_a_mark_of_thoughts_that_is_a_token_counts_as_special():
    class Marked(MarkedBytes):
        def token_id(self, text):
            return {"<think>": 256, "</think>": 257}.get(text)

    tokenizer = Marked(["<think>", "</think>"])
    tokenizer.special_tokens = ByteTokenizer.special_tokens
    vocabulary = GrammarVocabulary(tokenizer, ("<think>", "</think>"))
    assert vocabulary.special_tokens == {0: "\0", 256: "<think>", 257: "</think>"}
    answer = AnswerGrammar(vocabulary.special_tokens, MessageFormat.of(TEMPLATE), "<think>")
    matcher = matcher_of(vocabulary, answer.schema({"type": "string"}, "response_format"))
    assert {ord("a"), 257} <= set(tokens_allowed(matcher, tokenizer)) and matcher.accept(257)
    assert matcher.accept(ord('"')) and 257 not in tokens_allowed(matcher, tokenizer)


def test_harmony_thinks_first_and_answers_in_its_final_channel():
    format_ = MessageFormat.of("", "harmony")
    tokenizer = MarkedBytes(format_.style.visible_tokens)
    answer = AnswerGrammar(tokenizer.special_tokens, format_, "<|start|>assistant")
    grammar = answer.schema({"const": [True]}, "response_format")
    text = drawn(matcher_of(GrammarVocabulary(tokenizer), grammar), random.Random(0), tokenizer)
    begin, end = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>[true]"
    assert text.startswith(begin) and text.endswith(f"<|end|><|start|>assistant{end}")


TREE = {
    "type": "object",
    "properties": {"v": {"$ref": "#/$defs/V"}, "next": {"$ref": "#"}},
    "required": ["v"],
    "additionalProperties": False,
    "$defs": {"V": {"enum": ["x", "y"]}},
}
OTHER = {
    "type": "object",
    "properties": {"v": {"$ref": "#/$defs/V"}, "w": {"$ref": "#/definitions/W"}},
    "required": ["v", "w"],
    "additionalProperties": False,
    "$defs": {"V": {"type": "integer"}},
    "definitions": {"W": {"type": "null"}},
}
SCHEMAS = {"tree": TREE, "other": OTHER}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


@pytest.mark.parametrize(
    "name, special",
    # Random letters never write the mark that ends harmony's thoughts.
    [
        (name, special)
        for name in FORMATS
        for special in (True, False)
        if special or name != "harmony"
    ],
)
def test_a_call_that_is_forced_is_read_in_each_format(name, special):
    format_ = MessageFormat.of("", name)
    tokenizer = MarkedBytes(format_.style.visible_tokens if special else ())
    vocabulary, called = GrammarVocabulary(tokenizer), set()
    for seed in range(6):
        asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True}
        choice = read_tools(JsonFields(asked))
        grammar = AnswerGrammar(tokenizer.special_tokens, format_).calls(choice)
        text = drawn(matcher_of(vocabulary, grammar), random.Random(seed), tokenizer)
        parser, parts = format_.parser(choice), MessageParts()
        parts.add([*parser.feed(text), *parser.finish()])
        assert parts.calls and not parts.content, text
        for call in parts.calls:
            jsonschema.Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))
            called.add(call.name)
    assert called == {"tree", "other"}


def test_a_named_tool_is_called_once():
    choice = {"type": "function", "function": {"name": "other"}}
    choice = read_tools(JsonFields({"tools": TOOLS, "tool_choice": choice}))
    format_ = MessageFormat.of("")
    for seed in range(3):
        grammar = AnswerGrammar(BYTES.special_tokens, format_).calls(choice)
        text = drawn(matcher_of(GrammarVocabulary(BYTES), grammar), random.Random(seed))
        assert text.count("<tool_call>") == 1 and '"other"' in text
