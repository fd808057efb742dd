"""Llama (`model_type` llama): grouped-query attention and dense MLPs, of Llama 2 to 3.3, SmolLM2.

Not supported: biases in MLPs, activations other than SiLU, other scalings of RoPE
(`ConfigFields.rope`), heads with partial or interleaved rotation.
"""

from jaxattn.models.blocks import GQA, MLP, Block
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.decoder import read_decoder
from jaxattn.models.families.components.gqa import read_plain
from jaxattn.models.families.grouped_query import qwen3
from jaxattn.models.network.decoder_model import DecoderModel

MODEL_TYPES = ("llama",)

placed, skipped = qwen3.placed, qwen3.skipped


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    for name in ("mlp_bias", "rope_interleaved"):
        fields.require(name, False)
    return read_dense(fields, read_plain(fields))


def read_dense(fields: ConfigFields, *attention: GQA) -> DecoderModel:
    """Returns the decoder with this attention, one for all layers or one each, and dense MLPs."""
    fields.require("hidden_act", "silu")
    mlp = MLP(intermediate_size=fields.integer("intermediate_size"))
    if len(attention) == 1:
        attention *= fields.integer("num_hidden_layers")
    return read_decoder(fields, tuple(Block(each, mlp) for each in attention))
