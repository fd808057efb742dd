"""Fields and tensors of DeepSeek's multi-head latent attention."""

from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.models.blocks import MLA
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.weight_map.tensor_mapping import LayerMapping, WeightMapping


def read_attention(fields: ConfigFields, *, turns: bool = True, gated: bool = False) -> MLA:
    """DeepSeek's MLA, in the words of a config.json.

    Args:
        turns: whether queries and keys are rotated.
        gated: whether a head's output has a gate.
    """
    dims = fields.integer("qk_rope_head_dim")
    return MLA(
        num_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.maybe_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=dims,
        v_head_dim=fields.integer("v_head_dim"),
        rope=fields.rope(dims) if turns else RopeConfig(dims, theta=None),
        gated=gated,
        lora_norm_eps=1e-6,  # whatever rms_norm_eps says: transformers builds them without it
    )


def attention(
    place: LayerMapping, mixer: MLA, hidden: int, name: str = "self_attn", out: str = "o_proj"
) -> list[WeightMapping]:
    """The tensors of DeepSeek's MLA.

    Args:
        name: of the layer's attention.
        out: of its output projection.
    """
    heads, rank, rope = mixer.num_heads, mixer.kv_lora_rank, mixer.qk_rope_head_dim
    keys, values, low = mixer.qk_nope_head_dim, mixer.v_head_dim, mixer.q_lora_rank
    queries = heads * (keys + rope)
    if low is None:
        found = [place.linear(f"{name}.q_proj", queries, hidden, "mixer", "q_proj")]
    else:
        found = [
            place.linear(f"{name}.q_a_proj", low, hidden, "mixer", "q_a_proj"),
            place.vector(f"{name}.q_a_layernorm", low, "mixer", "q_a_norm"),
            place.linear(f"{name}.q_b_proj", queries, low, "mixer", "q_b_proj"),
        ]
    if mixer.gated:
        found.append(place.linear(f"{name}.g_proj", heads, hidden, "mixer", "g_proj"))
    down = f"{name}.kv_a_proj_with_mqa"
    return [
        *found,
        place.linear(down, rank + rope, hidden, "mixer", "kv_a_proj"),
        place.vector(f"{name}.kv_a_layernorm", rank, "mixer", "kv_a_norm"),
        *place.kv_b(f"{name}.kv_b_proj", heads, keys, values, rank),
        place.linear(f"{name}.{out}", hidden, heads * values, "mixer", "o_proj"),
    ]
