"""Typed access to the fields of a JSON object, from a folder's files or a request's body.

A reader of one kind of object derives from FieldReader, and defines the class of its errors and how
messages name a field. The rules of config_fields.py check the values.
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
        values: The values as sent or stored.
        where: The object's own place, which messages name before the field.
    """

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        self.values, self.where = values, where

    @abc.abstractmethod
    def error(self, field: str, message: str) -> Exception:
        """Returns the exception to raise for a field."""

    def name(self, field: str) -> str:
        """Returns the field with its place, for messages."""
        return f"{self.where}: {field}" if self.where else field

    def refused(self, field: str, rule: str, value: Any = _OWN) -> Exception:
        """Returns the error for a field that violates a rule, such as "must be a string"."""
        got = short_repr(self.values.get(field) if value is _OWN else value)
        return self.error(field, f"{self.name(field)} {rule}; got {got}")

    def wrong(self, field: str, expected: str) -> Exception:
        return self.refused(field, f"must be {expected}")

    def checked[T](
        self, field: str, value: Any, rule: Callable[[str, Any], T], expected: str | None = None
    ) -> T:
        """Returns the value of a field, as a rule returns it.

        Args:
            rule: Function of the field's name and the value.
            expected: Description of valid values, instead of the rule's.
        """
        try:
            return rule(self.name(field), value)
        except ValueError as refusal:
            if expected is None:
                raise self.error(field, str(refusal)) from None
            raise self.refused(field, f"must be {expected}", value) from None

    def of(self, field: str, values: Mapping[str, Any]) -> Self:
        """Returns the reader of an object inside a field."""
        return type(self)(values, self.name(field))


class OptionalFields(FieldReader):
    """Fields that may all be missing; null counts as missing."""

    def optional[T](
        self, field: str, rule: Callable[[str, Any], T], expected: str | None = None
    ) -> T | None:
        """Returns the result of the rule, or None."""
        value = self.values.get(field)
        return None if value is None else self.checked(field, value, rule, expected)

    def given(self, field: str) -> bool:
        """Returns whether the field has a value."""
        return self.values.get(field) is not None

    def flag(self, field: str) -> bool | None:
        return self.optional(field, Flag())

    def text(self, field: str, most: int | None = None) -> str | None:
        """Returns a text of at most `most` characters."""
        return self.optional(field, Text(most))

    def integer(self, field: str, least: int, most: int) -> int | None:
        return self.optional(field, Integer(least, most))

    def number(
        self, field: str, least: float, most: float, expected: str | None = None
    ) -> float | None:
        return self.optional(field, Number(least, most), expected)

    def items[T](self, field: str, items: ListOf[T], expected: str | None = None) -> tuple[T, ...]:
        """Returns a list, which is empty if the field is missing."""
        return self.optional(field, items, expected) or ()

    def object(self, field: str) -> Self:
        """Returns the fields of an object, which is empty if the field is missing."""
        return self.of(field, self.optional(field, json_object) or {})
