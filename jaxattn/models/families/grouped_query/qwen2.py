"""Qwen2 and Qwen2.5 (`model_type` qwen2): Llama's layers with biases of queries, keys and values.

Not supported: activations other than SiLU, other scalings of RoPE (`ConfigFields.rope`).
"""

from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.gqa import read_plain, read_used_windows
from jaxattn.models.families.grouped_query import llama, qwen3
from jaxattn.models.network.decoder_model import DecoderModel

MODEL_TYPES = ("qwen2",)

placed, skipped = qwen3.placed, qwen3.skipped


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    windows = read_used_windows(fields)
    attention = [read_plain(fields, biases=True, window=window) for window in windows]
    return llama.read_dense(fields, *attention)
