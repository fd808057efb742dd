"""The fields of a JSON object by their types: what a folder's files and a request's body hold.

A reader of one kind of object derives from FieldReader, and says which error a refusal is and how
a message names a field. The rules of config_fields.py check the values.
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any, Self

from jaxattn.core.validation.config_fields import (
    Flag,
    Integer,
    ListOf,
    Number,
    Text,
    json_object,
    short_repr,
)

_OWN = object()


class FieldReader(abc.ABC):
    """The fields of a JSON object.

    Args:
        values: as they were sent or stored.
        where: the object's own place, which messages name before the field.
    """

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        self.values, self.where = values, where

    @abc.abstractmethod
    def error(self, field: str, message: str) -> Exception:
        """What is raised for a field."""

    def name(self, field: str) -> str:
        """The field with its place, for messages."""
        return f"{self.where}: {field}" if self.where else field

    def refused(self, field: str, rule: str, value: Any = _OWN) -> Exception:
        """The error of a field that does not follow a rule, such as "must be a text"."""
        got = short_repr(self.values.get(field) if value is _OWN else value)
        return self.error(field, f"{self.name(field)} {rule}; got {got}")

    def wrong(self, field: str, wanted: str) -> Exception:
        return self.refused(field, f"must be {wanted}")

    def checked[T](
        self, field: str, value: Any, rule: Callable[[str, Any], T], wanted: str | None = None
    ) -> T:
        """The value of a field, as a rule returns it.

        Args:
            rule: takes the field's name and the value.
            wanted: what the field must be, in place of the rule's words.
        """
        try:
            return rule(self.name(field), value)
        except ValueError as refusal:
            if wanted is None:
                raise self.error(field, str(refusal)) from None
            raise self.refused(field, f"must be {wanted}", value) from None

    def of(self, field: str, values: Mapping[str, Any]) -> Self:
        """The reader of an object that a field has."""
        return type(self)(values, self.name(field))


class OptionalFields(FieldReader):
    """Fields that may all be missing; one that is null is missing."""

    def optional[T](
        self, field: str, rule: Callable[[str, Any], T], wanted: str | None = None
    ) -> T | None:
        """What the rule returns, or None."""
        value = self.values.get(field)
        return None if value is None else self.checked(field, value, rule, wanted)

    def given(self, field: str) -> bool:
        """Whether it has a value."""
        return self.values.get(field) is not None

    def flag(self, field: str) -> bool | None:
        return self.optional(field, Flag())

    def text(self, field: str, most: int | None = None) -> str | None:
        """A text of `most` characters at most."""
        return self.optional(field, Text(most))

    def integer(self, field: str, least: int, most: int) -> int | None:
        return self.optional(field, Integer(least, most))

    def number(
        self, field: str, least: float, most: float, wanted: str | None = None
    ) -> float | None:
        return self.optional(field, Number(least, most), wanted)

    def items[T](self, field: str, items: ListOf[T], wanted: str | None = None) -> tuple[T, ...]:
        """A list; an empty one where the field is missing."""
        return self.optional(field, items, wanted) or ()

    def object(self, field: str) -> Self:
        """The fields of an object; of none where it is missing."""
        return self.of(field, self.optional(field, json_object) or {})
