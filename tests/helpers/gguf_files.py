"""Writes GGUF files of a few tensors, byte by byte."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxattn.models.loading.gguf.gguf_header import TYPES

NUMBERS = {each.name: number for number, each in TYPES.items()}
ALIGNMENT = 32


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value_of(value: Any) -> bytes:
    """A value after its type: strings, integers, floats, bools, or lists of the first three."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    if isinstance(value[0], float):
        return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    *,
    version: int = 3,
) -> Path:
    """Writes a file with this metadata and these tensors.

    Args:
        tensors: name -> (type, shape with the rows first, bytes).
    """
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += text(key) + value_of(value)
    data = b""
    for name, (kind, shape, content) in tensors.items():
        number = NUMBERS.get(kind, 0) if isinstance(kind, str) else kind
        head += text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", number, len(data))
        data += content + bytes(-len(content) % ALIGNMENT)
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
    return path


def floats(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """An F32 tensor."""
    return "F32", array.shape, array.astype(np.float32).tobytes()


# --- a tiny model in both layouts

LAYERS, HIDDEN, HEADS, KV, DIM, INNER = 2, 64, 4, 2, 16, 96
TOKENS = [*map(chr, range(33, 127)), "Ġ", "Ċ", "he", "Ġhe", "<|user|>", "<|end|>"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"


def hub_tensors(kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of a tiny folder of this `model_type`, with an untied head."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    vocab = len(TOKENS)
    found = {
        "model.embed_tokens.weight": normal(vocab, HIDDEN),
        "lm_head.weight": normal(vocab, HIDDEN),
    }
    found["model.norm.weight"] = normal(HIDDEN)
    for layer in range(LAYERS):
        p = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * DIM, HIDDEN),
            ("self_attn.k_proj", KV * DIM, HIDDEN),
            ("self_attn.v_proj", KV * DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * DIM),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            found[f"{p}.{name}.weight"] = normal(rows, columns)
            if kind == "qwen2" and name[-6] in "qkv" and "attn" in name:
                found[f"{p}.{name}.bias"] = normal(rows)
        for name, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            found[f"{p}.{name}.weight"] = normal(size)
        if kind == "qwen3":
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                found[f"{p}.{name}.weight"] = normal(DIM)
    return found


CONFIG = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM, "hidden_act": "silu",
    "max_position_embeddings": 256, "rms_norm_eps": 9.999999747378752e-06, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "vocab_size": len(TOKENS),
}  # fmt: skip


def metadata_of(kind: str) -> dict[str, Any]:
    """The metadata of such a model's file."""
    own = {
        "context_length": 256, "embedding_length": HIDDEN, "feed_forward_length": INNER,
        "block_count": LAYERS, "attention.head_count": HEADS, "attention.head_count_kv": KV,
        "attention.key_length": DIM, "attention.value_length": DIM,
        "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    }  # fmt: skip
    return {
        "general.architecture": kind,
        **{f"{kind}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in TOKENS],
        "tokenizer.ggml.merges": ["h e", "Ġ he"],
        "tokenizer.ggml.eos_token_id": len(TOKENS) - 1,
        "tokenizer.chat_template": TEMPLATE,
    }


_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_tensors(kind: str, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The tensors in llama.cpp's layout, which interleaves the rows of llama's rotated pairs."""
    found = {}
    for name, array in tensors.items():
        stem, _, end = name.rpartition(".")
        layer = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            layer = f"blk.{number}."
        if kind == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            halves = array.reshape(-1, 2, DIM // 2, array.shape[1])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        found[f"{layer}{_NAMES[stem]}.{end}"] = floats(array)
    return found
