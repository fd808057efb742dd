"""Qwen3 with experts (`model_type` qwen3_moe): Qwen3-30B-A3B, 235B-A22B, Qwen3-Coder.

Attention is Qwen3's, with a window in all layers or none. Experts are in every layer, in every nth
layer, or in all but those that the configuration names; the others are dense. Routing is by
softmax, without shared experts.

Not supported: activations other than SiLU, other scalings of RoPE (`ConfigFields.rope`).
"""

import dataclasses
from collections.abc import Collection

from jaxattn.models.blocks import GQA, MLP, Block, FeedForward, MoE
from jaxattn.models.families.components import decoder, experts
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.families.components.gqa import attention, read_attention
from jaxattn.models.families.grouped_query.qwen3 import skipped as skipped
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.tensor_mapping import WeightMapping, ends, layer_places
from jaxattn.ops.moe.routing import Router

MODEL_TYPES = ("qwen3_moe",)


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields = fields.renamed(num_experts="num_local_experts")
    fields.require("hidden_act", "silu")
    mixer, sparse = read_attention(fields), _sparse(fields)
    if fields.flag("use_sliding_window", False):
        mixer = dataclasses.replace(mixer, window=fields.maybe_integer("sliding_window"))
    kinds: dict[bool, FeedForward] = {}
    if any(sparse):
        router = Router(
            experts=fields.experts("num_experts"),
            top_k=fields.integer("num_experts_per_tok"),
            scores="softmax",
            normalize=fields.flag("norm_topk_prob", False),
        )
        kinds[True] = MoE(expert_size=fields.integer("moe_intermediate_size"), router=router)
    if not all(sparse):
        kinds[False] = MLP(intermediate_size=fields.integer("intermediate_size"))
    return decoder.read_decoder(fields, tuple(Block(mixer, kinds[each]) for each in sparse))


def _sparse(fields: ConfigFields) -> list[bool]:
    """Returns whether each layer has experts."""
    count, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not set(range(count)).issuperset(dense):
        raise ConfigError(
            f"{fields.where}: mlp_only_layers must be a list of layers from 0 to {count - 1}; got "
            f"{dense!r}"
        )
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(count)]


def placed(model: DecoderModel, names: Collection[str] = ()) -> list[WeightMapping]:
    """Returns the destination of every tensor, in the spelling of a folder's `names`."""
    spec = model.spec
    hidden, found = spec.stream.hidden_size, ends(spec)
    for place, block in zip(layer_places(spec), spec.blocks, strict=True):
        assert isinstance(block.mixer, GQA)
        found += decoder.norms(place, hidden) + attention(place, block.mixer, hidden)
        if isinstance(block.feed_forward, MLP):
            found += decoder.mlp(place, hidden, block.feed_forward.intermediate_size)
        elif isinstance(block.feed_forward, MoE):
            found += experts.placed(place, hidden, block.feed_forward, stored=names)
    return found
