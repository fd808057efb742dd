"""Translation of JSON schemas into schemas that llguidance applies exactly.

llguidance reads numbers as float64, knows ten formats, and has a few bugs that a schema can avoid.
The translation rewrites a schema so that every text that llguidance then allows is valid for the
original. If this is impossible, it raises an error that names the place in the schema.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from jaxattn.server.decoding.grammars.regex_translation import exact_pattern
from jaxattn.server.decoding.grammars.schema_disjointness import disjoint
from jaxattn.server.http.errors import ApiError, bad

MOST_DEPTH = 100
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# llguidance needs int64 bounds without the extremes: it computes -(-2**63), which ends the process.
MOST_BOUND = 2**63 - 2**10
MOST_NUMBER_BOUND = 10**18
MOST_EXACT = 2**53  # float64 represents the integers up to this one exactly
MOST_DIGITS = 15  # the digits of a float that llguidance reproduces exactly
OPTIONS = {
    # The longest white space: a space, or a newline with indentation. With more, an uncertain model
    # could fill the answer with white space.
    "whitespace_pattern": r"( |\n[ \t]{0,64})",
    # Excludes \uXXXX, with which a key of additionalProperties could spell a key of properties.
    "json_allowed_escapes": 'nrbtf\\"',
}
# Keywords whose values are one schema, a list of schemas, or an object of schemas.
ONE = (
    "additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
APPLICATORS = {"anyOf", "allOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas"}


def schema_text(schema: Mapping[str, Any], param: str) -> str:
    """Returns the JSON of the rewritten schema, with llguidance's options.

    Args:
        param: The field that contains the schema, which errors name.

    Raises:
        ApiError: 400 if llguidance cannot apply the schema exactly.
    """
    held = _Rewriting(schema).schema(schema, param, MOST_DEPTH)
    try:
        return json.dumps({**held, "x-guidance": OPTIONS}, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise _refused(param, f"is not valid JSON: {error}") from error


class _Rewriting:
    """The rewriting of one schema, whose `$ref`s refer to its root."""

    def __init__(self, root: Mapping[str, Any]):
        self._root = root

    def schema(self, given: Any, where: str, depth: int) -> Any:
        if not isinstance(given, dict):
            return given  # true, false, or a value that llguidance rejects
        if not depth:
            raise _refused(where, f"is nested more than {MOST_DEPTH} schemas deep")
        made = {key: value for key, value in given.items() if key != "x-guidance"}
        for key in ONE:
            if key in made and not isinstance(made[key], list):
                made[key] = self.schema(made[key], f"{where}.{key}", depth - 1)
        for key in (*LISTS, "items"):
            if isinstance(made.get(key), list):
                made[key] = [
                    self.schema(each, f"{where}.{key}[{place}]", depth - 1)
                    for place, each in enumerate(made[key])
                ]
        for key in OBJECTS:
            if isinstance(made.get(key), dict):
                made[key] = {
                    name: self.schema(each, f"{where}.{key}.{name}", depth - 1)
                    for name, each in made[key].items()
                }
        self._annotations(made)
        self._patterns(made)
        self._numbers(made, where)
        self._names(made)
        if isinstance(made.get("oneOf"), list) and disjoint(given["oneOf"], self._root):
            if "anyOf" in made:
                made["allOf"] = [*made.get("allOf", ()), {"anyOf": made.pop("oneOf")}]
            else:
                made["anyOf"] = made.pop("oneOf")
        return made

    def _annotations(self, made: dict[str, Any]) -> None:
        """Drops keywords that restrict nothing, such as an unknown format."""
        if made.get("format") not in FORMATS:
            made.pop("format", None)
        if made.get("uniqueItems") is False:
            del made["uniqueItems"]
        if made.get("unevaluatedProperties") is True:
            del made["unevaluatedProperties"]
        if "unevaluatedProperties" in made and not APPLICATORS & made.keys():
            made.setdefault("additionalProperties", made.pop("unevaluatedProperties"))
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            if made.get(key) == {}:
                del made[key]

    def _patterns(self, made: dict[str, Any]) -> None:
        if isinstance(made.get("pattern"), str):
            made["pattern"] = exact_pattern(made["pattern"])
        if isinstance(made.get("patternProperties"), dict):
            made["patternProperties"] = {
                exact_pattern(key): value for key, value in made["patternProperties"].items()
            }

    def _names(self, made: dict[str, Any]) -> None:
        """Turns `propertyNames` into `patternProperties`, if the schema describes no properties."""
        names = made.get("propertyNames")
        if names is True or (isinstance(names, dict) and _any_string(names)):
            del made["propertyNames"]
        if not isinstance(names, dict) or "propertyNames" not in made:
            return
        if made.get("patternProperties") or made.get("properties"):
            return  # llguidance rejects the schema
        known = set(names) - {"type", "title", "description"}
        if known == {"pattern"} and isinstance(names["pattern"], str):
            pattern = exact_pattern(names["pattern"])
        elif known == {"enum"} and all(isinstance(each, str) for each in names["enum"]):
            pattern = f"^({'|'.join(map(re.escape, names['enum']))})$"
        else:
            return
        del made["propertyNames"]
        made["patternProperties"] = {pattern: made.get("additionalProperties", True)}
        made["additionalProperties"] = False

    def _numbers(self, made: dict[str, Any], where: str) -> None:
        if "const" in made:
            _check_value(made["const"], f"{where}.const")
        for place, value in enumerate(made["enum"] if isinstance(made.get("enum"), list) else ()):
            _check_value(value, f"{where}.enum[{place}]")
        for bound, exclusive in (LOWER, UPPER):
            if isinstance(made.get(exclusive), bool):  # as in OpenAPI 3.0 and draft 4
                if made.pop(exclusive) and bound in made:
                    made[exclusive] = made.pop(bound)
        most = MOST_BOUND if made.get("type") == "integer" else MOST_NUMBER_BOUND
        for key in (*LOWER, *UPPER):
            value = made.get(key)
            if isinstance(value, int | float) and abs(value) > MOST_EXACT:
                made[key] = _inner(value, most, lower=key in LOWER, where=f"{where}.{key}")


def _any_string(schema: Mapping[str, Any]) -> bool:
    """Whether every string is valid for a schema."""
    return not set(schema) - {"type", "title", "description"} and schema.get("type") in (
        None,
        "string",
    )


def _inner(value: float, most: int, *, lower: bool, where: str) -> int:
    """Returns the nearest integer within a bound that is a float64 and at most `most` in size.

    Raises:
        ApiError: 400 if no number within the bound is small enough.
    """
    if (value > most) if lower else (value < -most):
        raise _refused(
            where, f"is {value}, but only bounds from -{most:,} to {most:,} are supported"
        )
    if abs(value) >= most:
        return -most if lower else most
    found = float(value)
    if (found < value) if lower else (found > value):
        found = math.nextafter(found, math.inf if lower else -math.inf)
    return int(found)


def _check_value(value: Any, where: str) -> None:
    """Raises ApiError 400 if a literal has a number that llguidance would change."""
    match value:
        case bool() | None | str():
            return
        case int() if abs(value) > MOST_EXACT:
            raise _refused(
                where, f"is {value}, but the grammar supports integers up to 2**53; use a string"
            )
        case float() if abs(value) > MOST_EXACT or float(f"{value:.{MOST_DIGITS}g}") != value:
            raise _refused(
                where,
                f"is {value!r}, but the grammar supports numbers up to 2**53 with at most "
                f"{MOST_DIGITS} digits",
            )
        case list():
            for place, each in enumerate(value):
                _check_value(each, f"{where}[{place}]")
        case dict():
            for name, each in value.items():
                _check_value(each, f"{where}.{name}")


def _refused(where: str, message: str) -> ApiError:
    param = where.split(".")[0]
    return bad(param, f"{param} cannot be enforced: {where[:200]} {message}")
