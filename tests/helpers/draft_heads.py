"""Tiny folders with prediction layers (MTP), and a float64 NumPy reference of those layers.

The reference reads the tensors by their published names and processes whole sequences, without a
cache.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.registry import read_model
from tests.helpers.safetensors_files import write_file

type Tensors = dict[str, np.ndarray]

VOCAB, HIDDEN, EPS = 64, 32, 1e-6
_ALL = dict(vocab_size=VOCAB, hidden_size=HIDDEN, max_position_embeddings=512, rms_norm_eps=EPS,
            hidden_act="silu", tie_word_embeddings=False, rope_theta=1e4)  # fmt: skip
_MLA = _ALL | dict(
    num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, moe_intermediate_size=32,
    n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, kv_lora_rank=32,
    qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, topk_method="noaux_tc",
    scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=1.5,
    first_k_dense_replace=1, num_nextn_predict_layers=1,
)  # fmt: skip
_QWEN = _ALL | dict(
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    partial_rotary_factor=0.25, full_attention_interval=2, linear_num_key_heads=1,
    linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": _MLA | dict(q_lora_rank=24),
    "deepseek_v3": _MLA | dict(q_lora_rank=None, n_group=1, topk_group=1),
    "qwen3_5_text": _QWEN | dict(intermediate_size=48, mtp_num_hidden_layers=1),
    "qwen3_next": _QWEN
    | dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
        decoder_sparse_step=1, shared_expert_intermediate_size=32,
    ),
}  # fmt: skip


def write_folder(folder: Path, model_type: str, *, guesses_well: bool = False) -> Tensors:
    """Writes a folder of random weights, and returns its tensors as stored.

    Args:
        guesses_well: Whether layers add little to the residual stream, and the prediction layer's
            stream begins with the token's embedding. Its guess then often equals the model's token.
    """
    config = CONFIGS[model_type] | {"model_type": model_type}
    published = read_model(ConfigFields(config, "config.json"), draft_head=True)
    random, tensors = np.random.default_rng(0), dict[str, np.ndarray]()
    for each in published.placed():
        if each.name in tensors:
            continue
        drawn = random.standard_normal(each.shape)
        last = each.name.removesuffix(".weight").rsplit(".", 1)[-1]
        if "norm" in last:
            # Qwen stores w of 1 + w, except for the norm after the delta rule.
            plain = model_type in ("glm4_moe_lite", "deepseek_v3") or "linear_attn" in each.name
            drawn = plain + 0.1 * drawn
        elif len(each.shape) == 2 and last != "embed_tokens":
            drawn = drawn * each.shape[1] ** -0.5
        if guesses_well and last in ("o_proj", "out_proj", "down_proj"):
            drawn = 0.2 * drawn
        if guesses_well and each.key[:2] == ("draft_layers", "projection"):
            drawn = np.eye(*each.shape)
        tensors[each.name] = drawn.astype(ml_dtypes.bfloat16)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", tensors)
    return tensors


class PredictionLayer:
    """The prediction layer of a folder, for whole sequences."""

    def __init__(self, model_type: str, tensors: Tensors):
        self.config, self.qwen = CONFIGS[model_type], model_type.startswith("qwen")
        self.tensors = {name: x.astype(np.float64) for name, x in tensors.items()}
        self.prefix = "mtp.layers.0" if self.qwen else f"model.layers.{_MLA['num_hidden_layers']}"

    def __call__(self, tokens: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the logits of guesses [T, vocab], and the input of the next guess [T, hidden].

        Args:
            tokens: The token after each of `hidden`.
            hidden: The input of the output head for each token.
        """
        names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        if not self.qwen:
            leaves = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            names = tuple(f"{self.prefix}.{leaf}" for leaf in leaves)  # type: ignore[assignment]
        embedded = self.tensors["model.embed_tokens.weight"][tokens]
        both = self.norm(embedded, names[0]), self.norm(hidden.astype(np.float64), names[1])
        x = np.concatenate(both, axis=-1) @ self.tensors[f"{names[2]}.weight"].T
        attend = self.gated_attention if self.qwen else self.latent_attention
        x = x + attend(self.norm(x, f"{self.prefix}.input_layernorm"))
        x = x + self.feed_forward(self.norm(x, f"{self.prefix}.post_attention_layernorm"))
        normed = self.norm(x, names[3])
        return normed @ self.tensors["lm_head.weight"].T, normed if self.qwen else x

    def norm(self, x: np.ndarray, name: str, plain: bool = False) -> np.ndarray:
        weight = self.tensors[f"{name}.weight"] + (self.qwen and not plain)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensors[f"{self.prefix}.{name}.weight"].T

    def latent_attention(self, x: np.ndarray) -> np.ndarray:
        c, name = self.config, "self_attn"
        heads, keys, turned = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        if c["q_lora_rank"] is None:
            q = self.linear(x, f"{name}.q_proj")
        else:
            low = self.norm(
                self.linear(x, f"{name}.q_a_proj"), f"{self.prefix}.{name}.q_a_layernorm"
            )
            q = self.linear(low, f"{name}.q_b_proj")
        q = q.reshape(len(x), heads, keys + turned)
        down = self.linear(x, f"{name}.kv_a_proj_with_mqa")
        latent, k_rope = down[:, : c["kv_lora_rank"]], down[:, c["kv_lora_rank"] :]
        latent = self.norm(latent, f"{self.prefix}.{name}.kv_a_layernorm")
        kv = self.linear(latent, f"{name}.kv_b_proj").reshape(len(x), heads, -1)
        q = np.concatenate([q[..., :keys], rotated(q[..., keys:], pairs=True)], axis=-1)
        k_rope = np.broadcast_to(rotated(k_rope[:, None], pairs=True), (len(x), heads, turned))
        k = np.concatenate([kv[..., :keys], k_rope], axis=-1)
        return self.linear(attention(q, k, kv[..., keys:]), f"{name}.o_proj")

    def gated_attention(self, x: np.ndarray) -> np.ndarray:
        c, name = self.config, "self_attn"
        heads, dim = c["num_attention_heads"], c["head_dim"]
        q, gate = np.split(self.linear(x, f"{name}.q_proj").reshape(len(x), heads, -1), 2, axis=-1)
        k, v = (self.linear(x, f"{name}.{n}_proj").reshape(len(x), -1, dim) for n in "kv")
        q = self.norm(q, f"{self.prefix}.{name}.q_norm")
        k = self.norm(k, f"{self.prefix}.{name}.k_norm")
        part = int(dim * c["partial_rotary_factor"])
        q, k = (np.concatenate([rotated(y[..., :part]), y[..., part:]], axis=-1) for y in (q, k))
        k, v = (np.repeat(y, heads // c["num_key_value_heads"], axis=1) for y in (k, v))
        out = attention(q, k, v) * sigmoid(gate.reshape(len(x), -1))
        return self.linear(out, f"{name}.o_proj")

    def feed_forward(self, x: np.ndarray) -> np.ndarray:
        if f"{self.prefix}.mlp.gate.weight" not in self.tensors:
            return self.mlp(x, "mlp")
        scores, top_k = self.linear(x, "mlp.gate"), self.config["num_experts_per_tok"]
        if self.qwen:
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            chosen, scale = scores, 1.0
            shared = sigmoid(self.linear(x, "mlp.shared_expert_gate")) * self.mlp(
                x, "mlp.shared_expert"
            )
        else:
            scores = sigmoid(scores)
            chosen = scores + self.tensors[f"{self.prefix}.mlp.gate.e_score_correction_bias"]
            scale, shared = self.config["routed_scaling_factor"], self.mlp(x, "mlp.shared_experts")
        taken = np.argsort(-chosen, axis=-1)[:, :top_k]
        weights = np.zeros_like(scores)
        np.put_along_axis(weights, taken, np.take_along_axis(scores, taken, -1), -1)
        weights *= scale / weights.sum(-1, keepdims=True)
        experts = [self.mlp(x, f"mlp.experts.{e}") for e in range(scores.shape[1])]
        return shared + np.einsum("te,eth->th", weights, np.stack(experts))

    def mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        gate, up = (self.linear(x, f"{name}.{each}_proj") for each in ("gate", "up"))
        return self.linear(gate * sigmoid(gate) * up, f"{name}.down_proj")


def rotated(x: np.ndarray, *, pairs: bool = False) -> np.ndarray:
    """x [T, H, D] rotated by RoPE, in halves, or in neighboring pairs."""
    dim = x.shape[-1]
    angles = np.arange(len(x))[:, None] * 1e4 ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    one, two = (x[..., ::2], x[..., 1::2]) if pairs else np.split(x, 2, axis=-1)
    return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention for [T, H, D], with concatenated heads."""
    scores = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hqk,khd->qhd", chances / chances.sum(-1, keepdims=True), v)
    return out.reshape(len(q), -1)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
