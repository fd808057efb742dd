"""Loader for folders in the Hugging Face layout: config.json and one or more safetensors files.

    model, params = load("Youtu-LLM-2B")

The loader checks the headers of all files against the family's table before it reads any tensor.
One error names all tensors that are missing, unknown, or of another shape or dtype. The loader then
allocates the parameters and fills them (`weight_loader.py`).

Weights may be bfloat16, float16 or float32, FP8 in blocks, or INT4 in groups
(`families/components/quantization.py`). Routed experts and other matrices in FP8 or 4 bits stay so
if a kernel supports their shapes (`weight_map/quantized_linears.py`). Every other quantized weight
becomes a float: its product with its scale in float32, rounded once.

The loader runs no code of a repository, and reads no pickle.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxattn.core.validation.array_checks import check_sizes
from jaxattn.core.validation.config_fields import short_list, short_repr
from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.models.checkpoint.safetensors_index import CONFIG, TensorEntry, open_tensors, read_json
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.families.components.published_model import PublishedModel
from jaxattn.models.families.components.quantization import (
    INPUT_SCALES,
    Quantization,
    stored_as,
)
from jaxattn.models.loading.gguf import gguf_checkpoint
from jaxattn.models.loading.gguf.gguf_header import GgufHeader
from jaxattn.models.loading.kv_scales import is_scale, read_scales
from jaxattn.models.loading.read_plan import PublishedWeight, SourceTensor
from jaxattn.models.loading.tied_embeddings import check_tied, with_stored_head
from jaxattn.models.loading.weight_loader import READERS, OnProgress, load_weights
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.registry import WeightsFormat, read_model
from jaxattn.models.weight_map.encodings import FLOATS, EncodedTensor
from jaxattn.models.weight_map.tensor_mapping import Key, WeightMapping
from jaxattn.nn.four_bit_linear import FourBitLinears

DTYPES = ("bfloat16", "float32")
WORD = 0xFFFFFFFF
ASYMMETRIC = "; sym=true in config.json needs all zero points to be 8"
REORDERED = "; groups of reordered columns (desc_act) are not implemented"


def load(
    folder: str | os.PathLike,
    *,
    dtype: str | None = None,
    experts: WeightsFormat | None = None,
    dense: WeightsFormat | None = None,
    draft_head: bool = False,
    readers: int = READERS,
    on_progress: OnProgress | None = None,
) -> tuple[DecoderModel, nnx.State]:
    """Loads the model of a folder and its parameters, on JAX's default device.

    Args:
        folder: Folder with config.json, and model.safetensors or the shards that its index names.
        dtype: Dtype of products and weights, "bfloat16" or "float32". None means bfloat16.
        experts: Format of the routed experts' weights. None keeps FP8 or 4 bits if they are stored
            so, and uses `dtype` otherwise. "fp8" and "4bit" reject a folder that stores another
            format. "bfloat16" converts quantized weights to `dtype`, also if that is float32.
        dense: The same for the other matrices. Those with a shape that no kernel supports become
            `dtype`.
        draft_head: Whether to load the draft head (MTP) too, for `Limits(speculate_by="mtp")`.
        readers: Number of threads that read ahead. For each, loading uses at most
            `weight_loader.PART_BYTES` of host memory, whatever the model's size.
        on_progress: Callback with the bytes loaded and the total bytes.

    Raises:
        CheckpointError: A file is missing or damaged, config.json contains something unsupported,
            or the tensors are not those of the model. In this case nothing was allocated.
        ValueError: `readers` is not a positive integer.
    """
    path = Path(folder)
    check_sizes("load", readers=readers)
    published = read_config(path, dtype, experts, dense, draft_head)
    weights, scales = open_weights(path, published)
    return published.model, place(
        published.model, weights, scales, readers=readers, on_progress=on_progress
    )


def read_config(
    folder: Path,
    dtype: str | None = None,
    experts: WeightsFormat | None = None,
    dense: WeightsFormat | None = None,
    draft_head: bool = False,
) -> PublishedModel:
    """Reads config.json only; arguments are those of `load`.

    Raises:
        CheckpointError: The file is missing or damaged, or contains something unsupported.
    """
    fields = ConfigFields(read_json(folder / CONFIG), str(folder / CONFIG))
    published = published_model(fields, dtype, experts, dense, draft_head)
    return _as_stored(folder, published, mixed=dense is None)


def published_model(
    fields: ConfigFields,
    dtype: str | None = None,
    experts: WeightsFormat | None = None,
    dense: WeightsFormat | None = None,
    draft_head: bool = False,
) -> PublishedModel:
    """Returns the model of these fields; other arguments are those of `load`.

    Raises:
        CheckpointError: The fields contain something unsupported.
    """
    if dtype not in (None, *DTYPES):
        raise CheckpointError(
            f"dtype must be None, 'bfloat16' or 'float32'; got {short_repr(dtype)}"
        )
    try:
        published = read_model(fields, experts, dense, draft_head)
        model = published.model.with_dtype(dtype) if dtype else published.model
    except (ConfigError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    return published._replace(model=model)


def _as_stored(folder: Path, published: PublishedModel, *, mixed: bool) -> PublishedModel:
    """Adjusts config.json's model to the folder's tensors.

    The model gets a separate head if the folder's head differs from the embedding. 4-bit weights
    get the dtype of the folder's scales, or become floats if they are stored so. With `mixed`, FP8
    matrices other than experts also become floats if they are stored so. If the weights do not
    exist yet or are damaged, the model stays unchanged: loading will raise the error.
    """
    spec = published.model.spec
    kept = [each.fp8 for b in spec.blocks for each in (b.mixer, b.feed_forward)]
    four_bit = any(published.forms) or any(isinstance(each, FourBitLinears) for each in kept)
    mixed = (mixed and any(kept)) or four_bit
    if not mixed and not spec.tie_embeddings:
        return published
    try:
        tensors = open_tensors(folder)
        published = with_stored_head(folder, published, tensors)
    except CheckpointError:
        return published
    if not mixed:
        return published
    return published.as_stored({name: tensor.dtype for name, tensor in tensors.items()})


def open_weights(
    folder: Path, published: PublishedModel
) -> tuple[list[PublishedWeight], dict[Key, np.ndarray]]:
    """Returns the tensors of each weight, and the scales of an FP8 cache; reads only headers.

    Raises:
        CheckpointError: A file is missing or damaged, or the tensors are not those of the model.
    """
    tensors = open_tensors(folder)
    check_tied(folder, published, tensors)
    placed = published.placed(tensors)
    weights = find(folder, tensors, placed, published.unread(tensors), published.quantization)
    return weights, read_scales(tensors, published.model.spec)


def open_gguf(
    header: GgufHeader, published: PublishedModel
) -> tuple[list[PublishedWeight], dict[Key, np.ndarray]]:
    """Does the same as `open_weights` for a GGUF file, which has no scales of a cache.

    Raises:
        CheckpointError: The tensors are not those of the model.
    """
    tensors, placed = gguf_checkpoint.open_tensors(header, published)
    weights = find(header.path, tensors, placed)
    return weights, read_scales({}, published.model.spec)


def place(
    model: DecoderModel,
    weights: Sequence[PublishedWeight],
    scales: Mapping[Key, np.ndarray],
    *,
    readers: int = READERS,
    on_progress: OnProgress | None = None,
) -> nnx.State:
    """Returns the parameters, on JAX's default device; `scales` are some of them."""
    flat: dict[Any, Any] = dict(nnx.to_flat_state(model.param_shapes()))
    shapes = {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for key, leaf in flat.items()
        if key not in scales
    }
    arrays = {key: jnp.asarray(scale) for key, scale in scales.items()}
    arrays |= load_weights(shapes, weights, readers=readers, on_progress=on_progress)
    return nnx.from_flat_state([(k, leaf.replace(arrays[k])) for k, leaf in flat.items()])


