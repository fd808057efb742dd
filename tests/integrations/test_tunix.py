"""Tunix with the engine as its rollout: its models, its vanilla rollout and its GRPO agree with it.

`pip install 'jaxattn[tunix]'` first; everything here is skipped without it.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxattn import Limits
from jaxattn.models import DecoderModel, load
from jaxattn.models.checkpoint import EMBEDDED
from jaxattn.models.weight_map.quantized_linears import with_fp8_linears
from jaxattn.text.tokenizer import ByteTokenizer

pytest.importorskip("tunix")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Tunix and what it imports

PAD = 255  # a byte that no text has
SIZES = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
PROMPTS = ["a", "def f(x):", "between"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen2 of random weights as the hub has them, whose likeliest token is often byte 0."""
    rng = np.random.default_rng(0)
    width, inner, kv = SIZES["hidden_size"], SIZES["intermediate_size"], 16
    shapes = {"model.embed_tokens.weight": (256, width)}
    for layer in range(SIZES["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.self_attn.{name}": shape
            for name, shape in {
                "q_proj.weight": (width, width), "k_proj.weight": (kv, width),
                "v_proj.weight": (kv, width), "o_proj.weight": (width, width),
                "q_proj.bias": (width,), "k_proj.bias": (kv,), "v_proj.bias": (kv,),
            }.items()
        }  # fmt: skip
        shapes |= {
            f"model.layers.{layer}.mlp.{name}_proj.weight": shape
            for name, shape in {
                "gate": (inner, width), "up": (inner, width), "down": (width, inner)
            }.items()
        }  # fmt: skip
    tensors = {name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()}
    tensors["model.embed_tokens.weight"][0] *= 4
    norms = ["model.norm.weight"] + [
        f"model.layers.{layer}.{name}_layernorm.weight"
        for layer in range(SIZES["num_hidden_layers"])
        for name in ("input", "post_attention")
    ]
    tensors |= {name: rng.uniform(0.5, 1.5, width) for name in norms}
    path = tmp_path_factory.mktemp("qwen2")
    save_file({k: v.astype(np.float32) for k, v in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(SIZES))
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    """Tunix's own Qwen2 with these weights."""
    from tunix.models.qwen2 import model, params

    config = model.ModelConfig(
        num_layers=2, vocab_size=256, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=8,
        num_kv_heads=2, rope_theta=10000, norm_eps=1e-6, use_tied_embedding=True,
    )  # fmt: skip
    return params.create_model_from_safe_tensors(str(folder), config, dtype=jnp.float32)


@pytest.fixture(scope="module")
def policy(folder):
    from jaxattn.integrations.tunix import Policy

    return Policy.of(*load(folder, dtype="float32"))


def mesh():
    return jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))


def rollout_config(**fields):
    from tunix.rl.rollout.base_rollout import RolloutConfig

    given = dict(max_prompt_length=12, max_tokens_to_generate=8, kv_cache_size=32)
    return RolloutConfig(**given | fields)


LIMITS = Limits(batch=4, max_model_len=32, prefill_chunk=16)


@pytest.fixture(scope="module")
def rollout(policy):
    from jaxattn.integrations.tunix import EngineRollout, TokenIds

    config = rollout_config(temperature=0.5, return_logprobs=True)
    made = EngineRollout(policy, TokenIds(ByteTokenizer(), PAD), mesh(), config, limits=LIMITS)
    yield made
    made.engine.close()


@pytest.fixture(scope="module")
def vanilla(theirs):
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.rollout.base_rollout import CacheConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    from jaxattn.integrations.tunix import TokenIds

    tokenizer = TokenizerAdapter(TokenIds(ByteTokenizer(), PAD))
    return VanillaRollout(theirs, tokenizer, CacheConfig(32, 2, 2, 8))


def logps(model, prompts, completions, temperature=1.0):
    """Tunix's log-probabilities of completions, as its losses compute them."""
    from tunix.rl.common import compute_per_token_logps

    return compute_per_token_logps(
        *nnx.split(model), prompts, completions, PAD, 0, temperature=temperature
    )


def padded(rows, length, left=False):
    found = np.full((len(rows), length), PAD, np.int32)
    for to, row in zip(found, rows, strict=True):
        to[length - len(row) if left else 0 :][: len(row)] = list(row)
    return jnp.asarray(found)


