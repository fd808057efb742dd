"""Reads a folder in the layout of the Hugging Face hub: config.json and safetensors, one or many.

    model, params = load("Youtu-LLM-2B")

The headers of all files are checked against the family's table before one byte of a tensor is read.
What is missing, unknown or of another shape or dtype is named, all of it at once. Then each
parameter is allocated once on the device and filled in place, from blocks of at most `BLOCK_BYTES`.
The host holds at most `readers` + 1 blocks. Transposes and splits run on the device.

No code of a repository is run, and no pickle is read.
"""

import concurrent.futures
import functools
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxattn.core.fields import some
from jaxattn.models.checkpoint import CheckpointError
from jaxattn.models.decoder import DecoderModel
from jaxattn.models.families.fields import ConfigError, Fields
from jaxattn.models.placing import Change, Placed
from jaxattn.models.registry import read_model
from jaxattn.models.safetensors_header import Header, check_layout, parse_object, read_header

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
BLOCK_BYTES = 64 * 2**20
MOST_JSON_BYTES = 100 * 2**20
FLOATS = ("bfloat16", "float16", "float32")

OnProgress = Callable[[int, int], None]


def load(
    folder: str | os.PathLike,
    *,
    dtype: str | None = None,
    readers: int = 2,
    on_progress: OnProgress | None = None,
) -> tuple[DecoderModel, nnx.State]:
    """The model of a folder and its parameters, on JAX's default device.

    Args:
        folder: config.json, and model.safetensors or the shards that its index names.
        dtype: "bfloat16" or "float32", of the products and the weights; None is bfloat16.
        readers: threads that read blocks ahead.
        on_progress: called with the bytes that are placed and the bytes in all.

    Raises:
        CheckpointError: a file is missing or damaged, config.json says what is not supported, or
            the tensors are not those of the model. Nothing was allocated then.
    """
    path = Path(folder)
    model, placed, skipped = read_config(path, dtype)
    tensors = open_tensors(path)
    check_tensors(path, tensors, placed, skipped)
    return model, fill(model, tensors, placed, readers=readers, on_progress=on_progress)


def read_config(
    folder: Path, dtype: str | None = None
) -> tuple[DecoderModel, list[Placed], tuple[str, ...]]:
    """(the model, its tensors' places, beginnings of names that are skipped), of config.json alone.

    Raises:
        CheckpointError: it is missing or damaged, or says what is not supported.
    """
    file = folder / CONFIG
    try:
        model, placed, skipped = read_model(Fields(read_json(file), str(file)))
        return model.with_dtype(dtype) if dtype else model, placed, skipped
    except (ConfigError, ValueError) as error:
        raise CheckpointError(str(error)) from error


class Found(NamedTuple):
    """A tensor of a folder.

    Attributes:
        file: that it lies in.
        dtype, shape: as the file says.
        data: its bytes, mapped from the file, uint8 [bytes].
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    data: np.ndarray


def open_tensors(folder: Path) -> dict[str, Found]:
    """The tensors of all files by name; of the files only the headers are read.

    Raises:
        CheckpointError: a file is missing or damaged, or two files hold a tensor of one name.
    """
    found: dict[str, Found] = {}
    for name in _files(folder):
        file = folder / name
        header = _header(file)
        for tensor, (dtype, shape, begin, end) in header.tensors.items():
            if tensor in found:
                raise CheckpointError(
                    f"tensor {tensor!r} is in two files, {found[tensor].file.name} and {file.name}"
                )
            found[tensor] = Found(file, dtype, shape, begin, header.data[begin:end])
    return found


def check_tensors(
    folder: Path, found: Mapping[str, Found], placed: list[Placed], skipped: tuple[str, ...] = ()
) -> None:
    """Raises CheckpointError, with every difference, unless the tensors are those of the model.

    Args:
        skipped: beginnings of names that may be there and are not read.
    """
    wrong = []
    expected = {each.name: each.shape for each in placed}
    missing = [repr(name) for name in expected if name not in found]
    unknown = [repr(n) for n in found if n not in expected and not _is_skipped(n, skipped)]
    if missing:
        wrong.append(f"missing {some(missing)}")
    if unknown:
        wrong.append(f"unknown {some(unknown)}")
    others = [
        f"{name!r} {found[name].dtype}{list(found[name].shape)}, expected a float{list(shape)}"
        for name, shape in expected.items()
        if name in found and (found[name].shape != shape or found[name].dtype not in FLOATS)
    ]
    if others:
        wrong.append(f"of another shape or dtype {some(others)}")
    if wrong:
        raise CheckpointError(f"{folder}: the tensors are not the model's: {'; '.join(wrong)}")


def fill(
    model: DecoderModel,
    found: Mapping[str, Found],
    placed: list[Placed],
    *,
    readers: int = 2,
    on_progress: OnProgress | None = None,
) -> nnx.State:
    """The parameters, each allocated once and filled in place.

    Args:
        found: checked tensors.
        readers: threads that read blocks ahead.
    """
    flat = {key: leaf for key, leaf in nnx.to_flat_state(model.param_shapes())}
    shapes = {key: (leaf.shape, leaf.dtype) for key, leaf in flat.items()}
    arrays = jax.jit(lambda: {k: jnp.zeros(*shape) for k, shape in shapes.items()})()
    total = sum(found[each.name].data.nbytes for each in placed)
    done = 0
    for block in _read_ahead(_blocks(found, placed), readers):
        each = block.placed
        target = arrays.pop(each.key)
        place = (*each.index, *each.change.start(block.row, target.ndim - len(each.index)))
        arrays[each.key] = _place(target, block.rows, np.array(place, np.int32), each.change)
        done += block.rows.nbytes
        if on_progress:
            on_progress(done, total)
    return nnx.from_flat_state([(key, leaf.replace(arrays[key])) for key, leaf in flat.items()])


@functools.partial(jax.jit, static_argnames="change", donate_argnums=0)
def _place(target: jax.Array, rows: jax.Array, place: jax.Array, change: Change) -> jax.Array:
    """The parameter with a block of a tensor's rows in its place."""
    part = change.block(rows).astype(target.dtype)
    part = part.reshape((1,) * (target.ndim - part.ndim) + part.shape)
    return lax.dynamic_update_slice(target, part, tuple(place))


