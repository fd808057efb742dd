#!/usr/bin/env bash
# GGUF's Q4_0 keeps the first of two opposite extremes exactly, and cuts the other one to 7/8.
#
# Seen with gguf 0.19.0. A block of 32 weights has the codes -8..7 and one scale, which is the first weight of the
# largest magnitude divided by -8. A block with 1 and -1 becomes 1 and -0.875, and a block with -1 and 1 becomes -1 and
# 0.875. Reversing a block, or its sign, does not reverse the dequantized weights. Q4_1 keeps both extremes, but a
# weight of exactly 0 becomes -0.067.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q gguf==0.19.0
"$work/venv/bin/python" - <<'PY'
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize


def through(kind, *first):
    block = np.zeros((1, 32), np.float32)
    block[0, : len(first)] = first
    return dequantize(quantize(block, kind), kind)[0, :3].astype(float).round(3).tolist()


seen = {
    "Q4_0 of 1, -1, 0": through(Type.Q4_0, 1, -1),
    "Q4_0 of -1, 1, 0": through(Type.Q4_0, -1, 1),
    "Q4_1 of 1, -1, 0": through(Type.Q4_1, 1, -1),
}
for name, found in seen.items():
    print(f"{name}: {found}")
assert list(seen.values()) == [[1, -0.875, 0], [-1, 0.875, 0], [1, -1, -0.067]], seen
PY
