#!/usr/bin/env bash
# jax.lax.top_k on a CPU puts the NaN of inf - inf behind -inf, so a short list of the best hides it.
#
# Seen with jax 0.11.2 and 0.12.0.1 on x86-64. `top_k` orders numbers by sign bit first, and a NaN whose sign bit is set comes
# last. The processor sets this bit in the NaN of inf - inf, 0 * inf, sqrt(-1) and log(-1), so this is the NaN that
# programs make; `jnp.nan` has the bit clear and comes first. `argmax` and `jnp.sort` treat both alike. Whoever takes the
# best k logits, and looks for NaN among them, sees ordinary numbers. The check has to read all logits.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version in 0.11.2 0.12.0.1; do
    python3 -m venv "$work/$version"
    "$work/$version/bin/pip" install -q "jax==$version" "jaxlib==$version"
    JAX_PLATFORMS=cpu "$work/$version/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

inf = jnp.asarray(np.inf, jnp.float32)
made = {"inf - inf": inf - inf, "0 * inf": 0 * inf, "sqrt(-1)": jnp.sqrt(-jnp.ones(())), "jnp.nan": jnp.float32(jnp.nan)}
for name, nan in made.items():
    values = jnp.stack([jnp.float32(1), -inf, nan, jnp.float32(2)])
    best = jax.lax.top_k(values, 2)[1].tolist()
    order = jax.lax.top_k(values, 4)[1].tolist()
    print(f"jax {jax.__version__}, {name}: best two {best}, order {order}, argmax {jnp.argmax(values)}")
    assert jnp.argmax(values) == 2 and np.isnan(jnp.sort(values)[-1])
    if name == "jnp.nan":
        assert order == [2, 3, 0, 1], order
    else:
        assert np.signbit(np.asarray(nan)), name
        assert order == [3, 0, 1, 2] and best == [3, 0], order
PY
done
