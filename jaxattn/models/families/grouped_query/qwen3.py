"""Qwen3 (`model_type` qwen3): grouped-query attention with normed heads, and dense MLPs.

Refused: biases in attention, windows, other activations than SiLU, other scalings of RoPE than
YaRN.
"""

from collections.abc import Collection

from jaxattn.models.blocks import GQA, MLP, Block
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.decoder import mlp, norms, read_decoder
from jaxattn.models.families.components.gqa import attention, read_attention
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.tensor_mapping import WeightMapping, ends, layer_places

MODEL_TYPES = ("qwen3",)


def read_model(fields: ConfigFields) -> DecoderModel:
    """The decoder of a config.json.

    Raises:
        ConfigError: a field is missing, does not fit or is not implemented; it is named.
    """
    fields.require("hidden_act", "silu")
    layers = fields.integer("num_hidden_layers")
    if fields.values.get("layer_types") is not None:
        fields.words("layer_types", layers, "full_attention")
    block = Block(
        read_attention(fields), MLP(intermediate_size=fields.integer("intermediate_size"))
    )
    return read_decoder(fields, (block,) * layers)


def skipped(fields: ConfigFields) -> tuple[str, ...]:
    """Beginnings of tensors that are not read."""
    return ()


def placed(model: DecoderModel, names: Collection[str] = ()) -> list[WeightMapping]:
    """Every tensor of a checkpoint, and where it goes, whatever names a folder has."""
    spec = model.spec
    hidden, found = spec.stream.hidden_size, ends(spec)
    for place, block in zip(layer_places(spec), spec.blocks, strict=True):
        assert isinstance(block.mixer, GQA) and isinstance(block.feed_forward, MLP)
        found += norms(place, hidden, after=block.norms_after)
        found += attention(place, block.mixer, hidden)
        found += mlp(place, hidden, block.feed_forward.intermediate_size)
    return found
