"""Engines that compile a step at its first call, for tests that call few steps of an engine.

An engine compiles 14 to 30 steps before it starts and runs each of them twice, but a test of greedy
rows calls four. In files with `pytestmark = pytest.mark.lazy_steps`, the others are neither traced
nor compiled, and a plan counts no temp and no code. Files without the marker test which steps
engines compile ahead of time, the memory of these steps, and that nothing is compiled later. The
first of them is engine/test_recompilation_guard.py. With --slow, no file has lazy steps.
"""

import threading
from typing import Any

import jax
import pytest

from jaxattn.engine.compilation import compiler
from jaxattn.engine.startup import capacity_planner, state_allocation
from jaxattn.engine.startup.executable_memory import ExecutableMemory

COMPILE, EXPORTER = jax.stages.Lowered.compile, compiler.DecodeStepExporter
compile_steps, run_twice = compiler._compile, state_allocation.warm_up
memory_of = capacity_planner.from_compiled
_lazy, _keep = [False], [False]
_lock = threading.Lock()  # protects `compiler.DecodeStepExporter`, which is patched


class StepCompiler:
    """The compiler of one engine's steps, which exports decode steps once.

    Args:
        given: The arguments of `compiler._compile` after the steps, up to the implementation.
        kept: The cache that other processes read; None keeps no steps.
    """

    def __init__(self, *given: Any, kept: Any):
        self.given, self.kept = given, kept
        self.exporter: Any = None

    def compiled(self, step: Any) -> jax.stages.Compiled:
        """Compiles in a separate thread: a sealed engine counts its own thread's compilations."""
        found: list[Any] = []

        def compile_one() -> None:
            try:
                found.append(self._compiled(step))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=compile_one)
        thread.start()
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def _compiled(self, step: Any) -> jax.stages.Compiled:
        def once(*args: Any) -> Any:
            self.exporter = self.exporter or EXPORTER(*args)
            return self.exporter

        with _lock, pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "DecodeStepExporter", once)
            return compile_steps([step], *self.given, None, 1, self.kept)[str(step)]


class LazyStep:
    """An executable that is compiled when it is called or one of its attributes is read."""

    def __init__(self, step: Any, steps: StepCompiler):
        self.step, self.steps, self.executable = step, steps, None

    def ready(self) -> jax.stages.Compiled:
        if self.executable is None:
            self.executable = self.steps.compiled(self.step)
        return self.executable

    def __call__(self, *args: Any) -> Any:
        return self.ready()(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ready(), name)


def _compile(steps: Any, *given: Any) -> dict[str, Any]:
    *own, on_compile, _, kept = given
    # A test that counts or forbids compilations sees those of an engine that starts.
    counted = jax.stages.Lowered.compile is not COMPILE
    if not _lazy[0] or (kept is not None and not _keep[0]) or counted:
        return compile_steps(steps, *given)
    for step in steps if on_compile else ():
        on_compile(str(step), None)
        on_compile(str(step), 0.0)
    model, limits, params, *rest = own
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    of_engine = StepCompiler(model, limits, shapes, *rest, kept=kept)
    return {str(step): LazyStep(step, of_engine) for step in steps}


def _warm_up(model: Any, limits: Any, steps: Any, weights: Any, *given: Any) -> Any:
    state, rows, *_ = given
    return (state, rows) if _lazy[0] else run_twice(model, limits, steps, weights, *given)


def _memory_of(executable: Any, inputs: int) -> ExecutableMemory:
    """The memory of a step for a plan; it is unknown, and so 0, for a lazy step."""
    if _lazy[0] and isinstance(executable, LazyStep):
        return ExecutableMemory(inputs, 0, 0, "compiled")
    return memory_of(executable, inputs)


def use_lazy_steps(lazy: bool, *, keep: bool = False) -> None:
    """Makes engines that are built from now on have lazy steps, or not.

    Args:
        keep: Whether this includes engines with a cache of executables. Otherwise these compile
            ahead.
    """
    _lazy[0], _keep[0] = lazy, keep
    compiler._compile, state_allocation.warm_up = _compile, _warm_up
    capacity_planner.from_compiled = _memory_of


def is_lazy() -> bool:
    return _lazy[0]
