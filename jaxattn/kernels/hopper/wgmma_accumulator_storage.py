"""A wgmma product [64, N] in the order in which threads hold it.

In each 8 columns a thread has four numbers: two neighbors of a row, and two of the row 8 below.
`by_thread` is [N / 8 * 512]: for each 8 columns the four of thread 0, of thread 1, and so on. Loads
and stores of shared memory, also of another CTA's, are then 16 contiguous bytes per thread.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import llvm, mgpu
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm,
    element,
    f32,
    fragmented,
    i32,
    joined,
    pairs,
    plus,
    pointer,
    single,
    times,
    word,
)

ROWS, GROUP = 64, 8
NUMBERS = ROWS * GROUP  # of 8 columns
PRODUCT = plgpu.Layout.WGMMA
# Loads 16 bytes of the shared memory of the cluster's CTA $5. `plgpu.load` of a `cluster_ref` loads
# each number separately, by a generic load.
LOAD = (
    "{{ .reg .b32 there; mapa.shared::cluster.u32 there, $4, $5; "
    "ld.shared::cluster.v4.f32 {{$0, $1, $2, $3}}, [there + {}]; }}"
)


def threads(columns: int) -> Any:
    """Returns the layout of `columns` columns in threads' order."""
    return plgpu.Layout.WG_STRIDED((columns // GROUP * NUMBERS,), vec_size=4)


def by_thread(product: jax.Array, *, interpret: bool) -> jax.Array:
    """Returns a float32 product in threads' order."""
    columns = product.shape[1]
    size = columns // GROUP * NUMBERS
    if interpret:  # which accepts any order
        return product.reshape(ROWS, -1, GROUP).transpose(1, 0, 2).reshape(size)

    def moved(_: Any, x: Any) -> Any:
        numbers = [element(each, i) for each in x.registers.flat for i in range(2)]
        registers = [joined(numbers[i : i + 4]) for i in range(0, len(numbers), 4)]
        return fragmented(registers, (size,), mgpu.WGStridedFragLayout((size,), vec_size=4))

    out = plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=threads(columns))
    return plgpu.inline_mgpu(arg_types=(PRODUCT,), return_type=out)(moved)(product)


def product_of(numbers: jax.Array, *, interpret: bool) -> jax.Array:
    """Returns the product [64, N] of numbers in threads' order."""
    columns = numbers.shape[0] // NUMBERS * GROUP
    if interpret:
        return numbers.reshape(-1, ROWS, GROUP).transpose(1, 0, 2).reshape(ROWS, columns)

    def moved(_: Any, x: Any) -> Any:
        values = [element(each, i) for each in x.registers.flat for i in range(4)]
        return fragmented(pairs(values), (ROWS, columns), mgpu.WGMMA_LAYOUT)

    out = plgpu.ShapeDtypeStruct((ROWS, columns), jnp.float32, layout=PRODUCT)
    return plgpu.inline_mgpu(arg_types=(threads(columns),), return_type=out)(moved)(numbers)


def load_of_block(ref: Any, first: Any, columns: int, block: int) -> jax.Array:
    """Loads numbers in threads' order, from `first` on, from another CTA's shared memory.

    Args:
        ref: The same place in this CTA's shared memory, float32.
        block: The CTA's rank in the cluster.
    """
    split = plgpu.Layout.WG_SPLAT
    size = columns // GROUP * NUMBERS

    def run(_: Any, ref: Any, first: Any) -> Any:
        begin = llvm.ptrtoint(i32(), pointer(ref, word(0)))
        place = plus(begin, times(single(first), 4), times(WarpgroupThread().index, 16))
        registers = []
        for step in range(0, size * 4, NUMBERS * 4):
            given = [place, word(block)]
            four = asm(LOAD.format(step), [f32()] * 4, given, "=f,=f,=f,=f,r,r,~{memory}")
            registers.append(joined(four))
        return fragmented(registers, (size,), mgpu.WGStridedFragLayout((size,), vec_size=4))

    out = plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=threads(columns))
    run_ = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), split), return_type=out)(run)
    return run_(ref, first)
