"""The quantization that a config.json states, and which tensors of a folder are stored in it.

    fp8                 blocks of 128 x 128, as DeepSeek-V3, R1 and Kimi-K2 are published
    compressed-tensors  pack-quantized INT4 in groups of 32, as Kimi-K2-Thinking's experts are
    mxfp4               numbers of 4 bits in groups of 32, as gpt-oss's experts are

All else is refused by name. Which weights are quantized is read from the tensors: the lists of
exceptions in config.json differ from publisher to publisher. What is planned before there are
tensors goes by the lists.
"""

from collections.abc import Mapping
from typing import Literal

from jaxattn.core.numerics.fp8_block_scaling import BLOCK
from jaxattn.core.validation.config_fields import json_object, short_repr
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.weight_map.encodings import (
    INT4_GROUP,
    FloatEncoding,
    Fp8BlockEncoding,
    Int4GroupEncoding,
    Mxfp4Encoding,
    WeightEncoding,
)

type Quantization = Literal["fp8", "int4", "mxfp4"]

METHODS = ("fp8", "compressed-tensors", "mxfp4")
LISTS = ("modules_to_not_convert", "ignored_layers")  # of modules that are floats


def read_quantization(fields: ConfigFields) -> Quantization | None:
    """What config.json says of the weights; None where they are floats.

    Raises:
        ConfigError: the method, or one of its settings, is not implemented; it is named.
    """
    values = fields.values.get("quantization_config")
    if values is None:
        return None
    fields.checked("quantization_config", values, json_object, "an object or null")
    given = fields.of("quantization_config", values)
    given.require("quant_method", *METHODS, missing=None)
    if values["quant_method"] == "fp8":
        _check_fp8(given)
        return "fp8"
    if values["quant_method"] == "mxfp4":
        return "mxfp4"
    _check_int4(given)
    return "int4"


def listed_floats(fields: ConfigFields) -> list[str]:
    """The modules that config.json says are not quantized."""
    values = fields.values.get("quantization_config")
    lists = [values.get(name) or () for name in LISTS] if isinstance(values, dict) else []
    return [each for some in lists if isinstance(some, list) for each in some if each]


def _check_fp8(given: ConfigFields) -> None:
    given.require("fmt", "e4m3", "float8_e4m3fn")
    given.require("activation_scheme", "dynamic")
    given.require("weight_block_size", [BLOCK, BLOCK], missing=None)


def _check_int4(given: ConfigFields) -> None:
    given.require("format", "pack-quantized", missing=None)
    groups = given.values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise given.wrong("config_groups", "an object")
    for name, group in groups.items():
        where = f"{given.where}.config_groups.{name}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise ConfigError(f"{where}.weights must be an object; got {short_repr(weights)}")
        ConfigFields(group, where).require("input_activations", None)
        inner = ConfigFields(weights, f"{where}.weights")
        inner.require("num_bits", 4, missing=None)
        inner.require("type", "int")
        inner.require("symmetric", True)
        inner.require("strategy", "group")
        inner.require("group_size", INT4_GROUP, missing=None)
        inner.require("actorder", None)


def stored_as(
    name: str, dtypes: Mapping[str, str], quantization: Quantization | None
) -> WeightEncoding:
    """How the weight of this name is stored in a folder.

    Args:
        name: of a weight, "model.layers.3.mlp.down_proj.weight".
        dtypes: of the folder's tensors, by name.
    """
    if quantization == "fp8" and dtypes.get(name, "").startswith("float8"):
        return Fp8BlockEncoding()
    if quantization == "mxfp4" and f"{name}_blocks" in dtypes:
        return Mxfp4Encoding()
    if quantization == "int4" and f"{name}_packed" in dtypes:
        return Int4GroupEncoding()
    return FloatEncoding()
