"""The gated norm of prefill's outputs as they leave shared memory: rms_norm(o) * silu(z).

A separate warpgroup norms. Those that multiply store a chunk's O to shared memory, 64 of a head's
channels each, and continue. The norming warpgroup takes 16 tokens at a time, with a token's
channels in 8 lanes, and stores y from its registers. A thread copies the z that it needs to shared
memory itself, three times 16 tokens ahead, so that only this thread waits for the copy.

Reference: `jaxattn.core.numerics.rms_norm.gated_rms_norm`; tests:
tests/kernels/gdn/prefill/test_norm_epilogue.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.chunk.tiles import CHUNK, DIM
from jaxattn.kernels.hopper.mlir import arith, ir, llvm, mgpu, utils, vector
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm,
    element,
    f32,
    fragmented,
    i32,
    joined,
    plus,
    pointer,
    single,
    store,
    times,
    word,
)
from jaxattn.kernels.hopper.silu import silu

ROWS = 16  # tokens at a time, 4 for each warp
GROUPS = CHUNK // ROWS
AHEAD = 3  # times ROWS tokens of z in shared memory
# 8 neighboring lanes have 64 channels of a token, 8 each: 16 bytes, in both halves of a head.
WIDTH = 8
LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, 64), (4, 64), (WIDTH,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
HALF_BYTES = 128 * 2 * WIDTH  # of z of ROWS tokens
SPLAT = plgpu.Layout.WG_SPLAT


class NormEpilogueParams(NamedTuple):
    """y = o / rms(o) * weight * silu(z), over a head's 128 channels."""

    gate: jax.Array  # [T, N]; z is its last Hv * 128 columns
    weight: jax.Array  # float32 [128]
    eps: float
    sigmoid: bool = False  # sigmoid(z) instead of silu(z), only by XLA


def fits(norm: NormEpilogueParams, dtype: Any) -> bool:
    """Whether the factor is silu of a z in the output's dtype, with rows of a multiple of 16
    bytes."""
    return not norm.sigmoid and norm.gate.dtype == dtype and norm.gate.shape[1] % WIDTH == 0


def operands(norm: NormEpilogueParams | None, *, interpret: bool) -> dict[str, jax.Array | None]:
    """Returns the kernel's operands; the interpreter also reads past a run's end, where a thread
    does not."""
    if norm is None:
        return {"gate_ref": None, "weight_ref": None}
    gate = jnp.pad(norm.gate, ((0, CHUNK), (0, 0))) if interpret else norm.gate
    return {"gate_ref": gate, "weight_ref": norm.weight}


