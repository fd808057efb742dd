"""DeepSeek-V2, V2-Lite, V3, R1, Moonlight, Kimi-K2 to K2.6: MLA, a dense prefix, then experts.

`model_type` is deepseek_v2, deepseek_v3, kimi_k2, or kimi_k25, whose text model is read from the
fields in `text_config`. The first prediction layer (MTP), after the model's last layer, is read as
a draft head on request. A vision tower is not read.

Not supported: activations other than SiLU, biases in attention, experts only in every nth layer,
and routing other than V2's (softmax; greedy or by groups) and V3's (sigmoid with a correction
bias).
"""

from collections.abc import Collection

from jaxattn.models.blocks import MLA, MLP, Block, FeedForward, MoE
from jaxattn.models.families.components import decoder, experts, mla
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.network.decoder_spec import DecoderSpec, DraftHead
from jaxattn.models.weight_map.tensor_mapping import WeightMapping, ends, layer_places
from jaxattn.ops.moe.routing import Router

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")
# Names of the embedding's norm, the hidden state's norm, their projection, and the last norm.
DRAFT = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
# Prefixes in Kimi-K2.5, as published and as saved by transformers.
VISION = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    if fields.values["model_type"] != "deepseek_v2":
        fields = fields.assuming(n_group=8, topk_group=4, routed_scaling_factor=2.5)
    fields.require("moe_layer_freq", 1)
    return decoder.read_decoder(fields, read_blocks(fields, dense_layers(fields)))


def with_draft_head(model: DecoderModel, fields: ConfigFields) -> DecoderModel:
    """Returns the model with its first prediction layer, whose block is like the last one."""
    last = model.spec.blocks[-1]
    return decoder.with_draft_head(model, fields, last, DraftHead(), prediction_layers(fields))


def prediction_layers(fields: ConfigFields) -> int:
    """Returns the number of prediction layers, under the publishers' or transformers 5's name."""
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    given = [name for name in names if fields.values.get(name) is not None]
    return max((fields.integer(name, minimum=0) for name in given), default=0)


def draft_layers(spec: DecoderSpec) -> list[WeightMapping]:
    """Returns the tensors around the draft head's block.

    A checkpoint repeats the embedding and the output head, which are the model's.
    """
    if not spec.draft_head:
        return []
    return decoder.draft_layers(f"model.layers.{spec.layers}", spec.stream.hidden_size, DRAFT)


def dense_layers(fields: ConfigFields) -> list[bool]:
    """Returns whether each layer's feed-forward is dense, as the first ones are.

    For some families transformers 5 writes a word for each layer instead.
    """
    if fields.values.get("mlp_layer_types") is not None:
        count = fields.integer("num_hidden_layers")
        words = fields.words("mlp_layer_types", count, "dense", "sparse")
        return [word == "dense" for word in words]
    dense, count = (
        fields.integer("first_k_dense_replace", minimum=0), fields.integer("num_hidden_layers"),
    )  # fmt: skip
    return [layer < dense for layer in range(count)]


def read_blocks(fields: ConfigFields, dense: list[bool]) -> tuple[Block, ...]:
    """Returns the blocks of a model with MLA, each with a dense feed-forward or with experts."""
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    attention = mla.read_attention(fields)
    kinds: dict[bool, FeedForward] = {}
    if any(dense):
        kinds[True] = MLP(intermediate_size=fields.integer("intermediate_size"))
    if not all(dense):
        kinds[False] = read_experts(fields)
    return tuple(Block(attention, kinds[each]) for each in dense)


def read_experts(fields: ConfigFields) -> MoE:
    """Reads routed and shared experts.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    width = fields.integer("moe_intermediate_size")
    shared = fields.integer("n_shared_experts", 0, minimum=0)
    return MoE(expert_size=width, router=_router(fields), shared_size=shared * width)


def _router(fields: ConfigFields) -> Router:
    experts, top_k = fields.experts("n_routed_experts"), fields.integer("num_experts_per_tok")
    scale = fields.number("routed_scaling_factor", 1.0)
    if fields.values["model_type"] == "deepseek_v2":
        fields.require("scoring_func", "softmax")
        fields.require("topk_method", "greedy", "group_limited_greedy")
        fields.require("norm_topk_prob", False)
        groups = fields.values.get("topk_method") == "group_limited_greedy"
        return Router(
            experts=experts,
            top_k=top_k,
            scores="softmax",
            groups=fields.integer("n_group") if groups else 1,
            top_groups=fields.integer("topk_group") if groups else 1,
            scale=scale,
        )
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    groups, top_groups = _groups(fields)
    return Router(
        experts=experts,
        top_k=top_k,
        scores="sigmoid",
        groups=groups,
        top_groups=top_groups,
        best_of_group=2,
        normalize=fields.flag("norm_topk_prob", True),
        scale=scale,
    )


def _groups(fields: ConfigFields) -> tuple[int, int]:
    """Returns (groups of experts, groups a token may choose from); (1, 1) without groups."""
    if fields.values.get("n_group") is None:
        return 1, 1
    return fields.integer("n_group"), fields.integer("topk_group", 1)


def skipped(fields: ConfigFields) -> tuple[str, ...]:
    """Returns the prefixes of tensors that are not read: prediction layers and a vision tower."""
    fields = fields.text()
    last = fields.integer("num_hidden_layers")
    extra = prediction_layers(fields)
    vision = VISION if fields.values["model_type"] == "kimi_k25" else ()
    return (*(f"model.layers.{last + number}." for number in range(extra)), *vision)


def placed(model: DecoderModel, names: Collection[str] = ()) -> list[WeightMapping]:
    """Returns the destination of every tensor, in the spelling of a folder's `names`."""
    spec = model.spec
    hidden, found = spec.stream.hidden_size, ends(spec) + draft_layers(spec)
    for place, block in zip(layer_places(spec), spec.blocks, strict=True):
        assert isinstance(block.mixer, MLA)
        found += decoder.norms(place, hidden) + mla.attention(place, block.mixer, hidden)
        if isinstance(block.feed_forward, MLP):
            found += decoder.mlp(place, hidden, block.feed_forward.intermediate_size)
        elif isinstance(block.feed_forward, MoE):
            found += experts.placed(place, hidden, block.feed_forward, stored=names)
    return found