def test_the_policy_has_the_log_probabilities_of_tunix_model_beside_padding(policy, theirs):
    prompts = padded([b"a", b"def f(x):", b"between"], 12, left=True)
    completions = padded([b" return", b"", b" two"], 8)
    own, other = (logps(model, prompts, completions, 0.7) for model in (policy, theirs))
    there = np.asarray(completions != PAD)
    assert np.abs(own - other)[there].max() < 1e-4
    assert np.abs(other)[there].min() > 1e-3


def test_packed_sequences_have_the_logits_that_they_have_alone(policy):
    rows = [b"def f(x):", b"a", b"between"]
    tokens = jnp.asarray([[*b"".join(rows), PAD, PAD]])
    ids = jnp.asarray([[*np.repeat([1, 2, 3], [len(row) for row in rows]), 0, 0]])
    packed, cache = policy(tokens, None, None, None, segment_ids=ids)
    assert cache is None
    alone = [policy(jnp.asarray([list(row)]))[0][0] for row in rows]
    assert np.abs(packed[0, : ids.astype(bool).sum()] - np.concatenate(alone)).max() < 1e-5


def test_a_padding_token_within_a_sequence_is_of_the_sequence():
    from jaxattn.integrations.tunix.policy import sorted_segments

    ids = jnp.asarray([[0, 0, 1, 0, 1, 0], [1, 1, 2, 2, 0, 0], [0, 0, 0, 0, 0, 0]])
    assert sorted_segments(ids).tolist() == [
        [1, 1, 2, 2, 2, 0], [2, 2, 3, 3, 0, 0], [0, 0, 0, 0, 0, 0]
    ]  # fmt: skip


def test_a_greedy_rollout_is_tunix_vanilla_rollout(rollout, vanilla):
    config = rollout_config(temperature=0.0, top_p=None, return_logprobs=True)
    own, other = (each.generate(PROMPTS, config) for each in (rollout, vanilla))
    assert own.text == other.text
    assert [each.tolist() for each in own.tokens] == [each.tolist() for each in other.tokens]
    assert any(len(each) < 8 for each in own.tokens), "no completion ended by its stop token"
    np.testing.assert_array_equal(own.left_padded_prompt_tokens, other.left_padded_prompt_tokens)
    for mine, their in zip(own.logprobs, other.logprobs, strict=True):
        np.testing.assert_allclose(mine, their, atol=1e-4)


def test_a_kept_stop_token_is_the_last_of_its_completion_and_no_part_of_the_text(rollout):
    config = rollout_config(temperature=0.0, return_logprobs=True)
    plain = rollout.generate(PROMPTS, config)
    rollout.keep_eos = True
    kept = rollout.generate(PROMPTS, config)
    rollout.keep_eos = False
    ends = [[] if len(each) == 8 else [0] for each in plain.tokens]
    wanted = [[*each.tolist(), *end] for each, end in zip(plain.tokens, ends, strict=True)]
    assert [each.tolist() for each in kept.tokens] == wanted
    assert [len(each) for each in kept.logprobs] == [len(each) for each in wanted]
    assert kept.text == plain.text and [0] in ends


@pytest.mark.parametrize("top_k", [None, 5])
def test_sampled_tokens_have_the_log_probabilities_of_the_policy_at_their_temperature(
    rollout, policy, top_k
):
    config = rollout_config(temperature=0.5, top_k=top_k, return_logprobs=True, seed=3)
    found = rollout.generate(PROMPTS, config)
    prompts = jnp.asarray(found.left_padded_prompt_tokens)
    completions = padded(found.tokens, 8)
    wanted = np.asarray(logps(policy, prompts, completions, 0.5))
    scored = np.asarray(rollout.get_per_token_logps(prompts, completions))
    for row, own in enumerate(found.logprobs):
        np.testing.assert_allclose(own, wanted[row, : len(own)], atol=1e-4)
        np.testing.assert_allclose(scored[row, : len(own)], wanted[row, : len(own)], atol=1e-4)
        assert not scored[row, len(own) :].any()