def scratch(halves: int, dtype: Any) -> list[Any]:
    return [
        plgpu.SMEM((AHEAD, 2, HALF_BYTES // 2), dtype),
        plgpu.Barrier(num_arrivals=halves),  # O is there
        plgpu.Barrier(num_arrivals=1),  # its buffer is free
    ]


class GatedNormEpilogue:
    """The norm between the warpgroups that compute outputs and global memory.

    Args:
        refs: (gate, weight) of `operands`; o [2, 64 tokens, 64 channels] in shared memory; y
            [T, Hv, 128], the output; and those of `scratch`.
    """

    def __init__(self, refs: tuple[Any, ...], *, eps: float, interpret: bool):
        self.gate, self.weight, self.o, self.y, scratch_refs = refs
        self.copied, self.made, self.free = scratch_refs
        self.eps, self.interpret = eps, interpret
        self.first_column = self.gate.shape[1] - self.y.shape[1] * DIM

    def hand_over(self, o: jax.Array, half: Any) -> None:
        """Hands over O^T [64 channels, 64 tokens], from a warpgroup that computed it."""
        self.wait()
        self.o.at[half].transpose((1, 0))[...] = o
        plgpu.barrier_arrive(self.made)

    def wait(self) -> None:
        """Waits until what was handed over has been read; called once more than `hand_over`, for
        `begin`."""
        plgpu.barrier_wait(self.free)

    def begin(self) -> None:
        plgpu.barrier_arrive(self.free)

    def run(self, start: Any, tokens: Any, steps: Any, head: Any) -> None:
        """Writes all outputs of a run in the norming warpgroup; zeros if it has no `steps`."""
        last, groups = start + tokens - 1, steps * GROUPS
        column = self.first_column + head * DIM
        weights = [
            lax.broadcast_in_dim(
                plgpu.load(
                    self.weight.at[pl.ds(64 * half, 64)], layout=LAYOUT.reduce(0), optimized=False
                ),
                (ROWS, 64),
                [1],
            )
            for half in range(2)
        ]

        def group(n: Any, slot: Any) -> Any:
            first, at = start + n * ROWS, lax.rem(n, jnp.int32(GROUPS))
            pl.when(at == 0)(lambda: plgpu.barrier_wait(self.made))
            rows = pl.ds(pl.multiple_of(at * ROWS, ROWS), ROWS)
            o = [plgpu.load(self.o.at[half, rows], layout=LAYOUT) for half in range(2)]
            pl.when(at == GROUPS - 1)(lambda: plgpu.barrier_arrive(self.free))
            z = self._gates(first, column, slot)
            self._store(self._normed(o, weights, z), first, tokens - n * ROWS, head)
            self._copy(first + AHEAD * ROWS, last, column, slot, n + AHEAD < groups)
            return jnp.where(slot == AHEAD - 1, 0, slot + 1)

        for n in range(AHEAD):
            self._copy(start + n * ROWS, last, column, n, n < groups)
        lax.fori_loop(0, groups, group, jnp.int32(0))

        @pl.when(steps == 0)
        def _():
            zeros = [plgpu.layout_cast(jnp.zeros((ROWS, 64), self.y.dtype), LAYOUT)] * 2

            @pl.loop(0, lax.div(tokens + (ROWS - 1), jnp.int32(ROWS)))
            def _(n):
                self._store(zeros, start + n * ROWS, tokens - n * ROWS, head)

    def _normed(self, o: Any, weights: Any, z: Any) -> list[jax.Array]:
        o, z = ([self._numbers(half) for half in x] for x in (o, z))
        squares = [jnp.sum(half * half, axis=1) for half in o]
        factor = lax.rsqrt((squares[0] + squares[1]) * (1.0 / DIM) + self.eps)
        factor = lax.broadcast_in_dim(factor, (ROWS, 64), [0])
        return [
            (o[half] * factor * weights[half] * self._silu(z[half])).astype(self.y.dtype)
            for half in range(2)
        ]

    def _numbers(self, x: jax.Array) -> jax.Array:
        """Returns x in float32; bfloat16 takes one instruction each."""
        if self.interpret or x.dtype != jnp.bfloat16:
            return x.astype(jnp.float32)
        out = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=LAYOUT)
        return plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=out)(_unpacked)(x)

    def _silu(self, x: jax.Array) -> jax.Array:
        if self.interpret:
            return silu(x)
        out = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=LAYOUT)
        return x * plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=out)(_reciprocal)(
            1.0 + jnp.exp(-x)
        )

    def _copy(self, first: Any, last: Any, column: Any, slot: Any, condition: Any) -> None:
        """Starts the copy of a thread's z of ROWS tokens; past the last token it copies that of the
        last."""
        if not self.interpret:
            types = (plgpu.RefType(), plgpu.RefType(), *[SPLAT] * 5)
            scalars = (
                first,
                last,
                column,
                jnp.int32(slot),
                jnp.asarray(condition).astype(jnp.int32),
            )
            plgpu.inline_mgpu(arg_types=types)(_start_copy)(self.gate, self.copied, *scalars)

    def _gates(self, first: Any, column: Any, slot: Any) -> list[jax.Array]:
        """Returns z of ROWS tokens, in both halves."""
        if self.interpret:
            rows = self.gate.at[pl.ds(first, ROWS)]
            return [rows[:, pl.ds(column + 64 * half, 64)] for half in range(2)]
        out = plgpu.ShapeDtypeStruct((ROWS, 64), self.gate.dtype, layout=LAYOUT)
        take = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT), return_type=(out, out))
        return take(_copied)(self.copied, slot)

    def _store(self, y: list[jax.Array], first: Any, left: Any, head: Any) -> None:
        """Stores y of the `left` tokens from the first on, at most ROWS of them."""
        if not self.interpret:
            types = (plgpu.RefType(), SPLAT, SPLAT, SPLAT, LAYOUT, LAYOUT)
            plgpu.inline_mgpu(arg_types=types)(_store_rows)(self.y, first, left, head, *y)
            return
        for half in range(2):
            channels = pl.ds(64 * half, 64)
            for row in range(ROWS):

                @pl.when(row < left)
                def _(half=half, channels=channels, row=row):
                    self.y.at[first + row, head, channels][...] = y[half][row]


