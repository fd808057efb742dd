"""Qwen3 (`model_type` qwen3): grouped-query attention with normed heads, and dense MLPs.

Not supported: activations other than SiLU, other scalings of RoPE (`ConfigFields.rope`).
"""

import dataclasses
from collections.abc import Collection

from jaxattn.models.blocks import GQA, MLP, Block
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.decoder import mlp, norms, read_decoder
from jaxattn.models.families.components.gqa import attention, read_attention, read_used_windows
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.tensor_mapping import WeightMapping, ends, layer_places

MODEL_TYPES = ("qwen3",)


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields.require("hidden_act", "silu")
    mixer = read_attention(fields.assuming(head_dim=128))
    mlp = MLP(intermediate_size=fields.integer("intermediate_size"))
    windows = read_used_windows(fields)
    blocks = (Block(dataclasses.replace(mixer, window=each), mlp) for each in windows)
    return read_decoder(fields, tuple(blocks))


def skipped(fields: ConfigFields) -> tuple[str, ...]:
    """Returns the prefixes of tensors that are not read."""
    return ()


def placed(model: DecoderModel, names: Collection[str] = ()) -> list[WeightMapping]:
    """Returns the destination of every tensor, for any names in the folder."""
    spec = model.spec
    hidden, found = spec.stream.hidden_size, ends(spec)
    for place, block in zip(layer_places(spec), spec.blocks, strict=True):
        assert isinstance(block.mixer, GQA) and isinstance(block.feed_forward, MLP)
        found += norms(place, hidden, post_norms=block.norms_after)
        found += attention(place, block.mixer, hidden)
        found += mlp(place, hidden, block.feed_forward.intermediate_size)
    return found
