#!/usr/bin/env bash
# Casts of float32 to float8 of PyTorch and of JAX differ outside the range: PyTorch saturates, JAX gives NaN.
#
# Seen with torch 2.13.0, jax 0.11.2 and ml_dtypes 0.6.0.
# float8_e4m3fn: values above 464 do not fit, since the largest number is 448. PyTorch's `.to` turns 1e6 and infinity
# into 448. `astype` of JAX and of ml_dtypes turns them into NaN. For float8_e5m2 all three give infinity.
# float8_e8m0fnu, the scales of MXFP4 and MXFP8, has neither zero nor sign. PyTorch turns 0 into 2**-127 and drops the
# sign of -1. JAX and ml_dtypes turn both into NaN. A block of zeros whose scale is max|x| / 6 thus becomes NaN.
# A quantizer without a clip therefore gives NaN after a port to JAX.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 jax==0.11.2 ml_dtypes==0.6.0
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

nan, inf = float("nan"), float("inf")
cases = {
    "float8_e4m3fn": ([448, 464, 480, 1e6, -1e6, inf], [448, 448, 448, 448, -448, 448], [448, 448, nan, nan, nan, nan]),
    "float8_e5m2": ([57344, 1e6], [57344, inf], [57344, inf]),
    "float8_e8m0fnu": ([0, -1, 1, 3], [2.0**-127, 1, 1, 4], [nan, nan, 1, 4]),
}
for name, (values, of_torch, of_jax) in cases.items():
    values = np.float32(values)
    by_torch = torch.tensor(values).to(getattr(torch, name)).float().numpy()
    by_jax = np.asarray(jnp.asarray(values).astype(getattr(jnp, name))).astype(np.float32)
    by_ml_dtypes = values.astype(getattr(ml_dtypes, name)).astype(np.float32)
    print(name, values.tolist(), "torch", by_torch.tolist(), "jax", by_jax.tolist())
    np.testing.assert_array_equal(by_torch, np.float32(of_torch))
    np.testing.assert_array_equal(by_jax, np.float32(of_jax))
    np.testing.assert_array_equal(by_ml_dtypes, np.float32(of_jax))
PY
