"""The registry of published model families, by the `model_type` of their config.json."""

from functools import partial
from types import ModuleType
from typing import Literal

from jaxattn.core.numerics.four_bit_tiles import ROWS
from jaxattn.core.validation.config_fields import short_repr
from jaxattn.models.families import (
    bailing_hybrid,
    deepseek,
    glm4_moe_lite,
    kimi_linear,
    qwen3_5,
    qwen3_next,
    youtu,
)
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.families.components.published_model import (
    PublishedModel,
    forms_of,
    is_float,
    where_it_fits,
    with_experts,
    without_tiles,
)
from jaxattn.models.families.components.quantization import (
    Quantization,
    four_bit_format,
    listed_floats,
    read_quantization,
)
from jaxattn.models.families.grouped_query import (
    glm4_moe,
    gpt_oss,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    olmo3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from jaxattn.models.families.sparse_attention import deepseek_v32, glm_moe_dsa
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.quantized_linears import (
    listed,
    not_four_bits,
    with_four_bit_linears,
    with_fp8_linears,
)

FAMILIES: dict[str, ModuleType] = {
    name: family
    for family in (
        youtu,
        deepseek,
        deepseek_v32,
        glm_moe_dsa,
        glm4_moe,
        glm4_moe_lite,
        gpt_oss,
        llama,
        minimax_m2,
        ministral3,
        mistral,
        olmo3,
        qwen2,
        qwen3,
        qwen3_moe,
        smollm3,
        qwen3_next,
        qwen3_5,
        kimi_linear,
        bailing_hybrid,
    )  # fmt: skip
    for name in family.MODEL_TYPES
}

type WeightsFormat = Literal["fp8", "4bit", "bfloat16"]
WEIGHTS_FORMATS = ("fp8", "4bit", "bfloat16")
# The default format of matrices other than experts in an FP8 checkpoint.
DENSE: WeightsFormat = "fp8"


def family_of(fields: ConfigFields) -> ModuleType:
    """Returns the module of the family that a config.json names.

    Raises:
        ConfigError: No family has its `model_type`; the message lists the supported types.
    """
    kind = fields.values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(
            f"{fields.where}: model_type {short_repr(kind)} is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[kind]


def read_model(
    fields: ConfigFields,
    experts: WeightsFormat | None = None,
    dense: WeightsFormat | None = None,
    draft_head: bool = False,
) -> PublishedModel:
    """Returns the model of a config.json, and where its tensors go.

    Args:
        experts: Format of routed experts in memory. None keeps the stored format, or uses bfloat16
            if no kernel supports the shapes.
        dense: Format of the other matrices. None keeps those quantized that are stored so and that
            a kernel supports; the rest becomes bfloat16.
        draft_head: Whether to include the draft head (MTP).

    Raises:
        ConfigError: A field is missing, does not fit or is not implemented, or the weights are not
            stored in the requested format; the message names it.
    """
    family = family_of(fields)
    model, quantization = read_decoder(fields, experts, dense, draft_head)
    return PublishedModel(model, family, family.skipped(fields), quantization)


def read_decoder(
    fields: ConfigFields,
    experts: WeightsFormat | None = None,
    dense: WeightsFormat | None = None,
    draft_head: bool = False,
) -> tuple[DecoderModel, Quantization | None]:
    """Returns the model of a config.json and the quantization of its weights, as `read_model`."""
    family, fields = family_of(fields), fields.text()
    quantization = read_quantization(fields)
    form = four_bit_format(quantization, fields)
    model = family.read_model(fields)
    if draft_head:
        model = _with_draft_head(model, family, fields)
    for name, value in (("experts", experts), ("dense", dense)):
        if value not in (None, *WEIGHTS_FORMATS):
            raise ConfigError(
                f"{name} must be None, 'fp8', '4bit' or 'bfloat16'; got {short_repr(value)}"
            )
        if value == "4bit" and form is None:
            stored = quantization or "floats"
            raise ConfigError(
                f"{fields.where}: {name}='4bit' needs a checkpoint in MXFP4 or INT4; this one is "
                f"in {stored}"
            )
        if value == "fp8" and quantization != "fp8":
            stored = quantization or "floats"
            raise ConfigError(
                f"{fields.where}: {name}='fp8' needs a checkpoint in FP8 blocks; this one is in "
                f"{stored}"
            )
    if quantization == "fp8" and experts != "bfloat16":
        model = with_experts(model, lambda _: "fp8")
    if form is not None and experts != "bfloat16":
        model = with_experts(model, partial(where_it_fits, form, model.spec.stream.hidden_size))
        if experts is None and form.kind == "int4":
            model = without_tiles(model, family.placed(model), partial(is_float, fields))
        if experts == "4bit" and not any(forms_of(model)):
            raise ConfigError(
                f"{fields.where}: experts='4bit' needs experts that divide into tiles of {ROWS} "
                f"rows and {form.columns} columns; this model has none"
            )
    if form is not None and form.kind == "int4" and dense in (None, "4bit"):
        model = with_four_bit_linears(model, form)
        floats = not_four_bits(model, family.placed(model), partial(is_float, fields))
        model = with_four_bit_linears(model, form, floats)
    if quantization == "fp8" and (dense or DENSE) == "fp8":
        model = with_fp8_linears(model)
        modules = listed_floats(fields) if dense is None else []
        if modules:
            floats = listed(model.spec, family.placed(model), modules)
            model = with_fp8_linears(model, floats)
    return model, quantization


def _with_draft_head(model: DecoderModel, family: ModuleType, fields: ConfigFields) -> DecoderModel:
    if not hasattr(family, "with_draft_head"):
        raise ConfigError(
            f"{fields.where}: model_type {fields.values['model_type']!r} has no draft head (MTP); "
            "set speculate_by to 'lookup', or speculate to 0"
        )
    found: DecoderModel = family.with_draft_head(model, fields)
    return found
