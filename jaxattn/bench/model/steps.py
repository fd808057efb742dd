"""A model's decode and prefill steps, compiled like the engine's, and their times.

`kernels ms` is the GPU time of all that a step runs, from a profile after a short warm-up: a burst.
`ms` is the time per step in a longer run. Like the engine, the run dispatches each step before the
previous one has finished, so `ms` is the time per token.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.arena import ArenaSpec
from jaxattn.bench.harness.materialized_arrays import materialized_arrays
from jaxattn.bench.harness.timing import PROFILED, launches, seconds
from jaxattn.bench.model import expert_usage, roofline
from jaxattn.bench.model.batches import BenchBatches
from jaxattn.bench.model.op_categories import OpCategory, by_kind
from jaxattn.bench.model.random_weights import random_state
from jaxattn.core.dispatch import Implementation
from jaxattn.engine.sampling.sampler import SamplingBatch, SamplingMode, sample
from jaxattn.engine.steps.model_steps import ModelStep
from jaxattn.kernels.hopper.build.trace_cache import share_launches
from jaxattn.memory.plan import nbytes
from jaxattn.models.interface import init_state, jit_step, overlaid
from jaxattn.models.network.decoder_model import DecoderModel

STEPS = 4  # different batches, taken in turn; the experts of each are counted
RUN_SECONDS = 0.8  # of a run of steps; dispatching the first takes the host 1 or 2 ms
WRITES = 8  # number of a step's largest results to name
COMPILERS = 8  # threads


class OutOfMemoryError(ValueError):
    """Raised if the weights and caches of a run do not fit on the device."""


class ModelSteps:
    """A model with random weights, its caches and its compiled steps on one device.

    Args:
        params: The result of `random_params`, not packed.
        rows: The batches of the run.
        chunks: Sizes of prefill chunks in tokens, with one executable for each.
        implementation: The kernels to use; None for the best.
    """

    def __init__(
        self,
        model: DecoderModel,
        params: Any,
        rows: BenchBatches,
        chunks: Sequence[int],
        *,
        implementation: Implementation | None = None,
    ) -> None:
        self.model, self.rows, self.implementation = model, rows, implementation
        decodes = [ModelStep("decode", count, 1) for count in rows.rows]
        prefills = [ModelStep("prefill", 1, chunk) for chunk in chunks]
        self.params: Any = model.pack(params)
        self.state: Any = random_state(model, rows.size, arena(model, rows), seed=rows.seed + 1)
        jax.block_until_ready((self.params, self.state))
        entries = [*decodes, *prefills]
        with ThreadPoolExecutor(COMPILERS) as pool:
            self._compiled = {entry: pool.submit(self._compile, entry) for entry in entries}

    def touched(self) -> dict[int, list[int]]:
        """The distinct experts per layer and timed batch, by number of rows."""
        batches = [self.rows.decode(self.rows.most, step) for step in range(STEPS)]
        found, self.state = expert_usage.distinct(
            self.model,
            self.params,
            self.state,
            batches,
            self.rows.rows,
            implementation=self.implementation,
        )
        return found

    def decode(
        self, count: int, touched: Sequence[int], rate: float
    ) -> tuple[dict, list[OpCategory]]:
        """Returns a row of the table and the time by category, for steps of `count` rows.

        Args:
            touched: The distinct experts per layer and batch.
            rate: Bytes per second of the roofline.
        """
        compiled = self._compiled[ModelStep("decode", count, 1)].result()
        batches = [self.rows.decode(count, step) for step in range(STEPS)]
        mean = sum(touched) / len(touched) if touched else 0.0
        moved = roofline.moved(self.model, count, self.rows.context, mean)
        whole, kernels, kinds = self._times(compiled, batches, moved=moved.by_kind)
        bound = moved.total / rate
        layers = len(self.model.spec.blocks)
        row = {
            "step": "decode",
            "B": count,
            "T": self.rows.context,
            "ms": whole * 1e3,
            "kernels ms": kernels * 1e3,
            "roof ms": bound * 1e3,
            "times roof": whole / bound,
            "us a layer over roof": (whole - bound) * 1e6 / layers,
            "tokens/s": count / whole,
            "GB": moved.total / 1e9,
            "gaps us a layer": (whole - kernels) * 1e6 / layers,
            "experts": mean,
            "uniform": expert_usage.expected(self.model, count),
            "launches": sum(kind.launches for kind in kinds),
            **_compiled_facts(compiled),
        }
        return row, kinds

    def prefill(self, chunk: int) -> tuple[dict, list[OpCategory]]:
        """A row of the table and the time by category, for one prompt in chunks of `chunk`."""
        compiled = self._compiled[ModelStep("prefill", 1, chunk)].result()
        batches = self.rows.chunks(chunk)
        whole, kernels, kinds = self._times(compiled, batches, together=len(batches))
        work, unknown = roofline.flops(self.model, self.rows.prompt)
        row = {
            "step": "prefill",
            "B": 1,
            "T": self.rows.prompt,
            "chunk": chunk,
            "ms": whole * 1e3,
            "kernels ms": kernels * 1e3,
            "TFLOP": work / 1e12,
            "TFLOP/s": work / whole / 1e12,
            "tokens/s": self.rows.prompt / whole,
            "launches": sum(kind.launches for kind in kinds),
            **_compiled_facts(compiled),
        }
        return (row | {"not counted": " ".join(unknown)} if unknown else row), kinds

    def _times(
        self,
        compiled: jax.stages.Compiled,
        batches: Sequence[Any],
        *,
        together: int = 1,
        moved: Mapping[str, int] | None = None,
    ) -> tuple[float, float, list[OpCategory]]:
        """Times `together` steps in order: (seconds in a run, kernel seconds, categories)."""

        def call(number: int = 0) -> Any:
            for place in range(together):
                batch = batches[(number * together + place) % len(batches)]
                result, self.state = compiled(self.params, self.state, batch)
            return result

        once = seconds(call, repeats=1, warmup=0.0)
        spent = launches(call, calls=min(PROFILED, math.ceil(RUN_SECONDS / once)))
        kernels = sum(each.seconds for each in spent.values())
        calls = min(256, math.ceil(RUN_SECONDS / (kernels or once)))

        def run() -> Any:
            for number in range(calls):
                result = call(number)
            return result

        whole = seconds(run, repeats=5 if calls > 1 else 3) / calls
        return whole, kernels or whole, by_kind(spent, compiled, moved or {})

    def _compile(self, entry: ModelStep) -> jax.stages.Compiled:
        prefill = entry.kind == "prefill"
        step = jit_step(
            _with_tokens(self.model.prefill if prefill else self.model.decode),
            prefill=prefill,
            implementation=None
            if prefill and self.implementation != "xla"
            else self.implementation,
        )
        batch = self.rows.chunks(entry.tokens)[0] if prefill else self.rows.decode(entry.rows, 0)
        with share_launches():
            lowered = step.lower(self.params, self.state, batch)
        return lowered.compile()


def _with_tokens(step: Callable) -> Callable:
    """A model's step that returns the likeliest tokens instead of logits, as in greedy decoding."""

    def step_and_choose(params: Any, state: Any, batch: Any, **options: Any) -> Any:
        logits, state = step(params, state, batch, **options)
        zeros = jnp.zeros(len(logits))
        greedy = SamplingBatch(zeros, zeros, zeros, zeros, zeros)
        return sample(logits, greedy, batch.seq_lens, SamplingMode.GREEDY), state

    return step_and_choose


