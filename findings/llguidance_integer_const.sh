#!/usr/bin/env bash
# llguidance holds an integer `const` or `enum` of a JSON schema as a float64, and so asks for another number.
#
# Seen with llguidance 1.9.1. The grammar of {"const": 9007199254740993} (2**53 + 1) accepts 9007199254740992 and not
# the number of the schema. Tokens that are generated under this grammar are valid JSON that fails the schema. Python's
# jsonschema compares integers exactly. Identifiers of 64 bits, as databases have them, are affected.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q llguidance==1.9.1
"$work/venv/bin/python" - <<'PY'
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def accepts(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


exact = 2**53 + 1
for schema in ({"const": exact}, {"enum": [exact]}):
    found = {number: accepts(schema, str(number)) for number in (exact, exact - 1)}
    print(schema, found)
    assert found == {exact: False, exact - 1: True}, found
PY
