"""Processes that lower the steps of a model beside each other.

Tracing and lowering are Python, which one thread of a process runs at a time. They take longer than
all else of a first start: 8 s for a prefill step and 4 s for a decode step, of which an engine has
about ten. Each process lowers some of them (lowering_process.py). The engine's own process
deserializes the result, which takes a tenth of a second.

Where a process cannot be started, ends, or takes too long, the engine's process lowers the step
itself. It does so with few steps, on a machine with few cores, and for several GPUs.
"""

import concurrent.futures
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxattn.core.dispatch import PACKAGE
from jaxattn.engine.compilation.lowering_process import LoweredStep, LoweringSetup
from jaxattn.engine.steps.model_steps import ModelStep

MODULE = "jaxattn.engine.compilation.lowering_process"
FEWEST_STEPS = 4  # with fewer, a process's own start takes as long as it saves
FEWEST_CORES = 8
MOST_PROCESSES = 10  # each has about 0.7 GB
LONGEST = 120.0  # seconds until the engine's process lowers a step itself


class LoweringPool:
    """Processes and the steps that they lower. To be closed.

    Args:
        setup: how steps are lowered.
        steps: which; those that take longest first.
        processes: how many.
    """

    def __init__(self, setup: LoweringSetup, steps: Sequence[ModelStep], processes: int):
        self._setup = pickle.dumps(setup)
        self._until = time.monotonic() + LONGEST
        self._own, self._started = threading.local(), list[subprocess.Popen[bytes]]()
        self._guard, self._closed = threading.Lock(), False
        self._threads = concurrent.futures.ThreadPoolExecutor(processes)
        self._waited = {step: self._threads.submit(self._lowered, step) for step in steps}

    @classmethod
    def start(cls, setup: LoweringSetup, steps: Sequence[ModelStep]) -> "LoweringPool | None":
        """Processes for these steps; None where they would save nothing, or cannot be told what to
        lower."""
        cores = os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count()
        if len(steps) < FEWEST_STEPS or (cores or 1) < FEWEST_CORES:
            return None
        try:
            return cls(setup, steps, min(len(steps), (cores or 1) * 3 // 4, MOST_PROCESSES))
        except (pickle.PicklingError, AttributeError, TypeError):
            return None  # a model of a class that was defined within a function

    def wait(self, steps: Sequence[ModelStep]) -> None:
        """Waits until one of the steps is lowered, or is not going to be."""
        concurrent.futures.wait(
            [self._waited[step] for step in steps],
            max(self._until - time.monotonic(), 0.0),
            concurrent.futures.FIRST_COMPLETED,
        )

    def done(self, step: ModelStep | None) -> bool:
        """Whether `take` gives its answer at once."""
        waited = self._waited.get(step) if step else None
        return waited is None or waited.done() or time.monotonic() >= self._until

    def take(self, step: ModelStep) -> Callable[..., Any] | None:
        """The step as a function that was lowered; None where the caller has to do it."""
        waited = self._waited.get(step)
        if waited is None:
            return None
        concurrent.futures.wait([waited], max(self._until - time.monotonic(), 0.0))
        found = waited.result() if waited.done() else None
        if found is None or found.export is None:
            return None
        for category, text in found.warned:
            warnings.warn(text, category, skip_file_prefixes=(PACKAGE,))
        return found.export.call()

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        with self._guard:
            self._closed = True
            for process in self._started:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            process.wait()
            for stream in (process.stdin, process.stdout):
                try:
                    if stream:
                        stream.close()
                except OSError:
                    pass  # bytes that it never read

    def _lowered(self, step: ModelStep) -> LoweredStep | None:
        """By the process of this thread."""
        try:
            process = self._process()
            assert process.stdin and process.stdout
            process.stdin.write(pickle.dumps(step))
            process.stdin.flush()
            return pickle.load(process.stdout)
        except Exception:  # it ended, or what it wrote cannot be read here
            return None

    def _process(self) -> subprocess.Popen[bytes]:
        if not hasattr(self._own, "process"):
            with self._guard:
                if self._closed:
                    raise OSError("the pool is closed")
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", MODULE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=_environment(os.environ),
                    start_new_session=True,  # Ctrl-C in a terminal is not for it
                )
                self._started.append(process)
            assert process.stdin
            process.stdin.write(self._setup)
            self._own.process = process
        return self._own.process


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Of a process: the modules of this one, and no GPU."""
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    return dict(own) | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
