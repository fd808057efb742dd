#!/usr/bin/env bash
# transformers reads the scale 255 of an MXFP4 block as 2**128, where the format E8M0 says NaN.
#
# Seen with transformers 5.24.0 and torch 2.13.0. `convert_moe_packed_tensors`, which dequantizes gpt-oss folders,
# subtracts the bias of 127 and shifts the exponent. A block with the scale byte 255 becomes infinity in float32, with
# the sign of each weight. PyTorch's own float8_e8m0fnu gives NaN for this byte, as the OCP specification does.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.24.0 torch==2.13.0
"$work/venv/bin/python" - <<'PY'
import math

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ones = torch.full((1, 1, 1, 16), 0x22, dtype=torch.uint8)  # 32 weights of 1


def widened(scale):
    scales = torch.full((1, 1, 1), scale, dtype=torch.uint8)
    return convert_moe_packed_tensors(ones, scales, dtype=torch.float32).flatten()[0].item()


found = {scale: widened(scale) for scale in (127, 254, 255)}
torchs = torch.full((1,), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu).float().item()
print(found, "torch's 255:", torchs)
assert found == {127: 1.0, 254: 2.0**127, 255: math.inf} and math.isnan(torchs)
PY
