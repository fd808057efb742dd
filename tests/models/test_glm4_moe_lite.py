"""GLM-4.7-Flash: which of its steps a kernel serves, and how its config.json says the layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.models.blocks import MLP, MoE
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.registry import read_model
from jaxattn.nn import MultiHeadLatentAttention

HEADS, HIDDEN, PAGE = 20, 64, 16
TABLES = np.array([[1, 0]], np.int32)
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


def decoded(implementation: str):
    """The output of 17 tokens' last one, and the pages."""
    x = jax.random.normal(jax.random.key(1), (1, 1, HIDDEN), jnp.bfloat16)
    pages = jax.random.normal(jax.random.key(2), (2, PAGE, 576), jnp.bfloat16)
    lens = np.array([17], np.int32)
    return attention().decode(
        x, pages, block_tables=TABLES, seq_lens=lens, implementation=implementation
    )[:2]


def test_the_decode_kernel_refuses_no_number_of_heads():
    """What it computes for 20 heads is in tests/kernels/mla/decode."""
    y, pages = jax.eval_shape(lambda: decoded("mosaic_gpu_interpret"))
    assert (y.shape, pages.shape) == ((1, 1, HIDDEN), (2, PAGE, 576))


@pytest.mark.gpu
def test_decoding_by_the_kernel_is_decoding_by_xla():
    for one, other in zip(decoded("mosaic_gpu"), decoded("xla"), strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), atol=2e-2, rtol=2e-2
        )


def test_the_prefill_kernel_takes_keys_of_192_and_64_where_it_is_named():
    lens = np.array([5], np.int32)
    arguments = dict(block_tables=TABLES, seq_lens=lens, query_lens=lens)

    def prefill():
        x, pages = jnp.ones((1, 5, HIDDEN), jnp.bfloat16), jnp.zeros((2, PAGE, 576), jnp.bfloat16)
        return attention().prefill(x, pages, **arguments, implementation="mosaic_gpu_interpret")

    out, pages = jax.eval_shape(prefill)
    assert out.shape == (1, 5, HIDDEN) and pages.shape == (2, PAGE, 576)


def kinds(**changes) -> list[type]:
    published = read_model(ConfigFields(FIELDS | changes, "config.json"))
    return [type(block.feed_forward) for block in published.model.spec.blocks]


def test_the_dense_layers_are_read_from_either_spelling():
    assert kinds() == [MLP, MoE, MoE]
    words = ["dense", "dense", "sparse"]
    assert kinds(mlp_layer_types=words) == [MLP, MLP, MoE]


@pytest.mark.parametrize("words", [["dense", "sparse"], "dense", ["dense", "sparse", "linear"]])
def test_words_that_are_not_the_layers_are_named(words):
    with pytest.raises(
        ConfigError, match="mlp_layer_types must be a list of 3 values, each 'dense' or"
    ):
        kinds(mlp_layer_types=words)


@pytest.mark.parametrize("changes", [
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
])  # fmt: skip
def test_heads_that_are_rotated_in_part_are_refused(changes):
    with pytest.raises(ConfigError, match="partial_rotary_factor must be 1.0 to be supported"):
        kinds(**changes)


def test_the_prediction_layer_is_not_read():
    published = read_model(ConfigFields(FIELDS | {"num_nextn_predict_layers": 1}, "config.json"))
    assert published.skipped == ("model.layers.3.",)
    assert not any(each.name.startswith(published.skipped) for each in published.placed())
