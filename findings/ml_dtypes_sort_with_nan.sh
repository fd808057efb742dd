#!/usr/bin/env bash
# np.sort of ml_dtypes' bfloat16 leaves numbers unsorted if there is a NaN among them, and np.median gives a wrong
# number.
#
# Seen with ml_dtypes 0.6.0, NumPy 2.5.1 and jax 0.11.2. NumPy sorts NaN behind all numbers, in float16 too. The
# comparison of bfloat16 and float8 calls NaN neither smaller nor larger than any number. The sort therefore moves no
# number past a NaN: [3, NaN, 1, 2] stays as it is. `np.unique` returns a number twice. `np.median` of [NaN, 1, 2] is 1,
# where NumPy's rule is NaN, and that of [3, NaN, 2] is NaN. `jnp.sort` of the same arrays is right.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q ml_dtypes==0.6.0 numpy==2.5.1 jax==0.11.2 jaxlib==0.11.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" -W ignore - <<'PY'
import jax.numpy as jnp
import ml_dtypes
import numpy as np

nan = np.nan


def results(dtype):
    def array(*values):
        return np.array(values, dtype)

    found = {
        "sort": np.sort(array(3, nan, 1, 2)),
        "unique": np.unique(array(1, nan, 1)),
        "median": [np.median(array(nan, 1, 2)), np.median(array(3, nan, 2))],
        "jnp.sort": jnp.sort(jnp.asarray(array(3, nan, 1, 2))),
    }
    return {name: np.asarray(each, np.float32) for name, each in found.items()}


of_numpy = {"sort": [1, 2, 3, nan], "unique": [1, nan], "median": [nan, nan], "jnp.sort": [1, 2, 3, nan]}
of_ml_dtypes = {"sort": [3, nan, 1, 2], "unique": [1, nan, 1], "median": [1, nan], "jnp.sort": [1, 2, 3, nan]}
for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    expected = of_numpy if dtype is np.float16 else of_ml_dtypes
    for name, found in results(dtype).items():
        print(dtype.__name__, name, found)
        np.testing.assert_array_equal(found, expected[name])
PY
