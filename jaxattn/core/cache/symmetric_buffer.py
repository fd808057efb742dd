"""A GPU's buffer to which the other GPUs of a mesh write, for kernels over peer memory.

`jaxattn/kernels/collectives/peer_transfer.py` implements the transfers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SymmetricBuffer:
    """A GPU's persistent buffer for a kernel: zeros at first, donated with each step.

    Other GPUs write to this buffer, so it must not be copied or moved while a step runs.

    Attributes:
        inbox: int32 [2, N, T, F], the parts of N GPUs; calls alternate between the two sides.
        counts: int32 [1, T, 1], number of calls that included each token. No output of a step may
            have this shape: JAX gives a donated buffer to the first output with its shape.
        addresses: int32 [N + 1, 2], the address of each GPU's inbox (see `with_addresses`),
            followed by the GPU's own number.
    """

    inbox: Int[Array, "2 N T F"]
    counts: Int[Array, "1 T 1"]
    addresses: Int[Array, "N_1 2"]

    @classmethod
    def empty(cls, gpus: int, tokens: int, features: int) -> "SymmetricBuffer":
        """Returns a zeroed buffer for calls of up to `tokens` tokens, on one of the GPUs.

        Wait until all GPUs have theirs: a write to a buffer before it exists is lost. The kernel
        would then wait for the write, and finally end the program with an error.
        """
        inbox = jnp.zeros((2, gpus, tokens, features), jnp.int32)
        return cls(inbox, jnp.zeros((1, tokens, 1), jnp.int32), jnp.zeros((gpus + 1, 2), jnp.int32))


def with_addresses(mailbox: SymmetricBuffer) -> SymmetricBuffer:
    """Returns a mailbox with the addresses of its inboxes on the mesh's GPUs.

    Call this once, on the host, when the inboxes exist. The inboxes must keep their addresses: a
    step takes them donated, and returns them.

    Args:
        mailbox: The mailbox of all GPUs, concatenated along the first axis.
    """
    of_gpus = mailbox.inbox.addressable_shards
    parts = sorted(of_gpus, key=lambda shard: shard.index[0].start or 0)
    places = np.array([shard.data.unsafe_buffer_pointer() for shard in parts], np.uint64)
    words = places.astype("<u8").view("<u4").reshape(-1, 2).astype(np.uint32).view(np.int32)
    tables = [np.concatenate([words, [[gpu, 0]]]) for gpu in range(len(parts))]
    table = np.concatenate(tables).astype(np.int32)
    where = mailbox.addresses.sharding
    placed = jax.make_array_from_callback(table.shape, where, lambda part: table[part])
    return dataclasses.replace(mailbox, addresses=placed)
