"""Folders of the hub: what transformers computes from them, and what damage is named.

tests/data/tiny_checkpoints was written by transformers 5 with random weights, and holds its logits.
"""

import json
import os
import shutil
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxattn import Engine, Limits, Request
from jaxattn.models import (
    CacheSize,
    DecodeBatch,
    Hybrid,
    PrefillBatch,
    checkpoint,
    huggingface,
    load,
)
from jaxattn.models.base import init_state, scratch_spec
from jaxattn.models.blocks import MoE
from jaxattn.models.checkpoint import CheckpointError
from jaxattn.models.families.fields import ConfigError, Fields

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints"
# More of them, if they were made: a folder for each family.
MORE = os.environ.get("JAXATTN_TINY_CHECKPOINTS")
FOLDERS = {
    folder.name: folder
    for root in (TINY, *([Path(MORE)] if MORE else []))
    for folder in sorted(root.iterdir())
}
FAMILIES = sorted(FOLDERS)
families = pytest.mark.parametrize("family", FAMILIES)


@cache
def loaded(family: str, dtype: str):
    return huggingface.load(FOLDERS[family], dtype=dtype)


@cache
def reference(family: str) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(FOLDERS[family] / "reference.safetensors")


def relative(actual, expected) -> float:
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@families
def test_the_training_forward_gives_the_reference_logits(family):
    model, params = loaded(family, "float32")
    wanted = reference(family)
    logits = jax.jit(lambda tokens: model.bind(params)(tokens))(wanted["prompt"])
    for row, length in enumerate(wanted["lengths"]):
        np.testing.assert_allclose(
            logits[row, :length], wanted["logits"][row, :length], atol=1e-4, rtol=1e-4
        )


@families
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefill_in_chunks_and_decode_give_the_reference_logits(family, dtype):
    model, params = loaded(family, dtype)
    wanted = reference(family)
    prompt, greedy = wanted["prompt"][0], wanted["greedy"]
    state = init_state(model, CacheSize(pages=4, slots=2), scratch_spec(model, 1, max_pages=3))
    tables, slots = np.array([[2, 0, 3]], np.int32), np.array([1], np.int32)
    prefill, decode = jax.jit(model.prefill), jax.jit(model.decode)
    for begin, end in ((0, 41), (41, 70)):
        tokens = np.zeros((1, 41), np.int32)
        tokens[0, : end - begin] = prompt[begin:end]
        lens = np.array([end - begin], np.int32), np.array([end], np.int32)
        logits, state = prefill(params, state, PrefillBatch(tokens, *lens, tables, slots))
    found, expected = [logits[0]], [wanted["logits"][0, 69], *wanted["step_logits"]]
    for step, token in enumerate(greedy):
        batch = DecodeBatch(token[None, None], np.array([71 + step], np.int32), tables, slots)
        logits, state = decode(params, state, batch)
        found.append(logits[0])
    if dtype == "float32":
        np.testing.assert_allclose(np.stack(found), np.stack(expected), atol=1e-4, rtol=1e-4)
        return
    errors = np.array([relative(*pair) for pair in zip(found, expected, strict=True)])
    # A near-tie of the router may fall to another expert in bfloat16, in one of nine tokens here.
    routed = any(isinstance(block.feed_forward, MoE) for block in model.spec.blocks)
    assert (errors > 3e-2).sum() <= routed and errors.max() < 0.5


@families
def test_the_engine_writes_the_reference_tokens(family):
    model, params = loaded(family, "float32")
    wanted = reference(family)
    request = Request(wanted["prompt"][0], max_tokens=len(wanted["greedy"]))
    limits = Limits(batch=2, max_model_len=128, prefill_chunk=32)
    with Engine(model, params, limits) as engine:
        [done] = engine.generate([request])
    assert list(done.tokens) == wanted["greedy"].tolist()


# --- files


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
