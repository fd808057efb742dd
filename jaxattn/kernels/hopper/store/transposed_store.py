"""A transposed store: the columns of a wgmma product become rows in shared memory."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.store.unoptimized_store import store


def store_transposed(target: Any, product: jax.Array, *, interpret: bool) -> None:
    """Stores a product [M, N] to shared memory [N, M]."""
    if interpret:
        target[...] = product.T
    else:
        product = plgpu.layout_cast(product, plgpu.Layout.WGMMA_TRANSPOSED)
        store(target.transpose((1, 0)), product, interpret=False)
