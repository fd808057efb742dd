"""`python -m jaxattn.bench collectives --gpus 2 4`: sums over GPUs inside a scanned, donated step.

    python -m jaxattn.bench collectives --gpus 2 4 --json xla.json
    python -m jaxattn.bench collectives --gpus 2 4 --nccl --json nccl.json

Each GPU has an array of so many KiB, and is given the sum of all. `us` is a sum's share of a loop
of sums, less the same loop without them. `kernel us` is what the sum's kernels take of a GPU, by a
profile, waiting for the others included. Rows differ by how the sum is made:

    XLA           an all-reduce with XLA's default flags: its own kernel up to 4 MiB
    NCCL          the same with `--nccl`, which turns that kernel off
    one launch    `all_reduce_norm_layer`, with residual and norm, of tokens of 2,048 bfloat16

A loop with launches of the third kind copies its residual in each turn, which a model's step does
not. `kernels` names what ran.
"""

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxattn.bench import record
from jaxattn.bench.parallel_layout import COLLECTIVES
from jaxattn.bench.tables import show, store
from jaxattn.bench.timing import launches, seconds
from jaxattn.models.base import jit_step
from jaxattn.models.layer_cache import CacheSize
from jaxattn.models.mailbox import MOST_TOKENS, Mailboxes, closed, opened
from jaxattn.ops.all_reduce_norm import all_reduce_norm_layer
from jaxattn.parallel import Group, Parallel

KIB = (4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = ("bfloat16", "float32")
FEATURES = 2048  # of a token, in one launch
TURNS = 64
NCCL_FLAG = "--xla_gpu_experimental_use_collective_kernels="
COMPILERS = 16  # threads
WHOLE = PartitionSpec()


def parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{program} collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[2], help="of the sums")
    parser.add_argument("--kib", type=int, nargs="+", default=list(KIB), help="of each GPU's array")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--nccl", action="store_true", help="without XLA's own kernel")
    parser.add_argument("--turns", type=int, default=TURNS, help="sums of a loop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it here")
    args = parser.parse_args(argv)
    if min(args.gpus) < 2:
        parser.error(f"--gpus {min(args.gpus)}: a sum is over two GPUs or more")
    if min(args.kib) < 4 or args.turns < 1:
        parser.error("--kib must be at least 4 and --turns positive")
    return args


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sum:
    """What a row times.

    Attributes:
        how: "XLA", "NCCL" or "one launch"; "nothing" is the loop without a sum.
    """

    gpus: int
    kib: int
    dtype: str
    how: str

    @property
    def numbers(self) -> int:
        return self.kib * 1024 // jnp.dtype(self.dtype).itemsize

    @property
    def tokens(self) -> int:
        return self.numbers // FEATURES


