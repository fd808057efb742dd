"""Which families of published models there are, by the `model_type` of their config.json."""

from types import ModuleType

from jaxattn.models.decoder import DecoderModel
from jaxattn.models.families import deepseek, glm4_moe_lite, youtu
from jaxattn.models.families.fields import ConfigError, Fields
from jaxattn.models.placing import Placed

FAMILIES: dict[str, ModuleType] = {
    name: family for family in (youtu, deepseek, glm4_moe_lite) for name in family.MODEL_TYPES
}


def family_of(fields: Fields) -> ModuleType:
    """The file that knows a config.json.

    Raises:
        ConfigError: no family has its `model_type`; the message lists those that are supported.
    """
    kind = fields.values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(
            f"{fields.where}: model_type {kind!r} is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    if fields.values.get("quantization_config"):
        raise ConfigError(
            f"{fields.where}: quantized checkpoints of {kind} are not supported; use bfloat16"
        )
    return FAMILIES[kind]


def read_model(fields: Fields) -> tuple[DecoderModel, list[Placed], tuple[str, ...]]:
    """(the model, its tensors' places, beginnings of tensors that are skipped)."""
    family = family_of(fields)
    model = family.read_model(fields)
    return model, family.placed(model), family.skipped(fields)
