"""Dense matrices of 4 bits, from a folder of compressed-tensors to the logits."""

import dataclasses
import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.models.blocks import MoE
from jaxattn.models.loading import huggingface_checkpoint, read_plan
from jaxattn.models.sharding.axis_sharding import ShardingError, own, shard_layer
from jaxattn.models.sharding.decoder import divided
from jaxattn.nn.four_bit_linear import FourBitLinears
from jaxattn.ops.moe.routing import Router
from jaxattn.parallel import Parallel
from tests.helpers.four_bit_compiled import dequantize
from tests.helpers.safetensors_files import write_file

KIMI = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "kimi_k2_int4"
HIDDEN, WIDE, HEADS, DIM, VOCAB, LAYERS = 128, 256, 4, 32, 96, 2
SIZES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
}  # fmt: skip


def config_of(group: int, **changes) -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
               "group_size": group, "actorder": "weight"} | changes  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized",
                    "config_groups": groups, "ignore": ["lm_head"]}  # fmt: skip
    return {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "head_dim": DIM, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "max_position_embeddings": 256, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "eos_token_id": 1, "bos_token_id": 0,
        "quantization_config": quantization,
    }  # fmt: skip


def packed(codes: np.ndarray) -> np.ndarray:
    """Eight numbers of the last axis in a word."""
    words = (codes.reshape(*codes.shape[:-1], -1, 8) << np.arange(0, 32, 4)).sum(-1)
    return words.astype(np.uint32).view(np.int32)


