"""The metadata of a result file: time, subject, device and method of its run.

`python -m jaxattn.bench compare` holds two files side by side by it.
"""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxattn.bench.harness import timing
from jaxattn.bench.harness.device_info import card, commit
from jaxattn.bench.harness.result_tables import store

# Of times by `timing`. The number grows where the same code would give other times.
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
    """The first fields of a result, as a run begins.

    Args:
        what: the bench, as it is named on the command line.
        program: how the command is called, without its arguments.
        argv: the arguments, `what` among them.
        seed: of the inputs; None where a bench draws none.
        method: how times are taken; files of different methods cannot be compared.
        device: name JAX's device. False leaves the device alone, for processes that need all of it.
    """
    return {
        "what": what,
        "commit": commit(),
        "command": shlex.join([*program.split(), *argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "method": method,
        **(timing.device_facts() if device else {"device": ""}),
        "card before": card(),
        "card": {},
    }


def end(result: dict[str, Any], path: Path | None) -> None:
    """Adds the card as it is after the run, its clocks and its power, while it is still warm; and
    stores the result, if it is wanted."""
    result["card"] = card()
    store(result, path)
