"""The model of a GGUF file and its weights, for the loader of families.

At load time weights are widened to the model's dtype on the device, so a file of 4 bits takes the
memory of bfloat16. Tensors go where those of the same model's folder go, by the Hub's names.
"""

import dataclasses
import re
from pathlib import Path

from jaxattn.core.validation.config_fields import short_list, short_repr
from jaxattn.models.blocks import GQA
from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.models.checkpoint.safetensors_index import TensorEntry
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.published_model import PublishedModel
from jaxattn.models.loading.gguf.gguf_config import ROPE, config_of
from jaxattn.models.loading.gguf.gguf_encodings import GgufEncoding
from jaxattn.models.loading.gguf.gguf_header import GgufHeader
from jaxattn.models.weight_map.tensor_mapping import WeightMapping

_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", re.ASCII)


def read_fields(header: GgufHeader) -> ConfigFields:
    """Returns the metadata as the fields of a config.json.

    Raises:
        CheckpointError: The metadata contains something unsupported, or the file is a part of a
            model.
    """
    _check_path(header.path)
    return ConfigFields(config_of(header), str(header.path))


def hub_name(name: str) -> str | None:
    """Returns the name of a tensor in the same model's folder, or None if it has none."""
    if name in _ENDS:
        return _ENDS[name]
    found = _OF_LAYER.fullmatch(name)
    if found is None or found[2] not in _LAYER:
        return None
    return f"model.layers.{found[1]}.{_LAYER[found[2]]}.{found[3]}"


def open_tensors(
    header: GgufHeader, published: PublishedModel
) -> tuple[dict[str, TensorEntry], list[WeightMapping]]:
    """Returns the tensors under the Hub's names, and where each goes.

    Raises:
        CheckpointError: A tensor does not belong to the model.
    """
    names = {name: hub_name(name) for name in header.tensors if name != ROPE}
    if unknown := [repr(name) for name, own in names.items() if own is None]:
        raise CheckpointError(
            f"{header.path} contains tensors that the model does not have: "
            f"{short_list(unknown, width=200)}"
        )
    tensors, encodings = dict[str, TensorEntry](), dict[str, GgufEncoding]()
    for name, own in names.items():
        assert own is not None
        tensor = header.tensors[name]
        encodings[own] = encoding = GgufEncoding(tensor.kind, _paired(own, published))
        stored = encoding.stored_shape(tensor.shape)
        tensors[own] = TensorEntry(header.path, encoding.dtype, stored, tensor.begin, tensor.nbytes)
    placed = [
        dataclasses.replace(each, stored=encodings.get(each.name))
        for each in published.placed(tensors)
    ]
    return tensors, placed


def _paired(name: str, published: PublishedModel) -> int:
    """Returns rows per head if llama.cpp's converter reordered a matrix (llama only), else 1."""
    mixer = published.model.spec.blocks[0].mixer
    reordered = name.endswith(("q_proj.weight", "k_proj.weight"))
    if published.family.MODEL_TYPES != ("llama",) or not reordered:
        return 1
    assert isinstance(mixer, GQA)
    return mixer.head_dim


def _check_path(path: Path) -> None:
    """Rejects a part of a model in several files.

    Raises:
        CheckpointError: The file is such a part.
    """
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name) and "-00001-of-00001" not in path.name:
        raise CheckpointError(
            f"{short_repr(path.name)} is part of a model in several files, which are not "
            "supported; merge them with llama-gguf-split --merge"
        )
