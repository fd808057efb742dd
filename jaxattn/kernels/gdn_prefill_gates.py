"""The gates of a chunk's value heads in shared memory: running sums of the log decays.

A warp has a value head, and each thread two neighbouring tokens: the sum is six shuffles, for all
of a warpgroup's heads at once.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxattn.kernels.gdn_prefill_tiles import CHUNK
from jaxattn.kernels.registers import Thread, asm, f32, i32, plus, times, word

DECAYS, BETAS = 0, 1  # rows of a head's gates in shared memory, float32 [2, 64]


def sum_decays(gates: Any, *, interpret: bool) -> None:
    """Replaces the decays in `gates`, shared memory [at most 4, 2, 64], by their running sums."""
    if interpret:
        gates[:, DECAYS, :] = jnp.cumsum(gates[:, DECAYS, :], axis=1)
    else:
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(_sum)(gates)


def _sum(ctx: Any, gates: Any) -> None:
    del ctx
    heads, thread = ir.MemRefType(gates.type).shape[0], Thread()
    lane = arith.remui(utils.thread_idx(), word(32))
    index = plus(times(thread.warp, 2 * CHUNK), times(lane, 2))
    place = utils.getelementptr(utils.memref_ptr(gates), [index], f32())
    place = llvm.ptrtoint(i32(), place)
    # Without a branch: behind one, ptxas takes nothing for uniform any more.
    code = (
        f"{{ .reg .pred p; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; "
        f"setp.lt.u32 p, $3, {heads}; @p ld.shared.v2.f32 {{$0, $1}}, [$2]; }}"
    )
    pair = asm(code, [f32()] * 2, [place, thread.warp], "=&f,=&f,r,r")
    sums = _running(*pair)
    code = f"{{ .reg .pred p; setp.lt.u32 p, $3, {heads}; @p st.shared.v2.f32 [$0], {{$1, $2}}; }}"
    asm(code, [], [place, *sums, thread.warp], "r,f,f,r,~{memory}")


def _running(first: Any, second: Any) -> tuple[Any, Any]:
    """Sums up to each of a thread's two numbers, of those of all lanes before and of its own."""

    def plus_that_before(x: Any, y: Any, lanes: int) -> Any:
        """x + y of so many lanes before, if there are."""
        code = (
            f"{{ .reg .f32 y; .reg .pred p; shfl.sync.up.b32 y|p, $2, {lanes}, 0, 0xffffffff; "
            "mov.f32 $0, $1; @p add.f32 $0, $0, y; }"
        )
        return asm(code, [f32()], [x, y], "=&f,f,f")[0]

    total = arith.addf(first, second)
    for lanes in (1, 2, 4, 8, 16):
        total = plus_that_before(total, total, lanes)
    return plus_that_before(first, total, 1), total
