"""Reads a folder in the layout of the Hugging Face hub: config.json and safetensors, one or many.

    model, params = load("Youtu-LLM-2B")

The headers of all files are checked against the family's table before one byte of a tensor is read.
What is missing, unknown or of another shape or dtype is named, all of it at once. Then the
parameters are allocated and filled (`weight_loader.py`).

Weights may be bfloat16, float16 or float32, FP8 in blocks, or INT4 in groups
(`families/components/quantization.py`). Routed experts and other matrices in FP8 or 4 bits stay so,
where a kernel reads their shapes (`weight_map/quantized_linears.py`). Every other quantized weight
becomes a float: its product with its scale in float32, rounded once.

No code of a repository is run, and no pickle is read.
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
from jaxattn.models.families.components.quantization import (
    INPUT_SCALES,
    Quantization,
    stored_as,
)
from jaxattn.models.loading.gguf import gguf_checkpoint
from jaxattn.models.loading.gguf.gguf_header import GgufHeader
from jaxattn.models.loading.kv_scales import is_scale, read_scales
from jaxattn.models.loading.read_plan import PublishedWeight, SourceTensor
from jaxattn.models.loading.tied_head import check_tied, with_stored_head
from jaxattn.models.loading.weight_loader import READERS, OnProgress, load_weights
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.registry import PublishedModel, WeightsFormat, read_model
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
    """The model of a folder and its parameters, on JAX's default device.

    Args:
        folder: config.json, and model.safetensors or the shards that its index names.
        dtype: "bfloat16" or "float32", of the products and the weights; None is bfloat16.
        experts: of the routed experts' weights. None is FP8 or 4 bits where they are stored so, and
            `dtype` otherwise. "fp8" and "4bit" refuse a folder that stores them in another format.
            "bfloat16" makes `dtype` of quantized ones, also where that is float32.
        dense: the same of the matrices beside the routed experts. Those with a shape that no kernel
            reads become `dtype`.
        draft_head: also read the head that guesses tokens (MTP), for `Limits(speculate_by="mtp")`.
        readers: threads that read ahead. Loading takes at most `weight_loader.PART_BYTES` of host
            memory for each, whatever the model's size.
        on_progress: called with the bytes that are placed and the bytes in all.

    Raises:
        CheckpointError: a file is missing or damaged, config.json says what is not supported, or
            the tensors are not those of the model. Nothing was allocated then.
        ValueError: `readers` is no positive integer.
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
    """What config.json says, of that file alone; arguments are those of `load`.

    Raises:
        CheckpointError: it is missing or damaged, or says what is not supported.
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
    """The model of these fields; other arguments are those of `load`.

    Raises:
        CheckpointError: they say what is not supported.
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
    """What config.json says, but for a tied head that the folder has another one of, for 4-bit
    weights whose scales it has in another dtype, or that it has in floats, and with `mixed` for FP8
    matrices beside the experts that it has in floats.

    It is unchanged where the weights are not there yet, or damaged: loading will say so.
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
    """The tensors of each weight, of which only the headers are read, and the scales of an FP8
    cache.

    Raises:
        CheckpointError: a file is missing or damaged, or the tensors are not those of the model.
    """
    tensors = open_tensors(folder)
    check_tied(folder, published, tensors)
    placed = published.placed(tensors)
    weights = find(folder, tensors, placed, published.unread(tensors), published.quantization)
    return weights, read_scales(tensors, published.model.spec)


def open_gguf(
    header: GgufHeader, published: PublishedModel
) -> tuple[list[PublishedWeight], dict[Key, np.ndarray]]:
    """As `open_weights`, of a GGUF file, which has no scales of a cache.

    Raises:
        CheckpointError: the tensors are not those of the model.
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
    """The parameters, on JAX's default device; `scales` are some of them."""
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
    found: Mapping[str, TensorEntry],
    placed: Sequence[WeightMapping],
    skipped: tuple[str, ...] = (),
    quantization: Quantization | None = None,
) -> list[PublishedWeight]:
    """The tensors of each weight.

    Args:
        found: all tensors of the folder.
        skipped: beginnings of names that may be there and are not read.

    Raises:
        CheckpointError: the tensors are not those of the model; every difference is named.
    """
    dtypes = {name: tensor.dtype for name, tensor in found.items()}
    entries = dict(found)
    weights, expected, missing, others = [], set[str](), dict[str, None](), dict[str, None]()
    for each in placed:
        stored = each.stored or stored_as(each.name, dtypes, quantization)
        try:
            parts = stored.parts(each.name, each.shape)
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from error
        expected.update(part.name for part in parts)
        entries |= _scalars(entries, parts)
        missing |= dict.fromkeys(repr(part.name) for part in parts if part.name not in entries)
        there = [part for part in parts if part.name in entries]
        others |= dict.fromkeys(
            wrong for part in there for wrong in _differences(part, entries[part.name])
        )
        sources = tuple(SourceTensor(entries[part.name], part.rows) for part in there if part.rows)
        weights.append(PublishedWeight(each, stored, sources))
    others_of = (n for n in found if n not in expected and not _is_skipped(n, skipped))
    unknown = [repr(n) for n in others_of if not _is_zero_bias(n, found)]
    wrong = [
        f"{what} {short_list(list(names), width=200)}"
        for what, names in (
            ("missing", missing), ("unknown", unknown), ("with another shape or dtype", others)
        )
        if names
    ]  # fmt: skip
    if wrong:
        hint = ""
        if any(key[-1] == "scale" for key in (each.placed.key for each in weights)):
            hint = (
                "; dense='bfloat16' (--dense bfloat16) accepts FP8 and float matrices outside "
                "the experts"
            )
        raise CheckpointError(
            f"{folder}: the tensors do not match the model: {'; '.join(wrong)}{hint}"
        )
    return weights