def arena(model: DecoderModel, rows: BenchBatches) -> ArenaSpec:
    """The arena for the scratch memory of all decode steps of a run."""
    counts = ((count, rows.width) for count in rows.rows)
    return overlaid(s for count, width in counts for s in model.scratch(count, max_pages=width))


def check_room(model: DecoderModel, rows: BenchBatches) -> None:
    """Raises OutOfMemoryError if weights and caches do not fit on the device."""
    state = jax.eval_shape(lambda: init_state(model, rows.size, arena(model, rows)))
    weights, caches = nbytes(model.param_shapes()), nbytes(state)
    room = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if room is not None and weights + caches > room:
        raise OutOfMemoryError(
            f"weights of {weights / 1e9:.1f} GB and caches of {caches / 1e9:.1f} GB for "
            f"{rows.most} rows of {rows.context} tokens do not fit in {room / 1e9:.1f} GB; use "
            "fewer --rows or a smaller --context"
        )


def peak_bytes() -> int | None:
    """The device's peak memory in bytes; None if the device does not report it."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def attempt(
    make: Callable[[], tuple[dict, list[OpCategory]]], what: str
) -> tuple[dict, list[OpCategory]]:
    """Returns `make()`, or a row with the error: a chunk may be too large for the device."""
    try:
        return make()
    except jax.errors.JaxRuntimeError as error:
        return {"step": what, "error": str(error).splitlines()[0][:200]}, []


def _compiled_facts(compiled: jax.stages.Compiled) -> dict[str, Any]:
    memory = compiled.memory_analysis()
    found = [f"{each} of {each.op_name}" for each in materialized_arrays(compiled.as_text() or "")]
    temp = memory.temp_size_in_bytes if memory else 0
    return {"temp MiB": temp / 2**20, "writes": found[:WRITES]}
