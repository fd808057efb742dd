"""A JSON object whose fields are read by their types; a field that is null is missing."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxattn.server.http.errors import ApiError, bad


class JsonFields:
    """The fields of a request, or of an object in it.

    Every reader raises ApiError 400 with the field's name where a value does not fit.

    Args:
        values: what was sent.
        where: the object's own name, before its fields' names.
    """

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        self.values, self.where = values, where

    def name(self, field: str) -> str:
        """The field with the objects that it lies in."""
        return f"{self.where}.{field}" if self.where else field

    def wrong(self, field: str, wanted: str) -> ApiError:
        got = reprlib.repr(self.values.get(field))
        return bad(self.name(field), f"{self.name(field)} must be {wanted}; got {got}")

    def given(self, field: str) -> bool:
        """Whether it has a value."""
        return self.values.get(field) is not None

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def text(self, field: str, most: int | None = None) -> str | None:
        """A text of `most` characters at most."""
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(field, "a text")
        if most is not None and len(value) > most:
            raise self.wrong(field, f"at most {most:,} characters, and has {len(value):,}")
        return value

    def chosen(self, field: str, choices: Sequence[str]) -> str | None:
        """One of some words."""
        value = self.values.get(field)
        if value is not None and value not in choices:
            raise self.wrong(field, f"one of {', '.join(choices)}")
        return value

    def integer(self, field: str, least: int, most: int) -> int | None:
        value = self.values.get(field)
        if value is None:
            return None
        if not is_integer(value) or not least <= value <= most:
            raise self.wrong(field, f"an integer from {least:,} to {most:,}")
        return value

    def number(self, field: str, least: float, most: float) -> float | None:
        value = self.values.get(field)
        if value is None:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not least <= value <= most:
            raise self.wrong(field, f"a number from {least:g} to {most:g}")
        return float(value)

    def texts(self, field: str, most: int, characters: int) -> tuple[str, ...]:
        """One text or a list of `most` at most, none of them empty."""
        value = self.values.get(field)
        found = [] if value is None else value if isinstance(value, list) else [value]
        fits = len(found) <= most and all(
            isinstance(each, str) and 0 < len(each) <= characters for each in found
        )
        if not fits:
            wanted = f"a text of 1 to {characters} characters, or a list of at most {most}"
            raise self.wrong(field, wanted)
        return tuple(found)

    def integers(self, field: str, most: int, largest: int) -> tuple[int, ...]:
        """A list of at most `most` integers from 0 to `largest`."""
        value = self.values.get(field)
        if value is None:
            return ()
        fits = isinstance(value, list) and len(value) <= most
        if not fits or not all(is_integer(each) and 0 <= each <= largest for each in value):
            raise self.wrong(field, f"a list of at most {most:,} integers from 0 to {largest:,}")
        return tuple(value)

    def object(self, field: str) -> "JsonFields":
        """The fields of an object; of none where it is missing."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(field, "an object")
        return JsonFields(value or {}, self.name(field))

    def objects(self, field: str, most: int) -> list[dict[str, Any]]:
        """A list of at most `most` objects."""
        value = self.values.get(field)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(field, f"a list of at most {most:,} objects")
        if not all(isinstance(each, dict) for each in value):
            raise self.wrong(field, "a list of objects")
        return value


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
