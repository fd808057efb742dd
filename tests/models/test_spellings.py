"""Folders that spell one model in several ways: prefixes, and heads of tied embeddings."""

import json
import shutil
import warnings
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxattn.models import load
from jaxattn.models.catalog import model_resolver
from jaxattn.models.checkpoint import CheckpointError
from jaxattn.models.loading import huggingface_checkpoint, tied_embeddings
from jaxattn.models.weight_map.name_prefix import TensorPrefix

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@cache
def loaded(family: str):
    return huggingface_checkpoint.load(TINY / family)


def tensors_of(family: str) -> dict[str, np.ndarray]:
    files = (TINY / family).glob("model*.safetensors")
    return {k: v for file in files for k, v in safetensors.numpy.load_file(file).items()}


def written(folder: Path, family: str, tensors: dict[str, np.ndarray], **config) -> Path:
    """A folder of one file with these tensors and the family's config.json."""
    folder.mkdir()
    values = json.loads((TINY / family / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def same(one, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


# --- prefixes


SPELLED = {
    "model.language_model.": "lm_head.",
    "language_model.model.": "language_model.lm_head.",
    "language_model.": "lm_head.",
    "": "lm_head.",
}


def respelled(tensors, prefix: str, head: str) -> dict[str, np.ndarray]:
    found = {}
    for name, tensor in tensors.items():
        if name.startswith("model."):
            found[prefix + name.removeprefix("model.")] = tensor
        else:
            found[head + name.removeprefix("lm_head.")] = tensor
    return found


@pytest.mark.parametrize("prefix, head", SPELLED.items())
@pytest.mark.parametrize("family", ["youtu", "deepseek_v3"])
def test_a_folder_of_another_prefix_gives_the_same_parameters(tmp_path, family, prefix, head):
    """deepseek_v3 has a head of its own, and a prediction layer that is skipped."""
    tensors = respelled(tensors_of(family), prefix, head)
    assert not any(name.startswith("model.layers.") for name in tensors)
    model, params = load(written(tmp_path / "model", family, tensors))
    assert model == loaded(family)[0]
    same(params, loaded(family)[1])


@pytest.mark.parametrize("prefix, head", SPELLED.items())
def test_what_is_missing_is_named_as_the_folder_spells_it(tmp_path, prefix, head):
    tensors = respelled(tensors_of("deepseek_v3"), prefix, head)
    lost = [f"{prefix}layers.1.input_layernorm.weight", f"{head}weight"]
    for name in lost:
        del tensors[name]
    folder = written(tmp_path / "model", "deepseek_v3", tensors)
    with pytest.raises(CheckpointError) as refused:
        load(folder)
    assert str(refused.value).endswith(f"missing {lost[1]!r}, {lost[0]!r}")


@pytest.mark.parametrize(
    "layers, word",
    [("language_model.model.", "blocks"), *((each, "layers") for each in ["model.", *SPELLED])],
)
def test_a_name_comes_back_from_the_families_spelling(layers, word):
    head = SPELLED.get(layers, "lm_head.")
    names = [f"{layers}{word}.0.a", f"{layers}embed_tokens.weight", f"{layers}norm.b", f"{head}c"]
    prefix = TensorPrefix.of(names)
    assert prefix == TensorPrefix(layers, head, word)
    plain = ["model.layers.0.a", "model.embed_tokens.weight", "model.norm.b", "lm_head.c"]
    assert list(map(prefix.plain, names)) == plain
    assert list(map(prefix.spelled, plain)) == names
    for other in ("model.visual.x", "vision_tower.encoder.layers.0.y", "mtp.fc.weight"):
        assert layers == "model." or prefix.plain(other) == other


@pytest.mark.parametrize(
    "prefix, word",
    [
        ("language_model.model.", "layers"),
        ("language_model.model.", "blocks"),
        ("model.language_model.", "layers"),
    ],
)
def test_of_kimi_k2_5_the_text_model_is_read(tmp_path, prefix, word):
    """Published or as transformers saves it: fields in text_config, a vision tower beside."""
    nested = prefix == "language_model.model."
    head, tower = ("language_model.lm_head.", "") if nested else ("lm_head.", "model.")
    tensors = respelled(tensors_of("kimi_k2_int4"), prefix, head)
    tensors = {name.replace(".layers.", f".{word}."): x for name, x in tensors.items()}
    for name in ("vision_tower.encoder.blocks.0.norm0.weight", "mm_projector.linear_1.bias"):
        tensors[tower + name] = np.ones(4, np.float32)
    folder = written(tmp_path / "model", "kimi_k2_int4", tensors)
    inner = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "kimi_k25", "text_config": inner, "vision_config": {"hidden_size": 4}}
    (folder / "config.json").write_text(json.dumps(outer))
    model, params = load(folder)
    assert model == loaded("kimi_k2_int4")[0]
    same(params, loaded("kimi_k2_int4")[1])
    assert model_resolver.load(str(folder)).unread.startswith("the vision tower")


# --- tied heads


def test_a_tied_head_that_is_stored_again_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(tied_embeddings, "COMPARED_BYTES", 1000)
    tensors = tensors_of("youtu")
    assert HEAD not in tensors
    folder = written(tmp_path / "model", "youtu", tensors | {HEAD: tensors[EMBEDDING].copy()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, params = load(folder)
    assert model == loaded("youtu")[0] and model.spec.tie_embeddings
    same(params, loaded("youtu")[1])


def other_head(tensors) -> np.ndarray:
    head = tensors[EMBEDDING].copy()
    head[-1, -1] += 1  # in the last block that is compared
    return head


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_another_head_is_used_with_a_warning(tmp_path, monkeypatch, dtype):
    """As transformers 5 does. All of its logits but the last token's are the tied model's."""
    monkeypatch.setattr(tied_embeddings, "COMPARED_BYTES", 1000)
    tensors = tensors_of("youtu")
    head = other_head(tensors)
    folder = written(tmp_path / "model", "youtu", tensors | {HEAD: head})
    with pytest.warns(UserWarning, match="'lm_head.weight' differs from 'model.embed_tokens"):
        model, params = load(folder, dtype=dtype)
    assert not model.spec.tie_embeddings
    with pytest.warns(UserWarning, match="the stored head is used"):
        planned = model_resolver.load(str(folder))
    assert planned.model.with_dtype(dtype or "bfloat16") == model  # a plan counts both
    np.testing.assert_array_equal(params["lm_head"]["weight"][...], head.T)
    np.testing.assert_array_equal(params["embedding"][...], tensors[EMBEDDING])
    plain = written(tmp_path / "plain", "youtu", tensors | {HEAD: head}, tie_word_embeddings=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other, again = load(plain, dtype=dtype)
    assert model == other
    same(params, again)


def test_a_head_of_another_dtype_is_another_head(tmp_path):
    tensors = tensors_of("youtu")
    wide = tensors[EMBEDDING].astype(np.float32)
    folder = written(tmp_path / "model", "youtu", tensors | {HEAD: wide})
    with pytest.warns(UserWarning, match="differs"):
        assert not load(folder)[0].spec.tie_embeddings


@pytest.mark.parametrize("prefix, head", [("model.", "lm_head."), *SPELLED.items()])
def test_the_head_alone_is_the_embedding_of_a_tied_model(tmp_path, prefix, head):
    tensors = respelled(tensors_of("youtu"), prefix, head)
    tensors[f"{head}weight"] = tensors.pop(f"{prefix}embed_tokens.weight")
    model, params = load(written(tmp_path / "model", "youtu", tensors))
    assert model == loaded("youtu")[0]
    same(params, loaded("youtu")[1])


def test_without_both_the_embedding_is_missing(tmp_path):
    tensors = tensors_of("youtu")
    del tensors[EMBEDDING]
    with pytest.raises(CheckpointError, match=f"missing '{EMBEDDING}'$"):
        load(written(tmp_path / "model", "youtu", tensors))


def test_a_head_that_comes_after_the_model_was_read_is_refused(tmp_path):
    """Of a name on the hub config.json is read before the weights are there."""
    tensors = tensors_of("youtu")
    folder = written(tmp_path / "model", "youtu", tensors | {HEAD: other_head(tensors)})
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    published = huggingface_checkpoint.read_config(folder)
    (tmp_path / "elsewhere").rename(folder / "model.safetensors")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="load the folder again"):
        huggingface_checkpoint.open_weights(folder, published)


@pytest.mark.parametrize("family", ["kimi_linear", "bailing_hybrid"])
def test_a_family_without_tied_heads_keeps_its_own(tmp_path, family):
    """transformers ties neither, whatever config.json says."""
    folder = tmp_path / "model"
    shutil.copytree(TINY / family, folder)
    values = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(values))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, params = load(folder)
    assert model == loaded(family)[0] and not model.spec.tie_embeddings
    same(params, loaded(family)[1])
    assert jnp.any(params["lm_head"]["weight"][...] != params["embedding"][...].T)
