"""The scales of an FP8 cache of keys and values: those of a published checkpoint, or 1.

A checkpoint may store, per layer, the factors of cached keys and values as `k_scale` and `v_scale`
next to the attention's weights: one number each, or one per key-value head.
"""

import math
import re
from collections.abc import Mapping

import numpy as np

from jaxattn.models.blocks import GQA
from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.models.checkpoint.safetensors_index import TensorEntry
from jaxattn.models.network.decoder_spec import DecoderSpec
from jaxattn.models.weight_map.tensor_mapping import Key, layer_places

_SCALE = re.compile(r"\.layers\.(\d+)\.self_attn\.(?:[kv]_proj\.|attn\.)?([kv])_scale$")


def is_scale(name: str) -> bool:
    """Returns whether a tensor is a scale of the cache, which only an FP8 cache uses."""
    return _SCALE.search(name) is not None


def read_scales(tensors: Mapping[str, TensorEntry], spec: DecoderSpec) -> dict[Key, np.ndarray]:
    """Returns the parameters `kv_scale` of a decoder, float32 [repeats, 2, Hk] each.

    Args:
        tensors: All tensors of the folder.

    Raises:
        CheckpointError: A scale is not a positive number, or its size is neither 1 nor Hk.
    """
    scales: dict[Key, np.ndarray] = {}
    rows: dict[int, np.ndarray] = {}
    repeats = [
        s.repeats for s in spec.segments for _ in range(s.repeats) for _ in range(len(s.pattern))
    ]
    for layer, place in enumerate(layer_places(spec)):
        mixer = spec.blocks[layer].mixer
        if isinstance(mixer, GQA) and mixer.format(spec.stream).scaled:
            key = (*place.key, "mixer", "kv_scale")
            shape = (repeats[layer], 2, mixer.num_kv_heads)
            rows[layer] = scales.setdefault(key, np.ones(shape, np.float32))[place.repeat]
    for name, tensor in tensors.items():
        # Qwen's prediction layer numbers its layers from 0 again; its scales stay 1.
        match = None if name.startswith("mtp.") else _SCALE.search(name)
        if match is None or (layer := int(match[1])) not in rows:
            continue
        row = rows[layer]["kv".index(match[2])]
        count = math.prod(tensor.shape)
        if count not in (1, row.size):
            raise CheckpointError(
                f"{tensor.file}: {name!r} {list(tensor.shape)} must have 1 or {row.size} numbers"
            )
        numbers = np.fromfile(tensor.file, tensor.dtype, count, offset=tensor.begin)
        row[:] = numbers.astype(np.float32)
        if not (np.isfinite(row) & (row > 0)).all():
            raise CheckpointError(f"{tensor.file}: {name!r} must be positive; got {row.tolist()}")
    return scales
