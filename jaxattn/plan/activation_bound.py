"""An upper bound on a model's activations, from its sizes: all those of a layer at once."""

import math

from jaxattn.models.catalog.model_sizes import LayerSizes
from jaxattn.plan.placement import ModelPlacement


def activations(sizes: LayerSizes, tokens: int, rows: int, place: ModelPlacement, keys: int) -> int:
    """Returns the bytes of one layer's intermediates. `keys`: keys per token with scores."""
    hidden, heads = sizes.hidden_size, sizes.num_heads // place.ways
    stream = tokens * hidden * (3 * 4 + 3 * 2)  # residual, normed, branch: float32 and bfloat16
    if sizes.latent:
        latent = sizes.latent + sizes.low_rank
        per_head = 2 * (3 * sizes.qk_dim + 3 * sizes.latent + 3 * sizes.v_dim)
        attention = tokens * (4 * latent * 3 + heads * per_head)
        attention += (tokens + keys) * heads * 2 * (sizes.qk_dim + sizes.v_dim)
    else:
        attention = tokens * heads * sizes.qk_dim * 2 * 8
    if keys > 1:
        attention += 3 * tokens * keys * heads * 4  # scores, probabilities, mask
    delta = 0
    if sizes.state_heads:
        state_heads = sizes.state_heads // place.ways
        channels = (sizes.conv_channels + state_heads * sizes.state_shape[0]) // place.ways
        chunks = -(-tokens // 64) if keys > 1 else rows
        delta = tokens * channels * 4 * 4 + chunks * state_heads * 4 * (
            3 * math.prod(sizes.state_shape) + 6 * 64 * 64
        )
    # In the worst case all GPUs' tokens choose the experts of one GPU.
    top = min(sizes.top_k, -(-sizes.experts // place.gpus))
    arriving = tokens * top * (place.gpus if place.attention == "data" else 1)
    experts = arriving * 2 * (2 * hidden + 3 * sizes.expert_size) + tokens * sizes.experts * 8
    mlp = tokens * 3 * 4 * max(sizes.mlp_size, sizes.expert_size)
    logits = rows * -(-sizes.vocab_size // place.ways) * 4 * 4
    widened = 2 * 2 * sizes.widened // place.ways  # twice, because of a transposed copy
    return stream + max(attention, delta) + max(experts, mlp) + logits + widened
