"""The common base of Qwen3-Next and Qwen3.5: gated delta nets with gated attention in between.

The norms before the blocks, the last norm and the heads' norms are published as the w of 1 + w. In
bfloat16 this sum would lose w's digits, so these weights are float32 here. The norm after the delta
rule is plain.
"""

import dataclasses
from collections.abc import Callable, Collection

from jaxattn.models.blocks import GDN, GQA, MLP, Block, FeedForward, MoE
from jaxattn.models.families.components import decoder, experts
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.families.components.gqa import attention, read_attention
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.network.decoder_spec import DraftHead
from jaxattn.models.weight_map.tensor_mapping import LayerMapping, WeightMapping, ends, layer_places
from jaxattn.models.weight_map.transforms import AddOne
from jaxattn.ops.moe.routing import Router

PREDICTION, VISION = ("mtp.",), ("model.visual.", "visual.")
# Names of the embedding's norm, the hidden state's norm, their projection, and the last norm.
DRAFT = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")

_INTERVAL = "full_attention_interval"


def read_model(fields: ConfigFields, feed_forward: FeedForward) -> DecoderModel:
    """Returns the decoder of a config.json, with the same feed-forward in every layer.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields.require("hidden_act", "silu")
    fields.require("attn_output_gate", True)
    fields.require("output_gate_type", "silu", "swish")
    fields.require("mamba_ssm_dtype", "float32")
    fields.require("use_sliding_window", False)
    fields = fields.assuming(head_dim=256)
    full = read_attention(fields, gated=True, rotated=0.25)
    delta = GDN(
        num_k_heads=fields.integer("linear_num_key_heads"),
        num_v_heads=fields.integer("linear_num_value_heads"),
        head_k_dim=fields.integer("linear_key_head_dim"),
        head_v_dim=fields.integer("linear_value_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim", minimum=2),
    )
    blocks = tuple(Block(full if each else delta, feed_forward) for each in _attends(fields))
    return decoder.read_decoder(fields, blocks, norm_dtype="float32")


def with_draft_head(model: DecoderModel, fields: ConfigFields, layers: int = 1) -> DecoderModel:
    """Returns the model with its prediction layer, whose mixer is attention.

    Args:
        layers: Number of prediction layers.
    """
    attends = [block for block in model.spec.blocks if isinstance(block.mixer, GQA)]
    if not attends:
        raise ConfigError(
            f"{fields.where}: the prediction layer (MTP) uses attention, but no layer of the "
            "model does"
        )
    return decoder.with_draft_head(model, fields, attends[-1], DraftHead(True), layers)


def _attends(fields: ConfigFields) -> list[bool]:
    """Returns whether each layer is attention."""
    count = fields.integer("num_hidden_layers")
    if fields.values.get("layer_types") is not None:
        words = fields.words("layer_types", count, "linear_attention", "full_attention")
        return [word == "full_attention" for word in words]
    every = fields.integer(_INTERVAL)
    if every > count:
        raise ConfigError(
            f"{fields.where}: {_INTERVAL}={every:,} exceeds num_hidden_layers={count:,}"
        )
    return [(layer + 1) % every == 0 for layer in range(count)]


def read_experts(fields: ConfigFields) -> MoE:
    """Reads the experts of every layer, and a shared expert with a gate."""
    fields.require("decoder_sparse_step", 1)
    fields.require("mlp_only_layers", [], None)
    fields.require("norm_topk_prob", True)
    router = Router(
        experts=fields.experts("num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        scores="softmax",
        normalize=True,
    )
    return MoE(
        expert_size=fields.integer("moe_intermediate_size"),
        router=router,
        shared_size=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def placed(
    model: DecoderModel,
    names: Collection[str],
    delta: Callable[[LayerMapping, GDN, int], list[WeightMapping]],
) -> list[WeightMapping]:
    """Returns the destination of every tensor.

    Args:
        names: Names of a folder's tensors.
        delta: Maps the input projections of a gated delta net.
    """
    spec = model.spec
    hidden, plus = spec.stream.hidden_size, AddOne()
    places, mappings = layer_places(spec), ends(spec, plus)
    if spec.draft_head:
        places[-1] = dataclasses.replace(places[-1], prefix=f"{PREDICTION[0]}layers.0")
        mappings += decoder.draft_layers(PREDICTION[0].rstrip("."), hidden, DRAFT, plus)
    for place, block in zip(places, spec.blocks, strict=True):
        mappings += decoder.norms(place, hidden, plus)
        if isinstance(block.mixer, GQA):
            mappings += attention(place, block.mixer, hidden, plus)
        elif isinstance(block.mixer, GDN):
            mappings += delta(place, block.mixer, hidden) + _behind(place, block.mixer, hidden)
        if isinstance(block.feed_forward, MLP):
            mappings += decoder.mlp(place, hidden, block.feed_forward.intermediate_size)
        elif isinstance(block.feed_forward, MoE):
            mappings += experts.placed(
                place,
                hidden,
                block.feed_forward,
                shared="shared_expert",
                stored=names,
            )
    return mappings


def _behind(place: LayerMapping, mixer: GDN, hidden: int) -> list[WeightMapping]:
    """Maps the tensors after the input projections of a gated delta net."""
    name, heads = "linear_attn", mixer.num_v_heads
    values = heads * mixer.head_v_dim
    return [
        place.taps(f"{name}.conv1d", mixer.conv_dim, mixer.conv_width, "mixer", "conv1d"),
        place.plain(f"{name}.A_log", (heads,), "mixer", "A_log"),
        place.plain(f"{name}.dt_bias", (heads,), "mixer", "dt_bias"),
        place.vector(f"{name}.norm", mixer.head_v_dim, "mixer", "norm"),
        place.linear(f"{name}.out_proj", hidden, values, "mixer", "out_proj"),
    ]
