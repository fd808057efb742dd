"""Qwen3-Next (`model_type` qwen3_next): gated delta nets, gated attention, experts in every layer.

The checkpoints interleave the rows of a delta net's input projections per key head. The prediction
layer (mtp.*), which config.json does not mention, is read as a draft head on request.

Not supported: biases in attention, ungated attention, activations other than SiLU, experts only in
every nth layer, unnormalized weights of chosen experts.
"""

from collections.abc import Collection

from jaxattn.models.blocks import GDN
from jaxattn.models.families import qwen_hybrid_base
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.tensor_mapping import LayerMapping, WeightMapping

MODEL_TYPES = ("qwen3_next",)


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    return qwen_hybrid_base.read_model(fields, qwen_hybrid_base.read_experts(fields))


with_draft_head = qwen_hybrid_base.with_draft_head


def skipped(fields: ConfigFields) -> tuple[str, ...]:
    """Returns the prefixes of tensors that are not read: the prediction layer."""
    return qwen_hybrid_base.PREDICTION


def placed(model: DecoderModel, names: Collection[str] = ()) -> list[WeightMapping]:
    """Returns the destination of every tensor, in the spelling of a folder's `names`."""
    return qwen_hybrid_base.placed(model, names, _projections)


def _projections(place: LayerMapping, mixer: GDN, hidden: int) -> list[WeightMapping]:
    """Maps, for each key head, its q and k, and the v and z, b and a of its value heads."""
    groups, each = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
    keys, values = mixer.head_k_dim, each * mixer.head_v_dim
    name, sizes = "linear_attn.in_proj_qkvz", (keys, keys, values, values)
    return [
        *place.groups(name, groups, sizes, hidden, "mixer", "in_proj_qkvz"),
        *place.groups(
            "linear_attn.in_proj_ba", groups, (each, each), hidden, "mixer", "in_proj_ba"
        ),
    ]
