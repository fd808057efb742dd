"""The bytes of a vocabulary's tokens, decoded from the tokens' spelling in tokenizer.json.

Three spellings are known, and each gives the bytes of one token without looking at the others:

    ByteLevel                                  a character for each byte, such as "Ġ" for a space
    Metaspace                                  "▁" for a space; the first token has none before it
    Sequence of Replace, ByteFallback,         "▁" for a space, "<0xE4>" for a byte; a space at the
        Fuse and Strip                         beginning of the text is taken away

Converters from GGUF stack the first on the third: ByteFallback, Fuse, Replace and ByteLevel, say.

`tokenizers` decodes a run of byte tokens that is no UTF-8 as one U+FFFD per byte, the whole run,
which no stream can do that has shown its beginning. Here a run keeps the characters that are
whole. For text that is UTF-8, which is all that an encoder makes, the two agree.
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
    """Bytes of tokens.

    Attributes:
        data: the bytes of a token within a text.
        first: the bytes of a text's first token.
        strip, most_stripped: a character, and how many of it the beginning of a text loses.
        of_bytes: whether tokens are written in the alphabet of bytes. Tokens beside the
            vocabulary are not.
    """

    data: Callable[[str], bytes]
    first: Callable[[str], bytes]
    strip: str = ""
    most_stripped: int = 0
    of_bytes: bool = False


def byte_alphabet() -> dict[int, str]:
    """The character that stands for each byte, as GPT-2 and all byte-level vocabularies have it.

    Bytes that print in Latin-1 stand for themselves; the others follow from U+0100 on.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    alphabet = {byte: chr(byte) for byte in printed}
    return alphabet | {byte: chr(256 + place) for place, byte in enumerate(others)}


BYTE_OF = {character: byte for byte, character in byte_alphabet().items()}


def byte_level(token: str) -> bytes:
    """A token of the alphabet of bytes; one with other characters stands for itself."""
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def _encoded(token: str) -> bytes:
    return token.encode("utf-8", "replace")


BYTE_LEVEL = ByteDecoder(data=byte_level, first=byte_level, of_bytes=True)


def read_spelling(decoder: Any, path: Path) -> ByteDecoder:
    """The spelling that a tokenizer's decoder undoes.

    Args:
        decoder: the field `decoder` of tokenizer.json.
        path: of that file, for messages.

    Raises:
        TextError: it is none of the three.
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

    # Older files say add_prefix_space instead.
    prepends = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", 1)
    return ByteDecoder(data=data, first=first if prepends else data)


def _replaces_joined(kinds: list[str]) -> bool:
    """Whether all replacements follow a Fuse, one another and nothing else."""
    if "Fuse" not in kinds:
        return False
    begin, count = kinds.index("Fuse") + 1, kinds.count("Replace")
    return 0 < count == kinds[begin : begin + count].count("Replace")


def _fallback(steps: list[Mapping[str, Any]]) -> ByteDecoder | None:
    """Replacements token by token, then bytes, then what is done to the text as a whole.

    None if the steps stand otherwise: a Strip without a Fuse is done to each token, say.
    """
    kinds = [step["type"] for step in steps]
    replaces = [step for step in steps if step["type"] == "Replace"]
    strips = [step for step in steps if step["type"] == "Strip"]
    changes = [(step["pattern"]["String"], step["content"]) for step in replaces]
    if _replaces_joined(kinds) and all(len(old) == 1 for old, _ in changes):
        # A character is replaced in joined text as in each token; a longer text may lie in two.
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
        of_bytes="ByteLevel" in kinds,
        data=data,
        first=data,
        strip=strips[0]["content"] if strips else "",
        most_stripped=strips[0]["start"] if strips else 0,
    )
