"""An upper bound of a public model's activations, from its sizes: all of a layer's at once."""

import math
from typing import Any

from jaxattn.models.known import KnownModel
from jaxattn.plan.placement import Placement


def activations(model: KnownModel, tokens: int, rows: int, place: Placement, keys: int) -> int:
    """Bytes of one layer's intermediates. `keys`: keys that a token's scores are held for."""
    c: dict[str, Any] = model.config
    hidden, heads = c["hidden_size"], c["num_attention_heads"] // place.ways
    stream = tokens * hidden * (3 * 4 + 3 * 2)  # residual, normed, branch: float32 and bfloat16
    if model.is_mla:
        dims = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
        latent = model.cache_width + (c.get("q_lora_rank") or 0)
        per_head = 2 * (3 * dims + 3 * model.cache_width + 3 * c["v_head_dim"])
        attention = tokens * (4 * latent * 3 + heads * per_head)
        attention += (tokens + keys) * heads * 2 * (dims + c["v_head_dim"])
    else:
        attention = tokens * heads * c["head_dim"] * 2 * 8
    if keys > 1:
        attention += 3 * tokens * keys * heads * 4  # scores, probabilities, mask
    delta = 0
    if model.state_layers:
        state_heads = model.state_heads // place.ways
        channels = (model.conv_channels + state_heads * model.state_shape[0]) // place.ways
        chunks = -(-tokens // 64) if keys > 1 else rows
        delta = tokens * channels * 4 * 4 + chunks * state_heads * 4 * (
            3 * math.prod(model.state_shape) + 6 * 64 * 64
        )
    # At worst every GPU's tokens choose the experts of one of them.
    routed = c.get("n_routed_experts", c.get("num_experts", 0))
    top = min(c.get("num_experts_per_tok", 0), -(-routed // place.gpus) if routed else 0)
    arriving = tokens * top * (place.gpus if place.attention == "data" else 1)
    experts = arriving * 2 * (2 * hidden + 3 * c["moe_intermediate_size"]) + tokens * routed * 8
    mlp = tokens * 3 * 4 * max(c.get("intermediate_size") or 0, c["moe_intermediate_size"])
    logits = rows * -(-c["vocab_size"] // place.ways) * 4 * 4
    return stream + max(attention, delta) + max(experts, mlp) + logits
