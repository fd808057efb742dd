"""What a public model's config.json has to hold before anything is counted from it."""

from typing import Any

from jaxattn.core.checks import MOST

_ALL = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_MLA = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size")
_DEEPSEEK = (*_ALL, *_MLA, "n_routed_experts", "num_experts_per_tok", "max_position_embeddings")
_KIMI = (*_ALL, *_MLA, "num_experts", "num_experts_per_token", "model_max_length")
_QWEN = (
    *_ALL,
    "num_key_value_heads",
    "head_dim",
    "full_attention_interval",
    "num_experts",
    "num_experts_per_tok",
    "shared_expert_intermediate_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
)
# Model type -> (positive integers, integers that may be 0), all of which must be there.
FIELDS = {
    "deepseek_v2": (_DEEPSEEK, ("first_k_dense_replace", "n_shared_experts")),
    "deepseek_v3": (_DEEPSEEK, ("first_k_dense_replace", "n_shared_experts")),
    "qwen3_next": (_QWEN, ()),
    "qwen3_5_moe": (_QWEN, ()),
    "qwen3_5_moe_text": (_QWEN, ()),
    "kimi_linear": (_KIMI, ("first_k_dense_replace", "num_shared_experts")),
}
# Of any model type; null or absent is 0.
_OPTIONAL = (
    "q_lora_rank",
    "intermediate_size",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
)


class KnownModelError(ValueError):
    """No such model, or a config.json that is not understood."""


def merged(name: str, config: Any) -> dict[str, Any]:
    """A config.json's fields, with those of its `text_config` among them.

    Raises:
        KnownModelError: it is no object, of no known model type, or a field is missing or absurd.
    """
    text = config.get("text_config", {}) if isinstance(config, dict) else None
    if not isinstance(text, dict):
        where = "text_config in config.json" if isinstance(config, dict) else "config.json"
        raise KnownModelError(f"{name}: {where} is not an object")
    fields = {**config, **text}
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in FIELDS:
        types = ", ".join(kind for kind in FIELDS if not kind.endswith("_text"))
        raise KnownModelError(f"{name}: model_type {kind!r} is not one of {types}")
    positive, counts = FIELDS[kind]
    _check(name, fields, positive, 1)
    _check(name, fields, counts, 0)
    _check(name, fields, [field for field in _OPTIONAL if fields.get(field) is not None], 0)
    for part, whole in (
        ("first_k_dense_replace", "num_hidden_layers"),
        ("full_attention_interval", "num_hidden_layers"),
    ):
        if fields.get(part, 0) > fields[whole]:
            raise KnownModelError(
                f"{name}: {part}={fields[part]:,} in config.json is more than "
                f"{whole}={fields[whole]:,}"
            )
    if kind == "kimi_linear":
        _check_linear(name, fields)
    return fields


def _check(name: str, fields: dict[str, Any], names: Any, least: int, where: str = "") -> None:
    for field in names:
        if field not in fields:
            raise KnownModelError(f"{name}: config.json lacks {where}{field}")
        value = fields[field]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise KnownModelError(
                f"{name}: {where}{field} in config.json must be an integer from {least} to "
                f"{MOST:,}; got {value!r}"
            )


def _check_linear(name: str, fields: dict[str, Any]) -> None:
    """Kimi's delta layers, and which layers (from 1) are not among them."""
    linear, layers = fields.get("linear_attn_config"), fields["num_hidden_layers"]
    if not isinstance(linear, dict):
        raise KnownModelError(f"{name}: linear_attn_config in config.json is not an object")
    sizes = ("num_heads", "head_dim", "short_conv_kernel_size")
    _check(name, linear, sizes, 1, "linear_attn_config.")
    full = linear.get("full_attn_layers")
    if not isinstance(full, list) or not set(full) <= set(range(1, layers + 1)):
        raise KnownModelError(
            f"{name}: linear_attn_config.full_attn_layers in config.json must be layers from 1 to "
            f"{layers}; got {full!r}"
        )


def quantized_block(name: str, fields: dict[str, Any]) -> int:
    """Side of the squares that share a scale in an FP8 checkpoint; 0 if it is not quantized.

    Raises:
        KnownModelError: it is quantized in another way.
    """
    quantization = fields.get("quantization_config")
    if quantization is None:
        return 0
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if method != "fp8" or block is None:
        raise KnownModelError(f"{name}: quantization {method!r} is not known; fp8 in blocks is")
    square = isinstance(block, list) and len(block) == 2 and block[0] == block[1]
    if not square or not isinstance(block[0], int) or not 1 <= block[0] <= MOST:
        raise KnownModelError(
            f"{name}: weight_block_size in config.json must be the two equal sides of a square; "
            f"got {block!r}"
        )
    return block[0]
