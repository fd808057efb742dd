"""Qwen3.5 and 3.6: gated delta nets and gated attention, with dense MLPs or with experts.

`model_type` is qwen3_5 or qwen3_5_moe, whose fields are in `text_config`, or the text model's,
qwen3_5_text or qwen3_5_moe_text. From a model with a vision tower the text model is read. For text
its three axes of positions coincide, so its rotation is plain RoPE. Tensors are named
`model.language_model.*` or `model.*`; each expert has its own tensors, or a layer's experts are
fused in two.

The prediction layer (mtp.*) is read as a draft head on request. The vision tower is not read.

Not supported: biases in attention, ungated attention, activations other than SiLU, unnormalized
weights of chosen experts.
"""

from collections.abc import Collection

from jaxattn.models.blocks import GDN, MLP
from jaxattn.models.families import qwen_hybrid_base
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.tensor_mapping import LayerMapping, WeightMapping

WITH_EXPERTS = ("qwen3_5_moe", "qwen3_5_moe_text")
MODEL_TYPES = ("qwen3_5", "qwen3_5_text", *WITH_EXPERTS)


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    if fields.values["model_type"] in WITH_EXPERTS:
        return qwen_hybrid_base.read_model(fields, qwen_hybrid_base.read_experts(fields))
    mlp = MLP(intermediate_size=fields.integer("intermediate_size"))
    return qwen_hybrid_base.read_model(fields, mlp)


def with_draft_head(model: DecoderModel, fields: ConfigFields) -> DecoderModel:
    """Returns the model with its prediction layer."""
    fields.require("mtp_use_dedicated_embeddings", False)
    layers = fields.integer("mtp_num_hidden_layers", 1, minimum=0)
    return qwen_hybrid_base.with_draft_head(model, fields, layers)


def skipped(fields: ConfigFields) -> tuple[str, ...]:
    """Returns the prefixes of tensors that are not read: vision tower and prediction layers."""
    return (*qwen_hybrid_base.VISION, *qwen_hybrid_base.PREDICTION)


def placed(model: DecoderModel, names: Collection[str] = ()) -> list[WeightMapping]:
    """Returns the destination of every tensor, in the spelling of a folder's `names`."""
    return qwen_hybrid_base.placed(model, names, _projections)


def _projections(place: LayerMapping, mixer: GDN, hidden: int) -> list[WeightMapping]:
    name, heads = "linear_attn.in_proj", mixer.num_v_heads
    values, mixed = heads * mixer.head_v_dim, mixer.conv_dim
    both, gates = ("mixer", "in_proj_qkvz"), ("mixer", "in_proj_ba")
    return [
        place.linear(f"{name}_qkv", mixed, hidden, *both),
        place.linear(f"{name}_z", values, hidden, *both, first=mixed),
        place.linear(f"{name}_b", heads, hidden, *gates),
        place.linear(f"{name}_a", heads, hidden, *gates, first=heads),
    ]
