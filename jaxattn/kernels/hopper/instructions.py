"""Instructions that Pallas has no operation for, and their stand-ins in the interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxattn.kernels.hopper.mlir import utils
from jaxattn.kernels.hopper.ptx import asm


def swizzled(dtype: DTypeLike, width: int = 128) -> Any:
    """Returns the shared-memory layout that TMA and wgmma share: tiles of 8 rows of `width`
    bytes."""
    tiling = plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return (tiling, plgpu.SwizzleTransform(width))  # type: ignore[abstract]


def warpgroup_barrier(*, interpret: bool) -> None:
    """Synchronizes a warpgroup's warps; each then sees what the others stored in shared memory.

    `plgpu.commit_smem` also makes these stores visible to TMA and wgmma, by a fence that also waits
    for all of a thread's loads and stores of global memory.
    """
    if interpret:  # which has no other way
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def barrier(_: Any) -> None:
        utils.warpgroup_barrier()

    barrier()


def fence_proxy_async(*, interpret: bool) -> None:
    """Makes a thread's stores to shared memory visible to the async proxy (TMA and wgmma) of
    whoever waits for the barrier at which the thread, with all of its warpgroup, arrives next.

    `plgpu.commit_smem` also synchronizes the warpgroup's warps.
    """
    if interpret:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        asm("fence.proxy.async.shared::cta;", [], [], "~{memory}")

    fence()


def issue_loads(*, interpret: bool) -> None:
    """Ensures that the loads above this line are in flight before anything below it waits for one.

    ptxas moves a load down to its use, past waits for other loads, but not past a loop. This loop
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
    """Returns x, computed before anything after this line waits for other threads.

    Left to itself, ptxas computes a number where it is used, and thus after a wait that could have
    hidden the work. It does not move the shuffle here, which moves nothing.
    """
    if interpret:
        return x

    def pinned(_: Any, x: Any) -> Any:
        return x._pointwise(lambda register: utils.shfl_bfly(register, 0))

    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=out)(pinned)(x)


def wgmma(accumulator: jax.Array | None, a: Any, b: Any, *, shape: Any, interpret: bool) -> Any:
    """Returns `accumulator + a @ b` in float32 from the tensor cores, after waiting for the result.

    Args:
        accumulator: A value in the WGMMA layout, or `None` for zero.
        a: Shared memory [M, K].
        b: Shared memory [K, N].
        shape: (M, N).
        interpret: Whether the interpreter runs it. That of JAX 0.11.2 supports neither `wgmma`
            under `pl.run_state` nor a store to an accumulator: the product goes to an accumulator
            of its own and is added.
    """

    def product(ref: Any) -> Any:
        plgpu.wgmma(ref, a, b)
        return ref[...]

    if accumulator is None:
        return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
    if interpret:
        return accumulator + pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(accumulator))
