"""The package's own model format: a folder with config.json and model.safetensors.

    save("model", config, params)
    config, params = load("model")

config.json is one JSON object with the fields of `HybridConfig`; `rope` and `rope.yarn` are objects
with those of `RopeConfig` and `YarnConfig`. Fields with a default may be omitted.

model.safetensors holds these tensors. Names begin with the layer: `G` is repeats.gdn.<j>, GDN layer
j of every repeat, `M` is repeats.mla, the MLA layer of every repeat, and `L` is both. Sizes:
N num_repeats, E hidden_size, F intermediate_size, H num_attention_heads, Q q_lora_rank,
R kv_lora_rank, U qk_nope_head_dim, P qk_rope_head_dim, V v_head_dim, and of the GDN layers Hk and
Hv heads, Dk and Dv head dims, W linear_conv_kernel_dim.

    embedding                   [vocab_size, E]
    norm.weight                 [E]
    lm_head.weight              [E, vocab_size]         without tie_embeddings
    L.norm.weight               [N, E]
    L.mlp_norm.weight           [N, E]
    L.mlp.gate_proj.weight      [N, E, F]
    L.mlp.up_proj.weight        [N, E, F]
    L.mlp.down_proj.weight      [N, F, E]
    G.gdn.in_proj_qkvz.weight   [N, E, 2*Hk*Dk + 2*Hv*Dv]
    G.gdn.in_proj_ba.weight     [N, E, 2*Hv]
    G.gdn.conv1d                [N, 2*Hk*Dk + Hv*Dv, W]
    G.gdn.A_log                 [N, Hv]                 float32
    G.gdn.dt_bias               [N, Hv]                 float32
    G.gdn.norm.weight           [N, Dv]
    G.gdn.out_proj.weight       [N, Hv*Dv, E]
    M.mla.q_proj.weight         [N, E, H*(U + P)]       without q_lora_rank
    M.mla.q_a_proj.weight       [N, E, Q]               with q_lora_rank
    M.mla.q_a_norm.weight       [N, Q]                  with q_lora_rank
    M.mla.q_b_proj.weight       [N, Q, H*(U + P)]       with q_lora_rank
    M.mla.kv_a_proj.weight      [N, E, R + P]
    M.mla.kv_a_norm.weight      [N, R]
    M.mla.w_uk                  [N, H, U, R]
    M.mla.w_uv                  [N, H, R, V]
    M.mla.o_proj.weight         [N, H*V, E]

The other tensors have the dtype `param_dtype`. All numbers are finite. The file's metadata may
contain a CRC-32 of each tensor, `crc32.<name>`, which `load` verifies; `save` writes them.

A complete example, of a byte-level model with random parameters:

    >>> import jax
    >>> from jaxattn.models import Hybrid, HybridConfig, checkpoint
    >>> config = HybridConfig(
    ...     vocab_size=256, hidden_size=32, intermediate_size=48, num_repeats=2, gdn_per_repeat=1,
    ...     num_attention_heads=1, param_dtype="float32",
    ... )
    >>> checkpoint.save("model", config, Hybrid(config).init_params(jax.random.key(0)))
    >>> loaded, params = checkpoint.load("model")
    >>> loaded == config, params["embedding"].shape, params["embedding"].dtype.name
    (True, (256, 32), 'float32')

`python -m jaxattn.serve --model model` serves such a folder.
"""

import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from jaxattn.core.package_path import PACKAGE
from jaxattn.core.validation.config_fields import short_list, short_repr
from jaxattn.models.checkpoint.safetensors_header import check_layout, parse_object, read_header
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid, from_stored, stored_shapes, to_stored
from jaxattn.models.interface import check_params
from jaxattn.models.registry import FAMILIES

EMBEDDED = (
    PACKAGE / "models" / "embedded" / "tiny"
)  # the byte-level model that ships with the package
CONFIG, WEIGHTS = "config.json", "model.safetensors"
SHARDS = "model.safetensors.index.json"  # in a Hugging Face folder with several files
MOST_CONFIG_BYTES = 2**20
SCANNED_BYTES = 2**20  # per step, so that the bytes are still in the CPU's cache when read again
# For each parameter dtype: the integer type of the same size, and its exponent bits, which are all
# 1 only in NaN and infinity.
_EXPONENTS = {"bfloat16": ("uint16", 0x7F80), "float32": ("uint32", 0x7F800000)}


class CheckpointError(ValueError):
    """The folder contains no loadable model; the message names the file and the tensor."""


def save(path: str | os.PathLike, config: HybridConfig, params: nnx.State) -> None:
    """Writes the folder, creating it if needed; a complete model replaces one in it.

    Args:
        path: The folder.
        config: The model's configuration.
        params: The parameters, as returned by `Hybrid.init_params` or by training.

    Raises:
        CheckpointError: `params` are not those of `config`, or contain NaN or infinity. In this
            case nothing is written.
    """
    folder = Path(path)
    try:
        check_params(Hybrid(config).param_shapes(), params)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    # safetensors writes an array's memory in its own order and ignores strides.
    tensors = {n: np.ascontiguousarray(each) for n, each in to_stored(config, params).items()}
    scans = {name: _scan(_bytes(tensor), tensor.dtype.name) for name, tensor in tensors.items()}
    _check_finite(folder, {name: finite for name, (_, finite) in scans.items()})
    sums = {f"crc32.{name}": crc for name, (crc, _) in scans.items()}
    written = {
        WEIGHTS: safetensors.numpy.save(tensors, metadata=sums),
        CONFIG: (json.dumps(config.to_dict(), indent=2) + "\n").encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    # Both files are complete before either replaces an older one.
    for name, data in written.items():
        (folder / f"{name}.partial").write_bytes(data)
    for name in written:
        (folder / f"{name}.partial").replace(folder / name)


def read_config(path: str | os.PathLike) -> HybridConfig:
    """Reads the folder's config only, and no tensor.

    Raises:
        CheckpointError: config.json is missing, damaged, or not in this package's format.
    """
    file = Path(path) / CONFIG
    with _reading(file):
        if (size := _size(file)) > MOST_CONFIG_BYTES:
            raise CheckpointError(
                f"{file} has {size:,} bytes; a configuration may have at most {MOST_CONFIG_BYTES:,}"
            )
        text = file.read_bytes()
    try:
        values = parse_object(text)
        _refuse_hugging_face(file, values)
        return HybridConfig.from_dict(values)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file} is not a model's configuration: {error}") from error


