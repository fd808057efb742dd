"""The start of an engine from a model's files, which loads the weights while XLA compiles.

    measure the device, check the plan -> compile            -> start the engine
                                       -> fetch, check, load ->

Loading begins after the measurement of the device, which would count the weights as memory of
others. It also begins after the check of the plan, so that a model that does not fit is never read.
"""

import argparse
import concurrent.futures
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console

from jaxattn.cli.options.parallel_options import read_layout
from jaxattn.cli.options.parser import InputError
from jaxattn.cli.plan_report import plan_lines, refused_plan
from jaxattn.cli.startup.model_source import ModelSource, one_line, refusals
from jaxattn.cli.startup.progress_display import ProgressDisplay
from jaxattn.cli.startup.progress_lines import progress
from jaxattn.cli.startup.stage_timings import StageTimings, executable_lines
from jaxattn.core.dispatch import Refusal
from jaxattn.engine.distributed.process_group import ProcessGroup
from jaxattn.engine.engine import Engine
from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.startup.engine_build import prepare
from jaxattn.engine.startup.limits_search import UTILIZATION
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.limits import Limits
from jaxattn.models import divided
from jaxattn.models.interface import Model
from jaxattn.parallel import DeviceGroup, Parallel
from jaxattn.text import Tokenizer


def choose_device(device: str, implementation: str | None, utilization: float | None = None) -> str:
    """Makes JAX use a device and a fraction of its memory, and returns the platform.

    Args:
        utilization: The fraction; None leaves JAX's settings.

    Raises:
        InputError: If the device does not exist, or the implementation cannot run on it.
    """
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if utilization is not None:  # JAX reads these variables when it first sees its devices
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{utilization:.4f}")
        # A pool that grows consists of pieces, into which a large cache may not fit.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    try:
        platform = jax.devices()[0].platform
    except RuntimeError as error:
        raise InputError(f"JAX found no device: {one_line(error)}") from error
    if device == "gpu" and platform != "gpu":
        raise InputError(
            f"--device gpu: JAX found no GPU, only the platform {platform!r}; install "
            "jaxattn[cuda13] or jaxattn[cuda12] on a machine with a GPU"
        )
    if implementation == "mosaic_gpu":
        try:
            require_hopper("--implementation mosaic_gpu", interpret=False)
        except Refusal as error:
            raise InputError(one_line(error)) from error
    return platform


def share_of_device(options: argparse.Namespace) -> float | None:
    """Returns the fraction of a GPU's memory for JAX: --utilization, or else a default. The default
    is None on a CPU or with --num-pages."""
    on_cpu = options.device == "cpu" or jax.config.jax_platforms == "cpu"
    if options.utilization is not None or options.num_pages is not None or on_cpu:
        return options.utilization
    return UTILIZATION


def shard_over_devices(
    model: Model, limits: Limits, parallel: Parallel
) -> tuple[Model, DeviceGroup | None]:
    """Returns one GPU's shard of the model, and the group of devices or None for a single GPU.

    Raises:
        InputError: If the model does not support the layout, or there are fewer devices.
    """
    if parallel.gpus == 1:
        return model, None
    devices = tuple(jax.devices())
    if len(devices) < parallel.gpus:
        raise InputError(
            f"{parallel.flags} needs {parallel.gpus} devices, but JAX found {len(devices)}"
        )
    try:
        served = model.with_cache_format(limits.cache_format, limits.native_layers)
        return divided(served, parallel), DeviceGroup(parallel, devices[: parallel.gpus])
    except ValueError as error:
        raise InputError(str(error)) from error


class LoadCancelled(Exception):
    """The exception that ends a load whose result is no longer needed."""


class BackgroundLoad:
    """A load in a separate thread. Leaving the context cancels the load.

    Args:
        load: Loads and returns the result. It must call `watch` for every piece, and must not catch
            its exception.
    """

    def __init__(self, load: Callable[["BackgroundLoad"], Any]):
        self._load, self._stop_requested = load, threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "loading")
        self._future: concurrent.futures.Future[Any] | None = None

    def start(self) -> None:
        self._future = self._pool.submit(self._load, self)

    def watch(self) -> None:
        """Raises LoadCancelled if the load was cancelled."""
        if self._stop_requested.is_set():
            raise LoadCancelled

    def check(self) -> None:
        """Raises the load's error, if it has failed."""
        if self._future and self._future.done():
            self._future.result()

    def result(self) -> Any:
        """Waits for the result and returns it. Can be called once, as this object drops the result.

        Raises:
            Exception: The load's error, if it failed.
        """
        assert self._future is not None
        future, self._future = self._future, None
        return future.result()

    def __enter__(self) -> "BackgroundLoad":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_requested.set()
        self._pool.shutdown()


def start_engine(
    model_source: ModelSource,
    model: Model,
    tokenizer: Tokenizer,
    limits: Limits,
    options: argparse.Namespace,
    messages: Console,
    stages: StageTimings,
    process_group: ProcessGroup | None = None,
    display: ProgressDisplay | None = None,
) -> tuple[Engine, dict[str, float]]:
    """Returns a running engine, and the seconds that each executable took to compile.

    This function prints the executables and the plan before the engine allocates its state. It
    checks the weights of a folder before it compiles anything, and those of a hub model after the
    download.

    Args:
        process_group: The processes that run one engine. The first one leads it from here on.
        display: The display of the progress, if others read it too.

    Raises:
        InputError: If the model does not fit, after printing its plan; if its weights are damaged
            or cannot be fetched; or if the chosen implementation refuses the model.
    """
    parallel = read_layout(options)
    sharded_model, group = shard_over_devices(model, limits, parallel)
    cache_format_model = model.with_cache_format(limits.cache_format, limits.native_layers)
    checked = None if model_source.name else model_source.weights()
    compile_seconds: dict[str, float] = {}
    with display or progress(messages) as display:

        def load(loading: BackgroundLoad) -> Any:
            def moved(task_name: str, num_bytes: int, total: int) -> None:
                loading.watch()
                display.moved(task_name, num_bytes, total)

            weights = checked or model_source.weights(lambda *now: moved("fetching", *now))
            placed = weights.place(
                lambda *now: moved("loading", *now), model=sharded_model, group=group
            )
            if group:
                return placed
            # Packing runs many small programs. It waits until the steps are lowered, because the
            # compilation of the steps waits for their lowering.
            with PROCESS_STATE.lowering:
                return cache_format_model.pack(placed)

        def on_compile(name: str, seconds: float | None) -> None:
            loading.check()
            display.compiles(name, done=seconds is not None)
            if seconds is not None:
                compile_seconds[name] = seconds

        with refused_plan(messages, display.stop), refusals(), BackgroundLoad(load) as loading:
            prepared = prepare(
                model,
                model.param_shapes(),
                limits,
                implementation=options.implementation,
                on_compile=on_compile,
                on_steps=display.begins,
                on_fits=loading.start,
                parallel=parallel,
            )
            engine = Engine.of(prepared, strict=options.strict, detokenize=tokenizer.decode)
            stages.ended("compiling")
            params = loading.result()
        stages.ended("loading")
        display.stop()
        code = sum(known.code for known in prepared.executable_memory.values())
        for line in executable_lines(compile_seconds, code):
            messages.print(line)
        for line in plan_lines(engine.plan):
            messages.print(line)
        display.says("warming up: each executable runs twice")
        with refused_plan(messages, display.stop):
            engine.start(params)
    if process_group is not None and process_group.leads:
        engine.lead(process_group)
    stages.ended("warm-up")
    return engine, compile_seconds
