"""Instructions that Pallas has no operation for, and what the interpreter runs instead."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxattn.kernels.hopper.mlir import utils
from jaxattn.kernels.hopper.ptx import asm


def swizzled(dtype: DTypeLike, width: int = 128) -> Any:
    """The shared-memory layout that TMA and wgmma agree on: tiles of 8 rows of `width` bytes."""
    tiling = plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return (tiling, plgpu.SwizzleTransform(width))  # type: ignore[abstract]


def warpgroup_barrier(*, interpret: bool) -> None:
    """A warpgroup's warps wait for each other, and see what the others stored in shared memory.

    `plgpu.commit_smem` also makes that visible to TMA and wgmma, by a fence that waits for all of
    a thread's loads and stores of global memory as well.
    """
    if interpret:  # which knows no other way
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def barrier(_: Any) -> None:
        utils.warpgroup_barrier()

    barrier()


def fence_proxy_async(*, interpret: bool) -> None:
    """What a thread stored in shared memory is seen by TMA and wgmma of whoever waits for the
    barrier that the thread, as all of its warpgroup, arrives at next.

    `plgpu.commit_smem` has the warpgroup's warps wait for each other as well.
    """
    if interpret:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        asm("fence.proxy.async.shared::cta;", [], [], "~{memory}")

    fence()


def issue_loads(*, interpret: bool) -> None:
    """Loads of memory above this line are under way before anything below it waits for one.

    ptxas moves a load down to its use, behind what waits for others, but not past a loop. This one
    ends at once: it waits for the clock not to be 0.
    """
    if interpret:
        return

    @plgpu.inline_mgpu()
    def barrier(_: Any) -> None:
        asm(
            "{ .reg .pred at; .reg .b32 now; again: mov.u32 now, %clock; setp.eq.u32 at, now, 0; "
            "@at bra again; }", [], [], "~{memory}", convergent=True,
        )  # fmt: skip

    barrier()


def pin_value(x: jax.Array, layout: Any, *, interpret: bool) -> jax.Array:
    """x, made before whatever waits for other threads behind this line.

    Left to itself, ptxas makes a number where it is needed, and thus behind a wait in which there
    would have been the time for it. It does not move the shuffle here, which moves nothing.
    """
    if interpret:
        return x

    def pinned(_: Any, x: Any) -> Any:
        return x._pointwise(lambda register: utils.shfl_bfly(register, 0))

    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=out)(pinned)(x)


def wgmma(accumulator: jax.Array | None, a: Any, b: Any, *, shape: Any, interpret: bool) -> Any:
    """`accumulator + a @ b` in float32 on the tensor cores, finished on return.

    Args:
        accumulator: a value in the WGMMA layout, or `None` for zero.
        a: shared memory [M, K].
        b: shared memory [K, N].
        shape: (M, N).
        interpret: JAX 0.11.2's interpreter knows neither `wgmma` under `pl.run_state` nor a store
            to an accumulator: there the product goes to an accumulator of its own and is added.
    """

    def product(ref: Any) -> Any:
        plgpu.wgmma(ref, a, b)
        return ref[...]

    if accumulator is None:
        return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
    if interpret:
        return accumulator + pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(accumulator))
