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

    def schema(self, source: Any, path: str, depth: int) -> Any:
        if not isinstance(source, dict):
            return source  # true, false, or a value that llguidance rejects
        if not depth:
            raise _refused(path, f"is nested more than {MOST_DEPTH} schemas deep")
        translated = {key: value for key, value in source.items() if key != "x-guidance"}
        for key in ONE:
            if key in translated and not isinstance(translated[key], list):
                translated[key] = self.schema(translated[key], f"{path}.{key}", depth - 1)
        for key in (*LISTS, "items"):
            if isinstance(translated.get(key), list):
                translated[key] = [
                    self.schema(each, f"{path}.{key}[{place}]", depth - 1)
                    for place, each in enumerate(translated[key])
                ]
        for key in OBJECTS:
            if isinstance(translated.get(key), dict):
                translated[key] = {
                    name: self.schema(each, f"{path}.{key}.{name}", depth - 1)
                    for name, each in translated[key].items()
                }
        self._annotations(translated)
        self._patterns(translated)
        self._numbers(translated, path)
        self._names(translated)
        if isinstance(translated.get("oneOf"), list) and disjoint(source["oneOf"], self._root):
            if "anyOf" in translated:
                translated["allOf"] = [
                    *translated.get("allOf", ()),
                    {"anyOf": translated.pop("oneOf")},
                ]
            else:
                translated["anyOf"] = translated.pop("oneOf")
        return translated

    def _annotations(self, translated: dict[str, Any]) -> None:
        """Drops keywords that restrict nothing, such as an unknown format."""
        if translated.get("format") not in FORMATS:
            translated.pop("format", None)
        if translated.get("uniqueItems") is False:
            del translated["uniqueItems"]
        if translated.get("unevaluatedProperties") is True:
            del translated["unevaluatedProperties"]
        if "unevaluatedProperties" in translated and not APPLICATORS & translated.keys():
            translated.setdefault("additionalProperties", translated.pop("unevaluatedProperties"))
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            if translated.get(key) == {}:
                del translated[key]

    def _patterns(self, translated: dict[str, Any]) -> None:
        if isinstance(translated.get("pattern"), str):
            translated["pattern"] = exact_pattern(translated["pattern"])
        if isinstance(translated.get("patternProperties"), dict):
            translated["patternProperties"] = {
                exact_pattern(key): value for key, value in translated["patternProperties"].items()
            }

    def _names(self, translated: dict[str, Any]) -> None:
        """Turns `propertyNames` into `patternProperties`, if the schema describes no properties."""
        names = translated.get("propertyNames")
        if names is True or (isinstance(names, dict) and _any_string(names)):
            del translated["propertyNames"]
        if not isinstance(names, dict) or "propertyNames" not in translated:
            return
        if translated.get("patternProperties") or translated.get("properties"):
            return  # llguidance rejects the schema
        keywords = set(names) - {"type", "title", "description"}
        if keywords == {"pattern"} and isinstance(names["pattern"], str):
            pattern = exact_pattern(names["pattern"])
        elif keywords == {"enum"} and all(isinstance(each, str) for each in names["enum"]):
            pattern = f"^({'|'.join(map(re.escape, names['enum']))})$"
        else:
            return
        del translated["propertyNames"]
        translated["patternProperties"] = {pattern: translated.get("additionalProperties", True)}
        translated["additionalProperties"] = False

    def _numbers(self, translated: dict[str, Any], path: str) -> None:
        if "const" in translated:
            _check_value(translated["const"], f"{path}.const")
        for place, value in enumerate(
            translated["enum"] if isinstance(translated.get("enum"), list) else ()
        ):
            _check_value(value, f"{path}.enum[{place}]")
        for bound, exclusive in (LOWER, UPPER):
            if isinstance(translated.get(exclusive), bool):  # as in OpenAPI 3.0 and draft 4
                if translated.pop(exclusive) and bound in translated:
                    translated[exclusive] = translated.pop(bound)
        max_magnitude = MOST_BOUND if translated.get("type") == "integer" else MOST_NUMBER_BOUND
        for key in (*LOWER, *UPPER):
            value = translated.get(key)
            if isinstance(value, int | float) and abs(value) > MOST_EXACT:
                translated[key] = _inner(
                    value, max_magnitude, lower=key in LOWER, path=f"{path}.{key}"
                )


def _any_string(schema: Mapping[str, Any]) -> bool:
    """Whether every string is valid for a schema."""
    return not set(schema) - {"type", "title", "description"} and schema.get("type") in (
        None,
        "string",
    )


def _inner(value: float, max_magnitude: int, *, lower: bool, path: str) -> int:
    """Returns the nearest integer within a bound that is a float64 and not above `max_magnitude`.

    Raises:
        ApiError: 400 if no number within the bound is small enough.
    """
    if (value > max_magnitude) if lower else (value < -max_magnitude):
        raise _refused(
            path,
            f"is {value}, but only bounds from -{max_magnitude:,} to {max_magnitude:,} are "
            "supported",
        )
    if abs(value) >= max_magnitude:
        return -max_magnitude if lower else max_magnitude
    found = float(value)
    if (found < value) if lower else (found > value):
        found = math.nextafter(found, math.inf if lower else -math.inf)
    return int(found)


def _check_value(value: Any, path: str) -> None:
    """Raises ApiError 400 if a literal has a number that llguidance would change."""
    match value:
        case bool() | None | str():
            return
        case int() if abs(value) > MOST_EXACT:
            raise _refused(
                path, f"is {value}, but the grammar supports integers up to 2**53; use a string"
            )
        case float() if abs(value) > MOST_EXACT or float(f"{value:.{MOST_DIGITS}g}") != value:
            raise _refused(
                path,
                f"is {value!r}, but the grammar supports numbers up to 2**53 with at most "
                f"{MOST_DIGITS} digits",
            )
        case list():
            for place, each in enumerate(value):
                _check_value(each, f"{path}[{place}]")
        case dict():
            for name, each in value.items():
                _check_value(each, f"{path}.{name}")


def _refused(path: str, message: str) -> ApiError:
    param = path.split(".")[0]
    return bad(param, f"{param} cannot be enforced: {path[:200]} {message}")