def _row() -> Any:
    """A thread's row of ROWS."""
    thread = WarpgroupThread()
    return plus(times(thread.warp, 4), arith.andi(arith.shrui(thread.index, word(3)), word(3)))


def _channel() -> Any:
    """A thread's first channel of a half's 64."""
    return times(arith.andi(utils.thread_idx(), word(7)), WIDTH)


def _offset(width: int, token: Any, column: Any) -> Any:
    """Returns the 64-bit byte offset of a number in rows of `width` numbers of two bytes."""
    wide = ir.IntegerType.get_signless(64)
    offset = arith.muli(arith.extui(wide, token), mgpu.c(width, wide))
    return arith.muli(arith.addi(offset, arith.extui(wide, column)), mgpu.c(2, wide))


def _start_copy(ctx: Any, gate: Any, copied: Any, *scalars: Any) -> None:
    del ctx
    first, last, column, slot, wanted = map(single, scalars)
    tokens, width = ir.MemRefType(gate.type).shape
    token = arith.minsi(plus(first, _row()), last)
    source = pointer(gate, _offset(width, token, plus(column, _channel())))
    mine = plus(times(slot, 2 * HALF_BYTES), times(WarpgroupThread().index, 2 * WIDTH))
    asm(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; "
        f"setp.lt.and.u32 p, $3, {tokens}, p; @p cp.async.cg.shared.global [$0], [$1], 16; "
        f"@p cp.async.cg.shared.global [$0+{HALF_BYTES}], [$1+{2 * 64}], 16; "
        "cp.async.commit_group; }",
        [],
        [llvm.ptrtoint(i32(), pointer(copied, mine)), source, wanted, token],
        "r,l,r,r,~{memory}",
    )


def _copied(ctx: Any, copied: Any, slot: Any) -> list[Any]:
    """Returns the oldest z that the thread has copied and not yet read."""
    del ctx
    asm(f"cp.async.wait_group {AHEAD - 1};", [], [], "~{memory}")
    mine = plus(times(single(slot), 2 * HALF_BYTES), times(WarpgroupThread().index, 2 * WIDTH))
    of = ir.VectorType.get((WIDTH,), ir.MemRefType(copied.type).element_type)
    loaded = [llvm.load(of, pointer(copied, mine, HALF_BYTES * half)) for half in range(2)]
    return [fragmented([half], (ROWS, 64), LAYOUT.to_mgpu()) for half in loaded]


def _store_rows(ctx: Any, ref: Any, first: Any, left: Any, head: Any, *y: Any) -> None:
    del ctx
    row, (tokens, heads, _) = _row(), ir.MemRefType(ref.type).shape
    token = plus(single(first), row)
    place = _offset(heads * DIM, token, plus(times(single(head), DIM), _channel()))
    inside = arith.cmpi(arith.CmpIPredicate.slt, row, single(left))
    # As with TMA, tokens that offsets from the device place outside of the array are skipped.
    exists = arith.cmpi(arith.CmpIPredicate.ult, token, word(tokens))
    with utils.when(arith.andi(inside, exists)):
        for half, of_half in enumerate(y):
            store(of_half.registers.item(), ref, place, 2 * 64 * half)


def _unpacked(ctx: Any, x: Any) -> Any:
    """A bfloat16 is the upper half of a float32."""
    del ctx
    words = vector.bitcast(ir.VectorType.get((WIDTH // 2,), i32()), x.registers.item())
    numbers = []
    for i in range(WIDTH // 2):
        both = element(words, i)
        for half in (arith.shli(both, word(16)), arith.andi(both, word(0xFFFF0000))):
            numbers.append(arith.bitcast(f32(), half))
    return fragmented([joined(numbers)], x.shape, LAYOUT.to_mgpu())


def _reciprocal(ctx: Any, x: Any) -> Any:
    """Returns the reciprocal of numbers from 1 to infinity, without a division's range checks."""
    del ctx
    code = "rcp.approx.ftz.f32 $0, $1;"
    of = [element(x.registers.item(), i) for i in range(WIDTH)]
    made = [asm(code, [f32()], [each], "=f,f", movable=True)[0] for each in of]
    return fragmented([joined(made)], x.shape, LAYOUT.to_mgpu())
