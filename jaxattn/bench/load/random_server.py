"""A server with random weights in the shapes of a shipped configuration or a folder.

    python -m jaxattn.bench.load.random_server deepseek-v2-lite --port 8000

All arguments except the first are options of `python -m jaxattn.serve`. If the folder has a
tokenizer, the server uses it. Otherwise tokens are bytes, so a prompt has as many tokens as bytes.
Answers are meaningless.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxattn import text
from jaxattn.bench.model.model_lookup import find
from jaxattn.bench.model.random_weights import random_params
from jaxattn.cli.options.serve_options import parser
from jaxattn.cli.serve import http_server
from jaxattn.cli.serve.request_inputs import model_length, read_limits
from jaxattn.cli.startup.compilation_cache import NONE, enable_compilation_cache
from jaxattn.cli.startup.engine_startup import choose_device, share_of_device
from jaxattn.cli.startup.model_source import ModelSource, choose
from jaxattn.cli.startup.stage_timings import StageTimings
from jaxattn.models.loading.huggingface_checkpoint import CONFIG
from jaxattn.text.hub_tokenizer import JSON


class RandomWeights:
    """Random weights that are drawn on the device."""

    def place(self, on_progress: Any, *, model: Any, group: Any) -> Any:
        if group is not None:
            raise SystemExit("random weights are supported on a single GPU only")
        return jax.block_until_ready(random_params(model))


class ConfigSource(ModelSource):
    """A model with a config.json, with or without a tokenizer, and without weights."""

    def tokenizer(self) -> text.Tokenizer:
        if (self.folder.path / JSON).exists():
            return super().tokenizer()
        return text.ByteTokenizer()

    def weights(self, on_fetch: Any = None) -> Any:
        return RandomWeights()


def main() -> int:
    stages = StageTimings()
    stages.ended("imports")
    if Path(sys.argv[1], JSON).exists():
        return serve(Path(sys.argv[1]), sys.argv[2:], stages)
    name, fields, _ = find(sys.argv[1])
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, name)
        folder.mkdir()
        (folder / CONFIG).write_text(json.dumps(fields))
        return serve(folder, sys.argv[2:], stages)


def serve(folder: Path, arguments: list[str], stages: StageTimings) -> int:
    """Serves a folder with a config.json; returns the exit code of `http_server.serve`."""
    options = parser().parse_args(["--model", str(folder), *arguments])
    chosen = ConfigSource(folder=choose(options).folder)
    platform = choose_device(options.device, options.implementation, share_of_device(options))
    length = model_length(options, chosen.folder.model, platform)
    limits = read_limits(options, length, platform)
    tokenizer = chosen.tokenizer()
    if options.compile_cache not in (None, NONE):
        enable_compilation_cache(options.compile_cache)
    stages.ended("device")
    messages = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    given = chosen, chosen.model(tokenizer), tokenizer, limits, options, messages, stages
    return http_server.serve(*given)


if __name__ == "__main__":
    raise SystemExit(main())
