"""Continuous batching over one compiled decode step: requests in, tokens out as they appear.

    engine = Engine(config, params, Limits(batch=4))     # compiles and plans; allocates no cache
    print(engine.plan.total)
    completions = engine.generate([Request(b"def fib(n):"), Request(b"import ")], on_token=...)

A prompt is read in chunks of one size, one request at a time; the rows that have read theirs
decode together, one token a step. A row that finishes frees its pages and its slot, and the next
waiting request takes them while the others go on (scheduler.py). The steps are executables of
fixed shapes, so nothing can be compiled after the constructor; the state is donated to each step
and comes back in the same buffers.
"""

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxattn.core.dispatch import Implementation
from jaxattn.engine.memory_plan import (
    Executable,
    advice,
    check_row,
    fill,
    from_compiled,
    from_shapes,
    plan_hybrid,
)
from jaxattn.engine.request import Completion, GenerationInterrupted, Request, Stats
from jaxattn.engine.sampling import SamplingBatch
from jaxattn.engine.scheduler import Row, Scheduler
from jaxattn.engine.seal import Seal
from jaxattn.engine.steps import (
    EntryPoint,
    OnCompile,
    Steps,
    compiled_steps,
    entry_points,
    new_state,
)
from jaxattn.memory.budget import MemoryPlan, check_allocated, nbytes
from jaxattn.memory.device import DeviceMemory, device_memory
from jaxattn.memory.limits import Limits
from jaxattn.models.config import HybridConfig
from jaxattn.models.packed import PackedParams, pack_vectors
from jaxattn.models.state import DecodeBatch, DecodeState, PrefillBatch

# Decode op -> its kernel's name in a compiled step.
KERNELS = {"mla_decode": "mla_decode", "gated_delta_rule_decode": "gdn_decode"}

OnToken = Callable[[Request, int], None]
OnFinish = Callable[[Completion], None]

_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


class EngineBusyError(RuntimeError):
    """The engine's one state is in use by another thread."""


