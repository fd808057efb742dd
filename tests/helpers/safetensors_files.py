"""Safetensors files with FP8, which the library cannot read into NumPy arrays."""

import json
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxattn.models.checkpoint.safetensors_header import DTYPES, read_header

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_file(file: Path) -> dict[str, np.ndarray]:
    header = read_header(np.fromfile(file, np.uint8))
    return {
        name: header.data[begin:end].view(jnp.dtype(dtype)).reshape(shape)
        for name, (dtype, shape, begin, end) in header.tensors.items()
    }


def write_file(file: Path, tensors: dict[str, np.ndarray]) -> None:
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype = NAMES[tensor.dtype.name]
        entries[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    data = b"".join(tensor.tobytes() for tensor in tensors.values())
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