def find(
    folder: Path,
    tensors: Mapping[str, TensorEntry],
    mappings: Sequence[WeightMapping],
    skipped: tuple[str, ...] = (),
    quantization: Quantization | None = None,
) -> list[PublishedWeight]:
    """Returns the tensors of each weight.

    Args:
        tensors: All tensors of the folder.
        skipped: Prefixes of names that may exist and are not read.

    Raises:
        CheckpointError: The tensors are not those of the model; the message names every difference.
    """
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    entries = dict(tensors)
    weights, expected, missing, mismatched = [], set[str](), dict[str, None](), dict[str, None]()
    for each in mappings:
        stored = each.stored or stored_as(each.name, dtypes, quantization)
        try:
            parts = stored.parts(each.name, each.shape)
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from error
        expected.update(part.name for part in parts)
        entries |= _scalars(entries, parts)
        missing |= dict.fromkeys(repr(part.name) for part in parts if part.name not in entries)
        there = [part for part in parts if part.name in entries]
        mismatched |= dict.fromkeys(
            wrong for part in there for wrong in _differences(part, entries[part.name])
        )
        sources = tuple(SourceTensor(entries[part.name], part.rows) for part in there if part.rows)
        weights.append(PublishedWeight(each, stored, sources))
    others_of = (n for n in tensors if n not in expected and not _is_skipped(n, skipped))
    unknown = [repr(n) for n in others_of if not _is_zero_bias(n, tensors)]
    problems = [
        f"{what} {short_list(list(names), width=200)}"
        for what, names in (
            ("missing", missing), ("unknown", unknown), ("with another shape or dtype", mismatched)
        )
        if names
    ]  # fmt: skip
    if problems:
        hint = ""
        if any(key[-1] == "scale" for key in (each.mapping.key for each in weights)):
            hint = (
                "; dense='bfloat16' (--dense bfloat16) accepts FP8 and float matrices outside "
                "the experts"
            )
        raise CheckpointError(
            f"{folder}: the tensors do not match the model: {'; '.join(problems)}{hint}"
        )
    return weights