def load(path: str | os.PathLike) -> tuple[HybridConfig, nnx.State]:
    """Loads the folder's config and parameters to the default device.

    Raises:
        CheckpointError: A file is missing or damaged; or a tensor is missing, unexpected, truncated
            or changed, has another shape or dtype, or contains NaN or infinity.
    """
    folder = Path(path)
    config = read_config(folder)
    return config, from_stored(config, read_tensors(folder, config))


def read_tensors(path: str | os.PathLike, config: HybridConfig) -> dict[str, np.ndarray]:
    """Maps the folder's tensors by name from its file, for `from_stored`.

    Raises:
        CheckpointError: See `load`.
    """
    file = Path(path) / WEIGHTS
    content = _mapped(file)
    try:
        header = read_header(content)
    except ValueError as error:
        raise CheckpointError(f"{file} {error}") from error
    # Checked before the layout, which multiplies the shapes: from here on they are known to be
    # small.
    _check_names(file, config, {name: tensor[:2] for name, tensor in header.tensors.items()})
    try:
        check_layout(header)
    except ValueError as error:
        raise CheckpointError(f"{file} {error}") from error
    arrays, finite = {}, {}
    for name, (dtype, shape, begin, end) in header.tensors.items():
        data = header.data[begin:end]
        crc, finite[name] = _scan(data, dtype)
        if header.metadata.get(f"crc32.{name}", crc) != crc:
            raise CheckpointError(f"{file}: tensor {name!r} is damaged: its checksum differs")
        arrays[name] = data.view(jnp.dtype(dtype)).reshape(shape)
    _check_finite(file, finite)
    return arrays


def _refuse_hugging_face(file: Path, values: dict[str, Any]) -> None:
    """Raises with a list of supported formats if the file is a public model's own config."""
    if not values.keys() & {"model_type", "architectures", "text_config", "transformers_version"}:
        return
    kind = values.get("model_type")
    raise CheckpointError(
        f"{file} is a Hugging Face configuration (model_type {short_repr(kind)}). This loader "
        "reads jaxattn's own format, which jaxattn.models.checkpoint describes and its save() "
        f"writes. jaxattn.models.load(folder) reads these types too: {', '.join(FAMILIES)}. "
        f"`python -m jaxattn.plan {file.parent}` plans their memory"
    )


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raises CheckpointError if the file cannot be read."""
    try:
        yield
    except FileNotFoundError as error:
        hint = ""
        if file.name == WEIGHTS and (file.parent / SHARDS).exists():
            hint = f"; the folder has {SHARDS}, and weights in several files are not supported"
        raise CheckpointError(f"cannot read {file}: {error.strerror}{hint}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error


def _size(file: Path) -> int:
    """Returns the size of a regular file; a pipe or a device may have no end."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"cannot read {file}: it is not a regular file")
    return status.st_size


def _mapped(file: Path) -> np.ndarray:
    """Maps the file's bytes, uint8 [size], which are read on first use."""
    with _reading(file):
        if not _size(file):  # NumPy cannot map an empty file
            return np.zeros(0, np.uint8)
        return np.memmap(file, np.uint8, mode="r")


def _check_names(file: Path, config: HybridConfig, tensors: dict) -> None:
    expected = {name: (leaf.dtype.name, leaf.shape) for name, leaf in stored_shapes(config).items()}
    for name, (dtype, shape) in expected.items():
        wanted = f"{dtype}{list(shape)}"
        if name not in tensors:
            raise CheckpointError(f"{file}: tensor {name!r} is missing; expected {wanted}")
        if tensors[name] != (dtype, shape):
            actual = f"{tensors[name][0][:100]}{short_repr(list(tensors[name][1]))}"
            raise CheckpointError(f"{file}: tensor {name!r} is {actual}; expected {wanted}")
    if unexpected := sorted(tensors.keys() - expected.keys()):
        names = [repr(name) for name in unexpected]
        raise CheckpointError(f"{file}: unexpected tensor {short_list(names, most=1)}")


def _check_finite(file: Path, finite: Mapping[str, bool]) -> None:
    """Raises with the names of the tensors that are not finite."""
    if broken := [repr(name) for name, holds in finite.items() if not holds]:
        raise CheckpointError(f"{file}: NaN or infinity in tensor {short_list(broken)}")


def _scan(data: np.ndarray, dtype: str) -> tuple[str, bool]:
    """Returns, in one pass over a tensor, its CRC-32 and whether all numbers are finite."""
    word, exponent = _EXPONENTS[dtype]
    crc, finite = 0, True
    for begin in range(0, data.size, SCANNED_BYTES):
        part = data[begin : begin + SCANNED_BYTES]
        crc = zlib.crc32(part.data, crc)
        finite = finite and bool((part.view(word) & exponent).max() < exponent)
    return f"{crc:08x}", finite


def _bytes(tensor: np.ndarray) -> np.ndarray:
    return tensor.reshape(-1).view(np.uint8)
