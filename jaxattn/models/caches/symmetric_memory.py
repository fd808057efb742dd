"""Buffers in peer memory, as a cache that no row has: for sums and exchanges over GPUs.

See `jaxattn.ops.collectives.all_reduce_norm`. The other GPUs write into it, so it is state of the
step, at one address as long as the engine lives.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer, with_addresses
from jaxattn.models.caches.layer_cache import Arrays, CacheSize, LayerCache

# For sums; for attention over pages of several GPUs, and for its outputs that meet in one launch.
NAME, EXCHANGE, MEETING = "mailbox", "exchange", "meeting"
INBOX, COUNTS, ADDRESSES = "inbox", "counts", "addresses"
# Of an array's name, which is unique within a model.
BEGINNINGS = {NAME: "peer", EXCHANGE: "exchange", MEETING: "meeting"}
# The most that a GPU sends in one launch. On four H200s 1.5 MiB take 14.5 us. There XLA's
# all-reduce takes 12.3, and beside it a conversion, a norm and the end of a CUDA graph. 3 MiB take
# 27 us, and its 16.
MOST_BYTES, MOST_TOKENS = 2**21, 256


def most_tokens(features: int, gpus: int) -> int:
    """The most tokens of a step whose sums are one launch, unless another number is given."""
    sent = max(gpus - 1, 1) * features * jnp.bfloat16.dtype.itemsize  # of a token
    return min(MOST_BYTES // sent, MOST_TOKENS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SymmetricMemoryCache(LayerCache):
    """The `SymmetricBuffer` of each GPU: `peer_inbox` [2, N, T, F], `peer_counts` [1, T, 1] and
    `peer_addresses` [N + 1, 2]; those of an exchange begin with `exchange_`, and those of outputs
    that meet with `meeting_`.

    Attributes:
        gpus: N.
        tokens: T, the most of a step.
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
        """With the addresses of the inboxes, which other GPUs write to."""
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
    """The mailbox in those arrays."""
    return SymmetricBuffer(
        *(arrays[f"{BEGINNINGS[name]}_{each}"] for each in (INBOX, COUNTS, ADDRESSES))
    )


def buffer_arrays(mailbox: SymmetricBuffer, name: str = NAME) -> Arrays:
    """The inverse of `symmetric_buffer`."""
    found = {INBOX: mailbox.inbox, COUNTS: mailbox.counts, ADDRESSES: mailbox.addresses}
    return {f"{BEGINNINGS[name]}_{each}": array for each, array in found.items()}


def has_buffer(arrays: Arrays, name: str) -> bool:
    """Whether a mailbox is in those arrays."""
    return f"{BEGINNINGS[name]}_{INBOX}" in arrays
