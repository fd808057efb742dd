"""Matrices beside the experts that stay FP8: what they mean, where they go, who divides them."""

import dataclasses
import importlib.util
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec

from jaxattn.core.numerics.fp8_block_scaling import dequantize
from jaxattn.core.numerics.fp8_weight_layout import deinterleave_columns
from jaxattn.models import CacheSize, DecodeBatch, registry
from jaxattn.models.blocks import MLA
from jaxattn.models.catalog import model_resolver
from jaxattn.models.checkpoint import CheckpointError
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.interface import init_state, scratch_spec
from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.models.network import decoder_network
from jaxattn.models.registry import read_model
from jaxattn.models.sharding.axis_sharding import ShardingError
from jaxattn.models.sharding.decoder import divided
from jaxattn.models.weight_map.quantized_linears import with_fp8_linears
from jaxattn.parallel import Parallel
from tests.helpers import checkpoint_variations
from tests.helpers.fp8_folders import write_folder
from tests.helpers.kernel_cases import slow
from tests.helpers.safetensors_files import read_file, write_file
from tests.models.test_parity import every_expert, steps

CLASSES = ("Qwen3Next", "Qwen3_5Moe", "DeepseekV3")
NAMES = {
    "Qwen3Next": {"in_proj_qkvz", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"},
    "DeepseekV3": {"q_a_proj", "q_b_proj", "kv_a_proj", "o_proj"},
}
NAMES["Qwen3_5Moe"] = NAMES["Qwen3Next"]
TOKENS = np.arange(24).reshape(2, 12) * 7 % 192
of_two_models = pytest.mark.parametrize(
    "folder",
    [
        CLASSES[0],
        pytest.param(
            CLASSES[1],
            marks=pytest.mark.slow(
                reason="a scale of another matrix; found by Qwen3-Next's folder, whose layers "
                "are the same, too"
            ),
        ),
        CLASSES[2],
    ],
    indirect=True,
)


@pytest.fixture(scope="module", params=CLASSES)
def folder(request, tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("fp8"), request.param)


@cache
def loaded(folder: Path, dense: str):
    return huggingface_checkpoint.load(folder, dtype="float32", dense=dense)


@cache
def logits_of(folder: Path, dense: str):
    """One compiled forward for all parameters of a folder's model."""
    model = loaded(folder, dense)[0]
    return jax.jit(lambda params, tokens: model.bind(params)(tokens))


original = jax.jit(deinterleave_columns)


@jax.jit
def floats_of(numbers, scales):
    return dequantize(deinterleave_columns(numbers), scales, jnp.float32).swapaxes(-1, -2)


def leaves(params) -> dict:
    return {
        ".".join(str(each.key) for each in path if hasattr(each, "key")): leaf
        for path, leaf in jax.tree.leaves_with_path(params)
    }


@of_two_models
def test_numbers_and_scales_are_those_that_were_published(folder):
    wide, kept = (leaves(loaded(folder, dense)[1]) for dense in ("bfloat16", "fp8"))
    fp8 = [name for name in kept if name.endswith(".scale")]
    assert {name.split(".")[-2] for name in fp8} >= {"o_proj"} and len(fp8) > 5
    for name in fp8:
        weight = name.replace("scale", "weight")
        numbers, scales = kept[weight], kept[name]
        assert (numbers.dtype, scales.dtype) == (jnp.float8_e4m3fn, jnp.float32)
        np.testing.assert_array_equal(floats_of(numbers, scales), wide[weight], err_msg=name)
    rest = set(kept) - set(fp8) - {name.replace("scale", "weight") for name in fp8}
    for name in rest:
        np.testing.assert_array_equal(kept[name], wide[name], err_msg=name)
    assert set(wide) == set(kept) - set(fp8)


def test_the_bytes_of_a_matrix_are_not_touched(folder):
    params, stored = loaded(folder, "fp8")[1], read_file(folder / "model.safetensors")
    found = {
        np.asarray(original(matrix)).tobytes()
        for name, leaf in leaves(params).items()
        if name.endswith("o_proj.weight")
        for matrix in leaf
    }
    names = [name for name in stored if name.endswith("self_attn.o_proj.weight")]
    assert names and {stored[name].tobytes() for name in names} == found


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(
            name,
            marks=pytest.mark.slow(
                reason="a layer that reads FP8 numbers as floats; found by DeepSeek's logits "
                "there, and by linears and a delta net in nn/test_linear_fp8, too"
            ),
        )
        if name != "DeepseekV3"
        else name
        for name in CLASSES
    ],
    indirect=True,
)
def test_logits_are_those_of_the_floats(folder):
    found, expected = (
        logits_of(folder, dense)(loaded(folder, dense)[1], TOKENS) for dense in ("fp8", "bfloat16")
    )
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.slow(
    reason="random parameters of other shapes than a folder's; found by the random parameters of "
    "models/test_quantized, which the same code makes, too"
)
def test_random_parameters_have_the_same_shapes_and_dtypes(folder):
    model, params = loaded(folder, "fp8")
    made = model.init_params(jax.random.key(0))
    one, other = ([(x.shape, x.dtype) for x in jax.tree.leaves(each)] for each in (params, made))
    assert one == other and jax.tree.structure(params) == jax.tree.structure(made)
    assert np.isfinite(logits_of(folder, "fp8")(made, TOKENS)).all()


