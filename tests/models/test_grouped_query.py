"""Families of grouped-query attention alone: what their config.json may say, and biases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.core.numerics.rope import Llama3RopeScaling, RopeConfig, inv_freq
from jaxattn.models.blocks import GQA, MLP, MoE
from jaxattn.models.catalog import model_resolver
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.registry import read_model
from jaxattn.models.sharding.axis_sharding import own
from jaxattn.models.sharding.decoder import cuts_of, divided
from jaxattn.nn import GroupedQueryAttention
from jaxattn.parallel import Parallel
from tests.helpers.at_once import at_once

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 5e5,
}
GROWS = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": None}
QWEN2, QWEN3 = (LLAMA | {"model_type": name} for name in ("qwen2", "qwen3"))
GLM = LLAMA | {
    "model_type": "glm4_moe",
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
SMOL = LLAMA | {"model_type": "smollm3", "num_hidden_layers": 8}
OLMO = LLAMA | {"model_type": "olmo3", "num_hidden_layers": 8, "sliding_window": 16}
MINISTRAL = MISTRAL | {"model_type": "ministral3"}
MINIMAX = LLAMA | {
    "model_type": "minimax_m2",
    "head_dim": 32,
    "rotary_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def read(values):
    return read_model(ConfigFields(values, "config.json")).model


def mixer_of(values) -> GQA:
    [mixer] = {block.mixer for block in read(values).spec.blocks}
    return mixer


@pytest.mark.parametrize(
    "values, changes, message",
    [
        (LLAMA, {"mlp_bias": True}, "mlp_bias must be False to be supported"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act must be 'silu' to be supported"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved must be False to be supported"),
        (
            LLAMA,
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor must be 1.0 to be supported",
        ),
        (
            LLAMA,
            {"rope_scaling": {"type": "longrope", "factor": 2}},
            "must be 'yarn', 'llama3', 'linear' or 'dynamic' to be supported; got 'longrope'",
        ),
        (LLAMA, {"num_attention_heads": 7}, "num_attention_heads must divide hidden_size=64"),
        (LLAMA, {"num_key_value_heads": 0}, "num_key_value_heads must be an integer from 1"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window must be an integer from 1"),
        (MISTRAL, {"layer_types": ["sliding_attention"] * 2}, "layer_types must be a list of 2"),
        (QWEN2, {"use_sliding_window": 1}, "use_sliding_window must be true or false; got 1"),
        (
            QWEN2,
            {"layer_types": ["full_attention", "sliding_attention"]},
            "field sliding_window is missing",
        ),
        (QWEN2, {"layer_types": ["chunked_attention"] * 2}, "must be a list of 2 values"),
        (GLM, {"hidden_act": "gelu"}, "hidden_act must be 'silu' to be supported"),
        (GLM, {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid' to be supported"),
        (GLM, {"use_qk_norm": 1}, "use_qk_norm must be true or false; got 1"),
        (GLM, {"partial_rotary_factor": 0.3}, "must give an even number of the 16 dims; got 0.3"),
        (SMOL, {"mlp_bias": True}, "mlp_bias must be False to be supported"),
        (SMOL, {"no_rope_layers": [1, 0]}, "no_rope_layers must be a list of at least 8 numbers"),
        (SMOL, {"no_rope_layers": [2] * 8}, "no_rope_layers must be a list of at least 8 numbers"),
        (SMOL, {"layer_types": ["sliding_attention"] * 8}, "sliding_window must be an integer"),
        (OLMO, {"sliding_window": None}, "sliding_window must be an integer from 1"),
        (
            OLMO,
            {"layer_types": ["chunked_attention"] * 8},
            "layer_types must be a list of 8 values",
        ),
        (OLMO, {"rope_parameters": {"rope_theta": 1e4}}, "sliding_attention is missing"),
        (MINISTRAL, {"rope_scaling": GROWS | {"llama_4_scaling_beta": -1}}, "must be a finite"),
        (MINISTRAL, {"layer_types": ["sliding_attention"] * 2}, "layer_types must be a list of 2"),
        (MINIMAX, {"rotary_dim": 15}, "must give an even number of the 32 dims"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type must be 'per_layer' to be supported"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid' to be supported"),
        (MINIMAX, {"attn_type_list": [1, 0]}, "attn_type_list must be"),
        (MINIMAX, {"shared_intermediate_size": 8}, "shared_intermediate_size must be 0"),
        (GPT_OSS, {"hidden_act": "gelu"}, "hidden_act must be 'silu' to be supported"),
        (GPT_OSS, {"swiglu_limit": 0}, "swiglu_limit must be a finite number above 0"),
        (GPT_OSS, {"num_local_experts": 0}, "num_local_experts must be an integer from 1"),
        (
            GPT_OSS,
            {"quantization_config": {"quant_method": "nvfp4"}},
            "quant_method must be 'fp8' or 'compressed-tensors' or 'mxfp4' or",
        ),
        (MINIMAX, {"attention_bias": True}, "attention_bias must be False to be supported"),
        (MOE, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be an"),
        (MOE, {"num_experts": 0}, "num_experts must be an integer from 1"),
        (
            MOE,
            {"mlp_only_layers": [4]},
            "mlp_only_layers must be a list of layers from 0 to 3; got",
        ),
        (
            MOE,
            {"mlp_only_layers": 1},
            "mlp_only_layers must be a list of layers from 0 to 3; got 1",
        ),
        (MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer from 1"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(values, changes, message):
    with pytest.raises(ConfigError, match=message):
        read(values | changes)


def test_a_head_is_as_wide_as_the_heads_divide_the_hidden_numbers():
    assert mixer_of(LLAMA).head_dim == 16 == mixer_of(LLAMA | {"head_dim": None}).head_dim
    assert mixer_of(LLAMA | {"head_dim": 32}).head_dim == 32
    alone = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert (
        mixer_of(alone).num_kv_heads
        == 4
        == mixer_of(alone | {"num_key_value_heads": None}).num_kv_heads
    )


def test_llama3_stretches_its_context():
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    expected = RopeConfig(16, 5e5, False, llama3=Llama3RopeScaling(8, 1, 4, 8192))
    assert mixer_of(LLAMA | {"rope_scaling": scaling}).rope == expected


def without(values, *names):
    return {name: value for name, value in values.items() if name not in names}


def test_scalings_of_rope_mean_what_transformers_computes():
    def of(**scaling):
        return mixer_of(LLAMA | {"max_position_embeddings": 64, "rope_scaling": scaling}).rope

    linear = of(type="linear", factor=3.0)
    assert linear.linear == 3 and linear.llama3 is None
    np.testing.assert_allclose(inv_freq(linear), inv_freq(mixer_of(LLAMA).rope) / 3, rtol=2e-7)
    # Up to max_position_embeddings tokens, which no row exceeds.
    assert of(rope_type="dynamic", factor=3.0) == mixer_of(LLAMA).rope
    yarn = of(rope_type="yarn", type="linear", factor=4.0, beta_fast=None, beta_slow=0).yarn
    assert yarn.original_max_position_embeddings == 64
    assert (yarn.beta_fast, yarn.beta_slow) == (32, 1)


@pytest.mark.parametrize("values", [LLAMA, SMOL, OLMO, QWEN3, MOE], ids=lambda v: v["model_type"])
def test_all_four_projections_have_biases_where_it_says_so(values):
    for wanted in (False, True):
        mixers = {b.mixer for b in read(values | {"attention_bias": wanted}).spec.blocks}
        assert all((m.biases, m.out_bias) == (wanted, wanted) for m in mixers)


def test_windows_of_qwen_begin_behind_the_layers_without():
    def windows(values):
        return [block.mixer.window for block in read(values).spec.blocks]

    used = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 3}
    for values in (QWEN2, QWEN3):
        assert windows(values | {"sliding_window": 8}) == [None] * 2
        assert windows(values | used) == [None] * 3  # of fewer than max_window_layers' 28
        assert windows(values | used | {"max_window_layers": 1}) == [None, 8, 8]
        words = ["sliding_attention", "full_attention", "sliding_attention"]
        assert windows(values | used | {"layer_types": words}) == [8, None, 8]
        assert windows(values | used | {"sliding_window": None}) == [None] * 3
    assert windows(MOE | used | {"max_window_layers": 2}) == [8] * 3


@pytest.mark.parametrize(
    "values, missing, wanted",
    [
        (GPT_OSS | {"rope_parameters": {"rope_type": "default"}}, ("head_dim", "rope_theta"),
         {"head_dim": 64, "rope_theta": 150000.0}),
        (GPT_OSS, ("rms_norm_eps", "attention_bias"), {"rms_norm_eps": 1e-5}),
        (MINIMAX, ("rope_theta", "head_dim"), {"rope_theta": 5e6, "head_dim": 128}),
        (SMOL, ("rope_theta", "tie_word_embeddings"),
         {"rope_theta": 2e6, "tie_word_embeddings": True}),
        (OLMO, ("rope_theta", "rms_norm_eps"), {"rope_theta": 5e5, "rms_norm_eps": 1e-5}),
        (GLM, ("rms_norm_eps",), {"rms_norm_eps": 1e-5}),
        (MINISTRAL, ("head_dim", "sliding_window", "rms_norm_eps"),
         {"head_dim": 128, "sliding_window": None, "rms_norm_eps": 1e-5}),
        (QWEN3, ("head_dim",), {"head_dim": 128}),
        (MOE, ("head_dim",), {"head_dim": 16}),
    ],
)  # fmt: skip
def test_missing_fields_have_the_values_of_transformers_in_each_family(values, missing, wanted):
    assert read(without(values, *missing)).spec == read(values | wanted).spec


@pytest.mark.parametrize("values", [GPT_OSS, MINISTRAL], ids=lambda v: v["model_type"])
def test_families_that_stretch_rope_by_default_have_to_say_it(values):
    with pytest.raises(ConfigError, match="field rope_parameters is missing"):
        read(without(values, "rope_theta"))


def test_all_layers_are_dense_where_more_are_than_there_are():
    blocks = read(GLM | {"first_k_dense_replace": 3, "intermediate_size": 64}).spec.blocks
    assert [type(block.feed_forward) for block in blocks] == [MLP, MLP]


def test_a_window_holds_in_every_layer_of_mistral():
    assert mixer_of(MISTRAL).window is None
    assert mixer_of(MISTRAL | {"sliding_window": 4096}).window == 4096
    words = ["sliding_attention"] * 2
    assert mixer_of(MISTRAL | {"sliding_window": 8, "layer_types": words}).window == 8
    assert mixer_of(LLAMA | {"sliding_window": 8}).window is None  # Llama knows no such field


def test_every_fourth_layer_of_smollm3_rotates_nothing():
    def rotated(values):
        return [block.mixer.rope.theta is not None for block in read(values).spec.blocks]

    assert rotated(SMOL) == [True, True, True, False] * 2
    assert rotated(SMOL | {"no_rope_layer_interval": 2}) == [True, False] * 4
    assert rotated(SMOL | {"no_rope_layers": [0, 1] * 5}) == [False, True] * 4
    caches = {cache.name: cache.layers for cache in read(SMOL).caches}
    assert caches == {"keys and values": 6, "keys and values without rotation": 2}
    windows = SMOL | {"use_sliding_window": True, "sliding_window": 9}
    assert [block.mixer.window for block in read(windows).spec.blocks] == [None] * 3 + [9] + (
        [None] * 3 + [9]
    )


def test_olmo_stretches_only_layers_without_a_window():
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    spelled = OLMO | {"rope_scaling": yarn}
    nested = {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    nested["full_attention"] = yarn | {"rope_theta": 5e5}
    blocks = read(spelled).spec.blocks
    assert read(OLMO | {"rope_parameters": nested}).spec.blocks == blocks
    assert all(block.norms_after and block.mixer.heads_norm for block in blocks)
    found = [(block.mixer.window, block.mixer.rope.yarn is not None) for block in blocks]
    assert found == ([(16, False)] * 3 + [(None, True)]) * 2


def test_queries_of_ministral_grow_behind_its_trained_context():
    grown = mixer_of(MINISTRAL | {"rope_scaling": GROWS}).query_scaling
    np.testing.assert_allclose(
        grown.factor(np.array([0, 15, 16, 47])), [1, 1, *(1 + 0.1 * np.log([2, 3]))], rtol=1e-6
    )
    assert mixer_of(MINISTRAL).query_scaling is None
    # The text model of a checkpoint with a vision tower, which may be Mistral's.
    inner = {"text_config": MINISTRAL | {"rope_scaling": GROWS}, "model_type": "mistral3"}
    assert mixer_of(inner).query_scaling == grown
    published = read_model(ConfigFields(inner, "config.json"))
    assert "vision_tower." in published.skipped and "multi_modal_projector." in published.skipped
    assert model_resolver.from_config("m", inner, "config.json").unread == "the vision tower"


def test_minimax_skips_its_prediction_layers():
    fields = ConfigFields(MINIMAX | {"num_mtp_modules": 3, "mtp_transformer_layers": 1}, "")
    assert read_model(fields).skipped == tuple(f"model.layers.{2 + n}." for n in range(3))
    assert mixer_of(MINIMAX).rope.dim == 16 and mixer_of(MINIMAX).heads_norm


def test_every_other_layer_of_gpt_oss_has_a_window():
    blocks = read(GPT_OSS).spec.blocks
    assert [block.mixer.window for block in blocks] == [16, None] * 2
    mixer, experts = blocks[0].mixer, blocks[0].feed_forward
    assert mixer.sinks and mixer.biases and mixer.out_bias and experts.biases
    assert (experts.activation.alpha, experts.activation.limit) == (1.702, 7.0)
    assert not read(GPT_OSS | {"attention_bias": False}).spec.blocks[0].mixer.out_bias


def test_glm_turns_half_of_a_head_and_has_biases_and_norms_where_it_says_so():
    plain, own = mixer_of(GLM), {"use_qk_norm": True, "attention_bias": True}
    assert (plain.rope.dim, plain.biases, plain.qk_norm) == (8, False, False)
    assert (mixer_of(GLM | own).biases, mixer_of(GLM | own).qk_norm) == (True, True)
    rope = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25}
    assert mixer_of(GLM | {"rope_parameters": rope}).rope.dim == 4
    assert [type(block.feed_forward) for block in read(GLM).spec.blocks] == [MLP, MoE]


def test_glm_skips_its_prediction_layer():
    fields = ConfigFields(GLM | {"num_nextn_predict_layers": 1}, "config.json")
    assert read_model(fields).skipped == ("model.layers.2.",)


def test_qwen2_alone_always_has_biases():
    assert mixer_of(QWEN2).biases and not mixer_of(QWEN2).qk_norm
    assert not any(mixer_of(values).biases for values in (LLAMA, MISTRAL, MOE))
    assert mixer_of(MOE).qk_norm


@pytest.mark.parametrize("changes, kinds", [
    ({}, [MoE] * 4),
    ({"decoder_sparse_step": 2}, [MLP, MoE, MLP, MoE]),
    ({"mlp_only_layers": [0, 3]}, [MLP, MoE, MoE, MLP]),
    ({"mlp_only_layers": None}, [MoE] * 4),
])  # fmt: skip
def test_experts_are_in_the_layers_that_the_configuration_says(changes, kinds):
    blocks = read(MOE | changes).spec.blocks
    assert [type(block.feed_forward) for block in blocks] == kinds


def test_weights_of_chosen_experts_are_normalized_if_the_configuration_says_so():
    def normalized(values):
        return read(values).spec.blocks[0].feed_forward.router.normalize

    assert not normalized(MOE) and normalized(MOE | {"norm_topk_prob": True})
    # As transformers spells it.
    spelled = {name: value for name, value in MOE.items() if name != "num_experts"}
    assert read(spelled | {"num_local_experts": 8}) == read(MOE)


# --- biases


SIZES = dict(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16)
ROPE = RopeConfig(16, 1e4, False)


def modules(gated: bool = False, dtype="float32"):
    """One with biases, and one without whose input has a last number of 1 that adds them."""
    options = dict(rope=ROPE, gated=gated, dtype=dtype, rngs=nnx.Rngs(0))
    biased = GroupedQueryAttention(**SIZES, biases=True, **options)
    for number, name in enumerate(("q_bias", "k_bias", "v_bias")):
        bias = getattr(biased, name)
        bias.set_value(jax.random.normal(jax.random.key(number), bias.shape))
    plain = GroupedQueryAttention(**SIZES | {"hidden_size": 33}, **options)
    for each in "qkv":
        weight = getattr(biased, f"{each}_proj").weight[...]
        bias = getattr(biased, f"{each}_bias")[...]
        getattr(plain, f"{each}_proj").weight.set_value(jnp.vstack([weight, bias]))
    out = biased.o_proj.weight[...]
    plain.o_proj.weight.set_value(jnp.hstack([out, jnp.zeros((64, 1))]))
    return biased, plain


@pytest.mark.slow_cases(reason="a bias without a gate; found by the same biases beside gates too")
@pytest.mark.parametrize("gated", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_bias_is_what_a_number_of_one_adds(gated):
    biased, plain = modules(gated)
    x = jax.random.normal(jax.random.key(7), (2, 9, 32))
    wide = jnp.concatenate([x, jnp.ones((2, 9, 1))], axis=-1)
    cache = jnp.zeros((4, 2, 4, 2, 16))
    tables = jnp.array([[0, 1], [2, 3]])
    lens, news = jnp.array([6, 3]), jnp.array([6, 3])

    def computed(module, tokens):
        addressing = dict(block_tables=tables, query_lens=news, seq_lens=lens)
        y, filled = module.prefill(tokens[:, :6], cache, **addressing)
        addressing = dict(block_tables=tables, seq_lens=lens + 1)
        z, filled, _ = module.decode(tokens[:, 6:7], filled, **addressing)
        return y[0, :6, :32], z[..., :32], filled

    # What whole sequences give is compared with transformers in test_parity, with Qwen2's biases.
    found = at_once(computed, biased, x), at_once(computed, plain, wide)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *found)


def test_a_product_and_its_bias_are_rounded_once():
    biased, _ = modules(dtype="bfloat16")
    x = jax.random.normal(jax.random.key(7), (1, 5, 32)).astype(jnp.bfloat16)
    weight = biased.q_proj.weight[...].astype(jnp.bfloat16).astype(jnp.float32)
    exact = x.astype(jnp.float32) @ weight + biased.q_bias[...]
    q = biased._projected(x)[0]
    assert q.dtype == jnp.bfloat16
    np.testing.assert_array_equal(q, exact.astype(jnp.bfloat16).reshape(q.shape))


@pytest.mark.parametrize("tensor", [2, 4])
def test_gpus_divide_biases_as_the_columns_that_they_are_added_to(tensor):
    """With four GPUs two of them share a key-value head."""
    model = read(QWEN2)
    layout = Parallel(tensor=tensor)
    local = divided(model, layout)
    shapes = dict(nnx.to_flat_state(local.param_shapes()))
    params = dict(nnx.to_flat_state(model.param_shapes()))
    for each in "qkv":
        weight, bias = (("segments", 0, "layers", 0, "mixer", *last)
                        for last in ((f"{each}_proj", "weight"), (f"{each}_bias",)))  # fmt: skip
        # A bias that says which column it is of.
        shape = params[weight].shape
        numbers = np.broadcast_to(np.arange(shape[-1], dtype=np.float32), shape)
        for gpu in range(tensor):
            columns = own(numbers, cuts_of(model, layout, weight), layout, gpu)[0, 0]
            share = own(numbers[:, 0], cuts_of(model, layout, bias), layout, gpu)[0]
            np.testing.assert_array_equal(share, columns)
            assert share.shape == shapes[bias].shape[1:]


def test_blocks_with_and_without_biases_differ():
    mixer = mixer_of(QWEN2)
    assert mixer != dataclasses.replace(mixer, biases=False)
