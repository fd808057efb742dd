"""Decoder fields, and tensors of norms and dense MLPs, for all families."""

import dataclasses

from jaxattn.models.blocks import Block, Stream
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.network.decoder_spec import DecoderSpec, DraftHead
from jaxattn.models.weight_map.tensor_mapping import IDENTITY, LayerMapping, WeightMapping
from jaxattn.models.weight_map.transforms import Transpose, WeightTransform


def read_decoder(
    fields: ConfigFields,
    blocks: tuple[Block, ...],
    norm_dtype: str | None = None,
    *,
    ties: bool = True,
) -> DecoderModel:
    """Returns the decoder of these blocks, in bfloat16.

    Args:
        norm_dtype: Dtype of the weights of norms, if it differs.
        ties: Whether the family supports `tie_word_embeddings`; others have a separate head.
    """
    return DecoderModel(
        DecoderSpec(
            vocab_size=fields.integer("vocab_size"),
            stream=Stream(
                hidden_size=fields.integer("hidden_size"),
                eps=fields.number("rms_norm_eps", 1e-6),
                dtype="bfloat16",
                param_dtype="bfloat16",
                norm_dtype=norm_dtype,
                out_init_scale=(2 * len(blocks)) ** -0.5,
            ),
            blocks=blocks,
            max_position_embeddings=fields.integer("max_position_embeddings"),
            tie_embeddings=fields.flag("tie_word_embeddings", False) and ties,
        )
    )


def with_draft_head(
    model: DecoderModel, fields: ConfigFields, block: Block, head: DraftHead, layers: int
) -> DecoderModel:
    """Returns the model with a draft head of this block.

    Args:
        layers: Number of prediction layers in the checkpoint, the first of which is the head's.

    Raises:
        ConfigError: There are none.
    """
    if not layers:
        raise ConfigError(
            f"{fields.where}: speculate_by='mtp' needs a prediction layer (MTP), but the model "
            "has none; set speculate_by to 'lookup', or speculate to 0"
        )
    spec = model.spec
    spec = dataclasses.replace(spec, blocks=(*spec.blocks, block), draft_head=head)
    return dataclasses.replace(model, spec=spec)


def draft_layers(
    prefix: str, hidden: int, names: tuple[str, str, str, str], norm: WeightTransform = IDENTITY
) -> list[WeightMapping]:
    """Maps the tensors around a draft head's block.

    Args:
        names: Names of the embedding's norm, the hidden state's norm, the projection and the last
            norm.
        norm: Transform of the norms' weights.
    """
    embedding_norm, hidden_norm, projection, final_norm = names
    key = ("draft_layers",)

    def vector(name: str, place: str) -> WeightMapping:
        weight = f"{prefix}.{name}.weight"
        return WeightMapping(weight, (hidden,), (*key, place, "weight"), transform=norm)

    matrix = WeightMapping(
        f"{prefix}.{projection}.weight",
        (hidden, 2 * hidden),
        (*key, "projection", "weight"),
        transform=Transpose(),
    )
    found = (embedding_norm, "embedding_norm"), (hidden_norm, "hidden_norm"), (final_norm, "norm")
    return [*(vector(*each) for each in found), matrix]


def norms(
    place: LayerMapping,
    hidden: int,
    transform: WeightTransform = IDENTITY,
    *,
    post_norms: bool = False,
) -> list[WeightMapping]:
    """Maps the norms before the mixer and the feed-forward, or after them if `post_norms`.

    `transform` is the transform of their weights.
    """
    names = ("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
    first, second = names[1:] if post_norms else names[:2]
    return [
        place.vector(first, hidden, "norm", transform=transform),
        place.vector(second, hidden, "mlp_norm", transform=transform),
    ]


def mlp(place: LayerMapping, hidden: int, width: int, name: str = "mlp") -> list[WeightMapping]:
    """Maps a dense feed-forward."""
    return [
        place.linear(f"{name}.gate_proj", width, hidden, "mlp", "gate_proj"),
        place.linear(f"{name}.up_proj", width, hidden, "mlp", "up_proj"),
        place.linear(f"{name}.down_proj", hidden, width, "mlp", "down_proj"),
    ]
