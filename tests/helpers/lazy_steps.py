"""Engines that compile a step when it is called first, for tests that call few steps of an engine.

An engine compiles 14 to 30 steps before it starts and runs each of them twice, and a test of greedy
rows calls four. In files with `pytestmark = pytest.mark.lazy_steps` the others are neither traced
nor compiled, and a plan counts no temp and no code. What engines compile ahead of time, what it
takes and that nothing is compiled later is tested in files without the marker, of which
engine/test_recompilation_guard.py is the first. With --slow no file has lazy steps.
"""

import threading
from typing import Any

import jax
import pytest

from jaxattn.engine.compilation import compiler
from jaxattn.engine.startup import capacity_planner, warmup
from jaxattn.engine.startup.executable_memory import ExecutableMemory

COMPILE, EXPORTER = jax.stages.Lowered.compile, compiler.DecodeStepExporter
compile_steps, run_twice = compiler._compile, warmup.warm_up
memory_of = capacity_planner.from_compiled
_lazy, _keep = [False], [False]
_lock = threading.Lock()  # of `compiler.DecodeStepExporter`, which is patched


class StepCompiler:
    """The steps of one engine, of which decode steps are exported once.

    Args:
        given: what `compiler._compile` takes behind the steps, up to the implementation.
        kept: where other processes find the steps; None keeps none.
    """

    def __init__(self, *given: Any, kept: Any):
        self.given, self.kept = given, kept
        self.exporter: Any = None

    def compiled(self, step: Any) -> jax.stages.Compiled:
        """In a thread of its own: a sealed engine counts what its own thread compiles."""
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
    """An executable that is compiled when it is called, or when anything of it is read."""

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
    # A test that counts compilations, or forbids them, counts those of an engine that starts.
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
    """For a plan; XLA has not said it of a lazy step."""
    if _lazy[0] and isinstance(executable, LazyStep):
        return ExecutableMemory(inputs, 0, 0, "compiled")
    return memory_of(executable, inputs)


def use_lazy_steps(lazy: bool, *, keep: bool = False) -> None:
    """From here on, engines that are built have lazy steps or do not.

    Args:
        keep: also where a cache keeps executables. Without it such engines compile ahead.
    """
    _lazy[0], _keep[0] = lazy, keep
    compiler._compile, warmup.warm_up = _compile, _warm_up
    capacity_planner.from_compiled = _memory_of


def is_lazy() -> bool:
    return _lazy[0]
