"""Conversion of a GGUF file's metadata to the config.json of the same model."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxattn.core.numerics.rope import Llama3RopeScaling, RopeConfig, inv_freq
from jaxattn.core.validation.config_fields import short_repr
from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.models.loading.gguf.gguf_header import GgufHeader

# Supported architectures, for which llama.cpp and transformers use the same names.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Field of config.json -> key after the architecture's name.
_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
HEAD, EMBEDDING, ROPE = "output.weight", "token_embd.weight", "rope_freqs.weight"
# Fields of Llama 3.1 to 3.3. The files store only the result, the slowdown of each pair.
_LLAMA3: dict[str, Any] = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the fields of a config.json.

    Raises:
        CheckpointError: The architecture is not supported, a field is missing, or a value is not
            supported by these families.
    """
    name = header.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: the architecture {short_repr(name)} is not supported in GGUF; "
            f"supported are {', '.join(ARCHITECTURES)}. Load the model's folder from the hub"
        )
    keys = _Keys(header, str(name))
    fields = {field: keys.required(key) for field, key in _FIELDS.items()}
    heads = _integer(fields["num_attention_heads"])
    dim = keys.get("attention.key_length", _integer(fields["hidden_size"]) // max(heads, 1))
    for key, wanted in (("attention.value_length", dim), ("rope.dimension_count", dim)):
        keys.require(key, wanted)
    keys.require("expert_count", 0)
    if EMBEDDING not in header.tensors:
        raise CheckpointError(f"{header.path} has no tensor {EMBEDDING!r}")
    tied, theta = HEAD not in header.tensors, keys.get("rope.freq_base", 10_000.0)
    return {
        **fields,
        "model_type": name,
        "hidden_act": "silu",
        "head_dim": dim,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "rope_theta": theta,
        "rope_scaling": _llama3(header, dim, theta) if ROPE in header.tensors else _scaling(keys),
        "tie_word_embeddings": tied,
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        "attention_bias": name == "qwen2",
    }


def _scaling(keys: "_Keys") -> dict[str, Any] | None:
    """Returns `rope_scaling`."""
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    found = {"rope_type": kind, "factor": keys.required("rope.scaling.factor")}
    if (length := keys.get("rope.scaling.original_context_length", None)) is not None:
        found["original_max_position_embeddings"] = length
    return found


def _llama3(header: GgufHeader, dim: Any, theta: Any) -> dict[str, Any]:
    """Returns `rope_scaling` of Llama 3.

    Raises:
        CheckpointError: The stored slowdown of the pairs is not that of Llama 3's formula.
    """
    tensor = header.tensors[ROPE]
    stored = np.zeros(0, np.float32)
    if tensor.kind.name == "F32":
        count = math.prod(tensor.shape)
        stored = np.fromfile(header.path, "<f4", count, offset=tensor.begin)
    factor = float(stored.max(initial=0))
    try:
        made = RopeConfig(dim, theta, llama3=Llama3RopeScaling(factor=factor, **_LLAMA3))
        wanted = inv_freq(RopeConfig(dim, theta)) / inv_freq(made)
    except (TypeError, ValueError):
        wanted = np.zeros(0, np.float32)
    if not stored.size or stored.shape != wanted.shape or not np.allclose(stored, wanted, 1e-5, 0):
        raise CheckpointError(
            f"{header.path}: {ROPE} differs from Llama 3's RoPE scaling of {dim} dims with "
            f"{_LLAMA3} and any factor; load the model's folder from the hub"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


class _Keys:
    """The metadata of an architecture."""

    def __init__(self, header: GgufHeader, name: str):
        self._header, self._name = header, name
        self._values: Mapping[str, Any] = header.metadata

    def get(self, key: str, default: Any) -> Any:
        return self._values.get(f"{self._name}.{key}", default)

    def required(self, key: str) -> Any:
        whole = f"{self._name}.{key}"
        if whole not in self._values:
            raise CheckpointError(f"{self._header.path} has no metadata {whole!r}")
        return self._values[whole]

    def require(self, key: str, expected: Any) -> None:
        """Raises CheckpointError for a value that the architecture's family does not support."""
        if (value := self.get(key, expected)) != expected:
            raise CheckpointError(
                f"{self._header.path}: {self._name}.{key} must be {expected}; "
                f"got {short_repr(value)}"
            )


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else 0  # the family rejects it under its own name
