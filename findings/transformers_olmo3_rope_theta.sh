#!/usr/bin/env bash
# transformers 5.24 reads a published OLMo 3 config.json with another rope_theta in the layers with a sliding window.
#
# Seen with transformers 5.24.0. Older files have a top-level `rope_theta`. `Olmo3Config` gives it to the layers with
# full attention, and the default of 500,000 to those with a sliding window, because it takes the field out of the
# keyword arguments for the first of them. No warning follows.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.24.0
"$work/venv/bin/python" - <<'PY'
from transformers import Olmo3Config

found = Olmo3Config.from_dict({"rope_theta": 123456.0, "num_hidden_layers": 4}).rope_parameters
thetas = {kind: each["rope_theta"] for kind, each in found.items()}
print(thetas)
assert thetas == {"sliding_attention": 500000.0, "full_attention": 123456.0}, thetas
PY
