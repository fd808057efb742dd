"""`python -m jaxattn.bench parallel NAME --tensor 2`: decode steps on several GPUs beside one.

    python -m jaxattn.bench parallel DeepSeek-V2-Lite --rows 32 128 --tensor 2
    python -m jaxattn.bench parallel DeepSeek-V2-Lite --tokens 32768 --tensor 2 --context 2

NAME is as for `bench model`. Weights, latents and states are random, of the model's real shapes.
The steps on one GPU and on the group run one after the other in one process, on the same cards.
`ms` is a step's share of a run of steps, each sent before the one before it is done.

`collectives ms` is the time that a GPU spends in them, waiting included. `all-reduces` counts sums
of layers in a step's HLO, of which a loop over layers has one body, and `other form` those that
XLA's own kernel does not take.
"""

import argparse
import dataclasses
import functools
import gc
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxattn.bench import record
from jaxattn.bench.model.named import UnknownModel, find
from jaxattn.bench.model.rows import Rows
from jaxattn.bench.model.weights import Draw, draw_of, fill
from jaxattn.bench.tables import show, store
from jaxattn.bench.timing import launches, seconds
from jaxattn.memory.budget import nbytes_each
from jaxattn.models import DecodeState, divided
from jaxattn.models.base import init_state, jit_step, overlaid
from jaxattn.models.decoder import DecoderModel
from jaxattn.parallel import ALONE, Group, Parallel
from jaxattn.parallel.compiled import all_reduces

STEPS = 4  # different batches, taken in turn
RUN_SECONDS = 0.3  # of a run of steps
COLLECTIVES = (
    "nccl",
    "all-reduce",
    "all_reduce",
    "allreduce",
    "collective",
    "all_gather",
    "alltoall",
)


def parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{program} parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="a shipped configuration, or a folder with a config.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128], help="of decode steps")
    parser.add_argument("--tokens", type=int, default=4096, help="of each row")
    for field in dataclasses.fields(Parallel):
        parser.add_argument(f"--{field.name}", type=int, default=1, metavar="N")
    parser.add_argument("--not-alone", action="store_true", help="not the step on one GPU")
    parser.add_argument("--seed", type=int, default=0, help="of weights, caches and tokens")
    parser.add_argument(
        "--implementation", choices=("mosaic_gpu", "xla"), help="without it the best that runs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it here")
    args = parser.parse_args(argv)
    try:
        names = [field.name for field in dataclasses.fields(Parallel)]
        args.parallel = Parallel(**{name: getattr(args, name) for name in names})
        args.name, _, args.model = find(args.name)
        divided(args.model, args.parallel)
    except (UnknownModel, ValueError) as error:
        parser.error(str(error))
    if min(args.rows) < 1 or args.tokens < 1:
        parser.error("--rows and --tokens must be positive")
    if odd := [rows for rows in args.rows if rows % args.parallel.data]:
        parser.error(f"--rows {odd[0]} is no multiple of --data {args.parallel.data}")
    return args


def main(argv: Sequence[str], program: str) -> int:
    # Read when the backend starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    args = parse(argv, program)
    if len(jax.devices()) < args.parallel.gpus:
        print(
            f"{program}: {args.parallel.flags} takes {args.parallel.gpus} devices, and JAX sees "
            f"{len(jax.devices())}",
            file=sys.stderr,
        )
        return 2
    result: dict[str, Any] = {
        **record.begin("parallel", program, ["parallel", *argv]),
        "model": args.name,
        "layout": args.parallel.flags,
        "rows": [],
    }
    layouts = ([] if args.not_alone else [ALONE]) + [args.parallel]
    for parallel in layouts:
        measure(args, parallel, result)
        gc.collect()  # the next layout needs the room
    alone = {row["B"]: row["ms"] for row in result["rows"] if row["GPUs"] == 1}
    for row in result["rows"]:
        if row["GPUs"] > 1 and row["B"] in alone:
            row["times one GPU"] = alone[row["B"]] / row["ms"]
    record.end(result)
    store(result, args.json)
    table = [{k: v for k, v in row.items() if k != "all-reduce forms"} for row in result["rows"]]
    show(f"{args.name}, {args.tokens:,} tokens a row, {args.parallel.flags}", table)
    return 0


def measure(args: argparse.Namespace, parallel: Parallel, result: dict[str, Any]) -> None:
    """A row for each number of rows, of one layout."""
    run = Run(args.model, parallel, args)
    print(f"{parallel.flags or 'one GPU'}: {run.gigabytes}", file=sys.stderr, flush=True)
    for rows in args.rows:
        row = run.decode(rows)
        print(row, file=sys.stderr, flush=True)
        result["rows"].append(row)
        store(result, args.json)


