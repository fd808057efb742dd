"""GLM-4.7-Flash: which of its steps a kernel serves, and how its config.json says the layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.core.rope import RopeConfig
from jaxattn.models.blocks import MLP, MoE
from jaxattn.models.families.fields import ConfigError, Fields
from jaxattn.models.registry import read_model
from jaxattn.nn import MultiHeadLatentAttention
from tests.helpers.kernel_cases import both_devices

HEADS, HIDDEN, PAGE = 20, 64, 16
TABLES = np.array([[3, 1], [0, 2]], np.int32)
FIELDS = {
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
}


def attention() -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(
        HIDDEN,
        HEADS,
        q_lora_rank=48,
        qk_nope_head_dim=192,
        v_head_dim=256,
        rope=RopeConfig(dim=64),
        rngs=nnx.Rngs(0),
    )


@both_devices
def test_decoding_by_the_kernel_is_decoding_by_xla(implementation):
    module, lens = attention(), np.array([17, 3], np.int32)
    x = jax.random.normal(jax.random.key(1), (2, 1, HIDDEN), jnp.bfloat16)
    pages = jax.random.normal(jax.random.key(2), (4, PAGE, 576), jnp.bfloat16)
    found = [
        module.decode(
            x, pages, block_tables=TABLES, seq_lens=lens, implementation=each
        )[:2]
        for each in (implementation, "xla")
    ]  # fmt: skip
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), atol=2e-2, rtol=2e-2
        )


def test_the_prefill_kernel_refuses_heads_of_256_and_says_why():
    lens = np.array([5, 3], np.int32)
    arguments = dict(block_tables=TABLES, seq_lens=lens, query_lens=lens)
    x, pages = jnp.ones((2, 5, HIDDEN), jnp.bfloat16), jnp.zeros((4, PAGE, 576), jnp.bfloat16)
    with pytest.raises(
        NotImplementedError, match="128 [+] 64 .* of 128, and got 192 [+] 64 and 256"
    ):
        attention().prefill(x, pages, **arguments, implementation="mosaic_gpu_interpret")


def kinds(**changes) -> list[type]:
    model, _, _ = read_model(Fields(FIELDS | changes, "config.json"))
    return [type(block.feed_forward) for block in model.spec.blocks]


def test_the_dense_layers_are_read_from_either_spelling():
    assert kinds() == [MLP, MoE, MoE]
    words = ["dense", "dense", "sparse"]
    assert kinds(mlp_layer_types=words) == [MLP, MLP, MoE]


@pytest.mark.parametrize("words", [["dense", "sparse"], "dense", ["dense", "sparse", "linear"]])
def test_words_that_are_not_the_layers_are_named(words):
    with pytest.raises(ConfigError, match="mlp_layer_types must be a list of 3 words, 'dense' or"):
        kinds(mlp_layer_types=words)


@pytest.mark.parametrize("changes", [
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
])  # fmt: skip
def test_heads_that_are_rotated_in_part_are_refused(changes):
    with pytest.raises(ConfigError, match="partial_rotary_factor is implemented as 1.0 only"):
        kinds(**changes)


def test_the_prediction_layer_is_not_read():
    _, placed, skipped = read_model(Fields(FIELDS | {"num_nextn_predict_layers": 1}, "config.json"))
    assert skipped == ("model.layers.3.",)
    assert not any(each.name.startswith(skipped) for each in placed)