class Loop:
    """A donated step of `turns` sums over a group of GPUs: compiled, then timed."""

    def __init__(self, of: Sum, turns: int):
        self.of, self.turns = of, turns
        self.group = Group(Parallel(tensor=of.gpus), tuple(jax.devices()[: of.gpus]))
        self.axes = self.group.parallel.axes("tensor")
        own = PartitionSpec(self.axes)
        fused = of.how == "one launch"
        self.operands: tuple[jax.Array, ...] = tuple(
            self.group.put(array, WHOLE) for array in (_residual(of) if fused else _numbers(of))
        )
        self.state = self._mailbox(own) if fused else self.group.put(_counts(of), own)
        specs = own, *[WHOLE] * len(self.operands)
        out_specs = WHOLE, own
        over = self.group.step(self._launches if fused else self._sums, specs, out_specs)
        self._run = jit_step(
            lambda operands, state: over(state, *operands),
            out_shardings=self.group.shardings(out_specs),
        )
        self.compiled: Any = None

    def compile(self) -> None:
        self.compiled = self._run.lower(self.operands, self.state).compile()

    def __call__(self, number: int = 0) -> Any:
        del number
        x, self.state = self.compiled(self.operands, self.state)
        # Virtual devices of a CPU wait for one another for ever with several steps under way.
        return x if jax.default_backend() == "gpu" else jax.block_until_ready(x)

    def _mailbox(self, own: PartitionSpec) -> Any:
        of = self.of
        boxes = Mailboxes(gpus=of.gpus, tokens=of.tokens, features=FEATURES)
        empty = functools.partial(boxes.init, CacheSize(pages=1, slots=1))
        # It is there on all GPUs before one writes to another.
        return boxes.connected(jax.block_until_ready(self.group.make(empty, own)))

    def _sums(self, count: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def turn(carry: Any, _: None) -> Any:
            count, x = carry
            half = x * 0.5
            met = half if self.of.how == "nothing" else lax.psum(half, self.axes)
            return (count + 1, met * 0.5), None

        (count, x), _ = lax.scan(turn, (count, x), None, length=self.turns)
        return x, count

    def _launches(self, arrays: Any, x: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        def turn(carry: Any, _: None) -> Any:
            arrays, x, part = carry
            x, part, mailbox = all_reduce_norm_layer(
                x, part, weights, opened(arrays), axes=self.axes, layer=0, dtype=jnp.bfloat16
            )
            return (closed(mailbox), x, part), None

        carry = arrays, x, x.astype(jnp.bfloat16)
        (arrays, x, _), _ = lax.scan(turn, carry, None, length=self.turns)
        return x, arrays


def _counts(of: Sum) -> np.ndarray:
    return np.zeros(of.gpus, np.int32)


def _numbers(of: Sum) -> tuple[np.ndarray, ...]:
    return (np.ones(of.numbers, of.dtype),)


def _residual(of: Sum) -> tuple[np.ndarray, ...]:
    x = np.random.default_rng(0).standard_normal((of.tokens, FEATURES), np.float32)
    return x, np.ones((1, FEATURES), np.float32)


def wanted(args: argparse.Namespace) -> list[Sum]:
    """The sums of a run, each loop without one before them."""
    how = ("NCCL",) if args.nccl else ("XLA", "one launch")
    sums = [
        Sum(gpus=gpus, kib=kib, dtype=dtype, how=each)
        for gpus in args.gpus
        for dtype in args.dtypes
        for kib in args.kib
        for each in ("nothing", *how)
    ]
    return [each for each in sums if each.how != "one launch" or _one_launch(each)]


def _one_launch(of: Sum) -> bool:
    whole = of.numbers % FEATURES == 0
    return of.dtype == "bfloat16" and whole and of.tokens <= MOST_TOKENS


def time(loop: Loop, nothing: float) -> dict[str, Any]:
    """A row. `nothing`: seconds of a turn without a sum."""
    turn, of = seconds(loop) / loop.turns, loop.of
    spent = launches(loop, calls=2, warmup=0.0)
    kernels = {
        f"{each.kernel} {each.op}": took
        for each, took in spent.items()
        if any(word in f"{each.kernel} {each.op}".lower() for word in (*COLLECTIVES, "norm"))
    }
    most = max(kernels, key=lambda name: kernels[name].seconds, default="")
    took = sum(each.seconds for each in kernels.values()) / of.gpus / loop.turns
    return {
        "GPUs": of.gpus,
        "dtype": of.dtype,
        "KiB": of.kib,
        "sum": of.how,
        "us": (turn - nothing) * 1e6,
        "kernel us": took * 1e6 if took else "",
        "turn us": turn * 1e6,
        "kernel": most[:40],
    }


def compile_all(loops: Sequence[Loop]) -> None:
    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(Loop.compile, loops))


def main(argv: Sequence[str], program: str) -> int:
    # Read when the backend starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args = parse(argv, program)
    if args.nccl:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NCCL_FLAG}"
    if len(jax.devices()) < max(args.gpus):
        print(
            f"{program}: --gpus {max(args.gpus)} takes as many devices, and JAX sees "
            f"{len(jax.devices())}",
            file=sys.stderr,
        )
        return 2
    result = {**record.begin("collectives", program, ["collectives", *argv]), "rows": []}
    loops = [Loop(each, args.turns) for each in wanted(args)]
    compile_all(loops)
    nothing = 0.0
    for loop in loops:
        if loop.of.how == "nothing":
            nothing = seconds(loop) / loop.turns
            continue
        result["rows"].append(time(loop, nothing))
        print(f"collectives {result['rows'][-1]}", file=sys.stderr, flush=True)
        store(result, args.json)
    record.end(result)
    store(result, args.json)
    show(f"Sums over GPUs, loops of {args.turns}", result["rows"])
    return 0
