"""Ministral 3 (`model_type` ministral3): Llama's layers, with queries scaled by position.

`mistral3` has a text model, this one or Mistral's, in `text_config`, and a vision tower, which is
not read.

Not supported: activations other than SiLU, a mix of layers with and without a window
(`layer_types`), other scalings of RoPE (`ConfigFields.rope`).
"""

import dataclasses

from jaxattn.core.numerics.rope import QueryScaling
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.gqa import read_plain
from jaxattn.models.families.grouped_query import llama, mistral, qwen3
from jaxattn.models.network.decoder_model import DecoderModel

MODEL_TYPES = ("ministral3", "mistral3")
# Prefixes as published and as saved by transformers.
VISION = tuple(
    f"{prefix}{name}."
    for prefix in ("", "model.")
    for name in ("vision_tower", "multi_modal_projector")
)

placed = qwen3.placed


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    if fields.values["model_type"] == "ministral3":
        fields.require_rope()
        fields = fields.assuming(head_dim=128, sliding_window=None, rms_norm_eps=1e-5)
    attention = read_plain(fields, window=mistral.read_window(fields))
    return llama.read_dense(fields, dataclasses.replace(attention, query_scaling=_scaling(fields)))


def skipped(fields: ConfigFields) -> tuple[str, ...]:
    """Returns the prefixes of tensors that are not read: a vision tower's."""
    return VISION if fields.values["model_type"] == "mistral3" else ()


def _scaling(fields: ConfigFields) -> QueryScaling | None:
    scaling = fields.rope_scaling()
    if scaling.values.get("llama_4_scaling_beta") is None:
        return None
    return QueryScaling(
        beta=scaling.number("llama_4_scaling_beta"),
        original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
    )
