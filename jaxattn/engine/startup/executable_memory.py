"""Device memory of an executable: bounds from its shapes, or XLA's figures once it is compiled."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.core.dispatch import Implementation
from jaxattn.engine.compilation.sharded_step import implementation_of
from jaxattn.engine.steps.model_steps import FusedDecodeStep, ModelStep
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.engine.steps.step_interface import EngineStep
from jaxattn.limits import Limits
from jaxattn.memory.plan import PlanError, nbytes
from jaxattn.memory.temp_bound import temp_bound
from jaxattn.models.interface import Model


@dataclasses.dataclass(frozen=True)
class ExecutableMemory:
    """The bytes of one executable; `basis` is the source of the numbers (see `PlanItem`)."""

    in_out: int
    temp: int
    code: int
    basis: str


def from_compiled(compiled: jax.stages.Compiled, inputs: int) -> ExecutableMemory:
    """Returns the memory of an executable; `inputs` are the bytes of its batch.

    XLA's own count of arguments omits parameters that a step does not read.
    """
    stats: Any = compiled.memory_analysis()
    if not stats or not stats.argument_size_in_bytes:
        raise PlanError(
            "XLA does not report how much memory an executable needs; empty the compilation cache"
        )
    in_out = inputs + stats.output_size_in_bytes - stats.alias_size_in_bytes
    temp, code = stats.temp_size_in_bytes, stats.generated_code_size_in_bytes
    return ExecutableMemory(in_out, temp, code, "compiled")


def from_shapes(
    model: Model, limits: Limits, params: Any, implementation: Implementation | None
) -> dict[str, ExecutableMemory]:
    """Returns upper bounds of the executables' memory, by tracing them without compilation."""
    return {
        str(step): bound_of(model, step, limits, params, implementation)
        for step in all_steps(limits)
    }


def bound_of(
    model: Model,
    step: EngineStep,
    limits: Limits,
    params: Any,
    implementation: Implementation | None,
) -> ExecutableMemory:
    """Returns an upper bound of one executable's memory, which more pages do not raise."""
    tree = jax.tree.structure(params)
    function = step.function(model, limits, tree)
    if isinstance(step, FusedDecodeStep) and limits.groups > 1:
        decode = step.decode.function(model, limits, tree)
        function = step.behind(_of_all_groups(decode, limits.groups), limits)
    if isinstance(step, ModelStep | FusedDecodeStep):
        entry = step.decode if isinstance(step, FusedDecodeStep) else step
        chosen = implementation_of(entry, implementation)
        function = functools.partial(function, implementation=chosen)
    arguments = step.arguments(model, limits, params)
    bound, results = temp_bound(
        function, *arguments, donated=step.donated, axes=model.parallel.mesh_axes
    )
    # The results come with a table of their addresses.
    out = nbytes(results) - nbytes(arguments[step.donated])
    in_out = nbytes(step.given(model, limits)) + out + 8 * len(jax.tree.leaves(results))
    return ExecutableMemory(in_out, bound, 0, "bound")


def _of_all_groups(decode: Callable, groups: int) -> Callable:
    """Returns a decode step with as many logits as all data groups have, which are all sampled."""

    def whole(*arguments: Any, **options: Any) -> Any:
        logits, state = decode(*arguments, **options)
        return jnp.concatenate([logits] * groups), state

    return whole
