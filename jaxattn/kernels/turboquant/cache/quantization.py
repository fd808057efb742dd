"""Quantization of a token's key and value, each by a warp, and the store to a page's group of 16
tokens.

Half a warp has a head. Its lane l has dims 4 l to 4 l + 3 of every 64. The four numbers of one of
its registers are thus contiguous in the cache, or become so after an exchange with one other lane.
The arithmetic is that of turboquant/codec.py, in the same order; the order of the bytes is in
turboquant/slot_layout.py.
"""

import dataclasses
import functools
from typing import Any

from jaxattn.core.turboquant.codec import (
    LARGEST_E4M3,
    LARGEST_F16,
    LEVEL_UNITS,
    TurboFormat,
    levels,
)
from jaxattn.core.turboquant.slot_layout import GROUP
from jaxattn.kernels.hopper.mlir import arith, ir, utils
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm,
    f32,
    i32,
    load,
    number,
    plus,
    reduce_lanes,
    store,
    times,
    word,
)
from jaxattn.kernels.turboquant.query_rotation import LANES, OF_THREAD, lane_butterfly

NARROW = 64  # dims of a register of each lane
SPARE = (0x4444, 0x2222, 0x1111)  # bits of a fourth half word, which the other three hold


@dataclasses.dataclass(frozen=True)
class TurboSlotPosition:
    """The destination of a token's bytes.

    Attributes:
        page: The page of all heads.
        group: Bytes from there to the head's group of 16 tokens.
        token: The token's index in the group.
        head_exists: Whether this thread's head exists.
    """

    page: Any
    group: Any
    token: Any
    head_exists: Any


