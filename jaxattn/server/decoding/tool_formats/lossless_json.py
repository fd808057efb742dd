"""JSON text of a model that is checked and kept as it was written.

A number keeps its digits, whatever their count: 2**64 + 1 read into a float and written again
would be another number.
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
    raise ValueError(f"{name} is no JSON")


# Numbers stay text: neither the count of digits nor the exponent can be too large.
_DECODER = json.JSONDecoder(parse_int=_Integer, parse_float=_Number, parse_constant=_no_constant)


quoted = json.encoder.encode_basestring  # a text as a string of JSON


def parsed(text: str) -> Any:
    """A JSON text, whose numbers are their digits.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is too deep") from None


def compacted(text: str) -> str:
    """A JSON text without white space outside of strings."""
    parts, at = list[str](), 0
    while (begin := text.find('"', at)) >= 0:
        parts.append("".join(text[at:begin].split()))
        _, at = _DECODER.raw_decode(text, begin)
        parts.append(text[begin:at])
    return "".join([*parts, *text[at:].split()])


def object_text(text: str) -> str:
    """The text of a JSON object; `{}` for none at all.

    Raises:
        Unreadable: it is something else.
    """
    text = text.strip() or "{}"
    if not text.startswith("{"):
        raise Unreadable
    try:
        parsed(text)
    except ValueError:
        raise Unreadable from None
    return text


def literal(text: str) -> str:
    """A text that should be JSON; Python's words for true, false and null are taken for it.

    Raises:
        Unreadable: it is something else.
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
    """A value with the text that it was read from."""

    value: Any
    text: str

    @property
    def string(self) -> str:
        """The value, where it is a string.

        Raises:
            Unreadable: it is none.
        """
        if not isinstance(self.value, str) or isinstance(self.value, _Number):
            raise Unreadable
        return self.value


def members(text: str) -> dict[str, JsonValue]:
    """The members of a JSON object.

    Raises:
        Unreadable: it is no object, or names a member twice.
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
    """The place of the next member, or of the bracket that ends them."""
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
    """The JSON type that a text reads as; None if it is no JSON."""
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
