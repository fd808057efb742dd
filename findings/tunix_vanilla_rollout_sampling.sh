#!/usr/bin/env bash
# Tunix's vanilla rollout: a temperature of 0 is not greedy, every call draws the same noise, and the log-probabilities
# that it gives of old samples leave the temperature out, which the loss does not.
#
# Seen with google-tunix 0.1.7 and jax 0.11.2 on a CPU.
#
# - `RolloutConfig.temperature`: "Zero means greedy sampling". With the default top_p of 1 the sampler divides the logits
#   by it, and takes the first token whose logit is positive.
# - `RolloutConfig.seed` is fixed for a run, and no seed is `PRNGKey(0)`. Two calls for equal prompts return equal samples.
# - `VanillaRollout.get_per_token_logps`, which GRPO calls with num_iterations above 1, computes them at temperature 1.
#   `grpo_loss_fn` divides the logits by the rollout's temperature, whose default is 0.9. So the importance ratio of fresh
#   samples, exp(difference), is not 1.
# - The token that ended a completion is left out, so the loss never teaches the policy to end. The source of the vLLM
#   rollout keeps it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile google-tunix==0.1.7 jax==0.11.2 jaxlib==0.11.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.sampler import sample_top_p
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.qwen2.model import ModelConfig, Qwen2
from tunix.rl.common import compute_per_token_logps
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

token, _ = sample_top_p(jnp.array([[[-3.0, 1.0, -2.0, 9.0]]]), jax.random.key(0), 0.0, 1.0, None)
print("temperature 0: token", int(token[0]), "of logits -3, 1, -2, 9")
assert int(token[0]) == 1


class Bytes:
    encode = staticmethod(lambda text, **_: list(text.encode()))
    decode = staticmethod(lambda ids, **_: bytes(ids).decode(errors="replace"))
    bos_id = staticmethod(lambda: None)
    eos_id = staticmethod(lambda: 0)
    pad_id = staticmethod(lambda: 255)


config = ModelConfig(
    num_layers=2, vocab_size=256, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=8, num_kv_heads=2,
    rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
)
model = Qwen2(config, rngs=nnx.Rngs(0))
model.embedder.input_embedding[...] *= 0.3  # logits of order 1
rollout = VanillaRollout(model, TokenizerAdapter(Bytes()), CacheConfig(64, 2, 2, 8))
asked = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=24, temperature=0.5, return_logprobs=True)
first, second = (rollout.generate(["prompt"] * 4, asked) for _ in range(2))
same = [one.tolist() == other.tolist() for one, other in zip(first.tokens, second.tokens)]
print("two calls, equal samples:", same)
assert all(same)

rows = [np.pad(each, (0, 24 - len(each)), constant_values=255) for each in first.tokens]
prompts, completions = jnp.asarray(first.left_padded_prompt_tokens), jnp.asarray(np.array(rows))
old = rollout.get_per_token_logps(prompts, completions)
new = compute_per_token_logps(*nnx.split(model), prompts, completions, 255, 0, temperature=asked.temperature)
sampled = np.concatenate(first.logprobs)
there = np.asarray(completions != 255)
ratio = np.exp(np.asarray(new - old))[there]
print(f"importance ratios of fresh samples: {ratio.min():.3f} to {ratio.max():.3f}")
assert np.abs(np.asarray(new)[there] - sampled).max() < 1e-3  # the loss has what the sampler sampled from
assert ratio.min() < 0.5 and ratio.max() > 1.5

ended = int(np.concatenate(first.tokens)[2])
[found] = rollout.generate(["prompt"], RolloutConfig(
    max_prompt_length=8, max_tokens_to_generate=24, temperature=0.5, eos_tokens=[ended])).tokens
print("tokens before the one that ended it:", found.tolist(), "ended by", ended)
assert len(found) <= 2 and ended not in found
PY
