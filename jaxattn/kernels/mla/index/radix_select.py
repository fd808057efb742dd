"""The exact top k of a row of int32, by a radix select that a cluster's blocks share.

A block is 512 threads, 16 warps. The cluster's warps have consecutive shares of the row, and read
them from L2 in every pass, four numbers a lane:

    three passes   histograms of 11, 11 and 10 bits of the numbers that match the bits so far; of
                   all blocks' histograms together, the digit in which the k-th largest lies
    a fourth       how many numbers of each warp are above the threshold, and how many are equal
    a fifth        the places of those above, and of the first equal ones, in ascending order

Histograms are in each block's shared memory. A block reads those of the others, and finds the same
digit as they do.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, ir, llvm, utils
from jaxattn.kernels.hopper.ptx import (
    asm,
    asm_word,
    i32,
    joined,
    load,
    plus,
    pointer,
    single,
    store,
    times,
    tree,
    word,
)

WARPGROUPS = 4
THREADS = 128 * WARPGROUPS
WARPS = THREADS // 32
BINS = 2048
STEP = 128  # numbers of a warp's load
AHEAD = 4  # loads under way
RESIDENT = 8  # loads whose numbers stay in registers from pass to pass
# Words of shared memory: three histograms, then what the block's threads tell each other.
TOTALS = 3 * BINS
COUNTS = TOTALS + WARPS  # of each warp, above the threshold and equal
FOUND = COUNTS + 2 * WARPS  # of each pass the digit, and how many of it are wanted
WORDS = FOUND + 8
# The bits of a pass: (by how much a number is shifted, mask of the digit).
DIGITS = ((21, 2047), (10, 2047), (0, 1023))

COUNT = "{ .reg .pred some; setp.ne.u32 some, $1, 0; @some red.shared.add.u32 [$0], 1; }"
WRITE = "{ .reg .pred some; setp.ne.u32 some, $2, 0; @some st.global.u32 [$0], $1; }"
# The lanes' words added up from the lane on, and up to it.
DOWN = (
    "{{ .reg .pred there; .reg .b32 more; shfl.sync.down.b32 more|there, $1, {}, 0x1f, -1; "
    "@!there mov.b32 more, 0; add.u32 $0, $1, more; }}"
)
UP = (
    "{{ .reg .pred there; .reg .b32 more; shfl.sync.up.b32 more|there, $1, {}, 0, -1; "
    "@!there mov.b32 more, 0; add.u32 $0, $1, more; }}"
)
OF_BLOCK = (
    "{ .reg .b32 there; mapa.shared::cluster.u32 there, $4, $5; "
    "ld.shared::cluster.v4.u32 {$0, $1, $2, $3}, [there]; }"
)
PAIR_OF_BLOCK = (
    "{ .reg .b32 there; mapa.shared::cluster.u32 there, $2, $3; "
    "ld.shared::cluster.v2.u32 {$0, $1}, [there]; }"
)
CLUSTER = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


def select(
    keys: Any, out: Any, smem: Any, row: jax.Array, visible: jax.Array, rank: Any, *,
    top_k: int, blocks: int, interpret: bool,
) -> None:  # fmt: skip
    """Writes the places of the top k of a row's first numbers to out [rows, top_k], ascending.

    Of equal numbers the first ones are taken. All threads of the cluster call it.

    Args:
        keys: int32 [rows, width] of global memory.
        smem: int32 [WORDS] of shared memory.
        visible: numbers of the row, more than `top_k`.
        rank: the block's place in the cluster.
        blocks: of the cluster.
    """
    assert not interpret
    plain, split = plgpu.RefType(), plgpu.Layout.WG_SPLAT
    run = plgpu.inline_mgpu(arg_types=(plain, plain, plain, split, split, split))

    def body(_: Any, keys: Any, out: Any, smem: Any, row: Any, visible: Any, rank: Any) -> None:
        given = (single(x) for x in (row, visible, rank))
        RadixSelect(keys, out, smem, *given, top_k=top_k, blocks=blocks).run()

    run(body)(keys, out, smem, row, visible, rank)


class RadixSelect:
    """What a thread does; all methods write instructions."""

    def __init__(
        self, keys: Any, out: Any, smem: Any, row: Any, visible: Any, rank: Any, *,
        top_k: int, blocks: int,
    ) -> None:  # fmt: skip
        self.keys, self.out, self.smem = keys, out, smem
        self.row, self.visible, self.rank = row, visible, rank
        self.top_k, self.blocks = top_k, blocks
        self.width = ir.MemRefType(keys.type).shape[1]
        self.thread = utils.thread_idx()
        self.lane = arith.andi(self.thread, word(31))
        self.warp = arith.shrui(self.thread, word(5))
        self.team = plus(times(rank, WARPS), self.warp)  # the warp's place in the cluster

    def run(self) -> None:
        self._share()
        self._clear()
        self._meet()
        prefix, wanted = None, word(self.top_k)
        for number, (_, mask) in enumerate(DIGITS):
            self._count_digits(number, prefix)
            self._sync()
            digit, wanted = self._find(number, wanted)
            if number == 0:
                prefix = arith.subi(digit, word(BINS // 2))
            else:
                bits = mask.bit_length()
                prefix = arith.ori(arith.shli(prefix, word(bits)), digit)
        self._write(prefix, wanted)

    def _share(self) -> None:
        """The warp's numbers: from `first` up to `limit`, in turns of AHEAD steps."""
        steps = arith.divui(plus(self.visible, word(STEP - 1)), word(STEP))
        teams = self.blocks * WARPS
        each = arith.divui(plus(steps, word(teams - 1)), word(teams))
        # Where a lane's share of the widest row is so few numbers, it reads them once.
        self.resident = self.width <= teams * STEP * RESIDENT
        self.ahead = -(-self.width // (teams * STEP)) if self.resident else AHEAD
        self.turns = arith.divui(plus(each, word(self.ahead - 1)), word(self.ahead))
        begin = times(arith.muli(self.team, each), STEP)
        self.limit = arith.minui(plus(begin, times(each, STEP)), self.visible)
        self.first = plus(begin, times(self.lane, 4))
        self.base = times(self.row, 4 * self.width)
        self.loaded = self._load(word(0)) if self.resident else None

    def _load(self, turn: Any) -> list[Any]:
        """(place of the first, four numbers) of each step of a turn."""
        steps = []
        for step in range(self.ahead):
            place = plus(self.first, times(turn, STEP * self.ahead), word(STEP * step))
            inside = arith.minui(place, word(self.width - 4))
            steps.append((place, load(self.keys, plus(self.base, times(inside, 4)), 0, 4)))
        return steps

    def _sync(self) -> None:
        """The cluster's threads wait for one another."""
        if self.blocks == 1:
            self._meet()
        else:
            asm(CLUSTER, [], [], "~{memory}", convergent=True)

    def _meet(self) -> None:
        """The block's threads wait for one another."""
        asm("barrier.sync.aligned 0;", [], [], "~{memory}", convergent=True)

    def _clear(self) -> None:
        zeros = joined([word(0)] * 4)
        for first in range(0, 3 * BINS, 4 * THREADS):
            store(zeros, self.smem, times(self.thread, 16), 4 * first)

    def _each(self, carry: list[Any], use: Any) -> list[Any]:
        """`use(carry, places, numbers, which are the warp's)` of the lane's four numbers a step."""

        def turn(steps: list[Any], carry: list[Any]) -> list[Any]:
            for first, four in steps:
                places = [plus(first, word(j)) for j in range(4)]
                mine = [self._less(place, self.limit) for place in places]
                carry = use(carry, places, four, mine)
            return carry

        if self.loaded is not None:
            return turn(self.loaded, carry)
        if carry:
            looped = utils.fori(self.turns, carry)
            return list(looped(lambda i, carry: turn(self._load(i), carry)).results)
        utils.fori(self.turns, [word(0)])(lambda i, none: (turn(self._load(i), []), none)[1])
        return []

    def _count_digits(self, number: int, prefix: Any) -> None:
        shift, mask = DIGITS[number]
        histogram = self._shared(word(0), 4 * BINS * number)

        def use(carry: list[Any], _: Any, four: list[Any], mine: list[Any]) -> list[Any]:
            for key, here in zip(four, mine, strict=True):
                if prefix is None:
                    digit = plus(arith.shrsi(key, word(shift)), word(BINS // 2))
                else:
                    above = arith.shrsi(key, word(shift + mask.bit_length()))
                    here = arith.andi(here, self._equal(above, prefix))
                    digit = arith.andi(arith.shrui(key, word(shift)), word(mask))
                at = plus(histogram, times(digit, 4))
                asm(COUNT, [], [at, arith.extui(i32(), here)], "r,r,~{memory}")
            return carry

        self._each([], use)

    def _find(self, number: int, wanted: Any) -> tuple[Any, Any]:
        """The digit of the k-th largest, and how many of the numbers with that digit are wanted.
        Each thread has four digits."""
        at = self._shared(times(self.thread, 16), 4 * BINS * number)
        own = [word(0)] * 4
        for block in range(self.blocks):
            if self.blocks == 1:
                more = load(self.smem, times(self.thread, 16), 4 * BINS * number, 4)
            else:
                constraints = "=r,=r,=r,=r,r,r,~{memory}"
                more = asm(OF_BLOCK, [i32()] * 4, [at, word(block)], constraints)
            own = [plus(x, y) for x, y in zip(own, more, strict=True)]
        total = plus(*own)
        from_here = total
        for distance in (1, 2, 4, 8, 16):
            from_here = self._lanes(DOWN, from_here, distance)
        with utils.when(self._equal(self.lane, word(0))):
            store(from_here, self.smem, times(self.warp, 4), 4 * TOTALS)
        self._meet()
        totals: list[Any] = []
        for first in range(0, WARPS, 4):
            totals += load(self.smem, word(0), 4 * (TOTALS + first), 4)
        later = [
            arith.select(self._less(self.warp, word(i)), x, word(0)) for i, x in enumerate(totals)
        ]
        above = arith.subi(plus(tree(arith.addi, later), from_here), total)
        for j in reversed(range(4)):
            with_it = plus(above, own[j])
            is_it = arith.andi(
                self._less(above, wanted), arith.cmpi(arith.CmpIPredicate.uge, with_it, wanted)
            )
            with utils.when(is_it):
                digit = plus(times(self.thread, 4), word(j))
                store(digit, self.smem, word(0), 4 * (FOUND + 2 * number))
                store(arith.subi(wanted, above), self.smem, word(4), 4 * (FOUND + 2 * number))
            above = with_it
        self._meet()
        digit, wanted = load(self.smem, word(0), 4 * (FOUND + 2 * number), 2)
        return digit, wanted

    def _write(self, threshold: Any, wanted: Any) -> None:
        """The places of numbers above the threshold, and of the first `wanted` equal ones."""

        def kinds(key: Any, here: Any) -> tuple[Any, Any]:
            above = arith.cmpi(arith.CmpIPredicate.sgt, key, threshold)
            pair = (arith.andi(here, above), arith.andi(here, self._equal(key, threshold)))
            return tuple(arith.extui(i32(), x) for x in pair)

        def count(carry: list[Any], _: Any, four: list[Any], mine: list[Any]) -> list[Any]:
            above, equal = carry
            for key, here in zip(four, mine, strict=True):
                is_above, is_equal = kinds(key, here)
                above, equal = plus(above, is_above), plus(equal, is_equal)
            return [above, equal]

        counts = [self._over_warp(x) for x in self._each([word(0), word(0)], count)]
        with utils.when(self._equal(self.lane, word(0))):
            for i, x in enumerate(counts):
                store(x, self.smem, times(self.warp, 8), 4 * (COUNTS + i))
        self._sync()
        before = self._before()
        if self.blocks > 1:  # the others may go on once this block has read their counts
            asm("barrier.cluster.arrive.release.aligned;", [], [], "~{memory}", convergent=True)
        places_out = llvm.ptrtoint(
            ir.IntegerType.get_signless(64),
            pointer(self.out, times(self.row, 4 * self.top_k)),
        )

        def write(carry: list[Any], places: Any, four: Any, mine: Any) -> list[Any]:
            above, equal = carry
            each = [kinds(key, here) for key, here in zip(four, mine, strict=True)]
            both = [plus(x, arith.shli(y, word(16))) for x, y in each]
            own = plus(*both)
            up_to = own
            for distance in (1, 2, 4, 8, 16):
                up_to = self._lanes(UP, up_to, distance)
            total = asm_word("shfl.sync.idx.b32 $0, $1, 31, 0x1f, -1;", up_to)
            earlier = arith.subi(up_to, own)
            here_above = plus(above, arith.andi(earlier, word(0xFFFF)))
            here_equal = plus(equal, arith.shrui(earlier, word(16)))
            for (is_above, is_equal), place in zip(each, places, strict=True):
                taken = arith.ori(
                    is_above,
                    arith.andi(is_equal, arith.extui(i32(), self._less(here_equal, wanted))),
                )
                index = plus(here_above, arith.minui(here_equal, wanted))
                wide = arith.extui(ir.IntegerType.get_signless(64), times(index, 4))
                asm(WRITE, [], [arith.addi(places_out, wide), place, taken], "l,r,r,~{memory}")
                here_above, here_equal = plus(here_above, is_above), plus(here_equal, is_equal)
            return [
                plus(above, arith.andi(total, word(0xFFFF))),
                plus(equal, arith.shrui(total, word(16))),
            ]

        self._each(list(before), write)
        if self.blocks > 1:
            asm("barrier.cluster.wait.acquire.aligned;", [], [], "~{memory}", convergent=True)

    def _before(self) -> tuple[Any, Any]:
        """Of all warps of the cluster before this one, the sums of their counts."""
        above = equal = word(0)
        for first in range(0, self.blocks * WARPS, 32):
            other = plus(self.lane, word(first))
            there = arith.minui(other, word(self.blocks * WARPS - 1))
            at = self._shared(times(arith.andi(there, word(WARPS - 1)), 8), 4 * COUNTS)
            block = arith.shrui(there, word(WARPS.bit_length() - 1))
            pair = asm(PAIR_OF_BLOCK, [i32()] * 2, [at, block], "=r,=r,r,r,~{memory}")
            earlier = self._less(other, self.team)
            above, equal = (
                plus(x, arith.select(earlier, y, word(0)))
                for x, y in zip((above, equal), pair, strict=True)
            )
        return self._over_warp(above), self._over_warp(equal)

    def _shared(self, offset: Any, fixed: int) -> Any:
        """An address of shared memory, as a word."""
        return llvm.ptrtoint(i32(), pointer(self.smem, offset, fixed))

    def _lanes(self, code: str, x: Any, distance: int) -> Any:
        return asm(code.format(distance), [i32()], [x], "=r,r", convergent=True)[0]

    def _over_warp(self, x: Any) -> Any:
        code = "redux.sync.add.u32 $0, $1, 0xffffffff;"
        return asm(code, [i32()], [x], "=r,r", convergent=True)[0]

    def _less(self, x: Any, y: Any) -> Any:
        return arith.cmpi(arith.CmpIPredicate.ult, x, y)

    def _equal(self, x: Any, y: Any) -> Any:
        return arith.cmpi(arith.CmpIPredicate.eq, x, y)
