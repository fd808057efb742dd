"""Random configurations of all families, for which `make_checkpoints.py` writes checkpoints."""

import dataclasses
import random
from typing import Any

VOCAB = 192


@dataclasses.dataclass(frozen=True)
class Variation:
    """The configuration of a checkpoint.

    Attributes:
        classes: The prefix of transformers' classes.
        fields: The fields of the configuration.
        weights: "bfloat16", "fp8", "int4" or "mxfp4".
        shards: The number of files.
        published: Whether config.json uses the publishers' spelling.
        prediction: Whether there are a prediction layer (MTP) and a tensor of a vision tower.
        model_type: The `model_type` in config.json.
    """

    classes: str
    fields: dict[str, Any]
    weights: str
    shards: int
    published: bool
    prediction: bool
    model_type: str


QWEN = ("Qwen3", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
# Grouped-query attention in every layer, with the field names of Llama's config.json.
PLAIN = ("Llama", "Mistral", "Qwen2", "Qwen3Moe", "Glm4Moe",
         "SmolLM3", "Olmo3", "Ministral3", "MiniMaxM2", "GptOss")  # fmt: skip
# MLA with DeepSeek Sparse Attention.
SPARSE = ("DeepseekV32", "GlmMoeDsa")
CLASSES = ("DeepseekV3", "Glm4MoeLite", "DeepseekV2", "Youtu", *QWEN, *PLAIN, *SPARSE)


def draw(seed: int) -> Variation:
    """The variation for a seed."""
    pick = random.Random(seed)
    classes = CLASSES[seed % len(CLASSES)]
    if classes in QWEN:
        return _qwen(pick, classes)
    if classes in PLAIN:
        return _plain(pick, classes)
    heads = pick.choice([1, 2, 3, 5, 20])
    layers = pick.choice([2, 3, 4])
    quantized = classes != "Youtu" and pick.random() < 0.5
    weights = pick.choice(["fp8", "int4"]) if quantized else "bfloat16"
    fields: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=pick.choice([160, 320] if heads in (5, 20) else [96, 192]),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=layers,
        intermediate_size=pick.choice([160, 224]),
        q_lora_rank=pick.choice([None, 32, 144]),
        kv_lora_rank=pick.choice([32, 64, 512]),
        qk_nope_head_dim=pick.choice([16, 48, 128]),
        qk_rope_head_dim=pick.choice([16, 64]),
        v_head_dim=pick.choice([16, 80, 128]),
        max_position_embeddings=4096,
        rms_norm_eps=pick.choice([1e-5, 1e-6]),
        tie_word_embeddings=pick.random() < 0.4,
        rope_parameters=_rope(pick, classes),
    )
    if classes in ("DeepseekV3", "Glm4MoeLite", "Youtu"):
        fields["rope_interleave"] = pick.random() < 0.7
    if classes != "Youtu":
        fields |= _experts(pick, classes, layers)
    if classes in SPARSE:
        fields |= _indexer(pick, classes, fields)
    return Variation(
        classes=classes,
        fields=fields,
        weights=weights,
        shards=pick.choice([1, 1, 2, 5]),
        published=pick.random() < 0.5,
        prediction=classes in ("DeepseekV3", "Glm4MoeLite", *SPARSE) and pick.random() < 0.5,
        model_type=pick.choice(MODEL_TYPES[classes]),
    )


