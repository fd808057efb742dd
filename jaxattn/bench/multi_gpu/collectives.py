"""`python -m jaxattn.bench collectives --gpus 2 4`: all-reduces inside a scanned, donated step.

    python -m jaxattn.bench collectives --gpus 2 4 --json xla.json
    python -m jaxattn.bench collectives --gpus 2 4 --nccl --json nccl.json

Each GPU has an array of that many KiB and gets the sum over all GPUs. Before each sum, a kernel of
about 60 us reads and writes other memory, as a layer does, so no GPU waits for another's host. `us`
is the time per sum in the loop, less that of the same loop without sums. It includes the launch,
and scatters by 10 us like the kernel before it. `kernel us` is the median of the sum's kernels from
a profile, including the wait for other GPUs. Rows differ by the implementation of the sum:

    XLA           an all-reduce with XLA's default flags: its own kernel up to 4 MiB
    NCCL          the same with `--nccl`, which turns that kernel off
    one launch    `all_reduce_norm_layer`, with residual and norm, of tokens of 2,048 bfloat16

`kernel` names the kernel that ran.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxattn.bench.harness import run_metadata
from jaxattn.bench.harness.command_parser import command_parser
from jaxattn.bench.harness.result_tables import show, store
from jaxattn.bench.harness.timing import gpu_launches, seconds
from jaxattn.bench.multi_gpu.device_count import short_of_devices
from jaxattn.bench.multi_gpu.sharded_model import COLLECTIVES
from jaxattn.engine.execution.model_runner import call_serialized
from jaxattn.models.caches.layer_cache import CacheSize
from jaxattn.models.caches.symmetric_memory import (
    MOST_TOKENS,
    SymmetricMemoryCache,
    buffer_arrays,
    symmetric_buffer,
)
from jaxattn.models.interface import jit_step
from jaxattn.ops.collectives.all_reduce_norm import all_reduce_norm_layer
from jaxattn.parallel import DeviceGroup, Parallel
from jaxattn.parallel.peer_access import peers_reach

KIB = (4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = ("bfloat16", "float32")
FEATURES = 2048  # per token, for "one launch"
TURNS, PER_TURN = 16, 4  # iterations of a loop, and sums per iteration
FILLER = 2**25  # float32 numbers that the kernel before a sum reads and writes
NCCL_FLAG = "--xla_gpu_experimental_use_collective_kernels="
COMPILERS = 16  # threads
WHOLE = PartitionSpec()
NO_ROWS = CacheSize(pages=1, slots=1)


def parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    parser = command_parser(program, "collectives", __doc__)
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[2], help="numbers of GPUs that sum an array"
    )
    parser.add_argument(
        "--kib", type=int, nargs="+", default=list(KIB), help="KiB of each GPU's array"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--nccl", action="store_true", help="turn XLA's own all-reduce kernel off")
    parser.add_argument("--turns", type=int, default=TURNS, help="iterations of a loop")
    parser.add_argument(
        "--filler",
        type=int,
        default=FILLER,
        help="float32 numbers that the kernel before each sum reads and writes",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the whole result to this file"
    )
    args = parser.parse_args(argv)
    if min(args.gpus) < 2:
        parser.error(
            f"--gpus must be at least 2, because a sum needs two GPUs; got {min(args.gpus)}"
        )
    if min(args.kib) < 4 or min(args.turns, args.filler) < 1:
        parser.error("--kib must be at least 4, and --turns and --filler must be positive")
    return args


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduceCase:
    """The case that a row times.

    Attributes:
        gpus: The number of GPUs.
        kib: KiB of each GPU's array.
        dtype: The dtype of the array.
        method: "XLA", "NCCL" or "one launch". The loop without a sum is "nothing" for the first
            two. For the third it is "filler", which has a residual and no product before the sum.
    """

    gpus: int
    kib: int
    dtype: str
    method: str

    @property
    def base(self) -> "AllReduceCase":
        """The loop without the sum."""
        if self.method == "one launch":
            return dataclasses.replace(self, method="filler")
        return dataclasses.replace(self, method="nothing")

    @property
    def numbers(self) -> int:
        return self.kib * 1024 // jnp.dtype(self.dtype).itemsize

    @property
    def tokens(self) -> int:
        return self.numbers // FEATURES


class AllReduceLoop:
    """A donated step of `turns` iterations with PER_TURN sums each, over a group of GPUs."""

    def __init__(self, of: AllReduceCase, turns: int, filler: int):
        self.of, self.turns = of, turns
        self.group = DeviceGroup(Parallel(tensor=of.gpus), tuple(jax.devices()[: of.gpus]))
        self.axes = self.group.parallel.axes("tensor")
        self.filler, self.shard_spec = filler, PartitionSpec(self.axes)
        self.fused = of.method == "one launch"
        residual = self.fused or of.method == "filler"
        self.input_arrays = _residual(of)[: 1 + self.fused] if residual else _numbers(of)
        self.boxes = SymmetricMemoryCache(gpus=of.gpus, tokens=of.tokens, features=FEATURES)
        self.compiled: Any = None

    def compile(self) -> None:
        """Compiles from shapes, before any array is on a device."""
        specs = self.shard_spec, *[WHOLE] * len(self.input_arrays)
        out_specs = WHOLE, self.shard_spec
        over = self.group.step(self._launches if self.fused else self._sums, specs, out_specs)
        run = jit_step(
            lambda operands, state: over(state, *operands),
            out_shardings=self.group.shardings(out_specs),
        )
        kept: Any = jax.ShapeDtypeStruct((1,), jnp.float32)
        kept = self.boxes.shapes(NO_ROWS) if self.fused else kept
        state = kept, jax.ShapeDtypeStruct((self.filler,), jnp.float32)
        shapes = (
            self.group.shapes(self.input_arrays, WHOLE),
            self.group.shapes(state, self.shard_spec),
        )
        self.compiled = run.lower(*shapes).compile()

    @contextlib.contextmanager
    def filled(self, fillers: dict[int, jax.Array]) -> Iterator[None]:
        """A context in which the operands of a call are on the devices.

        Args:
            fillers: Fillers of earlier loops by number of GPUs, for reuse.
        """
        gpus = self.of.gpus
        if gpus not in fillers:
            fillers[gpus] = self.group.put(np.ones(gpus * self.filler, np.float32), self.shard_spec)
        kept = self._mailbox() if self.fused else self.group.put(_shares(self.of), self.shard_spec)
        self.operands = tuple(self.group.put(array, WHOLE) for array in self.input_arrays)
        self.state: Any = jax.block_until_ready((kept, fillers.pop(gpus)))
        yield
        _, fillers[gpus] = self.state
        del self.operands, self.state

    def __call__(self) -> Any:
        x, self.state = call_serialized(self.compiled, self.operands, self.state)
        return x

    def seconds(self) -> float:
        """Seconds per sum, including the kernel before it."""
        return seconds(self) / (self.turns * PER_TURN)

    def _mailbox(self) -> Any:
        empty = functools.partial(self.boxes.init, NO_ROWS)
        # The buffer has to exist on all GPUs before any GPU writes to another.
        return self.boxes.connected(jax.block_until_ready(self.group.make(empty, self.shard_spec)))

    def _sums(self, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        """Each GPU has its own share, as XLA would compute a sum of equal arrays locally."""

        def turn(carry: Any, _: None) -> Any:
            share, filler, x = carry
            for _number in range(PER_TURN):
                filler, x = _filled(filler, x)
                if self.of.method != "filler":
                    x = x * share.astype(x.dtype)
                x = lax.optimization_barrier(x)
                if self.of.method not in ("filler", "nothing"):
                    x = lax.psum(x, self.axes)
            return (share, filler, x), None

        (share, filler, x), _ = lax.scan(turn, (*state, x), None, length=self.turns)
        return x, (share, filler)

    def _launches(self, state: Any, x: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        def turn(carry: Any, _: None) -> Any:
            arrays, filler, x, part = carry
            for _number in range(PER_TURN):
                filler, x = _filled(filler, x)
                x, part, mailbox = all_reduce_norm_layer(
                    x,
                    part,
                    weights,
                    symmetric_buffer(arrays),
                    axes=self.axes,
                    layer=0,
                    dtype=jnp.bfloat16,
                )
                arrays = buffer_arrays(mailbox)
            return (arrays, filler, x, part), None

        carry = *state, x, x.astype(jnp.bfloat16)
        (arrays, filler, x, _), _ = lax.scan(turn, carry, None, length=self.turns)
        return x, (arrays, filler)


def _filled(filler: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the filler, read and written after `x` is ready; `x`, after that): sums do not overlap."""
    first = x.reshape(-1)[0].astype(jnp.float32)
    filler = lax.optimization_barrier(filler * (1.0001 + 1e-30 * first))
    return filler, x + (1e-30 * filler[0]).astype(x.dtype)


