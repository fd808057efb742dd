"""Fields and tensors of grouped-query attention in the styles of Qwen and Llama."""

from collections.abc import Sequence

from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.models.blocks import GQA
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.weight_map.tensor_mapping import IDENTITY, LayerMapping, WeightMapping
from jaxattn.models.weight_map.transforms import WeightTransform

# Values in `layer_types`.
FULL, SLIDING = "full_attention", "sliding_attention"


def read_plain(
    fields: ConfigFields,
    *,
    biases: bool | None = None,
    window: int | None = None,
    rope: RopeConfig | None = None,
) -> GQA:
    """Reads attention without norms from fields named as in Llama's config.json.

    By default a head's width is the hidden size divided by the number of heads, and there are as
    many key-value heads as query heads.

    Args:
        biases: Whether queries, keys and values have biases, but not the output. None reads
            `attention_bias`, which applies to all four.
        window: Number of keys that a token sees. None means all.
        rope: The rotation of whole heads. None reads it from the fields.
    """
    fields.require("partial_rotary_factor", 1.0)
    heads, dim = fields.integer("num_attention_heads"), head_dim(fields)
    keys = fields.values.get("num_key_value_heads")
    all_four = fields.flag("attention_bias", False)
    return GQA(
        num_heads=heads,
        num_kv_heads=heads if keys is None else fields.integer("num_key_value_heads"),
        head_dim=dim,
        rope=rope or fields.rope(dim, interleaved=False),
        biases=all_four if biases is None else biases,
        out_bias=biases is None and all_four,
        window=window,
    )


def read_used_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """Reads the window of each layer from Qwen's fields.

    With `use_sliding_window`, layers from `max_window_layers` on have one.
    """
    count, used = fields.integer("num_hidden_layers"), fields.flag("use_sliding_window", False)
    full = fields.integer("max_window_layers", 28, minimum=0) if used else count
    if fields.values.get("sliding_window") is None:
        full = count
    return read_windows(fields, [FULL if layer < full else SLIDING for layer in range(count)])


def read_windows(fields: ConfigFields, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Reads the window of each layer from `layer_types`; None means that a token sees all keys.

    Args:
        kinds: Default kinds of the layers, `FULL` or `SLIDING`.
    """
    if fields.values.get("layer_types") is not None:
        kinds = fields.words("layer_types", len(kinds), FULL, SLIDING)
    window = fields.integer("sliding_window") if SLIDING in kinds else None
    return tuple(None if kind == FULL else window for kind in kinds)


def head_dim(fields: ConfigFields) -> int:
    """Returns the width of a head; by default the hidden size divided by the number of heads."""
    if fields.values.get("head_dim") is not None:
        return fields.integer("head_dim")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % heads:
        rule = f"must divide hidden_size={hidden:,} if head_dim is missing"
        raise fields.refused("num_attention_heads", rule, heads)
    return hidden // heads


def read_attention(fields: ConfigFields, *, gated: bool = False, rotated: float = 1.0) -> GQA:
    """Reads attention with norms of each head's query and key from a config.json.

    Args:
        gated: Whether q_proj contains, for each head, the queries and then a gate. No biases then.
        rotated: Default for the rotated part of a head.
    """
    if gated:
        fields.require("attention_bias", False)
    biases, dim = fields.flag("attention_bias", False), head_dim(fields)
    return GQA(
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=dim,
        rope=fields.rope(fields.rotated(dim, rotated), interleaved=False),
        qk_norm=True,
        gated=gated,
        biases=biases,
        out_bias=biases,
    )


def attention(
    place: LayerMapping, mixer: GQA, hidden: int, norm: WeightTransform = IDENTITY
) -> list[WeightMapping]:
    """Maps the tensors of the attention; `norm` is the transform of its norms' weights."""
    dim, heads = mixer.head_dim, mixer.num_heads
    queries, keys = heads * dim * (2 if mixer.gated else 1), mixer.num_kv_heads * dim
    mappings = [
        place.linear("self_attn.q_proj", queries, hidden, "mixer", "q_proj"),
        place.linear("self_attn.k_proj", keys, hidden, "mixer", "k_proj"),
        place.linear("self_attn.v_proj", keys, hidden, "mixer", "v_proj"),
        place.linear("self_attn.o_proj", hidden, heads * dim, "mixer", "o_proj"),
    ]
    if mixer.qk_norm:
        mappings += [
            place.vector(f"self_attn.{each}_norm", dim, "mixer", f"{each}_norm", transform=norm)
            for each in "qk"
        ]
    if mixer.heads_norm:
        mappings += [
            place.vector(
                f"self_attn.{each}_norm", size, "mixer", f"{each}_heads_norm", transform=norm
            )
            for each, size in (("q", queries), ("k", keys))
        ]
    if mixer.out_bias:
        mappings.append(place.plain("self_attn.o_proj.bias", (hidden,), "mixer", "o_bias"))
    if mixer.sinks:
        mappings.append(place.plain("self_attn.sinks", (heads,), "mixer", "sinks"))
    if mixer.biases:
        mappings += [
            place.plain(f"self_attn.{each}_proj.bias", (size,), "mixer", f"{each}_bias")
            for each, size in (("q", queries), ("k", keys), ("v", keys))
        ]
    return mappings
