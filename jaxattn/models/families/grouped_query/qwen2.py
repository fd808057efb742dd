"""Qwen2 and Qwen2.5 (`model_type` qwen2): Llama's layers with biases of queries, keys and values.

Refused: windows, other activations than SiLU, other scalings of RoPE than Llama 3's and YaRN.
"""

from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.gqa import read_plain
from jaxattn.models.families.grouped_query import llama, qwen3
from jaxattn.models.network.decoder_model import DecoderModel

MODEL_TYPES = ("qwen2",)

placed, skipped = qwen3.placed, qwen3.skipped


def read_model(fields: ConfigFields) -> DecoderModel:
    """The decoder of a config.json.

    Raises:
        ConfigError: a field is missing, does not fit or is not implemented; it is named.
    """
    fields.require("use_sliding_window", False)
    if fields.values.get("layer_types") is not None:
        fields.words("layer_types", fields.integer("num_hidden_layers"), "full_attention")
    return llama.read_dense(fields, read_plain(fields, biases=True))