@dataclasses.dataclass(frozen=True)
class TurboQuantizer:
    """A warpgroup's quantization of a key and a value of each of its heads.

    Attributes:
        form: The cache's format.
        heads: Adjacent heads, one or two.
        page_bytes: Bytes of a head in a page.
    """

    form: TurboFormat
    heads: int
    page_bytes: int

    def write(self, line: Any, page: Any, first_head: Any, page_offset: Any) -> None:
        """Quantizes and writes; warp 0 has the keys, warp 1 the values.

        Args:
            line: float32 [2 * heads * D] in shared memory: keys, then values.
            page: bytes [Hk, ..] in global memory.
            first_head: The first of the heads.
            page_offset: The token's place in the page.
        """
        thread = WarpgroupThread()
        half = arith.andi(arith.shrui(thread.index, word(4)), word(self.heads - 1))
        lane = arith.andi(thread.index, word(LANES - 1))
        group = times(arith.shrui(page_offset, word(4)), GROUP * self.form.slot_bytes)
        group = plus(group, times(plus(first_head, half), self.page_bytes))
        sixteen = arith.andi(arith.shrui(thread.index, word(4)), word(1))
        head_exists = arith.cmpi(arith.CmpIPredicate.ult, sixteen, word(self.heads))
        position = TurboSlotPosition(
            page, group, arith.andi(page_offset, word(GROUP - 1)), head_exists
        )
        for warp, run in enumerate((self._key, self._value)):
            with utils.when(arith.cmpi(arith.CmpIPredicate.eq, thread.warp, word(warp))):
                first = times(half, 4 * self.form.head_dim)
                fixed = warp * self.heads * 4 * self.form.head_dim
                numbers = [
                    _finite(x)
                    for m in range(self.form.head_dim // NARROW)
                    for x in load(
                        line, plus(first, times(lane, 4 * OF_THREAD)), fixed + 4 * NARROW * m,
                        OF_THREAD, f32(),
                    )
                ]  # fmt: skip
                run(numbers, lane, position)

    def _key(self, x: list[Any], lane: Any, position: TurboSlotPosition) -> None:
        if not self.form.rotated:
            limit, least = number(LARGEST_E4M3), number(-LARGEST_E4M3)
            x = [arith.maximumf(arith.minimumf(one, limit), least) for one in x]
            for m, four in enumerate(_split_per_thread(x)):
                self._store_e4m3(m, four, lane, position)
            return
        largest = reduce_lanes(arith.maximumf, _all(arith.maximumf, map(_size, x)), LANES)
        x = [arith.divf(one, _or_one(largest)) for one in x]
        squares = _all(arith.addf, (arith.mulf(one, one) for one in x))
        length = _root(reduce_lanes(arith.addf, squares, LANES))
        x = lane_butterfly([arith.divf(one, _or_one(length)) for one in x])
        share = number(self.form.head_dim**-0.5)
        by = number(LEVEL_UNITS[self.form.key_bits] * self.form.head_dim**0.5)
        x = [arith.mulf(arith.mulf(one, share), by) for one in x]
        codes, of_levels = zip(*(self._nearest(one) for one in x), strict=True)
        squares = _all(arith.addf, (arith.mulf(one, one) for one in of_levels))
        norm = arith.divf(
            arith.mulf(largest, length), _root(reduce_lanes(arith.addf, squares, LANES))
        )
        write = self._store_four_bits if self.form.key_bits == 4 else self._store_three_bits
        for m, four in enumerate(_split_per_thread(list(codes))):
            write(m, four, lane, position)
        self._store_number(0, norm, lane, position)

    def _nearest(self, x: Any) -> tuple[Any, Any]:
        """Returns (the code, its level) of a number."""
        table = levels(self.form.key_bits).tolist()
        code, level = word(0), number(table[0])
        for below, above in zip(table[:-1], table[1:], strict=True):
            passed = arith.cmpf(arith.CmpFPredicate.OGE, x, number((below + above) / 2))
            code = plus(code, arith.extui(i32(), passed))
            level = arith.select(passed, number(above), level)
        return code, level

    def _store_e4m3(self, m: int, four: list[Any], lane: Any, position: TurboSlotPosition) -> None:
        code = (
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
        )
        (packed,) = asm(code, [i32()], four, "=r,f,f,f,f", movable=True)
        # [c][g][t][j][h], a word each
        c, j, t = _bits(lane, 3, 1), _bits(lane, 2, 1), _bits(lane, 0, 2)
        h, g = _bits(position.token, 3, 1), _bits(position.token, 0, 3)
        at = _index((plus(word(2 * m), c), 0), (g, 8), (t, 4), (j, 2), (h, 2))
        self._store(packed, times(at, 4), 0, position, position.head_exists)

    def _store_four_bits(
        self, m: int, four: list[Any], lane: Any, position: TurboSlotPosition
    ) -> None:
        sizes, signs = [], []
        for i, one in enumerate(four):
            below, size = _sign_and_magnitude(one)
            sizes.append(arith.shli(size, word(4 * i)))
            signs.append(arith.shli(below, word(8 * i + 7)))
        j = _bits(lane, 2, 1)
        mine = arith.ori(
            arith.shli(_all(arith.ori, sizes), times(j, 16)),
            arith.shrui(_all(arith.ori, signs), times(j, 4)),
        )
        both = arith.ori(mine, utils.shfl_bfly(mine, 4))
        # [b][g][t][c][h], a word each
        c, t = _bits(lane, 3, 1), _bits(lane, 0, 2)
        h, g = _bits(position.token, 3, 1), _bits(position.token, 0, 3)
        at = _index((word(m), 0), (g, 8), (t, 4), (c, 2), (h, 2))
        first = arith.andi(position.head_exists, arith.cmpi(arith.CmpIPredicate.eq, j, word(0)))
        self._store(both, times(at, 4), 0, position, first)

    def _store_three_bits(
        self, m: int, four: list[Any], lane: Any, position: TurboSlotPosition
    ) -> None:
        mine = _all(arith.ori, (arith.shli(one, word(4 * i)) for i, one in enumerate(four)))
        q, t = _bits(lane, 2, 2), _bits(lane, 0, 2)
        fourths = [utils.shfl_bfly(mine, distance) for distance in (12, 8, 4)]
        three = [
            arith.ori(mine, arith.shli(arith.andi(fourth, word(SPARE[r])), word(1 + r)))
            for r, fourth in enumerate(fourths)
        ]
        half_word = arith.trunci(ir.IntegerType.get_signless(16), _select_by_index(q, three))
        # [g][t][b][r][h], half a word each
        h, g = _bits(position.token, 3, 1), _bits(position.token, 0, 3)
        blocks = self.form.head_dim // NARROW
        at = _index((g, 0), (t, 4), (word(m), blocks), (q, 3), (h, 2))
        first = arith.andi(position.head_exists, arith.cmpi(arith.CmpIPredicate.ult, q, word(3)))
        self._store(half_word, times(at, 2), 0, position, first)

    def _value(self, x: list[Any], lane: Any, position: TurboSlotPosition) -> None:
        max_code = 2**self.form.value_bits - 1
        low, high = (
            reduce_lanes(f, _all(f, iter(x)), LANES) for f in (arith.minimumf, arith.maximumf)
        )
        minimum = _zero_extend(_saturate_to_f16(low))
        share = [arith.divf(one, number(max_code)) for one in (high, low)]
        scale = _zero_extend(_saturate_to_f16(arith.subf(*share)))
        positive = arith.cmpf(arith.CmpFPredicate.OGT, scale, number(0.0))
        divisor = arith.select(positive, scale, number(1.0))
        codes = []
        for one in x:
            scaled = arith.divf(arith.subf(one, minimum), divisor)
            # NaN becomes 0, because max.f32 drops it.
            code = _max_number(_floor(arith.addf(scaled, number(0.5))), number(0.0))
            code = arith.minimumf(arith.select(positive, code, number(0.0)), number(max_code))
            codes.append(arith.fptoui(i32(), code))
        for m, four in enumerate(_split_per_thread(codes)):
            self._store_values(m, four, lane, position)
        first = 1 if self.form.rotated else 0
        self._store_number(first, scale, lane, position)
        self._store_number(first + 1, minimum, lane, position)

    def _store_values(
        self, m: int, four: list[Any], lane: Any, position: TurboSlotPosition
    ) -> None:
        nibbles = []
        for i, code in enumerate(four):
            if self.form.value_bits == 4:
                below, size = _sign_and_magnitude(code)
                code = arith.ori(size, arith.shli(below, word(3)))
            nibbles.append(arith.shli(code, word(8 * i)))
        mine = _all(arith.ori, iter(nibbles))
        both = arith.ori(mine, arith.shli(utils.shfl_bfly(mine, 2), word(4)))
        # [w][g][t][m][i], or of three bits [w][f][r][t][m][i], a byte each
        w, h, f = _bits(lane, 2, 2), _bits(lane, 1, 1), _bits(lane, 0, 1)
        t, i = _bits(position.token, 2, 2), _bits(position.token, 0, 2)
        blocks = self.form.head_dim // NARROW
        first = arith.andi(position.head_exists, arith.cmpi(arith.CmpIPredicate.eq, h, word(0)))
        if self.form.value_bits == 4:
            rows, stored = 8, [(g, _bits(both, 8 * g, 8)) for g in range(4)]
            row = plus(times(w, 8), times(f, 4))
        else:
            rows, fourth = 6, _bits(both, 24, 8)
            stored = [
                (
                    r,
                    arith.ori(
                        _bits(both, 8 * r, 8),
                        arith.shli(arith.andi(fourth, word(SPARE[r] & 0xFF)), word(1 + r)),
                    ),
                )
                for r in range(3)
            ]
            row = plus(times(w, rows), times(f, 3))
        for number_of_row, code in stored:
            at = _index((plus(row, word(number_of_row)), 0), (t, 4), (word(m), blocks), (i, 4))
            byte = arith.trunci(ir.IntegerType.get_signless(8), code)
            self._store(byte, at, GROUP * self.form.key_bytes, position, first)

    def _store_number(self, kind: int, x: Any, lane: Any, position: TurboSlotPosition) -> None:
        fixed = GROUP * (self.form.key_bytes + self.form.value_bytes) + 2 * GROUP * kind
        first = arith.andi(position.head_exists, arith.cmpi(arith.CmpIPredicate.eq, lane, word(0)))
        self._store(_saturate_to_f16(x), times(position.token, 2), fixed, position, first)

    def _store(
        self, x: Any, at: Any, fixed: int, position: TurboSlotPosition, condition: Any
    ) -> None:
        with utils.when(condition):
            store(x, position.page, plus(position.group, at), fixed)


def _split_per_thread(x: list[Any]) -> list[list[Any]]:
    return [x[i : i + OF_THREAD] for i in range(0, len(x), OF_THREAD)]


def _all(combine: Any, values: Any) -> Any:
    return functools.reduce(combine, values)


def _index(*digits: tuple[Any, int]) -> Any:
    """Returns the number with these digits, each with its number of values; that of the first is
    not read."""
    at = digits[0][0]
    for digit, count in digits[1:]:
        at = plus(times(at, count), digit)
    return at


def _bits(x: Any, first: int, count: int) -> Any:
    return arith.andi(arith.shrui(x, word(first)), word(2**count - 1))


def _select_by_index(which: Any, values: list[Any]) -> Any:
    """Returns the value with that index; the last one for greater indices."""
    found = values[-1]
    for i, value in enumerate(values[:-1]):
        found = arith.select(arith.cmpi(arith.CmpIPredicate.eq, which, word(i)), value, found)
    return found


def _sign_and_magnitude(code: Any) -> tuple[Any, Any]:
    """Returns (1 where a 4-bit code is in the lower half, its distance from the middle)."""
    below = arith.xori(arith.shrui(code, word(3)), word(1))
    # In the lower half, 7 - code is the inversion of its three bits.
    return below, arith.andi(arith.xori(code, times(below, 7)), word(7))


def _finite(x: Any) -> Any:
    """Returns NaN instead of an infinity."""
    return arith.addf(x, arith.subf(x, x))


def _size(x: Any) -> Any:
    return asm("abs.f32 $0, $1;", [f32()], [x], "=f,f", movable=True)[0]


def _root(x: Any) -> Any:
    return asm("sqrt.rn.f32 $0, $1;", [f32()], [x], "=f,f", movable=True)[0]


def _floor(x: Any) -> Any:
    return asm("cvt.rmi.f32.f32 $0, $1;", [f32()], [x], "=f,f", movable=True)[0]


def _max_number(x: Any, y: Any) -> Any:
    return asm("max.f32 $0, $1, $2;", [f32()], [x, y], "=f,f,f", movable=True)[0]


def _or_one(x: Any) -> Any:
    """Returns the number, or 1 instead of 0."""
    zero = arith.cmpf(arith.CmpFPredicate.OEQ, x, number(0.0))
    return arith.select(zero, number(1.0), x)


def _saturate_to_f16(x: Any) -> Any:
    """Returns float16, with its largest number instead of greater ones."""
    limit, least = number(LARGEST_F16), number(-LARGEST_F16)
    x = arith.maximumf(arith.minimumf(x, limit), least)
    return arith.truncf(ir.F16Type.get(), x)


def _zero_extend(x: Any) -> Any:
    return arith.extf(f32(), x)