def _indexer(pick: random.Random, classes: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of the indexers, with many heads so that no two scores are sums of zeros only."""
    found: dict[str, Any] = dict(
        q_lora_rank=fields["q_lora_rank"] or 32,
        index_topk=pick.choice([1, 7, 20, 64]),
        index_n_heads=pick.choice([16, 24]),
        index_head_dim=fields["qk_rope_head_dim"] + pick.choice([0, 16]),
    )
    if classes == "GlmMoeDsa":
        later = [pick.choice(["full", "shared"]) for _ in range(fields["num_hidden_layers"] - 1)]
        found["indexer_types"] = ["full", *later]
    return found


def small_sparse(classes: str) -> Variation:
    """The checkpoints of tests/data/tiny_checkpoints with DeepSeek Sparse Attention.

    A token at the prompt's end attends to a third of the prompt.
    """
    glm = classes == "GlmMoeDsa"
    layers = 4 if glm else 2
    fields: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=layers,
        intermediate_size=40,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=24 if glm else 16,
        qk_rope_head_dim=16,
        v_head_dim=32 if glm else 16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        rope_parameters=dict(rope_theta=1e6, rope_type="default"),
        mlp_layer_types=["dense"] + ["sparse"] * (layers - 1),
        moe_intermediate_size=24,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1 if glm else 2,
        topk_group=1,
        index_topk=9,
        index_n_heads=16,
        index_head_dim=24,
    )
    if glm:
        fields["indexer_types"] = ["full", "shared", "full", "shared"]
    else:
        yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
        fields["rope_parameters"] = yarn | dict(rope_theta=1e4, mscale=1.0, mscale_all_dim=1.0)
    return Variation(classes, fields, "bfloat16", 1, True, True, MODEL_TYPES[classes][0])


def small(weights: str) -> Variation:
    """The checkpoints of tests/data/tiny_checkpoints in FP8 and INT4.

    Blocks are incomplete at every edge, and heads end within blocks.
    """
    width = 136 if weights == "fp8" else 64
    fields: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=width,
        num_attention_heads=3,
        num_key_value_heads=3,
        num_hidden_layers=2,
        intermediate_size=width,
        q_lora_rank=32,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=80,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_theta=1e4, rope_type="default"),
        first_k_dense_replace=1,
        moe_intermediate_size=width,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    )
    model_type = "deepseek_v3" if weights == "fp8" else "kimi_k2"
    return Variation("DeepseekV3", fields, weights, 1, True, False, model_type)


def small_plain(classes: str) -> Variation:
    """The checkpoints of tests/data/tiny_checkpoints with only grouped-query attention."""
    fields: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_hidden_layers=3,
        intermediate_size=136,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=classes == "Llama",
        rope_parameters=dict(rope_theta=1e6, rope_type="default"),
    )
    if classes == "Llama":  # a head dim of 16, so that all three kinds of frequencies occur
        fields["rope_parameters"] = LLAMA3 | dict(rope_theta=1e4)
    elif classes == "Mistral":  # a window shorter than the prompt
        fields |= dict(sliding_window=11, head_dim=32)
    elif classes == "Qwen2":  # the last two layers have a window
        fields |= dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)
        fields["rope_parameters"] = dict(rope_type="linear", factor=4.0, rope_theta=1e4)
    elif classes == "Qwen3Moe":
        fields |= dict(head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
                       norm_topk_prob=True, mlp_only_layers=[1], attention_bias=True,
                       use_sliding_window=True, sliding_window=13)  # fmt: skip
    elif classes == "Glm4Moe":
        fields |= dict(head_dim=32, n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=1,
                       moe_intermediate_size=32, n_group=2, topk_group=1, attention_bias=True,
                       use_qk_norm=True, routed_scaling_factor=1.5)  # fmt: skip
        fields["rope_parameters"] |= dict(partial_rotary_factor=0.5)
    elif classes == "SmolLM3":  # layer 1 has no rotation
        fields |= dict(no_rope_layers=[1, 0, 1], hidden_size=80, num_attention_heads=5,
                       num_key_value_heads=1, pad_token_id=None,
                       attention_bias=True)  # fmt: skip
    elif classes == "Olmo3":
        yarn = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16,
                    attention_factor=1.2, rope_theta=1e4)  # fmt: skip
        fields |= dict(layer_types=[WINDOW, FULL, WINDOW], sliding_window=9,
                       num_key_value_heads=3)  # fmt: skip
        fields["rope_parameters"] = {WINDOW: dict(rope_type="default", rope_theta=1e4), FULL: yarn}
    elif classes == "Ministral3":  # the prompt is longer than two contexts
        fields |= dict(head_dim=32, rope_parameters=GROWING)
    elif classes == "MiniMaxM2":
        fields |= dict(head_dim=32, num_local_experts=7, num_experts_per_tok=3,
                       intermediate_size=40)  # fmt: skip
        fields["rope_parameters"] |= dict(partial_rotary_factor=0.5)
    elif classes == "GptOss":
        fields |= dict(head_dim=32, num_hidden_layers=4, layer_types=[WINDOW, FULL] * 2,
                       sliding_window=9, num_local_experts=6, num_experts_per_tok=3,
                       swiglu_limit=0.7, intermediate_size=64)  # fmt: skip
        fields["rope_parameters"] = UNTRUNCATED
    glm, weights = classes == "Glm4Moe", "mxfp4" if classes == "GptOss" else "bfloat16"
    return Variation(classes, fields, weights, 1, glm, glm, MODEL_TYPES[classes][0])


def small_hybrid(classes: str) -> Variation:
    """The checkpoints of tests/data/tiny_checkpoints with Kimi Delta Attention.

    The fields have the names of transformers, which supports both families since 5.23.
    """
    fields: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts_per_tok=2,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
    )
    if classes == "KimiLinear":
        fields |= dict(
            num_hidden_layers=6,
            num_local_experts=4,
            linear_num_heads=3,
            linear_head_dim=16,
            layer_types=[KINDS[layer in (3, 5)] for layer in range(6)],
            bos_token_id=1,
        )
    else:  # first_k_dense_replace has a larger default, which mlp_layer_types overrides
        fields |= dict(num_hidden_layers=4, num_local_experts=8, n_group=4, topk_group=2,
                       head_dim=16, layer_group_size=2, num_mtp_layers=0,
                       mlp_layer_types=["dense", *["sparse"] * 3])  # fmt: skip
    return Variation(classes, fields, "bfloat16", 1, False, False, MODEL_TYPES[classes][0])


def _plain(pick: random.Random, classes: str) -> Variation:
    keys, each = pick.choice([1, 2, 3]), pick.choice([1, 2, 4])
    fields: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=pick.choice([96, 192]),
        num_attention_heads=keys * each,
        num_key_value_heads=keys,
        num_hidden_layers=pick.choice([2, 3, 4]),
        intermediate_size=pick.choice([160, 224]),
        max_position_embeddings=4096,
        rms_norm_eps=pick.choice([1e-5, 1e-6]),
        tie_word_embeddings=pick.random() < 0.4,
        rope_parameters=_rope(pick, classes),
    )
    if classes in ("Qwen3Moe", "Mistral") or (classes == "Llama" and pick.random() < 0.5):
        fields["head_dim"] = pick.choice([32, 64, 128])
    if classes == "Mistral":
        fields["sliding_window"] = pick.choice([None, 7])
    if classes == "Qwen3Moe":
        fields |= dict(
            num_experts=pick.choice([4, 8, 32]),
            num_experts_per_tok=pick.choice([1, 3]),
            moe_intermediate_size=pick.choice([32, 128]),
            norm_topk_prob=pick.random() < 0.7,
            decoder_sparse_step=pick.choice([1, 1, 2]),
            mlp_only_layers=pick.choice([[], [0]]),
        )
    if classes == "Glm4Moe":
        fields |= _experts(pick, classes, fields["num_hidden_layers"])
        fields |= dict(head_dim=pick.choice([32, 128]), attention_bias=pick.random() < 0.5,
                       use_qk_norm=pick.random() < 0.5)  # fmt: skip
        fields["rope_parameters"] |= dict(partial_rotary_factor=pick.choice([0.5, 0.25]))
    fields |= _of_layers(pick, classes, fields)
    quantized = pick.random() < (0.6 if classes == "GptOss" else 0.3)
    small = "mxfp4" if classes == "GptOss" else "fp8"
    return Variation(
        classes=classes,
        fields=fields,
        weights=small if quantized else "bfloat16",
        shards=pick.choice([1, 1, 2, 5]),
        published=pick.random() < 0.5,
        prediction=classes == "Glm4Moe" and pick.random() < 0.5,
        model_type=MODEL_TYPES[classes][0],
    )


def _of_layers(pick: random.Random, classes: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of families whose layers differ from each other, or from Llama's."""
    layers = fields["num_hidden_layers"]
    kinds = [pick.choice([WINDOW, FULL]) for _ in range(layers)]
    if classes == "SmolLM3":
        rotates = pick.choice([None, [pick.choice([0, 1]) for _ in range(layers)]])
        windows = pick.random() < 0.5
        return dict(no_rope_layers=rotates, no_rope_layer_interval=pick.choice([2, 4]),
                    pad_token_id=None,
                    use_sliding_window=windows, sliding_window=7 if windows else None)  # fmt: skip
    if classes == "Olmo3":
        rope = {k: v for k, v in fields["rope_parameters"].items() if not k.startswith("mscale")}
        plain = dict(rope_type="default", rope_theta=rope["rope_theta"])
        return dict(layer_types=kinds, sliding_window=pick.choice([5, 64]),
                    rope_parameters={WINDOW: plain, FULL: rope})  # fmt: skip
    if classes == "Ministral3":
        beta = pick.choice([0.1, 0.5])
        return dict(head_dim=pick.choice([32, 128]), sliding_window=pick.choice([None, 7]),
                    rope_parameters=GROWING | dict(llama_4_scaling_beta=beta))  # fmt: skip
    if classes == "MiniMaxM2":
        part = pick.choice([0.5, 0.25, 1.0])
        rope = fields["rope_parameters"] | dict(partial_rotary_factor=part)
        return _routed(pick) | dict(head_dim=pick.choice([32, 64]), rope_parameters=rope)
    if classes == "GptOss":
        return _routed(pick) | dict(
            head_dim=pick.choice([32, 64]),
            layer_types=kinds,
            sliding_window=pick.choice([5, 64]),
            rope_parameters=UNTRUNCATED,
            attention_bias=pick.random() < 0.7,
        )
    return {}


def _routed(pick: random.Random) -> dict[str, Any]:
    return dict(
        num_local_experts=pick.choice([4, 9, 32]),
        num_experts_per_tok=pick.choice([1, 3]),
        intermediate_size=pick.choice([32, 96]),
    )


WINDOW, FULL = "sliding_attention", "full_attention"
GROWING = dict(
    rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=10,
    beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3,
)  # fmt: skip
UNTRUNCATED = dict(
    rope_type="yarn", rope_theta=15e4, factor=32.0, original_max_position_embeddings=16,
    beta_fast=32.0, beta_slow=1.0, truncate=False,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip


def _qwen(pick: random.Random, classes: str) -> Variation:
    keys, each, dim = pick.choice([1, 2, 3]), pick.choice([1, 2, 3]), pick.choice([32, 64, 128])
    fields: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=pick.choice([96, 192]),
        num_attention_heads=keys * each,
        num_key_value_heads=keys,
        head_dim=dim,
        num_hidden_layers=pick.choice([2, 3]),
        intermediate_size=pick.choice([160, 224]),
        max_position_embeddings=4096,
        rms_norm_eps=pick.choice([1e-5, 1e-6]),
        tie_word_embeddings=pick.random() < 0.4,
    )
    if classes == "Qwen3":
        rope = {k: v for k, v in _rope(pick, classes).items() if not k.startswith("mscale")}
        fields["rope_parameters"] = rope
    else:
        fields |= _delta(pick, classes)
    routed = classes in ("Qwen3Next", "Qwen3_5Moe")
    if routed:
        width = pick.choice([32, 128])
        fields |= dict(
            num_experts=pick.choice([4, 8, 32]),
            num_experts_per_tok=pick.choice([1, 3]),
            moe_intermediate_size=width,
            shared_expert_intermediate_size=pick.choice([width, 2 * width, 48]),
        )
    return Variation(
        classes=classes,
        fields=fields,
        weights="fp8" if routed and pick.random() < 0.5 else "bfloat16",
        shards=pick.choice([1, 1, 2, 5]),
        published=pick.random() < 0.5,
        prediction=classes != "Qwen3" and pick.random() < 0.5,
        model_type=MODEL_TYPES[classes][0],
    )


def _delta(pick: random.Random, classes: str) -> dict[str, Any]:
    """Gated delta nets between attention layers, of whose head dims a quarter is rotated."""
    # With a single head, whose output is nearly 0 at times, the norm turns 2e-7 in the embedding
    # into 1e-4 in the logits.
    keys, every = pick.choice([2, 3, 4]), pick.choice([2, 4])
    layers = pick.choice([every, every + 1, 2 * every])
    rope = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)
    return dict(
        num_hidden_layers=layers,
        layer_types=[KINDS[(layer + 1) % every == 0] for layer in range(layers)],
        linear_num_key_heads=keys,
        linear_num_value_heads=keys * pick.choice([1, 2]),
        linear_key_head_dim=pick.choice([32, 128]),
        linear_value_head_dim=pick.choice([32, 128]),
        rope_parameters=rope,
    )


