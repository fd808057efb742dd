"""Youtu-LLM (`model_type` youtu or youtu_llm): MLA with low-rank queries and dense MLPs, tied head.

Refused: biases in attention or MLP, other activations than SiLU, other scalings of RoPE than YaRN.
"""

from jaxattn.models.blocks import MLA, MLP, Block, Stream
from jaxattn.models.decoder import DecoderModel, DecoderSpec
from jaxattn.models.families.fields import Fields
from jaxattn.models.placing import LayerPlace, Placed, ends, layer_places

MODEL_TYPES = ("youtu", "youtu_llm")


def read_model(fields: Fields) -> DecoderModel:
    """The decoder of a config.json.

    Raises:
        ConfigError: a field is missing, does not fit or is not implemented; it is named.
    """
    fields.require("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias"):
        fields.require(name, False)
    block = Block(
        read_attention(fields), MLP(intermediate_size=fields.integer("intermediate_size"))
    )
    layers = fields.integer("num_hidden_layers")
    return DecoderModel(
        DecoderSpec(
            vocab_size=fields.integer("vocab_size"),
            stream=Stream(
                hidden_size=fields.integer("hidden_size"),
                eps=fields.number("rms_norm_eps", 1e-6),
                dtype="bfloat16",
                param_dtype="bfloat16",
                out_init_scale=(2 * layers) ** -0.5,
            ),
            blocks=(block,) * layers,
            max_position_embeddings=fields.integer("max_position_embeddings"),
            tie_embeddings=fields.flag("tie_word_embeddings", False),
        )
    )


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


def skipped(fields: Fields) -> tuple[str, ...]:
    """Beginnings of tensors that are not read."""
    return ()


def placed(model: DecoderModel) -> list[Placed]:
    """Every tensor of a checkpoint, and where it goes."""
    spec = model.spec
    found = ends(spec)
    for place, block in zip(layer_places(spec), spec.blocks, strict=True):
        assert isinstance(block.mixer, MLA) and isinstance(block.feed_forward, MLP)
        hidden = spec.stream.hidden_size
        found += norms(place, hidden)
        found += attention(place, block.mixer, hidden)
        found += mlp(place, hidden, block.feed_forward.intermediate_size)
    return found


def norms(place: LayerPlace, hidden: int) -> list[Placed]:
    return [
        place.vector("input_layernorm", hidden, "norm"),
        place.vector("post_attention_layernorm", hidden, "mlp_norm"),
    ]


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


def mlp(place: LayerPlace, hidden: int, width: int) -> list[Placed]:
    return [
        place.linear("mlp.gate_proj", width, hidden, "mlp", "gate_proj"),
        place.linear("mlp.up_proj", width, hidden, "mlp", "up_proj"),
        place.linear("mlp.down_proj", hidden, width, "mlp", "down_proj"),
    ]
