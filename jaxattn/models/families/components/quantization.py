"""The quantization that a config.json states, and the tensors of a folder that are stored in it.

    fp8                 blocks of 128 x 128, as DeepSeek-V3, R1 and Kimi-K2 are published; without
                        blocks one scale per matrix, as in Ministral 3
    compressed-tensors  pack-quantized INT4 in groups of 32, as in Kimi-K2-Thinking's experts, or
                        of 128, with or without zero points; or FP8 with a scale per row, matrix or
                        block
    mxfp4               4-bit numbers in groups of 32, as in gpt-oss's experts
    awq, gptq           INT4 with zero points in groups of 32 or 128; for AWQ the layout "gemm"

Other methods raise an error that names them. The tensors determine which weights are quantized,
because config.json's lists of exceptions differ between publishers. A plan made before the tensors
exist uses the lists.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxattn.core.numerics.four_bit_tiles import INT4_GROUPS, MXFP4_GROUP, FourBitFormat
from jaxattn.core.numerics.fp8_block_scaling import BLOCK
from jaxattn.core.validation.config_fields import json_object, short_repr
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.weight_map.encodings import (
    FloatEncoding,
    Fp8BlockEncoding,
    Fp8ScaledEncoding,
    Int4GroupEncoding,
    Mxfp4Encoding,
    WeightEncoding,
)
from jaxattn.models.weight_map.zero_point_encodings import (
    AwqEncoding,
    GptqEncoding,
    ZeroPointEncoding,
)

type Quantization = Literal[
    "fp8", "fp8 by row", "fp8 by matrix", "fp8 by block", "int4", "int4-128", "int4_asym-32",
    "int4_asym-128", "mxfp4", "awq-32", "awq-128", "gptq-32", "gptq-128", "gptq_v1-32",
    "gptq_v1-128", "gptq_v2-32", "gptq_v2-128",
]  # fmt: skip

FORMATS = ("pack-quantized", "float-quantized", "naive-quantized")
METHODS = ("fp8", "compressed-tensors", "mxfp4", "awq", "gptq")
INPUT_SCALES = (".input_scale", ".activation_scale")  # activations stay floats
STRATEGIES: dict[str, Quantization] = {
    "channel": "fp8 by row", "tensor": "fp8 by matrix", "block": "fp8 by block"
}  # fmt: skip
INT4: dict[Quantization, Int4GroupEncoding | ZeroPointEncoding] = {
    "int4": Int4GroupEncoding(32),
    "int4-128": Int4GroupEncoding(128),
    "int4_asym-32": Int4GroupEncoding(32, zeros=True),
    "int4_asym-128": Int4GroupEncoding(128, zeros=True),
    "awq-32": AwqEncoding(32),
    "awq-128": AwqEncoding(128),
    "gptq-32": GptqEncoding(32),  # symmetric, the same in both versions
    "gptq-128": GptqEncoding(128),
    "gptq_v1-32": GptqEncoding(32, offset=1),
    "gptq_v1-128": GptqEncoding(128, offset=1),
    "gptq_v2-32": GptqEncoding(32, offset=0),
    "gptq_v2-128": GptqEncoding(128, offset=0),
}
NOT_CONVERTED = "-:"  # prefix of a pattern of modules that GPTQModel leaves as floats
LISTS = ("modules_to_not_convert", "ignored_layers")  # lists of modules that are floats


def read_quantization(fields: ConfigFields) -> Quantization | None:
    """Returns the quantization that config.json states, or None for floats.

    Raises:
        ConfigError: The method, or one of its settings, is not implemented; the message names it.
    """
    values = fields.values.get("quantization_config")
    if values is None:
        return None
    fields.checked("quantization_config", values, json_object, "an object or null")
    settings = fields.of("quantization_config", values)
    settings.require("quant_method", *METHODS, missing=None)
    if values["quant_method"] == "fp8":
        return _read_fp8(settings)
    if values["quant_method"] == "mxfp4":
        return "mxfp4"
    if values["quant_method"] in ("awq", "gptq"):
        return _read_awq(settings) if values["quant_method"] == "awq" else _read_gptq(settings)
    settings.require("format", *FORMATS, missing=None)
    groups = settings.values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise settings.wrong("config_groups", "an object")
    read = _read_int4 if values["format"] == "pack-quantized" else _read_float
    found = [read(*_group(settings, name, group)) for name, group in groups.items()]
    if len(set(found)) > 1:
        raise settings.refused(
            "config_groups", "must use the same strategy for all groups", sorted(found)
        )
    return found[0]


def listed_floats(fields: ConfigFields) -> list[str]:
    """Returns the modules that config.json lists as not quantized."""
    values = fields.values.get("quantization_config")
    lists = [values.get(name) or () for name in LISTS] if isinstance(values, dict) else []
    return [each for some in lists if isinstance(some, list) for each in some if each]


def four_bit_format(
    quantization: Quantization | None, fields: ConfigFields
) -> FourBitFormat | None:
    """Returns the format of 4-bit weights, or None for other weights.

    The scales get the model's dtype, which the tensors may contradict (`with_scales`).
    """
    if quantization == "mxfp4":
        return FourBitFormat("mxfp4", MXFP4_GROUP, "e8m0")
    stored = INT4.get(quantization) if quantization else None
    if stored is None:
        return None
    dtype = fields.values.get("dtype", fields.values.get("torch_dtype"))
    half = dtype == "float16" or isinstance(stored, ZeroPointEncoding)
    return FourBitFormat(
        "int4", stored.group, "float16" if half else "bfloat16", zeros=stored.zeros
    )


def ignored(fields: ConfigFields, module: str) -> bool:
    """Returns whether config.json excludes a module from INT4, by its name or by a prefix pattern.

    A pattern follows `re:` in compressed-tensors, and `-:` in GPTQModel's `dynamic`.
    """
    values = fields.values.get("quantization_config")
    values = values if isinstance(values, dict) else {}
    names = [each for each in values.get("ignore") or () if isinstance(each, str)]
    patterns = [each.removeprefix("re:") for each in names if each.startswith("re:")]
    dynamic = [each for each in values.get("dynamic") or () if each.startswith(NOT_CONVERTED)]
    patterns += [each.removeprefix(NOT_CONVERTED) for each in dynamic]
    return module in names or any(_begins(pattern, module) for pattern in patterns)


def _begins(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error:  # an invalid pattern
        return False


def _read_fp8(settings: ConfigFields) -> Quantization:
    settings.require("fmt", "e4m3", "float8_e4m3fn")
    if settings.values.get("weight_block_size") is None:
        settings.require("activation_scheme", "dynamic", "static")
        return "fp8 by matrix"
    settings.require("activation_scheme", "dynamic")
    settings.require("weight_block_size", [BLOCK, BLOCK])
    return "fp8"


def _group(settings: ConfigFields, name: str, group: Any) -> tuple[ConfigFields, ConfigFields]:
    """Returns (a group of modules, its weights)."""
    where = f"{settings.where}.config_groups.{name}"
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ConfigError(f"{where}.weights must be an object; got {short_repr(weights)}")
    return ConfigFields(group, where), ConfigFields(weights, f"{where}.weights")


def _read_int4(group: ConfigFields, weights: ConfigFields) -> Quantization:
    group.require("input_activations", None)
    weights.require("num_bits", 4, missing=None)
    weights.require("type", "int")
    weights.require("strategy", "group")
    weights.require("group_size", *INT4_GROUPS, missing=None)
    weights.require("actorder", None, "weight", "static")  # settings that keep the order of columns
    narrow = weights.values["group_size"] == 32
    if weights.flag("symmetric", True):
        return "int4" if narrow else "int4-128"
    return "int4_asym-32" if narrow else "int4_asym-128"


def _read_awq(settings: ConfigFields) -> Quantization:
    group = _read_group(settings)
    settings.require("zero_point", True)
    layout = "version" if settings.values.get("version") is not None else "format"
    settings.require(layout, "gemm", "GEMM")
    settings.require("backend", None, "autoawq", "auto")  # llm-awq's layout differs
    return "awq-32" if group == 32 else "awq-128"


def _read_gptq(settings: ConfigFields) -> Quantization:
    """Reads GPTQ's settings; for symmetric weights both versions are the same.

    `desc_act` may be set: the tensors show whether it reordered columns (`GptqEncoding`).
    """
    group = _read_group(settings)
    settings.require("pack_dtype", None, "int32")
    legacy = settings.values.get("checkpoint_format") is None
    field = "format" if legacy else "checkpoint_format"
    settings.require(field, "gptq", "gptq_v2")
    dynamic = settings.values.get("dynamic")
    if not isinstance(dynamic or {}, dict):
        raise settings.wrong("dynamic", "an object or null")
    for pattern, changed in (dynamic or {}).items():
        if not pattern.startswith(NOT_CONVERTED) and isinstance(changed, dict):
            of_modules = ConfigFields(changed, f"{settings.where}.dynamic.{pattern}")
            of_modules.require("bits", 4)
            of_modules.require("group_size", group)
    if settings.flag("sym", False):
        return "gptq-32" if group == 32 else "gptq-128"
    if settings.values.get(field) == "gptq_v2":
        return "gptq_v2-32" if group == 32 else "gptq_v2-128"
    return "gptq_v1-32" if group == 32 else "gptq_v1-128"


def _read_group(settings: ConfigFields) -> int:
    settings.require("bits", 4, missing=None)
    settings.require("group_size", *INT4_GROUPS, missing=None)
    return settings.values["group_size"]


def _read_float(group: ConfigFields, weights: ConfigFields) -> Quantization:
    """Reads FP8's settings; activations, which may be quantized too, stay floats here."""
    weights.require("num_bits", 8, missing=None)
    weights.require("type", "float", missing=None)
    weights.require("symmetric", True)
    weights.require("strategy", *STRATEGIES, missing=None)
    if weights.values["strategy"] == "block":
        weights.require("block_structure", [BLOCK, BLOCK], missing=None)
    return STRATEGIES[weights.values["strategy"]]


def stored_as(
    name: str, dtypes: Mapping[str, str], quantization: Quantization | None
) -> WeightEncoding:
    """Returns the encoding of the weight of this name in a folder.

    Args:
        name: Name of a weight, such as "model.layers.3.mlp.down_proj.weight".
        dtypes: Dtypes of the folder's tensors, by name.
    """
    if quantization == "fp8" and dtypes.get(name, "").startswith("float8"):
        return Fp8BlockEncoding()
    if quantization in STRATEGIES.values() and dtypes.get(name, "").startswith("float8"):
        scale = "_scale_inv" if f"{name}_scale_inv" in dtypes else "_scale"
        if quantization == "fp8 by block":
            return Fp8BlockEncoding(scale)
        return Fp8ScaledEncoding(quantization == "fp8 by row", scale)
    if quantization == "mxfp4" and f"{name}_blocks" in dtypes:
        return Mxfp4Encoding()
    stored = INT4.get(quantization) if quantization else None
    zeros = isinstance(stored, ZeroPointEncoding)
    numbers = f"{name.removesuffix('weight')}qweight" if zeros else f"{name}_packed"
    return stored if stored and numbers in dtypes else FloatEncoding()
