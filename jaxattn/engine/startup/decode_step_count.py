"""The number of decode steps in one call.

To send a call, to be told its tokens and to hand them on takes the host about as long whether the
call runs one step or several. So where a step is shorter than that, one call runs several of them:
the device has something to do while the host is at work. Rows are on the device, and one that ends
is padding in the steps behind.

Nothing is compiled yet when the number is chosen, so it follows from the weights alone: a step of
a dense model reads them. One with experts reads fewer, and takes single steps sooner than it must.
"""

import dataclasses
from typing import Any

from jaxattn.memory.engine_limits import MOST_STEPS, Limits
from jaxattn.memory.plan import nbytes

# What the host takes for a call and its tokens, at most (benchmarks/log/step.md). A step that is
# longer hides it.
HOST_SECONDS = 1e-3
# The shortest step of any model: some hundred kernels, one after another.
LEAST_SECONDS = 250e-6
# Of an H200. The fastest device decides, so a model has the same executables on each.
BYTES_PER_SECOND = 4.8e12


def choose_decode_steps(limits: Limits, params: Any, *, gpu: bool, gpus: int = 1) -> Limits:
    """The limits with the decode steps of a call, where they leave them open.

    Args:
        params: the packed parameters, or their shapes.
        gpu: whether the steps run on one; a CPU runs them one by one.
        gpus: that run each step; several run steps one by one.
    """
    given = limits.steps_per_round is not None
    if given or limits.speculate or limits.reproducible or not gpu or gpus > 1:
        return limits
    step = max(nbytes(params) / BYTES_PER_SECOND, LEAST_SECONDS)
    steps = 1
    # Sending them takes part of the time of several steps: twice the host's time is room for both.
    while step < HOST_SECONDS and steps * step < 2 * HOST_SECONDS and steps < MOST_STEPS:
        steps *= 2
    return limits if steps == 1 else dataclasses.replace(limits, steps_per_round=steps)
