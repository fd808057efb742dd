"""Each answer that a schema rules is valid by it: schemas of four kinds, and those that once failed."""

import json
import random
import subprocess
import sys

import jsonschema
import llguidance
import numpy as np
import pytest

from jaxattn.server.decoding.grammars.answer_grammar import AnswerGrammar
from jaxattn.server.decoding.structured_outputs import GrammarVocabulary
from jaxattn.server.http.errors import ApiError
from jaxattn.text import ByteTokenizer
from tests.helpers.schema_cases import DIALECTS, FLOAT32

CLOSING = frozenset(b'"}],\0')
MOST = 6000  # bytes


@pytest.fixture(scope="module")
def vocabulary():
    return GrammarVocabulary(ByteTokenizer())


def answered(vocabulary, schema, luck, more_white=False):
    """A random answer that the schema's grammar allows."""
    text = AnswerGrammar(ByteTokenizer.special_tokens).schema(schema, "response_format")
    grammar = llguidance.grammar_from("lark", text)
    [matcher] = vocabulary.matchers(grammar, "response_format", 1)
    found, words = bytearray(), np.zeros(8, np.int32)
    while len(found) < MOST:
        matcher.mask(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        assert allowed, (matcher.error and matcher.error.message, bytes(found))
        if not more_white:
            allowed = [token for token in allowed if token not in b" \t\r\n"] or allowed
        ends = [token for token in allowed if token in CLOSING]
        # Long texts come to an end: strings and lists are closed where they may be.
        close = ends and luck.random() < (0.3 if len(found) < 300 else 0.97)
        token = luck.choice(ends if close else allowed)
        more = matcher.accept(token)
        found.append(token)
        if not more:
            break
    return bytes(found).removesuffix(b"\0").decode()


def check(vocabulary, dialect, seed):
    luck = random.Random(seed)
    schema = DIALECTS[dialect](luck)
    text = answered(vocabulary, schema, luck)
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
