"""compute-sanitizer over a launch of every kernel, on a Hopper GPU.

    python -m scripts.sanitize                      # memcheck, then racecheck
    python -m scripts.sanitize --tool memcheck --only mla_decode_e4m3 gdn_decode_bfloat16

The tool watches a process for each case. Before that, an unwatched process compiles all of the
case's XLA code into a compilation cache, because XLA's compiler crashes under the tool (jax 0.11.2,
CUDA 13). `out_of_bounds` reads out of bounds, and memcheck has to report it.

The exit status is 1 if a kernel has an error, if `out_of_bounds` has none, or if a case returns
only zeros. It is 2 if the tool ended without a verdict.
"""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from jaxattn.core.dispatch import Implementation
from scripts.cases import SMALL

ROOT = Path(__file__).parents[1]

TOOLS = {"memcheck": r"ERROR SUMMARY: (\d+) error", "racecheck": r"SUMMARY: (\d+) hazard"}
SECONDS = 300  # time limit of a case


def run(name: str, implementation: Implementation = "mosaic_gpu") -> None:
    """Runs a case in this process."""
    case = SMALL[name]
    arrays = jax.device_put(tuple(case.arrays().values()))
    out = jax.block_until_ready(jax.jit(case.function(implementation))(*arrays))
    first = np.asarray(jax.tree.leaves(out)[0], np.float64)
    mean = np.square(first).mean()
    print(f"{name}: {first.shape}, mean of squares {mean:.4g}")
    if mean == 0 and name != "out_of_bounds":
        sys.exit(f"{name}: every number of the first output is 0; give the case other inputs")


def watched(tool: str, program: str, name: str, environment: dict[str, str]) -> tuple[int, str]:
    """Runs a case under a tool: (exit status of this script for it, text to print)."""
    command = [program, "--tool", tool, sys.executable, "-m", "scripts.sanitize", "--case", name]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return 2, f"{tool} {name}: no verdict after {SECONDS} s"
    said = done.stdout + done.stderr
    found = re.findall(TOOLS[tool], said)
    # A case that failed before its kernel ran has no errors; the tool returns the case's status.
    if not found or (done.returncode and int(found[-1]) == 0):
        return 2, f"{tool} {name}: no verdict, exit status {done.returncode}\n{said[-500:]}"
    count = int(found[-1])
    if name == "out_of_bounds":
        return int(count == 0), f"{tool} {name}: {count}, more than 0 wanted"
    lines = [line for line in said.splitlines() if line.startswith("=========")]
    return int(count > 0), "\n".join([f"{tool} {name}: {count}", *lines[: 12 * (count > 0)]])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--only", nargs="+", choices=SMALL, default=list(SMALL), metavar="CASE")
    parser.add_argument("--jobs", type=int, default=6, help="cases at a time")
    parser.add_argument("--case", choices=SMALL, help="runs this case alone, which nobody watches")
    args = parser.parse_args()
    if args.case:
        run(args.case)
        return 0
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        parser.error("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(args.jobs) as pool:
        environment = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

        def compiled(name: str) -> int:
            command = [sys.executable, "-m", "scripts.sanitize", "--case", name]
            # A read out of bounds may end the process, so each case has its own.
            return subprocess.run(command, cwd=ROOT, env=environment, timeout=SECONDS).returncode

        ended = dict(zip(args.only, pool.map(compiled, args.only), strict=True))
        failed = [name for name, status in ended.items() if status and name != "out_of_bounds"]
        if failed:
            print("failed without the tool:", *failed)
            return 1
        worst = 0
        for tool in args.tool:
            cases = [name for name in args.only if tool == "memcheck" or name != "out_of_bounds"]
            look = functools.partial(watched, tool, program, environment=environment)
            for status, said in pool.map(look, cases):
                print(said, flush=True)
                worst = 1 if 1 in (worst, status) else max(worst, status)
        return worst


if __name__ == "__main__":
    sys.exit(main())
