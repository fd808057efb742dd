"""The executables of an engine: every entry point that serving can reach, compiled ahead of time.

    prefill of 1 x T tokens    a prompt's chunk: the first, a later one (the cached prefix is walked
                               page by page up to the whole block table), the last partial one
    decode of B x S tokens     the first decode and all that follow

Lengths are data, so a row's length never asks for another executable; shapes are buckets.

Two engines of one configuration share their executables while either lives, however many threads
build them, so that nothing is compiled twice. Executables hold no arrays.
"""

import concurrent.futures
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.arena import ArenaSpec
from jaxattn.core.dispatch import Implementation
from jaxattn.engine.sampling import SamplingBatch, sampled
from jaxattn.memory.limits import Limits
from jaxattn.models.config import HybridConfig
from jaxattn.models.hybrid import decode_step, jit_step, prefill_step
from jaxattn.models.state import DecodeBatch, DecodeState, PrefillBatch, init_state, op_scratch

OnCompile = Callable[[str, float | None], None]


@dataclasses.dataclass(frozen=True)
class EntryPoint:
    """One executable: `kind` is "prefill" or "decode", of `rows` rows of `tokens` tokens."""

    kind: str
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.rows} x {self.tokens} tokens"

    def step(self) -> Callable:
        """The step, with sampling: (config, params, state, batch) -> (tokens, state)."""
        return sampled(prefill_step if self.kind == "prefill" else decode_step)

    def batch_shapes(self, width: int) -> Any:
        """Its batch, as shapes: what `jit(...).lower` is given and what every call passes."""
        rows = int32(self.rows)
        tokens, tables = int32(self.rows, self.tokens), int32(self.rows, width)
        model = (
            PrefillBatch(tokens, rows, rows, tables, rows)
            if self.kind == "prefill"
            else DecodeBatch(tokens, rows, tables, rows)
        )
        floats: Any = jax.ShapeDtypeStruct((self.rows,), jnp.float32)
        seeds: Any = jax.ShapeDtypeStruct((self.rows,), jnp.uint32)
        return model, SamplingBatch(floats, floats, seeds, rows)


def int32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def entry_points(limits: Limits) -> tuple[EntryPoint, ...]:
    """All that an engine of these limits can run, the largest of a kind last."""
    prefills = (EntryPoint("prefill", 1, chunk) for chunk in limits.chunks)
    decodes = (
        EntryPoint("decode", rows, tokens)
        for tokens in sorted(limits.q_lens, reverse=True)
        for rows in limits.batches
    )
    return *prefills, *decodes


def op_specs(config: HybridConfig, limits: Limits, width: int) -> tuple[ArenaSpec, ...]:
    """The scratch of every op of every entry point; a small batch can ask for more than a large."""
    return tuple(
        spec
        for entry in entry_points(limits)
        if entry.kind == "decode"
        for spec in op_scratch(config, entry.rows, max_pages=width, q_len=entry.tokens)
    )


def arena_spec(config: HybridConfig, limits: Limits, width: int) -> ArenaSpec:
    """The arena that serves them all: the maximum, whatever ran first."""
    whole = ArenaSpec()
    for spec in op_specs(config, limits, width):
        whole |= spec
    return whole


def new_state(config: HybridConfig, limits: Limits) -> DecodeState:
    """The state of an engine; under `jax.eval_shape`, its shapes."""
    return init_state(
        config,
        limits.batch,
        limits.pages,
        limits.batch,
        max_pages=limits.table_width,
        spec=arena_spec(config, limits, limits.table_width),
    )


class Steps:
    """Compiled entry points, as a mapping from name to executable."""

    def __init__(self, executables: Mapping[str, jax.stages.Compiled]):
        self.executables = dict(executables)


_shared: "weakref.WeakValueDictionary[Any, Steps]" = weakref.WeakValueDictionary()
_locks: dict[Any, threading.Lock] = {}
_guard = threading.Lock()


def compiled_steps(
    config: HybridConfig,
    limits: Limits,
    params: Any,
    *,
    implementation: Implementation | None = None,
    on_compile: OnCompile | None = None,
    workers: int = 1,
) -> Steps:
    """Every entry point, compiled, or those of an engine alive that has the same.

    Args:
        params: the parameters, or their shapes.
        on_compile: called with each name and None before it is compiled, and with the seconds
            that it took after that (0 if it was there already). With several workers from their
            threads.
        workers: how many are compiled at a time.
    """
    avals = jax.tree.map(lambda x: (x.shape, str(x.dtype)), params)
    leaves, tree = jax.tree.flatten(avals, is_leaf=lambda x: isinstance(x, tuple))
    device, x64 = jax.devices()[0], bool(jax.config.jax_enable_x64)
    shape = dataclasses.replace(limits, utilization=None, num_pages=limits.pages)
    key = (config, shape, implementation, tuple(leaves), tree, device, x64)
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        steps = _shared.get(key)
        if steps is None:
            steps = _compile(config, limits, params, implementation, on_compile, workers)
            _shared[key] = steps
        elif on_compile:
            for name in steps.executables:
                on_compile(name, None)
                on_compile(name, 0.0)
    return steps


def _compile(
    config: HybridConfig,
    limits: Limits,
    params: Any,
    implementation: Implementation | None,
    on_compile: OnCompile | None,
    workers: int,
) -> Steps:
    state = jax.eval_shape(lambda: new_state(config, limits))
    # What is named is for decoding. Unless XLA is, prefill takes the best there is: its kernels
    # refuse other models than those of decoding do.
    chosen: dict[str, Implementation | None] = {
        "prefill": "xla" if implementation == "xla" else None,
        "decode": implementation,
    }

    def build(entry: EntryPoint) -> jax.stages.Compiled:
        if on_compile:
            on_compile(str(entry), None)
        start = time.perf_counter()
        jitted: Any = jit_step(entry.step(), config, implementation=chosen[entry.kind])
        batch = entry.batch_shapes(limits.table_width)
        executable = jitted.lower(params, state, batch).compile()
        if on_compile:
            on_compile(str(entry), time.perf_counter() - start)
        return executable

    entries = entry_points(limits)
    if workers == 1:
        return Steps({str(entry): build(entry) for entry in entries})
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return Steps(dict(zip(map(str, entries), pool.map(build, entries), strict=True)))