def _shares(of: AllReduceCase) -> np.ndarray:
    return np.full(of.gpus, 1 / of.gpus, np.float32)


def _numbers(of: AllReduceCase) -> tuple[np.ndarray, ...]:
    return (np.ones(of.numbers, of.dtype),)


def _residual(of: AllReduceCase) -> tuple[np.ndarray, ...]:
    x = np.random.default_rng(0).standard_normal((of.tokens, FEATURES), np.float32)
    return x, np.ones((1, FEATURES), np.float32)


def wanted(args: argparse.Namespace) -> list[AllReduceCase]:
    """The cases of a run."""
    sums = [
        AllReduceCase(gpus=gpus, kib=kib, dtype=dtype, method=how)
        for gpus in args.gpus
        for dtype in args.dtypes
        for kib in args.kib
        for how in (("NCCL",) if args.nccl else ("XLA", "one launch"))
    ]
    return [each for each in sums if each.method != "one launch" or _one_launch(each)]


def _one_launch(of: AllReduceCase) -> bool:
    whole = of.numbers % FEATURES == 0
    fits = of.dtype == "bfloat16" and whole and of.tokens <= MOST_TOKENS
    return fits and peers_reach(jax.devices()[: of.gpus])


def time(loop: AllReduceLoop, base: float) -> dict[str, Any]:
    """Returns a row. `base` is the time in seconds of the work before a sum."""
    seconds, of = loop.seconds() - base, loop.of
    kernels = {
        f"{launch.kernel} {launch.op}": [length for _, length in events]
        for launch, events in _launched(loop).items()
        if any(word in f"{launch.kernel} {launch.op}".lower() for word in COLLECTIVES)
    }
    longest_kernel = max(kernels, key=lambda name: sum(kernels[name]), default="")
    lengths = [length for each in kernels.values() for length in each]
    return {
        "GPUs": of.gpus,
        "dtype": of.dtype,
        "KiB": of.kib,
        "sum": of.method,
        "us": seconds * 1e6,
        "kernel us": statistics.median(lengths) / 1e3 if lengths else "",
        "base us": base * 1e6,
        "kernel": longest_kernel[:40],
    }


