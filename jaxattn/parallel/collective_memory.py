"""Memory of NCCL and XLA's collective kernels on each GPU, measured before anything is loaded.

    taken = collectives_bytes(Group(Parallel(tensor=2), devices))

NCCL makes its communicator and buffers at the first collective of each kind, outside of JAX's
allocator. So a small one of each kind that a step may have is run, and what the process holds is
read before and after. A group whose GPUs cannot reach each other ends here. GPUs of several
processes meet in all sets that a step may have: no communicator is split there, so each takes its
own.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.memory.device_memory import device_memory
from jaxattn.memory.process_memory import process_bytes
from jaxattn.parallel.device_group import DeviceGroup
from jaxattn.parallel.layout import Dimension
from jaxattn.parallel.nccl_comm_split_flag import OFF, VARIABLE, comm_split_enabled

# Elements of float32: an all-reduce up to 4 MiB is XLA's own kernel, and a larger one is NCCL's.
SMALL, LARGE = 2**12, 2**21
SECONDS = 60.0  # in which GPUs of several processes have to meet, in each program
DIMENSIONS: tuple[Dimension, ...] = (
    "all", "data", "tensor", "heads", "context", "expert", "columns", "experts"
)  # fmt: skip


class CollectiveError(RuntimeError):
    """The devices of a group cannot send to each other."""


def collectives_bytes(group: DeviceGroup) -> int:
    """Bytes that collectives take of each device of this process.

    What other processes take meanwhile does not count, where something says what this one holds.
    Elsewhere the devices' free memory tells, and other processes may change that of some: the least
    counts, as all devices take part alike. 0 where nothing says how much is free, as on a CPU.

    Raises:
        CollectiveError: a collective failed; both ends are named.
    """
    check_processes(group)
    before = _held(group)
    _meet_in_time(group)
    after = _held(group)
    if before.own and after.own:
        return max(0, *(late - early for early, late in zip(before.own, after.own, strict=True)))
    taken = (late - early for early, late in zip(before.all, after.all, strict=True))
    return max(0, min(taken, default=0))


def check_processes(group: DeviceGroup, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses GPUs of several processes whose communicators XLA may split.

    Two processes of two GPUs each then waited for each other without end, on four H200s. On a CPU
    nothing is refused.

    Raises:
        CollectiveError: it says what to set.
    """
    processes = _processes(group)
    if group.devices[0].platform == "gpu" and processes > 1 and comm_split_enabled(environment):
        raise CollectiveError(
            f"{group.parallel.flags}: GPUs of {processes} processes wait for each other without "
            "end where XLA splits NCCL's communicators; start each process with "
            f'{VARIABLE}="{OFF}" in its environment, as jaxattn.serve does by itself'
        )


def _processes(group: DeviceGroup) -> int:
    return len({device.process_index for device in group.devices})


def _meet_in_time(group: DeviceGroup, seconds: float = SECONDS) -> None:
    """As `_meet`; GPUs of several processes that do not meet in so many seconds are an error.

    Each program has so many: NCCL connects the GPUs of each set anew.

    Raises:
        CollectiveError: a collective failed, or did not end.
    """
    if _processes(group) == 1:
        return _meet(group)
    found: list[BaseException | None] = []
    ended: list[None] = []  # programs

    def meet() -> None:
        try:
            _meet(group, lambda: ended.append(None))
        except BaseException as error:
            found.append(error)
        else:
            found.append(None)

    # A call that waits for another process cannot be ended: the process ends, and the thread too.
    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    before = -1
    while not found and len(ended) > before:
        before = len(ended)
        thread.join(seconds)
    if not found:
        raise CollectiveError(
            f"the devices {', '.join(map(str, group.devices))} of several processes did not meet "
            f"in {seconds:.0f} s; {VARIABLE} has to have {OFF} before JAX starts, and "
            "NCCL_DEBUG=INFO says what they wait for"
        )
    if found[0] is not None:
        raise found[0]
    return None


def _meet(group: DeviceGroup, ended: Callable[[], None] = lambda: None) -> None:
    """A small collective of each kind over all devices of a group.

    Those of several processes meet in each of their sets too, and then in all sets of one program.

    Args:
        ended: called after each program.

    Raises:
        CollectiveError: one failed.
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
            ended()
    except jax.errors.JaxRuntimeError as error:
        raise CollectiveError(
            f"the devices {', '.join(map(str, group.devices))} cannot send to each other: "
            f"{str(error).splitlines()[0]}; NCCL has to be installed, and NCCL_DEBUG=INFO says "
            "what it tried"
        ) from error


def _each_kind(group: DeviceGroup, sets: Sequence[tuple[str, ...]]) -> Callable[[], jax.Array]:
    """A program with a collective of each kind over these axes, one set after another."""

    def program() -> jax.Array:
        # Each starts from the one before, and each GPU from numbers of its own: XLA joins sums that
        # do not wait for each other, and computes those of equal numbers without sending them.
        own = lax.axis_index(group.parallel.axes("all"))
        x = jnp.zeros(SMALL, jnp.float32)
        for axes in sets:
            x = lax.psum(x[:SMALL] + own, axes)
            x = lax.psum(jnp.resize(x, (LARGE,)) + own, axes)
            x = lax.all_gather(x[:SMALL] + own, axes)
            x = lax.all_to_all(x + own, axes, split_axis=0, concat_axis=0).reshape(-1)
        return x[:1]

    return program


class _DeviceUsage(NamedTuple):
    """Bytes of each device of this process that are in no pool of JAX.

    Attributes:
        own: those of this process; empty where they are unknown for one of the devices.
        all: those of all processes; empty where nothing says what is free.
    """

    own: list[int]
    all: list[int]


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
