"""Steps on the engine's devices: on one, or as one program over a group.

The model's steps run inside `jax.shard_map`, each device with its shard of weights, pages and
states. Rows and inputs from the host are replicated. Logits stay sharded by vocabulary, and by rows
between data groups. XLA partitions the sampling accordingly, and communicates sums and maxima.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec, Sharding

from jaxattn.core.dispatch import Implementation
from jaxattn.engine.compilation.step_export import DecodeStepExporter, decode_of
from jaxattn.engine.steps.batch_update_steps import StateCopyStep
from jaxattn.engine.steps.device_batch import DeviceBatch
from jaxattn.engine.steps.engine_state import new_rows, new_state
from jaxattn.engine.steps.model_steps import FusedDecodeStep, ModelStep
from jaxattn.engine.steps.sampling_steps import BitmaskStep, SampleStep
from jaxattn.engine.steps.score_step import HiddenStep, ScoreStep, head_of
from jaxattn.engine.steps.step_interface import EngineStep
from jaxattn.limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.interface import Model, compiler_options, jit_step
from jaxattn.parallel import DeviceGroup

REPLICATED = PartitionSpec()


def group_of(model: Model, devices: tuple[jax.Device, ...]) -> DeviceGroup | None:
    """Returns the group that runs the model; None for a single device."""
    return DeviceGroup(model.parallel, devices) if len(devices) > 1 else None


def replicated_sharding(group: DeviceGroup | None) -> Sharding | None:
    """Returns the sharding of replicated arrays; None means JAX's default device."""
    return None if group is None else group.sharding(REPLICATED)


def logits_spec(model: Model) -> PartitionSpec:
    parallel = model.parallel
    return PartitionSpec(parallel.axes("data") or None, parallel.axes("tensor") or None)


def hidden_spec(model: Model) -> PartitionSpec:
    """Returns the spec of a prefill step's hidden states: sharded by data group."""
    return PartitionSpec(model.parallel.axes("data") or None)


def _read_spec(step: HiddenStep, model: Model) -> PartitionSpec:
    """Returns the spec of the hidden states that a step reads."""
    return REPLICATED if isinstance(step, ScoreStep) else hidden_spec(model)


def device_put_inputs(
    step: EngineStep, inputs: Any, model: Model, group: DeviceGroup | None
) -> Any:
    """Puts the inputs of a step's call on the devices."""
    if group is None:
        return jax.device_put(inputs)
    if isinstance(step, SampleStep | BitmaskStep):
        logits, rest = inputs
        return group.put(logits, logits_spec(model)), group.put(rest, REPLICATED)
    if isinstance(step, HiddenStep):
        hidden, wanted = inputs
        return group.put(hidden, _read_spec(step, model)), group.put(wanted, REPLICATED)
    return jax.tree.map(lambda x: group.put(x, REPLICATED), inputs)


def allocator_over(
    model: Model, limits: Limits, group: DeviceGroup
) -> Callable[[], tuple[DecodeState, DeviceBatch]]:
    """Returns a function that allocates an engine's sharded state, and empty, replicated rows. It
    compiles now, so that calls compile nothing.

    The function waits for the state on all devices, because one device may write to another as soon
    as a step begins.
    """
    state_of = group.maker(partial(new_state, model, limits), model.state_specs())
    rows_of = group.maker(partial(new_rows, limits), REPLICATED)

    def allocate() -> tuple[DecodeState, DeviceBatch]:
        state = state_of()
        for each in model.caches:
            state = state.replace(each.name, each.connected(state.caches[each.name]))
        return jax.block_until_ready(state), rows_of()

    return allocate


def arguments(
    step: EngineStep, model: Model, limits: Limits, params: Any, group: DeviceGroup | None
) -> tuple[Any, ...]:
    """Returns the shapes of a step's arguments; over a group, with their shardings.

    Args:
        params: The shapes of one device's packed parameters.
    """
    shapes = step.arguments(model, limits, params)
    if group is None:
        return shapes
    if isinstance(step, ModelStep):
        return group.shapes(shapes, _specs(model))
    if isinstance(step, FusedDecodeStep):
        weights, state, whole = _specs(model)
        return group.shapes(shapes, (weights, (state, whole), whole))
    if isinstance(step, StateCopyStep):
        return group.shapes(shapes, (model.state_specs(), REPLICATED))
    if isinstance(step, HiddenStep):  # its tokens count over all data groups
        hidden, weights, wanted = shapes
        [weights] = group.shapes((weights,), (_specs(model)[0],))
        where = group.sharding(_read_spec(step, model))
        hidden = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=where)
        return hidden, weights, *group.shapes((wanted,), (REPLICATED,))
    specs: Any = REPLICATED
    if isinstance(step, SampleStep | BitmaskStep):
        specs = (REPLICATED, logits_spec(model), REPLICATED)[-len(shapes) :]
    rest = [group.sharding(spec) for spec in (specs if isinstance(specs, tuple) else (specs,) * 2)]
    return tuple(
        jax.tree.map(lambda x, s=s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree)
        for tree, s in zip(shapes, rest, strict=True)
    )