KINDS = ("linear_attention", "full_attention")


def small_qwen(classes: str) -> Variation:
    """The checkpoints of tests/data/tiny_checkpoints of Qwen models.

    One is in FP8 with incomplete blocks at every edge, and one has fused experts and a vision
    tower.
    """
    fp8 = classes == "Qwen3Next"
    fields: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=136 if fp8 else 64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=2 if fp8 else 4,
        layer_types=[KINDS[layer % 2] for layer in range(2 if fp8 else 4)],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=40 if fp8 else 32,
        shared_expert_intermediate_size=40 if fp8 else 32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    weights = "fp8" if fp8 else "bfloat16"
    return Variation(classes, fields, weights, 1, True, True, MODEL_TYPES[classes][0])


def whole_blocks(classes: str) -> Variation:
    """An FP8 checkpoint in which the matrices outside the experts have shapes that stay FP8."""
    fields: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=3,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    if classes == "DeepseekV3":
        fields |= dict(
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=512,
            q_lora_rank=128,
            kv_lora_rank=128,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=128,
            rope_parameters=dict(rope_theta=1e4, rope_type="default"),
            first_k_dense_replace=1,
            moe_intermediate_size=128,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
        )
    else:
        rope = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)
        fields |= dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,
            layer_types=[KINDS[layer % 2] for layer in range(3)],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            rope_parameters=rope,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=384,
            # Of another width than the experts, so that the shared ones are a separate MLP.
            shared_expert_intermediate_size=256,
        )
    return Variation(classes, fields, "fp8", 2, True, False, MODEL_TYPES[classes][0])


