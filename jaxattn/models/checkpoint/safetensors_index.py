"""The safetensors files of a folder, and the entries of their headers.

A folder contains model.safetensors, or model.safetensors.index.json and the shards that it names. A
shard may be a link, as in the Hub's cache, but its name may not lead out of the folder.

Pickles are never read, because reading one can run code.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxattn.core.validation.config_fields import short_list, short_repr
from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.models.checkpoint.safetensors_header import (
    DTYPES,
    SafetensorsHeader,
    check_layout,
    parse_object,
    read_header,
)

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MOST_CONFIG_BYTES = 2**20
MOST_INDEX_BYTES = 100 * 2**20
MOST_NUMBERS = 2**40


class TensorEntry(NamedTuple):
    """A tensor of a folder.

    Attributes:
        file: The file that contains the tensor.
        dtype, shape: Dtype and shape in the file's header.
        begin, nbytes: Place and number of its bytes in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def open_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of all files by name; reads only the files' headers.

    Raises:
        CheckpointError: A file is missing or damaged, or two files contain a tensor of the same
            name.
    """
    found: dict[str, TensorEntry] = {}
    for name in _files(folder):
        file = folder / name
        header, size = _header(file)
        for tensor, (dtype, shape, begin, end) in header.tensors.items():
            if tensor in found:
                raise CheckpointError(
                    f"tensor {tensor!r} is in two files, {found[tensor].file.name} and {file.name}"
                )
            found[tensor] = TensorEntry(file, dtype, shape, size + begin, end - begin)
    return found


def read_json(file: Path, most_bytes: int = MOST_CONFIG_BYTES) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Raises:
        CheckpointError: The file is missing, too large, or not a JSON object.
    """
    try:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if (size := file.stat().st_size) > most_bytes:
            raise CheckpointError(
                f"{file} has {size:,} bytes, but at most {most_bytes:,} are supported"
            )
        return parse_object(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _files(folder: Path) -> list[str]:
    """Returns the names of a folder's safetensors files.

    Raises:
        CheckpointError: There are none, or the index names something that is not a file of the
            folder.
    """
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (folder / INDEX).is_file():
        pickles = sorted(repr(each.name) for kind in PICKLES for each in folder.glob(kind))
        hint = ""
        if pickles:
            hint = f"; pickle files are not loaded, since they can run code: {short_list(pickles)}"
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}")
    names = shards_of(folder / INDEX)
    for name in names:
        if not _is_file(folder / name):
            raise CheckpointError(f"{folder / INDEX} names {name[:200]!r}, which is missing")
    return names


def shards_of(index: Path) -> list[str]:
    """Returns the files that an index names; they need not exist.

    Raises:
        CheckpointError: The index is damaged, or a name cannot be a file of its folder.
    """
    tensors = read_json(index, MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(tensors, dict) or not tensors:
        raise CheckpointError(
            f"{index}: weight_map must be an object with tensors; got {short_repr(tensors)}"
        )
    names = set()
    for name in tensors.values():
        plain = isinstance(name, str) and Path(name).name == name and "\0" not in name
        if not plain or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {short_repr(name)}, which is not a .safetensors file of the folder"
            )
        names.add(name)
    return sorted(names)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long for a file
        return False


def _header(file: Path) -> tuple[SafetensorsHeader, int]:
    """Returns a file's checked header and the place where its tensors' bytes begin."""
    try:
        size = file.stat().st_size
        content = np.memmap(file, np.uint8, mode="r") if size else np.zeros(0, np.uint8)
        header = read_header(content)
        for name, tensor in header.tensors.items():
            if tensor.dtype not in DTYPES.values():
                known = ", ".join(DTYPES)
                raise ValueError(
                    f"contains {name!r} of {short_repr(tensor.dtype)}; known dtypes are {known}"
                )
            if math.prod(tensor.shape) >= MOST_NUMBERS:
                raise ValueError(
                    f"contains {name!r} of impossible shape {short_repr(list(tensor.shape))}"
                )
        check_layout(header)
        return header, size - header.data.size
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} {error}") from error
