"""Linears outside of the experts that stay FP8 or 4 bits, and the places of numbers and scales.

A linear stays FP8 in all layers of a kind or in none. It then is [out, in], as published but for
the order of columns, beside a scale for each block of 128 x 128 (`jaxattn.nn.Fp8Linear`). What has
a shape that no kernel reads becomes bfloat16 on loading, as what would cut blocks of scales
(`Matrix.fits_fp8`).
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


def with_fp8_linears(model: DecoderModel, without: Collection[str] = ()) -> DecoderModel:
    """The model whose linears are FP8 where they can be, but for those of these names."""
    stream = model.spec.stream

    def changed(layer: Any) -> Any:
        matrices = layer.matrices(stream).items()
        names = (name for name, matrix in matrices if matrix.fits_fp8 and name not in without)
        return dataclasses.replace(layer, fp8=tuple(names))

    return _with_layers(model, changed)


def with_four_bit_linears(
    model: DecoderModel, form: FourBitFormat, without: Collection[str] = ()
) -> DecoderModel:
    """The model whose linears of attention and MLPs are of 4 bits where they can be, but for those
    of these names."""
    stream = model.spec.stream

    def changed(layer: Any) -> Any:
        if not isinstance(layer, GQA | MLP | MoE):
            return layer
        matrices = layer.matrices(stream).items()
        names = (name for name, matrix in matrices if matrix.fits_four_bits(form))
        kept = tuple(name for name in names if name not in without)
        return dataclasses.replace(layer, fp8=FourBitLinears(kept, form) if kept else ())

    return _with_layers(model, changed)


def not_four_bits(
    model: DecoderModel, placed: Iterable[WeightMapping], floats: Callable[[str], bool]
) -> set[str]:
    """The 4-bit linears that cannot be: parts that are put in another order, or floats.

    Args:
        placed: of a family.
        floats: whether the weight of this name is no INT4.
    """
    found = set()
    for each in placed:
        if four_bit_form(model.spec, each.key) is not None:
            whole = isinstance(each.change, Transpose) and each.change.first % ROWS == 0
            if not whole or floats(each.name):
                found.add(str(linear_of(model.spec, each.key)))
    return found


def _with_layers(model: DecoderModel, changed: Callable[[Any], Any]) -> DecoderModel:
    def block(each: Block) -> Block:
        mixer, feed_forward = changed(each.mixer), changed(each.feed_forward)
        return dataclasses.replace(each, mixer=mixer, feed_forward=feed_forward)

    found = {each: block(each) for each in dict.fromkeys(model.spec.blocks)}
    blocks = tuple(found[each] for each in model.spec.blocks)
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, blocks=blocks))


def linear_of(spec: DecoderSpec, key: Key) -> str | None:
    """The name of the FP8 or 4-bit linear that a parameter is of, "q_proj" or "shared.down_proj";
    None where it is of no such linear."""
    found = _quantized(spec, key)
    return found and found[0]


def four_bit_form(spec: DecoderSpec, key: Key) -> FourBitFormat | None:
    """The format of the 4-bit linear that a parameter is of; None where it is of no such linear."""
    found = _quantized(spec, key)
    return found[1].form if found and isinstance(found[1], FourBitLinears) else None


def _quantized(spec: DecoderSpec, key: Key) -> tuple[str, tuple[str, ...] | FourBitLinears] | None:
    """(a linear's name, the names of its layer's quantized linears, where it is one)."""
    match key:
        case ("segments", int(number), "layers", int(place), ("mixer" | "mlp") as part, *names, _):
            block = spec.segments[number].pattern[place]
            layer = block.mixer if part == "mixer" else block.feed_forward
            name = ".".join(map(str, names))
            return (name, layer.fp8) if name in layer.fp8 else None
    return None


def in_floats(
    spec: DecoderSpec, placed: Iterable[WeightMapping], dtypes: Mapping[str, str]
) -> set[str]:
    """The FP8 linears of which a folder has a weight in floats.

    Args:
        placed: of `kept`.
        dtypes: of the folder's tensors, by name.
    """
    return {
        str(linear_of(spec, each.key))
        for each in placed
        if each.key[-1] == "weight"
        and linear_of(spec, each.key) is not None
        and not dtypes.get(each.name, "float8").startswith("float8")
    }


def listed(
    spec: DecoderSpec, placed: Iterable[WeightMapping], modules: Collection[str]
) -> set[str]:
    """The FP8 or 4-bit linears of which a list has a module.

    Args:
        placed: of a family.
        modules: of `is_listed`.
    """
    found = ((linear_of(spec, each.key), each.name) for each in placed)
    return {name for name, tensor in found if name and is_listed(tensor, modules)}


def is_listed(name: str, modules: Collection[str]) -> bool:
    """Whether a tensor is of a module of a list.

    Args:
        modules: "model.layers.0.mlp.shared_expert", "o_proj", "model.layers.0.". What stands before
            the layers is spelled in several ways, and does not count.
    """
    pattern = _pattern(tuple(map(str, modules)))
    return bool(modules) and pattern.search(_of_layer(name)) is not None


@functools.cache
def _pattern(modules: tuple[str, ...]) -> re.Pattern[str]:
    """Of the names of these modules and all below them."""
    return re.compile("|".join(re.escape(_of_layer(each)) for each in modules))


def _of_layer(name: str) -> str:
    begin = name.find("layers.")
    return f".{name[max(begin, 0) :].strip('.')}."


def kept(spec: DecoderSpec, placed: Iterable[WeightMapping]) -> Iterator[WeightMapping]:
    """The tensors of a checkpoint, of FP8 linears the numbers and their scales."""
    for each in placed:
        if linear_of(spec, each.key) is None:
            yield each
            continue
        form = four_bit_form(spec, each.key)
        if form is not None:
            assert isinstance(each.change, Transpose)
            tiles = FourBitEncoding(Int4GroupEncoding(form.group), form)
            change = WriteTiles(None, each.change.first)
            yield dataclasses.replace(each, change=change, stored=tiles)
            continue
        rows = PairColumns(_rows(each.change, 1))
        yield dataclasses.replace(each, change=rows, stored=Fp8NumberEncoding())
        yield dataclasses.replace(
            each,
            name=f"{each.name}_scale_inv",
            shape=block_counts(*each.shape),
            key=(*each.key[:-1], "scale"),
            change=_rows(each.change, BLOCK),
            stored=ScaleEncoding(),
        )


def _rows(change: WeightTransform, block: int) -> WeightTransform:
    """The change of a tensor that is not transposed, whose rows are of `block` rows each."""
    match change:
        case Transpose(first):
            return WriteRowsAt(first // block)
        case SplitGroupColumns(group, begin, size, first):
            return SplitGroupRows(group // block, begin // block, size // block, first // block)
    raise ValueError(f"no FP8 linear supports {change}")
