"""The process of one engine: `python -m jaxattn.bench.offline.engine_process JOB RESULT`.

A device does not have room for two engines at the same time. So each engine has its own process,
which ends before the next one starts. JOB is a JSON file. The process writes one line of JSON to
RESULT for each fact and measure.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from jaxattn.bench.harness.device_info import memory_used
from jaxattn.bench.offline.measures import OfflineEngine, measured
from jaxattn.bench.offline.workload import OfflineWorkload


def opened(job: dict[str, Any]) -> OfflineEngine:
    """Starts the engine that a job names."""
    if job["engine"] == "vLLM":
        from jaxattn.bench.baselines.vllm_engine import VllmEngine

        return VllmEngine(job["folder"], job["peer options"])
    from jaxattn.bench.offline.jaxattn_engine import JaxattnEngine

    return JaxattnEngine(job["folder"])


def main(argv: list[str]) -> int:
    job = json.loads(Path(argv[0]).read_text())
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in job["work"].items()
    }
    work = OfflineWorkload(**fields)
    with Path(argv[1]).open("w") as lines:

        def tell(kind: str, found: dict[str, Any]) -> None:
            print(json.dumps({kind: found}), file=lines, flush=True)
            print(f"{job['engine']}: {found}", file=sys.stderr, flush=True)

        engine = opened(job)
        # From the start of the process: imports, weights, compilation, warm-up.
        start = time.time() - job["spawned"]
        tell("row", {"what": "start", "unit": "s", "value": start})
        for row in measured(engine, work, job["measures"]):
            tell("row", row)
        used = memory_used()  # first, because an engine's driver query takes memory itself
        for what, amount in (engine.memory() | used).items():
            tell("row", {"what": f"memory, {what}", "unit": "GB", "value": amount})
        tell("facts", engine.facts())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
