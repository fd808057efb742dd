"""Parameters, cache and state of public models, counted from their config.json.

Shipped: the sizes of `NAMES`, in `models/known/*.json`, as their publishers state them. A folder
with a config.json of one of these model types works as well.

A model is a list of `Weights`: matrices of one kind, how many, and how GPUs divide them.
Only bytes come from here; jaxattn runs none of these models itself (its own runnable decoder is
`jaxattn.models.hybrid`).
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxattn.models.known_fields import KnownModelError, merged, quantized_block

DATA = Path(__file__).parent / "known"
NAMES = tuple(sorted(path.stem for path in DATA.glob("*.json")))


@dataclasses.dataclass(frozen=True)
class Weights:
    """`count` matrices of one shape.

    Attributes:
        kind: the line of the table they belong to.
        shape: of one of them.
        split: "experts" (one GPU has whole ones), "attention" or "dense" (divided when those are
            tensor-parallel) or "all" (on every GPU).
        quantized: stored in the checkpoint's quantized format, if it has one.
        dtype_bytes: otherwise.
    """

    kind: str
    shape: tuple[int, ...]
    count: int = 1
    split: str = "all"
    quantized: bool = True
    dtype_bytes: int = 2

    @property
    def parameters(self) -> int:
        return math.prod(self.shape) * self.count


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """What a plan needs to know of a model.

    Attributes:
        weights: of the layers, embedding and head; `extra` are those of its prediction layers.
        attention_layers: that cache something of every token.
        cache_width: numbers a token and layer cache; an MLA latent cannot be divided by heads.
        cache_heads: key-value heads that a tensor-parallel group can divide; 0 for a latent.
        state_layers: with a recurrent state.
        state_heads: value heads of it, [Dv, Dk] = `state_shape` each.
        conv_channels, conv_taps: of the short convolution before it.
        block: side of the squares that share a scale in a quantized checkpoint; 0 if it is not.
    """

    name: str
    config: dict[str, Any]
    weights: tuple[Weights, ...]
    extra: tuple[Weights, ...]
    layers: int
    attention_layers: int
    cache_width: int
    cache_heads: int
    state_layers: int
    state_heads: int
    state_shape: tuple[int, int]
    conv_channels: int
    conv_taps: int
    block: int

    @property
    def max_position_embeddings(self) -> int:
        names = ("max_position_embeddings", "model_max_length")
        return next(self.config[name] for name in names if name in self.config)

    @property
    def is_mla(self) -> bool:
        return "kv_lora_rank" in self.config

    def stored_bytes(self, weights: Weights) -> tuple[int, int]:
        """(bytes of the numbers, bytes of their scales) of one matrix, as it is stored."""
        size = math.prod(weights.shape)
        if not (self.block and weights.quantized):
            return size * weights.dtype_bytes, 0
        scales = math.prod(-(-side // self.block) for side in weights.shape)
        return size, 4 * scales

    def total_parameters(self, *, extra: bool = False) -> int:
        return sum(w.parameters for w in (*self.weights, *(self.extra if extra else ())))

    def total_bytes(self, *, extra: bool = False) -> int:
        """Of the checkpoint's tensors, on one device."""
        return sum(
            sum(self.stored_bytes(w)) * w.count
            for w in (*self.weights, *(self.extra if extra else ()))
        )


def load(name: str) -> KnownModel:
    """A shipped model by its name (case does not matter), or a folder's config.json.

    Raises:
        KnownModelError: there is none, or it is of a model type that is not known.
    """
    for known in NAMES:
        if known.lower() == name.lower():
            return from_config(known, json.loads((DATA / f"{known}.json").read_text()))
    path = Path(name) / "config.json"
    if path.parent.is_dir() and not path.is_file():
        raise KnownModelError(f"{path.parent} is a folder without a config.json")
    if not path.is_file():
        raise KnownModelError(
            f"unknown configuration {name!r}: use one of {', '.join(NAMES)}, or a folder with a "
            "config.json"
        )
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise KnownModelError(f"cannot read {path}: {error}") from error
    return from_config(Path(name).name, config)


