"""Reading a published config.json: typed fields, and refusals that name them."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from jaxattn.core.numerics.rope import RopeConfig, YarnConfig
from jaxattn.core.validation.config_fields import short_repr


class ConfigError(ValueError):
    """A config.json says what this package cannot run; the message names the field."""


_MISSING = object()
MOST = 2**31 - 1
MOST_EXPERTS = 4096


@dataclasses.dataclass(frozen=True)
class ConfigFields:
    """The fields of a config.json.

    Attributes:
        values: as the file has them.
        where: the file, for messages.
        spelled: how the file spells fields that are read under another name.
    """

    values: Mapping[str, Any]
    where: str
    spelled: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def renamed(self, **spelled: str) -> "ConfigFields":
        """The fields with a family's spelling of some, name -> spelling; that of a field which the
        file has under its own name does not count."""
        other = {n: word for n, word in spelled.items() if word in self.values}
        other = {n: word for n, word in other.items() if n not in self.values}
        own = {n: self.values[word] for n, word in other.items()}
        return ConfigFields({**self.values, **own}, self.where, other)

    def text(self) -> "ConfigFields":
        """The fields of the text model: those of `text_config` too, where there is one. A field
        that both have is the outer one's.

        Raises:
            ConfigError: `text_config` is no object.
        """
        inner = self.values.get("text_config") or {}
        if not isinstance(inner, dict):
            raise self._error("text_config", "must be an object", inner)
        outer = {name: value for name, value in self.values.items() if name != "text_config"}
        return ConfigFields({**inner, **outer}, self.where)

    def integer(
        self, name: str, default: Any = _MISSING, *, least: int = 1, most: int = MOST
    ) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            last = "2**31 - 1" if most == MOST else f"{most:,}"
            raise self._error(name, f"must be an integer from {least} to {last}", value)
        return value

    def experts(self, name: str) -> int:
        """Experts of a layer. Each has tensors of its own, whose names are listed before any file
        is read: a number without bounds would take for ever."""
        return self.integer(name, most=MOST_EXPERTS)

    def maybe_integer(self, name: str) -> int | None:
        """A field that has to be there, with an integer or null."""
        return None if self._get(name, _MISSING) is None else self.integer(name)

    def number(self, name: str, default: Any = _MISSING) -> float:
        value = self._get(name, default)
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not 0 < value <= sys.float_info.max:  # of an int without bounds too
            raise self._error(name, "must be a finite number above 0", value)
        return float(value)

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._error(name, "must be true or false", value)
        return value

    def words(self, name: str, count: int, *allowed: str) -> list[str]:
        """A list of so many of the allowed words."""
        value = self._get(name, _MISSING)
        fits = isinstance(value, list) and len(value) == count
        if not fits or not all(word in allowed for word in value):
            choices = " or ".join(map(short_repr, allowed))
            raise self._error(name, f"must be a list of {count} words, {choices}", value)
        return value

    def require(self, name: str, *allowed: Any, missing: Any = _MISSING) -> None:
        """Refuses a field with another value than those that are implemented.

        A field that is not there has the value `missing`, and the first one without it.
        """
        value = self.values.get(name, allowed[0] if missing is _MISSING else missing)
        if not any(value is each or value == each for each in allowed):
            choices = " or ".join(map(short_repr, allowed))
            raise self._error(name, f"is implemented as {choices} only", value)

    def rotated(self, head_dim: int, default: float = 1.0) -> int:
        """How many dims of a head turn, by `partial_rotary_factor`."""
        nested, _ = self._rope_objects()
        holder = ConfigFields(nested, f"{self.where}: rope_parameters")
        name = "partial_rotary_factor"
        part = (holder if name in nested else self).number(name, default)
        dims = round(part * head_dim)
        if dims != part * head_dim or dims % 2 or dims > head_dim:
            raise self._error(name, f"must give an even part of {head_dim} dims", part)
        return dims

    def _rope_objects(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(rope_parameters, what says the scaling)."""
        nested = self.values.get("rope_parameters") or {}
        scaling = self.values.get("rope_scaling") or nested
        if not isinstance(nested, dict) or not isinstance(scaling, dict):
            raise self._error("rope_scaling", "must be an object or null", scaling)
        return nested, scaling

    def rope(self, dim: int, *, interleaved: bool | None = None) -> RopeConfig:
        """Plain RoPE or YaRN, in the spelling of either time: `rope_scaling` beside `rope_theta`,
        or both in `rope_parameters`.

        Args:
            dim: dims that turn.
            interleaved: their layout; None reads `rope_interleave`, of heads that turn as a whole.
        """
        nested, scaling = self._rope_objects()
        holder = ConfigFields(nested, self.where) if "rope_theta" in nested else self
        base = holder.number("rope_theta", 10000.0)
        if interleaved is None:
            for each in (self, ConfigFields(nested, f"{self.where}: rope_parameters")):
                each.require("partial_rotary_factor", 1.0)
            interleaved = self.flag("rope_interleave", True)
        kind = scaling.get("type", scaling.get("rope_type", "default"))
        if kind in ("default", None):
            return RopeConfig(dim, theta=base, interleaved=interleaved)
        if kind != "yarn":
            raise self._error("rope_scaling.type", "is implemented as 'yarn' only", kind)
        given = ConfigFields(scaling, f"{self.where}: rope_scaling")
        given.require("attention_factor", None)
        given.require("truncate", True)
        mscales = {n: given.number(n) for n in ("mscale", "mscale_all_dim") if scaling.get(n)}
        yarn = YarnConfig(
            factor=given.number("factor"),
            original_max_position_embeddings=given.integer("original_max_position_embeddings"),
            beta_fast=given.number("beta_fast", 32.0),
            beta_slow=given.number("beta_slow", 1.0),
            **mscales,
        )
        return RopeConfig(dim, theta=base, interleaved=interleaved, yarn=yarn)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name, default)
        if value is _MISSING:
            raise ConfigError(f"{self.where}: field {self._word(name)} is missing")
        return value

    def _error(self, name: str, rule: str, value: Any) -> ConfigError:
        return ConfigError(f"{self.where}: {self._word(name)} {rule}; got {short_repr(value)}")

    def _word(self, name: str) -> str:
        return self.spelled.get(name, name)
