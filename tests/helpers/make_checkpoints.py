"""Writes random tiny checkpoints of the families with MLA, and what transformers makes of them.

    python tests/helpers/make_checkpoints.py OUT --seeds 0-39

needs torch and transformers >= 5.17, and neither JAX nor this package. A seed gives a folder:

    config.json         as publishers spell it, or as transformers saves it
    *.safetensors       the published names; bfloat16, with FP8 blocks, or with INT4 experts
    reference.safetensors, by transformers, in float32 on the weights as they are stored:
        prompt [2, T], lengths [2]      the second row is shorter, its rest is padding
        logits [2, T, V]                of one forward
        greedy [N], step_logits [N, V]  N tokens after row 0, decoded with a cache

Every tensor is filled from a seed made of its name, so that an unread norm, bias or gate shows.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

VOCAB, PROMPT, NEW = 192, 26, 5
KEPT_FLOAT32 = "e_score_correction_bias"
FP8_BLOCK, INT4_GROUP = 128, 32


@dataclasses.dataclass(frozen=True)
class Variation:
    """One checkpoint.

    Attributes:
        classes: the prefix of transformers' classes.
        fields: of the configuration.
        weights: "bfloat16", "fp8" or "int4".
        shards: files.
        published: config.json is spelled as publishers do.
        prediction: a prediction layer (MTP) lies behind the last layer.
        model_type: what config.json calls it.
    """

    classes: str
    fields: dict[str, Any]
    weights: str
    shards: int
    published: bool
    prediction: bool
    model_type: str


def draw(seed: int) -> Variation:
    """The variation of a seed."""
    pick = random.Random(seed)
    classes = ("DeepseekV3", "Glm4MoeLite", "DeepseekV2", "Youtu")[seed % 4]
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
    return Variation(
        classes=classes,
        fields=fields,
        weights=weights,
        shards=pick.choice([1, 1, 2, 5]),
        published=pick.random() < 0.5,
        prediction=classes in ("DeepseekV3", "Glm4MoeLite") and pick.random() < 0.5,
        model_type=pick.choice(MODEL_TYPES[classes]),
    )


def small(weights: str) -> Variation:
    """The checkpoints of tests/data/tiny_checkpoints in FP8 and INT4: blocks are cut at every edge,
    and heads end within blocks."""
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


MODEL_TYPES = {
    "DeepseekV3": ["deepseek_v3", "kimi_k2"],
    "Glm4MoeLite": ["glm4_moe_lite"],
    "DeepseekV2": ["deepseek_v2"],
    "Youtu": ["youtu", "youtu_llm"],
}


def _rope(pick: random.Random, classes: str) -> dict[str, Any]:
    rope: dict[str, Any] = dict(rope_theta=pick.choice([1e4, 5e4, 1.6e6]))
    if pick.random() < 0.4:
        return rope | dict(rope_type="default")
    # Fewer than PROMPT, so that the stretched part is used.
    rope |= dict(rope_type="yarn", factor=pick.choice([4.0, 40.0]), beta_slow=1,
                 original_max_position_embeddings=16,
                 beta_fast=pick.choice([1.0, 32.0]))  # fmt: skip
    both = pick.choice([None, (1.0, 1.0), (0.707, 0.707), (0.707, 1.0)])
    return rope | (dict(zip(("mscale", "mscale_all_dim"), both, strict=True)) if both else {})


def _experts(pick: random.Random, classes: str, layers: int) -> dict[str, Any]:
    experts, groups = pick.choice([(6, 1), (6, 3), (8, 4), (12, 2), (20, 1), (20, 5), (16, 8)])
    kept = pick.randint(1, groups)
    dense = min(pick.choice([0, 1, 3]), layers)
    # Of groups that are not kept V2 may choose experts with weight 0, as transformers does; here
    # there are always enough others.
    top_k = pick.randint(1, min(kept * experts // groups, 6))
    fields: dict[str, Any] = dict(
        moe_intermediate_size=pick.choice([32, 96, 160]),
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
    if classes == "Glm4MoeLite":
        kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
        return fields | dict(mlp_layer_types=kinds)
    return fields | dict(first_k_dense_replace=dense)


# --- weights


def fill(name: str, tensor: torch.Tensor, tied: bool) -> torch.Tensor:
    """Values for a tensor from its name: nothing keeps an initial 0 or 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    normal = torch.randn(tensor.shape, generator=generator)
    if name.endswith(KEPT_FLOAT32):
        return 0.05 * normal
    if tensor.ndim == 1:
        return (1 + 0.2 * normal).bfloat16()
    spread = 1.0 if "embed_tokens" in name and not tied else tensor.shape[-1] ** -0.5
    return (spread * normal).bfloat16()


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [N, K], float32 [ceil(N / 128), ceil(K / 128)]), whose product is the weight."""
    sizes = [-(-size // FP8_BLOCK) for size in weight.shape]
    padded = torch.zeros(sizes[0] * FP8_BLOCK, sizes[1] * FP8_BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(sizes[0], FP8_BLOCK, sizes[1], FP8_BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    numbers = (blocks / scale[:, None, :, None]).view_as(padded)
    return numbers[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn), scale


def from_fp8(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return numbers.float() * wide[: numbers.shape[0], : numbers.shape[1]]


def int4_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int32 [N, K / 8], bfloat16 [N, K / 32]): nibble j of word w is column 8 w + j, plus 8."""
    groups = weight.float().reshape(len(weight), -1, INT4_GROUP)
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    numbers = (groups / scale.float()[..., None]).round().clamp(-8, 7).long() + 8
    nibbles = numbers.reshape(len(weight), -1, 8) << torch.arange(0, 32, 4)
    words = nibbles.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int(), scale


