"""Folders of the hub: files of either kind, blocks of any size, dtypes, spellings."""

import json
import math
import mmap
import os
import shutil
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxattn.core.numerics.rope import Llama3RopeScaling, RopeConfig, rotation, softmax_scale
from jaxattn.models import Hybrid, load
from jaxattn.models.checkpoint import CheckpointError, native_format
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.loading import huggingface_checkpoint, read_plan, weight_loader

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints"


@cache
def loaded(family: str, dtype: str):
    return huggingface_checkpoint.load(TINY / family, dtype=dtype)


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
    monkeypatch.setattr(read_plan, "BLOCK_BYTES", 5000)
    _, params = huggingface_checkpoint.load(
        folder, readers=3, on_progress=lambda *now: progress.append(now)
    )
    same(params, whole)
    assert progress[-1][0] == progress[-1][1] and len(progress) > 100
    assert progress == sorted(progress)


def test_the_host_holds_a_block_for_each_reader(folder, monkeypatch):
    mapped, given = [], []
    new = weight_loader.HostBufferPool.new

    def counted(number, size, flags):
        mapped.append(size)
        return mmap.mmap(number, size, flags)

    def noted(buffers, nbytes):
        given.append(nbytes)
        return new(buffers, nbytes)

    monkeypatch.setattr(read_plan, "BLOCK_BYTES", 60_000)
    flags = {name: getattr(mmap, name) for name in ("MAP_PRIVATE", "MAP_ANONYMOUS")}
    monkeypatch.setattr(weight_loader, "mmap", SimpleNamespace(mmap=counted, **flags))
    monkeypatch.setattr(weight_loader.HostBufferPool, "new", noted)
    huggingface_checkpoint.load(folder, readers=3)
    largest_group = (128 + 128) * 512 * 2  # a head of kv_b_proj is not divided
    assert max(mapped) == max(given) <= largest_group and len(given) > 20
    assert len(mapped) <= 3 + 1  # on the CPU the array that is being placed is a buffer too


def test_a_buffer_is_used_again_when_no_array_refers_to_it():
    buffers = weight_loader.HostBufferPool(64)
    buffer = buffers.new(64)
    buffer[:] = 7
    kept = buffer[8:16].view(np.uint16).reshape(2, 2)
    del buffer
    second = buffers.new(48)
    second[:] = 9
    assert (kept == 7 * 257).all()
    del kept
    third = buffers.new(64)
    assert third[0] == 7  # the first one's memory
    assert (second == 9).all()


def test_what_on_progress_raises_ends_the_loading(folder, monkeypatch):
    class Stop(Exception):
        pass

    def stop(done, total):
        raise Stop

    monkeypatch.setattr(read_plan, "BLOCK_BYTES", 5000)
    before = threading.active_count()
    with pytest.raises(Stop):
        huggingface_checkpoint.load(folder, on_progress=stop)
    assert threading.active_count() == before


def test_a_file_that_is_cut_off_after_its_header_was_read(folder):
    published = huggingface_checkpoint.read_config(folder)
    weights, scales = huggingface_checkpoint.open_weights(folder, published)
    os.truncate(folder / "model.safetensors", 100_000)
    with pytest.raises(CheckpointError, match="model.safetensors became shorter while it was read"):
        huggingface_checkpoint.place(published.model, weights, scales)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_the_device_is_that_of_the_caller(folder):
    devices = jax.devices()
    with jax.default_device(devices[-1]):
        _, params = huggingface_checkpoint.load(folder)
    assert {leaf.device for leaf in jax.tree.leaves(params)} == {devices[-1]}


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
    rope = ConfigFields(values, "config.json").rope(64)
    assert (rope.dim, rope.theta, rope.interleaved) == (64, 5e4, True)
    assert (rope.yarn.factor, rope.yarn.mscale_all_dim, rope.yarn.beta_fast) == (4, 1, 32)
    with pytest.raises(ConfigError, match="factor is missing"):
        ConfigFields({"rope_scaling": {"type": "yarn"}}, "config.json").rope(64)


def yarn_of(**fields):
    scaling = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, **fields}
    return ConfigFields({"rope_theta": 5e4, "rope_scaling": scaling}, "config.json").rope(64)


