"""Fields and tensors of DeepSeek's multi-head latent attention, dense or sparse."""

import dataclasses

from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.models.blocks import MLA, SparseMLA
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.weight_map.tensor_mapping import LayerMapping, WeightMapping


def read_attention(fields: ConfigFields, *, rotated: bool = True, gated: bool = False) -> MLA:
    """Reads DeepSeek's MLA from a config.json.

    Args:
        rotated: Whether queries and keys are rotated.
        gated: Whether each head's output has a gate.
    """
    dims = fields.integer("qk_rope_head_dim")
    return MLA(
        num_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.maybe_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=dims,
        v_head_dim=fields.integer("v_head_dim"),
        rope=fields.rope(dims) if rotated else RopeConfig(dims, theta=None),
        gated=gated,
        lora_norm_eps=1e-6,  # not rms_norm_eps, which transformers does not pass on
    )


def read_sparse_attention(
    fields: ConfigFields, *, interleaved: bool, shares_indices: bool
) -> SparseMLA:
    """Reads the MLA of a layer with an indexer.

    Args:
        interleaved: Default layout of the indexer's rotated dims.
        shares_indices: Whether layers without an indexer follow.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    dense = read_attention(fields)
    fields.integer("q_lora_rank")  # required by the indexer
    dim, turned = fields.integer("index_head_dim"), dense.qk_rope_head_dim
    if dim < turned:
        raise fields.refused("index_head_dim", f"must be at least qk_rope_head_dim={turned}")
    return SparseMLA(
        **{each.name: getattr(dense, each.name) for each in dataclasses.fields(dense)},
        top_k=fields.integer("index_topk"),
        index_heads=fields.integer("index_n_heads"),
        index_head_dim=dim,
        index_interleaved=fields.flag("indexer_rope_interleave", interleaved),
        shares_indices=shares_indices,
    )


def attention(
    place: LayerMapping, mixer: MLA, hidden: int, name: str = "self_attn", out: str = "o_proj"
) -> list[WeightMapping]:
    """Maps the tensors of DeepSeek's MLA, and of its indexer if it has one.

    Args:
        name: Name of the layer's attention.
        out: Name of its output projection.
    """
    heads, rank, rope = mixer.num_heads, mixer.kv_lora_rank, mixer.qk_rope_head_dim
    keys, values, low = mixer.qk_nope_head_dim, mixer.v_head_dim, mixer.q_lora_rank
    queries = heads * (keys + rope)
    if low is None:
        mappings = [place.linear(f"{name}.q_proj", queries, hidden, "mixer", "q_proj")]
    else:
        mappings = [
            place.linear(f"{name}.q_a_proj", low, hidden, "mixer", "q_a_proj"),
            place.vector(f"{name}.q_a_layernorm", low, "mixer", "q_a_norm"),
            place.linear(f"{name}.q_b_proj", queries, low, "mixer", "q_b_proj"),
        ]
    if mixer.gated:
        mappings.append(place.linear(f"{name}.g_proj", heads, hidden, "mixer", "g_proj"))
    down = f"{name}.kv_a_proj_with_mqa"
    return [
        *mappings,
        place.linear(down, rank + rope, hidden, "mixer", "kv_a_proj"),
        place.vector(f"{name}.kv_a_layernorm", rank, "mixer", "kv_a_norm"),
        *place.kv_b(f"{name}.kv_b_proj", heads, keys, values, rank),
        place.linear(f"{name}.{out}", hidden, heads * values, "mixer", "o_proj"),
        *(_indexer(place, mixer, hidden, name) if isinstance(mixer, SparseMLA) else ()),
    ]


def _indexer(place: LayerMapping, mixer: SparseMLA, hidden: int, name: str) -> list[WeightMapping]:
    heads, dim, low = mixer.index_heads, mixer.index_head_dim, mixer.q_lora_rank
    if not heads or low is None:
        return []
    name, key = f"{name}.indexer", ("mixer", "indexer")
    return [
        place.linear(f"{name}.wq_b", heads * dim, low, *key, "wq_b"),
        place.linear(f"{name}.wk", dim, hidden, *key, "wk"),
        place.vector(f"{name}.k_norm", dim, *key, "k_norm"),
        place.plain(f"{name}.k_norm.bias", (dim,), *key, "k_norm", "bias"),
        place.linear(f"{name}.weights_proj", heads, hidden, *key, "weights_proj"),
    ]
