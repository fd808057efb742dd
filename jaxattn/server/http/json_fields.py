"""The fields of a request's body; a field that is null is missing."""

from collections.abc import Sequence
from typing import Any

from jaxattn.core.validation.config_fields import Integer, ListOf, OneOf, Text, json_object
from jaxattn.core.validation.field_reader import OptionalFields
from jaxattn.server.http.errors import ApiError, bad


class JsonFields(OptionalFields):
    """The fields of a request, or of an object in it.

    Every reader raises ApiError 400 with the field's name where a value does not fit.
    """

    def name(self, field: str) -> str:
        """The field with the objects that it lies in."""
        return f"{self.where}.{field}" if self.where else field

    def error(self, field: str, message: str) -> ApiError:
        return bad(self.name(field), message)

    def flag(self, field: str, default: bool = False) -> bool:
        value = super().flag(field)
        return default if value is None else value

    def chosen(self, field: str, choices: Sequence[str]) -> str | None:
        """One of some words."""
        return self.optional(field, OneOf(tuple(choices)), f"one of {', '.join(choices)}")

    def texts(self, field: str, most: int, characters: int) -> tuple[str, ...]:
        """One text or a list of `most` at most, none of them empty."""
        wanted = f"a text of 1 to {characters} characters, or a list of at most {most}"
        return self.items(field, ListOf(Text(characters, least=1), most, single=True), wanted)

    def integers(self, field: str, most: int, largest: int) -> tuple[int, ...]:
        """A list of at most `most` integers from 0 to `largest`."""
        wanted = f"a list of at most {most:,} integers from 0 to {largest:,}"
        return self.items(field, ListOf(Integer(0, largest), most), wanted)

    def objects(self, field: str, most: int) -> list[dict[str, Any]]:
        """A list of at most `most` objects."""
        wanted = f"a list of at most {most:,} objects"
        return list(self.items(field, ListOf(json_object, most), wanted))
