"""The common base of families with Kimi Delta Attention: the decoder's parts, and their tensors."""

from collections.abc import Sequence

from jaxattn.models.blocks import KDA, MLA, MLP, Block, FeedForward
from jaxattn.models.families import deepseek
from jaxattn.models.families.components import decoder
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.tensor_mapping import LayerMapping, WeightMapping

# Spelling of DeepSeek's fields in these families.
SPELLED = {
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
}


def read_decoder(
    fields: ConfigFields, attends: Sequence[bool], attention: MLA, delta: KDA, dense: Sequence[bool]
) -> DecoderModel:
    """Returns the decoder of layers with attention or a delta rule, and a dense MLP or experts."""
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    kinds: dict[bool, FeedForward] = {}
    if any(dense):
        kinds[True] = MLP(intermediate_size=fields.integer("intermediate_size"))
    if not all(dense):
        kinds[False] = deepseek.read_experts(fields)
    blocks = tuple(
        Block(attention if full else delta, kinds[first])
        for full, first in zip(attends, dense, strict=True)
    )
    return decoder.read_decoder(fields, blocks, ties=False)  # as in transformers


def delta(place: LayerMapping, mixer: KDA, hidden: int, name: str, out: str) -> list[WeightMapping]:
    """Returns the mapping of a layer's delta rule, except A_log.

    Args:
        name: Name of the layer's attention.
        out: Name of its output projection.
    """
    width, rank = mixer.num_heads * mixer.head_dim, mixer.gate_rank
    mappings = []
    for number, each in enumerate("qkv"):
        first = number * width
        projection = place.linear(
            f"{name}.{each}_proj", width, hidden, "mixer", "in_proj_qkv", first=first
        )
        taps = place.taps(
            f"{name}.{each}_conv1d", width, mixer.conv_width, "mixer", "conv1d", first=first
        )
        mappings += [projection, taps]
    for number, each in enumerate("fg"):
        if rank is None:
            columns = (f"{name}.{each}_proj", width, hidden, "mixer", "in_proj_fg")
            mappings.append(place.linear(*columns, first=number * width))
        else:
            columns = (f"{name}.{each}_a_proj", rank, hidden, "mixer", "in_proj_fg_a")
            wide = f"{each}_b_proj"
            mappings += [
                place.linear(*columns, first=number * rank),
                place.linear(f"{name}.{wide}", width, rank, "mixer", wide),
            ]
    return [
        *mappings,
        place.linear(f"{name}.b_proj", mixer.num_heads, hidden, "mixer", "in_proj_b"),
        place.plain(f"{name}.dt_bias", (width,), "mixer", "dt_bias"),
        place.vector(f"{name}.o_norm", mixer.head_dim, "mixer", "norm"),
        place.linear(f"{name}.{out}", hidden, width, "mixer", "out_proj"),
    ]
