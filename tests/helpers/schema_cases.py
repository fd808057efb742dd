"""Random JSON schemas in the style of pydantic, zod, MCP servers and OpenAPI documents."""

import datetime
import enum
import random
import uuid
from typing import Annotated, Any, Literal

import pydantic

WORDS = (
    "city",
    "days",
    "path",
    "limit",
    "unit",
    "tags",
    "query",
    "id",
    "when",
    "note",
    "x-y",
    'q"',
)
TEXTS = ("a", "b c", "é", 'say "x"', "back\\slash", "line\nbreak", "", "</tool_call>", "null")
PATTERNS = (
    '^[^"]*$', "^[a-z]{2,4}$", r"^\d{3}-\d{4}$", r'^[^"\\]+$', "^(yes|no)$", r"^[^\s/]+/[^\s/]+$",
    "^#?[0-9a-fA-F]{6}$", r"^[^[\]]{1,3}$", "^[^<>&\"']{1,8}$",
)  # fmt: skip
FORMATS = (
    "int32",
    "int64",
    "float",
    "double",
    "byte",
    "binary",
    "password",
    "uri-reference",
    "regex",
)
FLOAT32 = 3.4028234663852886e38


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = pydantic.Field(ge=1, le=9)


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str | None = None


class Tree(pydantic.BaseModel):
    value: int
    children: list["Tree"] = pydantic.Field(default=[], max_length=2)


def pydantic_schema(luck: random.Random) -> dict[str, Any]:
    """The schema of a random model with pydantic's own types."""
    field = pydantic.Field
    kinds: list[Any] = [
        str, int, float, bool, str | None, list[int], dict[str, int], Color, Tree,
        datetime.date, datetime.datetime, uuid.UUID, Literal["a", 'b"', 3], int | str,
        Annotated[int, field(ge=-(2**63), le=2**63 - 1)],
        Annotated[int, field(gt=0, lt=2**32)],
        Annotated[float, field(ge=0, le=1)],
        Annotated[str, field(min_length=1, max_length=8)],
        Annotated[str, field(pattern=luck.choice(PATTERNS[:7]))],
        Annotated[Cat | Dog, field(discriminator="kind")],
        Annotated[list[str], field(min_length=1, max_length=3)],
        tuple[int, str], dict[str, Cat], list[Cat | None],
    ]  # fmt: skip
    fields: dict[str, Any] = {}
    for name in luck.sample(WORDS[:10], luck.randint(1, 5)):
        kind = luck.choice(kinds)
        fields[name] = (kind, ...) if luck.random() < 0.7 else (kind | None, None)
    forbid = pydantic.ConfigDict(extra="forbid") if luck.random() < 0.5 else None
    return pydantic.create_model("Model", __config__=forbid, **fields).model_json_schema()