MODEL_TYPES = {
    "DeepseekV32": ["deepseek_v32"],
    "GlmMoeDsa": ["glm_moe_dsa"],
    "KimiLinear": ["kimi_linear"],
    "BailingHybrid": ["bailing_hybrid"],
    "Llama": ["llama"],
    "Mistral": ["mistral"],
    "Qwen2": ["qwen2"],
    "Qwen3Moe": ["qwen3_moe"],
    "Glm4Moe": ["glm4_moe"],
    "SmolLM3": ["smollm3"],
    "Olmo3": ["olmo3"],
    "Ministral3": ["ministral3"],
    "MiniMaxM2": ["minimax_m2"],
    "GptOss": ["gpt_oss"],
    "Qwen3": ["qwen3"],
    "Qwen3Next": ["qwen3_next"],
    "Qwen3_5": ["qwen3_5"],
    "Qwen3_5Moe": ["qwen3_5_moe"],
    "DeepseekV3": ["deepseek_v3", "kimi_k2"],
    "Glm4MoeLite": ["glm4_moe_lite"],
    "DeepseekV2": ["deepseek_v2"],
    "Youtu": ["youtu", "youtu_llm"],
}


def _rope(pick: random.Random, classes: str) -> dict[str, Any]:
    rope: dict[str, Any] = dict(rope_theta=pick.choice([1e4, 5e4, 1.6e6]))
    if pick.random() < 0.4:
        return rope | dict(rope_type="default")
    # Fewer tokens than PROMPT, so that the test uses the stretched part.
    if classes in PLAIN and pick.random() < 0.5:
        return rope | LLAMA3
    rope |= dict(rope_type="yarn", factor=pick.choice([4.0, 40.0]), beta_slow=1,
                 original_max_position_embeddings=16,
                 beta_fast=pick.choice([1.0, 32.0]))  # fmt: skip
    both = pick.choice([None, (1.0, 1.0), (0.707, 0.707), (0.707, 1.0), (0.707, None), (None, 1.0)])
    found = dict(zip(("mscale", "mscale_all_dim"), both or (None, None), strict=True))
    return rope | {name: weight for name, weight in found.items() if weight is not None}


def _experts(pick: random.Random, classes: str, layers: int) -> dict[str, Any]:
    experts, groups = pick.choice([(6, 1), (6, 3), (8, 4), (12, 2), (20, 1), (20, 5), (16, 8)])
    kept = pick.randint(1, groups)
    dense = min(pick.choice([0, 1, 3]), layers)
    # V2 may choose experts with weight 0 from discarded groups, as transformers does. Here the
    # kept groups always have enough others.
    top_k = pick.randint(1, min(kept * experts // groups, 6))
    fields: dict[str, Any] = dict(
        moe_intermediate_size=pick.choice([32, 128, 160]),
        n_routed_experts=experts,
        n_shared_experts=pick.choice([1, 2]),
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=kept,
        routed_scaling_factor=pick.choice([1.0, 1.8, 2.5]),
        norm_topk_prob=classes != "DeepseekV2" and pick.random() < 0.6,
    )
    if classes == "DeepseekV2":
        fields["topk_method"] = pick.choice(["greedy", "group_limited_greedy"])
    if classes in ("Glm4MoeLite", *SPARSE):
        kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
        return fields | dict(mlp_layer_types=kinds)
    return fields | dict(first_k_dense_replace=dense)
