"""Tests on several virtual CPU devices, whose bodies run in one process with eight devices.

    @on_virtual_devices
    def test_something(): ...

JAX reads the number of devices when it starts, and the suite's own process has one device. The
first such test starts the other process, which keeps its executables for the next tests.
"""

import concurrent.futures
import functools
import gc
import importlib
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.executables import (
    keep_freed_memory,
    leave_out_locations,
    share_executables,
)

DEVICES = 8
FLAGS = (
    f"--xla_force_host_platform_device_count={DEVICES} "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)


@functools.cache
def _process() -> concurrent.futures.ProcessPoolExecutor:
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(1, spawn, initializer=_begin)


def end_virtual_devices() -> None:
    """Waits for the process to end, if a test has started it."""
    if _process.cache_info().currsize:
        _process().shutdown()


def _begin() -> None:
    import jax

    leave_out_locations(scopes=True)
    keep_freed_memory()
    share_executables()
    gc.set_threshold(1_000_000, 20, 20)
    jax.config.update("jax_default_matmul_precision", "highest")
    # See conftest.py.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    jax.config.update("jax_disable_most_optimizations", True)
    assert jax.device_count() == DEVICES, jax.devices()


def _run(module: str, name: str, arguments: dict[str, Any], lazy: bool) -> None:
    from tests.helpers import lazy_steps

    lazy_steps.use_lazy_steps(lazy)
    try:
        getattr(importlib.import_module(module), name).__wrapped__(**arguments)
    finally:
        # Fixtures end in the suite's process, which cannot undo the changes of a copy here.
        for each in arguments.values():
            if isinstance(each, pytest.MonkeyPatch):
                each.undo()


def on_virtual_devices(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test's body in the process with eight devices."""

    @functools.wraps(test)
    def elsewhere(**arguments: Any) -> None:
        from tests.helpers import lazy_steps  # here, because importing an engine takes a second

        before = {name: os.environ.get(name) for name in ("XLA_FLAGS", "JAX_PLATFORMS")}
        os.environ.update(XLA_FLAGS=FLAGS, JAX_PLATFORMS="cpu")
        try:
            lazy = lazy_steps.is_lazy()
            submitted = _process().submit(_run, test.__module__, test.__name__, arguments, lazy)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        submitted.result(timeout=600)

    return elsewhere
