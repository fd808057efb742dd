"""Memory of NCCL and XLA's collective kernels on each GPU, measured before anything is loaded.

    taken = collectives_bytes(DeviceGroup(Parallel(tensor=2), devices))

NCCL creates its communicator and buffers at the first collective of each kind, outside of JAX's
allocator. So this module runs a small one of each kind that a step may use, and measures the
process's memory before and after. If the GPUs of a group cannot reach each other, it raises an
error. GPUs of several processes run collectives in all sets that a step may use: without
communicator splitting, each set has its own communicator.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.memory.device_memory import device_memory
from jaxattn.memory.nvml_memory import process_bytes
from jaxattn.parallel.device_group import DeviceGroup
from jaxattn.parallel.layout import Dimension
from jaxattn.parallel.nccl_comm_split_flag import OFF, VARIABLE, comm_split_enabled

# Elements of float32: XLA's own kernel runs an all-reduce of up to 4 MiB, and NCCL a larger one.
SMALL, LARGE = 2**12, 2**21
SECONDS = 60.0  # for GPUs of several processes to meet, in each program
DIMENSIONS: tuple[Dimension, ...] = (
    "all", "data", "tensor", "heads", "context", "expert", "columns", "experts"
)  # fmt: skip


class CollectiveError(RuntimeError):
    """The devices of a group cannot send to each other."""


def collectives_bytes(group: DeviceGroup) -> int:
    """Returns the bytes that collectives take on each device of this process.

    If NVML reports this process's own memory, other processes do not affect the result. Otherwise
    it is the smallest decrease of the devices' free memory, because other processes may change that
    of some devices. It is 0 if the free memory is unknown, as on a CPU.

    Raises:
        CollectiveError: A collective failed; the message names the devices.
    """
    check_processes(group)
    before = _held(group)
    _run_collectives_with_timeout(group)
    after = _held(group)
    if before.process and after.process:
        return max(
            0, *(late - early for early, late in zip(before.process, after.process, strict=True))
        )
    taken = (late - early for early, late in zip(before.device, after.device, strict=True))
    return max(0, min(taken, default=0))


def check_processes(group: DeviceGroup, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses GPUs of several processes if XLA may split their communicators.

    With splitting, two processes of two H200s each have waited for each other forever. On a CPU
    the function refuses nothing.

    Raises:
        CollectiveError: XLA may split communicators; the message names the flag to set.
    """
    processes = _processes(group)
    if group.devices[0].platform == "gpu" and processes > 1 and comm_split_enabled(environment):
        raise CollectiveError(
            f"{group.parallel.flags}: GPUs of {processes} processes wait for each other forever "
            "if XLA splits NCCL's communicators; start each process with "
            f'{VARIABLE}="{OFF}" in its environment, as jaxattn.serve does'
        )


def _processes(group: DeviceGroup) -> int:
    return len({device.process_index for device in group.devices})


def _run_collectives_with_timeout(group: DeviceGroup, seconds: float = SECONDS) -> None:
    """Runs `_run_collectives` with a timeout per program, if the group has several processes.

    The timeout is per program, because NCCL connects the GPUs of each set anew.

    Raises:
        CollectiveError: A collective failed, or did not end in time.
    """
    if _processes(group) == 1:
        return _run_collectives(group)
    outcomes: list[BaseException | None] = []
    finished: list[None] = []  # an item per finished program

    def meet() -> None:
        try:
            _run_collectives(group, lambda: finished.append(None))
        except BaseException as error:
            outcomes.append(error)
        else:
            outcomes.append(None)

    # A call that waits for another process cannot be cancelled, so it runs in a daemon thread.
    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    before = -1
    while not outcomes and len(finished) > before:
        before = len(finished)
        thread.join(seconds)
    if not outcomes:
        raise CollectiveError(
            f"the devices {', '.join(map(str, group.devices))} of several processes did not "
            f"connect within {seconds:.0f} s; {VARIABLE} must contain {OFF} before JAX starts, "
            "and NCCL_DEBUG=INFO shows what they wait for"
        )
    if outcomes[0] is not None:
        raise outcomes[0]
    return None


def _run_collectives(group: DeviceGroup, on_program_end: Callable[[], None] = lambda: None) -> None:
    """Runs a small collective of each kind over all devices of a group.

    With several processes it also runs them in each set of devices that a step may use, and then in
    all sets in one program.

    Args:
        on_program_end: A function that is called after each program.

    Raises:
        CollectiveError: A collective failed.
    """
    sets = [group.parallel.axes("all")]
    if _processes(group) > 1:
        each = (group.parallel.axes(name) for name in DIMENSIONS)
        sets = list(dict.fromkeys(axes for axes in each if axes))
    programs = [_each_kind(group, [axes]) for axes in sets]
    if len(sets) > 1:
        programs.append(_each_kind(group, sets))
    try:
        for program in programs:
            jax.block_until_ready(group.make(program, group.each))
            on_program_end()
    except jax.errors.JaxRuntimeError as error:
        raise CollectiveError(
            f"the devices {', '.join(map(str, group.devices))} cannot communicate: "
            f"{str(error).splitlines()[0]}; NCCL must be installed, and NCCL_DEBUG=INFO shows "
            "what it tried"
        ) from error


def _each_kind(group: DeviceGroup, axis_sets: Sequence[tuple[str, ...]]) -> Callable[[], jax.Array]:
    """Returns a program with a collective of each kind over these axes, one set after another."""

    def program() -> jax.Array:
        # Each collective depends on the one before, and each GPU adds its own number. Otherwise XLA
        # joins independent sums, and computes sums of equal numbers without communication.
        own = lax.axis_index(group.parallel.axes("all"))
        x = jnp.zeros(SMALL, jnp.float32)
        for axes in axis_sets:
            x = lax.psum(x[:SMALL] + own, axes)
            x = lax.psum(jnp.resize(x, (LARGE,)) + own, axes)
            x = lax.all_gather(x[:SMALL] + own, axes)
            x = lax.all_to_all(x + own, axes, split_axis=0, concat_axis=0).reshape(-1)
        return x[:1]

    return program


class _DeviceUsage(NamedTuple):
    """The bytes outside of JAX's pool, for each device of this process.

    Attributes:
        process: The bytes of this process; empty if they are unknown for a device.
        device: The bytes of all processes; empty if the free memory is unknown.
    """

    process: list[int]
    device: list[int]


def _held(group: DeviceGroup) -> _DeviceUsage:
    memories = [device_memory(device) for device in group.local_devices]
    outside = [memory.outside for memory in memories if memory is not None]
    whole = [each for each in outside if each is not None]
    own = [
        held - memory.pool
        for device, memory in zip(group.local_devices, memories, strict=True)
        if memory is not None and (held := process_bytes(device)) is not None
    ]
    return _DeviceUsage(own if len(own) == len(memories) else [], whole)
