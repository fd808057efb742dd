#!/usr/bin/env bash
# Qwix's int2 turns weights of -1, 0 and 1 into -1.33, 0 and 0.67, although int2 holds -1, 0 and 1.
#
# Seen with qwix 0.1.8 and jax 0.11.2 on a CPU. Qwix calls this quantization symmetric. The scale is the largest weight
# divided by 1.5, the largest code plus a half. Both 1 and -1 are then halfway between two codes, and are rounded to 2
# and -2. The type holds -2, but 2 becomes 1, so symmetric weights get a negative mean. Ternary weights, as BitNet has,
# are hit. int4 shrinks the largest weight to 0.933 of itself, on both sides. `nf4` and float8_e4m3fn keep it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q qwix==0.1.8 jax==0.11.2 jaxlib==0.11.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax.numpy as jnp
import numpy as np
import qwix

weights = jnp.array([[-1.0, 0.0, 1.0]])
found = {}
for name in ("int2", "int4", "nf4", "float8_e4m3fn"):
    kind = jnp.float8_e4m3fn if name == "float8_e4m3fn" else name
    quantized = qwix.quantize(weights, kind)
    found[name] = np.asarray(qwix.dequantize(quantized), np.float32)[0].round(3)
    print(name, "scale", quantized.scale.round(3), "weights", found[name])
for name, expected in {
    "int2": [-1.333, 0, 0.667], "int4": [-0.933, 0, 0.933], "nf4": [-1, 0, 1], "float8_e4m3fn": [-1, 0, 1],
}.items():
    np.testing.assert_allclose(found[name], expected, atol=1e-3, err_msg=name)
PY
