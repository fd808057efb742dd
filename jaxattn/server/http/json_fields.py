"""Typed access to the fields of a request's body. A null field counts as missing."""

from collections.abc import Sequence
from typing import Any

from jaxattn.core.validation.config_fields import Integer, ListOf, OneOf, Text, json_object
from jaxattn.core.validation.field_reader import OptionalFields
from jaxattn.server.http.errors import ApiError, bad


class JsonFields(OptionalFields):
    """The fields of a request, or of an object inside it.

    Every method that reads a field raises ApiError 400 with the field's name for an invalid value.
    """

    def name(self, field: str) -> str:
        """Returns the dotted path of a field."""
        return f"{self.where}.{field}" if self.where else field

    def error(self, field: str, message: str) -> ApiError:
        return bad(self.name(field), message)

    def flag(self, field: str, default: bool = False) -> bool:
        value = super().flag(field)
        return default if value is None else value

    def chosen(self, field: str, choices: Sequence[str]) -> str | None:
        """Returns a field that must be one of `choices`; None if it is missing."""
        return self.optional(field, OneOf(tuple(choices)), f"one of {', '.join(choices)}")

    def texts(self, field: str, max_items: int, max_characters: int) -> tuple[str, ...]:
        """Returns a field that is a string or a list of at most `max_items` strings, none empty."""
        wanted = (
            f"a string of 1 to {max_characters} characters, or a list of at most {max_items} such "
            "strings"
        )
        return self.items(
            field, ListOf(Text(max_characters, least=1), max_items, single=True), wanted
        )

    def integers(self, field: str, max_items: int, max_value: int) -> tuple[int, ...]:
        """Returns a field that is a list of at most `max_items` integers from 0 to `max_value`."""
        wanted = f"a list of at most {max_items:,} integers from 0 to {max_value:,}"
        return self.items(field, ListOf(Integer(0, max_value), max_items), wanted)

    def objects(self, field: str, max_items: int) -> list[dict[str, Any]]:
        """Returns a field that is a list of at most `max_items` objects."""
        wanted = f"a list of at most {max_items:,} objects"
        return list(self.items(field, ListOf(json_object, max_items), wanted))
