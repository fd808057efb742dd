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
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxattn.bench.attention import mla
from jaxattn.bench.baselines import flashinfer_xqa, flashmla_fa3, torch_layers
from jaxattn.bench.harness.timing import LOOP_SECONDS, PROFILED, WARMUP, rotation

CALLS, REPEATS = 32, 7  # calls per graph, and repeated measurements
SECONDS = 1200  # limit for a baseline's process, which may compile for long on its first call
DIM = 128  # head dim of the delta rule's keys and values
DEVICE = "cuda"
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


def torch() -> Any:
    return importlib.import_module("torch")


def paged(batch: int, tokens: int | str) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(tokens per row, pages per row, shuffled page numbers, number of caches that exceed L2)."""
    lens = mla.lengths(batch, tokens)
    pages = -(-lens // mla.PAGE)
    total = int(pages.sum())
    layers = rotation(total * mla.PAGE * mla.DIM * 2, most=32)
    return lens, pages, np.random.default_rng(0).permutation(total), layers


def flashinfer_mla(batch: int, heads: int, tokens: int | str, q_len: int) -> Callable[[int], Any]:
    """FlashInfer's wrapper, planned beforehand like our schedule."""
    t, flashinfer = torch(), importlib.import_module("flashinfer.mla")
    lens, pages, numbers, layers = paged(batch, tokens)
    normal = functools.partial(t.randn, dtype=t.bfloat16, device=DEVICE)
    rank, rope = mla.RANK, mla.DIM - mla.RANK
    latents = [normal(len(numbers), mla.PAGE, rank) for _ in range(layers)]
    rotated = [normal(len(numbers), mla.PAGE, rope) for _ in range(layers)]
    q_nope, q_pe = normal(batch * q_len, heads, rank), normal(batch * q_len, heads, rope)
    index = functools.partial(t.tensor, dtype=t.int32, device=DEVICE)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(
        t.empty(128 * 2**20, dtype=t.int8, device=DEVICE)
    )
    wrapper.plan(
        qo_indptr=index([q_len * row for row in range(batch + 1)]),
        kv_indptr=index([0, *pages.cumsum().tolist()]),
        kv_indices=index(numbers.tolist()),
        kv_len_arr=index(lens.tolist()),
        num_heads=heads,
        head_dim_ckv=rank,
        head_dim_kpe=rope,
        page_size=mla.PAGE,
        causal=q_len > 1,
        sm_scale=mla.SCALE,
        q_data_type=t.bfloat16,
        kv_data_type=t.bfloat16,
    )
    return lambda i: wrapper.run(
        q_nope=q_nope, q_pe=q_pe, ckv_cache=latents[i % layers], kpe_cache=rotated[i % layers]
    )


def flaggems_mla(batch: int, heads: int, tokens: int | str, q_len: int) -> Callable[[int], Any]:
    """FlagGems' kernel, which is written in Triton and does not split rows."""
    if q_len != 1:
        raise ValueError(f"it takes one token a row, not {q_len}")
    t, flag_gems = torch(), importlib.import_module("flag_gems")
    lens, pages, numbers, layers = paged(batch, tokens)
    most = int(pages.max())
    normal = functools.partial(t.randn, dtype=t.bfloat16, device=DEVICE)
    caches = [normal(len(numbers), mla.PAGE, 1, mla.DIM) for _ in range(layers)]
    q = normal(batch, 1, heads, mla.DIM)
    table = np.zeros((batch, most), np.int32)
    table[np.arange(most) < pages[:, None]] = numbers
    index = functools.partial(t.tensor, dtype=t.int32, device=DEVICE)
    tables, lengths = index(table.tolist()), index(lens.tolist())
    return lambda i: flag_gems.flash_mla(
        q, tables, caches[i % layers], most * mla.PAGE, mla.PAGE, batch, 1, lengths, heads, 1,
        mla.DIM, mla.RANK, True,
    )  # fmt: skip


def delta_rule(rows: int, tokens: int, key_heads: int, value_heads: int) -> dict[str, Any]:
    """q, k, v, g, beta like gdn_prefill's inputs, with gates log sigmoid(uniform)."""
    t = torch()
    normal = functools.partial(t.randn, dtype=t.bfloat16, device=DEVICE)
    uniform = functools.partial(t.rand, dtype=t.float32, device=DEVICE)
    return {
        "q": normal(rows, tokens, key_heads, DIM),
        "k": normal(rows, tokens, key_heads, DIM),
        "v": normal(rows, tokens, value_heads, DIM),
        "g": t.nn.functional.logsigmoid(uniform(rows, tokens, value_heads)),
        "beta": uniform(rows, tokens, value_heads),
    }