def from_config(name: str, config: Any) -> KnownModel:
    """Counts a model's parts.

    Raises:
        KnownModelError: an unknown model type, or a field is missing or absurd.
    """
    config = merged(name, config)
    build = {
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "qwen3_next": _qwen,
        "qwen3_5_moe": _qwen,
        "qwen3_5_moe_text": _qwen,
        "kimi_linear": _kimi,
    }
    return build[config["model_type"]](name, config)


def _deepseek(name: str, c: dict[str, Any]) -> KnownModel:
    layers, dense, hidden = c["num_hidden_layers"], c["first_k_dense_replace"], c["hidden_size"]
    moe = layers - dense
    mlp = [
        *_mlp("dense MLP", hidden, c["intermediate_size"], dense, "dense"),
        *_experts(c, moe, c["n_routed_experts"], c["n_shared_experts"]),
    ]
    predict = c.get("num_nextn_predict_layers") or 0
    extra = [
        *_mla(c, predict),
        *_experts(c, predict, c["n_routed_experts"], c["n_shared_experts"]),
        *_norms(hidden, predict, 5),
        Weights("prediction", (hidden, 2 * hidden), predict, "all", False),
        *_ends(c, predict, norm=False),
    ]
    return KnownModel(
        name,
        c,
        (*_mla(c, layers), *mlp, *_norms(hidden, layers, 2), *_ends(c)),
        tuple(w for w in extra if w.count),
        layers=layers,
        attention_layers=layers,
        cache_width=c["kv_lora_rank"] + c["qk_rope_head_dim"],
        cache_heads=0,
        state_layers=0,
        state_heads=0,
        state_shape=(0, 0),
        conv_channels=0,
        conv_taps=0,
        block=quantized_block(name, c),
    )


def _kimi(name: str, c: dict[str, Any]) -> KnownModel:
    linear, layers, hidden = c["linear_attn_config"], c["num_hidden_layers"], c["hidden_size"]
    full = len(linear["full_attn_layers"])
    kda, heads, dim = layers - full, linear["num_heads"], linear["head_dim"]
    width, dense = heads * dim, c["first_k_dense_replace"]
    delta = (
        Weights("KDA", (width, hidden), 3 * kda, "attention"),
        Weights("KDA", (3 * width, linear["short_conv_kernel_size"]), kda, "attention", False),
        Weights("KDA", (dim, hidden), 2 * kda),
        Weights("KDA", (width, dim), 2 * kda, "attention"),
        Weights("KDA", (heads, hidden), kda, "attention"),
        Weights("KDA", (heads + width,), kda, "attention", False, 4),
        Weights("KDA", (dim,), kda, "all", False),
        Weights("KDA", (hidden, width), kda, "attention"),
    )
    experts = {**c, "n_routed_experts": c["num_experts"], "topk_method": "noaux_tc"}
    return KnownModel(
        name,
        {**c, "num_experts_per_tok": c["num_experts_per_token"]},
        (
            *_mla(c, full),
            *delta,
            *_mlp("dense MLP", hidden, c["intermediate_size"], dense, "dense"),
            *_experts(experts, layers - dense, c["num_experts"], c["num_shared_experts"]),
            *_norms(hidden, layers, 2),
            *_ends(c),
        ),
        (),
        layers=layers,
        attention_layers=full,
        cache_width=c["kv_lora_rank"] + c["qk_rope_head_dim"],
        cache_heads=0,
        state_layers=kda,
        state_heads=heads,
        state_shape=(dim, dim),
        conv_channels=3 * width,
        conv_taps=linear["short_conv_kernel_size"] - 1,
        block=quantized_block(name, c),
    )