def _scalars(
    tensors: Mapping[str, TensorEntry], parts: Sequence[EncodedTensor]
) -> dict[str, TensorEntry]:
    """Gives one-element parts without an axis the shape (1,)."""
    ones = [part.name for part in parts if part.shape == (1,) and part.name in tensors]
    return {n: tensors[n]._replace(shape=(1,)) for n in ones if tensors[n].shape == ()}


def _differences(part: EncodedTensor, tensor: TensorEntry) -> Iterator[str]:
    """Describes how a tensor differs from the expected part."""
    if tensor.shape != part.shape or tensor.dtype not in part.dtypes:
        dtypes = "a float" if part.dtypes == FLOATS else " or ".join(part.dtypes)
        found = f"{part.name!r} {tensor.dtype}{short_repr(list(tensor.shape))}"
        yield f"{found}, expected {dtypes}{list(part.shape)}"
    elif not part.rows:
        yield from _other_numbers(part, tensor)


def _other_numbers(part: EncodedTensor, tensor: TensorEntry) -> Iterator[str]:
    """Describes how the numbers of a checked tensor differ from the expected ones."""
    stated = np.fromfile(tensor.file, tensor.dtype, math.prod(part.shape), offset=tensor.begin)
    if part.allowed_values:
        others = stated[~np.isin(stated, part.allowed_values)]
        if others.size:
            words = " or ".join(f"{word & WORD:#x}" for word in part.allowed_values)
            yield f"{part.name!r} has {int(others[0]) & WORD:#x}, expected {words}{ASYMMETRIC}"
    elif stated.tolist() != list(part.numbers):
        why = REORDERED if part.name.endswith(".g_idx") else ""
        found, wanted = short_repr(stated.tolist()), short_repr(list(part.numbers))
        yield f"{part.name!r} is {found}, expected {wanted}{why}"


def _is_zero_bias(name: str, tensors: Mapping[str, TensorEntry]) -> bool:
    """Returns whether the tensor is the zero bias that AutoGPTQ writes for linears without one."""
    if not name.endswith(".bias") or f"{name.removesuffix('bias')}qweight" not in tensors:
        return False
    tensor = tensors[name]
    return not np.fromfile(tensor.file, np.uint8, tensor.nbytes, offset=tensor.begin).any()


def _is_skipped(name: str, skipped: tuple[str, ...]) -> bool:
    # Old files contain the frequencies of RoPE, which config.json determines too. Activations are
    # not quantized, so input scales are unused.
    unused = name.endswith(("rotary_emb.inv_freq", *INPUT_SCALES))
    return name.startswith(skipped) or unused or is_scale(name)
