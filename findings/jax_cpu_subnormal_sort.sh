#!/usr/bin/env bash
# On a CPU, JAX does not sort subnormal numbers of bfloat16 or float32: each of them compares equal to 0.
#
# Seen with jax 0.11.2, ml_dtypes 0.6.0 and NumPy 2.5.1. XLA's comparisons take subnormal numbers of both types for 0.
# `jnp.sort` leaves an array of them in its order, `jnp.argmax` returns the first, and `jnp.unique` keeps one.
# `astype(bool)` makes them False, where NumPy says True, and `bool` of a JAX scalar says True as well. `jax.lax.top_k`
# does find the largest ones. For float16, whose subnormal numbers are those below 6e-5, JAX and NumPy agree. Of random
# bits, as tests of casts have them, one bfloat16 in 256 is subnormal.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.11.2 jaxlib==0.11.2 ml_dtypes==0.6.0 numpy==2.5.1
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

for name in ("bfloat16", "float32", "float16"):
    dtype = jnp.dtype(name)
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    x = (np.array([2, 3, 1, 0]) * smallest).astype(dtype)
    y = jnp.asarray(x)

    def steps(array):
        return (np.asarray(array).astype(np.float64) / smallest).tolist()

    found = {
        "sort": steps(jnp.sort(y)),
        "argmax": int(jnp.argmax(y)),
        "unique": len(jnp.unique(y)),
        "astype(bool)": y.astype(bool).tolist(),
        "bool": [bool(each) for each in y],
        "top_k": jax.lax.top_k(y, 2)[1].tolist(),
    }
    by_numpy = {
        "sort": steps(np.sort(x)),
        "argmax": int(np.argmax(x)),
        "unique": len(np.unique(x)),
        "astype(bool)": x.astype(bool).tolist(),
        "bool": [bool(each) for each in x],
        "top_k": np.argsort(-x)[:2].tolist(),
    }
    differ = [key for key in found if found[key] != by_numpy[key]]
    print(name, found, "not as NumPy:", differ)
    assert differ == ([] if name == "float16" else ["sort", "argmax", "unique", "astype(bool)"]), differ
    assert name == "float16" or found["sort"] == [2, 3, 1, 0], found
PY
