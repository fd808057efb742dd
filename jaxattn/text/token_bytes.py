"""The bytes of a vocabulary's tokens, decoded from the tokens' spelling in tokenizer.json.

This module supports three spellings. Each gives a token's bytes independently of other tokens:

    ByteLevel                                  a character for each byte, such as "Ġ" for a space
    Metaspace                                  "▁" for a space; the first token loses its space
    Sequence of Replace, ByteFallback,         "▁" for a space, "<0xE4>" for a byte; a space at the
        Fuse and Strip                         beginning of the text is stripped

Some GGUF converters combine the first and the third, as in ByteFallback, Fuse, Replace, ByteLevel.

If a run of byte tokens is not UTF-8, `tokenizers` decodes the whole run as one U+FFFD per byte. A
stream that has already emitted the run's beginning cannot do so. Here a run keeps its complete
characters. For valid UTF-8, which is all that an encoder produces, both agree.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxattn.text.json_files import TextError

ORDER = ("Replace", "ByteFallback", "Fuse", "ByteLevel", "Strip")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteDecoder:
    """The decoder from a token's spelling to its bytes.

    Attributes:
        data: Returns the bytes of a token within a text.
        first: Returns the bytes of a text's first token.
        strip: The character to strip from the beginning of a text.
        max_stripped: The maximum number of stripped characters.
        is_byte_level: Whether the vocabulary uses the byte alphabet. Added tokens never do.
    """

    data: Callable[[str], bytes]
    first: Callable[[str], bytes]
    strip: str = ""
    max_stripped: int = 0
    is_byte_level: bool = False


def byte_alphabet() -> dict[int, str]:
    """Returns the byte alphabet of GPT-2 and all byte-level vocabularies: a character per byte.

    Printable Latin-1 bytes stand for themselves. The others map to characters from U+0100 on.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    alphabet = {byte: chr(byte) for byte in printed}
    return alphabet | {byte: chr(256 + place) for place, byte in enumerate(others)}


BYTE_OF = {character: byte for byte, character in byte_alphabet().items()}


def byte_level(token: str) -> bytes:
    """Decodes a token in the byte alphabet. A token with other characters is encoded as UTF-8."""
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def _encoded(token: str) -> bytes:
    return token.encode("utf-8", "replace")


BYTE_LEVEL = ByteDecoder(data=byte_level, first=byte_level, is_byte_level=True)


def read_spelling(decoder: Any, path: Path) -> ByteDecoder:
    """Returns the byte decoder for the `decoder` of a tokenizer.json.

    Args:
        decoder: The field `decoder`.
        path: The path of the file, for error messages.

    Raises:
        TextError: If the spelling is not one of the three.
    """
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    try:
        if kinds == ["ByteLevel"]:
            return BYTE_LEVEL
        if kinds == ["Metaspace"]:
            return _metaspace(steps[0])
        if kinds and set(kinds) <= set(ORDER) and (found := _fallback(steps)):
            return found
    except (KeyError, TypeError, AttributeError) as error:
        raise TextError(f"{path} is damaged: its decoder lacks a field ({error})") from error
    raise TextError(
        f"{path}: a decoder of {' and '.join(map(str, kinds)) or 'no kind'} is not supported; "
        f"supported are ByteLevel, Metaspace, and {', '.join(ORDER)} in this order"
    )


def _steps(decoder: Any) -> list[Mapping[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    inner = decoder.get("decoders")
    return [step for each in inner for step in _steps(each)] if isinstance(inner, list) else []


def _metaspace(step: Mapping[str, Any]) -> ByteDecoder:
    mark = step["replacement"]

    def data(token: str) -> bytes:
        return token.replace(mark, " ").encode("utf-8", "replace")

    def first(token: str) -> bytes:
        return token.replace(mark, "").encode("utf-8", "replace")

    # Older files have add_prefix_space instead.
    prepends = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", 1)
    return ByteDecoder(data=data, first=first if prepends else data)


def _replaces_joined(kinds: list[str]) -> bool:
    """Whether all replacements directly follow a Fuse, one after another."""
    if "Fuse" not in kinds:
        return False
    begin, count = kinds.index("Fuse") + 1, kinds.count("Replace")
    return 0 < count == kinds[begin : begin + count].count("Replace")


def _fallback(steps: list[Mapping[str, Any]]) -> ByteDecoder | None:
    """Returns the decoder for steps that replace per token, decode bytes, then change the text.

    Returns None for another order: for example, a Strip without a Fuse applies to each token.
    """
    kinds = [step["type"] for step in steps]
    replaces = [step for step in steps if step["type"] == "Replace"]
    strips = [step for step in steps if step["type"] == "Strip"]
    changes = [(step["pattern"]["String"], step["content"]) for step in replaces]
    if _replaces_joined(kinds) and all(len(old) == 1 for old, _ in changes):
        # Replacing one character gives the same before and after the Fuse. A longer pattern may
        # span two tokens.
        kinds = ["Replace"] * len(replaces) + [kind for kind in kinds if kind != "Replace"]
    places = [ORDER.index(kind) for kind in kinds]
    simple = places == sorted(places) and all(kinds.count(kind) < 2 for kind in ORDER[1:])
    if not simple or any(step["stop"] for step in strips) or (strips and "Fuse" not in kinds):
        return None
    spell = byte_level if "ByteLevel" in kinds else _encoded

    def data(token: str) -> bytes:
        for old, new in changes:
            token = token.replace(old, new)
        if "ByteFallback" in kinds and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return spell(token)

    return ByteDecoder(
        is_byte_level="ByteLevel" in kinds,
        data=data,
        first=data,
        strip=strips[0]["content"] if strips else "",
        max_stripped=strips[0]["start"] if strips else 0,
    )
