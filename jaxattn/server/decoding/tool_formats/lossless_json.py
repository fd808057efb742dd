"""Validation of a model's JSON that keeps the text as it was written.

Numbers keep all of their digits. Reading 2**64 + 1 into a float and writing it again would change
the number.
"""

import dataclasses
import json
import re
from typing import Any, NoReturn

from jaxattn.server.decoding.tool_formats.text_cursor import Unreadable

_SPACE = re.compile(r"[ \t\n\r]*")
PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


class _Number(str):
    """A number's digits."""


class _Integer(_Number):
    """An integer's digits."""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


# Numbers stay text, so no number has too many digits or too large an exponent.
_DECODER = json.JSONDecoder(parse_int=_Integer, parse_float=_Number, parse_constant=_no_constant)


quoted = json.encoder.encode_basestring  # encodes a text as a JSON string


def parsed(text: str) -> Any:
    """Parses a JSON text. Numbers become strings of their digits.

    Raises:
        ValueError: If the text is not JSON.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def compacted(text: str) -> str:
    """Returns a JSON text without white space outside of strings."""
    parts, at = list[str](), 0
    while (begin := text.find('"', at)) >= 0:
        parts.append("".join(text[at:begin].split()))
        _, at = _DECODER.raw_decode(text, begin)
        parts.append(text[begin:at])
    return "".join([*parts, *text[at:].split()])


def object_text(text: str) -> str:
    """Returns a stripped text after checking that it is a JSON object; `{}` for an empty text.

    Raises:
        Unreadable: If the text is not a JSON object.
    """
    text = text.strip() or "{}"
    if not text.startswith("{"):
        raise Unreadable
    try:
        parsed(text)
    except ValueError:
        raise Unreadable from None
    return text


def object_of(values: dict[str, str]) -> str:
    """Returns a JSON object, given the JSON of its values."""
    pairs = (f"{quoted(key)}:{value}" for key, value in values.items())
    return "{" + ",".join(pairs) + "}"


def literal(text: str) -> str:
    """Returns a JSON text without white space; also accepts Python's `True`, `False` and `None`.

    Raises:
        Unreadable: If the text is not JSON.
    """
    text = text.strip()
    text = PYTHON_LITERALS.get(text, text)
    try:
        parsed(text)
    except ValueError:
        raise Unreadable from None
    return compacted(text)


@dataclasses.dataclass(frozen=True, slots=True)
class JsonValue:
    """A JSON value and its source text."""

    value: Any
    text: str

    @property
    def string(self) -> str:
        """The value, which must be a string.

        Raises:
            Unreadable: If it is not a string.
        """
        if not isinstance(self.value, str) or isinstance(self.value, _Number):
            raise Unreadable
        return self.value


def members(text: str) -> dict[str, JsonValue]:
    """Returns the members of a JSON object.

    Raises:
        Unreadable: If the text is not an object, or has two members with the same name.
    """
    found: dict[str, JsonValue] = {}
    at = _space(text, 1)
    try:
        if text[0] != "{":
            raise Unreadable
        while text[at] != "}":
            key, at = _value(text, at)
            at = _space(text, at)
            if text[at] != ":" or key.string in found:
                raise Unreadable
            found[key.string], at = _value(text, _space(text, at + 1))
            at = _next(text, at)
    except (ValueError, IndexError, RecursionError):
        raise Unreadable from None
    return found


def _value(text: str, at: int) -> tuple[JsonValue, int]:
    value, end = _DECODER.raw_decode(text, at)
    return JsonValue(value, text[at:end]), end


def _next(text: str, at: int) -> int:
    """Returns the position of the next member, or of the closing bracket."""
    at = _space(text, at)
    if text[at] == ",":
        at = _space(text, at + 1)
        if text[at] != "}":
            return at
    elif text[at] == "}":
        return at
    raise Unreadable


def _space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def json_type(text: str) -> str | None:
    """Returns the JSON type of a text; None if it is not JSON."""
    try:
        value = parsed(text)
    except ValueError:
        return None
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case _Integer():
            return "integer"
        case _Number():
            return "number"
        case str():
            return "string"
    return "object" if isinstance(value, dict) else "array"
