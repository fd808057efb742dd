"""Folders of AWQ and GPTQ: 4-bit tiles and floats that mean what the formats say."""

import json
import math
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.models.catalog.decoder_sizes import DecoderSizes
from jaxattn.models.checkpoint import CheckpointError
from jaxattn.models.loading import huggingface_checkpoint, read_plan
from jaxattn.models.weight_map.zero_point_encodings import AwqEncoding, GptqEncoding
from tests.helpers.four_bit_compiled import dequantize
from tests.helpers.safetensors_files import read_file, write_file
from tests.models.test_four_bit_linears import LAYERS, SIZES, VOCAB, config_of, folder_of

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints"
KIMI, QWEN = TINY / "kimi_k2_int4", TINY / "qwen3_next_fp8"
AWQ32 = FourBitFormat("int4", 32, "float16", zeros=True)
METHODS = ("awq", "gptq", "gptq_v2", "sym")
ENDS = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_shape", "weight_scale")
UP = "model.layers.1.mlp.up_proj"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def quantization(method: str, group: int = 32, **changes) -> dict:
    settings = {"bits": 4, "group_size": group}
    if method == "awq":
        settings |= {"quant_method": "awq", "version": "gemm", "zero_point": True}
    else:
        version, sym = ("gptq", True) if method == "sym" else (method, False)
        settings |= {"quant_method": "gptq", "checkpoint_format": version, "sym": sym}
    return settings | changes


def packed(numbers: np.ndarray, order=range(8)) -> np.ndarray:
    """Along the last axis: at bits 4 j of a word lies the `order[j]`-th of its eight numbers."""
    eight = numbers.reshape(*numbers.shape[:-1], -1, 8).astype(np.uint32)
    words = np.zeros(eight.shape[:-1], np.uint32)
    for j, number in enumerate(order):
        words |= eight[..., number] << np.uint32(4 * j)
    return words.view(np.int32)