class Engine:
    """A model compiled for `Limits`. One thread at a time; another gets an `EngineBusyError`.

    Args:
        params: of `config`, on JAX's default device; an argument of the steps, never captured.
        implementation: of the decode kernels; None is the best for the device.
        on_compile: called with each executable's name and None before it is compiled, and with the
            seconds that it took after that.
        strict: a trace, a compilation or a new buffer after the warm-up raises SealError; otherwise
            it is counted in `seal`.
        workers: executables that are compiled at a time.

    Attributes:
        limits: as given; with `utilization`, with the pages that fit.
        plan: what memory the engine takes and why.
        executables: name -> compiled step (params, state, batch) -> (tokens, state).
        scheduler: rows, waiting requests and pools.
        seal: what was compiled or allocated after the warm-up.
        stats: of the last `generate`, or of the one that is running.

    Raises:
        ValueError: `max_model_len` is longer than the model's `max_position_embeddings`.
        PlanError: the device has not enough memory, or with `utilization` the cache that is left
            holds no row at full length.
        NotImplementedError: the named implementation refuses; the message says why.
    """

    def __init__(
        self,
        config: HybridConfig,
        params: nnx.State | PackedParams,
        limits: Limits | None = None,
        *,
        implementation: Implementation | None = None,
        on_compile: OnCompile | None = None,
        strict: bool = False,
        workers: int = 1,
    ):
        limits = limits or Limits()
        if limits.max_model_len > config.max_position_embeddings:
            raise ValueError(
                f"max_model_len={limits.max_model_len} is longer than the model's "
                f"max_position_embeddings={config.max_position_embeddings}"
            )
        self.config, self.limits, self.stats = config, limits, Stats()
        self._named, self._on_compile, self._workers = implementation, on_compile, workers
        self._params: Any = jax.eval_shape(pack_vectors, params)
        if limits.utilization is not None:  # the least that it can come to
            self.limits = self._trial(1)
        self._plan({}, self._memory()).check(lambda: self._advice({}))
        self.limits, self._params = limits, pack_vectors(params)
        self._state: DecodeState | None = None
        self._busy = threading.Lock()
        self.seal = Seal(strict=strict)
        self._steps = self._compile() if limits.utilization is None else self._fill()
        known = self._known(self._steps)
        self.plan = self._plan(known, self._memory())
        self.plan.check(lambda: self._advice(known))
        self.scheduler = Scheduler(self.limits, config.vocab_size)
        self._points = entry_points(self.limits)
        _engines.add(self)

    @property
    def executables(self) -> dict[str, jax.stages.Compiled]:
        return self._steps.executables

    def _compile(self) -> Steps:
        return compiled_steps(
            self.config,
            self.limits,
            self._params,
            implementation=self._named,
            on_compile=self._on_compile,
            workers=self._workers,
        )

    def _fill(self) -> Steps:
        """Sets the pages to what the device has room for, before any cache exists.

        Every executable is compiled and run twice beside a cache of one row, so that what XLA, its
        libraries and the driver take is known and taken; then the cache is sized and the steps
        are compiled for it, while there is memory to tune them in.
        """
        wanted = self.limits
        memory = self._memory()
        assert memory is not None, "utilization needs a device whose memory is known"
        beside = self._beside(memory)
        self.limits = fill(self.config, wanted, memory, self._params, {}, **beside)
        self._check_row(wanted, memory, {}, beside)  # before minutes of compiling
        self.limits = self._trial(min(self.limits.pages_per_row, self.limits.pages))
        steps = self._compile()
        known = self._known(steps)
        state: Any = new_state(self.config, self.limits)
        for entry in entry_points(self.limits) * 2:
            tokens, state = steps.executables[str(entry)](self._params, state, self._padding(entry))
            tokens.block_until_ready()
        memory = self._memory()
        assert memory is not None
        beside = self._beside(memory, known, state)
        del state, tokens, steps
        for _ in range(3):
            self.limits = fill(self.config, wanted, memory, self._params, known, **beside)
            self._check_row(wanted, memory, known, beside)
            steps = self._compile()
            found = self._known(steps)
            if all(found[name].temp <= known[name].temp for name in known):
                return steps
            known = found
        raise AssertionError(f"XLA's temp grows with the pages: {known}")

    def _check_row(
        self,
        wanted: Limits,
        memory: DeviceMemory,
        known: dict[str, Executable],
        beside: dict[str, Any],
    ) -> None:
        """Raises PlanError unless the pages that were found hold a row, or what was asked for."""
        args = (self.config, self.limits, memory, self._params)

        def helps() -> tuple[str, ...]:
            bounds = known or from_shapes(self.config, self.limits, self._params, self._named)
            return advice(*args, bounds, **beside)

        made = plan_hybrid(*args, known, **beside)
        check_row(made, self.limits, helps, wanted=wanted.num_pages)

    def _trial(self, pages: int) -> Limits:
        return dataclasses.replace(self.limits, num_pages=pages, utilization=None)

    def _known(self, steps: Steps) -> dict[str, Executable]:
        state = jax.eval_shape(lambda: new_state(self.config, self.limits))
        held = nbytes(self._params) + nbytes(state)
        return {name: from_compiled(step, held) for name, step in steps.executables.items()}

    def _memory(self) -> DeviceMemory | None:
        return device_memory(jax.devices()[0])

    def _plan(self, known: dict[str, Executable], memory: DeviceMemory | None) -> MemoryPlan:
        return plan_hybrid(
            self.config, self.limits, memory, self._params, known, **self._beside(memory, known)
        )

    def _beside(
        self, memory: DeviceMemory | None, known: Any = None, state: Any = ()
    ) -> dict[str, Any]:
        """Bytes that the plan has to leave alone: the driver's, and those of other arrays."""
        if memory is None or memory.outside is None:
            return {"outside": 0, "others": 0}
        code = sum(each.code for each in (known or {}).values())
        own = nbytes(self._params) if isinstance(self._params, PackedParams) else 0
        stepping = sum(engine.plan["xla temp"] for engine in _engines)
        return {
            "outside": max(memory.outside - code, 0),
            "others": max(memory.in_use - own - nbytes(state), 0) + stepping,
        }

    def _advice(self, known: dict[str, Executable]) -> tuple[str, ...]:
        memory = self._memory()
        if memory is None:
            return ()
        beside = self._beside(memory, known)
        return advice(self.config, self.limits, memory, self._params, known, **beside)

    @property
    def implementations(self) -> dict[str, str]:
        """Decode op -> what runs it: as it was named, or else as the compiled step shows."""
        text = self.executables[str(self._points[-1])].as_text() or ""
        calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
        return {
            op: self._named or ("mosaic_gpu" if any(kernel in call for call in calls) else "xla")
            for op, kernel in KERNELS.items()
        }

    @property
    def state(self) -> DecodeState:
        """The arena, the caches and the recurrent states; allocated when it is first asked for."""
        self.start()
        assert self._state is not None
        return self._state

    def start(self) -> None:
        """Allocates the state, runs each executable twice on padding rows, and seals the engine.

        Padding rows write nothing. The first two runs are special on a GPU: one loads the modules,
        one records the command buffer. Does nothing if the state is there; `generate` calls it.

        Raises:
            PlanError: what was allocated is not what was planned.
        """
        leaves = jax.tree.leaves(self._state)
        # An interrupt between a step's call and its return leaves donated buffers behind.
        if leaves and not any(leaf.is_deleted() for leaf in leaves):
            return
        self._state = None
        state = new_state(self.config, self.limits)
        for what, part in (
            ("arena", state.arena),
            ("kv cache", state.kv_cache),
            ("conv state", state.conv_state),
            ("ssm state", state.ssm_state),
        ):
            check_allocated(what, part, self.plan[what])
        for entry in self._points * 2:
            tokens, state = self.executables[str(entry)](self._params, state, self._padding(entry))
            tokens.block_until_ready()
        self._state = state
        self.seal.hold(state)

    def generate(
        self,
        requests: Iterable[Request],
        *,
        on_token: OnToken | None = None,
        on_finish: OnFinish | None = None,
    ) -> list[Completion]:
        """Serves all requests; the completions are in the requests' order.

        A request that can never be served is refused, and the others are served.

        Args:
            on_token: called with each token as soon as it is known, stop tokens aside.
            on_finish: called when a request is done or refused.

        Raises:
            ValueError: two requests have the same id.
            GenerationInterrupted: Ctrl-C, at any time. It holds what was generated, and the engine
                stays usable.
            EngineBusyError: another thread is in `generate`; nothing was touched.
            SealError: the engine is strict and something was compiled or allocated.
        """
        if not self._busy.acquire(blocking=False):
            raise EngineBusyError(
                "another thread is in this engine's generate: an engine has one state; give each "
                "thread an engine of its own (they share executables)"
            )
        try:
            return self._generate(requests, on_token, on_finish)
        finally:
            self._busy.release()

    def _generate(
        self,
        requests: Iterable[Request],
        on_token: OnToken | None,
        on_finish: OnFinish | None,
    ) -> list[Completion]:
        numbered = [
            dataclasses.replace(request, id=place) if request.id is None else request
            for place, request in enumerate(requests)
        ]
        if len({request.id for request in numbered}) < len(numbered):
            raise ValueError("two requests have the same id")
        run = _Run(numbered, on_token, on_finish)
        self.stats = run.stats
        try:
            self.start()
            run.started = time.perf_counter()
            for request in numbered:
                if reason := self.scheduler.refusal(request):
                    run.finish(request, (), f"refused: {reason}")
                else:
                    self.scheduler.submit(request)
            while self.scheduler.busy:
                self.scheduler.admit()
                if row := self.scheduler.next_prefill():
                    self._prefill_chunk(row, run)
                if rows := self.scheduler.next_decode():
                    self._decode_rows(rows, run)
        except KeyboardInterrupt as interrupt:
            raise GenerationInterrupted(run.interrupt(self.scheduler.rows.values())) from interrupt
        finally:
            self.scheduler.clear()
            run.stats.seconds = time.perf_counter() - run.started
        return run.completions()

    def _prefill_chunk(self, row: Row, run: "_Run") -> None:
        started = time.perf_counter()
        waiting = len(row.request.prompt) - row.cached
        chunk = next((c for c in self.limits.chunks if c >= waiting), self.limits.chunks[-1])
        tokens = row.request.prompt[row.cached : row.cached + chunk]
        row.cached += len(tokens)
        entry = EntryPoint("prefill", 1, chunk)
        new = self._run(entry, [row], lambda: self._prefill_batch(entry, row, tokens))
        run.stats.prefill_steps += 1
        run.stats.prompt_tokens += len(tokens)
        run.stats.prefill_seconds += time.perf_counter() - started
        if not row.prefilling:
            self._accept(row, int(new[0]), run)

    def _decode_rows(self, rows: Sequence[Row], run: "_Run") -> None:
        for row in rows:
            row.cached += 1
        entry = EntryPoint("decode", next(b for b in self.limits.batches if b >= len(rows)), 1)
        new = self._run(entry, rows, lambda: self._decode_batch(entry, rows))
        run.stats.decode_steps += 1
        run.stats.decoded_tokens += len(rows)
        for place, row in enumerate(rows):
            self._accept(row, int(new[place]), run)

    def _accept(self, row: Row, token: int, run: "_Run") -> None:
        reason = "stop" if token == row.request.stop_token else None
        if reason is None:
            row.tokens.append(token)
            run.token(row.request, token)
            if len(row.tokens) == row.max_tokens:
                reason = "length"
        if reason:
            run.finish(row.request, row.tokens, reason)
            self.scheduler.release(row)

    def _run(self, entry: EntryPoint, rows: Sequence[Row], batch: Callable[[], Any]) -> np.ndarray:
        """One sealed step: the tokens, one for each row of the executable."""
        with self.seal.watch():
            model = batch(), _sampling([*rows, *[None] * (entry.rows - len(rows))])
            with self.seal.allowed():
                tokens, self._state = self.executables[str(entry)](self._params, self._state, model)
            new = np.array(tokens)  # a view would keep the array
            del tokens
            self.seal.check(self._state)
        return new

    def _padding(self, entry: EntryPoint) -> Any:
        """A batch without rows."""
        build = self._prefill_batch if entry.kind == "prefill" else self._decode_batch
        return build(entry), _sampling([None] * entry.rows)

    def _prefill_batch(
        self, entry: EntryPoint, row: Row | None = None, tokens: Sequence[int] = ()
    ) -> PrefillBatch:
        """The row's chunk `tokens`, which `row.cached` counts already; without a row, padding."""
        fields: Any = dict(
            tokens=_int32([[*tokens, *[0] * (entry.tokens - len(tokens))]]),
            query_lens=_int32([len(tokens)]),
            seq_lens=_int32([row.cached if row else 0]),
            block_tables=self._tables([row]),
            state_indices=_int32([row.slot if row else -1]),
        )
        return PrefillBatch(**fields)

    def _decode_batch(self, entry: EntryPoint, running: Sequence[Row] = ()) -> DecodeBatch:
        """The last token of each row, counted by `row.cached`; the bucket's rest is padding."""
        rows = [*running, *[None] * (entry.rows - len(running))]
        fields: Any = dict(
            tokens=_int32([[row.tokens[-1] if row else 0] * entry.tokens for row in rows]),
            seq_lens=_int32([row.cached if row else 0 for row in rows]),
            block_tables=self._tables(rows),
            state_indices=_int32([row.slot if row else -1 for row in rows]),
        )
        return DecodeBatch(**fields)

    def _tables(self, rows: Sequence[Row | None]) -> np.ndarray:
        """int32 [rows, M]; what stands in a padding row, or past a row's pages, is never read."""
        if not any(rows):
            return np.zeros((len(rows), self.limits.table_width), np.int32)
        return self.scheduler.block_tables[[row.index if row else 0 for row in rows]]


