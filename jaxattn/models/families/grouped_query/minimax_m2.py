"""MiniMax-M2 (`model_type` minimax_m2): norms of all heads together, and experts in every layer.

`rotary_dim` dims of each head are rotated. Routing is by sigmoid with a correction bias. The
prediction layers (MTP) after the last layer are not read.

Not supported: activations other than SiLU, other scalings of RoPE (`ConfigFields.rope`), layers
other than full attention, biases, norms of single heads, shared experts, other routing.
"""

import dataclasses
from collections.abc import Collection

from jaxattn.models.blocks import GQA, Block, MoE
from jaxattn.models.families.components import decoder, experts
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.gqa import attention, read_attention
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.tensor_mapping import WeightMapping, ends, layer_places
from jaxattn.ops.moe.routing import Router

MODEL_TYPES = ("minimax_m2",)

_PUBLISHED, _SAVED = (
    experts.ExpertTensorNames(layer=layer, expert=("w1", "w3", "w2"), bias_of=layer)
    for layer in ("block_sparse_moe", "mlp")
)


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields = fields.renamed(num_local_experts="num_experts").assuming(head_dim=128, rope_theta=5e6)
    fields.require("attention_bias", False)
    fields.require("use_sliding_window", False)
    fields.require("hidden_act", "silu")
    fields.require("use_qk_norm", True)
    fields.require("qk_norm_type", "per_layer")
    fields.require("scoring_func", "sigmoid")
    fields.require("use_routing_bias", True)
    fields.require("shared_intermediate_size", 0)
    count = fields.integer("num_hidden_layers")
    fields.require("attn_type_list", [1] * count)
    mixer = read_attention(fields, rotated=_rotated(fields))
    router = Router(
        experts=fields.experts("num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        scores="sigmoid",
        normalize=True,
    )
    block = Block(
        dataclasses.replace(mixer, qk_norm=False, heads_norm=True),
        MoE(expert_size=fields.integer("intermediate_size"), router=router),
    )
    return decoder.read_decoder(fields, (block,) * count)


def _rotated(fields: ConfigFields) -> float:
    """Returns the default for the rotated part of a head, without `partial_rotary_factor`."""
    if fields.values.get("rotary_dim") is None:
        return 1.0
    return fields.integer("rotary_dim") / fields.integer("head_dim")


def skipped(fields: ConfigFields) -> tuple[str, ...]:
    """Returns the prefixes of tensors that are not read: the prediction layers."""
    last = fields.integer("num_hidden_layers")
    modules = fields.integer("num_mtp_modules", 0, minimum=0)
    extra = modules * fields.integer("mtp_transformer_layers", 1, minimum=0)
    return tuple(f"model.layers.{last + number}." for number in range(extra))


def placed(model: DecoderModel, names: Collection[str] = ()) -> list[WeightMapping]:
    """Returns the destination of every tensor, in the spelling of a folder's `names`."""
    spec = model.spec
    hidden, found = spec.stream.hidden_size, ends(spec)
    spelled = _SAVED if f"model.layers.0.{_SAVED.layer}.gate.weight" in names else _PUBLISHED
    for place, block in zip(layer_places(spec), spec.blocks, strict=True):
        assert isinstance(block.mixer, GQA) and isinstance(block.feed_forward, MoE)
        found += decoder.norms(place, hidden) + attention(place, block.mixer, hidden)
        found += experts.placed(place, hidden, block.feed_forward, names=spelled, stored=names)
    return found