def quantized(rng, method: str, group: int, out: int, inner: int) -> tuple[dict, np.ndarray]:
    """(the tensors of a linear, the weights [out, in] that they mean)."""
    codes, zeros = rng.integers(0, 16, (inner, out)), rng.integers(0, 16, (inner // group, out))
    zeros = np.full_like(zeros, 8) if method == "sym" else zeros
    scales = (rng.uniform(0.5, 1, zeros.shape) / 50).astype(np.float16)
    if method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": packed(codes, order), "qzeros": packed(zeros, order)}
    else:
        words = packed(zeros).view(np.uint32)
        if method == "gptq" or (method == "sym" and rng.integers(2)):  # some are of the second
            words = words - np.uint32(0x11111111)
        tensors = {
            "qweight": np.ascontiguousarray(packed(codes.T).T),
            "qzeros": words.view(np.int32),
            "g_idx": np.arange(inner, dtype=np.int32) // group,
        }
    groups = codes.reshape(-1, group, out) - zeros[:, None]
    meant = groups.astype(np.float32) * scales[:, None].astype(np.float32)
    return tensors | {"scales": scales}, meant.reshape(inner, out).T


def written(path, config: dict, tensors: dict, method: str, group: int, **changes) -> dict:
    """A folder whose linears of layers are quantized, where their shapes fit. Returns the floats
    that its tensors mean."""
    rng, stored, meant = np.random.default_rng(1), {}, {}
    for name, tensor in tensors.items():
        fits = tensor.ndim == 2 and not tensor.shape[0] % 8 and not tensor.shape[1] % group
        if fits and ".layers." in name and not name.endswith(("gate.weight", "eh_proj.weight")):
            found, meant[name] = quantized(rng, method, group, *tensor.shape)
            stored |= {name.removesuffix("weight") + end: each for end, each in found.items()}
        else:
            stored[name] = meant[name] = tensor.astype(np.float32)
    path.mkdir()
    write_file(path / "model.safetensors", stored)
    config = config | {"quantization_config": quantization(method, group, **changes)}
    (path / "config.json").write_text(json.dumps(config))
    return meant


def floats_of(folder: Path) -> tuple[dict, dict]:
    """(config.json, the tensors of a tiny folder with arbitrary matrices in place of quantized
    ones)."""
    tensors, rng = {}, np.random.default_rng(0)
    for name, tensor in read_file(folder / "model.safetensors").items():
        if name.endswith("weight_packed"):
            shape = (tensor.shape[0], 8 * tensor.shape[1])
            tensors[name.removesuffix("_packed")] = rng.normal(size=shape) / 10
        elif not name.endswith(("weight_scale", "weight_shape", "weight_scale_inv")):
            tensors[name] = tensor
    return json.loads((folder / "config.json").read_text()), tensors


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("zero_points")


@cache
def llama(root, method: str, group: int):
    """(folder, the floats that it means, the model and its parameters in float32)."""
    folder = root / f"{method}_{group}"
    names = folder_of(root / "packed", 128)
    tensors = read_file(root / "packed" / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not name.endswith(ENDS)}
    meant = written(folder, config_of(group), kept | names, method, group)
    return folder, meant, huggingface_checkpoint.load(folder, dtype="float32")


@pytest.mark.parametrize("method, group", [(m, 32 if m == "gptq" else 128) for m in METHODS])
def test_matrices_stay_4_bits_and_mean_the_same(root, method, group):
    folder, meant, (model, params) = llama(root, method, group)
    form = FourBitFormat("int4", group, "float16", zeros=method != "sym")
    block = model.spec.blocks[0]
    assert block.mixer.fp8.form == form == block.feed_forward.fp8.form
    layer = params["segments"][0]["layers"][0]
    for part, module in (("self_attn.k_proj", "mixer"), ("mlp.down_proj", "mlp")):
        tiles = layer[module][part.split(".")[1]]["weight"][...]
        assert tiles.dtype == jnp.uint8 and len(tiles) == LAYERS
        found = dequantize(tiles[1], form, jnp.float32)
        np.testing.assert_array_equal(found, meant[f"model.layers.1.{part}.weight"])
    made = model.param_shapes()
    sizes = [[(x.shape, x.dtype) for x in jax.tree.leaves(each)] for each in (params, made)]
    assert sizes[0] == sizes[1]


def test_logits_are_those_of_the_floats(root):
    folder, _, (model, params) = llama(root, "awq", 128)
    tokens = np.arange(24).reshape(2, 12) * 7 % VOCAB
    other, floats = huggingface_checkpoint.load(folder, dtype="float32", dense="bfloat16")
    assert not other.spec.blocks[0].mixer.fp8
    logits = [jax.jit(m.bind(p))(tokens) for m, p in ((model, params), (other, floats))]
    np.testing.assert_allclose(*logits, atol=1e-5, rtol=1e-5)


def test_blocks_of_columns_give_the_same_tiles(root, monkeypatch):
    folder, _, (_, params) = llama(root, "gptq", 32)
    monkeypatch.setattr(read_plan, "BLOCK_BYTES", 6000)
    _, found = huggingface_checkpoint.load(folder, dtype="float32", readers=2)
    jax.tree.map(np.testing.assert_array_equal, found, params)


@pytest.mark.parametrize("tiny, method", [(KIMI, "gptq"), (QWEN, "awq")])
def test_floats_are_those_that_are_meant(tmp_path, monkeypatch, tiny, method):
    """Heads and groups of rows that are split, experts, and shared experts in their stack."""
    config, tensors = floats_of(tiny)
    meant = written(tmp_path / "quantized", config, tensors, method, 32)
    (tmp_path / "floats").mkdir()
    write_file(tmp_path / "floats" / "model.safetensors", meant)
    plain = config | {"quantization_config": None}
    (tmp_path / "floats" / "config.json").write_text(json.dumps(plain))
    monkeypatch.setattr(read_plan, "BLOCK_BYTES", 8000)
    kept = dict(experts="bfloat16", dense="bfloat16")
    _, found = huggingface_checkpoint.load(tmp_path / "quantized", dtype="float32", **kept)
    _, wanted = huggingface_checkpoint.load(tmp_path / "floats", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    if tiny == QWEN:
        return
    model, params = huggingface_checkpoint.load(tmp_path / "quantized", dtype="bfloat16")
    tiles = params["segments"][0]["layers"][1]["mlp"]["gate_up_proj"][...]
    up = dequantize(tiles, model.spec.blocks[1].feed_forward.form, jnp.bfloat16)[0, 3, 1]
    np.testing.assert_array_equal(up, meant[EXPERT].astype(jnp.bfloat16))


def test_words_are_read_as_published():
    """One word of each layout, by hand."""
    word = np.array([[0x76543210]], np.uint32).view(np.int32)
    ones, zeros = np.ones((1, 1, 8), np.float16), np.zeros((1, 1, 1), np.int32)
    rows = np.repeat(word[None], 32, 1)
    found = np.asarray(AwqEncoding(32).decode([rows, ones, zeros]))[0, :, 0]
    np.testing.assert_array_equal(found, [0, 4, 1, 5, 2, 6, 3, 7])
    rows = np.broadcast_to(word[None], (1, 4, 8))
    words = {offset: [np.full((1, 1, 1), 0x77777777, np.int32)] for offset in (1, 0)}
    for offset, zeros in ({None: []} | words).items():
        found = np.asarray(GptqEncoding(32, offset).decode([rows, ones, *zeros]))[0, 5]
        np.testing.assert_array_equal(found[:8], np.arange(8) - (7 if offset == 0 else 8))


# --- which modules


def test_modules_that_are_not_converted(root, tmp_path):
    """Without tensors the list counts; with them, what they are."""
    config = config_of(32) | {"quantization_config": quantization("awq")}
    for changes in (
        quantization("awq", modules_to_not_convert=["mlp.up_proj", "lm_head"]),
        quantization("gptq", dynamic={r"-:.*\.up_proj": {}}),
    ):
        config["quantization_config"] = changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = huggingface_checkpoint.read_config(tmp_path).model
        assert tuple(model.spec.blocks[0].feed_forward.fp8) == ("gate_proj", "down_proj")
    experts = json.loads((KIMI / "config.json").read_text())
    for listed, forms in (("model.layers.1.mlp.experts", [None]), ("self_attn", [AWQ32])):
        settings = quantization("awq", modules_to_not_convert=[listed])
        (tmp_path / "config.json").write_text(
            json.dumps(experts | {"quantization_config": settings})
        )
        assert huggingface_checkpoint.read_config(tmp_path).forms == forms
    folder, meant, _ = llama(root, "gptq", 32)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = read_file(folder / "model.safetensors")
    for end in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{UP}.{end}"]
    tensors[f"{UP}.weight"] = meant[f"{UP}.weight"]
    write_file(tmp_path / "model.safetensors", tensors)
    model, params = huggingface_checkpoint.load(tmp_path, dtype="float32")
    assert tuple(model.spec.blocks[0].feed_forward.fp8) == ("gate_proj", "down_proj")
    up = params["segments"][0]["layers"][0]["mlp"]["up_proj"]["weight"][...]
    for layer in range(LAYERS):
        wanted = meant[f"model.layers.{layer}.mlp.up_proj.weight"]
        np.testing.assert_array_equal(up[layer], wanted.T)


def test_plan_counts_4_bits(root):
    folder, _, (_, params) = llama(root, "awq", 128)
    published = huggingface_checkpoint.read_config(folder)
    found = DecoderSizes.of("awq", published.model, published.quantization)
    assert "AWQ matrices kept in 4 bits, other AWQ weights dequantized" in found.stored
    tiles = [x for x in jax.tree.leaves(params) if x.dtype == jnp.uint8]
    numbers = LAYERS * sum(out * inner for out, inner in SIZES.values())
    assert sum(x.nbytes for x in tiles) == numbers // 2 + numbers // 128 * 4
    counted = sum(
        math.prod(each.shape) * each.count for each in found.weights if each.dtype_bytes == 1
    )
    assert counted == sum(x.nbytes for x in tiles)


# --- what does not fit


def changed(root, tmp_path, method: str, change) -> Path:
    folder, _, _ = llama(root, method, 32 if method == "gptq" else 128)
    tensors = read_file(folder / "model.safetensors")
    change(tensors)
    write_file(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    return tmp_path


def test_a_bias_of_zeros_is_skipped_and_others_are_named(root, tmp_path):
    """AutoGPTQ writes one for each linear."""
    folder = changed(
        root, tmp_path, "gptq", lambda t: t.update({f"{UP}.bias": np.zeros(256, np.float16)})
    )
    huggingface_checkpoint.open_weights(folder, huggingface_checkpoint.read_config(folder))
    folder = changed(
        root, tmp_path, "gptq", lambda t: t.update({f"{UP}.bias": np.ones(256, np.float16)})
    )
    with pytest.raises(CheckpointError, match=f"unknown '{UP}.bias'"):
        huggingface_checkpoint.load(folder)


@pytest.mark.parametrize(
    "method, end, tensor, message",
    [
        ("awq", "qweight", np.zeros((128, 16), np.int32), r"\[128, 16\], expected int32\[128, 32"),
        ("awq", "qzeros", np.zeros((4, 32), np.int32), r"\[4, 32\], expected int32\[1, 32\]"),
        ("gptq", "scales", np.ones((1, 256), np.float16), r"\[1, 256\], expected float16\[4, 256"),
        ("gptq", "qweight", np.zeros((32, 256), np.int32), r"expected int32\[16, 256\]"),
        (
            "gptq",
            "g_idx",
            np.arange(128, dtype=np.int32)[::-1] // 32,
            r"g_idx' is \[3, 3.* groups of reordered columns \(desc_act\) are not implemented",
        ),
        (
            "sym",
            "qzeros",
            np.full((1, 32), 0x77787777, np.int32),
            "qzeros' has 0x77787777, expected 0x77777777 or 0x88888888; sym=true",
        ),
        ("gptq", "g_idx", None, f"missing '{UP}.g_idx'"),
        ("awq", "qzeros", None, f"missing '{UP}.qzeros'"),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_named(root, tmp_path, method, end, tensor, message):
    def change(tensors):
        del tensors[f"{UP}.{end}"]
        if tensor is not None:
            tensors[f"{UP}.{end}"] = tensor

    folder = changed(root, tmp_path, method, change)
    before = len(jax.live_arrays())
    with pytest.raises(CheckpointError, match=message):
        huggingface_checkpoint.load(folder)
    assert len(jax.live_arrays()) <= before


@pytest.mark.parametrize(
    "settings, message",
    [
        (quantization("awq", bits=8), "bits must be 4 to be supported; got 8"),
        (quantization("awq", 64), "group_size must be 32 or 128 to be supported; got 64"),
        (quantization("awq", zero_point=False), "zero_point must be True to be supported"),
        (quantization("awq", version="gemv"), "version must be 'gemm' or 'GEMM' to be supported"),
        (quantization("awq", backend="llm-awq"), "backend must be .*; got 'llm-awq'"),
        (quantization("gptq", bits=3), "bits must be 4 to be supported; got 3"),
        (quantization("gptq", -1), "group_size must be 32 or 128 to be supported; got -1"),
        (quantization("marlin"), "checkpoint_format must be .*; got 'marlin'"),
        (
            quantization("gptq", dynamic={".*": {"bits": 8}}),
            "bits must be 4 to be supported; got 8",
        ),
        (quantization("gptq", dynamic=[1]), r"dynamic must be an object or null; got \[1\]"),
    ],
)
def test_settings_that_are_not_implemented(tmp_path, settings, message):
    config = config_of(32) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        huggingface_checkpoint.read_config(tmp_path)
