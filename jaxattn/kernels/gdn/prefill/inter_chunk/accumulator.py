"""Accumulators of the tensor cores, for products whose left operand is in registers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.prefill.tiles import CHUNK


class WgmmaAccumulator:
    """A float32 [64, 64] that products are added to, asynchronously on the GPU.

    The interpreter of JAX 0.11.2 knows neither operands in registers nor stores to an accumulator:
    there this is a plain value.
    """

    def __init__(self, ref: Any, value: jax.Array | None = None):
        self.ref, self.value = ref, value
        if ref is None:
            self.value = jnp.zeros((CHUNK, CHUNK), jnp.float32) if value is None else value
        elif value is not None:
            ref[...] = value

    def add(self, a: jax.Array, b: Any) -> None:
        if self.ref is None:
            product = jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32))
            self.value = self.read() + product
        else:
            plgpu.wgmma(self.ref, a, b)

    def add_transposed(self, a: jax.Array, triangle: Any) -> None:
        """+= a b^T, with b in `triangles`."""
        for half in range(2):
            columns = lax.slice(a, (0, 32 * half), (CHUNK, 32 * half + 32))
            self.add(columns, triangle.at[half].transpose((1, 0)))

    def read(self, pending: int = 0) -> jax.Array:
        """The value, once at most `pending` products issued later are unfinished."""
        if self.ref is None:
            assert self.value is not None
            return self.value
        return plgpu.wgmma_accumulator_load(self.ref, wait_n=pending)


def with_accumulators(body: Any, count: int, *, interpret: bool) -> Any:
    """`body` with the refs of `count` accumulators, which start at zero."""
    if interpret:
        return body(*([None] * count))
    return pl.run_scoped(body, *([plgpu.ACC((CHUNK, CHUNK), jnp.float32)] * count))
