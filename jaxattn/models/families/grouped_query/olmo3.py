"""OLMo 3 (`model_type` olmo3): norms after attention and MLP, and of all heads together.

Three of four layers have a window. Only layers without one scale RoPE by YaRN.

Not supported: activations other than SiLU, other scalings of RoPE (`ConfigFields.rope`).
"""

import dataclasses

from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.models.blocks import GQA, MLP, Block
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.decoder import read_decoder
from jaxattn.models.families.components.gqa import (
    FULL,
    SLIDING,
    head_dim,
    read_plain,
    read_windows,
)
from jaxattn.models.families.grouped_query import qwen3
from jaxattn.models.network.decoder_model import DecoderModel

MODEL_TYPES = ("olmo3",)

placed, skipped = qwen3.placed, qwen3.skipped


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields = fields.assuming(rope_theta=5e5, rms_norm_eps=1e-5)
    fields.require("hidden_act", "silu")
    count = fields.integer("num_hidden_layers")
    kinds = [SLIDING if (layer + 1) % 4 else FULL for layer in range(count)]
    feed_forward = MLP(intermediate_size=fields.integer("intermediate_size"))

    def attention(window: int | None) -> GQA:
        rope = _rope(fields, FULL if window is None else SLIDING)
        plain = read_plain(fields, window=window, rope=rope)
        return dataclasses.replace(plain, heads_norm=True)

    windows = read_windows(fields, kinds)
    mixers = {window: attention(window) for window in dict.fromkeys(windows)}
    blocks = (Block(mixers[each], feed_forward, norms_after=True) for each in windows)
    return read_decoder(fields, tuple(blocks))


def _rope(fields: ConfigFields, kind: str) -> RopeConfig:
    """Returns the rotation of a kind of layers.

    transformers 5 writes an object for each kind, publishers one scaling for full attention.
    """
    values = dict(fields.values)
    nested = values.pop("rope_parameters", None) or {}
    if nested:
        own = fields.of("rope_parameters", nested).object(kind)
        values.pop("rope_scaling", None)
        values |= {"rope_parameters": own}
    elif kind == SLIDING:
        values.pop("rope_scaling", None)
    return ConfigFields(values, fields.where).rope(head_dim(fields), interleaved=False)
