"""Damaged folders: each is refused by name, and nothing is allocated."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxattn.models.checkpoint import CheckpointError
from jaxattn.models.loading import huggingface_checkpoint

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints"
KV = "model.layers.0.self_attn.kv_b_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
SHARD = "model-0000{}-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(TINY / "youtu", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def shards(folder):
    """The folder in two shards."""
    tensors, index = tensors_of(folder), {}
    for number in (1, 2):
        part = {name: tensors[name] for name in sorted(tensors)[number - 1 :: 2]}
        safetensors.numpy.save_file(part, folder / SHARD.format(number))
        index |= dict.fromkeys(part, SHARD.format(number))
    (folder / "model.safetensors").unlink()
    write_index(folder, index)
    return folder


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "model.safetensors")


def write_index(folder: Path, weight_map: Any) -> None:
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def refused(folder: Path, message: str, **options: Any) -> None:
    before = len(jax.live_arrays())
    with pytest.raises(CheckpointError, match=message) as told:
        huggingface_checkpoint.load(folder, **options)
    assert len(jax.live_arrays()) <= before
    assert len(str(told.value)) < 1000


# --- tensors


def renamed(tensors: dict[str, np.ndarray]) -> None:
    tensors[KV.replace("kv_b", "kvb")] = tensors.pop(KV)


@pytest.mark.parametrize(
    "change, message",
    [
        (renamed, f"missing '{KV}'; unknown '.*kvb_proj.weight'"),
        (lambda t: t.pop(KV), f"missing '{KV}'$"),
        (lambda t: t.update({"more": t[KV]}), "unknown 'more'$"),
        (
            lambda t: t.update({DOWN: t[DOWN].T.copy()}),
            r"'.*mlp.down_proj.weight' bfloat16\[192, 128\], expected a float\[128, 192\]",
        ),
        (
            lambda t: t.update({KV: t[KV].astype(np.int8)}),
            r"kv_b_proj.weight' int8\[512, 512\], expected a float\[512, 512\]",
        ),
        (lambda t: t.update({KV: t[KV].astype(np.float64)}), "kv_b_proj.weight' float64"),
        (
            lambda t: t.update({KV: t[KV].astype(np.uint16)}),
            "contains '.*kv_b_proj.weight' of 'U16'",
        ),
    ],
    ids=["renamed", "missing", "unknown", "shape", "int8", "float64", "uint16"],
)
def test_tensors_that_are_not_the_models(folder, change, message):
    tensors = tensors_of(folder)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    refused(folder, message)


def test_every_missing_tensor_is_counted(folder):
    safetensors.numpy.save_file({}, folder / "model.safetensors")
    refused(folder, "missing 'model.embed_tokens.weight', .* more")


def test_a_tensor_in_two_shards(shards):
    first, second = (shards / SHARD.format(number) for number in (1, 2))
    tensors = safetensors.numpy.load_file(first) | safetensors.numpy.load_file(second)
    safetensors.numpy.save_file(tensors, second)
    refused(shards, "is in two files, model-00001-of-00002.safetensors and model-00002")


@pytest.mark.parametrize("keep", [-100, 1000, 4, 0])
def test_a_truncated_shard(shards, keep):
    file = shards / SHARD.format(2)
    file.write_bytes(file.read_bytes()[:keep])
    refused(shards, "model-00002-of-00002.safetensors is cut off")


# --- files


@pytest.mark.parametrize(
    "name",
    ["../other.safetensors", "/etc/passwd", "model.bin", "..", "a/b.safetensors", "", 7, None],
)
def test_an_index_that_leaves_the_folder(shards, name):
    write_index(shards, {"model.norm.weight": name})
    refused(shards, "index.json names .*, which is not a .safetensors file")


@pytest.mark.parametrize("index", [[], {}, None, "model.safetensors"])
def test_an_index_without_tensors(shards, index):
    write_index(shards, index)
    refused(shards, "weight_map must be an object with tensors; got")


def test_a_missing_shard(shards):
    (shards / SHARD.format(1)).unlink()
    refused(shards, "names 'model-00001-of-00002.safetensors', which is missing")


def test_a_shard_that_is_a_folder_or_a_link_to_nothing(shards):
    file = shards / SHARD.format(1)
    file.unlink()
    file.mkdir()
    refused(shards, "which is missing")
    file.rmdir()
    file.symlink_to(shards / "blob")
    refused(shards, "which is missing")


def test_a_name_that_no_file_can_have(shards):
    write_index(shards, {"model.norm.weight": "m" * 5000 + ".safetensors"})
    refused(shards, "which is missing")


def test_links_of_the_hubs_cache_are_read(shards):
    for number in (1, 2):
        file, blob = shards / SHARD.format(number), shards.parent / f"blob{number}"
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, shards))
    huggingface_checkpoint.load(shards)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_named_and_never_read(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    refused(folder, f"neither model.safetensors nor .*; pickle files are not loaded, .*: '{name}'$")


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "has neither model.safetensors nor model.safetensors.index.json$")


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "config.json is missing"),
        (b"", "config.json: Expecting value"),
        (b"[1]", r"config.json: it is not a JSON object but \[1\]"),
        (b"{", "config.json: Expecting"),
        (b"\xff{}", "config.json: 'utf-8' codec"),
        (b"[" * 100_000, "config.json: it is nested too deeply"),
        (b'{"model_type": "youtu", "model_type": "youtu"}', "it contains 'model_type' twice"),
        (b" " * (2**20 + 1), "config.json has 1,048,577 bytes, but at most 1,048,576 are"),
    ],
    ids=["missing", "empty", "list", "brace", "utf8", "nested", "twice", "huge"],
)
def test_a_configuration_that_is_no_json_object(folder, text, message):
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_bytes(text)
    refused(folder, message)


# --- configurations: refused before a header is read


def configured(tmp_path: Path, family: str, change: dict[str, Any]) -> Path:
    """A folder with a changed configuration and no tensors."""
    values = json.loads((TINY / family / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"model_type": "gemma2"},
            "model_type 'gemma2' is not supported; supported are bailing_hybrid, .*, youtu_llm",
        ),
        ({"model_type": None}, "model_type None is not supported"),
        ({"model_type": ["youtu"]}, r"model_type \['youtu'\] is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act must be .*silu.* to be supported; got 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be .*alse to be supported"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be an integer from 1"),
        ({"num_hidden_layers": 10**6}, "from 1 to 1,024 layers"),
        ({"hidden_size": 128.0}, "hidden_size must be an integer .* got 128.0"),
        ({"vocab_size": True}, "vocab_size must be an integer .* got True"),
        ({"vocab_size": -1}, "vocab_size must be an integer from 1"),
        ({"q_lora_rank": "96"}, "q_lora_rank must be an integer"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false; got 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number above 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a finite number above 0"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2}},
            "must be 'yarn', 'llama3', 'linear' or 'dynamic' to be supported; got 'longrope'",
        ),
        ({"rope_scaling": [1]}, "rope_scaling must be an object or null"),
        ({"rope_theta": 0}, "rope_theta must be a finite number above 0"),
        ({"rope_theta": 10**400}, "rope_theta must be a finite number above 0"),
        ({"kv_lora_rank": None}, "kv_lora_rank must be an integer"),
    ],
)
def test_a_configuration_that_is_not_supported(tmp_path, change, message):
    refused(configured(tmp_path, "youtu", change), message)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scoring_func": "tanh"}, "scoring_func must be 'sigmoid' to be supported; got 'tanh'"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc' to be supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1 to be supported; got 2"),
        ({"n_routed_experts": 10**6}, "n_routed_experts must be an integer from 1 to 4,096"),
        ({"norm_topk_prob": None}, "norm_topk_prob must be true or false"),
        ({"num_experts_per_tok": 17}, "top_k=17 must be from 1 to"),
        ({"n_group": 5}, "experts=12 must be a multiple of groups=5"),
        ({"topk_group": 0}, "topk_group must be an integer from 1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer from 0"),
        (
            {"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "best"},
            "'greedy' or 'group_limited_greedy' to be supported; got 'best'",
        ),
        (
            {"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "greedy"},
            "norm_topk_prob must be False to be supported; got True",
        ),
    ],
)
def test_routing_that_is_not_supported(tmp_path, change, message):
    refused(configured(tmp_path, "deepseek_v3", change), message)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def int4(**change: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": GROUP | change}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": groups}  # fmt: skip


def scaled(**change: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"} | change
    return int4() | {
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }


@pytest.mark.parametrize(
    "quantization, message",
    [
        ({"quant_method": "nvfp4"}, "quant_method must be 'fp8' or 'compressed-tensors'"),
        ({}, "quant_method must be .* to be supported; got None"),
        ("fp8", "quantization_config must be an object or null; got 'fp8'"),
        (scaled(num_bits=4), "config_groups.group_0.weights: num_bits must be 8 to be supported"),
        (scaled(strategy="group"), "strategy must be 'channel' or 'tensor' or 'block'"),
        (scaled(strategy="block", block_structure=[64, 64]), r"block_structure .* \[128, 128\]"),
        (scaled() | {"format": "nvfp4-pack-quantized"}, "format must be .*; got 'nvfp4-"),
        (
            FP8 | {"weight_block_size": None, "activation_scheme": "none"},
            "activation_scheme must be 'dynamic' or 'static' to be supported",
        ),
        (FP8 | {"weight_block_size": [64, 128]}, r"to be supported; got \[64, 128\]"),
        (FP8 | {"fmt": "e5m2"}, "fmt must be 'e4m3' or .* to be supported; got 'e5m2'"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme must be 'dynamic'"),
        (int4() | {"format": "marlin-24"}, "format must be 'pack-quantized' or .* to be supported"),
        (int4() | {"config_groups": []}, r"config_groups must be an object; got \[\]"),
        (int4() | {"config_groups": {"g": {}}}, "config_groups.g.weights must be an object"),
        (int4(num_bits=8), "config_groups.group_0.weights: num_bits must be 4 to be supported"),
        (int4(group_size=64), "group_size must be 32 or 128 to be supported; got 64"),
        (int4(symmetric="no"), "symmetric must be true or false"),
        (int4(type="float"), "type must be 'int' to be supported; got 'float'"),
        (int4(actorder="group"), "actorder must be None or .* to be supported; got 'group'"),
    ],
)
def test_quantization_that_is_not_supported(tmp_path, quantization, message):
    change = {"quantization_config": quantization}
    refused(configured(tmp_path, "deepseek_v3", change), message)


def test_options_that_do_not_fit_the_folder(tmp_path):
    folder = configured(tmp_path, "deepseek_v3", {})
    refused(
        folder,
        "experts='fp8' needs a checkpoint in FP8 blocks; this one is in floats",
        experts="fp8",
    )
    refused(folder, "experts must be None, 'fp8', '4bit' or 'bfloat16'; got 'int4'", experts="int4")
    refused(folder, "dtype must be None, 'bfloat16' or 'float32'; got 'float16'", dtype="float16")
    with pytest.raises(ValueError, match="readers must be a positive integer, got 0"):
        huggingface_checkpoint.load(folder, readers=0)


def test_a_field_that_is_absent_is_not_null(folder):
    values = json.loads((folder / "config.json").read_text())
    del values["q_lora_rank"]
    (folder / "config.json").write_text(json.dumps(values))
    refused(folder, "field q_lora_rank is missing")
