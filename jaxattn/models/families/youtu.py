"""Youtu-LLM (`model_type` youtu or youtu_llm): MLA with low-rank queries and dense MLPs, tied head.

Not supported: biases in attention or MLP, activations other than SiLU, scalings of RoPE other than
YaRN.
"""

from collections.abc import Collection

from jaxattn.models.blocks import MLA, MLP, Block
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.decoder import mlp, norms, read_decoder
from jaxattn.models.families.components.mla import attention, read_attention
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.tensor_mapping import WeightMapping, ends, layer_places

MODEL_TYPES = ("youtu", "youtu_llm")


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields = fields.assuming(tie_word_embeddings=True)
    fields.require("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias"):
        fields.require(name, False)
    block = Block(
        read_attention(fields), MLP(intermediate_size=fields.integer("intermediate_size"))
    )
    layers = fields.integer("num_hidden_layers")
    return read_decoder(fields, (block,) * layers)


def skipped(fields: ConfigFields) -> tuple[str, ...]:
    """Returns the prefixes of tensors that are not read."""
    return ()


def placed(model: DecoderModel, names: Collection[str] = ()) -> list[WeightMapping]:
    """Returns the destination of every tensor, for any names in the folder."""
    spec = model.spec
    found = ends(spec)
    for place, block in zip(layer_places(spec), spec.blocks, strict=True):
        assert isinstance(block.mixer, MLA) and isinstance(block.feed_forward, MLP)
        hidden = spec.stream.hidden_size
        found += norms(place, hidden)
        found += attention(place, block.mixer, hidden)
        found += mlp(place, hidden, block.feed_forward.intermediate_size)
    return found
