"""Export of a decode step, traced and lowered once for all executables that contain it.

Lowering a kernel is Python code, which one thread runs at a time, and takes longer than the rest of
a start without stored executables. Decode, fused rounds and rounds of several steps run the same
decode step. So it is lowered once, and the executables call the exported function (`jax.export`).

If `jax.export` does not support an op of the model, such as a callback or another package's kernel,
each executable lowers the step by itself.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax import export

from jaxattn.engine.steps.model_steps import FusedDecodeStep, ModelStep, SpeculativeDecodeStep
from jaxattn.engine.steps.step_interface import EngineStep

# Custom calls that the same JAX version lowers and compiles, so that no check is needed.
_OURS = [export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")]
_PLATFORMS: Mapping[str, str] = {"gpu": "cuda"}


def decode_of(step: EngineStep) -> ModelStep | None:
    """Returns the decode step, from the rows on the device, inside an executable; or None."""
    if isinstance(step, SpeculativeDecodeStep):
        return None
    found = step.decode if isinstance(step, FusedDecodeStep) else step
    if not isinstance(found, ModelStep) or found.kind != "decode":
        return None
    return found if found.reads_rows else None


@contextlib.contextmanager
def _of_this_version() -> Iterator[None]:
    """Makes `jax.export` write kernels as this version of JAX lowers them, not for older versions.
    So the kernels are equal to those of other steps."""
    before = jax.config.jax_export_ignore_forward_compatibility
    jax.config.update("jax_export_ignore_forward_compatibility", True)
    try:
        yield
    finally:
        jax.config.update("jax_export_ignore_forward_compatibility", before)


class DecodeStepExporter:
    """The exported decode steps of one model on its devices. It is thread-safe.

    Args:
        step_of: A function that returns the function of a decode step and the shapes of its
            arguments. Over a group of devices the shapes have shardings.
        backend: "cpu" or "gpu".
    """

    def __init__(
        self, step_of: Callable[[ModelStep], tuple[Callable, tuple[Any, ...]]], backend: str
    ):
        self._step_of, self._platform = step_of, _PLATFORMS.get(backend, backend)
        self._lock = threading.Lock()
        self._calls: dict[ModelStep, Callable[..., Any] | None] = {}

    def __call__(self, entry: ModelStep) -> Callable[..., Any] | None:
        """Returns (weights, state, batch) -> (logits, state), or None if the export fails."""
        with self._lock:
            if entry not in self._calls:
                self._calls[entry] = self._export(entry)
            return self._calls[entry]

    def _export(self, entry: ModelStep) -> Callable[..., Any] | None:
        function, arguments = self._step_of(entry)
        exporting = export.export(
            jax.jit(function), platforms=[self._platform], disabled_checks=_OURS
        )
        try:
            with _of_this_version():
                return exporting(*arguments).call
        except (ValueError, NotImplementedError):  # an error of the step itself will recur
            return None
