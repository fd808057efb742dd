"""How a quantized checkpoint's weights lie in memory once they are loaded.

Experts of an FP8 checkpoint stay in FP8 with their scales. Its other FP8 matrices become bfloat16,
and so do the experts of an INT4 checkpoint.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxattn.core.checks import MOST
from jaxattn.core.fields import shown
from jaxattn.models.decoder import DecoderModel
from jaxattn.models.families.fields import ConfigError
from jaxattn.models.parts import part_of
from jaxattn.models.placing import Key


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a checkpoint stores its weights.

    Attributes:
        words: what the loader makes of it.
        block: side of the squares of FP8 numbers that share a scale; 0 without FP8.
    """

    words: str
    block: int = 0


PLAIN = Stored("as the loader keeps them")
INT4 = Stored("INT4 experts dequantized to bfloat16 on loading")


def read_stored(values: Mapping[str, Any], where: str) -> Stored:
    """What `quantization_config` of a config.json says.

    Args:
        where: the file, for messages.

    Raises:
        ConfigError: it is quantized in a way that is not known.
    """
    config = values.get("quantization_config")
    if config is None:
        return PLAIN
    config = config if isinstance(config, dict) else {"quant_method": config}
    method, form = config.get("quant_method"), config.get("format")
    if method == "compressed-tensors" and form == "pack-quantized":
        return INT4
    block = config.get("weight_block_size")
    if method != "fp8" or block is None:
        raise ConfigError(
            f"{where}: quantization {shown(method)} is not known; 'fp8' with a weight_block_size "
            "and 'compressed-tensors' in the format 'pack-quantized' are"
        )
    square = isinstance(block, list) and len(block) == 2 and block[0] == block[1]
    if not square or not isinstance(block[0], int) or not 1 <= block[0] <= MOST:
        raise ConfigError(
            f"{where}: weight_block_size must be the two equal sides of a square; got "
            f"{shown(block)}"
        )
    return Stored(
        f"experts in FP8 with a scale for each {block[0]} x {block[0]}, other FP8 matrices "
        "dequantized to bfloat16 on loading",
        block[0],
    )


def stored_shapes(model: DecoderModel, stored: Stored, *, every: bool = False) -> nnx.State:
    """The parameters that the loader allocates, as shapes.

    Args:
        every: as if all matrices stayed in FP8 that the checkpoint stores in FP8.
    """
    shapes = model.param_shapes()
    if not stored.block:
        return shapes
    flat: list[tuple[Key, Any]] = []
    for key, leaf in nnx.to_flat_state(shapes):
        part = part_of(model.spec, key)
        wanted = part.published_fp8 and (every or part.split == "experts")
        if wanted and jnp.dtype(leaf.dtype).itemsize > 1:
            name, value = _scales(key, leaf, stored.block)
            flat += [(name, value), (key, _like(leaf, leaf.shape, "float8_e4m3fn"))]
        else:
            flat.append((key, leaf))
    return nnx.from_flat_state(flat)


def _scales(key: Key, leaf: Any, block: int) -> tuple[Key, Any]:
    """The place and the shape of a matrix' scales."""
    *before, name = key
    *stack, rows, columns = leaf.shape
    halves = 2 if name == "gate_up_proj" else 1  # gate and up begin a block each
    blocks = (-(-rows // halves // block), -(-columns // block))
    shape = (*stack, *((2,) if halves == 2 else ()), *blocks)
    return (*before, str(name).removesuffix("_proj") + "_scale"), _like(leaf, shape, "float32")


def _like(leaf: Any, shape: tuple[int, ...], dtype: str) -> Any:
    return leaf.replace(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