def _launched(loop: AllReduceLoop) -> dict[Any, list[tuple[float, float]]]:
    """(start, length) in ns of what ran on the GPUs; empty without a GPU."""
    if jax.default_backend() != "gpu":
        return {}
    return dict(gpu_launches(lambda: jax.block_until_ready((loop(), loop()))))


def compile_all(loops: Sequence[AllReduceLoop]) -> None:
    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(AllReduceLoop.compile, loops))


def main(argv: Sequence[str], program: str) -> int:
    # The backend reads this as it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args = parse(argv, program)
    if args.nccl:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NCCL_FLAG}"
    if short_of_devices(program, f"--gpus {max(args.gpus)}", max(args.gpus)):
        return 2
    result = {**run_metadata.begin("collectives", program, ["collectives", *argv]), "rows": []}
    sums = wanted(args)
    loops = {
        each: AllReduceLoop(each, args.turns, args.filler)
        for each in dict.fromkeys(of for each in sums for of in (each.base, each))
    }
    compile_all([*loops.values()])
    bases, fillers = dict[AllReduceCase, float](), dict[int, jax.Array]()
    for each in sums:
        if each.base not in bases:
            with loops[each.base].filled(fillers):
                bases[each.base] = loops[each.base].seconds()
        with loops[each].filled(fillers):
            result["rows"].append(time(loops[each], bases[each.base]))
        print(f"collectives {result['rows'][-1]}", file=sys.stderr, flush=True)
        store(result, args.json)
    run_metadata.end(result, args.json)
    show("Sums over GPUs, each after another kernel", result["rows"])
    return 0
