"""Linears other than experts that stay FP8 or 4 bits, and the mapping of numbers and scales.

A linear stays FP8 in all layers of a kind or in none. The weight of such a linear is [out, in] as
published, except for the order of columns, with a scale for each block of 128 x 128
(`jaxattn.nn.Fp8Linear`). A linear becomes bfloat16 at load time if no kernel supports its shape, or
if its parts would cut blocks of scales (`Matrix.fits_fp8`).
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from jaxattn.core.numerics.four_bit_tiles import ROWS, FourBitFormat
from jaxattn.core.numerics.fp8_block_scaling import BLOCK, block_counts
from jaxattn.models.blocks import GQA, MLP, Block, MoE
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.network.decoder_spec import DecoderSpec
from jaxattn.models.weight_map.encodings import (
    FourBitEncoding,
    Fp8NumberEncoding,
    Int4GroupEncoding,
    ScaleEncoding,
)
from jaxattn.models.weight_map.tensor_mapping import Key, WeightMapping
from jaxattn.models.weight_map.transforms import (
    PairColumns,
    SplitGroupColumns,
    SplitGroupRows,
    Transpose,
    WeightTransform,
    WriteRowsAt,
    WriteTiles,
)
from jaxattn.nn.four_bit_linear import FourBitLinears


def with_fp8_linears(model: DecoderModel, excluded: Collection[str] = ()) -> DecoderModel:
    """Returns the model with FP8 linears wherever possible, except those named in `excluded`."""
    stream = model.spec.stream

    def changed(layer: Any) -> Any:
        matrices = layer.matrices(stream).items()
        names = (name for name, matrix in matrices if matrix.fits_fp8 and name not in excluded)
        return dataclasses.replace(layer, fp8=tuple(names))

    return _with_layers(model, changed)


def with_four_bit_linears(
    model: DecoderModel, form: FourBitFormat, excluded: Collection[str] = ()
) -> DecoderModel:
    """Returns the model with 4-bit linears of attention and MLPs wherever possible.

    Linears named in `excluded` are excluded.
    """
    stream = model.spec.stream

    def changed(layer: Any) -> Any:
        if not isinstance(layer, GQA | MLP | MoE):
            return layer
        matrices = layer.matrices(stream).items()
        names = (name for name, matrix in matrices if matrix.fits_four_bits(form))
        kept = tuple(name for name in names if name not in excluded)
        return dataclasses.replace(layer, fp8=FourBitLinears(kept, form) if kept else ())

    return _with_layers(model, changed)


def not_four_bits(
    model: DecoderModel, mappings: Iterable[WeightMapping], floats: Callable[[str], bool]
) -> set[str]:
    """Returns the 4-bit linears that cannot stay so: reordered parts, or floats.

    Args:
        mappings: The mapping of a family.
        floats: Whether the weight of a name is not INT4.
    """
    found = set()
    for each in mappings:
        if four_bit_form(model.spec, each.key) is not None:
            whole = isinstance(each.transform, Transpose) and each.transform.first % ROWS == 0
            if not whole or floats(each.name):
                found.add(str(linear_of(model.spec, each.key)))
    return found


def _with_layers(model: DecoderModel, convert: Callable[[Any], Any]) -> DecoderModel:
    def block(each: Block) -> Block:
        mixer, feed_forward = convert(each.mixer), convert(each.feed_forward)
        return dataclasses.replace(each, mixer=mixer, feed_forward=feed_forward)

    found = {each: block(each) for each in dict.fromkeys(model.spec.blocks)}
    blocks = tuple(found[each] for each in model.spec.blocks)
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, blocks=blocks))


def linear_of(spec: DecoderSpec, key: Key) -> str | None:
    """Returns the name of a parameter's quantized linear, such as "shared.down_proj", or None."""
    found = _quantized(spec, key)
    return found and found[0]


