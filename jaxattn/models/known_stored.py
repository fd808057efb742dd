"""How a quantized checkpoint's weights lie in memory once they are loaded.

Routed experts of an FP8 checkpoint stay in FP8 with their scales. Its other FP8 matrices become
bfloat16, and so do the experts of an INT4 checkpoint.
"""

import dataclasses

from jaxattn.core.fields import shown
from jaxattn.core.fp8_blocks import BLOCK
from jaxattn.models.blocks import Block, MoE
from jaxattn.models.decoder import DecoderModel
from jaxattn.models.families.fields import ConfigError, Fields


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a checkpoint stores its weights.

    Attributes:
        words: what the loader makes of it.
        fp8: in FP8, with one scale per block of 128 x 128.
    """

    words: str
    fp8: bool = False


PLAIN = Stored("as the loader keeps them")
INT4 = Stored("INT4 experts dequantized to bfloat16 on loading")
FP8 = Stored(
    f"experts in FP8 with one scale per {BLOCK} x {BLOCK} block, other FP8 matrices dequantized to "
    "bfloat16 on loading",
    fp8=True,
)


def read_stored(fields: Fields) -> Stored:
    """What `quantization_config` of a config.json says.

    Raises:
        ConfigError: it is quantized in a way that is not known.
    """
    config = fields.values.get("quantization_config")
    if config is None:
        return PLAIN
    where = f"{fields.where}: quantization_config"
    if not isinstance(config, dict):
        raise ConfigError(f"{where} must be an object or null; got {shown(config)}")
    method, form = config.get("quant_method"), config.get("format")
    if (method, form) == ("compressed-tensors", "pack-quantized"):
        return INT4
    if method != "fp8":
        raise ConfigError(
            f"{where}: quant_method is implemented as 'fp8', or 'compressed-tensors' in the format "
            f"'pack-quantized'; got {shown(method)}"
        )
    if (block := config.get("weight_block_size")) != [BLOCK, BLOCK]:
        raise ConfigError(
            f"{where}: weight_block_size is implemented as {[BLOCK, BLOCK]} only; got "
            f"{shown(block)}"
        )
    return FP8


def as_loaded(model: DecoderModel, stored: Stored) -> DecoderModel:
    """The model with its experts in the format that the loader keeps."""
    if not stored.fp8:
        return model

    def changed(block: Block) -> Block:
        if not isinstance(block.feed_forward, MoE):
            return block
        kept = dataclasses.replace(block.feed_forward, weight_format="fp8")
        return dataclasses.replace(block, feed_forward=kept)

    blocks = tuple(map(changed, model.spec.blocks))
    return DecoderModel(dataclasses.replace(model.spec, blocks=blocks))
