#!/usr/bin/env bash
# transformers 5.24 saves the text layers of Kimi-K2.5 as `language_model.model.blocks.N`; published folders have `layers.N`.
#
# Seen with transformers 5.24.0 and torch 2.13.0. To load a published folder, the library renames "blocks" of the vision
# tower to "layers" in every name. `save_pretrained` turns the rule around, and so renames the layers of the text model
# too, which never were "blocks". `from_pretrained` reads both spellings. Other readers of the folder miss each layer.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.24.0 torch==2.13.0
"$work/venv/bin/python" - "$work/model" <<'PY'
import sys

import torch
from safetensors import safe_open
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25ForConditionalGeneration

text = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, first_k_dense_replace=1,
)
vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = Kimi_K25ForConditionalGeneration(Kimi_K25Config(text_config=text, vision_config=vision))
model.save_pretrained(sys.argv[1])
with safe_open(f"{sys.argv[1]}/model.safetensors", "pt") as file:
    saved = {".".join(name.split(".")[:4]) for name in file.keys() if name.startswith("language_model.model.")}
back = Kimi_K25ForConditionalGeneration.from_pretrained(sys.argv[1]).state_dict()
own = [name for name in model.state_dict() if "language_model.layers." in name]
print("in the model:", own[0])
print("in the file: ", *sorted(saved))
assert {f"language_model.model.blocks.{n}" for n in (0, 1)} <= saved
assert not any("layers" in name for name in saved)
assert all(torch.equal(back[name], model.state_dict()[name]) for name in own)
PY
