"""GLM-4.7-Flash (`model_type` glm4_moe_lite): MLA with wide heads, a dense layer, then experts.

A head has keys of 192 + 64 dims and values of 256, and a model has 20 heads. The steps use:

    decode          the MLA kernel, which reads latents of 512 + 64 for any number of heads
    prefill         the grouped-query kernel, with its tile of keys in two pieces, 192 and 64
    training        the same kernel, with gradients by XLA

Routing is DeepSeek-V3's, and so is the prediction layer (MTP) after the last layer.

Not supported: activations other than SiLU, biases in attention, partially rotated heads, routing
other than by sigmoid with a correction bias.
"""

from jaxattn.models.families import deepseek
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.decoder import read_decoder
from jaxattn.models.network.decoder_model import DecoderModel

MODEL_TYPES = ("glm4_moe_lite",)

placed, skipped = deepseek.placed, deepseek.skipped
with_draft_head = deepseek.with_draft_head


def read_model(fields: ConfigFields) -> DecoderModel:
    """Returns the decoder of a config.json.

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented; the message names it.
    """
    fields = fields.assuming(routed_scaling_factor=1.8, rms_norm_eps=1e-5)
    return read_decoder(fields, deepseek.read_blocks(fields, deepseek.dense_layers(fields)))
