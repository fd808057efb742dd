"""The Pallas interpreter, which runs kernels without a GPU, and the host threads that it needs."""

import functools
import os
import warnings
from pathlib import Path
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import PACKAGE

# The least threads of XLA's pool with which the interpreter is safe. The warpgroups of a CTA, up to
# 4 here, wait for one another, each in a callback that holds a thread of the pool.
INTERPRETER_THREADS = 8
JAX = str(Path(jax.__file__).parent) + os.sep


def _host_threads() -> int:
    """Returns the threads of XLA's pool, as XLA counts them when JAX's backend starts."""
    for name in ("PJRT_NPROC", "NPROC"):
        if (given := os.environ.get(name, "")).isdigit():
            return int(given)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _warn_of_few_threads() -> None:
    """Warns once per process."""
    if (threads := _host_threads()) < INTERPRETER_THREADS:
        warnings.warn(
            "the kernel interpreter may deadlock: it needs a host thread per kernel thread, but "
            f"XLA's pool has only {threads}; set the environment variable PJRT_NPROC=16 before JAX "
            "is imported",
            skip_file_prefixes=(PACKAGE, JAX),
        )


def interpret_mode(interpret: bool) -> Any:
    """Returns the `interpret=` of `plgpu.kernel`: the interpreter fills fresh memory with NaN."""
    if interpret:
        _warn_of_few_threads()
    return plgpu.InterpretGPUParams() if interpret else False
