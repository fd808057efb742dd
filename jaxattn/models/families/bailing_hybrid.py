"""Ling-3.0 (`model_type` bailing_hybrid): Kimi Delta Attention with bounded decays, gated MLA.

The last layer of each group is attention, with rotated queries and keys and a gate per head. The
first layers are dense. Routing is DeepSeek-V3's. The prediction layer (MTP) is not read.

Not supported: activations other than SiLU, biases in attention, routing other than by sigmoid.
"""

from collections.abc import Collection

from jaxattn.models.blocks import KDA, MLA, MLP, MoE
from jaxattn.models.families import deepseek, kda_hybrid_base
from jaxattn.models.families.components import decoder, experts, mla
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.tensor_mapping import WeightMapping, ends, layer_places

MODEL_TYPES = ("bailing_hybrid",)

_NAMES = experts.ExpertTensorNames(bias="expert_bias")
_ATTENTION, _OUT = "attention", "dense"


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields = fields.renamed(
        **kda_hybrid_base.SPELLED, linear_conv_kernel_dim="short_conv_kernel_size"
    )
    fields = fields.assuming(n_group=8, topk_group=4, routed_scaling_factor=2.5)
    heads = fields.integer("num_attention_heads")
    bound = None
    if fields.flag("kda_safe_gate", True):
        bound = _below_zero(fields, "kda_lower_bound", -5.0)
    # transformers stores the rotated dims as head_dim, and the delta rule's in a separate field.
    dim = fields.integer("linear_head_dim", fields.values.get("head_dim"))
    delta = KDA(
        num_heads=fields.integer("linear_num_heads", heads),
        head_dim=dim,
        conv_width=fields.integer("linear_conv_kernel_dim", minimum=2),
        lower_bound=bound,
    )
    count = fields.integer("num_hidden_layers")
    attends = _attends(fields, count)
    dense = deepseek.dense_layers(fields)
    return kda_hybrid_base.read_decoder(
        fields, attends, mla.read_attention(fields, gated=True), delta, dense
    )


def _attends(fields: ConfigFields, count: int) -> list[bool]:
    if fields.values.get("layer_types") is not None:
        words = fields.words("layer_types", count, "linear_attention", "full_attention")
        return [word == "full_attention" for word in words]
    group = fields.integer("layer_group_size")
    return [(layer + 1) % group == 0 for layer in range(count)]


def _below_zero(fields: ConfigFields, name: str, default: float) -> float:
    value = fields.values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e4 < value < 0:
        raise ConfigError(f"{fields.where}: {name} must be above -1e4 and below 0; got {value!r}")
    return float(value)


def skipped(fields: ConfigFields) -> tuple[str, ...]:
    """Returns the prefixes of tensors that are not read: the prediction layers."""
    return deepseek.skipped(fields)


def placed(model: DecoderModel, names: Collection[str] = ()) -> list[WeightMapping]:
    """Returns the destination of every tensor, in the spelling of a folder's `names`."""
    spec = model.spec
    saved = any(name == "model.embed_tokens.weight" for name in names)
    hidden = spec.stream.hidden_size
    mappings = ends(spec, embedding="embed_tokens" if saved else "word_embeddings")
    for place, block in zip(layer_places(spec), spec.blocks, strict=True):
        mappings += decoder.norms(place, hidden)
        if isinstance(block.mixer, MLA):
            mappings += mla.attention(place, block.mixer, hidden, _ATTENTION, _OUT)
        elif isinstance(block.mixer, KDA):
            mappings += kda_hybrid_base.delta(place, block.mixer, hidden, _ATTENTION, _OUT)
            name, heads = f"{_ATTENTION}.A_log", (block.mixer.num_heads,)
            mappings.append(place.plain(name, heads, "mixer", "A_log"))
        if isinstance(block.feed_forward, MLP):
            mappings += decoder.mlp(place, hidden, block.feed_forward.intermediate_size)
        elif isinstance(block.feed_forward, MoE):
            mappings += experts.placed(
                place, hidden, block.feed_forward, names=_NAMES, stored=names
            )
    return mappings
