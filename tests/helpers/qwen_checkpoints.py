"""Conversion of transformers' Qwen tensors and config.json to the publishers' spelling."""

from typing import Any

import torch

from tests.helpers.checkpoint_variations import Variation

Tensors = dict[str, torch.Tensor]

# Models whose fields are in `text_config`, next to those of a vision tower.
NESTED = ("Qwen3_5", "Qwen3_5Moe")
NEVER_FP8 = ("in_proj_ba", "in_proj_a", "in_proj_b", "shared_expert_gate")


def is_one_plus(name: str, hybrid: bool) -> bool:
    """Whether a tensor is the w of a norm with weight 1 + w."""
    return hybrid and name.endswith("norm.weight") and "linear_attn" not in name


def respell(variation: Variation, values: dict[str, Any]) -> None:
    """Changes the fields of a config.json from transformers' to the publishers' spelling."""
    if not variation.published:
        return
    kinds = values.pop("layer_types")
    if variation.classes == "Qwen3":
        values |= dict(use_sliding_window=False, sliding_window=None)
    else:
        values["full_attention_interval"] = kinds.index("full_attention") + 1
    rope = values["rope_parameters"]
    if variation.classes in NESTED:
        rope |= dict(mrope_section=[2, 1, 1], mrope_interleaved=True)
        return
    del values["rope_parameters"]
    values["rope_theta"] = rope.pop("rope_theta")
    if part := rope.pop("partial_rotary_factor", None):
        values["partial_rotary_factor"] = part
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope


def nested(variation: Variation, values: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model with a vision tower."""
    outer = ("model_type", "tie_word_embeddings", "quantization_config")
    inner = {name: value for name, value in values.items() if name not in outer}
    inner |= {"model_type": f"{variation.model_type}_text"}
    return {name: values[name] for name in outer if name in values} | {"text_config": inner}


def published(variation: Variation, tensors: Tensors) -> Tensors:
    """The tensors with their published names."""
    found = tensors
    if variation.published and variation.classes in NESTED:
        if variation.weights == "bfloat16" and variation.classes == "Qwen3_5Moe":
            found = _fused(found, variation.fields["num_experts"])
        found = {_outer(name): tensor for name, tensor in found.items()}
    if variation.prediction:
        extra = {"mtp.fc.weight": torch.ones(4, 8).bfloat16(), "mtp.norm.weight": torch.ones(4)}
        if variation.classes in NESTED:
            extra["model.visual.pos_embed.weight"] = torch.ones(4, 4).bfloat16()
        found = found | extra
    return found


def _outer(name: str) -> str:
    text = name.startswith("model.")
    return f"model.language_model.{name.removeprefix('model.')}" if text else name


def _fused(tensors: Tensors, count: int) -> Tensors:
    """The tensors with each layer's experts fused into two."""
    found = {name: t for name, t in tensors.items() if ".experts." not in name}
    heads = {name.split("experts.")[0] for name in tensors if ".experts." in name}
    for head in heads:

        def stack(*names: str, head: str = head) -> torch.Tensor:
            each = (
                torch.cat([tensors[f"{head}experts.{e}.{name}.weight"] for name in names])
                for e in range(count)
            )
            return torch.stack(list(each))

        found[f"{head}experts.gate_up_proj"] = stack("gate_proj", "up_proj")
        found[f"{head}experts.down_proj"] = stack("down_proj")
    return found
