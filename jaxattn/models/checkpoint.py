"""A model folder, config.json and model.safetensors: checked before anything is on a device.

Tensors have flat dotted names (`repeats.gdn.0.gdn.in_proj_qkvz.weight`), stacked over the repeats.
The file's metadata holds a CRC-32 of each tensor.
"""

import json
import math
import operator
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from jaxattn.models.config import HybridConfig
from jaxattn.models.hybrid import abstract_model

EMBEDDED = Path(__file__).parent / "tiny"  # the model of bytes that ships with the package
CONFIG, WEIGHTS = "config.json", "model.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


class CheckpointError(ValueError):
    """The folder is not a model that can be loaded; the message names the file and the tensor."""


def save(path: str | os.PathLike, config: HybridConfig, params: nnx.State) -> None:
    """Writes the folder, making it if needed. A model in it is replaced by a complete one.

    Raises:
        CheckpointError: `params` are not those of `config`.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.asarray(leaf[...]) for name, leaf in _named(params).items()}
    header = {name: (tensor.dtype.name, tensor.shape) for name, tensor in tensors.items()}
    _check_names(folder, config, header)
    sums = {f"crc32.{name}": _crc32(tensor) for name, tensor in tensors.items()}
    partial = folder / f"{WEIGHTS}.partial"
    partial.write_bytes(safetensors.numpy.save(tensors, metadata=sums))
    partial.replace(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config.to_dict(), indent=2) + "\n")


def read_config(path: str | os.PathLike) -> HybridConfig:
    """The folder's config alone; no tensor is read.

    Raises:
        CheckpointError: config.json is missing or damaged.
    """
    file = Path(path) / CONFIG
    try:
        values = json.loads(file.read_text())
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        return HybridConfig.from_dict(values)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a model's configuration: {error}") from error


def load(path: str | os.PathLike) -> tuple[HybridConfig, nnx.State]:
    """The folder's config and parameters, on the default device.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, unexpected, of
            another shape or dtype, cut off or changed.
    """
    folder = Path(path)
    config = read_config(folder)
    file = folder / WEIGHTS
    header, metadata, start = _read_header(file)
    _check_names(file, config, {name: info[:2] for name, info in header.items()})
    content = np.memmap(file, np.uint8, mode="r")
    arrays = {}
    for name, (dtype, shape, (begin, end)) in header.items():
        data = content[start + begin : start + end]
        if metadata.get(f"crc32.{name}", _crc32(data)) != _crc32(data):
            raise CheckpointError(f"{file}: tensor {name!r} is damaged: its checksum differs")
        arrays[name] = data.view(jnp.dtype(dtype)).reshape(shape)
    _, shapes = abstract_model(config)
    flat = [
        (key, leaf.replace(jnp.asarray(arrays[_dotted(key)])))
        for key, leaf in nnx.to_flat_state(shapes)
    ]
    return config, nnx.from_flat_state(flat)


def _read_header(file: Path) -> tuple[dict[str, tuple[str, tuple[int, ...], tuple]], dict, int]:
    """(name -> (dtype, shape, byte range after start), metadata, start); checks the ranges."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            text = stream.read(min(length, size))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    start = 8 + length
    if start > size:
        raise CheckpointError(
            f"{file} is cut off or no safetensors file: {size:,} bytes end within its header"
        )
    try:
        raw: dict[str, Any] = json.loads(text)
        metadata = raw.pop("__metadata__", {})
        header = {}
        for name, info in raw.items():
            begin, end = info["data_offsets"]
            dtype = _DTYPES.get(info["dtype"], info["dtype"])
            shape = tuple(map(operator.index, info["shape"]))
            header[name] = (dtype, shape, (operator.index(begin), operator.index(end)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file}: its header is damaged ({error!r})") from error
    for name, (dtype, shape, (begin, end)) in sorted(header.items(), key=lambda item: item[1][2]):
        if (
            dtype in _DTYPES.values()
            and end - begin != math.prod(shape) * jnp.dtype(dtype).itemsize
        ):
            raise CheckpointError(
                f"{file}: tensor {name!r} has {end - begin:,} bytes where {dtype}{list(shape)} "
                f"needs {math.prod(shape) * jnp.dtype(dtype).itemsize:,}"
            )
        if begin < 0 or start + end > size:
            raise CheckpointError(
                f"{file} is cut off within tensor {name!r}: it ends at byte {start + end:,}, "
                f"the file at {size:,}"
            )
    return header, metadata, start


def _check_names(file: Path, config: HybridConfig, found: dict) -> None:
    _, shapes = abstract_model(config)
    expected = {name: (leaf.dtype.name, leaf.shape) for name, leaf in _named(shapes).items()}
    for name, (dtype, shape) in expected.items():
        wanted = f"{dtype}{list(shape)}"
        if name not in found:
            raise CheckpointError(f"{file}: tensor {name!r} is missing; expected {wanted}")
        if found[name] != (dtype, shape):
            actual = f"{found[name][0]}{list(found[name][1])}"
            raise CheckpointError(f"{file}: tensor {name!r} is {actual}; expected {wanted}")
    if unexpected := sorted(found.keys() - expected.keys()):
        more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
        raise CheckpointError(f"{file}: unexpected tensor {unexpected[0]!r}{more}")


def _named(state: nnx.State) -> dict[str, Any]:
    return {_dotted(key): leaf for key, leaf in nnx.to_flat_state(state)}


def _dotted(key: tuple) -> str:
    return ".".join(str(part) for part in key)


def _crc32(data: np.ndarray) -> str:
    return f"{zlib.crc32(np.ascontiguousarray(data).view(np.uint8).data):08x}"
