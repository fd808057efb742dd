"""Readers of the small files in a model's folder. A TextError names the file at fault."""

import json
import os
from pathlib import Path
from typing import Any

MOST_JSON_BYTES = 100 * 2**20


class TextError(ValueError):
    """A tokenizer or chat template is missing, damaged or not supported, or rejects its input."""


def read_bytes(path: Path, max_bytes: int) -> bytes | None:
    """Returns the content of a file; None if it does not exist.

    Args:
        max_bytes: The maximum size in bytes.

    Raises:
        TextError: If the file is larger or cannot be read.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise TextError(f"{path} cannot be read: it is not a regular file")
        with open(path, "rb") as file:
            too_large = os.fstat(file.fileno()).st_size > max_bytes
            content = b"" if too_large else file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror or error}") from error
    if too_large or len(content) > max_bytes:
        raise TextError(
            f"{path} has more than {max_bytes:,} bytes, the largest size that is supported"
        )
    return content


def read_text(path: Path, max_bytes: int) -> str | None:
    """Returns the text of a UTF-8 file; None if it does not exist.

    Raises:
        TextError: If the file is too large, cannot be read, or is not UTF-8.
    """
    content = read_bytes(path, max_bytes)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is damaged: byte {error.start:,} is not UTF-8") from error


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty one if the file does not exist.

    Raises:
        TextError: If the file cannot be read, or contains something else.
    """
    text = read_text(path, MOST_JSON_BYTES)
    return {} if text is None else parse_object(text, path)


def read_list(path: Path) -> list[Any]:
    """Returns the JSON list in a file; an empty one if the file does not exist.

    Raises:
        TextError: If the file cannot be read, or contains something else.
    """
    text = read_text(path, MOST_JSON_BYTES)
    return [] if text is None else _parsed(text, path, list, "list")


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """Parses a JSON object, which was read from `path`.

    Raises:
        TextError: If the text is not a JSON object.
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
        raise TextError(f"{path} must contain a JSON {name}; got {type(values).__name__}")
    return values
