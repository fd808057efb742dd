"""Numbers that the warps of a cluster's CTAs send each other, without a cluster barrier.

A store to another CTA's shared memory (`st.async`) also counts its bytes on a barrier there. A
thread that has waited for all bytes knows that every warp which sent some had reached its store:
data that those warps had read before may be overwritten. The cluster's own barrier would wait for
their stores too.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, gpu, ir, llvm, mgpu, utils
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm,
    element,
    f32,
    i32,
    load,
    number,
    plus,
    pointer,
    single,
    times,
    tree,
    word,
)

WARPS = 4
WAIT = (
    "{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, "
    "[$0], 0; @!done bra again; }"
)
SEND = (
    "{ .reg .pred some; .reg .b32 there, counter; setp.lt.u32 some, $0, $1; "
    "@some mapa.shared::cluster.u32 there, $2, $5; @some mapa.shared::cluster.u32 counter, $3, $5; "
    "@some st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], $4, [counter]; }"
)


def cluster_block_index(blocks: int, *, interpret: bool) -> jax.Array:
    """Returns the CTA's rank in a cluster ("part") of `blocks` CTAs on the grid's fastest axis.

    `lax.axis_index` would also read the cluster's size, and divide by it.
    """
    if interpret:
        return lax.axis_index("part")
    out = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(return_type=out)
    def place(_: Any) -> Any:
        index = arith.index_cast(i32(), gpu.block_id(gpu.Dimension.x))
        return mgpu.FragmentedArray.splat(arith.remui(index, word(blocks)), (), is_signed=True)

    return place()


def cluster_barrier(barrier: Any = None, *, interpret: bool) -> None:
    """Synchronizes the cluster's CTAs; each then sees the others' shared memory.

    The interpreter needs a `ClusterBarrier` for it.
    """
    if interpret:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return

    @plgpu.inline_mgpu()
    def both(_: Any) -> None:
        asm(
            "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
            [],
            [],
            "~{memory}",
            convergent=True,
        )

    both()


class ClusterSquareSum:
    """The sums of squares of the cluster's teams: `size` consecutive CTAs each.

    Each warp of a CTA has a share. The first CTA of the cluster waits until all CTAs have sent
    theirs, any other CTA until its own team has. A launch does this once.

    Args:
        blocks: The CTAs of the cluster, a multiple of `size`.
        layout: The layout of the vectors that are squared. Lanes 0, 8, 16 and 24 of a warp have
            different elements, and the others repeat them.
    """

    def __init__(self, blocks: int, size: int, layout: Any, *, interpret: bool) -> None:
        self.blocks, self.size, self.layout, self.interpret = blocks, size, layout, interpret

    def scratch_types(self) -> dict[str, Any]:
        if self.interpret:  # which has no distributed shared memory
            return {"squares_sent": plgpu.ClusterBarrier(collective_axes=("part",))}
        return {
            "square_sums": plgpu.SMEM((self.blocks * WARPS,), jnp.float32),
            "squares_sent": plgpu.SMEM((2,), jnp.int32),  # the barrier
        }

    def open(self, sums: Any, sent: Any, part: jax.Array) -> None:
        """Initializes the barrier; comes before `ready`. `part` is the CTA's rank in the cluster.
        The interpreter's `sums` are a place in global memory for the cluster's numbers."""
        self.part, self.sums, self.sent = part, sums, sent
        if self.interpret:
            return
        split = plgpu.Layout.WG_SPLAT
        shares = jnp.where(part == 0, self.blocks, self.size)
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(), split))(self._open)(self.sent, shares)

    def _open(self, ctx: Any, sent: Any, shares: Any) -> None:
        del ctx
        place = llvm.ptrtoint(i32(), pointer(sent, word(0)))
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, WarpgroupThread().index, word(0))):
            asm(
                "mbarrier.init.shared::cta.b64 [$0], 1; fence.mbarrier_init.release.cluster; "
                "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], $1;",
                [],
                [place, times(single(shares), 4 * WARPS)],
                "r,r,~{memory}",
            )
        asm("barrier.cluster.arrive.relaxed.aligned;", [], [], "~{memory}", convergent=True)

    def ready(self) -> None:
        """Waits until every CTA of the cluster has called `open`."""
        if self.interpret:
            return

        @plgpu.inline_mgpu()
        def wait(_: Any) -> None:
            asm("barrier.cluster.wait.acquire.aligned;", [], [], "~{memory}", convergent=True)

        wait()

    def send(self, x: jax.Array) -> None:
        """Sends the square sum of the CTA's part of its team's vector. Comes after `ready`."""
        if self.interpret:
            self.sums[self.part] = jnp.sum(x * x)
            plgpu.barrier_arrive(self.sent)
            return
        types = (plgpu.RefType(), plgpu.RefType(), self.layout, plgpu.Layout.WG_SPLAT)
        plgpu.inline_mgpu(arg_types=types)(self._send)(self.sums, self.sent, x, self.part)

    def _send(self, ctx: Any, sums: Any, sent: Any, x: Any, part: Any) -> None:
        del ctx
        part, thread = single(part), WarpgroupThread()
        total = number(0.0)
        for register in x.registers.flat:
            of_one = isinstance(register.type, ir.VectorType)
            for i in range(ir.VectorType(register.type).shape[0] if of_one else 1):
                each = element(register, i) if of_one else register
                total = arith.addf(total, arith.mulf(each, each))
        for distance in (8, 16):
            total = arith.addf(total, utils.shfl_bfly(total, distance))
        lane = arith.andi(utils.thread_idx(), word(31))
        first = arith.subi(part, arith.remui(part, word(self.size)))
        # One lane for each CTA of the team, and one for the first CTA of the cluster.
        is_first = arith.cmpi(arith.CmpIPredicate.eq, lane, word(self.size))
        to = arith.select(is_first, word(0), plus(first, lane))
        of_first = arith.cmpi(arith.CmpIPredicate.eq, first, word(0))
        lanes = arith.select(of_first, word(self.size), word(self.size + 1))
        at = plus(times(part, 4 * WARPS), times(thread.warp, 4))
        there = llvm.ptrtoint(i32(), pointer(sums, at))
        counter = llvm.ptrtoint(i32(), pointer(sent, word(0)))
        asm(SEND, [], [lane, lanes, there, counter, total, to], "r,r,r,r,f,r,~{memory}")

    def receive(self) -> jax.Array:
        """Returns the sum over the team's whole vector."""
        first = self.part - lax.rem(self.part, jnp.int32(self.size))
        if self.interpret:
            plgpu.barrier_wait(self.sent)
            return sum((self.sums[first + i] for i in range(self.size)), jnp.float32(0))
        plain, split = plgpu.RefType(), plgpu.Layout.WG_SPLAT
        number = plgpu.ShapeDtypeStruct((), jnp.float32, layout=split)
        receive = plgpu.inline_mgpu(arg_types=(plain, plain, split), return_type=number)
        return receive(self._receive)(self.sums, self.sent, first)

    def _receive(self, ctx: Any, sums: Any, sent: Any, first: Any) -> Any:
        del ctx
        asm(WAIT, [], [llvm.ptrtoint(i32(), pointer(sent, word(0)))], "r,~{memory}")
        offset = times(single(first), 4 * WARPS)
        shares = []
        for block in range(self.size):
            shares += load(sums, offset, 4 * WARPS * block, WARPS, f32())
        return mgpu.FragmentedArray.splat(tree(arith.addf, shares), ())
