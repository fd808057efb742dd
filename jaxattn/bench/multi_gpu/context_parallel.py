"""`python -m jaxattn.bench long-row --gpus 1 2 4`: attention of one long row over several GPUs.

    python -m jaxattn.bench long-row --tokens 1000000 --heads 32 128 --gpus 1 2 4

The bench times latent attention of one new token to `--tokens` cached ones, as in a layer of a
decode step with `--tensor N --context N`. Each of N GPUs has the queries of 1/N of the heads, and
1/N of the pages. The GPUs gather all queries, attend with all heads, and exchange and merge their
outputs (`jaxattn.parallel.ContextParallelPages`). Projections are not included. 32 heads are those
of Kimi-Linear, and 128 those of DeepSeek-V3.

`us` is the time per layer of a loop over layers: a loop less a shorter one. `roof us` is the time
to read a GPU's latents once at the GPU's rate. `kernels us` is the time of a layer's kernels, from
a profile. Of these, `attention us` attends and merges a GPU's own pieces. `meeting us` merges these
pieces, sends them and merges those of all GPUs in one launch. `gather us` and `exchange us` are the
two collectives, including waits. `exchange us` contains both for the launches of
`jaxattn.ops.collectives.peer_exchange`. `efficiency` is per doubling of the GPUs: 1 if twice the
GPUs need half the time. `relative error` compares the output with XLA's on one GPU. `--apart` adds
rows in which several GPUs merge, send and merge again in separate launches, and `--nccl` rows with
XLA's collectives.
"""

import argparse
import functools
import gc
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxattn import mla
from jaxattn.arena import Arena
from jaxattn.bench.attention.mla import DIM, PAGE, RANK, SCALE
from jaxattn.bench.harness import numpy_reference, run_metadata
from jaxattn.bench.harness.result_tables import show, store
from jaxattn.bench.harness.timing import launches, seconds_more
from jaxattn.bench.model.roofline import rate
from jaxattn.bench.multi_gpu.device_count import short_of_devices
from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer, with_addresses
from jaxattn.core.dispatch import Implementation
from jaxattn.core.validation.array_checks import BoundedLengths
from jaxattn.engine.execution.model_runner import call_serialized
from jaxattn.kernels.hopper.build.trace_cache import share_launches
from jaxattn.models.blocks.paged_mixer import attended
from jaxattn.models.interface import jit_step
from jaxattn.parallel import (
    ContextParallelPages,
    DeviceGroup,
    Parallel,
    gathered_in,
    pieces_of,
    rank,
)
from jaxattn.parallel.peer_access import peers_reach

HEADS = (32, 128)
LAYERS = 4  # read in turn, so that L2 holds none of them
# How often the longer loop runs all layers; 2 ms of a shorter one were within the host's noise.
TIMES = 26
MOST_ERROR = 8e-3  # parts and their sum are rounded to bfloat16
COMPILERS = 8  # threads
# Substrings of a kernel's name or its instruction's; the first match decides the column.
KINDS = {
    "meeting us": ("mla_decode_meet",),
    "attention us": ("mla_decode",),
    "gather us": ("allgather", "all-gather", "all_gather"),
    "exchange us": ("sendrecv", "alltoall", "all-to-all", "all_to_all", "peer_exchange"),
}


def parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{program} long-row",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of the row")
    parser.add_argument(
        "--heads",
        type=int,
        nargs="+",
        default=list(HEADS),
        help="total number of heads; one run for each",
    )
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[1, 2], help="numbers of GPUs; one run for each"
    )
    parser.add_argument(
        "--layers", type=int, default=LAYERS, help="number of caches, which the bench reads in turn"
    )
    parser.add_argument("--nccl", action="store_true", help="also time XLA's collectives")
    parser.add_argument(
        "--apart", action="store_true", help="also time merging and sending in separate launches"
    )
    parser.add_argument(
        "--compile", action="store_true", help="only fill the cache of compiled programs"
    )
    parser.add_argument(
        "--no-check", action="store_true", help="do not compare the output with XLA's"
    )
    parser.add_argument(
        "--implementation",
        choices=("mosaic_gpu", "xla"),
        help="implementation to time (default: the best that the device supports)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the whole result to this file"
    )
    args = parser.parse_args(argv)
    if min(args.tokens, args.layers, *args.gpus, *args.heads) < 1:
        parser.error("--tokens, --layers, --gpus and --heads must be positive")
    for gpus in args.gpus:
        if odd := [heads for heads in args.heads if heads % gpus]:
            parser.error(f"--heads {odd[0]} must be a multiple of --gpus {gpus}")
    return args


