"""Ministral 3 (`model_type` ministral3): Llama's layers, whose queries grow with their positions.

`mistral3` has a vision tower, which is not read; its text model, in `text_config`, is this one or
Mistral's.

Refused: other activations than SiLU, layers with and without a window (`layer_types`), other
scalings of RoPE (`ConfigFields.rope`).
"""

import dataclasses

from jaxattn.core.numerics.rope import QueryScaling
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.gqa import read_plain
from jaxattn.models.families.grouped_query import llama, mistral, qwen3
from jaxattn.models.network.decoder_model import DecoderModel

MODEL_TYPES = ("ministral3", "mistral3")
# As it is published and as transformers saves it.
VISION = tuple(
    f"{prefix}{name}."
    for prefix in ("", "model.")
    for name in ("vision_tower", "multi_modal_projector")
)

placed = qwen3.placed


def read_model(fields: ConfigFields) -> DecoderModel:
    """The decoder of a config.json.

    Raises:
        ConfigError: a field is missing, does not fit or is not implemented; it is named.
    """
    if fields.values["model_type"] == "ministral3":
        fields.require_rope()
        fields = fields.assuming(head_dim=128, sliding_window=None, rms_norm_eps=1e-5)
    attention = read_plain(fields, window=mistral.read_window(fields))
    return llama.read_dense(fields, dataclasses.replace(attention, query_scaling=_scaling(fields)))


def skipped(fields: ConfigFields) -> tuple[str, ...]:
    """Beginnings of tensors that are not read: a vision tower's."""
    return VISION if fields.values["model_type"] == "mistral3" else ()


def _scaling(fields: ConfigFields) -> QueryScaling | None:
    scaling = fields.rope_scaling()
    if scaling.values.get("llama_4_scaling_beta") is None:
        return None
    return QueryScaling(
        beta=scaling.number("llama_4_scaling_beta"),
        original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
    )
