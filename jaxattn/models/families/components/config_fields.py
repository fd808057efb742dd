"""Reading of a published config.json: typed fields, and errors that name them."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jaxattn.core.numerics.rope import Llama3RopeScaling, RopeConfig, YarnConfig
from jaxattn.core.validation.config_fields import (
    Flag,
    Integer,
    ListOf,
    Nullable,
    Number,
    OneOf,
    json_object,
    short_repr,
)
from jaxattn.core.validation.field_reader import FieldReader


class ConfigError(ValueError):
    """A config.json requires something that this package does not support; the message names it."""


_MISSING = object()
MOST = 2**31 - 1
MOST_EXPERTS = 4096
POSITIVE = Number(0, sys.float_info.max, open_below=True)


class ConfigFields(FieldReader):
    """The fields of a config.json.

    Args:
        values: The values in the file.
        where: Name of the file, for messages.
        spelled: The file's names of fields that are read under another name.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, spelled: Mapping[str, str] | None = None
    ):
        super().__init__(values, where)
        self.spelled = spelled or {}

    def name(self, field: str) -> str:
        return super().name(self.spelled.get(field, field))

    def error(self, field: str, message: str) -> ConfigError:
        return ConfigError(message)

    def renamed(self, **spelled: str) -> "ConfigFields":
        """Returns the fields with a family's spelling of some, given as name -> spelling.

        The spelling is ignored for a field that the file has under its own name.
        """
        other = {n: word for n, word in spelled.items() if word in self.values}
        other = {n: word for n, word in other.items() if n not in self.values}
        own = {n: self.values[word] for n, word in other.items()}
        return ConfigFields({**self.values, **own}, self.where, other)

    def assuming(self, **values: Any) -> "ConfigFields":
        """Returns the fields with these defaults, which are a family's own in transformers."""
        return ConfigFields({**values, **self.values}, self.where, self.spelled)

    def text(self) -> "ConfigFields":
        """Returns the fields of the text model, including those of `text_config` if it exists.

        If both objects have a field, the outer one's value is used.

        Raises:
            ConfigError: `text_config` is not an object.
        """
        inner = self.checked("text_config", self.values.get("text_config") or {}, json_object)
        outer = {name: value for name, value in self.values.items() if name != "text_config"}
        return ConfigFields({**inner, **outer}, self.where)

    def read[T](
        self, name: str, rule: Callable[[str, Any], T], default: Any, expected: str | None = None
    ) -> T:
        """Returns a field that must exist unless there is a default; null counts as a value."""
        value = self.values.get(name, default)
        if value is _MISSING:
            raise self.error(name, f"{self.where}: field {self.spelled.get(name, name)} is missing")
        return self.checked(name, value, rule, expected)

    def integer(
        self, name: str, default: Any = _MISSING, *, minimum: int = 1, maximum: int = MOST
    ) -> int:
        return self.read(name, Integer(minimum, maximum), default)

    def experts(self, name: str) -> int:
        """Returns the number of experts of a layer, which is bounded.

        The loader lists the names of each expert's tensors before it reads any file, so an
        unbounded number would take forever.
        """
        return self.integer(name, maximum=MOST_EXPERTS)

    def maybe_integer(self, name: str) -> int | None:
        """Returns a field that must exist, with an integer or null."""
        return self.read(name, Nullable(Integer(1, MOST)), _MISSING)

    def number(self, name: str, default: Any = _MISSING) -> float:
        return self.read(name, POSITIVE, default, "a finite number above 0")

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        return self.read(name, Flag(), default)

    def object(self, name: str) -> dict[str, Any]:
        """Returns a field that must exist, with an object."""
        return self.read(name, json_object, _MISSING, "an object")

    def words(self, name: str, count: int, *allowed: str) -> tuple[str, ...]:
        """Returns a list of `count` allowed words."""
        words = ListOf(OneOf(allowed), most=count, least=count)
        choices = " or ".join(map(short_repr, allowed))
        return self.read(name, words, _MISSING, f"a list of {count} values, each {choices}")

    def require(self, name: str, *allowed: Any, missing: Any = _MISSING) -> None:
        """Raises if a field has a value other than the implemented ones.

        A missing field has the value `missing`, or by default the first allowed one.
        """
        value = self.values.get(name, allowed[0] if missing is _MISSING else missing)
        if not any(value is each or value == each for each in allowed):
            choices = " or ".join(map(short_repr, allowed))
            raise self.refused(name, f"must be {choices} to be supported", value)

    def rotated(self, head_dim: int, default: float = 1.0) -> int:
        """Returns how many dims of a head are rotated, by `partial_rotary_factor`."""
        nested, _ = self._rope_objects()
        holder = self.of("rope_parameters", nested)
        name = "partial_rotary_factor"
        part = (holder if name in nested else self).number(name, default)
        dims = round(part * head_dim)
        if dims != part * head_dim or dims % 2 or dims > head_dim:
            raise self.refused(name, f"must give an even number of the {head_dim} dims", part)
        return dims

    def _rope_objects(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns (rope_parameters, the object that defines the scaling)."""
        nested = self.values.get("rope_parameters") or {}
        scaling = self.values.get("rope_scaling") or nested
        if not isinstance(nested, dict) or not isinstance(scaling, dict):
            raise self.refused("rope_scaling", "must be an object or null", scaling)
        return nested, scaling

    def require_rope(self) -> None:
        """Raises if RoPE's fields are missing, for a family that scales RoPE by default."""
        if not {"rope_theta", "rope_scaling"} & self.values.keys():
            self.object("rope_parameters")

    def rope_scaling(self) -> "ConfigFields":
        """Returns the object that defines the scaling of RoPE, which may be empty."""
        return self.of("rope_scaling", self._rope_objects()[1])

    def rope(self, dim: int, *, interleaved: bool | None = None) -> RopeConfig:
        """Returns plain RoPE, linear scaling, YaRN or Llama 3's scaling.

        Both spellings are supported: `rope_scaling` with `rope_theta`, or both in
        `rope_parameters`. Dynamic scaling is plain RoPE up to `max_position_embeddings`, which no
        row exceeds.

        Args:
            dim: Number of rotated dims.
            interleaved: Layout of these dims. None reads `rope_interleave`, for heads that are
                rotated completely.
        """
        nested, scaling = self._rope_objects()
        holder = ConfigFields(nested, self.where) if "rope_theta" in nested else self
        base = holder.number("rope_theta", 10000.0)
        if interleaved is None:
            for each in (self, self.of("rope_parameters", nested)):
                each.require("partial_rotary_factor", 1.0)
            interleaved = self.flag("rope_interleave", True)
        kind = scaling.get("rope_type") or scaling.get("type")
        if kind in ("default", "dynamic", None):
            return RopeConfig(dim, theta=base, interleaved=interleaved)
        scaling_fields = self.rope_scaling().assuming(
            original_max_position_embeddings=self.values.get("max_position_embeddings")
        )
        if kind == "linear":
            return RopeConfig(
                dim, theta=base, interleaved=interleaved, linear=scaling_fields.number("factor")
            )
        if kind == "yarn":
            yarn = _read_yarn(scaling_fields)
            return RopeConfig(dim, theta=base, interleaved=interleaved, yarn=yarn)
        if kind == "llama3":
            llama3 = Llama3RopeScaling(
                factor=scaling_fields.number("factor"),
                low_freq_factor=scaling_fields.number("low_freq_factor"),
                high_freq_factor=scaling_fields.number("high_freq_factor"),
                original_max_position_embeddings=scaling_fields.integer(
                    "original_max_position_embeddings"
                ),
            )
            return RopeConfig(dim, theta=base, interleaved=interleaved, llama3=llama3)
        kinds = "'yarn', 'llama3', 'linear' or 'dynamic'"
        raise self.refused("rope_scaling.type", f"must be {kinds} to be supported", kind)


def _read_yarn(fields: ConfigFields) -> YarnConfig:
    """Reads YaRN from a `rope_scaling`, as transformers computes it."""
    factor = fields.number("factor")
    mscale, all_dim, fast, slow = (
        fields.number(name) if fields.values.get(name) else default
        for name, default in (
            ("mscale", 0.0), ("mscale_all_dim", 0.0), ("beta_fast", 32.0), ("beta_slow", 1.0)
        )
    )  # fmt: skip
    return YarnConfig(
        factor=factor,
        original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
        beta_fast=fast,
        beta_slow=slow,
        mscale=_read_mscale(fields, factor, mscale, all_dim),
        mscale_all_dim=all_dim,
        truncate=fields.flag("truncate", True),
    )


def _read_mscale(fields: ConfigFields, factor: float, mscale: float, all_dim: float) -> float:
    """Returns the weight that gives rotated queries and keys their length in transformers.

    That length is `attention_factor`, or by default (0.1 mscale ln factor + 1) / (0.1 all_dim ln
    factor + 1). If one of the two weights is missing, it is 0.1 ln factor + 1, whatever the other
    one is.
    """
    stated = fields.values.get("attention_factor")
    if stated is None and mscale and all_dim:
        return mscale
    slope = 0.1 * math.log(factor)
    length = slope + 1 if stated is None else fields.number("attention_factor")
    grown = length * (slope * all_dim + 1) - 1
    # Prefer a weight that the file states to its rounded reconstruction.
    for weight in (mscale, 1.0, 0.0):
        if math.isclose(grown, slope * weight, rel_tol=1e-9, abs_tol=1e-12):
            return weight
    if not slope or not 0 <= grown <= 100 * slope:
        raise fields.refused("attention_factor", "must be the result of an mscale from 0 to 100")
    return grown / slope
