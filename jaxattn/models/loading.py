"""A model from a folder, whichever format the folder has."""

import os
from pathlib import Path
from typing import Any

from jaxattn.models import checkpoint, huggingface
from jaxattn.models.decoder import DecoderModel
from jaxattn.models.hybrid import Hybrid
from jaxattn.models.shards import CONFIG, read_json


def load(folder: str | os.PathLike, *, dtype: str | None = None) -> tuple[DecoderModel, Any]:
    """The model of a folder and its parameters, on JAX's default device.

    Args:
        folder: in the layout of the Hugging Face hub (`jaxattn.models.huggingface`), or in the
            package's own format (`jaxattn.models.checkpoint`).
        dtype: of a folder from the hub: "bfloat16" or "float32"; None is bfloat16. The package's
            own format says its dtype itself.

    Raises:
        CheckpointError: a file is missing or damaged, or the model is not supported.
        ValueError: a dtype for the package's own format.
    """
    if "model_type" in read_json(Path(folder) / CONFIG):
        return huggingface.load(folder, dtype=dtype)
    if dtype is not None:
        raise ValueError(f"dtype={dtype!r} is for folders from the hub; {folder} has its own")
    config, params = checkpoint.load(folder)
    return Hybrid(config), params
