#!/usr/bin/env bash
# `jax.lax.top_k` puts every 0.0 before every -0.0, although the two are equal and the one of the lower index should
# come first. `jnp.argsort` and `jnp.argmax` take them for equal.
#
# Seen with jax 0.11.2 on a CPU. The documentation of `top_k` says of equal elements that the one with the lower index
# comes first. XLA's operation orders all bit patterns instead. Scores that end with a product of a ReLU and a
# weight of either sign, as those of DeepSeek's indexer, have zeros of both signs, and top_k then chooses other places
# than a stable sort of the same scores. Adding 0.0 to the scores first makes all their zeros positive.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.11.2 jaxlib==0.11.2 numpy==2.5.1
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp

scores = jnp.maximum(jnp.array([-1.0, -2.0, -3.0, -4.0]), 0.0) * jnp.array([-1.0, 1.0, -1.0, 1.0])
assert scores.tolist() == [0.0] * 4 and jnp.signbit(scores).tolist() == [True, False, True, False]
found = {
    "top_k": jax.lax.top_k(scores, 2)[1].tolist(),
    "stable argsort": jnp.argsort(-scores, stable=True)[:2].tolist(),
    "argmax": int(jnp.argmax(scores)),
    "top_k of scores + 0.0": jax.lax.top_k(scores + 0.0, 2)[1].tolist(),
}
print(found)
assert found["top_k"] == [1, 3], found
assert found["stable argsort"] == [0, 1] and found["argmax"] == 0, found
assert found["top_k of scores + 0.0"] == [0, 1], found
PY
