"""Model folders with a config.json and a tokenizer but no weights, which two engines can open.

Each engine draws its own weights. The tokenizer has a word for each token id of the model, so that
every token adds text to a chunk of a server's stream. Prompts are token ids, so nothing encodes
them.
"""

import json
from pathlib import Path
from typing import Any

from jaxattn.models.loading.huggingface_checkpoint import CONFIG

# The `architectures` entry in a public model's config.json, which our catalog omits.
ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
# Text models that are published inside another model's config.json, under `text_config`.
PUBLISHED_INSIDE = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
# A one-layer model for a CPU.
SMALL: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


def write_folder(folder: Path, fields: dict[str, Any]) -> None:
    """Writes config.json, with the model's architecture, and the tokenizer files.

    Args:
        folder: An existing folder.
        fields: The fields of the model's config.json.
    """
    model_type = fields.get("model_type", "")
    config = fields
    if outer := PUBLISHED_INSIDE.get(model_type):
        config = {"model_type": (model_type := outer), "text_config": fields}
    if named := ARCHITECTURES.get(model_type):
        config = {"architectures": [named], **config}
    (folder / CONFIG).write_text(json.dumps(config))
    size = fields.get("text_config", fields)["vocab_size"]
    words = {f"\u2581t{number}": number for number in range(size)}
    spaces = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "always",
        "split": True,
    }
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": spaces, "post_processor": None, "decoder": spaces,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "\u2581t0"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "\u2581t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
