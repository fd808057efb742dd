"""The header of a safetensors file, checked before any of the file's bytes become a tensor.

A file is the header's length (8 bytes, little-endian), the header (JSON), and the tensors' bytes.
These follow one another without gaps, in any order, to the end of the file. `read_header` checks
the JSON. `check_layout` checks the tensors' places, once their shapes are known to be right. The
errors of both complete a sentence that begins with the file: "is cut off ...", "has a damaged
header ...".
"""

import json
import math
import struct
from collections import Counter
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxattn.core.validation.config_fields import Integer, short_repr

PREFIX = 8
MOST_HEADER_BYTES = 100_000_000  # as in the safetensors library
DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
}
_KEYS = {"dtype", "shape", "data_offsets"}
_COUNT = Integer(0, 2**63 - 1)


class TensorHeader(NamedTuple):
    """One entry of the header.

    Attributes:
        dtype: NumPy's name of one of `DTYPES`, or the header's name of another dtype.
        shape: Shape in the header.
        begin, end: Byte range, counted from the end of the header.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsHeader(NamedTuple):
    """The contents of a file.

    Attributes:
        tensors: The entries by name.
        metadata: The file's `__metadata__`.
        data: The bytes after the header, uint8 [bytes].
    """

    tensors: dict[str, TensorHeader]
    metadata: dict[str, str]
    data: np.ndarray


def read_header(content: np.ndarray) -> SafetensorsHeader:
    """Reads the header of a file with the bytes `content`, uint8 [bytes].

    Raises:
        ValueError: The file ends before its header, or the header is damaged.
    """
    length = struct.unpack("<Q", content[:PREFIX].tobytes())[0] if content.size >= PREFIX else None
    if length is None or length > content.size - PREFIX:
        raise ValueError(
            f"is cut off or not a safetensors file: it ends after {content.size:,} bytes, within "
            "its header"
        )
    if length > MOST_HEADER_BYTES:
        raise ValueError(
            f"has a header of {length:,} bytes; at most {MOST_HEADER_BYTES:,} are supported"
        )
    try:
        raw = parse_object(content[PREFIX : PREFIX + length].tobytes())
        metadata = _metadata(raw.pop("__metadata__", {}))
        tensors = {name: _tensor(f"tensor {short_repr(name)}", info) for name, info in raw.items()}
    except ValueError as error:
        raise ValueError(f"has a damaged header: {error}") from error
    return SafetensorsHeader(tensors, metadata, content[PREFIX + length :])


def parse_object(text: bytes) -> dict[str, Any]:
    """Parses a JSON object in UTF-8 without duplicate names.

    Raises:
        ValueError: The text is something else, or nested too deeply.
    """
    try:
        values = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"it is not a JSON object but {short_repr(values)}")
    return values


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        [(twice, _)] = counts.most_common(1)
        raise ValueError(f"it contains {short_repr(twice)} twice")
    return values


def _metadata(values: Any) -> dict[str, str]:
    if not isinstance(values, dict) or not all(isinstance(text, str) for text in values.values()):
        raise ValueError(f"__metadata__ must be an object of strings; got {short_repr(values)}")
    return values


def _tensor(where: str, info: Any) -> TensorHeader:
    if not isinstance(info, dict) or info.keys() != _KEYS:
        raise ValueError(
            f"{where} must be an object with dtype, shape and data_offsets; got {short_repr(info)}"
        )
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"{where}: dtype must be a string; got {short_repr(dtype)}")
    if not isinstance(shape, list):
        raise ValueError(f"{where}: shape must be a list; got {short_repr(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"{where}: data_offsets must be two integers; got {short_repr(offsets)}")
    sizes = tuple(_COUNT(f"{where}: shape[{i}]", size) for i, size in enumerate(shape))
    begin, end = (_COUNT(f"{where}: data_offsets[{i}]", at) for i, at in enumerate(offsets))
    if begin > end:
        raise ValueError(f"{where}: data_offsets end before they begin; got {offsets}")
    return TensorHeader(DTYPES.get(dtype, dtype), sizes, begin, end)


def check_layout(header: SafetensorsHeader) -> None:
    """Checks that the tensors follow one another and end at the end of the file.

    Args:
        header: A header with known dtypes, and with the shapes of the model, which are multiplied
            here.

    Raises:
        ValueError: A tensor has too few or too many bytes or is truncated, two overlap, or bytes
            belong to no tensor.
    """
    position, previous = 0, "the header"
    for name, tensor in sorted(header.tensors.items(), key=lambda item: item[1][2:]):
        _check_size(name, tensor)
        if tensor.begin < position:
            raise ValueError(f"is damaged: tensor {name!r} overlaps {previous}")
        if tensor.begin > position:
            raise ValueError(
                f"is damaged: {tensor.begin - position:,} bytes between {previous} and tensor "
                f"{name!r} belong to no tensor"
            )
        if tensor.end > header.data.size:
            raise ValueError(
                f"is cut off within tensor {name!r}, which ends {tensor.end:,} bytes after the "
                f"header; the file ends {header.data.size:,} bytes after it"
            )
        position, previous = tensor.end, f"tensor {name!r}"
    if position < header.data.size:
        rest = header.data.size - position
        raise ValueError(f"is damaged: {rest:,} bytes after {previous} belong to no tensor")


def _check_size(name: str, tensor: TensorHeader) -> None:
    needed = math.prod(tensor.shape) * jnp.dtype(tensor.dtype).itemsize
    if tensor.end - tensor.begin != needed:
        raise ValueError(
            f"is damaged: tensor {name!r} has {tensor.end - tensor.begin:,} bytes, but "
            f"{tensor.dtype}{list(tensor.shape)} needs {needed:,}"
        )
