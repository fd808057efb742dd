"""Export of a decode step, traced and lowered once for all executables that contain it.

To lower a kernel is work of Python, one thread at a time, and takes longer than all else of a start
without kept executables. Decode alone, each round and rounds of several steps run the same decode
step. So it is lowered once, and the others call what was lowered (`jax.export`).

A model whose step calls what `jax.export` does not take, such as a callback or another package's
kernel, is lowered anew for each of them.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax import export

from jaxattn.engine.steps.model_steps import FusedDecodeStep, ModelStep, SpeculativeDecodeStep
from jaxattn.engine.steps.step_interface import EngineStep

# Calls that are compiled where they were lowered, by the same JAX.
_OURS = [export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")]
_PLATFORMS: Mapping[str, str] = {"gpu": "cuda"}


def decode_of(step: EngineStep) -> ModelStep | None:
    """The decode step that an executable holds, from the rows on the device; None of others."""
    if isinstance(step, SpeculativeDecodeStep):
        return None
    found = step.decode if isinstance(step, FusedDecodeStep) else step
    if not isinstance(found, ModelStep) or found.kind != "decode":
        return None
    return found if found.reads_rows else None


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


class DecodeStepExporter:
    """The decode steps of one model on its devices. Any thread may ask for them.

    Args:
        step_of: gives the function of a decode step and its arguments as shapes. Over a group of
            devices the shapes have shardings.
        backend: "cpu" or "gpu".
    """

    def __init__(
        self, step_of: Callable[[ModelStep], tuple[Callable, tuple[Any, ...]]], backend: str
    ):
        self._step_of, self._platform = step_of, _PLATFORMS.get(backend, backend)
        self._lock = threading.Lock()
        self._calls: dict[ModelStep, Callable[..., Any] | None] = {}

    def __call__(self, entry: ModelStep) -> Callable[..., Any] | None:
        """(weights, state, batch) -> (logits, state); None where it cannot be exported."""
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
        except (ValueError, NotImplementedError):  # what is wrong with the step itself comes again
            return None
