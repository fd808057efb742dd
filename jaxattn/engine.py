"""Continuous batching over one compiled decode step: requests in, tokens out as they appear.

    engine = Engine(config, params, Limits(batch=4))     # compiles and plans; allocates no cache
    print(engine.plan.total)
    completions = engine.generate([Request(b"def fib(n):"), Request(b"import ")], on_token=...)

A prompt is read in chunks of one size, one request at a time; the rows that have read theirs
decode together, one token a step. A row that finishes frees its pages and its slot, and the next
waiting request takes them while the others go on (`jaxattn.scheduler`). The steps are executables
of fixed shapes, so nothing can be compiled after the constructor; the state is donated to each
step and comes back in the same buffers.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxattn.dispatch import Implementation
from jaxattn.models.hybrid import (
    DecodeBatch,
    DecodeState,
    HybridConfig,
    PackedParams,
    PrefillBatch,
    decode_step,
    init_state,
    jit_step,
    pack_vectors,
    prefill_step,
)
from jaxattn.plan import MemoryPlan, plan_memory, resident_items
from jaxattn.request import Completion, GenerationInterrupted, Request, Stats
from jaxattn.sampling import SamplingBatch, sampled
from jaxattn.scheduler import Limits, Row, Scheduler

# Decode op -> its kernel's name in a compiled step.
KERNELS = {"mla_decode": "mla_decode", "gated_delta_rule_decode": "gdn_decode"}

OnToken = Callable[[Request, int], None]
OnFinish = Callable[[Completion], None]
OnCompile = Callable[[str, float | None], None]


class Engine:
    """A model compiled for `Limits`. Not for two threads at once.

    Args:
        params: of `config`, on JAX's default device; an argument of the steps, never captured.
        implementation: of the decode kernels; None is the best for the device.
        on_compile: called with each executable's name and None before it is compiled, and with the
            seconds that it took after that.

    Attributes:
        plan: what memory the engine takes and why.
        executables: name -> compiled step (params, state, batch) -> (tokens, state).
        scheduler: rows, waiting requests and pools.
        stats: of the last `generate`, or of the one that is running.

    Raises:
        ValueError: `max_model_len` is longer than the model's `max_position_embeddings`.
        PlanError: the device has not enough memory.
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
    ):
        limits = limits or Limits()
        if limits.max_model_len > config.max_position_embeddings:
            raise ValueError(
                f"max_model_len={limits.max_model_len} is longer than the model's "
                f"max_position_embeddings={config.max_position_embeddings}"
            )
        self.config, self.limits, self.stats = config, limits, Stats()
        shapes = jax.eval_shape(self._new_state)
        resident = resident_items(
            config,
            jax.eval_shape(pack_vectors, params),
            shapes,
            batch=limits.batch,
            max_pages=limits.pages_per_row,
        )
        MemoryPlan(resident).check(jax.devices()[0])
        self.scheduler = Scheduler(limits, config.vocab_size)
        self._params, self._named = pack_vectors(params), implementation
        self._state: DecodeState | None = None
        self._chunk = min(limits.prefill_chunk, limits.max_model_len)
        self._prefill_name = f"prefill of 1 x {self._chunk} tokens"
        self._decode_name = f"decode of {limits.batch} x 1 tokens"
        self.executables = self._compile(shapes, implementation, on_compile)
        self.plan = plan_memory(resident, self.executables)
        self.plan.check(jax.devices()[0])

    def _compile(
        self,
        state: DecodeState,
        implementation: Implementation | None,
        on_compile: OnCompile | None,
    ) -> dict[str, jax.stages.Compiled]:
        # Prefill has no kernel that could be named: unless XLA is, it takes the best there is.
        prefill: Implementation | None = "xla" if implementation == "xla" else None
        executables: dict[str, jax.stages.Compiled] = {}
        steps: Any = (
            (self._prefill_name, prefill_step, prefill, self._prefill_batch()),
            (self._decode_name, decode_step, implementation, self._decode_batch()),
        )
        for name, step, chosen, batch in steps:
            if on_compile:
                on_compile(name, None)
            start = time.perf_counter()
            jitted: Any = jit_step(sampled(step), self.config, implementation=chosen)
            executables[name] = jitted.lower(self._params, state, batch).compile()
            if on_compile:
                on_compile(name, time.perf_counter() - start)
        return executables

    def _new_state(self) -> DecodeState:
        limits = self.limits
        return init_state(
            self.config, limits.batch, limits.pages, limits.batch, max_pages=limits.pages_per_row
        )

    @property
    def implementations(self) -> dict[str, str]:
        """Decode op -> what runs it: as it was named, or else as the compiled step shows."""
        text = self.executables[self._decode_name].as_text() or ""
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
        """Allocates the state and runs each step twice on padding rows, which write nothing.

        The first two runs are special on a GPU: one loads the modules, one records the command
        buffer. Does nothing if the state is there; `generate` calls it.
        """
        leaves = jax.tree.leaves(self._state)
        # An interrupt between a step's call and its return leaves donated buffers behind.
        if leaves and not any(leaf.is_deleted() for leaf in leaves):
            return
        self._state = None
        self._state = self._new_state()
        for _ in range(2):
            self._run(self._prefill_name, self._prefill_batch())
            self._run(self._decode_name, self._decode_batch())

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
        """
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
        tokens = row.request.prompt[row.cached : row.cached + self._chunk]
        row.cached += len(tokens)
        new = self._run(self._prefill_name, self._prefill_batch(row, tokens))
        run.stats.prefill_steps += 1
        run.stats.prompt_tokens += len(tokens)
        run.stats.prefill_seconds += time.perf_counter() - started
        if not row.prefilling:
            self._accept(row, int(new[0]), run)

    def _decode_rows(self, rows: Sequence[Row], run: "_Run") -> None:
        for row in rows:
            row.cached += 1
        new = self._run(self._decode_name, self._decode_batch(rows))
        run.stats.decode_steps += 1
        run.stats.decoded_tokens += len(rows)
        for row in rows:
            self._accept(row, int(new[row.index]), run)

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

    def _run(self, name: str, batch: Any) -> np.ndarray:
        tokens, self._state = self.executables[name](self._params, self._state, batch)
        return np.asarray(tokens)

    def _prefill_batch(self, row: Row | None = None, tokens: Sequence[int] = ()) -> Any:
        """The row's chunk `tokens`, which `row.cached` counts already; without a row, padding."""
        padded = list(tokens) + [0] * (self._chunk - len(tokens))
        index = row.index if row else 0
        batch = PrefillBatch(
            tokens=_int32([padded]),
            query_lens=_int32([len(tokens)]),
            seq_lens=_int32([row.cached if row else 0]),
            block_tables=_int32(self.scheduler.block_tables[index : index + 1]),
            state_indices=_int32([row.slot if row else -1]),
        )
        return batch, _sampling([row])

    def _decode_batch(self, running: Sequence[Row] = ()) -> Any:
        """The last token of each row, counted by `row.cached`; all other rows are padding."""
        by_index = {row.index: row for row in running}
        rows = [by_index.get(index) for index in range(self.limits.batch)]
        batch = DecodeBatch(
            tokens=_int32([[row.tokens[-1] if row else 0] for row in rows]),
            seq_lens=_int32([row.cached if row else 0 for row in rows]),
            block_tables=_int32(self.scheduler.block_tables),
            state_indices=_int32([row.slot if row else -1 for row in rows]),
        )
        return batch, _sampling(rows)


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
