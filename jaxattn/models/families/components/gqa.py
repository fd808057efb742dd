"""Fields and tensors of Qwen's grouped-query attention."""

from jaxattn.models.blocks import GQA
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.weight_map.tensor_mapping import IDENTITY, LayerMapping, WeightMapping
from jaxattn.models.weight_map.transforms import WeightTransform


def read_attention(fields: ConfigFields, *, gated: bool = False, rotated: float = 1.0) -> GQA:
    """Attention with norms of each head's query and key, in the words of a config.json.

    Args:
        gated: q_proj has of each head the queries and then a gate.
        rotated: which part of a head turns, where the configuration does not say it.
    """
    fields.require("attention_bias", False)
    fields.require("use_sliding_window", False)
    dim = fields.integer("head_dim")
    return GQA(
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=dim,
        rope=fields.rope(fields.rotated(dim, rotated), interleaved=False),
        qk_norm=True,
        gated=gated,
    )


def attention(
    place: LayerMapping, mixer: GQA, hidden: int, norm: WeightTransform = IDENTITY
) -> list[WeightMapping]:
    """The tensors of the attention; `norm` is done to the weights of its norms."""
    dim, heads = mixer.head_dim, mixer.num_heads
    queries, keys = heads * dim * (2 if mixer.gated else 1), mixer.num_kv_heads * dim
    return [
        place.linear("self_attn.q_proj", queries, hidden, "mixer", "q_proj"),
        place.linear("self_attn.k_proj", keys, hidden, "mixer", "k_proj"),
        place.linear("self_attn.v_proj", keys, hidden, "mixer", "v_proj"),
        place.vector("self_attn.q_norm", dim, "mixer", "q_norm", change=norm),
        place.vector("self_attn.k_norm", dim, "mixer", "k_norm", change=norm),
        place.linear("self_attn.o_proj", hidden, heads * dim, "mixer", "o_proj"),
    ]
