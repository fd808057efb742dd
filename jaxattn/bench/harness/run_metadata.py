"""The metadata of a result file: date, command, device and timing method of its run.

`python -m jaxattn.bench compare` uses it to decide whether two files are comparable.
"""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxattn.bench.harness import timing
from jaxattn.bench.harness.device_info import card, device_facts, output_of
from jaxattn.bench.harness.result_tables import store

# The method of `timing`. Raise the version when the same code would give other times.
PROFILE_AND_LOOP: dict[str, Any] = {
    "name": "kernels by a profile, calls by a loop",
    "version": 1,
    "warm-up s": timing.WARMUP,
    "profiled calls": timing.PROFILED,
    "loop s": timing.LOOP_SECONDS,
    "rotated MiB": timing.ROTATE_BYTES // 2**20,
}


def begin(
    what: str,
    program: str,
    argv: Sequence[str],
    *,
    seed: int | None = 0,
    method: dict[str, Any] = PROFILE_AND_LOOP,
    device: bool = True,
) -> dict[str, Any]:
    """Returns the first fields of a result at the start of a run.

    Args:
        what: The bench's name on the command line.
        program: The command without its arguments.
        argv: The arguments, including `what`.
        seed: The seed of the inputs; None if a bench draws no random inputs.
        method: The timing method; files of different methods are not comparable.
        device: Whether to record JAX's device. False does not initialize the device, for benches
            whose child processes need all of it.
    """
    return {
        "what": what,
        "commit": commit(),
        "command": shlex.join([*program.split(), *argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "method": method,
        **(device_facts() if device else {"device": ""}),
        "card before": card(),
        "card": {},
    }


def commit() -> str:
    """The commit of this package's checkout, with "+" if files differ; "" outside a checkout."""
    folder = Path(__file__).parent
    number = output_of(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"])
    changed = output_of(["git", "-C", str(folder), "status", "--porcelain", "-uno"])
    return f"{number}+" if number and changed else number


def end(result: dict[str, Any], path: Path | None) -> None:
    """Adds the GPU's clocks and power after the run, while it is still warm, and stores the result
    in `path`, if there is one."""
    result["card"] = card()
    store(result, path)
