#!/usr/bin/env bash
# transformers ignores `add_bos_token` and `add_eos_token` of tokenizer_config.json, but obeys the same arguments.
#
# Seen with transformers 5.24.0 and tokenizers 0.23.3. If a folder has a tokenizer.json, its post-processor alone
# decides which special tokens are added. A tokenizer_config.json that says false for both fields may thus add both, and
# the attribute `add_bos_token` of the tokenizer is False nevertheless. `from_pretrained(folder, add_bos_token=False)`
# does change the ids. A server that obeys the JSON field gets other ids than transformers.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3
"$work/venv/bin/python" - "$work" <<'PY'
import json
import pathlib
import sys

from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer

folder = pathlib.Path(sys.argv[1]) / "tokenizer"
folder.mkdir()
tokenizer = Tokenizer(models.BPE({"<bos>": 0, "<eos>": 1, "a": 2, "b": 3}, merges=[]))
tokenizer.add_special_tokens(["<bos>", "<eos>"])
tokenizer.post_processor = processors.TemplateProcessing(
    single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
)
tokenizer.save(str(folder / "tokenizer.json"))


def ids(kind, in_file, **arguments):
    config = {"tokenizer_class": kind, "bos_token": "<bos>", "eos_token": "<eos>", **in_file}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = AutoTokenizer.from_pretrained(folder, **arguments)
    return loaded("ab").input_ids, loaded.add_bos_token, loaded.add_eos_token


neither = {"add_bos_token": False, "add_eos_token": False}
for kind in ("Qwen2Tokenizer", "PreTrainedTokenizerFast"):
    by_file, by_argument = ids(kind, neither), ids(kind, {}, **neither)
    print(kind, "by the file:", by_file, "by arguments:", by_argument)
    assert by_file == ([0, 2, 3, 1], False, False), by_file
    assert by_argument == ([2, 3], False, False), by_argument
PY