def _qwen(name: str, c: dict[str, Any]) -> KnownModel:
    layers, hidden = c["num_hidden_layers"], c["hidden_size"]
    full = layers // c["full_attention_interval"]
    delta = layers - full
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    heads = c["linear_num_value_heads"]
    values = heads * c["linear_value_head_dim"]
    gdn = (
        Weights("GDN", (2 * keys + 2 * values, hidden), delta, "attention"),
        Weights("GDN", (2 * heads, hidden), delta, "attention"),
        Weights("GDN", (2 * keys + values, c["linear_conv_kernel_dim"]), delta, "attention", False),
        Weights("GDN", (2 * heads,), delta, "attention", False),
        Weights("GDN", (c["linear_value_head_dim"],), delta, "all", False),
        Weights("GDN", (hidden, values), delta, "attention"),
    )
    predict = c.get("mtp_num_hidden_layers") or c.get("num_nextn_predict_layers") or 0
    return KnownModel(
        name,
        c,
        (
            *_gqa(c, full),
            *gdn,
            *_qwen_experts(c, layers),
            *_norms(hidden, layers, 2),
            *_ends(c),
        ),
        tuple(
            w
            for w in (
                *_gqa(c, predict),
                *_qwen_experts(c, predict),
                *_norms(hidden, predict, 5),
                Weights("prediction", (hidden, 2 * hidden), predict, "all", False),
            )
            if w.count
        ),
        layers=layers,
        attention_layers=full,
        cache_width=2 * c["num_key_value_heads"] * c["head_dim"],
        cache_heads=c["num_key_value_heads"],
        state_layers=delta,
        state_heads=heads,
        state_shape=(c["linear_value_head_dim"], c["linear_key_head_dim"]),
        conv_channels=2 * keys + values,
        conv_taps=c["linear_conv_kernel_dim"] - 1,
        block=quantized_block(name, c),
    )


def _mla(c: dict[str, Any], layers: int) -> Iterator[Weights]:
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    queries = heads * (nope + rope)
    if low := c.get("q_lora_rank"):
        yield Weights("MLA", (low, hidden), layers)
        yield Weights("MLA", (queries, low), layers, "attention")
        yield Weights("MLA", (low,), layers, "all", False)
    else:
        yield Weights("MLA", (queries, hidden), layers, "attention")
    yield Weights("MLA", (rank + rope, hidden), layers)
    yield Weights("MLA", (rank,), layers, "all", False)
    yield Weights("MLA", (heads * (nope + value), rank), layers, "attention")
    yield Weights("MLA", (hidden, heads * value), layers, "attention")


def _gqa(c: dict[str, Any], layers: int) -> Iterator[Weights]:
    hidden, dim = c["hidden_size"], c["head_dim"]
    yield Weights("attention", (2 * c["num_attention_heads"] * dim, hidden), layers, "attention")
    yield Weights("attention", (2 * c["num_key_value_heads"] * dim, hidden), layers, "attention")
    yield Weights("attention", (hidden, c["num_attention_heads"] * dim), layers, "attention")
    yield Weights("attention", (dim,), 2 * layers, "all", False)


def _mlp(kind: str, hidden: int, width: int, count: int, split: str) -> Iterator[Weights]:
    yield Weights(kind, (width, hidden), 2 * count, split)
    yield Weights(kind, (hidden, width), count, split)


def _experts(c: dict[str, Any], layers: int, routed: int, shared: int) -> Iterator[Weights]:
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    yield from _mlp("experts", hidden, width, layers * routed, "experts")
    yield from _mlp("shared experts", hidden, shared * width, layers, "dense")
    yield Weights("router", (routed, hidden), layers, "all", False)
    if c.get("topk_method") == "noaux_tc":
        yield Weights("router", (routed,), layers, "all", False, 4)


def _qwen_experts(c: dict[str, Any], layers: int) -> Iterator[Weights]:
    hidden, routed = c["hidden_size"], c["num_experts"]
    yield from _mlp("experts", hidden, c["moe_intermediate_size"], layers * routed, "experts")
    width = c["shared_expert_intermediate_size"]
    yield from _mlp("shared experts", hidden, width, layers, "dense")
    yield Weights("router", (routed + 1, hidden), layers, "all", False)


def _norms(hidden: int, layers: int, each: int) -> Iterator[Weights]:
    yield Weights("norms", (hidden,), each * layers, "all", False)


def _ends(c: dict[str, Any], count: int = 1, *, norm: bool = True) -> Iterator[Weights]:
    shape = (c["vocab_size"], c["hidden_size"])
    yield Weights("embedding", shape, count, "dense", False)
    if not c.get("tie_word_embeddings"):
        yield Weights("head", shape, count, "dense", False)
    if norm:
        yield Weights("norms", (c["hidden_size"],), count, "all", False)
