"""The executables of an engine: every entry point that serving can reach, compiled ahead of time.

    prefill of 1 x T tokens    a prompt's chunk: the first, a later one (the cached prefix is walked
                               page by page up to the whole block table), the last partial one
    decode of B x S tokens     the first decode and all that follow

Lengths are data, so a row's length never asks for another executable; shapes are buckets.

Two engines of one model share their executables while either lives, however many threads
build them, so that nothing is compiled twice. Executables hold no arrays.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.arena import ArenaSpec
from jaxattn.core.dispatch import Implementation
from jaxattn.engine.process import PROCESS
from jaxattn.engine.sampling import SamplingBatch, sampled
from jaxattn.memory.limits import Limits
from jaxattn.models.base import (
    CacheSize,
    DecodeBatch,
    DecodeState,
    Model,
    PrefillBatch,
    init_state,
    jit_step,
    overlaid,
)
from jaxattn.parallel import Group

OnCompile = Callable[[str, float | None], None]


@dataclasses.dataclass(frozen=True)
class EntryPoint:
    """One executable: `kind` is "prefill" or "decode", of `rows` rows of `tokens` tokens."""

    kind: str
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.rows} x {self.tokens} tokens"

    def step(self, model: Model) -> Callable:
        """The model's step with sampling: (params, state, batch) -> (tokens, state)."""
        step = model.prefill if self.kind == "prefill" else model.decode
        return sampled(step, model.vocabulary)

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
        return model, SamplingBatch(floats, rows, floats, floats, seeds)


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


def op_specs(model: Model, limits: Limits, width: int) -> tuple[ArenaSpec, ...]:
    """The scratch of every op of every entry point; a small batch can ask for more than a large."""
    return tuple(
        spec
        for entry in entry_points(limits)
        if entry.kind == "decode"
        for spec in model.scratch(entry.rows, max_pages=width, q_len=entry.tokens)
    )


def arena_spec(model: Model, limits: Limits, width: int) -> ArenaSpec:
    """The arena that serves them all."""
    return overlaid(op_specs(model, limits, width))


def cache_size(limits: Limits) -> CacheSize:
    """What the caches of an engine are made for."""
    return CacheSize(pages=limits.pages, slots=limits.batch)


def new_state(model: Model, limits: Limits) -> DecodeState:
    """The state of one GPU of an engine; under `jax.eval_shape`, its shapes."""
    return init_state(model, cache_size(limits), arena_spec(model, limits, limits.table_width))


def allocated_state(model: Model, limits: Limits, devices: tuple[jax.Device, ...]) -> DecodeState:
    """The state of an engine, on its devices."""
    if len(devices) == 1:
        return new_state(model, limits)
    group = Group(model.parallel, devices)
    return group.make(partial(new_state, model, limits), model.state_specs())


class Steps:
    """Compiled entry points, as a mapping from name to executable."""

    def __init__(self, executables: Mapping[str, jax.stages.Compiled]):
        self.executables = dict(executables)


def compiled_steps(
    model: Model,
    limits: Limits,
    params: Any,
    devices: tuple[jax.Device, ...],
    *,
    implementation: Implementation | None = None,
    on_compile: OnCompile | None = None,
    workers: int = 1,
) -> Steps:
    """Every entry point, compiled, or those of an engine alive that has the same.

    Args:
        params: the packed parameters, or their shapes.
        devices: that run them.
        on_compile: called with each name and None before it is compiled, and with the seconds
            that it took after that (0 if it was there already). With several workers from their
            threads.
        workers: how many are compiled at a time.
    """
    avals = jax.tree.map(lambda x: (x.shape, str(x.dtype)), params)
    leaves, tree = jax.tree.flatten(avals, is_leaf=lambda x: isinstance(x, tuple))
    x64 = bool(jax.config.jax_enable_x64)
    shape = dataclasses.replace(limits, utilization=None, num_pages=limits.pages)
    key = (model, shape, implementation, tuple(leaves), tree, devices, x64)
    with PROCESS.lock(key):
        steps = PROCESS.steps.get(key)
        if steps is None:
            steps = _compile(model, limits, params, devices, implementation, on_compile, workers)
            PROCESS.steps[key] = steps
        elif on_compile:
            for name in steps.executables:
                on_compile(name, None)
                on_compile(name, 0.0)
    return steps


def _compile(
    model: Model,
    limits: Limits,
    params: Any,
    devices: tuple[jax.Device, ...],
    implementation: Implementation | None,
    on_compile: OnCompile | None,
    workers: int,
) -> Steps:
    state = jax.eval_shape(lambda: new_state(model, limits))
    group = Group(model.parallel, devices) if len(devices) > 1 else None
    specs = model.packed_specs(), model.state_specs()
    if group:
        params, state = map(group.shapes, (params, state), specs)
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
        step: Any = partial(entry.step(model), implementation=chosen[entry.kind])
        batch = entry.batch_shapes(limits.table_width)
        if group:
            step = group.step(step, (*specs, group.rows), (group.rows, specs[1]))
            batch = group.shapes(batch, group.rows)
        step = jit_step(step, backend=devices[0].platform)
        with jax.default_device(devices[0]):
            executable = step.lower(params, state, batch).compile()
        if on_compile:
            on_compile(str(entry), time.perf_counter() - start)
        return executable

    entries = entry_points(limits)
    if workers == 1:
        return Steps({str(entry): build(entry) for entry in entries})
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return Steps(dict(zip(map(str, entries), pool.map(build, entries), strict=True)))
