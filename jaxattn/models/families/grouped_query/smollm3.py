"""SmolLM3 (`model_type` smollm3): Llama's layers, every fourth of them without rotation.

`no_rope_layers` has a 1 for each layer that rotates queries and keys. Without it
`no_rope_layer_interval` determines the layers without rotation.

Not supported: biases in MLPs, activations other than SiLU, other scalings of RoPE
(`ConfigFields.rope`).
"""

from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.core.validation.config_fields import Integer, ListOf
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.gqa import (
    FULL,
    SLIDING,
    head_dim,
    read_plain,
    read_windows,
)
from jaxattn.models.families.grouped_query import llama, qwen3
from jaxattn.models.network.decoder_model import DecoderModel

MODEL_TYPES = ("smollm3",)

placed, skipped = qwen3.placed, qwen3.skipped


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields = fields.assuming(rope_theta=2e6, tie_word_embeddings=True, sliding_window=None)
    fields.require("mlp_bias", False)
    rotates = _rotates(fields, fields.integer("num_hidden_layers"))
    used = fields.flag("use_sliding_window", False) and fields.maybe_integer("sliding_window")
    kinds = [SLIDING if used and not each else FULL for each in rotates]
    windows = read_windows(fields, kinds)
    none = RopeConfig(head_dim(fields), None, False)
    return llama.read_dense(
        fields,
        *(
            read_plain(fields, window=window, rope=None if each else none)
            for each, window in zip(rotates, windows, strict=True)
        ),
    )


def _rotates(fields: ConfigFields, layers: int) -> list[bool]:
    """Returns whether each layer rotates its queries and keys."""
    if fields.values.get("no_rope_layers") is not None:
        # The list may belong to a longer model.
        rule = ListOf(Integer(0, 1), most=1024, least=layers)
        wanted = f"a list of at least {layers} numbers, each 0 or 1"
        found = fields.read("no_rope_layers", rule, None, wanted)
        return [bool(each) for each in found[:layers]]
    every = fields.integer("no_rope_layer_interval", 4)
    return [(layer + 1) % every != 0 for layer in range(layers)]
