"""Reads the small files of a model's folder; a TextError names the one that is wrong."""

import json
import os
from pathlib import Path
from typing import Any

MOST_JSON_BYTES = 100 * 2**20


class TextError(ValueError):
    """A tokenizer or a chat template is missing, damaged, not supported, or refuses its input."""


def read_bytes(path: Path, most: int) -> bytes | None:
    """The content of a file; None if there is none.

    Args:
        most: bytes that the file may have.

    Raises:
        TextError: the file has more bytes or cannot be read.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise TextError(f"{path} cannot be read: it is no file")
        with open(path, "rb") as file:
            large = os.fstat(file.fileno()).st_size > most
            content = b"" if large else file.read(most + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror or error}") from error
    if large or len(content) > most:
        raise TextError(
            f"{path} has more than {most:,} bytes, the most that is read of such a file"
        )
    return content


def read_text(path: Path, most: int) -> str | None:
    """The text of a file in UTF-8; None if there is none.

    Raises:
        TextError: it is too large, cannot be read, or is not UTF-8.
    """
    content = read_bytes(path, most)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is damaged: byte {error.start:,} is not UTF-8") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file; an empty one if there is no file.

    Raises:
        TextError: it cannot be read, or is something else.
    """
    text = read_text(path, MOST_JSON_BYTES)
    return {} if text is None else parse_object(text, path)


def read_list(path: Path) -> list[Any]:
    """The JSON list of a file; an empty one if there is no file.

    Raises:
        TextError: it cannot be read, or is something else.
    """
    text = read_text(path, MOST_JSON_BYTES)
    return [] if text is None else _parsed(text, path, list, "list")


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """The JSON object of a text that was read from `path`.

    Raises:
        TextError: it is something else.
    """
    return _parsed(text, path, dict, "object")


def _parsed[T](text: str, path: Path, kind: type[T], name: str) -> T:
    if not text.strip():
        raise TextError(f"{path} is empty: copy it again, or remove it")
    try:
        values = json.loads(text)
    except RecursionError:
        raise TextError(f"{path} is damaged: its JSON is nested too deeply") from None
    except ValueError as error:  # also integers of thousands of digits
        raise TextError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(values, kind):
        raise TextError(f"{path} must hold a JSON {name}; got {type(values).__name__}")
    return values
