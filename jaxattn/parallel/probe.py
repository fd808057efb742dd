"""What NCCL and XLA's collective kernels take of each GPU: measured, before anything is loaded.

    taken = collectives_bytes(Group(Parallel(tensor=2), devices))

NCCL makes its communicator and buffers at the first collective of each kind, outside of JAX's
allocator. So a small one of each kind that a step may have is run, with free memory read before and
after. A group whose GPUs cannot reach each other ends here.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.memory.device import device_memory
from jaxattn.parallel.group import Group

# Elements of float32: an all-reduce up to 4 MiB is XLA's own kernel, and a larger one is NCCL's.
SMALL, LARGE = 2**12, 2**21


class CollectiveError(RuntimeError):
    """The devices of a group cannot send to each other."""


def collectives_bytes(group: Group) -> int:
    """Bytes that collectives take of the device of this process that they take the most of.

    0 where nothing says how much is free, as on a CPU.

    Raises:
        CollectiveError: a collective failed; both ends are named.
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

    before = _outside(group)
    try:
        jax.block_until_ready(group.make(each_kind, group.each))
    except jax.errors.JaxRuntimeError as error:
        raise CollectiveError(
            f"the devices {', '.join(map(str, group.devices))} cannot send to each other: "
            f"{str(error).splitlines()[0]}; NCCL has to be installed, and NCCL_DEBUG=INFO says "
            "what it tried"
        ) from error
    after = _outside(group)
    return max((late - early for early, late in zip(before, after, strict=True)), default=0)


def _outside(group: Group) -> list[int]:
    """Of each device of this process, the bytes that JAX's pool has not."""
    memories = (device_memory(device) for device in group.local_devices)
    return [memory.outside or 0 for memory in memories if memory is not None]