def _scalars(
    found: Mapping[str, TensorEntry], parts: Sequence[EncodedTensor]
) -> dict[str, TensorEntry]:
    """Those of the parts with one number that have no axis, as if they had one."""
    ones = [part.name for part in parts if part.shape == (1,) and part.name in found]
    return {n: found[n]._replace(shape=(1,)) for n in ones if found[n].shape == ()}


def _differences(part: EncodedTensor, tensor: TensorEntry) -> Iterator[str]:
    """In words, how a tensor differs from the part that it should be."""
    if tensor.shape != part.shape or tensor.dtype not in part.dtypes:
        dtypes = "a float" if part.dtypes == FLOATS else " or ".join(part.dtypes)
        found = f"{part.name!r} {tensor.dtype}{short_repr(list(tensor.shape))}"
        yield f"{found}, expected {dtypes}{list(part.shape)}"
    elif not part.rows:
        yield from _other_numbers(part, tensor)


def _other_numbers(part: EncodedTensor, tensor: TensorEntry) -> Iterator[str]:
    """In words, how the numbers of a tensor that is not placed differ from what they should be."""
    stated = np.fromfile(tensor.file, tensor.dtype, math.prod(part.shape), offset=tensor.begin)
    if part.each_of:
        others = stated[~np.isin(stated, part.each_of)]
        if others.size:
            words = " or ".join(f"{word & WORD:#x}" for word in part.each_of)
            yield f"{part.name!r} has {int(others[0]) & WORD:#x}, expected {words}{ASYMMETRIC}"
    elif stated.tolist() != list(part.numbers):
        why = REORDERED if part.name.endswith(".g_idx") else ""
        found, wanted = short_repr(stated.tolist()), short_repr(list(part.numbers))
        yield f"{part.name!r} is {found}, expected {wanted}{why}"


def _is_zero_bias(name: str, found: Mapping[str, TensorEntry]) -> bool:
    """Whether it is the bias that AutoGPTQ writes for linears without one: zeros."""
    if not name.endswith(".bias") or f"{name.removesuffix('bias')}qweight" not in found:
        return False
    tensor = found[name]
    return not np.fromfile(tensor.file, np.uint8, tensor.nbytes, offset=tensor.begin).any()


def _is_skipped(name: str, skipped: tuple[str, ...]) -> bool:
    # Old files hold the frequencies of RoPE, which the configuration says too. Activations are not
    # quantized.
    unused = name.endswith(("rotary_emb.inv_freq", *INPUT_SCALES))
    return name.startswith(skipped) or unused or is_scale(name)
