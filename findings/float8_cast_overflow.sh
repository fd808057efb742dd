#!/usr/bin/env bash
# Casting float32 to float8_e4m3fn: PyTorch saturates, JAX and ml_dtypes give NaN.
#
# Seen with torch 2.13.0, jax 0.11.2 and ml_dtypes 0.6.0. Values above 464 do not fit float8_e4m3fn, whose largest
# number is 448. PyTorch's `.to(torch.float8_e4m3fn)` turns 1e6 and infinity into 448. `astype` of JAX and of ml_dtypes
# turns them into NaN. For float8_e5m2 all three give infinity. Code that relies on a saturating cast, such as a
# quantizer without a clip, therefore gives NaN after a port to JAX.
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

values = np.array([448, 464, 480, 1e6, -1e6, np.inf], np.float32)
nan = float("nan")
seen = {
    "torch e4m3fn": torch.tensor(values).to(torch.float8_e4m3fn).float().numpy(),
    "jax e4m3fn": np.asarray(jnp.asarray(values).astype(jnp.float8_e4m3fn)).astype(np.float32),
    "ml_dtypes e4m3fn": values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "torch e5m2": torch.tensor([1e6]).to(torch.float8_e5m2).float().numpy(),
    "jax e5m2": np.asarray(jnp.float32([1e6]).astype(jnp.float8_e5m2)).astype(np.float32),
}
expected = {
    "torch e4m3fn": [448, 448, 448, 448, -448, 448],
    "jax e4m3fn": [448, 448, nan, nan, nan, nan],
    "ml_dtypes e4m3fn": [448, 448, nan, nan, nan, nan],
    "torch e5m2": [np.inf],
    "jax e5m2": [np.inf],
}
for name, found in seen.items():
    print(f"{name}: {found.tolist()}")
    np.testing.assert_array_equal(found, expected[name])
PY
