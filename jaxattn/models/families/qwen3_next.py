"""Qwen3-Next (`model_type` qwen3_next): gated delta nets, gated attention, experts in every layer.

Its checkpoints interleave the rows of a delta net's input projections per key head. The prediction
layer (mtp.*), which config.json does not mention, is read as a draft head where one is asked for.

Refused: biases in attention, ungated attention, other activations than SiLU, experts in every nth
layer only, weights of chosen experts that are not normalised.
"""

from collections.abc import Collection

from jaxattn.models.blocks import GDN
from jaxattn.models.families import qwen_hybrid_base
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.tensor_mapping import LayerMapping, WeightMapping

MODEL_TYPES = ("qwen3_next",)


def read_model(fields: ConfigFields) -> DecoderModel:
    """The decoder of a config.json.

    Raises:
        ConfigError: a field is missing, does not fit or is not implemented; it is named.
    """
    return qwen_hybrid_base.read_model(fields, qwen_hybrid_base.read_experts(fields))


with_draft_head = qwen_hybrid_base.with_draft_head


def skipped(fields: ConfigFields) -> tuple[str, ...]:
    """Beginnings of tensors that are not read: the prediction layer."""
    return qwen_hybrid_base.PREDICTION


def placed(model: DecoderModel, names: Collection[str] = ()) -> list[WeightMapping]:
    """Every tensor of a checkpoint, and where it goes, in the spelling of a folder's `names`."""
    return qwen_hybrid_base.placed(model, names, _projections)


def _projections(place: LayerMapping, mixer: GDN, hidden: int) -> list[WeightMapping]:
    """Of each key head its q and k, and the v and z, b and a of its value heads."""
    groups, each = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
    keys, values = mixer.head_k_dim, each * mixer.head_v_dim
    name, sizes = "linear_attn.in_proj_qkvz", (keys, keys, values, values)
    return [
        *place.groups(name, groups, sizes, hidden, "mixer", "in_proj_qkvz"),
        *place.groups(
            "linear_attn.in_proj_ba", groups, (each, each), hidden, "mixer", "in_proj_ba"
        ),
    ]
