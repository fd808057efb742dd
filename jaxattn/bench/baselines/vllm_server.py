"""The command of vLLM's server with dummy weights, and the request that replaces them."""

import json
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxattn.bench.baselines.vllm_dummy_weights import WEIGHTS
from jaxattn.bench.baselines.vllm_engine import OPTIONS, fields_of, text_options


def server_command(folder: Path, port: int, options: Mapping[str, Any]) -> list[str]:
    """The command of vLLM's server for a folder of `config_folder`.

    Args:
        options: Additional options, named like arguments of `LLM`.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--served-model-name", folder.name]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    given = OPTIONS | text_options(fields_of(folder)) | dict(options)
    for name, value in given.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):  # a switch
            command.append(f"--{option}" if value else f"--no-{option}")
        else:
            command += [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
    return command


def prepare_server(url: str) -> None:
    """Sets ordinary weights in a server that has started.

    Raises:
        OSError: the server cannot be reached or rejects the request.
    """
    asked = urllib.request.Request(
        f"{url}/collective_rpc",
        json.dumps({"method": WEIGHTS}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=120):
        pass
