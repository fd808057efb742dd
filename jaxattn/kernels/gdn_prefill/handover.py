"""Chunks that some blocks make while others of the same launch already take them.

A maker's warpgroups each count, when their part of a chunk is in memory; a taker waits for the
count. Makers are the first blocks, which a GPU starts first, and wait for nobody: however many
blocks it has room for, all of them end.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, ir, scf, utils
from jaxattn.kernels.hopper.registers import Thread, asm, i32, pointer, single, times, word


def none_yet(table: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """uint32 zeros in memory of their own: kernels count in it.

    XLA does not know that no chunk of a plan begins below 0. A constant might share its memory
    with another.
    """
    return jnp.broadcast_to(table[0, 0] < 0, shape).astype(jnp.uint32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handover:
    """
    Attributes:
        counts: uint32 [N * heads] of global memory, 0 when the launch starts.
        heads: of a chunk.
        parts: that are counted of each.
        interpret: by JAX's interpreter, which runs one block after another.
    """

    counts: Any
    heads: int
    parts: int
    interpret: bool

    def done(self, chunk: jax.Array, head: jax.Array) -> None:
        """A warpgroup's copies of its part have ended, and its threads have met since."""
        self._run(_count, chunk * self.heads + head)

    def wait(self, chunk: jax.Array, head: jax.Array) -> None:
        """Until a chunk is there; copies that the warpgroup starts then see it."""
        self._run(_wait, chunk * self.heads + head, jnp.int32(self.parts))

    def _run(self, function: Any, *scalars: jax.Array) -> None:
        if self.interpret:
            return
        types = (plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * len(scalars))
        plgpu.inline_mgpu(arg_types=types)(function)(self.counts, *scalars)


def _is_first() -> Any:
    return arith.cmpi(arith.CmpIPredicate.eq, Thread().index, word(0))


def _count(ctx: Any, counts: Any, at: Any) -> None:
    del ctx
    with utils.when(_is_first()):
        # What copies of the async proxy have written comes before the count.
        asm("fence.proxy.async;", [], [], "~{memory}")
        place = pointer(counts, times(single(at), 4))
        asm("red.release.gpu.global.add.u32 [$0], 1;", [], [place], "l,~{memory}")


def _wait(ctx: Any, counts: Any, at: Any, parts: Any) -> None:
    del ctx
    with utils.when(_is_first()):
        place = pointer(counts, times(single(at), 4))
        loop = scf.WhileOp([], [])
        with ir.InsertionPoint(loop.before.blocks.append()):
            acquire = "ld.acquire.gpu.global.u32 $0, [$1];"
            (come,) = asm(acquire, [i32()], [place], "=r,l,~{memory}")
            scf.condition(arith.cmpi(arith.CmpIPredicate.ult, come, single(parts)), [])
        with ir.InsertionPoint(loop.after.blocks.append()):
            scf.yield_([])
    utils.warpgroup_barrier()
    # And before what copies of the async proxy read.
    asm("fence.proxy.async;", [], [], "~{memory}")