def test_a_seed_repeats_a_rollout_and_a_later_call_draws_anew(rollout):
    config = rollout_config(temperature=1.0, seed=jax.random.key(5))
    calls, rollout._calls = rollout._calls, 0
    first, second = (rollout.generate(PROMPTS, config).tokens for _ in range(2))
    rollout._calls = 0
    again = rollout.generate(PROMPTS, config).tokens
    rollout._calls = calls
    assert [each.tolist() for each in first] == [each.tolist() for each in again]
    assert [each.tolist() for each in first] != [each.tolist() for each in second]


def test_updated_parameters_are_what_the_engine_samples_from(rollout, policy):
    config = rollout_config(temperature=0.0, return_logprobs=True)
    before = rollout.generate(PROMPTS, config)
    changed = jax.tree.map(lambda x: x * 1.25, nnx.state(policy, nnx.Param))
    with jax.transfer_guard("disallow_explicit"):
        rollout.update_params(changed, (nnx.Param,))
    found = rollout.generate(PROMPTS, config)
    rollout.update_params(nnx.state(policy, nnx.Param), (nnx.Param,))
    graphdef, _ = nnx.split(policy)
    prompts, completions = jnp.asarray(found.left_padded_prompt_tokens), padded(found.tokens, 8)
    wanted = np.asarray(logps(nnx.merge(graphdef, changed), prompts, completions))
    for row, own in enumerate(found.logprobs):
        np.testing.assert_allclose(own, wanted[row, : len(own)], atol=1e-4)
    again = rollout.generate(PROMPTS, config)
    for one, other in zip(before.logprobs, again.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_bad_input_is_refused_by_name(rollout, policy, theirs):
    from jaxattn.integrations.tunix import EngineRollout, Policy, TokenIds

    config = rollout_config()
    with pytest.raises(TypeError, match="the actor must be a .*Policy, got Qwen2"):
        EngineRollout(theirs, rollout.tokenizer, mesh(), config)
    with pytest.raises(TypeError, match="prompt 0 must be a string, got ndarray"):
        rollout.generate([np.array(["a", "a"])], config)
    with pytest.raises(TypeError, match="accepts only text; got images"):
        rollout.generate(["a"], config, images=[None])
    with pytest.raises(ValueError, match="prompt 1 has 30 tokens.*max_model_len=32"):
        rollout.generate(["a", "a" * 30], config)
    with pytest.raises(ValueError, match="got LoRAParam under a, b. LoRA is not supported"):
        rollout.update_params({"a": 0, "b": 0}, (nnx.LoRAParam,))
    with pytest.raises(ValueError, match="Policy has no cache"):
        policy(jnp.zeros((1, 2), jnp.int32), cache={"layer_0": None})
    with pytest.raises(TypeError, match="model must be a jaxattn.models.DecoderModel, got Qwen2"):
        Policy(theirs, None)
    fp8 = with_fp8_linears(DecoderModel(load(EMBEDDED)[0].spec))
    with pytest.raises(ValueError, match="in_proj_qkvz.weight' is float8_e4m3fn"):
        Policy(fp8, None)
    with pytest.raises(ValueError, match="pad_id must be from 0 to 255; got 256"):
        TokenIds(ByteTokenizer(), 256)


@pytest.mark.slow(reason="a run of GRPO; its rollout and its policy are tested above")
def test_grpo_of_tunix_trains_through_the_engine(folder):
    import optax
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role

    from jaxattn.integrations.tunix import EngineRollout, Policy, TokenIds

    rewards = []

    def reward(prompts, completions, **others):
        found = [sum(c.isalpha() for c in text) / 8 for text in completions]
        rewards.append(float(np.mean(found)))
        return found

    cluster = RLCluster(
        actor=Policy.of(*load(folder), dtype="bfloat16", param_dtype="float32"),
        tokenizer=TokenIds(ByteTokenizer(), PAD),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.ROLLOUT, Role.REFERENCE), mesh()),
            rollout_engine=functools.partial(EngineRollout, limits=LIMITS),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(1e-2), eval_every_n_steps=1000, max_steps=12
            ),
            rollout_config=rollout_config(temperature=1.0, data_type="bfloat16"),
        ),
    )
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=16, beta=0.0), reward_fns=reward)
    learner.train({"prompts": np.array(["x"])} for _ in range(100))
    cluster.rollout.engine.close()
    assert len(rewards) == 12
    assert np.mean(rewards[-3:]) > 1.5 * np.mean(rewards[:3]), rewards
