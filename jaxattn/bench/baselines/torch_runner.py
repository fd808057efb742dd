"""Baselines of other libraries in PyTorch, timed on the same shapes and GPU in the same run.

Baselines are PyTorch programs, some with Triton kernels, and are launched as their users launch
them. Each runs in its own process, which starts before JAX takes memory:

    python -m jaxattn.bench.baselines.torch_runner flashinfer-mla '[128, 128, 4096, 1]' \\
        '[1, 16, 32768, 1]'

prints a line of JSON for each shape. Inputs have the same distribution as ours and rotate in the
same way in a loop of calls. Plans are computed beforehand, like our schedule. There are two times,
as for our ops:

    us       time in which any of the call's kernels runs, from a profile of a GPU that idled
    call us  median by CUDA events around a graph of calls (or around the calls, if a baseline
             cannot be captured), after a warm-up. It runs as long as our loops, in which a GPU gets
             slower, and includes the gaps between kernels
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxattn.bench.baselines import flashinfer_xqa, flashmla_fa3, torch_layers
from jaxattn.bench.baselines.torch_delta_rule import (
    fla_decode,
    fla_gradient,
    fla_kda_prefill,
    fla_prefill,
    flashinfer_prefill,
    flashqla_gradient,
    flashqla_prefill,
)
from jaxattn.bench.baselines.torch_layers import torch
from jaxattn.bench.baselines.torch_mla import flaggems_mla, flashinfer_mla
from jaxattn.bench.harness.timing import LOOP_SECONDS, PROFILED, WARMUP

CALLS, REPEATS = 32, 7  # calls per graph, and repeated measurements
SECONDS = 1200  # limit for a baseline's process, which may compile for long on its first call
IDLE = 0.3  # seconds in which a GPU cools before a burst
NO_KERNELS = ("Memcpy HtoD", "Event Sync", "Context Sync", "Stream Sync", "Stream Wait")

# Seconds by column without its unit ("fla" or "fla call") and by the shape's JSON.
Times = dict[str, dict[str, float]]
# Makes, for a shape, a call that takes its number, which selects inputs that are not in L2.
Build = Callable[..., Callable[[int], Any]]


@dataclasses.dataclass(frozen=True)
class TorchBaseline:
    """A baseline, with the column that it adds to a bench.

    Attributes:
        column: The name of the column.
        bench: The module of jaxattn.bench whose shapes the baseline runs.
        module: The Python module to import.
        package: The package that pip installs.
        build: Makes the call for a shape of the bench.
        gradient: Whether the calls differentiate.
    """

    column: str
    bench: str
    module: str
    package: str
    build: Build
    gradient: bool = False


PEERS = {
    "flashinfer-mla": TorchBaseline(
        "flashinfer", "mla", "flashinfer", "flashinfer-python", flashinfer_mla
    ),
    "flaggems-mla": TorchBaseline("flaggems", "mla", "flag_gems", "flag_gems", flaggems_mla),
    "fla-decode": TorchBaseline("fla", "gdn_layer_decode", "fla", "fla-core", fla_decode),
    "fla-prefill": TorchBaseline("fla", "gdn_prefill", "fla", "fla-core", fla_prefill),
    "fla-kda-prefill": TorchBaseline("fla", "kda_prefill", "fla", "fla-core", fla_kda_prefill),
    "flashqla-prefill": TorchBaseline(
        "flashqla", "gdn_prefill", "flash_qla", "flash-qla", flashqla_prefill
    ),
    "flashinfer-prefill": TorchBaseline(
        "flashinfer", "gdn_prefill", "flashinfer", "flashinfer-python", flashinfer_prefill
    ),
    "fla-gradient": TorchBaseline(
        "fla", "op_gradients", "fla", "fla-core", fla_gradient, gradient=True
    ),
    "flashqla-gradient": TorchBaseline(
        "flashqla", "op_gradients", "flash_qla", "flash-qla", flashqla_gradient, gradient=True
    ),
    "torch-layer-gradient": TorchBaseline(
        "torch (fla)",
        "layer_gradients",
        "fla",
        "flash-linear-attention",
        torch_layers.layer_gradient,
        gradient=True,
    ),
    "flashqla-layer-gradient": TorchBaseline(
        "torch (flashqla)",
        "layer_gradients",
        "flash_qla",
        "flash-qla",
        torch_layers.flashqla_layer_gradient,
        gradient=True,
    ),
    "vllm-flashmla": TorchBaseline("flashmla (vllm)", "mla", "vllm", "vllm", flashmla_fa3.flashmla),
    "vllm-flashmla-sparse": TorchBaseline(
        "flashmla (vllm)", "mla_sparse", "vllm", "vllm", flashmla_fa3.flashmla_sparse
    ),
    "fa3-decode": TorchBaseline("fa3", "gqa", "vllm", "vllm", flashmla_fa3.flash_attention_decode),
    "xqa-decode": TorchBaseline(
        "xqa", "gqa", "flashinfer", "flashinfer-python", flashinfer_xqa.decode
    ),
    "fa3-prefill": TorchBaseline(
        "fa3", "gqa_prefill", "vllm", "vllm", flashmla_fa3.flash_attention_prefill
    ),
    "fa3-mla-prefill": TorchBaseline(
        "fa3", "mla_prefill", "vllm", "vllm", flashmla_fa3.flash_attention_mla_prefill
    ),
}


def measure(bench: str, shapes: Sequence[Any]) -> tuple[Times, list[str]]:
    """Returns the times of a bench's installed baselines, and lines about versions and failures."""
    times: Times = {}
    said = []
    for name, peer in PEERS.items():
        if peer.bench != bench:
            continue
        if importlib.util.find_spec(peer.module) is None:
            said.append(f"{name}: not installed (python3 -m pip install {peer.package} torch)")
            continue
        for line in _run(name, shapes):
            if "error" in line:
                said.append(f"{name} {line['shape']}".rstrip() + f": {line['error']}")
                continue
            keys = {"burst": "", "seconds": " call", "forward": " forward"}
            for key, suffix in keys.items():
                if line.get(key):
                    column = f"{peer.column}{suffix}"
                    times.setdefault(column, {})[json.dumps(line["shape"])] = line[key]
            if "MiB" in line:
                said.append(
                    f"{name} {line['shape']}: {line['MiB']:.0f} MiB in addition to its operands"
                )
            used = f"{name}: {peer.package} {line['version']}, by {line['how']}"
            if used not in said:
                said.append(used)
    return times, said


