"""Folders of the hub: what is read, and what damage is named before anything is allocated."""

import json
import shutil
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxattn.models import Hybrid, checkpoint, huggingface, load
from jaxattn.models.checkpoint import CheckpointError
from jaxattn.models.families.fields import ConfigError, Fields

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints"


@cache
def loaded(family: str, dtype: str):
    return huggingface.load(TINY / family, dtype=dtype)


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(TINY / "youtu", tmp_path / "model")
    return tmp_path / "model"


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "model.safetensors")


def shard(folder: Path, count: int) -> None:
    """Writes the folder's tensors as shards with an index, every `count`th into one."""
    tensors, index = tensors_of(folder), {}
    names = sorted(tensors)
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::count]}
        safetensors.numpy.save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def same(one, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_shards_and_small_blocks_give_the_same_parameters(folder, monkeypatch):
    _, whole = loaded("youtu", "bfloat16")
    shard(folder, 3)
    progress = []
    monkeypatch.setattr(huggingface, "BLOCK_BYTES", 5000)
    _, params = huggingface.load(folder, readers=3, on_progress=lambda *now: progress.append(now))
    same(params, whole)
    assert progress[-1][0] == progress[-1][1] and len(progress) > 200
    assert progress == sorted(progress)


def test_the_host_holds_a_few_blocks_at_a_time(folder, monkeypatch):
    held, most = set(), []
    real = huggingface._read

    def counted(each, values, begin, end):
        block = real(each, values, begin, end)
        held.add(begin)
        most.append(block.rows.nbytes)
        return block

    monkeypatch.setattr(huggingface, "BLOCK_BYTES", 60_000)
    monkeypatch.setattr(huggingface, "_read", counted)
    huggingface.load(folder)
    largest_group = (128 + 128) * 512 * 2  # a head of kv_b_proj is not divided
    assert max(most) <= largest_group and len(most) > 20


def damage(folder: Path, change) -> None:
    tensors = tensors_of(folder)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


KV = "model.layers.1.self_attn.kv_b_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(KV), f"missing '{KV}'"),
        (lambda t: t.update({"more": t[KV]}), "unknown 'more'"),
        (
            lambda t: t.update({DOWN: t[DOWN].T.copy()}),
            r"'.*mlp.down_proj.weight' bfloat16\[192, 128\], expected a float\[128, 192\]",
        ),
        (lambda t: t.update({KV: t[KV].astype(np.int8)}), "holds .* of I8"),
        (
            lambda t: (t.pop(KV), t.update({"more": np.zeros(2, np.float32)})),
            f"missing '{KV}'; unknown 'more'",
        ),
    ],
    ids=["missing", "unknown", "shape", "dtype", "both"],
)
def test_tensors_that_differ_are_named_all_at_once(folder, change, message):
    damage(folder, change)
    before = len(jax.live_arrays())
    with pytest.raises(CheckpointError, match=message):
        huggingface.load(folder)
    assert len(jax.live_arrays()) <= before


def test_a_truncated_shard_is_named(folder):
    shard(folder, 2)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors is cut off within"):
        huggingface.load(folder)


def test_a_tensor_in_two_shards_is_named(folder):
    shard(folder, 2)
    first, second = (folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    tensors = safetensors.numpy.load_file(first) | safetensors.numpy.load_file(second)
    safetensors.numpy.save_file(tensors, second)
    with pytest.raises(CheckpointError, match="is in two files, model-00001"):
        huggingface.load(folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "model.bin", ".."])
def test_an_index_cannot_leave_the_folder(folder, name):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no shard of the folder"):
        huggingface.load(folder)


def test_a_missing_shard_is_named(folder):
    shard(folder, 2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match="model-00001-of-00002.safetensors', which is missing"
    ):
        huggingface.load(folder)


def test_a_pickle_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin can run code"):
        huggingface.load(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"model_type": "llama"},
            "model_type 'llama' is not supported; supported are .*, youtu",
        ),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is implemented as .*silu.* only; got 'gelu'"),
        ({"attention_bias": True}, "attention_bias is implemented as .*alse only"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be an integer from 1"),
        ({"num_hidden_layers": 10**6}, "from 1 to 1,024 layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "implemented as 'yarn' only"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object or null"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints of youtu"),
        ({"kv_lora_rank": None}, "kv_lora_rank must be an integer"),
    ],
)
def test_a_configuration_that_is_not_supported_is_named(folder, change, message):
    values = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        huggingface.load(folder)


def test_a_missing_field_is_named(folder):
    values = json.loads((folder / "config.json").read_text())
    del values["q_lora_rank"]  # absent is not null
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="field q_lora_rank is missing"):
        huggingface.load(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1.0,
            "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4, "mscale": 1.0,
            "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}},
    ],
    ids=["old", "new"],
)  # fmt: skip
def test_both_spellings_of_rope_are_read(values):
    rope = Fields(values, "config.json").rope(64)
    assert (rope.dim, rope.theta, rope.interleaved) == (64, 5e4, True)
    assert (rope.yarn.factor, rope.yarn.mscale_all_dim, rope.yarn.beta_fast) == (4, 1, 32)
    with pytest.raises(ConfigError, match="factor is missing"):
        Fields({"rope_scaling": {"type": "yarn"}}, "config.json").rope(64)


def test_other_dtypes_of_the_file_are_converted_on_the_device(folder):
    damage(folder, lambda t: t.update({n: x.astype(np.float32) for n, x in t.items()}))
    model, params = huggingface.load(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    same(params, loaded("youtu", "bfloat16")[1])
    assert model.vocab_size == 512


def test_one_call_reads_folders_of_either_format(tmp_path):
    model, params = load(TINY / "youtu")
    assert model == loaded("youtu", "bfloat16")[0]
    same(params, loaded("youtu", "bfloat16")[1])
    config, own = checkpoint.load(checkpoint.EMBEDDED)
    model, params = load(checkpoint.EMBEDDED)
    assert model == Hybrid(config)
    same(params, own)
    with pytest.raises(ValueError, match="dtype='float32' is for folders from the hub"):
        load(checkpoint.EMBEDDED, dtype="float32")
    with pytest.raises(CheckpointError, match="config.json is missing"):
        load(tmp_path)
