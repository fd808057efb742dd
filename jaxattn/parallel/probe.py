"""What NCCL and XLA's collective kernels take of each GPU: measured, before anything is loaded.

    taken = collectives_bytes(Group(Parallel(tensor=2), devices))

NCCL makes its communicator and buffers at the first collective of each kind, outside of JAX's
allocator. So a small one of each kind that a step may have is run, and what the process holds is
read before and after. A group whose GPUs cannot reach each other ends here.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.memory.device import device_memory
from jaxattn.memory.process import process_bytes
from jaxattn.parallel.group import Group
from jaxattn.parallel.layout import Dimension, Parallel

# Elements of float32: an all-reduce up to 4 MiB is XLA's own kernel, and a larger one is NCCL's.
SMALL, LARGE = 2**12, 2**21
DIMENSIONS: tuple[Dimension, ...] = (
    "data", "tensor", "heads", "context", "expert", "columns", "experts"
)  # fmt: skip


class CollectiveError(RuntimeError):
    """The devices of a group cannot send to each other."""


def collectives_bytes(group: Group) -> int:
    """Bytes that collectives take of each device of this process.

    What other processes take meanwhile does not count, where something says what this one holds.
    Elsewhere the devices' free memory tells, and other processes may change that of some: the least
    counts, as all devices take part alike. 0 where nothing says how much is free, as on a CPU.

    Raises:
        CollectiveError: a collective failed; both ends are named.
    """
    before = _held(group)
    _meet(group)
    for devices in across(group):
        if any(device in group.local_devices for device in devices):
            _meet(Group(Parallel(tensor=len(devices)), devices))
    after = _held(group)
    if before.own and after.own:
        return max(0, *(late - early for early, late in zip(before.own, after.own, strict=True)))
    taken = (late - early for early, late in zip(before.all, after.all, strict=True))
    return max(0, min(taken, default=0))


def across(group: Group) -> list[tuple[jax.Device, ...]]:
    """The sets of devices of several processes that meet in a dimension, fewer than all.

    Each is one of NCCL's communicators. Two processes that make two of them wait for each other
    where each begins with another one. So all processes make them one after another, in this order.
    """
    found: dict[tuple[int, ...], None] = {}
    for name in DIMENSIONS:
        begin, end = group.parallel.span(name)
        for outer, inner in itertools.product(range(0, group.parallel.gpus, end), range(begin)):
            found[tuple(range(outer + inner, outer + end, begin))] = None
    sets = [tuple(group.devices[number] for number in numbers) for numbers in found]
    return [
        each
        for each in sets
        if len(each) < len(group.devices) and len({x.process_index for x in each}) > 1
    ]


def _meet(group: Group) -> None:
    """A small collective of each kind over the devices of a group.

    Raises:
        CollectiveError: one failed.
    """
    axes = group.parallel.axes("all")

    def each_kind() -> jax.Array:
        # Each starts from the one before, and each GPU from numbers of its own: XLA joins sums that
        # do not wait for each other, and computes those of equal numbers without sending them.
        x = lax.psum(jnp.full(SMALL, lax.axis_index(axes), jnp.float32), axes)
        x = lax.psum(jnp.resize(x, (LARGE,)) + lax.axis_index(axes), axes)
        x = lax.all_gather(x[:SMALL] + lax.axis_index(axes), axes)
        x = lax.all_to_all(x + lax.axis_index(axes), axes, split_axis=0, concat_axis=0)
        return x.reshape(-1)[:1]

    try:
        jax.block_until_ready(group.make(each_kind, group.each))
    except jax.errors.JaxRuntimeError as error:
        raise CollectiveError(
            f"the devices {', '.join(map(str, group.devices))} cannot send to each other: "
            f"{str(error).splitlines()[0]}; NCCL has to be installed, and NCCL_DEBUG=INFO says "
            "what it tried"
        ) from error


class _Held(NamedTuple):
    """Bytes of each device of this process that are in no pool of JAX.

    Attributes:
        own: those of this process; empty where they are unknown for one of the devices.
        all: those of all processes; empty where nothing says what is free.
    """

    own: list[int]
    all: list[int]


def _held(group: Group) -> _Held:
    memories = [device_memory(device) for device in group.local_devices]
    outside = [memory.outside for memory in memories if memory is not None]
    whole = [each for each in outside if each is not None]
    own = [
        held - memory.pool
        for device, memory in zip(group.local_devices, memories, strict=True)
        if memory is not None and (held := process_bytes(device)) is not None
    ]
    return _Held(own if len(own) == len(memories) else [], whole)
