#!/usr/bin/env bash
# Casting NaN to float4_e2m1fn gives -0, and infinity gives 6: a NaN upstream disappears in an MXFP4 quantizer.
#
# Seen with jax 0.11.2 and ml_dtypes 0.6.0. float4_e2m1fn has neither NaN nor infinity. `astype` saturates large values
# at 6, unlike the cast to float8_e4m3fn of the same libraries, which gives NaN. It turns NaN into -0 without an error.
# A check for NaN therefore has to come before the cast.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.11.2 ml_dtypes==0.6.0
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax.numpy as jnp
import ml_dtypes
import numpy as np

values = np.array([5, 100, np.inf, -np.inf, np.nan], np.float32)
by_jax = np.asarray(jnp.asarray(values).astype(jnp.float4_e2m1fn)).astype(np.float32)
by_ml_dtypes = values.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
print("jax      ", by_jax.tolist())
print("ml_dtypes", by_ml_dtypes.tolist())
for found in (by_jax, by_ml_dtypes):
    assert found.tolist() == [4, 6, 6, -6, 0], found
    assert np.signbit(found[-1]), "NaN became +0"
PY