def fla_decode(
    batch: int, key_heads: int, value_heads: int, tokens: int, state: str
) -> Callable[[int], Any]:
    """FLA's recurrence only, without our op's convolution, gates and norm."""
    if state != "float32":
        raise ValueError(f"its states are float32, not {state}")
    t, fla = torch(), importlib.import_module("fla.ops.gated_delta_rule")
    size = batch * value_heads * DIM * DIM * 4
    layers = rotation(size)
    states = t.randn(layers, batch, value_heads, DIM, DIM, dtype=t.float32, device=DEVICE)
    operands = delta_rule(batch, tokens, key_heads, value_heads)
    return lambda i: fla.fused_recurrent_gated_delta_rule(
        **operands,
        initial_state=states[i % layers],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def prefill(key_heads: int, value_heads: int, count: int, length: int) -> dict[str, Any]:
    """Keyword arguments, with FLA's names, for a chunked prefill of packed sequences."""
    t = torch()
    return {
        **delta_rule(1, count * length, key_heads, value_heads),
        "cu_seqlens": t.tensor(
            [length * i for i in range(count + 1)], dtype=t.int64, device=DEVICE
        ),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def fla_prefill(*shape: int) -> Callable[[int], Any]:
    os.environ["FLA_FLASH_QLA"] = "0"  # FLA's own kernels, even if FlashQLA is installed
    fla, operands = importlib.import_module("fla.ops.gated_delta_rule"), prefill(*shape)
    return lambda i: fla.chunk_gated_delta_rule(**operands)


def fla_kda_prefill(heads: int, count: int, length: int) -> Callable[[int], Any]:
    fla, operands = importlib.import_module("fla.ops.kda"), prefill(heads, heads, count, length)
    drawn = torch().rand(1, count * length, heads, DIM, dtype=torch().float32, device=DEVICE)
    operands |= {"g": torch().nn.functional.logsigmoid(drawn)}
    return lambda i: fla.chunk_kda(**operands)


def flashqla_prefill(*shape: int) -> Callable[[int], Any]:
    """FlashQLA on normalized q and k, because it leaves their norm to torch.compile."""
    flash_qla, operands = importlib.import_module("flash_qla"), prefill(*shape)
    normalize = torch().nn.functional.normalize
    operands |= {name: normalize(operands[name], dim=-1) for name in "qk"}
    operands["use_qk_l2norm_in_kernel"] = False
    return lambda i: flash_qla.chunk_gated_delta_rule(**operands)


def fla_gradient(op: str, rows: int, tokens: int) -> Callable[[int], Any]:
    """Both passes of FLA's own kernels, at shapes of bench/layers/gradients/op_gradients.py."""
    os.environ["FLA_FLASH_QLA"] = "0"
    if op == "kda":
        operands = delta_rule(rows, tokens, 16, 16)
        drawn = torch().rand(rows, tokens, 16, DIM, dtype=torch().float32, device=DEVICE)
        operands |= {"g": torch().nn.functional.logsigmoid(drawn)}
        return both_passes(importlib.import_module("fla.ops.kda").chunk_kda, operands)
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return both_passes(rule, gradient_operands(op, rows, tokens))


def flashqla_gradient(op: str, rows: int, tokens: int) -> Callable[[int], Any]:
    """Both passes of FlashQLA on normalized q and k.

    The time does not include their norm, which FlashQLA leaves to torch.compile.
    """
    flash_qla, normalize = importlib.import_module("flash_qla"), torch().nn.functional.normalize
    operands = gradient_operands(op, rows, tokens)
    operands |= {name: normalize(operands[name], dim=-1) for name in "qk"}
    return both_passes(flash_qla.chunk_gated_delta_rule, operands, l2norm=False)


def gradient_operands(op: str, rows: int, tokens: int) -> dict[str, Any]:
    if op != "gdn":
        raise ValueError(f"it has no {op}")
    return delta_rule(rows, tokens, 16, 32)


def both_passes(
    rule: Callable[..., Any], operands: dict[str, Any], *, l2norm: bool = True
) -> Callable[[int], Any]:
    """A call that returns the gradients of all operands, for a fixed cotangent of the output."""
    t = torch()
    operands = {name: x.requires_grad_() for name, x in operands.items()}
    cotangent = t.randn(*operands["v"].shape, dtype=t.bfloat16, device=DEVICE)

    def forward(i: int) -> Any:
        del i
        return rule(**operands, use_qk_l2norm_in_kernel=l2norm)[0]

    def call(i: int) -> Any:
        return t.autograd.grad(forward(i), list(operands.values()), cotangent)

    call.forward = forward  # type: ignore[attr-defined]
    return call


def flashinfer_prefill(*shape: int) -> Callable[[int], Any]:
    """FlashInfer takes packed tokens without a batch axis, and the decay instead of its log."""
    module, operands = importlib.import_module("flashinfer.gdn_prefill"), prefill(*shape)
    packed = {name: operands[name][0] for name in ("q", "k", "v", "g", "beta")}
    operands |= packed | {"g": torch().exp(packed["g"])}
    return lambda i: module.chunk_gated_delta_rule(**operands)


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
        "torch",
        "layer_gradients",
        "fla",
        "flash-linear-attention",
        torch_layers.layer_gradient,
        gradient=True,
    ),
    "flashqla-layer-gradient": TorchBaseline(
        "torch",
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
                said.append(f"{name} {line['shape']}: {line['MiB']:.0f} MiB beside its operands")
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