# How several GPUs merge their outputs: in the launch that merges a GPU's own pieces, in separate
# launches, or by XLA's collectives.
type Sent = Literal["met", "apart", "XLA"]


class ContextParallelCase:
    """One row's attention over a number of GPUs: compiled from shapes, filled, then timed."""

    def __init__(
        self,
        heads: int,
        gpus: int,
        *,
        tokens: int,
        layers: int = LAYERS,
        implementation: Implementation | None = None,
        sent: Sent = "met",
    ):
        self.heads, self.gpus, self.tokens, self.layers = heads, gpus, tokens, layers
        self.implementation = implementation
        self.parallel = Parallel(tensor=gpus, context=gpus)
        self.group = DeviceGroup(self.parallel, tuple(jax.devices()[:gpus]))
        self.stripes = -(-tokens // (PAGE * gpus))
        tensor_axes = self.parallel.axes("tensor") or None
        self.by_heads = PartitionSpec(None, None, tensor_axes)
        by_launches = gpus > 1 and sent != "XLA" and implementation != "xla"
        by_launches = by_launches and peers_reach(self.group.devices)
        self.pieces = pieces_of(heads // gpus, DIM, RANK) if by_launches else None
        self.room = None
        gathered_pieces = gathered_in(heads // gpus * DIM)
        if self.pieces and gathered_pieces and sent == "met":
            self.room = mla.merge_buffer_shape(1, heads, max_pages=self.stripes, page_size=PAGE)
            self.pieces = gathered_pieces if self.room else self.pieces
        self.state_specs = PartitionSpec(None, tensor_axes), self.group.each, self.group.each
        self._loops: dict[int, Any] = {}
        self.state: Any = None

    def compile(self) -> None:
        with share_launches():
            for turns in (self.layers, self.layers * TIMES):
                self._loops[turns] = self._jitted(turns).lower(*self._shapes()).compile()

    def _jitted(self, turns: int) -> Any:
        specs = self.by_heads, self.state_specs
        over = self.group.step(functools.partial(self._loop, turns), specs, specs)
        return jit_step(over, out_shardings=self.group.shardings(specs))

    def _shapes(self) -> tuple[Any, Any]:
        queries = jax.ShapeDtypeStruct((1, 1, self.heads // self.gpus, DIM), jnp.bfloat16)
        pages = jax.ShapeDtypeStruct((self.layers, self.stripes, PAGE, DIM), jnp.bfloat16)
        state = pages, jax.eval_shape(self._arena), jax.eval_shape(self._mailbox)
        given = zip((queries, state), (self.by_heads, self.state_specs), strict=True)
        shapes = [self.group.shapes(local, specs) for local, specs in given]
        return shapes[0], shapes[1]

    def _arena(self) -> Arena:
        rows, q_len, heads = attended(self.parallel, 1, 1, self.heads // self.gpus)
        sizes: Any = dict(batch=rows, q_len=q_len, num_heads=heads)
        return Arena.allocate(mla.scratch(**sizes, max_pages=self.stripes, page_size=PAGE))

    def _mailbox(self) -> list[SymmetricBuffer]:
        """The buffers for exchanged rows and for merged outputs; empty if XLA does both."""
        return [
            SymmetricBuffer.empty(self.gpus, *room) for room in (self.pieces, self.room) if room
        ]

    def _loop(self, turns: int, queries: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        cache, arena, mailbox = state
        tables, lens = jnp.asarray(self._tables())[None], jnp.full(1, self.tokens, jnp.int32)
        spread = ContextParallelPages.of(self.parallel, tables, lens, page_size=PAGE, q_len=1)
        local_lens = lens if spread is None else spread.lens
        schedule = mla.decode_schedule(
            local_lens,
            q_len=1,
            num_heads=self.heads,
            max_pages=self.stripes,
            page_size=PAGE,
            batch_invariant=True,
        )

        def turn(carry: Any, layer: jax.Array) -> Any:
            queries, before, arena, mailbox = carry
            # A barrier: the queries of a layer depend on the previous layer's output.
            queries, _ = lax.optimization_barrier((queries, before))

            def attend(
                query_parts: Any, tables: Any, lens: Any, **merge: Any
            ) -> tuple[Any, Any, list[Any]]:
                decode_options: Any = dict(
                    scale=SCALE,
                    layer=layer,
                    schedule=schedule,
                    arena=arena,
                    implementation=self.implementation,
                )
                if merge:
                    found = mla.mla_decode_context_parallel(
                        query_parts[0], cache, tables, lens, **decode_options, **merge
                    )
                    out, new_arena, after = found
                    return out, after, [new_arena]
                out, lse, new_arena = mla.mla_decode(
                    query_parts[0], cache, tables, lens, **decode_options
                )
                return out, lse, [new_arena]

            if spread is None:
                out, _, rest = attend(
                    [queries], tables, BoundedLengths(local_lens, self.stripes * PAGE)
                )
            else:
                merge = spread
                if mailbox and self.pieces:
                    options: Any = dict(implementation=self.implementation)
                    options |= dict(zip(["merge"], mailbox[1:], strict=False))
                    merge = spread.exchanging(mailbox[0], pieces=self.pieces[0], **options)
                out, rest, mailbox = merge.attend([queries], attend)
            return (queries, lax.optimization_barrier(out), rest[0], mailbox), None

        layers = jnp.arange(turns) % self.layers
        begin = queries, jnp.zeros((*queries.shape[:-1], RANK), queries.dtype), arena, mailbox
        (_, out, arena, mailbox), _ = lax.scan(turn, begin, layers)
        return out, (cache, arena, mailbox)

    def _tables(self) -> np.ndarray:
        """int32: the place of each stripe of the row."""
        return np.random.default_rng(0).permutation(self.stripes).astype(np.int32)

    def fill(self) -> None:
        """Fills caches and queries with normal numbers; each page is the same for any `gpus`."""

        def made() -> Any:
            places = jnp.asarray(np.argsort(self._tables()))
            numbers = places * self.gpus + rank(self.parallel, "context")

            def page(layer: jax.Array, number: jax.Array) -> jax.Array:
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), layer), number)
                return jax.random.normal(key, (PAGE, DIM), jnp.bfloat16)

            def of(layer: jax.Array) -> jax.Array:
                return jax.vmap(functools.partial(page, layer))(numbers)

            return lax.map(of, jnp.arange(self.layers)), self._arena(), self._mailbox()

        pages, arena, mailbox = self.group.make(made, self.state_specs)
        self.state = jax.block_until_ready(
            (pages, arena, [with_addresses(each) for each in mailbox])
        )
        drawn = np.random.default_rng(1).standard_normal((1, 1, self.heads, DIM), np.float32)
        self.queries = self.group.put(drawn.astype(jnp.bfloat16), self.by_heads)

    def __call__(self, turns: int) -> jax.Array:
        out, self.state = call_serialized(self._loops[turns], self.queries, self.state)
        return out

    def output(self) -> np.ndarray:
        """The last layer's output, [H, R]."""
        return numpy_reference.exact(self(self.layers))[0, 0]

    def sent_by(self) -> str:
        if self.room:
            return "one launch"
        return "" if self.gpus == 1 else "launches" if self.pieces else "XLA"

    def time(self) -> dict[str, Any]:
        """Returns a row of the table."""
        few, many = self.layers, self.layers * TIMES
        took = seconds_more(lambda: self(few), lambda: self(many)) / (many - few)
        spent = launches(lambda _: self(many), calls=2, warmup=0.0)
        kinds = dict.fromkeys(("kernels us", *KINDS), 0.0)
        for launch, each in spent.items():
            name = f"{launch.kernel} {launch.op}".lower()
            share = each.seconds / self.gpus / many * 1e6
            kinds["kernels us"] += share
            for kind, words in KINDS.items():
                if any(word in name for word in words):
                    kinds[kind] += share
                    break
        moved = self.tokens * DIM * 2 / self.gpus
        card = rate(self.group.devices[0].device_kind, None)
        return {
            "H": self.heads,
            "T": self.tokens,
            "GPUs": self.gpus,
            "sent by": self.sent_by(),
            "us": took * 1e6,
            "roof us": moved / card * 1e6 if card else "",
            **kinds,
            "GB/s": moved / took / 1e9,
            "TFLOP/s": 2 * self.heads * self.tokens * (DIM + RANK) / self.gpus / took / 1e12,
            "launches": {f"{k.kernel} {k.op}": tuple(v) for k, v in spent.items()},
        }


def main(argv: Sequence[str], program: str) -> int:
    # The backend reads this as it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args = parse(argv, program)
    if short_of_devices(program, f"--gpus {max(args.gpus)}", max(args.gpus)):
        return 2
    result = {**run_metadata.begin("long-row", program, ["long-row", *argv]), "rows": []}
    sizes: Any = dict(tokens=args.tokens, layers=args.layers)
    ways: list[Sent] = ["met"]
    if args.apart:
        ways.append("apart")
    if args.nccl:
        ways.append("XLA")
    rows = [
        ContextParallelCase(heads, gpus, **sizes, implementation=args.implementation, sent=sent)
        for heads in args.heads
        for gpus in args.gpus
        for sent in (ways if gpus > 1 else ways[:1])
    ]
    checked = [] if args.no_check else args.heads
    alone = {
        heads: ContextParallelCase(heads, 1, **sizes, implementation="xla") for heads in checked
    }
    compile_all([*rows, *alone.values()])
    if args.compile:
        return 0
    expected = {heads: _output(row) for heads, row in alone.items()}
    for row in rows:
        row.fill()
        found = row.time()
        if row.heads in expected:
            found["relative error"] = _checked(row, expected[row.heads])
        found |= _beside(found, result["rows"])
        row.state = None
        gc.collect()
        result["rows"].append(found)
        print(f"long-row {_shown(found)}", file=sys.stderr, flush=True)
        store(result, args.json)
    run_metadata.end(result, args.json)
    show(f"One row of {args.tokens:,} tokens", [_shown(row) for row in result["rows"]])
    return 0


def compile_all(rows: Sequence[ContextParallelCase]) -> None:
    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(ContextParallelCase.compile, rows))


def _output(row: ContextParallelCase) -> np.ndarray:
    row.fill()
    found, row.state = row.output(), None
    return found


def _checked(row: ContextParallelCase, expected: np.ndarray) -> float:
    """The relative L2 error of the last layer's output.

    Raises:
        AssertionError: the error is larger than rounding explains.
    """
    error = numpy_reference.relative_l2(row.output(), expected)
    if not error < MOST_ERROR:
        raise AssertionError(f"{row.heads} heads on {row.gpus} GPUs: relative error {error}")
    return error


def _beside(found: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, float]:
    """The comparison with one GPU, if that has a row."""
    one = next((each["us"] for each in rows if each["GPUs"] == 1 and each["H"] == found["H"]), None)
    if one is None or found["GPUs"] == 1:
        return {}
    times = one / found["us"]
    return {
        "times one GPU": times,
        "efficiency": times ** (1 / math.log2(found["GPUs"])) / 2,
    }


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "launches"}
