"""Qwen3, Qwen3-Next and Qwen3.5: what their config.json may say, and how tensors may be spelled."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxattn.models.blocks import GDN, GQA, MLP, MoE
from jaxattn.models.checkpoint import CheckpointError
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.models.registry import read_model

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints"
FUSED = TINY / "qwen3_5_moe"
OF_ATTENTION = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
}
DENSE = OF_ATTENTION | {"model_type": "qwen3", "intermediate_size": 96}
HYBRID = OF_ATTENTION | {
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def read(values):
    return read_model(ConfigFields(values, "config.json")).model


@pytest.mark.parametrize(
    "values, changes, message",
    [
        (HYBRID, {"attention_bias": True}, "attention_bias must be False to be supported"),
        (DENSE, {"hidden_act": "gelu"}, "hidden_act must be 'silu' to be supported"),
        (HYBRID, {"use_sliding_window": True}, "use_sliding_window must be False"),
        (DENSE, {"layer_types": ["linear_attention"] * 4}, "layer_types must be a list of 4"),
        (
            DENSE,
            {"rope_scaling": {"type": "longrope"}},
            "rope_scaling.type must be 'yarn', 'llama3',",
        ),
        (HYBRID, {"attn_output_gate": False}, "attn_output_gate must be True to be supported"),
        (HYBRID, {"output_gate_type": "gelu"}, "output_gate_type must be 'silu' or"),
        (HYBRID, {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype must be 'float32'"),
        (HYBRID, {"decoder_sparse_step": 2}, "decoder_sparse_step must be 1 to be supported"),
        (HYBRID, {"mlp_only_layers": [0]}, "mlp_only_layers must be"),
        (HYBRID, {"norm_topk_prob": False}, "norm_topk_prob must be True to be supported"),
        (
            HYBRID,
            {"partial_rotary_factor": 0.3},
            "must give an even number of the 32 dims; got 0.3",
        ),
        (
            HYBRID,
            {"partial_rotary_factor": 2.0},
            "must give an even number of the 32 dims; got 2.0",
        ),
        (HYBRID, {"full_attention_interval": 5}, "=5 exceeds num_hidden_layers=4"),
        (HYBRID, {"text_config": 3}, "text_config must be an object; got 3"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(values, changes, message):
    with pytest.raises(ConfigError, match=message):
        read(values | changes)


def test_layers_are_read_from_either_spelling():
    interval = [type(block.mixer) for block in read(HYBRID).spec.blocks]
    assert interval == [GDN, GDN, GDN, GQA]
    words = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    blocks = read(HYBRID | {"layer_types": words}).spec.blocks
    assert [type(block.mixer) for block in blocks] == [GQA, GDN, GDN, GQA]


@pytest.mark.parametrize("values", [
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_type": "default",
                         "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
])  # fmt: skip
def test_a_head_turns_in_its_first_dims(values):
    of = {block.mixer for block in read(HYBRID | values).spec.blocks}
    [rope] = [mixer.rope for mixer in of if isinstance(mixer, GQA)]
    assert (rope.dim, rope.theta, rope.interleaved, rope.yarn) == (16, 1e6, False, None)
    [plain] = {block.mixer.rope.dim for block in read(DENSE).spec.blocks}
    [quarter] = {b.mixer.rope.dim for b in read(HYBRID).spec.blocks if isinstance(b.mixer, GQA)}
    assert (plain, quarter) == (32, 8)


@pytest.mark.parametrize("outer, inner, tied", [
    ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False),
    ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),
    ({}, {"tie_word_embeddings": True}, True),
    ({}, {}, False),
])  # fmt: skip
def test_the_outer_config_says_whether_the_head_is_tied(outer, inner, tied):
    text = {name: value for name, value in HYBRID.items() if name != "model_type"}
    nested = {"model_type": "qwen3_5_moe", "text_config": text | inner, **outer}
    assert read(nested).spec.tie_embeddings is tied


def test_qwen3_5_has_experts_or_not_by_its_type():
    def kinds(kind):
        values = HYBRID | {"model_type": kind, "intermediate_size": 96}
        return {type(block.feed_forward) for block in read(values).spec.blocks}

    assert kinds("qwen3_5") == kinds("qwen3_5_text") == {MLP}
    assert kinds("qwen3_5_moe") == kinds("qwen3_5_moe_text") == {MoE}


# Folders ------------------------------------------------------------------------------------------


def text_only(folder: Path, change=lambda tensors: tensors) -> Path:
    """The fused checkpoint as the text model alone is saved: other prefix, one tensor per expert,
    flat config.json."""
    folder.mkdir()
    tensors = {}
    for name, array in safetensors.numpy.load_file(FUSED / "model.safetensors").items():
        name = name.replace("model.language_model.", "model.")
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(zip(*np.split(array, 2, axis=1), strict=True)):
                stem = name.replace("gate_up_proj", str(expert))
                tensors |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            tensors |= {f"{stem}{e}.down_proj.weight": down for e, down in enumerate(array)}
        elif not name.startswith(("model.visual.", "mtp.")):
            tensors[name] = array
    tensors = {name: np.ascontiguousarray(array) for name, array in change(tensors).items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    nested = json.loads((FUSED / "config.json").read_text())
    flat = nested["text_config"] | {"tie_word_embeddings": nested["tie_word_embeddings"]}
    (folder / "config.json").write_text(json.dumps(flat))
    return folder


def test_every_spelling_of_a_checkpoint_gives_the_same_parameters(tmp_path):
    model, params = huggingface_checkpoint.load(FUSED)
    other, again = huggingface_checkpoint.load(text_only(tmp_path / "text"))
    assert model == other
    jax.tree.map(np.testing.assert_array_equal, params, again)


def test_what_is_missing_is_named_as_the_folder_spells_it(tmp_path):
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"

    def without(tensors):
        return {name: tensor for name, tensor in tensors.items() if name != lost}

    with pytest.raises(CheckpointError, match=f"missing '{lost}'"):
        huggingface_checkpoint.load(text_only(tmp_path / "text", without))
    folder = tmp_path / "fused"
    shutil.copytree(FUSED, folder)
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    lost = "model.language_model.layers.0.mlp.experts.down_proj"
    safetensors.numpy.save_file(without(tensors), file)
    with pytest.raises(CheckpointError, match=f"missing '{lost}'"):
        huggingface_checkpoint.load(folder)


def test_one_is_added_to_the_norms_in_float32():
    """Of w = 2**-10, bfloat16 would keep 1 of 1 + w."""
    tensors = safetensors.numpy.load_file(FUSED / "model.safetensors")
    model, params = huggingface_checkpoint.load(FUSED)
    flat = dict(nnx.to_flat_state(params))

    def stored(name):
        return tensors[f"model.language_model.{name}.weight"].astype(np.float32)

    found = flat["norm", "weight"][...]
    assert model.spec.stream.dtype == "bfloat16" and found.dtype == np.float32
    np.testing.assert_array_equal(found, 1 + stored("norm"))
    assert np.any(found != found.astype("bfloat16"))
    for name, *path in (
        ("input_layernorm", "norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("self_attn.q_norm", "mixer", "q_norm"),
        ("self_attn.k_norm", "mixer", "k_norm"),
    ):
        found = flat["segments", 0, "layers", 1, *path, "weight"][...]
        for repeat, layer in enumerate((1, 3)):
            np.testing.assert_array_equal(found[repeat], 1 + stored(f"layers.{layer}.{name}"))
    plain = flat["segments", 0, "layers", 0, "mixer", "norm", "weight"][...]
    np.testing.assert_array_equal(plain[0], stored("layers.0.linear_attn.norm"))
