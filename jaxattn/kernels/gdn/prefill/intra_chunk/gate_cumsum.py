"""The gates of a chunk's value heads, from global memory to running sums of the log decays.

Gates are stored token by token, and needed head by head. A row of a TMA copy has at least 16 bytes,
that is four heads. A warp takes one value head of a copy, and each thread two neighboring tokens:
the sum takes six shuffles, for all of a warpgroup's heads at once.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.chunk.tiles import CHUNK
from jaxattn.kernels.hopper.mlir import arith, ir, llvm, utils
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm,
    f32,
    i32,
    number,
    plus,
    pointer,
    single,
    times,
    word,
)

DECAYS, BETAS = 0, 1  # rows of a head's gates in shared memory, float32 [2, 64]
COPIED_HEADS = 4
LOG2E = math.log2(math.e)
# exp2 of this is 0 in float32, and sums of 64 of them keep a small decay added to them to 1e-3.
LOWEST_LOG2_DECAY = -150.0


def copyable(gates: jax.Array) -> jax.Array:
    """Returns gates [T, Hv] padded to a number of heads that TMA can copy."""
    return jnp.pad(gates, ((0, 0), (0, -gates.shape[1] % COPIED_HEADS)))


def copy_gates(g: Any, beta: Any, start: Any, head: Any, copied: Any, barrier: Any) -> None:
    """Starts two copies, of 64 tokens' log decays and betas, from float32 [T, Hv] to `copied`,
    shared memory [2, 64, 4]. The copied heads include `head`."""
    first = lax.div(head, jnp.int32(COPIED_HEADS)) * COPIED_HEADS
    for row, ref in ((DECAYS, g), (BETAS, beta)):
        source = ref.at[pl.ds(start, CHUNK), pl.ds(first, COPIED_HEADS)]
        plgpu.copy_gmem_to_smem(source, copied.at[row], barrier)


def sum_gates(copied: Any, head: Any, length: Any, gates: Any, *, interpret: bool) -> None:
    """Computes running sums of the log2 decays, and betas, of the value heads from `head` on.

    Args:
        copied: Filled by `copy_gates`.
        length: Tokens of the chunk; both gates are 0 for the others.
        gates: Shared memory [1, 2 or 4 heads, 2, 64].
    """
    place = lax.rem(head, jnp.int32(COPIED_HEADS))
    if interpret:
        inside = jnp.arange(CHUNK)[:, None] < length
        heads = pl.ds(place, gates.shape[0])
        decays, betas = (jnp.where(inside, copied[row, :, heads], 0.0) for row in (DECAYS, BETAS))
        decays = jnp.maximum(decays * LOG2E, LOWEST_LOG2_DECAY)
        gates[:, DECAYS, :] = jnp.cumsum(decays, axis=0).T
        gates[:, BETAS, :] = betas.T
        return
    plain, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT
    types = (plain, plain, scalar, scalar)
    plgpu.inline_mgpu(arg_types=types)(_sum)(copied, gates, place, length)


def _sum(ctx: Any, copied: Any, gates: Any, head: Any, length: Any) -> None:
    del ctx
    heads, warp = ir.MemRefType(gates.type).shape[0], WarpgroupThread().warp
    head, length = single(head), single(length)
    token = times(arith.andi(utils.thread_idx(), word(31)), 2)  # and the next one
    pitch = 4 * COPIED_HEADS
    first = plus(times(token, pitch), times(plus(head, warp), 4))
    first = llvm.ptrtoint(i32(), pointer(copied, first))
    # Without a branch: after one, ptxas takes nothing for uniform any more.
    is_head = f"{{ .reg .pred p; setp.lt.u32 p, $%d, {heads}; "
    places = [pitch * (CHUNK * row + i) for row in range(2) for i in range(2)]
    code = is_head % 5 + "".join(f"mov.f32 ${i}, 0f00000000; " for i in range(4))
    code += "".join(f"@p ld.shared.f32 ${i}, [$4+{at}]; " for i, at in enumerate(places)) + "}"
    loaded = asm(code, [f32()] * 4, [first, warp], "=&f,=&f,=&f,=&f,r,r,~{memory}")
    for i, x in enumerate(loaded):
        inside = arith.cmpi(arith.CmpIPredicate.slt, plus(token, word(i % 2)), length)
        loaded[i] = arith.select(inside, x, number(0.0))
    *decays, beta, next_beta = loaded
    decays = [arith.mulf(x, number(LOG2E)) for x in decays]
    decays = [arith.maximumf(x, number(LOWEST_LOG2_DECAY)) for x in decays]
    place = plus(times(warp, 2 * 4 * CHUNK), times(token, 4))
    place = llvm.ptrtoint(i32(), pointer(gates, place))
    code = is_head % 5 + "@p st.shared.v2.f32 [$0], {$1, $2}; "
    code += f"@p st.shared.v2.f32 [$0+{4 * CHUNK}], {{$3, $4}}; }}"
    values = [*_running(*decays), beta, next_beta]
    asm(code, [], [place, *values, warp], "r,f,f,f,f,r,~{memory}")


def _running(first: Any, second: Any) -> tuple[Any, Any]:
    """Returns the sums up to each of a thread's two numbers, over all earlier lanes and its own."""

    def plus_that_before(x: Any, y: Any, lanes: int) -> Any:
        """Returns x + the y of `lanes` lanes before, if there is such a lane."""
        code = (
            f"{{ .reg .f32 y; .reg .pred p; shfl.sync.up.b32 y|p, $2, {lanes}, 0, 0xffffffff; "
            "mov.f32 $0, $1; @p add.f32 $0, $0, y; }"
        )
        return asm(code, [f32()], [x, y], "=&f,f,f")[0]

    total = arith.addf(first, second)
    for lanes in (1, 2, 4, 8, 16):
        total = plus_that_before(total, total, lanes)
    return plus_that_before(first, total, 1), total
