"""A model over one or several devices: steps compiled from shapes, then weights, then times.

over = ShardedModel(model, parallel, rows, tokens=4096, devices=devices)
over.compile_all(pool)     from shapes only; no array is on a device yet
over.fill()                random weights, caches and states
over.time(32)              a step of 32 rows
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxattn.bench.harness.timing import launches, seconds
from jaxattn.bench.model.batches import BenchBatches
from jaxattn.bench.model.random_weights import UniformRange, draw_of, fill
from jaxattn.bench.model.roofline import moved, rate
from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.core.dispatch import Implementation
from jaxattn.engine.execution.model_runner import call_serialized
from jaxattn.engine.startup.limits_search import UTILIZATION
from jaxattn.kernels.hopper.build.trace_cache import share_launches
from jaxattn.memory.device_memory import device_memory
from jaxattn.memory.plan import nbytes
from jaxattn.models import DecodeBatch, DecodeState, divided
from jaxattn.models.blocks import MoE
from jaxattn.models.caches.layer_cache import CacheSize
from jaxattn.models.interface import init_state, jit_step, overlaid
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.parallel import DeviceGroup, Parallel
from jaxattn.parallel.hlo_all_reduces import all_reduces

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
    "psum",  # XLA names its own kernels after their operation
)

# XLA options to compile a step with, in addition to those of every step.
type Options = tuple[tuple[str, str | bool], ...]


class ShardedModel:
    """A model with random weights and caches over the devices of a layout.

    Args:
        model: The undivided model.
        parallel: The layout.
        rows: The numbers of rows of the decode steps, over all data groups.
        tokens: The tokens per row.
        devices: The layout's GPUs, in order.
        seed: The seed of weights, caches and tokens.
        implementation: The kernels to use; None for the best.
        platform: The platform to compile for; None for the default backend.
        options: Sets of XLA options; each step is lowered once and compiled with each set.

    Raises:
        ShardingError: the model does not support the layout.
    """

    def __init__(
        self,
        model: DecoderModel,
        parallel: Parallel,
        rows: Sequence[int],
        *,
        tokens: int,
        devices: Sequence[jax.Device],
        seed: int = 0,
        implementation: Implementation | None = None,
        platform: str | None = None,
        options: Sequence[Options] = ((),),
    ):
        self.options = tuple(options)
        self.parallel, self.tokens, self.seed = parallel, tokens, seed
        self.model: Any = divided(model, parallel)
        self.group = DeviceGroup(parallel, tuple(devices))
        self.implementation = implementation
        self.platform = platform or jax.default_backend()
        self.counts = tuple(rows)
        self.rows = BenchBatches(
            rows=tuple(count // parallel.data for count in rows),
            context=-(-tokens // parallel.context),
            prompt=0,
            vocab=model.vocab_size,
            seed=seed,
        )
        self.specs: tuple[Any, DecodeState] = model_specs(self.model)
        self.params: Any = None
        self.state: Any = None
        self._steps: dict[tuple[int, Options], Future[Any]] = {}
        self._fills: dict[Any, Future[Any]] = {}

    # --- from shapes

    @functools.cached_property
    def packed_shapes(self) -> Any:
        return jax.eval_shape(self.model.pack, self.model.param_shapes())

    @functools.cached_property
    def state_shapes(self) -> DecodeState:
        scratch = (
            spec
            for count in self.rows.rows
            for spec in self.model.scratch(count, max_pages=self.rows.width)
        )
        made = functools.partial(init_state, self.model, self.rows.size, overlaid(scratch))
        return jax.eval_shape(made)

    @property
    def nbytes(self) -> tuple[int, int]:
        """(bytes of the weights, bytes of caches, states and scratch) per GPU."""
        return nbytes(self.packed_shapes), nbytes(self.state_shapes)

    def traced(self, count: int) -> Any:
        """The decode step of `count` rows over all data groups, traced but not lowered."""
        local, width = count // self.parallel.data, self.rows.width
        sizes = ((local, 1), (local,), (local, width), (local,))
        shapes: Any = [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]
        batch = DecodeBatch(*shapes)
        step = functools.partial(_greedy, self.model, self.implementation)
        out_specs = self.group.rows, self.specs[1]
        sharded_step = self.group.step(step, (*self.specs, self.group.rows), out_specs)
        arguments = zip(
            (self.packed_shapes, self.state_shapes, batch),
            (*self.specs, self.group.rows),
            strict=True,
        )
        shapes = (self.group.shapes(local_shapes, spec) for local_shapes, spec in arguments)
        out = self.group.shardings(out_specs)
        return jit_step(sharded_step, backend=self.platform, out_shardings=out).trace(*shapes)

    def compile_all(self, pool: Executor) -> None:
        """Starts to compile everything that `fill` and `time` run."""
        for count in self.counts:
            lowered = pool.submit(self._lowered, count)
            for options in self.options:
                self._steps[count, options] = pool.submit(_compiled, lowered, options)
        for kind in {_kind(leaf, spec) for leaf, spec, _ in self._arrays().values()}:
            self._fills[kind] = pool.submit(self._compiled_fill, *kind)

    def wait(self) -> None:
        """Waits until everything is compiled."""
        for each in (*self._steps.values(), *self._fills.values()):
            each.result()

    def _lowered(self, count: int) -> Any:
        with share_launches():
            return self.traced(count).lower()

    def roof_bytes(self, count: int) -> int:
        """Bytes that each GPU has to move in a step of `count` rows; see `bench.model.roofline`.

        Routing is assumed to be uniform.
        """
        parallel, local = self.parallel, count // self.parallel.data
        tokens = count if parallel.experts_meet else local
        touched = 0.0
        for block in self.model.spec.blocks:
            if isinstance(kind := block.feed_forward, MoE):
                missed = (1 - kind.router.top_k / kind.router.experts) ** tokens
                touched = kind.own_experts * (1 - missed)
        return moved(self.model, local, self.rows.context, touched).total

    def cache_tokens(self, count: int, temp: int) -> int | None:
        """Maximum tokens in all caches for steps of `count` rows; None if memory is unknown."""
        memory = device_memory(self.group.devices[0])
        if memory is None:
            return None
        return cache_tokens(
            self.model,
            self.parallel,
            total=memory.total,
            rows=count // self.parallel.data,
            other_bytes=self.nbytes[0] + nbytes(self.state_shapes.arena) + temp,
        )

    # --- on the devices

    def fill(self) -> None:
        """Fills weights, equal on all GPUs so that all routers choose alike, and caches."""
        self.params = self.state = None  # there is no room for two
        # JAX's pool grows in regions that double. After smaller arrays, a large one may find no
        # room for a region, although other regions have enough: 32 GB of latents on an H100.
        ordered = sorted(enumerate(self._arrays().items()), key=lambda each: -nbytes(each[1][1][0]))
        filled = {
            name: self._fills[_kind(leaf, spec)].result()(np.int32(number), *draw)
            for number, (name, (leaf, spec, draw)) in ordered
        }
        tree = jax.tree.structure(self.model.param_shapes())
        params = jax.tree.unflatten(tree, [filled.pop(name) for name in self._params()])
        packed = [self.model.pack(own) for own in self.group.split(params)]
        self.params = self.group.join(packed, self.specs[0])
        arena = self.state_shapes.arena
        empty = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), arena)
        caches: dict[str, dict[str, jax.Array]] = {
            cache: {name: filled[cache, name] for name in arrays}
            for cache, arrays in self.state_shapes.caches.items()
        }
        caches |= {each.name: each.connected(caches[each.name]) for each in self.model.caches}
        self.state = DecodeState(self.group.make(empty, self.specs[1].arena), caches)
        jax.block_until_ready((self.params, self.state))

    def _params(self) -> dict[str, Any]:
        leaves, _ = jax.tree.flatten_with_path(self.model.param_shapes())
        names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
        return dict(zip(names, (leaf for _, leaf in leaves), strict=True))

    def _arrays(self) -> Mapping[Any, tuple[jax.ShapeDtypeStruct, PartitionSpec, UniformRange]]:
        """The arrays to fill, by name: one GPU's shape, its PartitionSpec and its distribution."""
        specs = jax.tree.leaves(self.model.param_specs())
        found: dict[Any, Any] = {
            name: (leaf, spec, draw_of(name, leaf, self.model))
            for (name, leaf), spec in zip(self._params().items(), specs, strict=True)
        }
        for cache, arrays in self.state_shapes.caches.items():
            for name, leaf in arrays.items():
                # Integer arrays are counters and start at 0.
                draw = UniformRange.of(float(jnp.issubdtype(leaf.dtype, jnp.floating)))
                found[cache, name] = leaf, self.specs[1].caches[cache][name], draw
        return found

    def _compiled_fill(self, shape: tuple[int, ...], dtype: str, spec: PartitionSpec) -> Any:
        def make(number: jax.Array, center: Any, reach: Any) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(self.seed), number)
            return fill(key, center, reach, shape=shape, dtype=dtype)

        number, real = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
        whole = PartitionSpec()
        over = jax.jit(self.group.step(make, (whole, whole, whole), spec))
        given = (self.group.shapes(each, whole) for each in (number, real, real))
        return over.lower(*given).compile()

    def batch(self, count: int, step: int) -> Any:
        """A decode step's batch, with as many rows in each data group, and their own tokens."""
        groups = self.parallel.data
        batch = self.rows.decode(count // groups, step)
        batch = dataclasses.replace(batch, seq_lens=np.full_like(batch.seq_lens, self.tokens))
        full_batch = jax.tree.map(lambda x: np.concatenate([x] * groups), batch)
        # Equal tokens would choose equal experts, and so fewer of them.
        generator = np.random.default_rng((self.seed, step, count))
        tokens = generator.integers(self.rows.vocab, size=full_batch.tokens.shape, dtype=np.int32)
        full_batch = dataclasses.replace(full_batch, tokens=tokens)
        return jax.device_put(full_batch, self.group.sharding(self.group.rows))

    def time(self, count: int, options: Options = ()) -> dict[str, Any]:
        """Returns the row of a decode step of `count` rows, compiled with one of `options`."""
        batches = [self.batch(count, number) for number in range(STEPS)]
        compiled = self._steps[count, options].result()

        def call(number: int = 0) -> Any:
            batch = batches[number % STEPS]
            tokens, self.state = call_serialized(compiled, self.params, self.state, batch)
            return tokens

        for _ in range(3):  # one loads, one records, and with collectives a third one updates
            jax.block_until_ready(call())
        once = seconds(call, repeats=3, warmup=0.0)
        calls = max(1, min(256, math.ceil(RUN_SECONDS / once)))

        def run() -> Any:
            for number in range(calls):
                result = call(number)
            return result

        step_seconds = seconds(run, repeats=5, warmup=0.0) / calls
        spent = launches(call, calls=min(calls, 8))
        gpus = self.parallel.gpus
        forms = [each for each in all_reduces(compiled.as_text() or "") if each.of_layers]
        meeting = [
            each.seconds
            for launch, each in spent.items()
            if any(name in f"{launch.kernel} {launch.op}".lower() for name in COLLECTIVES)
        ]
        memory = compiled.memory_analysis()
        temp = memory.temp_size_in_bytes if memory else 0
        card = rate(self.group.devices[0].device_kind, None)
        return {
            "GPUs": gpus,
            "layout": self.parallel.flags,
            "one launch": self.model.spec.sums_fused,
            "XLA options": " ".join(f"{key}={value}" for key, value in options),
            "B": count,
            "T": self.tokens,
            "ms": step_seconds * 1e3,
            "tokens/s": count / step_seconds,
            "kernels ms": sum(each.seconds for each in spent.values()) / gpus * 1e3,
            "roof ms": self.roof_bytes(count) / card * 1e3 if card else None,
            "collectives ms": sum(meeting) / gpus * 1e3,
            "all-reduces": len(forms),
            "other form": sum(not each.serves for each in forms),
            "temp MiB": temp / 2**20,
            "cache tokens": self.cache_tokens(count, temp),
            "all-reduce forms": [dataclasses.asdict(each) for each in forms],
            "launches": {f"{k.kernel} {k.op}": tuple(v) for k, v in spent.items()},
        }


def model_specs(model: Any) -> tuple[Any, DecodeState]:
    """The PartitionSpecs of a step's packed parameters and of its state."""
    return model.packed_specs(), model.state_specs()


def cache_tokens(model: Any, parallel: Parallel, *, total: int, rows: int, other_bytes: int) -> int:
    """Maximum number of tokens in the caches of a layout, over all its data groups, from shapes.

    Pages that are split over GPUs (`context`) count once per GPU. The result is 0 if weights and
    slots leave no room, or if the model has no pages.

    Args:
        model: The model that one GPU runs.
        total: Bytes of a GPU.
        rows: Rows of a data group.
        other_bytes: Bytes in addition to the caches: weights, scratch and temp.
    """

    def size(pages: int) -> int:
        cache_size = CacheSize(pages=pages, slots=rows)
        return sum(nbytes(cache.shapes(cache_size)) for cache in model.caches)

    page = size(2) - size(1)
    if not page:
        return 0
    pages = 1 + (int(total * UTILIZATION) - other_bytes - size(1)) // page
    return max(pages, 0) * PAGE_SIZE * parallel.context * parallel.data


def _compiled(lowered: Future[Any], options: Options) -> Any:
    return lowered.result().compile(compiler_options=dict(options) or None)


def _kind(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> tuple[Any, str, PartitionSpec]:
    return leaf.shape, leaf.dtype.name, spec


def _greedy(
    model: Any, implementation: Any, params: Any, state: DecodeState, batch: Any
) -> tuple[jax.Array, DecodeState]:
    """The likeliest tokens, merged over the GPUs' parts of the vocabulary, and the state."""
    logits, state = model.decode(params, state, batch, implementation=implementation)
    return model.vocabulary.best(logits)[0], state
