"""The disjointness of the schemas of a `oneOf`. If they are disjoint, `oneOf` equals `anyOf`.

The schemas of discriminated unions are disjoint: all require one property, each with another value.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxattn.server.decoding.tool_formats.schema_types import declared_types, referred

MOST_PAIRS = 2000
MOST_DEPTH = 8


def disjoint(schemas: Sequence[Any], root: Mapping[str, Any]) -> bool:
    """Returns True if it is easy to prove that no value is valid for two of the schemas."""
    pairs = list(itertools.islice(itertools.combinations(schemas, 2), MOST_PAIRS + 1))
    return len(pairs) <= MOST_PAIRS and all(_are_disjoint(a, b, root, MOST_DEPTH) for a, b in pairs)


def _are_disjoint(schema_a: Any, schema_b: Any, root: Mapping[str, Any], depth: int) -> bool:
    resolved_a, resolved_b = _resolved(schema_a, root), _resolved(schema_b, root)
    if resolved_a is None or resolved_b is None or not depth:
        return False
    types_a, types_b = declared_types(resolved_a, root), declared_types(resolved_b, root)
    for each in (types_a, types_b):
        if "number" in each:
            each.add("integer")
    if not types_a & types_b:
        return True
    values, more = _literals(resolved_a), _literals(resolved_b)
    if values is not None and more is not None:
        return not any(each in more for each in values)
    if types_a & types_b != {"object"}:
        return False
    shared = set(_names(resolved_a)) & set(_names(resolved_b))
    return any(
        _are_disjoint(
            resolved_a["properties"][name], resolved_b["properties"][name], root, depth - 1
        )
        for name in shared
    )


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for _ in range(MOST_DEPTH):
        if not isinstance(schema, Mapping):
            return None
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = referred(reference, root)
    return None


def _literals(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the values of a const or an enum as (is bool, value), to distinguish 1 from true."""
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(found, list):
        return None
    return [(isinstance(each, bool), each) for each in found]


def _names(schema: Mapping[str, Any]) -> list[str]:
    """Returns the names of the properties that a schema both requires and describes."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return []
    return [name for name in required if isinstance(name, str) and name in properties]
