#!/usr/bin/env bash
# Casting float32 to float8_e8m0fnu, the scale format of MXFP4 and MXFP8: PyTorch and JAX differ for 0 and below.
#
# Seen with torch 2.13.0, jax 0.11.2 and ml_dtypes 0.6.0. The format has powers of two only: no zero and no sign.
# PyTorch turns 0 into 2**-127 and drops the sign of a negative number. JAX and ml_dtypes turn both into NaN. A block
# of zeros whose scale is computed as max|x| / 6 therefore dequantizes to 0 in PyTorch and to NaN in JAX.
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

values = np.array([0.0, -1.0, 1.0, 3.0], np.float32)
nan = float("nan")
by_torch = torch.tensor(values).to(torch.float8_e8m0fnu).float().numpy()
by_jax = np.asarray(jnp.asarray(values).astype(jnp.float8_e8m0fnu)).astype(np.float32)
by_ml_dtypes = values.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
print("torch    ", by_torch.tolist())
print("jax      ", by_jax.tolist())
print("ml_dtypes", by_ml_dtypes.tolist())
np.testing.assert_array_equal(by_torch, np.float32([2.0**-127, 1, 1, 4]))
np.testing.assert_array_equal(by_jax, [nan, nan, 1, 4])
np.testing.assert_array_equal(by_ml_dtypes, [nan, nan, 1, 4])
PY
