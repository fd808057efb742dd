"""A published model as its config.json describes it, and the formats of its routed experts."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from types import ModuleType
from typing import NamedTuple

from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.models.blocks import Block, MoE
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.quantization import (
    INT4,
    Quantization,
    ignored,
    listed_floats,
)
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.encodings import FourBitEncoding, WeightEncoding
from jaxattn.models.weight_map.name_prefix import TensorPrefix
from jaxattn.models.weight_map.quantized_linears import (
    four_bit_form,
    in_floats,
    is_listed,
    kept,
    linear_of,
    with_four_bit_linears,
    with_fp8_linears,
)
from jaxattn.models.weight_map.tensor_mapping import Key, WeightMapping, layer_places
from jaxattn.nn.moe import WeightFormat

EMBEDDING = ("embedding",)  # the parameter


class PublishedModel(NamedTuple):
    """A model read from config.json, with its family and the form of its weights.

    Attributes:
        family: The module that implements the model's family.
        skipped: Prefixes of the names of tensors that are not read.
        quantization: Quantization of the weights.
        compared: Whether a tied head stored in the folder is known to equal the embedding.
    """

    model: DecoderModel
    family: ModuleType
    skipped: tuple[str, ...]
    quantization: Quantization | None
    compared: bool = False

    def placed(self, names: Collection[str] = ()) -> list[WeightMapping]:
        """Returns the destination of each tensor.

        Args:
            names: The names of the folder's tensors, which determine the spelling of a model's
                names.
        """
        prefix = TensorPrefix.of(names)
        plain = {prefix.plain(name) for name in names}
        found = kept(self.model.spec, self.family.placed(self.model, plain))
        spelled = [
            dataclasses.replace(each, name=prefix.spelled(each.name), stored=self._stored(each))
            for each in found
        ]
        if not self.model.spec.tie_embeddings:
            return spelled
        head = f"{prefix.head}weight"
        # A folder may store the shared matrix under the head's name.
        return [
            dataclasses.replace(each, name=head)
            if each.key == EMBEDDING and each.name not in names and head in names
            else each
            for each in spelled
        ]

    def _stored(self, mapping: WeightMapping) -> WeightEncoding | None:
        """Returns the encoding in which a weight must be stored, with INT4 tiles as quantized."""
        of = INT4.get(self.quantization) if self.quantization else None
        if of is not None and isinstance(mapping.stored, FourBitEncoding):
            return dataclasses.replace(mapping.stored, encoding=of)
        return mapping.stored

    def unread(self, names: Collection[str]) -> tuple[str, ...]:
        """Returns prefixes of names that are not read, as the folder spells them."""
        prefix = TensorPrefix.of(names)
        found = (*self.skipped, *map(prefix.spelled, self.skipped))
        # The folder stores the tied head again; it equals the embedding.
        return (*found, f"{prefix.head}weight") if self.model.spec.tie_embeddings else found

    def embedding_and_head(self, names: Collection[str]) -> tuple[str, str]:
        """Returns the names of both matrices, as the folder spells them."""
        [embedding] = (each.name for each in self.placed(names) if each.key == EMBEDDING)
        return embedding, f"{TensorPrefix.of(names).head}weight"

    def untied(self) -> "PublishedModel":
        """Returns the same model with a separate head."""
        spec = dataclasses.replace(self.model.spec, tie_embeddings=False)
        return self._replace(model=dataclasses.replace(self.model, spec=spec))

    @property
    def forms(self) -> list[FourBitFormat | None]:
        """The 4-bit format of each layer with experts, or None."""
        return forms_of(self.model)

    def as_stored(self, dtypes: Mapping[str, str]) -> "PublishedModel":
        """Returns the model with floats for FP8 and 4-bit weights that the folder has as floats.

        Args:
            dtypes: The dtypes of the folder's tensors, by name.
        """
        published = self._with_stored_tiles(dtypes)._with_stored_four_bit_linears(dtypes)
        floats = in_floats(published.model.spec, published.placed(dtypes), dtypes)
        if not floats:
            return published
        return published._replace(model=with_fp8_linears(published.model, floats))

    def _with_stored_four_bit_linears(self, dtypes: Mapping[str, str]) -> "PublishedModel":
        """Gives 4-bit linears the dtype of the folder's scales.

        A linear that the folder stores as a float in one layer becomes a float in all layers.
        """
        spec, scales_of = self.model.spec, dict[str, set[str | None]]()
        form: FourBitFormat | None = None
        for each in self.placed(dtypes):
            form = four_bit_form(spec, each.key) or form
            if isinstance(each.stored, FourBitEncoding) and (name := linear_of(spec, each.key)):
                numbers, scales, *_ = each.stored.parts(each.name, each.shape)
                dtype = dtypes.get(scales.name) if numbers.name in dtypes else None
                scales_of.setdefault(name, set()).add(dtype)
        if form is None:
            return self
        stored = {name: found for name, found in scales_of.items() if None not in found}
        kept = form.with_scales(set().union(*stored.values())) if stored else None
        layers = [each for b in spec.blocks for each in (b.mixer, b.feed_forward)]
        floats = {name for layer in layers for name in layer.matrices(spec.stream)}
        if kept is not None:
            floats -= stored.keys()
        return self._replace(model=with_four_bit_linears(self.model, kept or form, floats))

    def _with_stored_tiles(self, dtypes: Mapping[str, str]) -> "PublishedModel":
        """Gives 4-bit experts the dtype of the folder's scales.

        Experts of layers that the folder stores in another way become floats.
        """
        if not any(self.forms):
            return self
        layers: dict[Key, set[str | None]] = {}
        for each in self.placed(dtypes):
            expert = linear_of(self.model.spec, each.key) is None
            if isinstance(each.stored, FourBitEncoding) and expert:
                numbers, scales, *_ = each.stored.parts(each.name, each.shape)
                found = dtypes.get(scales.name) if numbers.name in dtypes else None
                layers.setdefault((*each.key[:4], each.index[0]), set()).add(found)
        return self._replace(model=_with_tiles(self.model, layers))


def with_experts(model: DecoderModel, chosen: Callable[[MoE], WeightFormat | None]) -> DecoderModel:
    """Returns the model with routed experts in the format that `chosen` returns for each layer."""

    def changed(block: Block) -> Block:
        if not isinstance(block.feed_forward, MoE):
            return block
        kind = block.feed_forward
        kept = dataclasses.replace(kind, weight_format=chosen(kind))
        return dataclasses.replace(block, feed_forward=kept)

    blocks = tuple(map(changed, model.spec.blocks))
    return DecoderModel(dataclasses.replace(model.spec, blocks=blocks), model.tokens)


def where_it_fits(form: FourBitFormat, hidden: int, moe: MoE) -> FourBitFormat | None:
    """Returns the format if the experts consist of whole tiles, else None for floats."""
    fits = form.fits(moe.expert_size, hidden) and form.fits(hidden, moe.expert_size)
    return form if fits else None


def is_float(fields: ConfigFields, name: str) -> bool:
    """Returns whether config.json excludes the weight of this name from INT4."""
    module = name.removesuffix(".weight")
    return ignored(fields, module) or is_listed(module, listed_floats(fields))


def without_tiles(
    model: DecoderModel, mappings: Iterable[WeightMapping], floats: Callable[[str], bool]
) -> DecoderModel:
    """Returns the model in which layers whose experts `floats` names have no tiles."""
    layers: dict[Key, set[str | None]] = {}
    for each in mappings:
        if isinstance(each.stored, FourBitEncoding) and linear_of(model.spec, each.key) is None:
            dtypes = layers.setdefault((*each.key[:4], each.index[0]), set())
            dtypes.add(None if floats(each.name) else each.stored.form.scale)
    return _with_tiles(model, layers)


def _with_tiles(model: DecoderModel, layers: Mapping[Key, set[str | None]]) -> DecoderModel:
    """Returns the model whose 4-bit experts have scales of these dtypes, by layer.

    Experts of layers with several dtypes, or with None, become floats.
    """
    blocks = []
    for place, block in zip(layer_places(model.spec), model.spec.blocks, strict=True):
        kind = block.feed_forward
        if isinstance(kind, MoE) and kind.form is not None:
            dtypes = layers.get((*place.key, place.repeat), {None})
            kind = dataclasses.replace(kind, weight_format=kind.form.with_scales(dtypes))
        blocks.append(dataclasses.replace(block, feed_forward=kind))
    spec = dataclasses.replace(model.spec, blocks=tuple(blocks))
    return dataclasses.replace(model, spec=spec)


def forms_of(model: DecoderModel) -> list[FourBitFormat | None]:
    kinds = [block.feed_forward for block in model.spec.blocks]
    return [kind.form for kind in kinds if isinstance(kind, MoE)]
