"""Kimi-Linear (`model_type` kimi_linear): Kimi Delta Attention, MLA without rotation, experts.

Three of four layers have a delta rule. The first layer is dense, and the last one is attention, so
the layers are a prefix, a repeated body, and a tail. Routing is DeepSeek-V3's.

Not supported: rotated queries and keys, activations other than SiLU, biases in attention, experts
only in every nth layer, routing other than by sigmoid.
"""

from collections.abc import Collection

from jaxattn.core.validation.config_fields import json_object
from jaxattn.models.blocks import KDA, MLA, MLP, MoE
from jaxattn.models.families import deepseek, kda_hybrid_base
from jaxattn.models.families.components import decoder, experts, mla
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.tensor_mapping import WeightMapping, ends, layer_places

MODEL_TYPES = ("kimi_linear",)

skipped = deepseek.skipped

_NAMES = experts.ExpertTensorNames(layer="block_sparse_moe", expert=("w1", "w3", "w2"))
_DELTA = "linear_attn_config"


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields = fields.renamed(**kda_hybrid_base.SPELLED, scoring_func="moe_router_activation_func")
    fields = fields.assuming(routed_scaling_factor=2.446, rms_norm_eps=1e-5)
    fields.require("mla_use_nope", True)
    fields.require("moe_layer_freq", 1)
    count = fields.integer("num_hidden_layers")
    if _DELTA in fields.values:
        of_delta = fields.of(_DELTA, fields.checked(_DELTA, fields.values[_DELTA], json_object))
        heads, dim = of_delta.integer("num_heads"), of_delta.integer("head_dim")
        width = of_delta.integer("short_conv_kernel_size", minimum=2)
        attends = _attends(of_delta, count)
    else:  # the fields that transformers writes
        heads, dim = fields.integer("linear_num_heads"), fields.integer("linear_head_dim")
        width = fields.integer("linear_conv_kernel_dim", minimum=2)
        words = fields.words("layer_types", count, "linear_attention", "full_attention")
        attends = [word == "full_attention" for word in words]
    delta = KDA(num_heads=heads, head_dim=dim, conv_width=width, gate_rank=dim)
    attention = mla.read_attention(fields, rotated=False)
    return kda_hybrid_base.read_decoder(
        fields, attends, attention, delta, deepseek.dense_layers(fields)
    )


def _attends(delta_fields: ConfigFields, count: int) -> list[bool]:
    """Returns whether each layer is attention; the file lists layers of both kinds, from 1 on."""
    full = delta_fields.values.get("full_attn_layers")
    every = set(range(1, count + 1))
    if not isinstance(full, list) or not every.issuperset(full):
        raise ConfigError(
            f"{delta_fields.where}: full_attn_layers must be a list of layers from 1 to {count}; "
            f"got {full!r}"
        )
    rest = sorted(every.difference(full))
    delta_fields.require("kda_layers", rest)
    return [layer not in rest for layer in range(1, count + 1)]


def placed(model: DecoderModel, names: Collection[str] = ()) -> list[WeightMapping]:
    """Returns the destination of every tensor.

    Args:
        names: Names of a folder's tensors: transformers saves dense layers under the experts' name.
    """
    spec = model.spec
    hidden, mappings = spec.stream.hidden_size, ends(spec)
    for place, block in zip(layer_places(spec), spec.blocks, strict=True):
        mappings += decoder.norms(place, hidden)
        if isinstance(block.mixer, MLA):
            mappings += mla.attention(place, block.mixer, hidden)
        elif isinstance(block.mixer, KDA):
            mappings += kda_hybrid_base.delta(place, block.mixer, hidden, "self_attn", "o_proj")
            shape = (1, 1, block.mixer.num_heads, 1)
            mappings.append(place.flat("self_attn.A_log", shape, "mixer", "A_log"))
        if isinstance(block.feed_forward, MLP):
            saved = f"{place.prefix}.{_NAMES.layer}.gate_proj.weight" in names
            name = _NAMES.layer if saved else "mlp"
            mappings += decoder.mlp(place, hidden, block.feed_forward.intermediate_size, name)
        elif isinstance(block.feed_forward, MoE):
            mappings += experts.placed(
                place, hidden, block.feed_forward, names=_NAMES, stored=names
            )
    return mappings
