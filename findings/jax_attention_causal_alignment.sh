#!/usr/bin/env bash
# jax.nn.dot_product_attention(is_causal=True) aligns the first query with the first key, whatever the lengths say.
#
# Seen with jax 0.11.2 on a CPU. With fewer queries than keys, as in a prompt's later chunk, FlashAttention 2.1 and
# newer align the last query with the last key. JAX aligns the first ones, also when `key_value_seq_lengths` gives the
# true length: two queries after two earlier keys see one key and two keys, and not three and four. The result is
# finite and plausible. A chunk needs an explicit mask.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.11.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

attention = jax.nn.dot_product_attention
query, key, value = (jax.random.normal(jax.random.key(i), (1, 4, 1, 8)) for i in range(3))
chunk = query[:, 2:]
found = attention(chunk, key, value, is_causal=True, key_value_seq_lengths=jnp.array([4]))
at_first_key = attention(chunk, key[:, :2], value[:, :2], is_causal=True)
at_last_key = attention(query, key, value, is_causal=True)[:, 2:]
print("aligned with the first key:", np.allclose(found, at_first_key, atol=1e-5))
print("aligned with the last key: ", np.allclose(found, at_last_key, atol=1e-5))
np.testing.assert_allclose(found, at_first_key, atol=1e-5)
assert not np.allclose(found, at_last_key, atol=1e-2)
PY
