"""Model steps that are traced and lowered once, and called by all executables that hold them.

To lower a kernel is work of Python, one thread at a time, and takes longer than all else of a start
without kept executables. Decode alone, each round and rounds of several steps run the same decode
step. So it is lowered once, and the others call what was lowered (`jax.export`). Other processes
may lower it, and prefill steps too (lowering_pool.py).

A model whose step calls what `jax.export` does not take, such as a callback or another package's
kernel, is lowered anew for each of them.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
from jax import export

from jaxattn.engine.steps.engine_step import EngineStep
from jaxattn.engine.steps.model_steps import FusedDecodeStep, ModelStep, SpeculativeDecodeStep

# Calls that are compiled where they were lowered, by the same JAX.
_OURS = [export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")]
_PLATFORMS: Mapping[str, str] = {"gpu": "cuda"}


def model_step_of(step: EngineStep) -> ModelStep | None:
    """The model's step that an executable holds, with the rows on the device; None of others."""
    if isinstance(step, SpeculativeDecodeStep):
        return None
    found = step.decode if isinstance(step, FusedDecodeStep) else step
    return found if isinstance(found, ModelStep) and found.reads_rows else None


def exported(function: Callable, arguments: tuple[Any, ...], backend: str) -> export.Exported:
    """A function that is lowered for a backend, "cpu" or "gpu".

    Raises:
        ValueError: it calls what `jax.export` does not take.
        NotImplementedError: likewise.
    """
    platforms = [_PLATFORMS.get(backend, backend)]
    with _of_this_version():
        return export.export(jax.jit(function), platforms=platforms, disabled_checks=_OURS)(
            *arguments
        )


@contextlib.contextmanager
def _of_this_version() -> Iterator[None]:
    """Within it `jax.export` writes kernels as JAX lowers them, not for older versions of JAX. So a
    kernel that other steps launch too is the same there."""
    before = jax.config.jax_export_ignore_forward_compatibility
    jax.config.update("jax_export_ignore_forward_compatibility", True)
    try:
        yield
    finally:
        jax.config.update("jax_export_ignore_forward_compatibility", before)


@dataclasses.dataclass(frozen=True)
class PortableExport:
    """A lowered function that can be pickled, for another process of the same JAX.

    `jax.export` writes down no trees of other classes than JAX's own, and asks for flatbuffers.

    Attributes:
        lowered: without the types of its operands and results, which name this process's mesh.
        operands: their shapes.
        results: likewise.
    """

    lowered: export.Exported
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, lowered: export.Exported) -> "PortableExport":
        without: Any = {"in_avals": (), "out_avals": (), "_get_vjp": None}
        return cls(
            dataclasses.replace(lowered, **without),
            tuple(map(_shape, lowered.in_avals)),
            tuple(map(_shape, lowered.out_avals)),
        )

    def call(self) -> Callable[..., Any]:
        """The function, to be called within another that is jitted."""
        operands, results = _types(self.operands), _types(self.results)
        return dataclasses.replace(self.lowered, in_avals=operands, out_avals=results).call


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _types(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[Any, ...]:
    return tuple(jax.make_jaxpr(lambda *given: given)(*shapes).in_avals)


class LoweredElsewhere(Protocol):
    """Steps that other processes lower."""

    def take(self, step: ModelStep) -> Callable[..., Any] | None: ...


class StepExporter:
    """The lowered steps of one model on its devices. Any thread may ask for them.

    Args:
        step_of: gives the function of a model's step and its arguments as shapes. Over a group of
            devices the shapes have shardings.
        backend: "cpu" or "gpu".

    Attributes:
        elsewhere: is asked for a step first.
    """

    def __init__(
        self, step_of: Callable[[ModelStep], tuple[Callable, tuple[Any, ...]]], backend: str
    ):
        self._step_of, self._backend = step_of, backend
        self._lock = threading.Lock()
        self._calls: dict[ModelStep, Callable[..., Any] | None] = {}
        self.elsewhere: LoweredElsewhere | None = None

    def __call__(self, entry: ModelStep) -> Callable[..., Any] | None:
        """(weights, state, batch) -> (logits, state), of prefill (logits, state, hidden); None
        where the step is to be traced: it cannot be exported, or one executable alone holds it."""
        with self._lock:
            if entry not in self._calls:
                found = self.elsewhere.take(entry) if self.elsewhere else None
                self._calls[entry] = found or self._export(entry)
            return self._calls[entry]

    def _export(self, entry: ModelStep) -> Callable[..., Any] | None:
        if entry.kind == "prefill":
            return None
        try:
            return exported(*self._step_of(entry), self._backend).call
        except (ValueError, NotImplementedError):  # what is wrong with the step itself comes again
            return None
