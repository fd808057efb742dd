"""Mistral (`model_type` mistral): Llama's layers, with a window if the configuration sets one.

Not supported: activations other than SiLU, a mix of layers with and without a window
(`layer_types`), other scalings of RoPE (`ConfigFields.rope`).
"""

from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.gqa import FULL, SLIDING, read_plain
from jaxattn.models.families.grouped_query import llama, qwen3
from jaxattn.models.network.decoder_model import DecoderModel

MODEL_TYPES = ("mistral",)

placed, skipped = qwen3.placed, qwen3.skipped


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    return llama.read_dense(fields, read_plain(fields, window=read_window(fields)))


def read_window(fields: ConfigFields) -> int | None:
    """Returns the window of all layers, or None."""
    window = fields.maybe_integer("sliding_window")
    if fields.values.get("layer_types") is not None:
        kind = FULL if window is None else SLIDING
        fields.words("layer_types", fields.integer("num_hidden_layers"), kind)
    return window
