"""What families with DeepSeek's MLA share: its fields and its tensors."""

from jaxattn.models.blocks import MLA
from jaxattn.models.families.fields import Fields
from jaxattn.models.placing import LayerPlace, Placed


def read_attention(fields: Fields) -> MLA:
    """DeepSeek's MLA, in the words of a config.json."""
    return MLA(
        num_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.maybe_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        rope=fields.rope(fields.integer("qk_rope_head_dim")),
        lora_norm_eps=1e-6,  # whatever rms_norm_eps says: transformers builds them without it
    )


def attention(place: LayerPlace, mixer: MLA, hidden: int) -> list[Placed]:
    """The tensors of DeepSeek's MLA."""
    heads, rank, rope = mixer.num_heads, mixer.kv_lora_rank, mixer.qk_rope_head_dim
    keys, values, low = mixer.qk_nope_head_dim, mixer.v_head_dim, mixer.q_lora_rank
    queries = heads * (keys + rope)
    if low is None:
        found = [place.linear("self_attn.q_proj", queries, hidden, "mixer", "q_proj")]
    else:
        found = [
            place.linear("self_attn.q_a_proj", low, hidden, "mixer", "q_a_proj"),
            place.vector("self_attn.q_a_layernorm", low, "mixer", "q_a_norm"),
            place.linear("self_attn.q_b_proj", queries, low, "mixer", "q_b_proj"),
        ]
    down = "self_attn.kv_a_proj_with_mqa"
    return [
        *found,
        place.linear(down, rank + rope, hidden, "mixer", "kv_a_proj"),
        place.vector("self_attn.kv_a_layernorm", rank, "mixer", "kv_a_norm"),
        *place.kv_b("self_attn.kv_b_proj", heads, keys, values, rank),
        place.linear("self_attn.o_proj", hidden, heads * values, "mixer", "o_proj"),
    ]
