"""Token ids divided over GPUs: each has the logits of some, and none sees those of all.

What a sampler needs of the whole vocabulary are sums and maxima. Each is a number per row from each
GPU, so a step sends a few kilobytes where the logits would be megabytes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxattn.parallel.layout import Parallel


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Which ids a GPU has.

    Attributes:
        columns: ids of each GPU, V; those behind the last token are padding.
        axes: the mesh axes that the ids are divided over; none: one GPU has all.
        parts: how many GPUs those are.
    """

    columns: int
    axes: tuple[str, ...] = ()
    parts: int = 1

    @classmethod
    def of(cls, columns: int, parallel: Parallel) -> "Vocabulary":
        return cls(columns, parallel.axes("tensor"), parallel.size("tensor"))

    @property
    def first(self) -> Int[Array, ""] | int:
        """The id of this GPU's first logit."""
        return lax.axis_index(self.axes) * self.columns if self.axes else 0

    @property
    def ids(self) -> Int[Array, "V"]:
        return self.first + jnp.arange(self.columns)

    def best(self, logits: Float[Array, "B V"]) -> tuple[Int[Array, "B"], Float[Array, "B 1"]]:
        """The most likely id of each row, the lowest of equal ones, and its logit.

        A row with a NaN gives NaN.
        """
        best = jnp.argmax(logits, axis=-1)
        most = jnp.take_along_axis(logits, best[:, None], axis=-1)
        if not self.axes:
            return best, most
        # Float32 holds an id exactly up to 2**24, and one gather is sent in place of two.
        pair = jnp.concatenate([most, (best + self.first)[:, None].astype(most.dtype)], axis=-1)
        pairs = lax.all_gather(pair, self.axes)
        winner = jnp.argmax(pairs[..., 0], axis=0)
        found = jnp.take_along_axis(pairs, winner[None, :, None], axis=0)[0]
        return found[:, 1].astype(best.dtype), found[:, :1]

    def sum(self, x: Array) -> Array:
        """The sum of each row over all ids, [B, 1] of [B, V]."""
        return self.across(x.sum(1, keepdims=True))

    def across(self, sums: Array) -> Array:
        """The sums of all GPUs' sums."""
        return lax.psum(sums, self.axes) if self.axes else sums

    def max(self, x: Array) -> Array:
        """The largest of each row over all ids, [B, 1] of [B, V]."""
        largest = x.max(1, keepdims=True)
        return lax.pmax(largest, self.axes) if self.axes else largest

    def before(self, marked: Bool[Array, "B V"]) -> Int[Array, "B V"]:
        """How many marked ids are lower than each."""
        before = jnp.cumsum(marked, axis=1, dtype=jnp.int32) - marked
        if not self.axes:
            return before
        counts = lax.all_gather(marked.sum(1, dtype=jnp.int32), self.axes)
        earlier = jnp.arange(self.parts) < lax.axis_index(self.axes)
        return before + jnp.where(earlier[:, None], counts, 0).sum(0)[:, None]

    def noise(self, key: Array) -> Float[Array, "V"]:
        """Gumbel noise of this GPU's ids: a function of the key and the id, however they lie."""
        noise = jax.random.gumbel(key, (self.parts * self.columns,), jnp.float32)
        if not self.axes:
            return noise
        return lax.dynamic_slice_in_dim(noise, self.first, self.columns)