def _is_skipped(name: str, skipped: tuple[str, ...]) -> bool:
    # Old files hold the frequencies of RoPE, which the configuration says too.
    return name.startswith(skipped) or name.endswith("rotary_emb.inv_freq")


class _Block(NamedTuple):
    placed: Placed
    row: int
    rows: np.ndarray


def _blocks(found: Mapping[str, Found], placed: list[Placed]) -> Iterator[Callable[[], _Block]]:
    """What reads each block, in the order of the files."""

    def where(each: Placed) -> tuple[str, int]:
        tensor = found[each.name]
        return str(tensor.file), tensor.begin

    for each in sorted(placed, key=where):
        tensor = found[each.name]
        values = tensor.data.view(jnp.dtype(tensor.dtype)).reshape(tensor.shape)
        together = each.change.rows_together
        row_bytes = max(tensor.data.nbytes // tensor.shape[0], 1)
        step = max(BLOCK_BYTES // (row_bytes * together), 1) * together
        for row in range(0, tensor.shape[0], step):
            yield functools.partial(_read, each, values, row, min(row + step, tensor.shape[0]))


def _read(each: Placed, values: np.ndarray, begin: int, end: int) -> _Block:
    return _Block(each, begin, np.array(values[begin:end]))


def _read_ahead(blocks: Iterator[Callable[[], _Block]], readers: int) -> Iterator[_Block]:
    """The blocks in order; `readers` of them are read while one is placed."""
    with concurrent.futures.ThreadPoolExecutor(readers) as pool:
        ahead = deque(pool.submit(read) for read in itertools.islice(blocks, readers))
        while ahead:
            block = ahead.popleft().result()
            if read := next(blocks, None):
                ahead.append(pool.submit(read))
            yield block


def _files(folder: Path) -> list[str]:
    """The names of a folder's safetensors files.

    Raises:
        CheckpointError: there are none, or the index names what is no file of the folder.
    """
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (folder / INDEX).is_file():
        pickles = sorted(each.name for each in folder.glob("*.bin"))
        hint = f"; {some(pickles)} can run code when they are read, and are not" if pickles else ""
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}")
    names = shards_of(folder / INDEX)
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / INDEX} names {name!r}, which is missing")
    return names


def shards_of(index: Path) -> list[str]:
    """The files that an index names, which need not be there.

    Raises:
        CheckpointError: the index is damaged, or names what can be no file of its folder.
    """
    tensors = read_json(index).get("weight_map")
    if not isinstance(tensors, dict) or not tensors:
        raise CheckpointError(f"{index}: weight_map must be an object with tensors")
    names = sorted({str(name) for name in tensors.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r}, which is no shard of the folder")
    return names


def _header(file: Path) -> Header:
    try:
        if not file.is_file():
            raise CheckpointError(f"{file} is no file")
        header = read_header(np.memmap(file, np.uint8, mode="r"))
        for name, tensor in header.tensors.items():
            if tensor.dtype not in FLOATS:
                raise ValueError(f"holds {name!r} of {tensor.dtype}, and {FLOATS} are supported")
            if math.prod(tensor.shape) >= 2**40:
                raise ValueError(f"holds {name!r} of absurd shape {list(tensor.shape)}")
        check_layout(header)
        return header
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file} {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: it is missing, too large or no JSON object.
    """
    try:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size > MOST_JSON_BYTES:
            raise CheckpointError(f"{file} is larger than {MOST_JSON_BYTES:,} bytes")
        return parse_object(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