@pytest.mark.parametrize("classes", CLASSES)
def test_transformers_computes_the_same_in_float64(classes, tmp_path):
    for library in ("torch", "transformers"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed; it makes the checkpoint")
    from tests.helpers import make_checkpoints

    make_checkpoints.write(checkpoint_variations.whole_blocks(classes), tmp_path)
    model, params = huggingface_checkpoint.load(tmp_path, dtype="float32", dense="fp8")
    names = {name for block in model.spec.blocks for name in block.mixer.fp8}
    assert names == NAMES[classes]
    wanted = safetensors.numpy.load_file(tmp_path / "reference.safetensors")
    found, expected = steps(model, params, wanted)
    exact = np.stack(
        [wanted["exact_logits"][0, wanted["lengths"][0] - 1], *wanted["exact_step_logits"]]
    )
    np.testing.assert_allclose(found, exact, atol=1e-4, rtol=1e-4)
    assert (found.argmax(-1) == expected.argmax(-1)).all()


# --- which


def model_of(name: str, dense: str | None = "fp8", **more):
    return read_model(
        ConfigFields(model_resolver.shipped_config(name) | more, name), dense=dense
    ).model


def test_a_shape_that_no_kernel_reads_becomes_bfloat16():
    layers = {type(b.mixer).__name__: b.mixer.fp8 for b in model_of("DeepSeek-R1").spec.blocks}
    assert layers == {"MLA": ("q_a_proj", "q_b_proj", "kv_a_proj", "o_proj")}
    next_ = model_of("Qwen3-Next-80B-A3B-FP8").spec
    assert {b.mixer.fp8 for b in next_.blocks} == {
        ("in_proj_qkvz", "out_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")
    }  # fmt: skip
    narrow = model_of("Qwen3-Next-80B-A3B-FP8", linear_key_head_dim=96, head_dim=16).spec
    assert {b.mixer.fp8 for b in narrow.blocks} == {("out_proj",), ("q_proj", "o_proj")}
    assert not model_of("Qwen3-Next-80B-A3B-FP8", "bfloat16").spec.blocks[0].mixer.fp8


@pytest.mark.usefixtures("untraced_bounds")
@pytest.mark.parametrize("name", ["DeepSeek-R1", "Qwen3-Next-80B-A3B-FP8"])
def test_a_plan_counts_numbers_and_scales(name):
    wide, kept = (model_resolver.load(name, dense) for dense in ("bfloat16", "fp8"))
    assert kept.total_parameters() == wide.total_parameters()
    assert kept.whole_fp8_bytes == wide.whole_fp8_bytes <= kept.total_bytes() < wide.total_bytes()
    params = kept.model.param_shapes()
    assert kept.total_bytes() == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    assert "experts and other matrices in FP8" in kept.stored
    assert "other FP8 matrices dequantized to bfloat16" in wide.stored
    assert kept.sizes.widened > wide.sizes.widened == 0


def test_some_may_be_left_out():
    model = with_fp8_linears(model_of("DeepSeek-R1", "bfloat16"), {"o_proj", "up_proj"})
    assert model.spec.blocks[0].mixer.fp8 == ("q_a_proj", "q_b_proj", "kv_a_proj")
    assert model.spec.blocks[0].feed_forward.fp8 == ("gate_proj", "down_proj")


def test_a_checkpoint_in_floats_has_no_fp8():
    with pytest.raises(ValueError, match="dense='fp8' needs a checkpoint in FP8"):
        model_of("Qwen3-32B")
    with pytest.raises(
        ValueError, match="dense must be None, 'fp8', '4bit' or 'bfloat16'; got 'int8'"
    ):
        model_of("DeepSeek-R1", "int8")


@pytest.mark.slow_cases(reason="the name of another matrix; found by DeepSeek's folder there too")
@pytest.mark.parametrize("folder", [*map(slow, CLASSES[:2]), "DeepseekV3"], indirect=True)
def test_a_matrix_in_floats_among_those_is_named(folder, tmp_path, monkeypatch):
    tensors = read_file(folder / "model.safetensors")
    name = next(n for n in sorted(tensors) if n.endswith("o_proj.weight"))
    scale = tensors.pop(f"{name}_scale_inv")
    tensors[name] = np.asarray(dequantize(tensors[name], scale, jnp.bfloat16))
    write_file(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf"{name}' bfloat16\[.*expected float8.*dense"):
        huggingface_checkpoint.load(tmp_path, dense="fp8")
    huggingface_checkpoint.load(tmp_path, dense="bfloat16")
    # Where nothing is asked for, all of that name are floats.
    monkeypatch.setattr(registry, "DENSE", "fp8")
    model, params = huggingface_checkpoint.load(tmp_path, dtype="float32")
    names = [block.mixer.fp8 for block in model.spec.blocks]
    assert all("o_proj" not in each for each in names) and any(
        "k_proj" in each or "q_a_proj" in each for each in names
    )
    wide = loaded(folder, "bfloat16")[1]
    for name, leaf in leaves(params).items():
        if "o_proj" in name:
            np.testing.assert_allclose(leaf, leaves(wide)[name], rtol=2**-7)


@pytest.mark.slow_cases(
    reason="a name of a part of a layer; found by o_proj of one layer there too"
)
@pytest.mark.parametrize(
    "modules, floats",
    [
        (["lm_head", "model.layers.0.mlp.gate", "model.layers.2.linear_attn.in_proj_ba"], set()),
        (["model.language_model.layers.3.self_attn.o_proj"], {"o_proj"}),
        pytest.param(
            ["o_proj", "model.layers.1.linear_attn"],
            {"o_proj", "in_proj_qkvz", "out_proj"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["model.layers.3.self_attn"],
            {"q_proj", "k_proj", "v_proj", "o_proj"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_before_there_are_weights_the_list_of_config_json_counts(modules, floats, monkeypatch):
    monkeypatch.setattr(registry, "DENSE", "fp8")
    name, few = "Qwen3-Next-80B-A3B-FP8", {"num_hidden_layers": 4}
    given = model_resolver.shipped_config(name)["quantization_config"]
    more = few | {"quantization_config": given | {"modules_to_not_convert": modules}}

    def names(model):
        layers = (each for b in model.spec.blocks for each in (b.mixer, b.feed_forward))
        return {name for layer in layers for name in layer.fp8}

    whole = names(model_of(name, None, **few))
    assert floats < whole and names(model_of(name, None, **more)) == whole - floats
    assert names(model_of(name, "fp8", **more)) == whole


# --- several GPUs


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B-FP8", "DeepSeek-R1"])
@pytest.mark.parametrize("gpus", [2, 8])
def test_weights_and_scales_are_cut_alike(name, gpus):
    model = model_of(name)
    if name.startswith("Qwen") and gpus == 8:
        gpus = 4
    own = leaves(divided(model, Parallel(tensor=gpus, expert=gpus)).param_shapes())
    whole = leaves(model.param_shapes())
    scales = [name for name in own if name.endswith("proj.scale")]
    assert scales
    for scale in scales:
        weight = scale.replace("scale", "weight")
        for axis in (-1, -2):
            blocks = -(-own[weight].shape[axis] // 128)
            assert own[scale].shape[axis] == blocks, (weight, own[weight].shape)
        assert own[weight].size <= whole[weight].size


def test_a_cut_within_a_block_is_refused_by_name():
    model = model_of(
        "DeepSeek-R1", v_head_dim=96, num_attention_heads=4, moe_intermediate_size=2048
    )
    assert "o_proj" in model.spec.blocks[0].mixer.fp8
    with pytest.raises(
        ShardingError, match=r"o_proj in FP8 over 2 GPUs has parts of 192.*bfloat16"
    ):
        divided(model, Parallel(tensor=2))
    plain = dataclasses.replace(model, spec=model_of(
        "DeepSeek-R1", "bfloat16", v_head_dim=96, num_attention_heads=4
    ).spec)  # fmt: skip
    divided(plain, Parallel(tensor=2))


# --- in a decode step


def decoded(model, params, implementation) -> np.ndarray:
    """The logits of three decode steps of one row."""
    packed = model.pack(params)
    state = init_state(model, CacheSize(pages=1, slots=1), scratch_spec(model, 1, max_pages=1))
    run = jax.jit(partial(model.decode, implementation=implementation))
    found = []
    for length in (1, 2, 3):
        batch = DecodeBatch(
            np.array([[5 + length]], np.int32), np.array([length], np.int32),
            np.zeros((1, 1), np.int32), np.zeros(1, np.int32),
        )  # fmt: skip
        logits, state = run(packed, state, batch)
        found.append(np.asarray(logits, np.float32))
    return np.stack(found)


@pytest.mark.gpu
@pytest.mark.parametrize("unrolled", [False, True])
def test_a_step_with_the_kernels(folder, unrolled, monkeypatch):
    """Near XLA's step in float32; tokens take all experts, so that none are chosen by rounding."""
    if unrolled:
        monkeypatch.setattr(decoder_network, "MANY_REPEATS", 1)
    exact, params = loaded(folder, "fp8")
    model, own = huggingface_checkpoint.load(folder, dense="fp8")
    # No kernel has latents of 128 numbers: there XLA attends, and the products have their kernels.
    latent = any(isinstance(block.mixer, MLA) for block in model.spec.blocks)
    found = decoded(every_expert(model), own, None if latent else "mosaic_gpu")
    wanted = decoded(every_expert(exact), params, "xla")
    for one, other in zip(found, wanted, strict=True):
        assert np.linalg.norm(one - other) <= 3e-2 * np.linalg.norm(other)


def test_a_delta_nets_gates_are_two_parts_in_the_launch_of_its_inputs():
    """With 32 value heads, as Qwen3-Next has, and in bfloat16 alone."""
    model = model_of("Qwen3-Next-80B-A3B-FP8")
    packed = jax.eval_shape(model.pack, model.param_shapes())
    assert sorted(packed.extra_weights) == [(0, 0), (0, 1), (0, 2)]
    numbers, scales = packed.extra_weights[0, 0]
    assert (numbers.shape, numbers.dtype) == ((12, 128, 2048), jnp.float8_e4m3fn)
    assert scales.shape == (12, 1, 16)
    for other in (model.with_dtype("float32"), model_of("Qwen3-Next-80B-A3B-FP8", "bfloat16")):
        assert not jax.eval_shape(other.pack, other.param_shapes()).extra_weights
    large = model_of("Qwen3.5-397B-A17B-FP8")
    specs = divided(large, Parallel(tensor=2, expert=2)).packed_specs()
    assert (
        len(jax.tree.leaves(specs.extra_weights, is_leaf=lambda x: isinstance(x, PartitionSpec)))
        >= 2
    )
