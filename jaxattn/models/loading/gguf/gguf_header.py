"""The header of a GGUF file, its metadata and its tensors' places, checked without reading tensors.

A file is the magic, the version, the counts of tensors and of metadata, the metadata (key, type,
value), an entry for each tensor (name, sizes, type, offset), padding, and the tensors' bytes.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes it.
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxattn.core.validation.config_fields import short_repr
from jaxattn.models.checkpoint.native_format import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
MOST_ENTRIES = 2**20  # of tensors, and of metadata
MOST_NUMBERS = 2**40
MOST_DIMS = 4
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class GgmlType(NamedTuple):
    """A type of tensors: the size of a block in numbers and in bytes."""

    name: str
    block_size: int
    nbytes: int


TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    30: GgmlType("BF16", 1, 2),
}
# Unsupported types that a message can name.
OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


class GgufTensor(NamedTuple):
    """An entry of the header.

    Attributes:
        shape: Shape with rows first, as in NumPy.
        begin, nbytes: Place and number of its bytes in the file.
    """

    kind: GgmlType
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class GgufHeader(NamedTuple):
    """The parsed header of a file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Returns whether this is a file with the suffix or the magic of GGUF."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GgufHeader:
    """Reads the header of a file.

    Raises:
        CheckpointError: The file is not a GGUF file, is truncated, or contains something
            unsupported.
    """
    try:
        size = path.stat().st_size
        content = np.memmap(path, np.uint8, mode="r") if size else np.zeros(0, np.uint8)
        return _parsed(path, _Reader(content))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} {error}") from error


def _parsed(path: Path, reader: "_Reader") -> GgufHeader:
    if reader.take(4) != MAGIC:
        raise ValueError("is not a GGUF file: it does not begin with GGUF")
    version = reader.scalar("I")
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise ValueError(f"has GGUF version {version:,}; supported are {known}, little-endian")
    count, entries = reader.count("tensors"), reader.count("metadata")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = reader.text()
        if key in metadata:
            raise ValueError(f"is damaged: it has the metadata key {key!r:.80} twice")
        metadata[key] = reader.value(reader.scalar("I"))
    found = [_entry(reader) for _ in range(count)]
    alignment = metadata.get(ALIGNMENT, 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment % 8:
        raise ValueError(f"is damaged: {ALIGNMENT} is {short_repr(alignment)}")
    data = -(-reader.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, offset in found:
        if name in tensors:
            raise ValueError(f"is damaged: it has the tensor {name!r:.80} twice")
        begin = data + offset
        nbytes = math.prod(shape) // kind.block_size * kind.nbytes
        if offset % alignment:
            raise ValueError(f"is damaged: the tensor {name!r:.80} begins at an unaligned offset")
        if begin + nbytes > reader.size:
            raise ValueError(
                f"is cut off: the tensor {name!r:.80} ends at byte {begin + nbytes:,}, but the "
                f"file has {reader.size:,} bytes"
            )
        tensors[name] = GgufTensor(kind, shape, begin, nbytes)
    return GgufHeader(path, metadata, tensors)


def _entry(reader: "_Reader") -> tuple[str, GgmlType, tuple[int, ...], int]:
    """Returns (name, type, shape, offset) of a tensor."""
    name, dims = reader.text(), reader.scalar("I")
    if not 1 <= dims <= MOST_DIMS:
        raise ValueError(f"is damaged: the tensor {name!r:.80} has {dims:,} dimensions")
    shape = tuple(reader.scalar("Q") for _ in range(dims))[::-1]
    number, offset = reader.scalar("I"), reader.scalar("Q")
    if number not in TYPES:
        known = ", ".join(each.name for each in TYPES.values())
        other = OTHERS.get(number, f"number {number:,}")
        raise ValueError(f"contains {name!r:.80} of type {other}; supported types are {known}")
    kind = TYPES[number]
    if not 0 < math.prod(shape) < MOST_NUMBERS or shape[-1] % kind.block_size:
        raise ValueError(
            f"is damaged: the tensor {name!r:.80} has the shape {short_repr(list(shape))}, which "
            f"does not fit {kind.name} blocks of {kind.block_size} columns"
        )
    return name, kind, shape, offset


class _Reader:
    """A sequential reader of numbers and texts.

    Attributes:
        offset: Where the next value begins.
    """

    def __init__(self, content: np.ndarray):
        self._content, self.size, self.offset = content, int(content.size), 0

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.size - self.offset:
            raise ValueError(
                f"is cut off or not a GGUF file: it ends after {self.size:,} bytes, within its "
                "header"
            )
        found = self._content[self.offset : self.offset + nbytes].tobytes()
        self.offset += nbytes
        return found

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, what: str) -> int:
        found: int = self.scalar("Q")
        if found > MOST_ENTRIES:
            raise ValueError(f"is damaged: it claims to have {found:,} entries of {what}")
        return found

    def text(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        """Reads a value of a type; an array becomes a tuple."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner in _SCALARS:
                code = _SCALARS[inner]
                whole = self.take(count * struct.calcsize(f"<{code}"))
                return struct.unpack(f"<{count}{code}", whole)
            if inner == _STRING and count <= self.size:
                return tuple(self.text() for _ in range(count))
            raise ValueError(f"is damaged: it has an array of the unknown type {inner:,}")
        if kind not in _SCALARS:
            raise ValueError(f"is damaged: it has metadata of the unknown type {kind:,}")
        return self.scalar(_SCALARS[kind])
