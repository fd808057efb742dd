"""FP8 folders with random numbers, in which matrices outside the experts may stay FP8."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from scripts.time_loading import FP8, parts
from tests.helpers import checkpoint_variations
from tests.helpers.safetensors_files import write_file


def fields_of(classes: str) -> dict[str, Any]:
    """A config.json in the publishers' spelling."""
    made = checkpoint_variations.whole_blocks(classes)
    more = {"quantization_config": FP8, "model_type": made.model_type}
    return (
        made.fields | more | {"rope_theta": 1e4, "linear_conv_kernel_dim": 4, "hidden_act": "silu"}
    )


def write_folder(folder: Path, classes: str) -> Path:
    """Writes numbers over e4m3's range, with scales that bring them back to order 1."""
    config = fields_of(classes)
    (folder / "config.json").write_text(json.dumps(config))
    random, tensors = np.random.default_rng(3), {}
    for part in parts(config, "fp8"):
        dtype = jnp.dtype(part.dtypes[0])
        numbers = random.standard_normal(part.shape).astype(np.float32)
        if "scale_inv" in part.name:
            numbers = (1 + 0.3 * numbers.clip(-2, 2)) / 1500
        elif dtype.itemsize == 1:
            numbers = (numbers * 100).clip(-448, 448)
        elif len(part.shape) > 1:
            numbers *= part.shape[-1] ** -0.5
        tensors[part.name] = numbers.astype(dtype)
    write_file(folder / "model.safetensors", tensors)
    return folder
