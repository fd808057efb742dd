#!/usr/bin/env bash
# A grammar that llguidance makes from a JSON schema accepts an object's properties in one order only.
#
# Seen with llguidance 1.9.1. JSON objects have no order, and Python's jsonschema accepts every order. The grammar
# accepts declared properties in the order of the schema, and undeclared ones only behind all declared ones. A model
# that was trained to write another order is forced to leave out an optional property which it reaches too late. The
# order of `properties` in a schema therefore matters for quality.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q llguidance==1.9.1 jsonschema==4.26.0
"$work/venv/bin/python" - <<'PY'
import json

import jsonschema
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
number = {"type": "integer"}
schema = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a"]}


def accepts(text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


expected = {'{"a":1,"b":2}': True, '{"b":2,"a":1}': False, '{"z":3,"a":1}': False, '{"a":1,"z":3}': True}
for text, wanted in expected.items():
    jsonschema.validate(json.loads(text), schema)
    print(text, accepts(text))
    assert accepts(text) == wanted, text
PY
