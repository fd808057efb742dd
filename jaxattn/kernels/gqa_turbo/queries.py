"""Queries on their way to shared memory: the loading warpgroup rotates them and makes e4m3 terms.

A warp has a packed row, lane l of it D / 32 neighbouring dims from l D / 32 on. The rotation is a
butterfly: log2(D / 32) stages inside of a thread, five between lanes. What scores are to be
multiplied by, a power of two of each row times D**-0.5, goes to shared memory beside the terms.
There is no array of rotated queries anywhere else.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.turboquant import E4M3, TurboFormat
from jaxattn.kernels.gqa_decode.fp8 import EXPONENT_AT, FLOAT_BIAS
from jaxattn.kernels.gqa_decode.load import Loader
from jaxattn.kernels.gqa_turbo.terms import SECOND_TERM, TERM_EXPONENT, query_terms
from jaxattn.kernels.hopper.machine import swizzled
from jaxattn.kernels.hopper.mlir import arith, ir, utils, vector
from jaxattn.kernels.hopper.registers import (
    Thread,
    asm,
    element,
    f32,
    i32,
    joined,
    load,
    number,
    over_lanes,
    plus,
    single,
    store,
    times,
    word,
)

WARPS, LANES = 4, 32
AT_A_TIME = 8  # packed rows, two of each warp: their loads wait side by side
TILE_ROWS = 8  # of a tile in shared memory


def query_tiles(head_dim: int) -> Any:
    """How the terms lie in shared memory."""
    return swizzled(E4M3, min(head_dim, 128))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurningLoader(Loader):
    """`Loader`, which turns a piece's queries itself.

    Attributes:
        form: the cache's format.
        columns: N, packed rows of a block.
        first_row: the first of them among the pair's.
    """

    form: TurboFormat
    columns: int
    first_row: jax.Array

    def bring_queries(self, pair: jax.Array, at: jax.Array) -> None:
        memory = self.memory
        to, factors = memory.queries.at[at], memory.factors.at[at]
        if self.interpret:
            rows = self.q_ref.at[pair, pl.ds(self.first_row, self.columns)]
            first, second, by = query_terms(self._turned(rows[...].astype(jnp.float32)))
            to[: self.columns, :], to[self.columns :, :] = first, second
            factors[...] = by * self._share
        else:

            @pl.loop(0, self.columns // AT_A_TIME)
            def _some(i):
                splat = plgpu.Layout.WG_SPLAT
                kinds = (splat, plgpu.RefType(), plgpu.RefType(query_tiles(self.form.head_dim)))
                run = plgpu.inline_mgpu(arg_types=(splat, *kinds, plgpu.RefType()))
                run(self._some_rows)(
                    i * AT_A_TIME, self.first_row, self.q_ref.at[pair], to, factors
                )

        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.queries_loaded.at[at])

    @property
    def _share(self) -> float:
        """By what the butterfly's sums are multiplied."""
        return self.form.head_dim**-0.5 if self.form.rotated else 1.0

    def _turned(self, x: jax.Array) -> jax.Array:
        """[N, D] times the Hadamard matrix times D**0.5, where keys are rotated."""
        distance, dim = 1, self.form.head_dim
        while self.form.rotated and distance < dim:
            halves = x.reshape(-1, dim // (2 * distance), 2, distance)
            a, b = halves[:, :, 0], halves[:, :, 1]
            x = jnp.stack([a + b, a - b], axis=2).reshape(-1, dim)
            distance *= 2
        return x

    def _some_rows(
        self, ctx: Any, row: Any, first_row: Any, q: Any, terms: Any, factors: Any
    ) -> None:
        """Of 8 packed rows from `row` of the block's on, those of this thread's warp."""
        place, dim = Thread(), self.form.head_dim
        count = dim // LANES
        lane = arith.andi(place.index, word(LANES - 1))
        rows = [plus(single(row), place.warp, word(i)) for i in range(0, AT_A_TIME, WARPS)]
        found = []
        for mine in rows:
            line = times(plus(mine, single(first_row)), 2 * dim)
            at = plus(line, times(lane, 2 * count))
            found.append(self._wide(load(q, at, 0, max(count // 2, 1)), ir.MemRefType(q.type)))
        for mine, numbers in zip(rows, found, strict=True):
            self._one_row(mine, lane, numbers, terms, factors)

    def _wide(self, words: list[Any], of: Any) -> list[Any]:
        """The thread's numbers of a row, float32; NaN in place of infinities."""
        pair = ir.VectorType.get((2,), of.element_type)
        numbers = []
        for packed in words:
            two = vector.bitcast(pair, joined([packed]))
            numbers += [arith.extf(f32(), element(two, i)) for i in range(2)]
        return [arith.addf(x, arith.subf(x, x)) for x in numbers]

    def _one_row(self, row: Any, lane: Any, x: list[Any], terms: Any, factors: Any) -> None:
        if self.form.rotated:
            x = self._butterfly(lane, x)
        sizes = [asm("abs.f32 $0, $1;", [f32()], [one], "=f,f", movable=True)[0] for one in x]
        # max.f32 drops NaN: the row's other numbers decide.
        largest = sizes[0]
        for size in sizes[1:]:
            largest = _largest(largest, size)
        largest = over_lanes(_largest, largest, LANES)
        exponent = arith.shrui(_bits(largest), word(int(EXPONENT_AT)))
        exponent = arith.minui(exponent, word(2 * FLOAT_BIAS))
        exponent = arith.maxui(exponent, word(TERM_EXPONENT + 1))
        inverse = arith.subi(word(2 * FLOAT_BIAS + TERM_EXPONENT), exponent)
        by = _power(inverse)
        wide = [arith.mulf(one, by) for one in x]
        first, rest = _rounded(wide)
        second, _ = _rounded([arith.mulf(one, number(SECOND_TERM)) for one in rest])
        count = len(x)
        for term, codes in enumerate((first, second)):
            line = plus(row, word(term * self.columns))
            store(codes, terms, self._place(line, times(lane, count)))
        back = _power(arith.subi(exponent, word(TERM_EXPONENT)))
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, word(0))):
            store(arith.mulf(back, number(self._share)), factors, times(row, 4))

    def _butterfly(self, lane: Any, x: list[Any]) -> list[Any]:
        distance = 1
        while distance < len(x):
            x = [
                arith.subf(x[i - distance], one)
                if i & distance
                else arith.addf(one, x[i + distance])
                for i, one in enumerate(x)
            ]
            distance *= 2
        for step in range(int(math.log2(LANES))):
            # The lane whose bit is set has the difference: the other's number less its own.
            upper = arith.andi(lane, word(1 << step))
            sign = arith.shli(upper, word(31 - step))
            x = [
                arith.addf(utils.shfl_bfly(one, 1 << step), _float(arith.xori(_bits(one), sign)))
                for one in x
            ]
        return x

    def _place(self, row: Any, dim: Any) -> Any:
        """Bytes from the terms' beginning to this row's number, where a swizzle has put it."""
        width = min(self.form.head_dim, 128)
        tiles = self.form.head_dim // width
        tile = times(arith.shrui(row, word(int(math.log2(TILE_ROWS)))), tiles)
        if tiles > 1:
            tile = plus(tile, arith.shrui(dim, word(7)))
        inside = arith.andi(row, word(TILE_ROWS - 1))
        # 16-byte chunks change places within 128 bytes by the row, or within 64 by two rows.
        chunk = inside if width == 128 else arith.shrui(inside, word(1))
        column = arith.xori(arith.andi(dim, word(width - 1)), times(chunk, 16))
        return plus(times(tile, TILE_ROWS * width), times(inside, width), column)


def _bits(x: Any) -> Any:
    return arith.bitcast(i32(), x)


def _float(x: Any) -> Any:
    return arith.bitcast(f32(), x)


def _power(biased: Any) -> Any:
    """The float32 number of that exponent."""
    return _float(arith.shli(biased, word(int(EXPONENT_AT))))


def _largest(x: Any, y: Any) -> Any:
    return asm("max.f32 $0, $1, $2;", [f32()], [x, y], "=f,f,f", movable=True)[0]


def _rounded(x: list[Any]) -> tuple[Any, list[Any]]:
    """(a vector of 2, 4 or 8 e4m3 numbers, what is left of each)."""
    short, pair = ir.IntegerType.get_signless(16), ir.VectorType.get((2,), ir.F16Type.get())
    codes, rest = [], []
    for i in range(0, len(x), 2):
        low, high = x[i : i + 2]
        (two,) = asm(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", [short], [low, high], "=h,f,f", movable=True
        )
        (half,) = asm("cvt.rn.f16x2.e4m3x2 $0, $1;", [i32()], [two], "=r,h", movable=True)
        kept = vector.bitcast(pair, joined([half]))
        rest += [
            arith.subf(one, arith.extf(f32(), element(kept, n)))
            for n, one in enumerate((low, high))
        ]
        codes.append(two)
    return joined(codes), rest