BOTH = {"mscale": 0.5, "mscale_all_dim": 0.7}
GROWN = 0.1 * math.log(4) + 1  # transformers' length without attention_factor


@pytest.mark.parametrize(
    "fields, length, softmax",
    [
        ({}, GROWN, 1),
        ({"mscale": 0.7}, GROWN, 1),  # counts beside mscale_all_dim alone
        ({"mscale_all_dim": 0.7}, GROWN, (0.07 * math.log(4) + 1) ** 2),
        (BOTH, (0.05 * math.log(4) + 1) / (0.07 * math.log(4) + 1), (0.07 * math.log(4) + 1) ** 2),
        ({"mscale": 0, "mscale_all_dim": 0}, GROWN, 1),
        ({"attention_factor": 1.0}, 1, 1),
        ({"attention_factor": GROWN, "mscale": None}, GROWN, 1),
        ({"attention_factor": 1.25, "mscale": 0.3, "mscale_all_dim": 1.0}, 1.25, GROWN**2),
        ({"attention_factor": None, "truncate": True}, GROWN, 1),
    ],
)  # fmt: skip
def test_yarn_grows_queries_and_scores_as_in_transformers(fields, length, softmax):
    """`_compute_yarn_parameters` and `yarn_apply_mscale` of transformers 5.24."""
    config = yarn_of(**fields)
    cosines = np.asarray(rotation(jnp.zeros(1, jnp.int32), config).angles)[0, :64]
    np.testing.assert_allclose(cosines, length, rtol=1e-6)
    assert softmax_scale(192, config) == pytest.approx(192**-0.5 * softmax, rel=1e-12)


def test_an_attention_factor_that_means_what_is_computed_changes_nothing():
    assert yarn_of(attention_factor=GROWN) == yarn_of() == yarn_of(truncate=True)
    length = (0.05 * math.log(4) + 1) / (0.07 * math.log(4) + 1)
    assert yarn_of(**BOTH, attention_factor=length) == yarn_of(**BOTH)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"attention_factor": 0.5}, "attention_factor must be the result of an mscale"),
        ({"attention_factor": 1e9}, "attention_factor must be the result of an mscale"),
        ({"attention_factor": -1.0}, "attention_factor must be a finite number above 0"),
        (
            {"attention_factor": 1.5, "factor": 1},
            "attention_factor must be the result of an mscale",
        ),
        ({"truncate": 1}, "truncate must be true or false; got 1"),
    ],
)
def test_what_yarn_cannot_mean_is_refused_by_name(fields, words):
    with pytest.raises(ConfigError, match=f"rope_scaling: {words}"):
        yarn_of(**fields)


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_the_scaling_of_llama3_is_read(name):
    values = {"rope_theta": 5e5, name: LLAMA3}
    rope = ConfigFields(values, "config.json").rope(128, interleaved=False)
    assert rope == RopeConfig(128, 5e5, False, llama3=Llama3RopeScaling(8, 1, 4, 8192))
    del values[name]["factor"]
    with pytest.raises(ConfigError, match="rope_scaling: field factor is missing"):
        ConfigFields(values, "config.json").rope(128)
    values[name]["factor"] = 8.0


def test_other_dtypes_of_the_file_are_converted_on_the_device(folder):
    wide = {name: tensor.astype(np.float32) for name, tensor in tensors_of(folder).items()}
    safetensors.numpy.save_file(wide, folder / "model.safetensors")
    model, params = huggingface_checkpoint.load(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    same(params, loaded("youtu", "bfloat16")[1])
    assert model.vocab_size == 512


def test_one_call_reads_folders_of_either_format(tmp_path):
    model, params = load(TINY / "youtu")
    assert model == loaded("youtu", "bfloat16")[0]
    same(params, loaded("youtu", "bfloat16")[1])
    config, own = native_format.load(native_format.EMBEDDED)
    model, params = load(native_format.EMBEDDED)
    assert model == Hybrid(config)
    same(params, own)
    with pytest.raises(ValueError, match="dtype='float32' is only for folders from the hub"):
        load(native_format.EMBEDDED, dtype="float32")
    with pytest.raises(CheckpointError, match="config.json is missing"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="folder 'org/name' does not exist; download a model"):
        load("org/name")
