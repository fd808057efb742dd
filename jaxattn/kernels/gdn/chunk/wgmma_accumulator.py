"""Tensor-core accumulators, to which products are added asynchronously."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.chunk.tiles import CHUNK


class WgmmaAccumulator:
    """A float32 [64, 64], or with fewer columns, to which products are added.

    The interpreter of JAX 0.11.2 supports neither register operands nor stores to an accumulator:
    there this is a plain value.
    """

    def __init__(self, ref: Any, value: jax.Array | None = None):
        self.ref, self.value = ref, value
        if ref is not None and value is not None:
            ref[...] = value

    def add(self, a: Any, b: Any) -> None:
        """Issues += a b, with a in registers or shared memory, and b in shared memory."""
        if self.ref is not None:
            plgpu.wgmma(self.ref, a, b)
            return
        product = jnp.dot(*(x[...].astype(jnp.float32) for x in (a, b)))
        self.value = product if self.value is None else self.value + product

    def add_transposed(self, a: jax.Array, triangle: Any) -> None:
        """Issues += a b^T, with b in `triangles`."""
        for half in range(2):
            columns = lax.slice(a, (0, 32 * half), (CHUNK, 32 * half + 32))
            self.add(columns, triangle.at[half].transpose((1, 0)))

    def read(self, pending: int = 0) -> jax.Array:
        """Returns the value, when at most `pending` products issued later are unfinished."""
        if self.ref is None:
            assert self.value is not None
            return self.value
        return plgpu.wgmma_accumulator_load(self.ref, wait_n=pending)


def with_accumulators(body: Any, count: int, *, columns: int = CHUNK, interpret: bool) -> Any:
    """Calls `body` with the refs of `count` accumulators, which start at zero."""
    if interpret:
        return body(*([None] * count))
    return pl.run_scoped(body, *([plgpu.ACC((CHUNK, columns), jnp.float32)] * count))
