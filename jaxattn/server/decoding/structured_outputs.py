"""Structured outputs: JSON, JSON of a schema, a regular expression, or tool calls."""

from typing import Any

import llguidance
import orjson
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from jaxattn.server.decoding.grammars.answer_grammar import AnswerGrammar
from jaxattn.server.decoding.sampling_params import ABLE
from jaxattn.server.decoding.tool_choice import ToolChoice
from jaxattn.server.http.errors import bad
from jaxattn.server.http.json_fields import JsonFields

MOST_CHARACTERS = 2**16
NO_TOOLS = ToolChoice()
KINDS = ("text", "json_object", "json_schema", "regex")
# The fields of vLLM's `structured_outputs`. Older requests call each of them `guided_...`.
STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
MOST_TEXTS = 1024


def read_grammar(
    fields: JsonFields,
    answer: AnswerGrammar,
    choice: ToolChoice = NO_TOOLS,
) -> tuple[str, str] | None:
    """Returns the answer's grammar and the field that asks for it, or None.

    The field is `response_format`, `tool_choice`, or vLLM's `structured_outputs`.

    Args:
        answer: The writer of the grammar.
        choice: The request's tools and tool choice.

    Raises:
        ApiError: 400 with the field's name.
    """
    format_ = fields.object("response_format")
    kind = format_.chosen("type", KINDS) or "text"
    requires_tool_call = choice.mode == "required"
    structured = _structured(fields)
    constraints = [structured.where] if structured is not None else []
    constraints += ["response_format"] * (kind != "text") + ["tool_choice"] * requires_tool_call
    if not constraints:
        return None
    param = "tool_choice" if requires_tool_call else constraints[0]
    if "grammar" not in ABLE:
        raise bad(param, f"{param} needs a grammar, but this engine does not support grammars")
    if len(constraints) > 1:
        raise bad(
            param,
            f"{constraints[0]} and {constraints[-1]} both constrain the answer; give only one of "
            "them",
        )
    if structured is not None:
        grammar = _of_structured(structured, answer)
    else:
        grammar = answer.calls(choice) if requires_tool_call else _of_format(format_, kind, answer)
    if len(grammar) > MOST_CHARACTERS:
        raise bad(
            param,
            f"{param} needs a grammar of more than {MOST_CHARACTERS:,} characters; simplify it",
        )
    return llguidance.grammar_from("lark", grammar), param


def _of_format(fields: JsonFields, kind: str, answer: AnswerGrammar) -> str:
    if kind == "regex":
        pattern = fields.text("pattern", MOST_CHARACTERS)
        if not pattern:
            raise fields.wrong("pattern", "a nonempty regular expression")
        return answer.pattern(pattern)
    schema: dict[str, Any] = {"type": "object"}
    if kind == "json_schema":
        given = fields.object("json_schema")
        if not given.given("schema"):
            raise given.wrong("schema", "a JSON schema")
        schema = dict(given.object("schema").values)
    return answer.schema(schema, fields.where)


def _structured(fields: JsonFields) -> JsonFields | None:
    """Returns vLLM's `structured_outputs`, or the same built from an older field, or None."""
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
            f"{found.where} must have exactly one of {', '.join(STRUCTURED)}; got "
            f"{given or 'none'}",
        )
    return found


def _of_structured(fields: JsonFields, answer: AnswerGrammar) -> str:
    """Returns the grammar of the constraint that `_structured` has found."""
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
            raise fields.wrong(
                "json", f"a JSON schema, but it is not valid JSON ({error})"
            ) from None
    if schema is None:
        if not fields.flag("json_object"):
            raise fields.wrong("json_object", "true")
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise fields.wrong("json", "a JSON schema")
    return answer.schema(schema, fields.where)


def _lark(text: str, param: str) -> str:
    """Returns a grammar in Lark; converts it if it is written in GBNF."""
    try:
        return any_to_lark(text)
    except (GbnfToLarkError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        raise bad(param, f"{param} has an invalid grammar: {said}") from error
