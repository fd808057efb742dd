#!/usr/bin/env bash
# mlx.core.to_fp8 turns NaN into 448, the largest number of the format, although E4M3 has a NaN and from_fp8 reads it.
#
# Seen with mlx 0.32.4 on a CPU, compared with ml_dtypes 0.6.0. `from_fp8` reads the byte 0x7F as NaN, as the format
# says. `to_fp8` saturates infinity to 448, and treats NaN likewise: it becomes 448 or, with its sign bit set, -448. A
# round trip thus turns NaN into an ordinary number. `mx.quantize` in the modes mxfp8, mxfp4 and nvfp4 loses NaN as
# well, and makes all weights of its block wrong and finite. A check for NaN has to come before. The cast of ml_dtypes,
# and so JAX's, keeps NaN.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "mlx[cpu]==0.32.4" ml_dtypes==0.6.0 numpy==2.5.1
"$work/venv/bin/python" - <<'PY'
import ml_dtypes
import mlx.core as mx
import numpy as np

values = np.array([1, 448, np.inf, np.nan, -np.nan], np.float32)
codes = np.array(mx.to_fp8(mx.array(values)))
back = np.array(mx.from_fp8(mx.array(codes), dtype=mx.float32))
of_ml_dtypes = values.astype(ml_dtypes.float8_e4m3fn)
of_byte = mx.from_fp8(mx.array([0x7F], dtype=mx.uint8), dtype=mx.float32).item()
print("values", values, "MLX", back, "ml_dtypes", of_ml_dtypes, "byte 0x7F in MLX", of_byte)
np.testing.assert_array_equal(back, [1, 448, 448, 448, -448])
assert np.isnan(of_ml_dtypes[3:].astype(np.float32)).all() and np.isnan(of_byte)

weights = np.ones((1, 64), np.float32)
weights[0, 0] = np.nan
for mode in ("mxfp8", "mxfp4", "nvfp4"):
    widened = np.array(mx.dequantize(*mx.quantize(mx.array(weights), mode=mode), mode=mode).astype(mx.float32))[0]
    print(mode, "first weights", widened[:3], "last", widened[-1])
    assert np.isfinite(widened).all() and abs(widened[1] - 1) > 0.5, widened
PY