def folder_of(
    path, group: int = 128, dtype: str = "bfloat16", floats: str = "", zeros: bool = False
) -> dict:
    """Writes a folder, and returns what its matrices mean, in float32. Those of the name `floats`
    are floats in the last layer; with `zeros` each group has a zero point."""
    rng, tensors, meant = np.random.default_rng(0), {}, {}
    dtype = jnp.dtype(dtype)
    for layer in range(LAYERS):
        before = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{before}.{norm}.weight"] = np.ones(HIDDEN, dtype)
        for part, (out, inner) in SIZES.items():
            name = f"{before}.{part}.weight"
            if part == floats and layer == LAYERS - 1:
                tensors[name] = (rng.normal(size=(out, inner)) / 12).astype(dtype)
                meant[name] = tensors[name].astype(np.float32)
                continue
            codes = rng.integers(0, 16, (out, inner))
            scales = (rng.uniform(0.5, 1, (out, inner // group)) / 50).astype(dtype)
            zero = rng.integers(0, 16, scales.shape) if zeros else np.full(scales.shape, 8)
            tensors[f"{name}_packed"] = packed(codes)
            if zeros:
                tensors[f"{name}_zero_point"] = np.ascontiguousarray(packed(zero.T).T)
            tensors[f"{name}_scale"] = scales
            tensors[f"{name}_shape"] = np.array([out, inner], np.int64)
            wide = np.repeat(zero, group, 1), np.repeat(scales.astype(np.float32), group, 1)
            meant[name] = (codes - wide[0]) * wide[1]
    tensors["model.embed_tokens.weight"] = rng.normal(size=(VOCAB, HIDDEN)).astype(dtype)
    tensors["lm_head.weight"] = (rng.normal(size=(VOCAB, HIDDEN)) / 10).astype(dtype)
    tensors["model.norm.weight"] = np.ones(HIDDEN, dtype)
    path.mkdir(exist_ok=True)
    write_file(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(config_of(group, symmetric=not zeros)))
    return meant


@cache
def small(root, group: int, zeros: bool = False):
    """(folder, what it means, the model and its parameters in float32)."""
    folder = root / f"int4_{group}_{zeros}"
    meant = folder_of(folder, group, zeros=zeros)
    return folder, meant, huggingface_checkpoint.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("four_bit")


@pytest.mark.slow_cases(reason="a group of another size; found by the two others too")
@pytest.mark.parametrize(
    "group, zeros", [pytest.param(32, False, marks=pytest.mark.slow), (128, False), (32, True)]
)
def test_matrices_stay_4_bits_and_mean_the_same(root, group, zeros):
    _, meant, (model, params) = small(root, group, zeros)
    block = model.spec.blocks[0]
    assert isinstance(block.mixer.fp8, FourBitLinears)
    assert block.mixer.fp8.form == FourBitFormat("int4", group, zeros=zeros)
    layer = params["segments"][0]["layers"][0]
    for part, module in (("self_attn.k_proj", "mixer"), ("mlp.down_proj", "mlp")):
        tiles = layer[module][part.split(".")[1]]["weight"][...]
        assert tiles.dtype == jnp.uint8
        found = dequantize(tiles[1], block.mixer.fp8.form, jnp.float32)
        np.testing.assert_array_equal(found, meant[f"model.layers.1.{part}.weight"])


def test_logits_are_those_of_the_floats(root):
    folder, _, (model, params) = small(root, 128)
    tokens = np.arange(24).reshape(2, 12) * 7 % VOCAB
    other, floats = huggingface_checkpoint.load(folder, dtype="float32", dense="bfloat16")
    assert not other.spec.blocks[0].mixer.fp8
    logits = [jax.jit(m.bind(p))(tokens) for m, p in ((model, params), (other, floats))]
    np.testing.assert_allclose(*logits, atol=1e-5, rtol=1e-5)
    made = jax.eval_shape(model.init_params, jax.random.key(0))
    sizes = [[(x.shape, x.dtype) for x in jax.tree.leaves(each)] for each in (params, made)]
    assert sizes[0] == sizes[1]


def test_blocks_of_rows_have_the_zero_points_of_their_rows(root, monkeypatch):
    folder, meant, _ = small(root, 32, True)
    monkeypatch.setattr(read_plan, "BLOCK_BYTES", 1000)
    _, params = huggingface_checkpoint.load(folder, dtype="float32", dense="bfloat16")
    up = params["segments"][0]["layers"][0]["mlp"]["up_proj"]["weight"][...]
    for layer in range(LAYERS):
        np.testing.assert_array_equal(
            up[layer], meant[f"model.layers.{layer}.mlp.up_proj.weight"].T
        )


def test_a_matrix_that_is_floats_in_a_layer_is_so_in_all(tmp_path):
    meant = folder_of(tmp_path, dtype="float16", floats="mlp.up_proj")
    model, params = huggingface_checkpoint.load(tmp_path, dtype="float32")
    names = model.spec.blocks[0].feed_forward.fp8
    assert tuple(names) == ("gate_proj", "down_proj") and names.form.scale == "float16"
    up = params["segments"][0]["layers"][0]["mlp"]["up_proj"]["weight"][...]
    for layer in range(LAYERS):
        wanted = meant[f"model.layers.{layer}.mlp.up_proj.weight"]
        np.testing.assert_array_equal(up[layer], wanted.T)


def test_gpus_divide_whole_tiles(root):
    model = small(root, 128)[2][0]
    with pytest.raises(ShardingError, match="proj in 4 bits over 2 GPUs has parts of 64, which"):
        divided(model, Parallel(tensor=2))
    model = small(root, 32)[2][0]
    local = divided(model, Parallel(tensor=2))
    shapes = local.param_shapes()["segments"][0]["layers"][0]["mlp"]
    assert shapes["up_proj"]["weight"].shape[1:3] == (2, 2)  # 128 rows, 128 columns
    assert shapes["down_proj"]["weight"].shape[1:3] == (2, 2)
    with pytest.raises(ShardingError, match="do not divide into tiles of 64; use fewer"):
        divided(model, Parallel(tensor=4))


def test_gpus_divide_whole_tiles_of_experts():
    stream = huggingface_checkpoint.read_config(KIMI).model.spec.stream
    router = Router(experts=4, top_k=2, scores="softmax")
    experts = MoE(expert_size=128, router=router, weight_format=FourBitFormat("int4", 32))
    found = shard_layer(experts, stream, Parallel(tensor=2))
    whole = np.arange(4 * 2 * 2).reshape(4, 2, 2, 1, 1)  # experts, gate and up, tiles of rows
    mine = [own(whole, found.cuts["gate_up_proj"], Parallel(tensor=2), gpu) for gpu in (0, 1)]
    assert found.layer.expert_size == 64
    np.testing.assert_array_equal(np.concatenate(mine, axis=-3), whole)
    wide = dataclasses.replace(experts, weight_format=FourBitFormat("int4", 128))
    with pytest.raises(
        ShardingError, match="64 each, which do not divide into tiles of 64 rows and 128 columns"
    ):
        shard_layer(wide, stream, Parallel(tensor=2))
    shard_layer(wide, stream, Parallel(tensor=2, expert=2))
