"""Sums over columns that stay in the thread.

A thread of a warpgroup has 16 numbers of a row of 64, and four threads share the row. The sum over
pages wants no number of another thread: so they keep their own, and add them up at the end.
"""

from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith
from jaxattn.kernels.hopper.registers import fragmented, tree

PARTIAL = 8  # sums that are left of a row, two a thread


def partial_sums(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Sums of every eighth column.

    Args:
        x: float32 [64, N] in the layout of products; N is 8 times a power of two.

    Returns:
        float32 [64, 8] in that layout.
    """
    rows, columns = x.shape
    if interpret:
        return x.reshape(rows, columns // PARTIAL, PARTIAL).sum(axis=1)
    tile, shape = plgpu.Layout.WGMMA, (rows, PARTIAL)

    def add(_: Any, x: Any) -> Any:
        # Tiles of 8 columns: of each a thread has the same registers.
        [axis] = [i for i, n in enumerate(x.registers.shape) if n == columns // PARTIAL]
        pieces = [piece.flat for piece in np.split(x.registers, columns // PARTIAL, axis)]
        sums = [tree(arith.addf, list(each)) for each in zip(*pieces, strict=True)]
        return fragmented(sums, shape, x.layout)

    out = plgpu.ShapeDtypeStruct(shape, x.dtype, layout=tile)
    return plgpu.inline_mgpu(arg_types=(tile,), return_type=out)(add)(x)