def zod_schema(luck: random.Random) -> dict[str, Any]:
    """A schema as zod 4 writes it: safe integers, `propertyNames` of records, const unions."""
    safe = 2**53 - 1

    def value(depth: int) -> dict[str, Any]:
        simple: list[dict[str, Any]] = [
            {"type": "string"},
            {"type": "integer", "minimum": -safe, "maximum": safe},
            {"type": "number", "minimum": -FLOAT32, "maximum": FLOAT32},
            {"type": "number", "exclusiveMinimum": 0},
            {"type": "boolean"},
            {"type": "string", "enum": luck.sample(TEXTS, 3)},
            {"type": "string", "const": luck.choice(TEXTS)},
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
            {"type": "string", "pattern": luck.choice(PATTERNS)},
            {"type": "string", "format": "email", "pattern": r"^[a-z]+@[a-z]+\.com$"},
            {"type": "string", "format": luck.choice(["uuid", "date", "ipv4", "jwt", "base64url"])},
        ]
        if not depth:
            return luck.choice(simple)
        nested: list[dict[str, Any]] = [
            {"type": "array", "items": value(depth - 1), "maxItems": 3},
            {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": value(depth - 1),
            },
            {
                "oneOf": [
                    _object({"t": {"type": "string", "const": each}, "v": value(0)}, ["t", "v"])
                    for each in ("one", "two")
                ]
            },
            {"type": "array", "prefixItems": [value(0), value(0)], "items": False, "minItems": 2},
            properties(depth - 1),
        ]
        return luck.choice(simple + nested)

    def properties(depth: int) -> dict[str, Any]:
        names = luck.sample(WORDS, luck.randint(1, 4))
        return _object({name: value(depth) for name in names}, names[: luck.randint(0, len(names))])

    drafts = ("https://json-schema.org/draft/2020-12/schema", None)
    draft = luck.choice(drafts)
    return ({"$schema": draft} if draft else {}) | properties(2)


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def mcp_schema(luck: random.Random) -> dict[str, Any]:
    """The input of an MCP server's tool: draft 7, `definitions`, descriptions and defaults."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "description": "Where to look", "default": "."},
        {"type": ["string", "null"], "examples": ["x"]},
        {"type": "integer", "minimum": 1, "maximum": 100, "default": 10},
        {"type": "number", "description": "in %"},
        {"type": "string", "enum": list(luck.sample(TEXTS, 2)), "title": "T"},
        {"enum": [1, 2.5, None, "x", True]},
        {"type": "array", "items": {"$ref": "#/definitions/item"}, "minItems": 1, "maxItems": 2},
        {"$ref": "#/definitions/item"},
        {"type": "object", "additionalProperties": True},
        {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}},
        {"type": "string", "format": luck.choice([*FORMATS, "uri", "date-time"])},
        {
            "type": "array",
            "items": [{"type": "integer"}, {"type": "string"}],
            "additionalItems": False,
        },
        {},
    ]
    names = luck.sample(WORDS, luck.randint(1, 5))
    item = _object({"k": {"type": "string"}, "next": {"$ref": "#/definitions/item"}}, ["k"])
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {name: luck.choice(kinds) for name in names},
        "required": names[: luck.randint(0, len(names))],
        "definitions": {"item": item},
    }
    if luck.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def openapi_schema(luck: random.Random) -> dict[str, Any]:
    """An OpenAPI component: its own formats, `nullable`, `allOf`, discriminators."""
    kinds: list[dict[str, Any]] = [
        {"type": "integer", "format": "int32", "minimum": -(2**31), "maximum": 2**31 - 1},
        {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "format": "int64", "exclusiveMaximum": 2**63},
        {"type": "integer", "format": "uint64", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "number", "format": "float", "minimum": -FLOAT32, "maximum": FLOAT32},
        {"type": "number", "format": "double", "multipleOf": 0.5},
        {"type": "string", "nullable": True, "example": "x", "xml": {"name": "n"}},
        {"type": "string", "format": luck.choice(FORMATS), "deprecated": True},
        {"type": "string", "pattern": luck.choice(PATTERNS), "externalDocs": {"url": "x"}},
        {"type": "integer", "exclusiveMinimum": 0, "multipleOf": 5, "readOnly": True},
        {"$ref": "#/$defs/Id"},
        {"allOf": [{"$ref": "#/$defs/Base"}, {"type": "object", "required": ["name"]}]},
        {
            "oneOf": [{"$ref": "#/$defs/Card"}, {"$ref": "#/$defs/Cash"}],
            "discriminator": {"propertyName": "kind"},
        },
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "array", "items": {"$ref": "#/$defs/Id"}, "uniqueItems": False, "maxItems": 2},
    ]
    names = luck.sample(WORDS, luck.randint(1, 5))
    kind = {"type": "string"}
    return {
        "type": "object",
        "properties": {name: luck.choice(kinds) for name in names},
        "required": names[: luck.randint(0, len(names))],
        "$defs": {
            "Id": {"type": "integer", "format": "int64", "minimum": 1, "maximum": 2**63 - 1},
            "Base": {"type": "object", "properties": {"name": kind, "id": {"$ref": "#/$defs/Id"}}},
            "Card": _object({"kind": {"enum": ["card"]}, "number": kind}, ["kind", "number"]),
            "Cash": _object({"kind": {"enum": ["cash", "coins"]}}, ["kind"]),
        },
    }


DIALECTS = {
    "pydantic": pydantic_schema,
    "zod": zod_schema,
    "mcp": mcp_schema,
    "openapi": openapi_schema,
}
