"""The number of decode steps in one call.

Sending a call, receiving its tokens and passing them on takes the host about as long for several
steps as for one. So if a step is shorter than the host's work, one call runs several, which keeps
the device busy. The rows are on the device, and a row that ends is padding in the remaining steps.

The number is chosen before anything is compiled, from the weights: a step of a dense model reads
all of them. A step of an MoE model reads fewer, so such a model gets single steps more often than
it needs.
"""

import dataclasses
from typing import Any

from jaxattn.limits import MOST_STEPS, Limits
from jaxattn.memory.plan import nbytes

# The host's time for a call and its tokens, at most (benchmarks/log/step.md). A longer step hides
# it.
HOST_SECONDS = 1e-3
# The shortest step of any model: some hundred kernels, one after another.
LEAST_SECONDS = 250e-6
# The bandwidth of an H200, the fastest device, so that a model has the same executables on each.
BYTES_PER_SECOND = 4.8e12


def choose_decode_steps(limits: Limits, params: Any, *, gpu: bool, gpus: int = 1) -> Limits:
    """Returns the limits with `steps_per_round`, if it is left open.

    Args:
        params: The packed parameters, or their shapes.
        gpu: Whether the steps run on a GPU; a CPU runs one step per call.
        gpus: The number of GPUs that run each step; several run one step per call.
    """
    given = limits.steps_per_round is not None
    if given or limits.speculate or limits.reproducible or not gpu or gpus > 1:
        return limits
    step = max(nbytes(params) / BYTES_PER_SECOND, LEAST_SECONDS)
    steps = 1
    # Sending the steps takes part of their own time, so they may take twice the host's time.
    while step < HOST_SECONDS and steps * step < 2 * HOST_SECONDS and steps < MOST_STEPS:
        steps *= 2
    return limits if steps == 1 else dataclasses.replace(limits, steps_per_round=steps)
