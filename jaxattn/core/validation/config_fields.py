"""Rules for the fields of configurations, given in the fields' types.

    @dataclasses.dataclass(frozen=True)
    class Size:
        width: Annotated[int, Integer(1, 4096)]
        scale: Annotated[float, Number(0, 100)] = 1.0

        def __post_init__(self) -> None:
            check_fields(self)

A rule returns the value as a plain int, float, bool or str, or raises ValueError with the field's
name. Each number has a minimum and a maximum, so no rule accepts NaN or infinity.
"""

import dataclasses
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxattn.core.validation.array_checks import is_integer

type Rule = Callable[[str, Any], Any]


def short_repr(value: Any) -> str:
    """Returns the value as Python prints it, shortened if it is long."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "an integer of thousands of digits"


@dataclasses.dataclass(frozen=True)
class Integer:
    """Python or NumPy integers in [least, most], multiples of `multiple_of`; bools do not count."""

    least: int
    most: int
    multiple_of: int = 1

    def __call__(self, name: str, value: Any) -> int:
        fits = is_integer(value) and self.least <= value <= self.most
        if not fits or value % self.multiple_of:
            kind = "an integer" if self.multiple_of == 1 else f"a multiple of {self.multiple_of}"
            raise ValueError(
                f"{name} must be {kind} from {self.least:,} to {self.most:,}; got "
                f"{short_repr(value)}"
            )
        return int(value)


@dataclasses.dataclass(frozen=True)
class Number:
    """Python or NumPy numbers in [least, most], or in (least, most] if `open_below`."""

    least: float
    most: float
    open_below: bool = False

    def __call__(self, name: str, value: Any) -> float:
        number = is_integer(value) or isinstance(value, float | np.floating)
        # Compared before the conversion to float, because an integer may be too large for one.
        if not number or not self._covers(value):
            below = f"above {self.least:g} and at most" if self.open_below else f"{self.least:g} to"
            words = f"a number {below}" if self.open_below else f"a number from {below}"
            raise ValueError(f"{name} must be {words} {self.most:g}; got {short_repr(value)}")
        return float(value)

    def _covers(self, value: Any) -> bool:
        above = value > self.least if self.open_below else value >= self.least
        return bool(above and value <= self.most)


@dataclasses.dataclass(frozen=True)
class Flag:
    """True or False, of Python or NumPy; numbers and texts are not accepted."""

    def __call__(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name} must be true or false; got {short_repr(value)}")
        return bool(value)


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of several texts."""

    texts: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.texts:
            raise ValueError(f"{name} must be one of {self.texts}; got {short_repr(value)}")
        return value


@dataclasses.dataclass(frozen=True)
class Text:
    """Texts of `least` to `most` characters; None means no bound."""

    most: int | None = None
    least: int = 0

    def __call__(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) < self.least:
            raise ValueError(f"{name} must be a string; got {short_repr(value)}")
        if self.most is not None and len(value) > self.most:
            raise ValueError(
                f"{name} must have at most {self.most:,} characters, but has {len(value):,}; got "
                f"{short_repr(value)}"
            )
        return value


@dataclasses.dataclass(frozen=True)
class ListOf[T]:
    """Lists of `least` to `most` items that a rule accepts.

    Attributes:
        single: Whether a single item is accepted instead of a list of one.
    """

    item: Callable[[str, Any], T]
    most: float = math.inf
    least: int = 0
    single: bool = False

    def __call__(self, name: str, value: Any) -> tuple[T, ...]:
        items = [value] if self.single and not isinstance(value, list) else value
        if not isinstance(items, list) or not self.least <= len(items) <= self.most:
            raise ValueError(
                f"{name} must be a list of {self.least:,} to {self.most:,} items; got "
                f"{short_repr(value)}"
            )
        return tuple(self.item(name, item) for item in items)


def json_object(name: str, value: Any) -> dict[str, Any]:
    """Accepts a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object; got {short_repr(value)}")
    return value


@dataclasses.dataclass(frozen=True)
class NestedConfig:
    """An instance of another configuration class."""

    config: type

    def __call__(self, name: str, value: Any) -> Any:
        if not isinstance(value, self.config):
            raise ValueError(f"{name} must be a {self.config.__name__}; got {short_repr(value)}")
        return value

    def from_dict(self, name: str, value: Any) -> Any:
        """Converts an object of config.json to the configuration."""
        return value if isinstance(value, self.config) else from_dict(self.config, value, name)


@dataclasses.dataclass(frozen=True)
class Nullable:
    """None, or a value that another rule accepts."""

    rule: Any

    def __call__(self, name: str, value: Any) -> Any:
        return None if value is None else self.rule(name, value)

    def from_dict(self, name: str, value: Any) -> Any:
        return None if value is None else _convert(self.rule, name, value)


def rules(config: type) -> dict[str, Rule]:
    """Returns the rule of each field; a field whose type has none is a mistake in the class."""
    found = {}
    for field in dataclasses.fields(config):
        if not getattr(field.type, "__metadata__", ()):
            raise TypeError(f"{config.__name__}.{field.name}: the type has no validation rule")
        found[field.name] = field.type.__metadata__[0]  # type: ignore[union-attr]
    return found


def check_fields(config: Any) -> None:
    """Checks each field of a frozen dataclass, and stores it as a plain Python value.

    Raises:
        ValueError: A field does not fit; the message names it and its value.
    """
    kind = type(config)
    for name, rule in rules(kind).items():
        value = rule(f"{kind.__name__}.{name}", getattr(config, name))
        object.__setattr__(config, name, value)


def from_dict(config: Any, values: Any, path: str = "") -> Any:
    """Creates a configuration from the plain values of a config.json.

    Args:
        config: Its class, whose fields have rules.
        values: Maps names to values; an object represents a nested configuration.
        path: The path of `values` in the file, such as "rope.yarn"; messages begin with it.

    Raises:
        ValueError: A field is unknown, missing or does not fit.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{path or 'the configuration'} must be an object with the fields of "
            f"{config.__name__}; got {short_repr(values)}"
        )
    prefix, known = f"{path}." if path else "", rules(config)
    unknown = [f"{prefix}{name}" for name in values if name not in known]
    if unknown:
        raise ValueError(
            f"unknown field {short_list(unknown)}; known fields are {', '.join(known)}"
        )
    for field in dataclasses.fields(config):
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise ValueError(f"missing field {prefix}{field.name}")
    return config(
        **{name: _convert(known[name], prefix + name, value) for name, value in values.items()}
    )


def _convert(rule: Any, name: str, value: Any) -> Any:
    # Call the rule with the path in the file; the class would name itself instead.
    return rule.from_dict(name, value) if hasattr(rule, "from_dict") else rule(name, value)


def short_list(names: list[str], most: int = 4, width: int = 100) -> str:
    """Returns the first few names, each shortened to `width`, and the number of the others."""
    listed = ", ".join(name[:width] for name in names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most:,} more"
