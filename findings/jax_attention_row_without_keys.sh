#!/usr/bin/env bash
# jax.nn.dot_product_attention gives a row without keys the mean of all values, padding included.
#
# Seen with jax 0.11.2 on a CPU. Masked scores are a large negative number and not -infinity. If `mask` or
# `key_value_seq_lengths=0` hides every key of a row, all scores are therefore equal, and the softmax is uniform over
# all positions of the array. The result is the mean of the values of the padding. FlashAttention's kernels give 0 for
# such a row. A batch with unused rows hides a leak of padding this way, because the numbers look ordinary.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.11.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

key = jax.random.normal(jax.random.key(0), (2, 4, 1, 8))
value = jax.random.normal(jax.random.key(1), (2, 4, 1, 8))
query = key[:, :1]
mean = np.asarray(value).mean(axis=1)[0, 0]
lengths = jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=jnp.array([0, 4]))
masked = jax.nn.dot_product_attention(query, key, value, mask=jnp.zeros((2, 1, 1, 4), bool))
print("by lengths", np.asarray(lengths)[0, 0, 0, :3])
print("by a mask ", np.asarray(masked)[0, 0, 0, :3])
print("mean      ", mean[:3])
np.testing.assert_allclose(np.asarray(lengths)[0, 0, 0], mean, rtol=1e-5, atol=1e-6)
np.testing.assert_allclose(np.asarray(masked)[0, 0, 0], mean, rtol=1e-5, atol=1e-6)
PY
