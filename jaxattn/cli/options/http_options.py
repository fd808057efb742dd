"""The options of the HTTP server, which `serve` accepts together with `--port`."""

import argparse
import math
from pathlib import Path

from jaxattn.cli.options.value_types import number, seconds, size

# The names in jaxattn.server.decoding.message_format.FORMATS, which needs the `server` extra.
TOOL_PARSERS = (
    "hermes", "qwen3_coder", "glm", "deepseek_v3", "deepseek_v31", "deepseek_v32", "kimi_k2",
    "harmony", "llama3", "mistral", "mistral_array",
)  # fmt: skip


def add(root: argparse.ArgumentParser) -> None:
    """Adds the group of server options."""
    group = root.add_argument_group(
        "server", "HTTP server with OpenAI's and Anthropic's APIs; docs/server.md"
    )
    group.add_argument(
        "--port",
        metavar="N",
        type=number(int, lambda x: 0 <= x < 2**16, "a port: use 0 to 65535"),
        help="serve over HTTP on this port; 0 picks a free port (default: no server)",
    )
    group.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 means all addresses of this machine",
    )
    group.add_argument(
        "--served-name",
        metavar="NAME",
        action="append",
        help="name of the model in requests and responses; may be repeated (default: the model's)",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help="file with the API keys of clients, one per line, in addition to JAXATTN_API_KEY "
        "(default: none)",
    )
    group.add_argument(
        "--cors-origin",
        metavar="URL",
        action="append",
        help="origin whose pages may call the server; may be repeated (default: none)",
    )
    group.add_argument(
        "--max-queue",
        metavar="N",
        type=number(int, lambda x: x >= 0, "a number of requests: use 0 or more"),
        default=128,
        help="completions that may wait for a row, n for each request; the server rejects further "
        "requests with status 429",
    )
    group.add_argument(
        "--max-queued-tokens",
        metavar="N",
        type=size,
        help="total prompt tokens of the requests that may wait for their first token "
        "(default: no limit)",
    )
    group.add_argument(
        "--max-body", metavar="BYTES", type=size, default=4 * 2**20, help="largest request body"
    )
    group.add_argument(
        "--queue-timeout",
        metavar="S",
        type=seconds,
        help="seconds until the first token, after which a request fails with status 504 "
        "(default: none)",
    )
    group.add_argument(
        "--request-timeout",
        metavar="S",
        type=seconds,
        help="seconds for a whole answer, after which a request fails with status 504 (default: "
        "none)",
    )
    group.add_argument(
        "--drain-timeout",
        metavar="S",
        type=number(float, lambda x: 0 <= x < math.inf, "a time: use seconds from 0"),
        default=30.0,
        help="seconds for running requests to finish after SIGTERM",
    )
    group.add_argument(
        "--step-timeout",
        metavar="S",
        type=seconds,
        default=300.0,
        help="seconds that one step of the engine may take before the process exits",
    )
    group.add_argument(
        "--tool-parser",
        metavar="NAME",
        choices=TOOL_PARSERS,
        help=f"format of tool calls: {', '.join(TOOL_PARSERS)} (default: the chat template's)",
    )
    group.add_argument(
        "--no-access-log", action="store_true", help="do not log a line per request to stderr"
    )
