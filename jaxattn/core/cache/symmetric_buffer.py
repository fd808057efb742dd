"""The buffer of a GPU that the other GPUs of a mesh write to, kept for kernels over peer memory.

`jaxattn/kernels/collectives/peer_transfer.py` has what they do with it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SymmetricBuffer:
    """What a kernel keeps of a GPU from call to call: zeros at first, donated with each step.

    Other GPUs write here. It may be copied nowhere while a step runs.

    Attributes:
        inbox: int32 [2, N, T, F], the parts of N GPUs; calls take the two sides in turn.
        counts: int32 [1, T, 1], the number of calls that were for a token. No output of a step has
            such a shape: JAX would give an array's donated buffer to the first one that has.
        addresses: int32 [N + 1, 2], where the inbox of each GPU lies; see `with_addresses`. Then
            the GPU's own number.
    """

    inbox: Int[Array, "2 N T F"]
    counts: Int[Array, "1 T 1"]
    addresses: Int[Array, "N_1 2"]

    @classmethod
    def empty(cls, gpus: int, tokens: int, features: int) -> "SymmetricBuffer":
        """For calls of up to so many tokens, on one of the GPUs.

        Wait until those of all GPUs are there: what is written into one before is lost, and then
        the kernel waits for it, and at last ends the program with an error.
        """
        inbox = jnp.zeros((2, gpus, tokens, features), jnp.int32)
        return cls(inbox, jnp.zeros((1, tokens, 1), jnp.int32), jnp.zeros((gpus + 1, 2), jnp.int32))


def with_addresses(mailbox: SymmetricBuffer) -> SymmetricBuffer:
    """A mailbox with the addresses of its inboxes, which lie one after another on a mesh's GPUs.

    To be called once, on the host, when the inboxes are there. They must stay where they are: a
    step that uses them is given them donated, and gives them back.

    Args:
        mailbox: of all GPUs, each with one along the first axis.
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