def jitted_step(
    step: EngineStep,
    model: Model,
    limits: Limits,
    tree: Any,
    implementation: Implementation | None,
    backend: str,
    group: DeviceGroup | None = None,
    lowered: DecodeStepExporter | None = None,
) -> Any:
    """Returns the step's function, jitted as the engine compiles it.

    Args:
        tree: The structure of the packed parameters.
        lowered: The exporter that lowers a decode step once for all executables that contain it.
    """
    call = lowered(entry) if lowered and (entry := decode_of(step)) else None
    if isinstance(step, ModelStep):
        call = call or model_step(step, model, limits, tree, implementation, group)
        out = group and group.shardings(_results(step, model))
        # Over several devices, graphs with loops have not been timed.
        prefill = step.kind == "prefill" and group is None
        return jit_step(call, backend=backend, prefill=prefill, out_shardings=out)
    if isinstance(step, FusedDecodeStep):
        if group is None and not call:  # such as steps that do more than decode and sample
            chosen = implementation_of(step.decode, implementation)
            function = step.function(model, limits, tree)
            return jit_step(function, implementation=chosen, backend=backend)
        call = call or model_step(step.decode, model, limits, tree, implementation, group)
        out = group and group.shardings(((model.state_specs(), REPLICATED), REPLICATED))
        return jax.jit(
            step.behind(call, limits),
            donate_argnums=step.donated,
            compiler_options=compiler_options(backend),
            out_shardings=out,
        )
    function, out = step.function(model, limits, tree), replicated_sharding(group)
    if group is not None and isinstance(step, BitmaskStep):
        out = group.sharding(logits_spec(model))
    elif group is not None and isinstance(step, HiddenStep):
        # Each device computes its own columns of the logits; XLA partitions what comes after them.
        whole, columns = _specs(model)[0], PartitionSpec(None, *logits_spec(model)[1:])
        function = step.with_head(group.step(head_of(model, tree), (whole, REPLICATED), columns))
        out = group.shardings((_read_spec(step, model), REPLICATED))
    elif group is not None and isinstance(step, StateCopyStep):
        states = model.state_specs()
        function, out = group.step(function, (states, REPLICATED), states), group.shardings(states)
    elif group is not None and not isinstance(step, SampleStep):
        # Each device runs the step by itself, because XLA's partitioner updates some rows by copy.
        function = group.step(function, (REPLICATED, REPLICATED), REPLICATED)
    return jax.jit(
        function,
        donate_argnums=step.donated,
        compiler_options=compiler_options(backend),
        out_shardings=out,
    )


def model_step(
    entry: ModelStep,
    model: Model,
    limits: Limits,
    tree: Any,
    implementation: Implementation | None,
    group: DeviceGroup | None,
) -> Callable:
    """Returns a step of the model as a function, over the group if there is one."""
    chosen = implementation_of(entry, implementation)
    of_one = partial(entry.function(model, limits, tree), implementation=chosen)
    if group is None:
        return of_one
    return group.step(of_one, _specs(model), _results(entry, model))


def implementation_of(
    entry: ModelStep, implementation: Implementation | None
) -> Implementation | None:
    """Returns the implementation of a step. The requested one applies to decode.

    Prefill uses the best implementation unless the request is XLA, because the prefill kernels do
    not support every model.
    """
    return implementation if entry.kind == "decode" or implementation == "xla" else None


def _results(entry: ModelStep, model: Model) -> tuple[Any, ...]:
    """Returns the specs of a model step's results."""
    both = logits_spec(model), model.state_specs()
    return (*both, hidden_spec(model)) if entry.kind == "prefill" else both


def _specs(model: Model) -> tuple[Any, Any, Any]:
    """Returns the specs of the weights, the state and the batch of the model's steps."""
    return tuple(jax.tree.leaves(model.packed_specs())), model.state_specs(), REPLICATED