def four_bit_form(spec: DecoderSpec, key: Key) -> FourBitFormat | None:
    """Returns the format of a parameter's 4-bit linear, or None if it belongs to none."""
    found = _quantized(spec, key)
    return found[1].form if found and isinstance(found[1], FourBitLinears) else None


def _quantized(spec: DecoderSpec, key: Key) -> tuple[str, tuple[str, ...] | FourBitLinears] | None:
    """Returns (a quantized linear's name, the names of all such linears of its layer), or None."""
    match key:
        case ("segments", int(number), "layers", int(place), ("mixer" | "mlp") as part, *names, _):
            block = spec.segments[number].pattern[place]
            layer = block.mixer if part == "mixer" else block.feed_forward
            name = ".".join(map(str, names))
            return (name, layer.fp8) if name in layer.fp8 else None
    return None


def in_floats(
    spec: DecoderSpec, mappings: Iterable[WeightMapping], dtypes: Mapping[str, str]
) -> set[str]:
    """Returns the FP8 linears for which a folder stores a weight in floats.

    Args:
        mappings: The mapping from `kept`.
        dtypes: Dtypes of the folder's tensors, by name.
    """
    return {
        str(linear_of(spec, each.key))
        for each in mappings
        if each.key[-1] == "weight"
        and linear_of(spec, each.key) is not None
        and not dtypes.get(each.name, "float8").startswith("float8")
    }


def listed(
    spec: DecoderSpec, mappings: Iterable[WeightMapping], modules: Collection[str]
) -> set[str]:
    """Returns the FP8 or 4-bit linears that a list of modules names.

    Args:
        mappings: The mapping of a family.
        modules: As for `is_listed`.
    """
    found = ((linear_of(spec, each.key), each.name) for each in mappings)
    return {name for name, tensor in found if name and is_listed(tensor, modules)}


def is_listed(name: str, modules: Collection[str]) -> bool:
    """Returns whether a tensor belongs to a module of a list.

    Args:
        modules: Names such as "model.layers.0.mlp.shared_expert", "o_proj" or "model.layers.0.".
            The part before the layers has several spellings, and is ignored.
    """
    pattern = _pattern(tuple(map(str, modules)))
    return bool(modules) and pattern.search(_of_layer(name)) is not None


@functools.cache
def _pattern(modules: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern that matches these modules and everything below them."""
    return re.compile("|".join(re.escape(_of_layer(each)) for each in modules))


def _of_layer(name: str) -> str:
    begin = name.find("layers.")
    return f".{name[max(begin, 0) :].strip('.')}."


def kept(spec: DecoderSpec, mappings: Iterable[WeightMapping]) -> Iterator[WeightMapping]:
    """Yields a checkpoint's tensors; for an FP8 linear, its numbers and its scales."""
    for each in mappings:
        if linear_of(spec, each.key) is None:
            yield each
            continue
        form = four_bit_form(spec, each.key)
        if form is not None:
            assert isinstance(each.transform, Transpose)
            tiles = FourBitEncoding(Int4GroupEncoding(form.group), form)
            change = WriteTiles(None, each.transform.first)
            yield dataclasses.replace(each, transform=change, stored=tiles)
            continue
        rows = PairColumns(_rows(each.transform, 1))
        yield dataclasses.replace(each, transform=rows, stored=Fp8NumberEncoding())
        yield dataclasses.replace(
            each,
            name=f"{each.name}_scale_inv",
            shape=block_counts(*each.shape),
            key=(*each.key[:-1], "scale"),
            transform=_rows(each.transform, BLOCK),
            stored=ScaleEncoding(),
        )


def _rows(transform: WeightTransform, block: int) -> WeightTransform:
    """Returns the transform for an untransposed tensor with one row per `block` rows."""
    match transform:
        case Transpose(first):
            return WriteRowsAt(first // block)
        case SplitGroupColumns(group, begin, size, first):
            return SplitGroupRows(group // block, begin // block, size // block, first // block)
    raise ValueError(f"no FP8 linear supports {transform}")
