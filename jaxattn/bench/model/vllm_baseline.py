"""vLLM's time for the same decode steps, with its own random weights, where it is installed.

It runs in a process of its own, before JAX takes memory. `vllm bench latency` times a whole batch
of requests. Two output lengths differ by `STEPS` decode steps and by nothing else, so a step is the
difference of the two divided by `STEPS`. Options and names are those of vLLM 0.33.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = 64
SECONDS = 1200  # the most that one run may take
ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def measure(fields: dict[str, Any], rows: Sequence[int], context: int) -> list[str]:
    """A line for each number of rows; one line where vLLM is not installed or fails.

    Args:
        fields: of the model's config.json.
        context: tokens of each row, in the middle of the steps that are timed.
    """
    if importlib.util.find_spec("vllm") is None:
        return ["vLLM: not installed (python3 -m pip install vllm)"]
    kind = fields.get("model_type", "")
    if kind not in ARCHITECTURES and "architectures" not in fields:
        return [f"vLLM: its name for models of type {kind!r} is not known here"]
    with tempfile.TemporaryDirectory() as folder:
        names = {"architectures": [ARCHITECTURES.get(kind)]}
        (Path(folder) / "config.json").write_text(json.dumps({**names, **fields}))
        try:
            return [
                f"vLLM: decode of {count} rows: {_step(Path(folder), count, context) * 1e3:.2f} ms"
                for count in rows
            ]
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            return [f"vLLM: {type(error).__name__}: {said[-1] if said else ''}"[:300]]


def _step(folder: Path, rows: int, context: int) -> float:
    prompt = max(context - STEPS // 2, 1)
    short, long = (_latency(folder, rows, prompt, tokens) for tokens in (1, 1 + STEPS))
    return (long - short) / STEPS


def _latency(folder: Path, rows: int, prompt: int, tokens: int) -> float:
    """Median seconds of a batch."""
    answer = folder / "latency.json"
    sizes = {
        "--model": folder, "--batch-size": rows, "--input-len": prompt, "--output-len": tokens,
        "--max-model-len": prompt + STEPS + 1, "--num-iters-warmup": 2, "--num-iters": 5,
        "--load-format": "dummy", "--dtype": "bfloat16", "--output-json": answer,
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "latency"]
    options = [str(part) for pair in sizes.items() for part in pair]
    switches = ["--skip-tokenizer-init", "--disable-detokenize", "--no-enable-prefix-caching"]
    subprocess.run(
        [*command, *options, *switches],
        capture_output=True, text=True, check=True, timeout=SECONDS,
    )  # fmt: skip
    return float(json.loads(answer.read_text())["percentiles"]["50"])