def from_int4(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    nibbles = (words.long()[..., None] >> torch.arange(0, 32, 4)) & 15
    groups = (nibbles - 8).reshape(len(words), -1, INT4_GROUP)
    return (groups * scale.float()[..., None]).reshape(len(words), -1)


FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}
INT4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                        "group_size": INT4_GROUP},
        }
    },
}  # fmt: skip


def stored(weights: str, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """(what the files hold, the weights that they mean)."""
    files: Tensors = {}
    meant: Tensors = {}
    for name, tensor in tensors.items():
        matrix = tensor.ndim == 2 and ".layers." in name and not name.endswith("mlp.gate.weight")
        stem = name.removesuffix("weight")
        if weights == "fp8" and matrix and "eh_proj" not in name and "head" not in name:
            files[name], scale = fp8_blocks(tensor.float())
            files[f"{name}_scale_inv"] = scale
            meant[name] = from_fp8(files[name], scale)
        elif weights == "int4" and ".experts." in name:
            packed, scale = int4_groups(tensor)
            shape = torch.tensor(tensor.shape, dtype=torch.int32)
            files |= {f"{stem}weight_packed": packed, f"{stem}weight_scale": scale,
                      f"{stem}weight_shape": shape}  # fmt: skip
            meant[name] = from_int4(packed, scale)
        else:
            files[name] = meant[name] = tensor
    return files, meant


def prediction_layer(tensors: Tensors, layers: int) -> Tensors:
    """A layer behind the last one, with its own norms and copies, as publishers write it."""
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    made = {new + n.removeprefix(last): t for n, t in tensors.items() if n.startswith(last)}
    embedding = tensors["model.embed_tokens.weight"]
    hidden = embedding.shape[1]
    for leaf in ("enorm", "hnorm", "shared_head.norm"):
        made[f"{new}{leaf}.weight"] = torch.ones(hidden).bfloat16()
    made[f"{new}eh_proj.weight"] = torch.ones(hidden, 2 * hidden).bfloat16()
    return made | {
        f"{new}embed_tokens.weight": embedding,
        f"{new}shared_head.head.weight": embedding,
    }


# --- a folder


def config_json(variation: Variation, config: Any) -> dict[str, Any]:
    values = json.loads(config.to_json_string(use_diff=False))
    values["model_type"] = variation.model_type
    if variation.published:
        rope = values.pop("rope_parameters")
        values["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        values["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
        if kinds := values.pop("mlp_layer_types", None):
            values["first_k_dense_replace"] = kinds.count("dense")
    if variation.prediction:
        values["num_nextn_predict_layers"] = 1
    if variation.weights != "bfloat16":
        fp8 = variation.weights == "fp8"
        values["quantization_config"] = FP8_CONFIG if fp8 else INT4_CONFIG
    return values


def write_shards(folder: Path, tensors: Tensors, shards: int) -> None:
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    text = json.dumps({"weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)


def reference(model: Any) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, VOCAB, (2, PROMPT), generator=generator)
    lengths = [PROMPT, PROMPT - 9]
    logits = torch.zeros(2, PROMPT, VOCAB)
    with torch.no_grad():
        for row, length in enumerate(lengths):
            logits[row, :length] = model(prompt[row : row + 1, :length]).logits[0]
        out = model(prompt[:1], use_cache=True)
        steps, greedy = [], []
        for _ in range(NEW):
            greedy.append(out.logits[:, -1].argmax(-1, keepdim=True))
            out = model(greedy[-1], past_key_values=out.past_key_values, use_cache=True)
            steps.append(out.logits[0, -1])
    return dict(
        prompt=prompt.int(),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        logits=logits,
        greedy=torch.cat(greedy)[:, 0].int(),
        step_logits=torch.stack(steps),
    )


def write(variation: Variation, folder: Path) -> None:
    """Writes the folder of a variation; one that is there is written anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = getattr(transformers, f"{variation.classes}Config")(**variation.fields)
    config._attn_implementation = "eager"
    family = getattr(transformers, f"{variation.classes}ForCausalLM")
    with tempfile.TemporaryDirectory() as scratch:
        family(config).save_pretrained(scratch, save_original_format=True)
        file, tied = Path(scratch) / "model.safetensors", variation.fields["tie_word_embeddings"]
        tensors = {name: fill(name, tensor, tied) for name, tensor in load_file(file).items()}
        files, meant = stored(variation.weights, tensors)
        save_file({name: tensor.float() for name, tensor in meant.items()}, file, {"format": "pt"})
        model, info = family.from_pretrained(
            scratch, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    if variation.prediction:
        layers = variation.fields["num_hidden_layers"]
        files |= stored(variation.weights, prediction_layer(tensors, layers))[0]
    write_shards(folder, {n: t.clone().contiguous() for n, t in files.items()}, variation.shards)
    text = json.dumps(config_json(variation, config), indent=1)
    (folder / "config.json").write_text(text + "\n")
    save_file(reference(model.eval()), folder / "reference.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0-3", help="first and last seed; default: 0-3")
    parser.add_argument("--small", action="store_true", help="those of tests/data, and no seeds")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if args.small:
        for weights in ("fp8", "int4"):
            variation = small(weights)
            write(variation, args.out / f"{variation.model_type}_{weights}")
        return
    first, last = map(int, args.seeds.split("-"))
    for seed in range(first, last + 1):
        variation = draw(seed)
        write(variation, args.out / f"{variation.model_type}_{seed:03d}")
        print(seed, variation, flush=True)


if __name__ == "__main__":
    main()