class Run:
    """A model with random weights and caches over a group, one GPU included."""

    def __init__(self, model: DecoderModel, parallel: Parallel, args: argparse.Namespace):
        self.parallel, self.args = parallel, args
        self.model: Any = divided(model, parallel)
        self.group = Group(parallel, tuple(jax.devices()[: parallel.gpus]))
        local = tuple(rows // parallel.data for rows in args.rows)
        own_tokens = -(-args.tokens // parallel.context)
        self.rows = Rows(
            rows=local, context=own_tokens, prompt=0, vocab=model.vocab_size, seed=args.seed
        )
        specs = self.model.packed_specs(), self.model.state_specs()
        self.params = self._params()
        self.state = self._state(specs[1])
        self.specs = specs
        jax.block_until_ready((self.params, self.state))
        weights, caches = nbytes_each(self.params) / 1e9, nbytes_each(self.state) / 1e9
        self.gigabytes = f"weights {weights:.1f} GB and state {caches:.1f} GB on each GPU"

    def _params(self) -> Any:
        """The same random numbers on every GPU, so that all routers choose alike."""
        model = self.model
        leaves, tree = jax.tree.flatten_with_path(model.param_shapes())
        draws = [
            draw_of(jax.tree_util.keystr(path, simple=True, separator="."), leaf, model)
            for path, leaf in leaves
        ]
        specs = jax.tree.leaves(model.param_specs())
        filled = [
            self._filled(leaf, draw, spec, number)
            for number, ((_, leaf), draw, spec) in enumerate(zip(leaves, draws, specs, strict=True))
        ]
        params = jax.tree.unflatten(tree, filled)
        packed = [model.pack(own) for own in self.group.split(params)]
        return self.group.join(packed, model.packed_specs())

    def _state(self, specs: DecodeState) -> DecodeState:
        counts = self.rows.rows
        width = self.rows.width
        spec = overlaid(s for n in counts for s in self.model.scratch(n, max_pages=width))
        state: Any = self.group.make(
            functools.partial(init_state, self.model, self.rows.size, spec), specs
        )
        shapes = jax.eval_shape(lambda: init_state(self.model, self.rows.size, spec))
        for number, (cache, arrays) in enumerate(shapes.caches.items()):
            for name, shape in arrays.items():
                spec_of = specs.caches[cache][name]
                state.caches[cache][name].delete()
                state.caches[cache][name] = self._filled(
                    shape, Draw.of(1.0), spec_of, 1000 + number
                )
        return state

    def _filled(self, leaf: jax.ShapeDtypeStruct, draw: Draw, spec: Any, number: int) -> Any:
        make = functools.partial(fill, shape=leaf.shape, dtype=leaf.dtype.name)
        key = jax.random.fold_in(jax.random.key(self.args.seed), number)
        return self.group.make(functools.partial(make, key, *map(float, draw)), spec)

    def batch(self, rows: int, step: int) -> Any:
        """A decode step's batch: each data group has as many rows, with pages of its own."""
        batch = self.rows.decode(rows // self.parallel.data, step)
        batch = dataclasses.replace(batch, seq_lens=np.full_like(batch.seq_lens, self.args.tokens))
        whole = jax.tree.map(lambda x: np.concatenate([x] * self.parallel.data), batch)
        return jax.device_put(whole, self.group.sharding(self.group.rows))

    def decode(self, rows: int) -> dict[str, Any]:
        """The row of a decode step of `rows` rows in all."""
        step = functools.partial(_greedy, self.model, self.args.implementation)
        over = self.group.step(
            step, (*self.specs, self.group.rows), (self.group.rows, self.specs[1])
        )
        batches = [self.batch(rows, number) for number in range(STEPS)]
        compiled = jit_step(over).lower(self.params, self.state, batches[0]).compile()
        on_gpu = jax.default_backend() == "gpu"

        def call(number: int = 0) -> Any:
            tokens, self.state = compiled(self.params, self.state, batches[number % STEPS])
            # Virtual devices of a CPU wait for one another for ever with several steps under way.
            return tokens if on_gpu else jax.block_until_ready(tokens)

        for _ in range(3):  # one loads, one records, and with collectives one more updates
            jax.block_until_ready(call())
        once = seconds(call, repeats=3, warmup=0.0)
        calls = max(1, min(256, math.ceil(RUN_SECONDS / once)))

        def run() -> Any:
            for number in range(calls):
                result = call(number)
            return result

        whole = seconds(run, repeats=5, warmup=0.0) / calls
        spent = launches(call, calls=min(calls, 8))
        found = all_reduces(compiled.as_text() or "")
        gpus, forms = self.parallel.gpus, [each for each in found if each.of_layers]
        meeting = [
            each.seconds
            for launch, each in spent.items()
            if any(name in f"{launch.kernel} {launch.op}".lower() for name in COLLECTIVES)
        ]
        memory = compiled.memory_analysis()
        return {
            "GPUs": gpus,
            "B": rows,
            "T": self.args.tokens,
            "ms": whole * 1e3,
            "tokens/s": rows / whole,
            "kernels ms": sum(each.seconds for each in spent.values()) / gpus * 1e3,
            "collectives ms": sum(meeting) / gpus * 1e3,
            "all-reduces": len(forms),
            "other form": sum(not each.serves for each in forms),
            "temp MiB": memory.temp_size_in_bytes / 2**20 if memory else 0,
            "all-reduce forms": [dataclasses.asdict(each) for each in forms],
        }


def _greedy(
    model: Any, implementation: Any, params: Any, state: DecodeState, batch: Any
) -> tuple[jax.Array, DecodeState]:
    """The likeliest tokens, each GPU's of its part of the vocabulary merged, and the state."""
    logits, state = model.decode(params, state, batch, implementation=implementation)
    return model.vocabulary.best(logits)[0], state
