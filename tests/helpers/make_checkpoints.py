"""Writes random tiny checkpoints of all families, with transformers' results as a reference.

    python -m tests.helpers.make_checkpoints OUT --seeds 0-39

needs torch and transformers >= 5.17, with --small 5.24, and neither JAX nor this package. A seed
gives a folder:

    config.json         in the publishers' or in transformers' spelling
    *.safetensors       the published names; bfloat16, with FP8 blocks, or with INT4 experts
    reference.safetensors, by transformers, in float32 on the stored weights:
        prompt [2, T], lengths [2]      the second row is shorter and padded
        logits [2, T, V]                of one forward pass
        greedy [N], step_logits [N, V]  N tokens after row 0, decoded with a cache

The name of each tensor is the seed of its values, so that an unread norm, bias or gate shows.
"""

import argparse
import json
import os
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

from tests.helpers import qwen_checkpoints
from tests.helpers.checkpoint_variations import (
    PLAIN,
    QWEN,
    SPARSE,
    VOCAB,
    Variation,
    draw,
    small,
    small_hybrid,
    small_plain,
    small_qwen,
    small_sparse,
)
from tests.helpers.torch_float64 import in_float64
from tests.helpers.torch_formats import (
    FP8_BLOCK,
    INT4_GROUP,
    fp8_blocks,
    from_fp8,
    from_int4,
    from_mxfp4,
    int4_groups,
    mxfp4_groups,
)

Tensors = dict[str, torch.Tensor]

PROMPT, NEW = 26, 5
KEPT_FLOAT32 = "e_score_correction_bias"
NEVER_FP8 = ("mlp.gate.weight", *(f"{name}.weight" for name in qwen_checkpoints.NEVER_FP8))


# --- weights


def fill(name: str, tensor: torch.Tensor, tied: bool, hybrid: bool) -> torch.Tensor:
    """Values for a tensor, determined by its name; no tensor keeps an initial 0 or 1.

    Args:
        hybrid: Whether weights of norms are w of 1 + w.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    normal = torch.randn(tensor.shape, generator=generator)
    if name.endswith(KEPT_FLOAT32):
        return 0.05 * normal
    if qwen_checkpoints.is_one_plus(name, hybrid):
        return (0.2 * normal).bfloat16()
    if name.endswith(".bias"):
        return (0.3 * normal).bfloat16()
    if tensor.ndim == 1:
        return (1 + 0.2 * normal).bfloat16()
    spread = 1.0 if "embed_tokens" in name and not tied else tensor.shape[-1] ** -0.5
    return (spread * normal).bfloat16()


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


MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                               "model.embed_tokens", "lm_head"],
}  # fmt: skip
CONFIGS = {"fp8": FP8_CONFIG, "int4": INT4_CONFIG, "mxfp4": MXFP4_CONFIG}


def stored(weights: str, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """(the tensors of the files, the weights that they represent)."""
    files: Tensors = {}
    meant: Tensors = {}
    for name, tensor in tensors.items():
        matrix = tensor.ndim == 2 and ".layers." in name and not name.endswith(NEVER_FP8)
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
        elif weights == "mxfp4" and name.endswith((".gate_up_proj", ".down_proj")):
            files[f"{name}_blocks"], files[f"{name}_scales"] = parts = mxfp4_groups(tensor)
            meant[name] = from_mxfp4(*parts)
        else:
            files[name] = meant[name] = tensor
    return files, meant


def prediction_layer(tensors: Tensors, layers: int) -> Tensors:
    """A layer after the last one, with its own norms and copies, as publishers write it."""
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
    if variation.classes in QWEN:
        qwen_checkpoints.respell(variation, values)
    elif variation.published:
        rope = values.pop("rope_parameters")
        rope = rope.get("full_attention", rope)
        values["rope_theta"] = rope.pop("rope_theta")
        if part := rope.pop("partial_rotary_factor", None):
            values["partial_rotary_factor"] = part
        kind = rope.pop("rope_type")
        values["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
        if kinds := values.pop("mlp_layer_types", None):
            values["first_k_dense_replace"] = kinds.count("dense")
    if variation.prediction and variation.classes not in QWEN:
        values["num_nextn_predict_layers"] = 1
    if variation.weights != "bfloat16":
        values["quantization_config"] = CONFIGS[variation.weights]
    nested = variation.published and variation.classes in qwen_checkpoints.NESTED
    return qwen_checkpoints.nested(variation, values) if nested else values


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


def write(variation: Variation, folder: Path, *, exact: bool = True) -> None:
    """Writes the folder of a variation, replacing an existing one.

    Args:
        exact: Whether the reference also contains float64 logits.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = "Text" if variation.classes in qwen_checkpoints.NESTED else ""
    config = getattr(transformers, f"{variation.classes}{text}Config")(**variation.fields)
    config._attn_implementation = "eager"
    family = getattr(transformers, f"{variation.classes}ForCausalLM")
    with tempfile.TemporaryDirectory() as scratch:
        family(config).save_pretrained(scratch, save_original_format=True)
        file, tied = Path(scratch) / "model.safetensors", variation.fields["tie_word_embeddings"]
        hybrid = "linear_num_key_heads" in variation.fields
        loaded = load_file(file).items()
        tensors = {name: fill(name, tensor, tied, hybrid) for name, tensor in loaded}
        files, meant = stored(variation.weights, tensors)
        save_file({name: tensor.float() for name, tensor in meant.items()}, file, {"format": "pt"})
        model, info = family.from_pretrained(
            scratch, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    if variation.classes in QWEN:
        files = qwen_checkpoints.published(variation, files)
    elif variation.prediction:
        layers = variation.fields["num_hidden_layers"]
        files |= stored(variation.weights, prediction_layer(tensors, layers))[0]
    write_shards(folder, {n: t.clone().contiguous() for n, t in files.items()}, variation.shards)
    text = json.dumps(config_json(variation, config), indent=1)
    (folder / "config.json").write_text(text + "\n")
    found = reference(model.eval())
    if exact:
        wide = in_float64(model, reference)
        found |= {f"exact_{name}": wide[name].double() for name in ("logits", "step_logits")}
    save_file(found, folder / "reference.safetensors")


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
            write(variation, args.out / f"{variation.model_type}_{weights}", exact=False)
        for classes in ("Qwen3Next", "Qwen3_5Moe"):
            variation = small_qwen(classes)
            fp8 = "_fp8" if variation.weights == "fp8" else ""
            write(variation, args.out / f"{variation.model_type}{fp8}", exact=False)
        made = [*map(small_plain, PLAIN), *map(small_hybrid, ("KimiLinear", "BailingHybrid"))]
        made += map(small_sparse, SPARSE)
        for variation in made:
            write(variation, args.out / variation.model_type, exact=False)
        return
    first, last = map(int, args.seeds.split("-"))
    for seed in range(first, last + 1):
        variation = draw(seed)
        write(variation, args.out / f"{variation.model_type}_{seed:03d}")
        print(seed, variation, flush=True)


if __name__ == "__main__":
    main()
