"""Buffers in peer memory for sums and exchanges over GPUs, as a cache that belongs to no row.

See `jaxattn.ops.collectives.all_reduce_norm`. Other GPUs write into the buffer, so it is part of
the step's state, and keeps one address as long as the engine lives.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer, with_addresses
from jaxattn.models.caches.layer_cache import Arrays, CacheSize, LayerCache

# Purposes of a buffer: sums; attention over pages of several GPUs; its outputs merged in one
# launch.
NAME, EXCHANGE, MEETING = "mailbox", "exchange", "meeting"
INBOX, COUNTS, ADDRESSES = "inbox", "counts", "addresses"
# Prefixes of the arrays' names, which are unique within a model.
BEGINNINGS = {NAME: "peer", EXCHANGE: "exchange", MEETING: "meeting"}
# The most bytes that a GPU sends in one launch. On four H200s, 1.5 MiB take 14.5 us. XLA's
# all-reduce takes 12.3 us, plus a conversion, a norm and the end of a CUDA graph. For 3 MiB the
# launch takes 27 us, and the all-reduce 16 us.
MOST_BYTES, MOST_TOKENS = 2**21, 256


def most_tokens(features: int, gpus: int) -> int:
    """Returns the default for the largest step, in tokens, whose sums are one launch."""
    sent = max(gpus - 1, 1) * features * jnp.bfloat16.dtype.itemsize  # per token
    return min(MOST_BYTES // sent, MOST_TOKENS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SymmetricMemoryCache(LayerCache):
    """The `SymmetricBuffer` of each GPU, as arrays of a cache.

    The arrays are `peer_inbox` [2, N, T, F], `peer_counts` [1, T, 1] and `peer_addresses` [N + 1,
    2]. In the buffers of an exchange or of a merge, the prefix is `exchange_` or `meeting_`.

    Attributes:
        gpus: N.
        tokens: T, the most tokens of a step.
        features: F.
    """

    name: str = NAME
    layers: int = 1  # all layers share it
    gpus: int
    tokens: int
    features: int

    def shapes(self, size: CacheSize) -> dict[str, jax.ShapeDtypeStruct]:
        made = jax.eval_shape(lambda: SymmetricBuffer.empty(self.gpus, self.tokens, self.features))
        return dict[str, Any](buffer_arrays(made, self.name))

    def connected(self, arrays: Arrays) -> Arrays:
        """Returns the arrays with the addresses of the inboxes, to which other GPUs write."""
        return buffer_arrays(with_addresses(symmetric_buffer(arrays, self.name)), self.name)

    def describe(self, array: str, shape: jax.ShapeDtypeStruct) -> str:
        what = {NAME: "sums", EXCHANGE: "attention", MEETING: "attention of few rows"}[self.name]
        if array.endswith(ADDRESSES):
            return f"the addresses of the inboxes of {self.gpus} GPUs, for {what} in one launch"
        if array.endswith(COUNTS):
            return f"call counters of {self.tokens} tokens, for {what} in one launch"
        return (
            f"2 x {self.gpus} GPUs' parts of {self.tokens} tokens x {self.features} "
            f"{jnp.dtype(shape.dtype).name}, for {what} over GPUs in one launch"
        )


def symmetric_buffer(arrays: Arrays, name: str = NAME) -> SymmetricBuffer:
    """Returns the mailbox in these arrays."""
    return SymmetricBuffer(
        *(arrays[f"{BEGINNINGS[name]}_{each}"] for each in (INBOX, COUNTS, ADDRESSES))
    )


def buffer_arrays(mailbox: SymmetricBuffer, name: str = NAME) -> Arrays:
    """Inverts `symmetric_buffer`."""
    found = {INBOX: mailbox.inbox, COUNTS: mailbox.counts, ADDRESSES: mailbox.addresses}
    return {f"{BEGINNINGS[name]}_{each}": array for each, array in found.items()}


def has_buffer(arrays: Arrays, name: str) -> bool:
    """Returns whether these arrays contain the mailbox."""
    return f"{BEGINNINGS[name]}_{INBOX}" in arrays
