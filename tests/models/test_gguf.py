"""GGUF files: their numbers, their models and tokenizers, and what is refused before it is read."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from jaxattn.cli import plan
from jaxattn.core.numerics.rope import Llama3RopeScaling, RopeConfig, inv_freq
from jaxattn.models import load
from jaxattn.models.catalog import model_resolver
from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.models.loading.gguf.gguf_encodings import GgufEncoding
from jaxattn.models.loading.gguf.gguf_header import TYPES, read_gguf
from jaxattn.models.loading.loader import read_folder
from jaxattn.text import TextError, tokenizer_of
from tests.helpers import gguf_files
from tests.helpers.gguf_files import gguf_tensors, hub_tensors, metadata_of, write_gguf
from tests.helpers.safetensors_files import write_file

KINDS = ("llama", "qwen2", "qwen3")
BLOCKS = [each for each in TYPES.values() if each.block_size > 1]
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
    "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    """(the folder of a tiny model, the GGUF file of the same)."""
    kind, path = request.param, tmp_path_factory.mktemp(request.param)
    tensors = hub_tensors(kind)
    (path / "config.json").write_text(json.dumps({"model_type": kind, **gguf_files.CONFIG}))
    write_file(path / "model.safetensors", tensors)
    return path, write_gguf(path / "m.gguf", metadata_of(kind), gguf_tensors(kind, tensors))


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_a_block_has_the_bits_of_the_package_gguf(kind):
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    stored = rng.integers(256, size=(6, 3 * kind.nbytes)).astype(np.uint8)
    for block in range(3):  # random bytes may be no finite scale
        for place in SCALES[kind.name]:
            scale = rng.normal(size=6).astype(np.float16).view(np.uint8).reshape(6, 2)
            stored[:, block * kind.nbytes + place :][:, :2] = scale
    wanted = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind.name])
    found = jax.jit(lambda x: GgufEncoding(kind).decode([x]))(stored[None])[0]
    np.testing.assert_array_equal(np.asarray(found).view(np.int32), wanted.view(np.int32))


def test_a_model_has_the_weights_of_its_folder(both):
    folder, file = both
    (model, params), (own, found) = (load(each, dtype="float32") for each in (folder, file))
    assert own == model
    jax.tree.map(np.testing.assert_array_equal, found, params)


@pytest.mark.usefixtures("untraced_bounds")
def test_pairs_that_turn_slower_are_llama_3s_scaling_and_a_plan_takes_the_file(tmp_path, capsys):
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    llama3 = Llama3RopeScaling(**scaling, original_max_position_embeddings=8192)
    rope = RopeConfig(gguf_files.DIM, 500_000.0, interleaved=True, llama3=llama3)
    plain = inv_freq(dataclasses.replace(rope, llama3=None))
    tensors = {"rope_freqs.weight": gguf_files.floats(plain / inv_freq(rope))}
    file = spoiled(tmp_path, metadata={"llama.rope.freq_base": 500_000.0}, tensors=tensors)
    folder = read_folder(file)
    assert folder.model.spec.blocks[0].mixer.rope.llama3 == llama3
    folder.open()
    assert plan.main([str(file)]) == 0
    assert "GQA weights" in capsys.readouterr().out
    assert model_resolver.load(str(file)).model == folder.model


def test_quantised_rows_of_a_head_are_put_back(tmp_path):
    """Q8_0 rows whose pairs stand together, in a file and by hand."""
    tensors, kind = hub_tensors("llama"), TYPES[8]
    written = gguf_tensors("llama", tensors)
    rows, name = gguf_files.HEADS * gguf_files.DIM, "blk.1.attn_q.weight"
    rng = np.random.default_rng(1)
    codes = rng.integers(-128, 128, size=(rows, 2, 32)).astype(np.int8)
    scale = np.full((rows, 2, 1), 0.5, np.float16)
    blocks = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=2)
    written[name] = kind.name, (rows, 64), blocks.tobytes()
    file = write_gguf(tmp_path / "m.gguf", metadata_of("llama"), written)
    model, params = load(file, dtype="float32")
    numbers = codes.reshape(rows, 64).astype(np.float32) / 2
    halves = numbers.reshape(gguf_files.HEADS, gguf_files.DIM // 2, 2, 64).swapaxes(1, 2)
    flat = jax.tree.leaves(params)
    wanted = halves.reshape(rows, 64).T
    assert any(leaf.ndim == 3 and np.array_equal(leaf[1][:, :rows], wanted) for leaf in flat)


# --- what is refused


def spoiled(tmp_path, metadata=(), tensors=(), drop=(), **options):
    """A file of a llama with other metadata and tensors."""
    meta = metadata_of("llama") | dict(metadata)
    found = gguf_tensors("llama", hub_tensors("llama")) | dict(tensors)
    for name in drop:
        meta.pop(name, None)
        found.pop(name, None)
    return write_gguf(tmp_path / "m.gguf", meta, found, **options)


REFUSED = {
    "version": ({"version": 1}, "GGUF version 1;"),
    "architecture": (
        {"metadata": {"general.architecture": "mamba"}}, "architecture 'mamba' is not supported"
    ),
    "field": ({"drop": ["llama.block_count"]}, "no metadata 'llama.block_count'"),
    "experts": ({"metadata": {"llama.expert_count": 8}}, "llama.expert_count must be 0; got 8"),
    "part of a head": (
        {"metadata": {"llama.rope.dimension_count": 8}}, "rope.dimension_count must be 16; got 8"
    ),
    "scaling": ({"metadata": {"llama.rope.scaling.type": "longrope",
                              "llama.rope.scaling.factor": 2.0}}, "longrope"),
    "llama 3": ({"tensors": {"rope_freqs.weight": ("F32", (8,), bytes(32))}},
                "rope_freqs.weight differs from Llama 3's RoPE scaling"),
    "type": ({"tensors": {"output.weight": (16, (100, 64), bytes(9))}}, "' of type IQ2_XXS"),
    "unheard type": ({"tensors": {"output.weight": (99, (100, 64), bytes(9))}}, "number 99"),
    "odd columns": ({"tensors": {"output.weight": ("Q8_0", (100, 65), bytes(9))}}, "blocks of 32"),
    "stranger": ({"tensors": {"blk.0.ffn_gate_exps.weight": ("F32", (2,), bytes(8))}},
                 "the model does not have: 'blk.0.ffn_gate_exps.weight'"),
    "missing": ({"drop": ["blk.1.ffn_up.weight"]}, "missing 'model.layers.1.mlp.up_proj.weight'"),
    "shape": ({"tensors": {"output_norm.weight": ("F32", (65,), bytes(260))}},
              "'model.norm.weight' float32[65], expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named_before_anything_is_allocated(tmp_path, monkeypatch, name):
    options, said = REFUSED[name]
    file = spoiled(tmp_path, **options)
    monkeypatch.setattr(jax, "device_put", lambda *_: pytest.fail("allocated"))
    with pytest.raises(CheckpointError, match=".") as refused:
        read_folder(file).open()
    assert said in str(refused.value) and "m.gguf" in str(refused.value)


def test_a_file_that_is_cut_short_is_named_wherever_it_ends(tmp_path):
    whole = spoiled(tmp_path).read_bytes()
    file = tmp_path / "m.gguf"
    for size in (0, 3, 4, 10, 30, 200, 2000, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="is cut off"):
            read_gguf(file)
    file.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(CheckpointError, match="does not begin with GGUF"):
        read_gguf(file)


def test_a_damaged_header_raises_nothing_else(tmp_path):
    whole, rng = bytearray(spoiled(tmp_path).read_bytes()), np.random.default_rng(0)
    file = tmp_path / "m.gguf"
    for _ in range(200):
        damaged = bytearray(whole[:9000])
        for place in rng.integers(4, 6000, size=3):
            damaged[place] = rng.integers(256)
        file.write_bytes(damaged + whole[9000:])
        try:
            read_folder(file).open()
        except CheckpointError as error:
            assert "m.gguf" in str(error)


def test_a_dtype_that_no_folder_has_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="dtype must be None, .*; got 'float16'"):
        read_folder(spoiled(tmp_path), dtype="float16")


def test_a_part_of_several_files_is_named(tmp_path):
    file = shutil.copy(spoiled(tmp_path), tmp_path / "m-00001-of-00003.gguf")
    with pytest.raises(CheckpointError, match="part of a model in several files"):
        read_folder(file)


# --- the tokenizer


def test_a_tokenizer_cuts_merges_and_writes_a_chat(tmp_path):
    path = tmp_path / "m.gguf"
    tokenizer = tokenizer_of(metadata_of("llama"), path)
    text = "the he"
    tokens = tokenizer.encode(text)
    assert [gguf_files.TOKENS[token] for token in tokens] == ["t", "he", "Ġhe"]
    assert tokenizer.decode(tokens) == text
    end = gguf_files.TOKENS.index("<|end|>")
    assert tokenizer.stop_tokens == (end,) and tokenizer.has_chat_template
    assert tokenizer.chat([{"role": "user", "content": "he"}]) == [
        gguf_files.TOKENS.index("<|user|>"), gguf_files.TOKENS.index("he"), end
    ]  # fmt: skip
    assert tokenizer.decode([end]) == ""


def test_sentencepieces_are_merged_in_the_order_of_their_scores(tmp_path):
    """In another order "▁ab" would be "▁a" and "b"."""
    pieces = {"<unk>": 2, "<s>": 3, "</s>": 3, "<0x0A>": 6}
    pieces |= dict.fromkeys(("▁", "a", "b", "▁a", "ab"), 1)
    names, known = list(pieces), {"bos": 1, "eos": 2, "unknown": 0}
    metadata = {f"tokenizer.ggml.{name}_token_id": number for name, number in known.items()}
    metadata |= {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": tuple(pieces.values()),
        "tokenizer.ggml.scores": (*[0.0] * 4, *[-9.0] * 3, -2.0, -1.0),
    }  # fmt: skip
    header = read_gguf(write_gguf(tmp_path / "m.gguf", metadata, {}))
    tokenizer = tokenizer_of(header.metadata, header.path)
    tokens = tokenizer.encode("ab a\n")
    assert [names[token] for token in tokens] == ["<s>", "▁", "ab", "▁a", "<0x0A>"]
    assert tokenizer.decode(tokens) == "ab a\n" and tokenizer.stop_tokens == (2,)
    plain = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokens = tokenizer_of(header.metadata | plain, header.path).encode("ab c")
    assert [names[token] for token in tokens] == ["ab", "▁", "<unk>"]


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": (0.5,)}, "but 1 scores"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken' is not supported"),
        ({"tokenizer.ggml.merges": "none"}, "tokenizer.ggml.merges is missing or not a list"),
        ({"tokenizer.ggml.eos_token_id": 1000}, "_id must be an integer from 0 to 99; got 1000"),
        ({"tokenizer.ggml.token_type": (1, 1)}, "and types for 2"),
        ({"tokenizer.ggml.merges": ("h q",)}, "damaged"),
    ],
)
def test_a_tokenizer_that_is_not_supported_is_named(tmp_path, changed, said):
    with pytest.raises(TextError, match=".") as refused:
        tokenizer_of(metadata_of("llama") | changed, tmp_path / "m.gguf")
    assert said in str(refused.value)
