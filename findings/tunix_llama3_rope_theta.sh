#!/usr/bin/env bash
# Tunix's Llama 3 ignores the rope_theta of its configuration: it always rotates by 1,000,000.
#
# Seen with google-tunix 0.1.7 and jax 0.11.2 on a CPU. `tunix.models.llama3.model.ModelConfig` says 500,000 for all
# published sizes, but `Attention` calls `apply_rope` without it, whose default is 1,000,000. So models of three
# configurations that differ in rope_theta alone have equal logits. Tunix's Qwen2 reads the field.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile google-tunix==0.1.7 jax==0.11.2 jaxlib==0.11.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax.numpy as jnp
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.models.qwen2.model import ModelConfig as Qwen2Config
from tunix.models.qwen2.model import Qwen2

sizes = dict(num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=8, num_kv_heads=2)
tokens = jnp.arange(12)[None] * 5 % 64
mask = jnp.tril(jnp.ones((1, 12, 12), bool))


def logits(model, config, theta):
    made = model(config(**sizes, rope_theta=theta, norm_eps=1e-5), rngs=nnx.Rngs(0))
    return made(tokens, jnp.arange(12)[None], None, mask)[0]


thetas = 10_000, 500_000, 1_000_000
llama = [logits(Llama3, ModelConfig, theta) for theta in thetas]
qwen = [logits(Qwen2, Qwen2Config, theta) for theta in thetas]
spread = [max(float(jnp.abs(each - found[0]).max()) for each in found) for found in (llama, qwen)]
print("largest difference between thetas: Llama 3", spread[0], "Qwen2", spread[1])
assert ModelConfig.llama3p2_1b().rope_theta == 500_000
assert spread[0] == 0 and spread[1] > 1e-3
PY
