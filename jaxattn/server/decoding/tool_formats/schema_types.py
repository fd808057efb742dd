"""The types that a JSON schema declares, and the conversion of unquoted arguments to JSON."""

import json
from collections.abc import Mapping
from typing import Any

from jaxattn.server.decoding.tool_formats.lossless_json import (
    PYTHON_LITERALS,
    compacted,
    json_type,
    quoted,
)

TYPES = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_MOST_REFERENCES = 16


def spelled(text: str, schema: object, root: Mapping[str, Any]) -> str:
    """Returns the JSON of an argument that a model wrote without quotes.

    A text that is not JSON becomes a string. So does JSON of an undeclared type, if the schema
    allows strings.

    Args:
        schema: The argument's schema; None if the tool declares none.
        root: The root schema, to which `$ref` refers.
    """
    kinds, plain = declared_types(schema, root), text.strip()
    kind, text_is_one = json_type(plain), "string" in kinds
    if kinds != TYPES:
        if kind == "string" and text_is_one:  # the quotes belong to the string
            kind = None
        python = PYTHON_LITERALS.get(plain, "")
        if json_type(python) in kinds and not (python == "null" and text_is_one):
            return python
    if kind in kinds or (kind == "integer" and "number" in kinds) or (kind and not text_is_one):
        return compacted(plain)
    return quoted(text)


def declared_types(schema: object, root: Mapping[str, Any], references: int = 0) -> set[str]:
    """Returns a superset of the types that a schema accepts; all types if it declares none."""
    if not isinstance(schema, Mapping) or references > _MOST_REFERENCES:
        return set(TYPES)
    kinds = set(TYPES)
    given = schema.get("type")
    if isinstance(given, str):
        kinds &= {given}
    elif isinstance(given, list):
        kinds &= {each for each in given if isinstance(each, str)}
    if schema.get("nullable") is True and given is not None:
        kinds |= {"null"}
    if "const" in schema:
        kinds &= {json_type(json.dumps(schema["const"])) or ""}
    if isinstance(schema.get("enum"), list):
        kinds &= {json_type(json.dumps(each)) or "" for each in schema["enum"]}
    if isinstance(reference := schema.get("$ref"), str):
        kinds &= declared_types(referred(reference, root), root, references + 1)
    for union in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(union), list) and branches:
            each = [declared_types(branch, root, references + 1) for branch in branches]
            kinds &= set().union(*each)
    for branch in schema.get("allOf") or ():
        kinds &= declared_types(branch, root, references + 1)
    return kinds or set(TYPES)


def referred(reference: str, root: Mapping[str, Any]) -> object:
    """Returns the subschema that a reference such as `#/$defs/name` points to; None without one."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found