def _run(name: str, shapes: Sequence[Any]) -> Iterator[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "jaxattn.bench.baselines.torch_runner",
        name,
        *map(json.dumps, shapes),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        yield {"shape": "", "error": f"took more than {SECONDS} seconds"}
        return
    for line in done.stdout.splitlines():
        if line.startswith('{"peer"'):  # libraries print there too
            yield json.loads(line)
    if done.returncode:
        last = done.stderr.strip().splitlines() or ["no message"]
        yield {"shape": "", "error": f"exit code {done.returncode}: {last[-1]}"}


def seconds(call: Callable[[int], Any]) -> tuple[float, str]:
    """(median seconds of a call, how it was timed)."""
    cuda = torch().cuda
    for i in range(3):
        call(i)  # compiles and tunes
    cuda.synchronize()

    def calls() -> None:
        for i in range(CALLS):
            call(i)

    run, how = calls, "CUDA events around calls"
    try:
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            calls()
        run, how = graph.replay, "CUDA events around a graph"
    except RuntimeError as error:
        print(f"not captured: {error}", file=sys.stderr)

    def timed(replays: int) -> float:
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            run()
        end.record()
        cuda.synchronize()
        return start.elapsed_time(end) * 1e-3 / replays

    begin = time.perf_counter()
    while time.perf_counter() - begin < WARMUP:
        timed(1)
    replays = max(1, round(LOOP_SECONDS / timed(1)))
    times = [timed(replays) / CALLS for _ in range(REPEATS)]
    return statistics.median(times), how


def burst_seconds(call: Callable[[int], Any]) -> float:
    """Seconds per call in which any of its kernels runs; 0 without a profiler.

    The profile begins with an idle GPU and a warm-up; only the last calls count."""
    t = torch()
    number = 0

    def some() -> None:
        nonlocal number
        for _ in range(PROFILED):
            call(number)
            number += 1
        t.cuda.synchronize()

    some()
    before = number
    with t.profiler.profile(activities=[t.profiler.ProfilerActivity.CUDA]) as profile:
        time.sleep(IDLE)
        begin = time.perf_counter()
        while time.perf_counter() - begin < WARMUP:
            some()
        some()
    cuda = t.autograd.DeviceType.CUDA
    spans = sorted(
        (each.start_ns(), each.start_ns() + each.duration_ns())
        for each in profile.profiler.kineto_results.events()
        if each.device_type() == cuda and not each.is_user_annotation()
        and not each.name().startswith(NO_KERNELS)
    )  # fmt: skip
    kernels, rest = divmod(len(spans), number - before)
    return 0.0 if rest else covered(spans[-PROFILED * kernels :]) * 1e-9 / PROFILED


def peak_mebibytes(call: Callable[[int], Any]) -> float:
    """MiB that a call allocates at its peak, in addition to its operands."""
    cuda = torch().cuda
    cuda.synchronize()
    before = cuda.memory_allocated()
    cuda.reset_peak_memory_stats()
    call(0)
    cuda.synchronize()
    return (cuda.max_memory_allocated() - before) / 2**20


def covered(spans: Sequence[tuple[int, int]]) -> int:
    """The total length that sorted spans cover; overlaps count once."""
    until = total = 0
    for start, end in spans:
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def version(module: str) -> str:
    """The version of an installed package. vllm is not imported, as it needs its own PyTorch."""
    if module == "vllm":
        try:
            return importlib.metadata.version(module)
        except importlib.metadata.PackageNotFoundError:
            return "libraries"
    return str(importlib.import_module(module).__version__)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxattn.bench.baselines.torch_runner",
        description="Times another package, in JSON lines.",
    )
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("shape", nargs="*", type=json.loads, help="as '[128, 128, 4096, 1]'")
    args = parser.parse_args(argv)
    peer = PEERS[args.peer]
    for shape in args.shape:
        line: dict[str, Any] = {"peer": args.peer, "shape": shape}
        try:
            with contextlib.nullcontext() if peer.gradient else torch().no_grad():
                call = peer.build(*shape)
                line["seconds"], line["how"] = seconds(call)
                line["burst"] = burst_seconds(call)
                if peer.gradient:
                    line["forward"] = burst_seconds(call.forward)  # type: ignore[attr-defined]
                    line["MiB"] = peak_mebibytes(call)
            line["version"] = version(peer.module)
        except Exception as error:  # any kind, because the failure is the baseline's
            first = (str(error).strip().splitlines() or [""])[0]
            line["error"] = f"{type(error).__name__}: {first}"
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
