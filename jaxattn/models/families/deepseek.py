"""DeepSeek-V2, V2-Lite, V3, R1, Moonlight and Kimi-K2: MLA, a dense prefix, then experts.

`model_type` deepseek_v2, deepseek_v3 or kimi_k2. Prediction layers (MTP), which lie behind the last
layer of the model, are not read.

Refused: other activations than SiLU, biases in attention, experts in every nth layer only, and
other routing than V2's (softmax; greedy or by groups) and V3's (sigmoid with a correction bias).
"""

from jaxattn.core.fp8_blocks import block_counts
from jaxattn.models.blocks import MLA, MLP, Block, FeedForward, MoE
from jaxattn.models.decoder import DecoderModel
from jaxattn.models.families import mla
from jaxattn.models.families.fields import Fields
from jaxattn.models.placing import ExpertColumns, ExpertRows, LayerPlace, Placed, ends, layer_places
from jaxattn.models.stored import Numbers
from jaxattn.ops.moe import Router

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")


def read_model(fields: Fields) -> DecoderModel:
    """The decoder of a config.json.

    Raises:
        ConfigError: a field is missing, does not fit or is not implemented; it is named.
    """
    fields.require("moe_layer_freq", 1)
    return mla.read_decoder(fields, read_blocks(fields, dense_prefix(fields)))


def dense_prefix(fields: Fields) -> list[bool]:
    """Whether each layer's feed-forward is dense: the first ones are."""
    dense = fields.integer("first_k_dense_replace", least=0)
    return [layer < dense for layer in range(fields.integer("num_hidden_layers"))]


def read_blocks(fields: Fields, dense: list[bool]) -> tuple[Block, ...]:
    """The blocks of a model with MLA, and in each layer a dense feed-forward or experts."""
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    attention = mla.read_attention(fields)
    kinds: dict[bool, FeedForward] = {}
    if any(dense):
        kinds[True] = MLP(intermediate_size=fields.integer("intermediate_size"))
    if not all(dense):
        kinds[False] = _experts(fields)
    return tuple(Block(attention, kinds[each]) for each in dense)


def _experts(fields: Fields) -> MoE:
    width = fields.integer("moe_intermediate_size")
    shared = fields.integer("n_shared_experts", 0, least=0)
    return MoE(expert_size=width, router=_router(fields), shared_size=shared * width)


def _router(fields: Fields) -> Router:
    experts, top_k = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")
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
    return Router(
        experts=experts,
        top_k=top_k,
        scores="sigmoid",
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        best_of_group=2,
        normalize=fields.flag("norm_topk_prob", True),
        scale=scale,
    )


def skipped(fields: Fields) -> tuple[str, ...]:
    """Beginnings of tensors that are not read: the prediction layers."""
    last = fields.integer("num_hidden_layers")
    # transformers 5 writes the second name, publishers the first.
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    extra = max(fields.integer(name, 0, least=0) for name in names)
    return tuple(f"model.layers.{last + number}." for number in range(extra))


def placed(model: DecoderModel) -> list[Placed]:
    """Every tensor of a checkpoint, and where it goes."""
    spec = model.spec
    hidden, found = spec.stream.hidden_size, ends(spec)
    for place, block in zip(layer_places(spec), spec.blocks, strict=True):
        assert isinstance(block.mixer, MLA)
        found += mla.norms(place, hidden) + mla.attention(place, block.mixer, hidden)
        if isinstance(block.feed_forward, MLP):
            found += mla.mlp(place, hidden, block.feed_forward.intermediate_size)
        elif isinstance(block.feed_forward, MoE):
            found += experts(place, hidden, block.feed_forward)
    return found


def experts(place: LayerPlace, hidden: int, moe: MoE) -> list[Placed]:
    """Router, routed experts and shared experts."""
    count = moe.router.experts
    found = [place.matrix("mlp.gate", count, hidden, "mlp", "router")]
    if moe.router.scores == "sigmoid":
        name = "mlp.gate.e_score_correction_bias"
        found.append(place.plain(name, (count,), "mlp", "correction_bias"))
    for expert in range(count):
        found += _expert(place, hidden, moe, expert)
    if moe.always:
        found += _shared(place, hidden, moe)
    elif size := moe.shared_size:
        for name, out, inner in (
            ("gate_proj", size, hidden), ("up_proj", size, hidden), ("down_proj", hidden, size)
        ):  # fmt: skip
            tensor = f"mlp.shared_experts.{name}"
            found.append(place.linear(tensor, out, inner, "mlp", "shared", name))
    return found


def _shared(place: LayerPlace, hidden: int, moe: MoE) -> list[Placed]:
    """The three linears of the shared experts, and their scales if experts stay FP8."""
    name, width, first = "mlp.shared_experts", moe.expert_size, moe.router.experts
    up, down = (moe.shared_size, hidden), (hidden, moe.shared_size)
    kept = Numbers() if moe.weight_format == "fp8" else None
    both, last = ("mlp", "gate_up_proj"), ("mlp", "down_proj")
    gate_rows, up_rows = (ExpertRows(width, first, (below, 0)) for below in (0, width))
    columns = ExpertColumns(width, first)
    found = [
        place.shared(f"{name}.gate_proj", *up, gate_rows, *both, stored=kept),
        place.shared(f"{name}.up_proj", *up, up_rows, *both, stored=kept),
        place.shared(f"{name}.down_proj", *down, columns, *last, stored=kept),
    ]
    if kept is None:
        return found
    (blocks,) = block_counts(width)
    gate_rows, up_rows = (ExpertRows(blocks, first, (number, 0, 0)) for number in (0, 1))
    columns, scale = ExpertColumns(blocks, first), ("mlp", "gate_up_scale")
    return [
        *found,
        place.shared_scale(f"{name}.gate_proj", *up, gate_rows, *scale),
        place.shared_scale(f"{name}.up_proj", *up, up_rows, *scale),
        place.shared_scale(f"{name}.down_proj", *down, columns, "mlp", "down_scale"),
    ]


def _expert(place: LayerPlace, hidden: int, moe: MoE, expert: int) -> list[Placed]:
    """The three linears of a routed expert, and the scales of those that stay FP8."""
    name, width = f"mlp.experts.{expert}", moe.expert_size
    up, down = (expert, width, hidden), (expert, hidden, width)
    kept = Numbers() if moe.weight_format == "fp8" else None
    both, last = ("mlp", "gate_up_proj"), ("mlp", "down_proj")
    found = [
        place.expert(f"{name}.gate_proj", *up, *both, stored=kept),
        place.expert(f"{name}.up_proj", *up, *both, below=width, stored=kept),
        place.expert(f"{name}.down_proj", *down, *last, stored=kept),
    ]
    if kept is None:
        return found
    scale = "mlp", "gate_up_scale"
    return [
        *found,
        place.expert_scale(f"{name}.gate_proj", *up, *scale, number=0),
        place.expert_scale(f"{name}.up_proj", *up, *scale, number=1),
        place.expert_scale(f"{name}.down_proj", *down, "mlp", "down_scale"),
    ]
