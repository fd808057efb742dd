"""DeepSeek-V3.2 (`model_type` deepseek_v32): DeepSeek-V3 whose queries attend to 2,048 tokens each.

An indexer in every layer chooses these tokens (DeepSeek Sparse Attention). The indexer's keys are
in separate pages next to the latents. The choice compares float32 scores of keys in the cache's
dtype. DeepSeek's code also rotates by a Hadamard matrix before FP8; this changes no score, and is
omitted.

Not supported: everything that DeepSeek-V3 does not support, and layers without low-rank queries.
"""

import dataclasses
from collections.abc import Sequence

from jaxattn.models.blocks import Block
from jaxattn.models.families import deepseek
from jaxattn.models.families.components import decoder, mla
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.network.decoder_spec import DraftHead

MODEL_TYPES = ("deepseek_v32",)

placed, skipped = deepseek.placed, deepseek.skipped


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields = fields.assuming(n_group=8, topk_group=4, routed_scaling_factor=2.5)
    layers = fields.integer("num_hidden_layers")
    fields.require("moe_layer_freq", 1)
    return decoder.read_decoder(fields, read_blocks(fields, [True] * layers, interleaved=False))


def read_blocks(
    fields: ConfigFields, indexed: Sequence[bool], *, interleaved: bool
) -> tuple[Block, ...]:
    """Returns the blocks of a model.

    Args:
        indexed: Whether each layer has an indexer, or uses the choice of the layer before.
        interleaved: Default layout of the indexer's rotated dims.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    own = mla.read_sparse_attention(
        fields, interleaved=interleaved, shares_indices=not all(indexed)
    )
    without = dataclasses.replace(own, index_heads=0)
    dense = deepseek.read_blocks(fields, deepseek.dense_layers(fields))
    return tuple(
        dataclasses.replace(block, mixer=own if full else without)
        for block, full in zip(dense, indexed, strict=True)
    )


def with_draft_head(model: DecoderModel, fields: ConfigFields) -> DecoderModel:
    """Returns the model with its first prediction layer, which has its own indexer."""
    blocks = model.spec.blocks
    block = dataclasses.replace(blocks[-1], mixer=blocks[0].mixer)
    layers = deepseek.prediction_layers(fields)
    return decoder.with_draft_head(model, fields, block, DraftHead(), layers)