def _sampling(rows: Sequence[Row | None]) -> SamplingBatch:
    requests = [row.request if row else None for row in rows]
    fields: Any = {
        "temperature": np.array([r.temperature if r else 0 for r in requests], np.float32),
        "top_p": np.array([r.top_p if r else 1 for r in requests], np.float32),
        "seeds": np.array([r.seed if r else 0 for r in requests], np.uint32),
        "request_ids": _int32([r.id if r else 0 for r in requests]),
    }
    return SamplingBatch(**fields)


def _int32(values: Any) -> Any:
    """A copy on the host: the step takes it to the device."""
    return np.array(values, np.int32)


class _Run:
    """One `generate`: its completions, callbacks, clock and counts."""

    def __init__(
        self, requests: list[Request], on_token: OnToken | None, on_finish: OnFinish | None
    ):
        self.stats = Stats()
        self.started = time.perf_counter()
        self._requests, self._on_token, self._on_finish = requests, on_token, on_finish
        self._first_token: dict[int | None, float] = {}
        self._done: dict[int | None, Completion] = {}

    def token(self, request: Request, token: int) -> None:
        self._first_token.setdefault(request.id, time.perf_counter() - self.started)
        if self._on_token:
            self._on_token(request, token)

    def finish(self, request: Request, tokens: Sequence[int], reason: str) -> None:
        seconds = time.perf_counter() - self.started
        first = self._first_token.get(request.id)
        done = Completion(request, tuple(tokens), reason, first, seconds)
        self._done[request.id] = done
        if self._on_finish:
            self._on_finish(done)

    def interrupt(self, rows: Iterable[Row]) -> list[Completion]:
        """Ends what is not done, without callbacks: `rows` have tokens, the rest are waiting."""
        self._on_finish = None
        generated = {row.request.id: row.tokens for row in rows}
        for request in self._requests:
            if request.id not in self._done:
                self.finish(request, generated.get(request.id, ()), "interrupted")
        return self.completions()

    def completions(self) -> list[Completion]:
        return [self._done[request.id] for request in self._requests]
