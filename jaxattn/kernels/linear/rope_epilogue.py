"""The RoPE epilogue: the rotated dims of queries, which `linear_layer` stores after a head's
product.

    x of a head    [K | 64]        out of a head    [N | 64]

A warpgroup has 128 threads, and there are 64 dims. So it also takes the 64 numbers before them:
those of x are ignored, and those of the output are stored a second time with the same values.
Numbers of other dims reach a thread through shared memory.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.instructions import warpgroup_barrier

DIMS = 64
WINDOW = 128
NUMBERS = 5 * WINDOW  # of shared memory
CHANNEL = plgpu.Layout.WG_STRIDED((WINDOW,), vec_size=1)


@dataclasses.dataclass(frozen=True)
class RopeEpilogueParams:
    """The rotation of the last 64 dims of each head.

    Attributes:
        angles: float32 [T, 128], those of each token; see `core.rope.Rotation`.
        interleaved: Whether a pair consists of neighbors, or of dims half of them apart.
    """

    angles: Any
    interleaved: bool

    @property
    def constants(self) -> "RopeEpilogueParams":
        """The same without its array: a body that captures no array is one kernel for many
        launches."""
        return dataclasses.replace(self, angles=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeEpilogue:
    """The epilogue of a CTA that has a head's last columns.

    Attributes:
        smem: float32 [NUMBERS].
    """

    x: Any
    angles: Any
    smem: Any
    interleaved: bool
    interpret: bool

    def store(self, out: Any, y: jax.Array, token: Any, after_x: Any, after_out: Any) -> None:
        """Stores a token's rotated dims.

        Args:
            y: The head's last 128 products.
            after_x, after_out: The columns after the head's, in x and in the output.
        """
        smem, shift = self.smem, 1 if self.interleaved else DIMS // 2
        window = pl.ds(pl.multiple_of(after_x - WINDOW, DIMS), WINDOW)
        some = self._load(self.x.at[token, window])
        smem.at[pl.ds(WINDOW, WINDOW)][...] = some
        smem.at[pl.ds(3 * WINDOW + DIMS, WINDOW)][...] = self._load(self.angles.at[token])
        warpgroup_barrier(interpret=self.interpret)
        after, before, cosine, sine = (
            self._load(smem.at[pl.ds(first, WINDOW)])
            for first in (WINDOW + shift, WINDOW - shift, 3 * WINDOW, 3 * WINDOW + DIMS)
        )
        dim = plgpu.broadcasted_iota(jnp.int32, (WINDOW,), 0, layout=CHANNEL)
        of_pair = lax.rem(dim, 2) if self.interleaved else lax.div(dim - DIMS, shift)
        rotated = some * cosine + jnp.where(of_pair == 0, after, before) * sine
        warpgroup_barrier(interpret=self.interpret)
        smem.at[pl.ds(WINDOW + DIMS, WINDOW)][...] = rotated
        warpgroup_barrier(interpret=self.interpret)
        smem.at[pl.ds(WINDOW, WINDOW)][...] = y
        warpgroup_barrier(interpret=self.interpret)
        both = self._load(smem.at[pl.ds(WINDOW + DIMS, WINDOW)])
        to = pl.ds(pl.multiple_of(after_out - WINDOW, DIMS), WINDOW)
        out.at[token, to][...] = both.astype(out.dtype)
        warpgroup_barrier(interpret=self.interpret)  # before the next token's numbers

    def _load(self, ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=CHANNEL, optimized=False).astype(jnp.float32)
