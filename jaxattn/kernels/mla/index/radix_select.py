"""The exact top k of a row of int32, by a radix select that the CTAs of a cluster share.

A CTA has 512 threads, 16 warps. The cluster's warps have consecutive shares of the row, and read
them from L2 in every pass, four numbers per lane:

    two or three   histograms of 12, 12 and 8 bits of the numbers that match the bits so far; of
                   all CTAs' histograms together, the digit in which the k-th largest lies
    another        how many numbers of each warp are above the threshold, and how many are equal
    the last       the places of those above, and of the first equal ones, in ascending order

If all numbers with the first 24 bits are selected, the pass over the last 8 bits is skipped: in
most rows of float32 only one number has these bits.

Histograms are in each CTA's shared memory. One warp of each CTA searches the sums of all CTAs'
histograms for the digit: among 128 groups of digits first, then within a group. Other CTAs' memory
(DSMEM) is slow to read: with whole histograms of 8 CTAs the reads took two thirds of the time.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, ir, llvm, utils
from jaxattn.kernels.hopper.ptx import (
    asm,
    i32,
    joined,
    load,
    plus,
    pointer,
    single,
    store,
    times,
    word,
)

WARPGROUPS = 4
THREADS = 128 * WARPGROUPS
WARPS = THREADS // 32
BINS = 4096
OWN = BINS // THREADS  # digits of a thread
STEP = 128  # numbers that a warp loads at a time
LOWEST = -(2**31)  # below every score's number
# Loads in flight: more of them where few rows leave a multiprocessor only one CTA.
AHEAD, MORE_AHEAD = 4, 8
RESIDENT = 22  # loads whose numbers stay in registers from pass to pass
GROUPS = 128  # groups of digits
# Word offsets in shared memory: three histograms, then the exchange between the CTA's threads.
SUMS = 3 * BINS  # the sum of each group of each histogram
COUNTS = SUMS + 3 * GROUPS  # for each warp the numbers above the threshold, and the equal ones
FOUND = COUNTS + 2 * WARPS  # for each pass the digit, how many of it are selected, how many it has
WORDS = FOUND + 4 * 3
# The bits of each pass: (right shift of a number, mask of the digit).
DIGITS = ((20, 4095), (8, 4095), (0, 255))

COUNT = "{ .reg .pred some; setp.ne.u32 some, $1, 0; @some red.shared.add.u32 [$0], 1; }"
WRITE = "{ .reg .pred some; setp.ne.u32 some, $2, 0; @some st.global.u32 [$0], $1; }"
# One step of a warp scan of the lanes' words: sums from a lane on, and up to a lane.
DOWN = (
    "{{ .reg .pred there; .reg .b32 more; shfl.sync.down.b32 more|there, $1, {}, 0x1f, -1; "
    "@!there mov.b32 more, 0; add.u32 $0, $1, more; }}"
)
UP = (
    "{{ .reg .pred there; .reg .b32 more; shfl.sync.up.b32 more|there, $1, {}, 0, -1; "
    "@!there mov.b32 more, 0; add.u32 $0, $1, more; }}"
)
# Loads of 1, 2 or 4 words of another CTA's shared memory.
OF_BLOCK = {
    1: "{ .reg .b32 there; mapa.shared::cluster.u32 there, $1, $2; "
    "ld.shared::cluster.u32 $0, [there]; }",
    2: "{ .reg .b32 there; mapa.shared::cluster.u32 there, $2, $3; "
    "ld.shared::cluster.v2.u32 {$0, $1}, [there]; }",
    4: "{ .reg .b32 there; mapa.shared::cluster.u32 there, $4, $5; "
    "ld.shared::cluster.v4.u32 {$0, $1, $2, $3}, [there]; }",
}
SWAP = "shfl.sync.bfly.b32 $0, $1, {}, 0x1f, -1;"
CLUSTER = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


def select(
    keys: Any, out: Any, smem: Any, row: jax.Array, visible: jax.Array, rank: Any, *,
    top_k: int, blocks: int, interpret: bool,
) -> None:  # fmt: skip
    """Writes the places of the top k of a row's first `visible` numbers to out [rows, top_k],
    ascending.

    Among equal numbers the first ones are selected. All threads of the cluster call it.

    Args:
        keys: int32 [rows, width] in global memory.
        smem: int32 [WORDS] in shared memory.
        visible: Numbers of the row that count, more than `top_k`.
        rank: The CTA's rank in the cluster.
        blocks: The number of CTAs in the cluster.
    """
    assert not interpret
    plain, split = plgpu.RefType(), plgpu.Layout.WG_SPLAT
    run = plgpu.inline_mgpu(arg_types=(plain, plain, plain, split, split, split))

    def body(_: Any, keys: Any, out: Any, smem: Any, row: Any, visible: Any, rank: Any) -> None:
        scalars = (single(x) for x in (row, visible, rank))
        RadixSelect(keys, out, smem, *scalars, top_k=top_k, blocks=blocks).run()

    run(body)(keys, out, smem, row, visible, rank)


class RadixSelect:
    """The code of one thread; all methods emit instructions."""

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
        self.team = plus(times(rank, WARPS), self.warp)  # the warp's rank in the cluster

    def run(self) -> None:
        self._share()
        self._clear()
        self._sync_cta()
        first, k_left, _ = self._select_digit(0, None, word(self.top_k))
        prefix = arith.subi(first, word(BINS // 2))
        second, k_left, count = self._select_digit(1, prefix, k_left)
        prefix = arith.ori(arith.shli(prefix, word(12)), second)
        # No threshold can be below the least prefix.
        is_lowest_prefix = self._equal(prefix, word(-(2**23)))
        has_last_digit = arith.ori(
            arith.cmpi(arith.CmpIPredicate.ne, count, k_left), is_lowest_prefix
        )
        with utils.when(has_last_digit):
            self._select_digit(2, prefix, k_left)
        bits, num_equal, _ = self._found(2)
        prefix = arith.shli(prefix, word(8))
        prefix_floor = arith.subi(prefix, word(1))  # all numbers with the prefix are above
        threshold = arith.select(has_last_digit, arith.ori(prefix, bits), prefix_floor)
        self._write(threshold, arith.select(has_last_digit, num_equal, word(0)))

    def _select_digit(self, digit_pass: int, prefix: Any, k_left: Any) -> list[Any]:
        """Runs a pass; returns its `_found` to all threads of the cluster."""
        self._count_digits(digit_pass, prefix)
        self._sync_cta()
        self._sum_groups(digit_pass)
        self._sync()
        with utils.when(self._equal(self.warp, word(0))):
            self._find(digit_pass, k_left)
        self._sync_cta()
        return self._found(digit_pass)

    def _share(self) -> None:
        """Sets the warp's share of the numbers: from `first` up to `limit`, in batches of AHEAD
        steps."""
        steps = arith.divui(plus(self.visible, word(STEP - 1)), word(STEP))
        num_warps = self.blocks * WARPS
        steps_per_warp = arith.divui(plus(steps, word(num_warps - 1)), word(num_warps))
        # If a lane's share of the widest row is small enough, the lane reads it once and keeps it
        # in registers.
        self.resident = self.width <= num_warps * STEP * RESIDENT
        self.ahead = AHEAD if self.blocks == 1 else MORE_AHEAD
        if self.resident:
            self.ahead = -(-self.width // (num_warps * STEP))
        self.turns = arith.divui(plus(steps_per_warp, word(self.ahead - 1)), word(self.ahead))
        begin = times(arith.muli(self.team, steps_per_warp), STEP)
        limit = arith.minui(plus(begin, times(steps_per_warp, STEP)), self.visible)
        self.limits = [arith.subi(limit, word(j)) for j in range(4)]
        self.first = plus(begin, times(self.lane, 4))
        self.base = times(self.row, 4 * self.width)
        self.loaded = self._load(word(0)) if self.resident else None

    def _load(self, batch: Any) -> list[Any]:
        """Returns (position of the first, four keys) for each step of a batch; numbers outside of
        the warp's share are LOWEST."""
        steps = []
        for step in range(self.ahead):
            position = plus(self.first, times(batch, STEP * self.ahead), word(STEP * step))
            clamped = arith.minui(position, word(self.width - 4))
            steps.append((position, load(self.keys, plus(self.base, times(clamped, 4)), 0, 4)))
        lowest = word(LOWEST)
        return [
            (
                position,
                [
                    arith.select(self._less(position, limit), key, lowest)
                    for key, limit in zip(keys, self.limits, strict=True)
                ],
            )
            for position, keys in steps
        ]

    def _sync(self) -> None:
        """Synchronizes the cluster's threads."""
        if self.blocks == 1:
            self._sync_cta()
        else:
            asm(CLUSTER, [], [], "~{memory}", convergent=True)

    def _sync_cta(self) -> None:
        """Synchronizes the CTA's threads."""
        asm("barrier.sync.aligned 0;", [], [], "~{memory}", convergent=True)

    def _clear(self) -> None:
        zeros = joined([word(0)] * 4)
        for first in range(0, 3 * BINS, 4 * THREADS):
            store(zeros, self.smem, times(self.thread, 16), 4 * first)

    def _each(self, carry: list[Any], use: Any) -> list[Any]:
        """Calls `use(carry, position of the first key, keys)` with four keys of each step."""

        def turn(steps: list[Any], carry: list[Any]) -> list[Any]:
            for position, keys in steps:
                carry = use(carry, position, keys)
            return carry

        if self.loaded is not None:
            return turn(self.loaded, carry)
        if carry:
            looped = utils.fori(self.turns, carry)
            return list(looped(lambda i, carry: turn(self._load(i), carry)).results)
        utils.fori(self.turns, [word(0)])(lambda i, dummy: (turn(self._load(i), []), dummy)[1])
        return []

    def _count_digits(self, number: int, prefix: Any) -> None:
        shift, mask = DIGITS[number]
        histogram = self._shared(word(0), 4 * BINS * number)

        def use(carry: list[Any], _: Any, keys: list[Any]) -> list[Any]:
            for key in keys:
                if prefix is None:
                    counted = word(1)
                    digit = plus(arith.shrsi(key, word(shift)), word(BINS // 2))
                else:
                    high_bits = arith.shrsi(key, word(shift + mask.bit_length()))
                    counted = arith.extui(i32(), self._equal(high_bits, prefix))
                    digit = arith.andi(arith.shrui(key, word(shift)), word(mask))
                bin_address = plus(histogram, times(digit, 4))
                asm(COUNT, [], [bin_address, counted], "r,r,~{memory}")
            return carry

        self._each([], use)

    def _found(self, number: int) -> list[Any]:
        """Returns the digit of the k-th largest number, how many of the numbers with it are
        selected, and how many numbers have it."""
        return load(self.smem, word(0), 4 * (FOUND + 4 * number), 4)[:3]

    def _sum_groups(self, number: int) -> None:
        """Sums each group of digits; four threads share a group."""
        thread_counts: list[Any] = []
        for first in range(0, OWN, 4):
            thread_counts += load(
                self.smem, times(self.thread, 4 * OWN), 4 * (BINS * number + first), 4
            )
        total = plus(*thread_counts)
        for distance in (1, 2):
            total = plus(total, self._lanes(SWAP, total, distance))
        with utils.when(self._equal(arith.andi(self.thread, word(3)), word(0))):
            store(total, self.smem, self.thread, 4 * (SUMS + GROUPS * number))

    def _find(self, digit_pass: int, k_left: Any) -> None:
        """Run by one warp: finds the group of the digit, with four groups per lane, then the
        digit."""
        place = times(self.lane, 16), 4 * (SUMS + GROUPS * digit_pass)
        group_counts = self._sum_cluster_words(*place, 4)
        num_above = self._suffix_sum_lanes(plus(*group_counts))
        group = num_above_group = word(0)
        for j in reversed(range(4)):
            contains_kth = self._contains_kth(num_above, group_counts[j], k_left)
            group = arith.select(contains_kth, plus(times(self.lane, 4), word(j)), group)
            num_above_group = arith.select(contains_kth, num_above, num_above_group)
            num_above = plus(num_above, group_counts[j])
        # All but one lane have 0.
        group, num_above_group = self._redux_warp(group), self._redux_warp(num_above_group)
        digit = plus(times(group, BINS // GROUPS), self.lane)
        [digit_count] = self._sum_cluster_words(times(digit, 4), 4 * BINS * digit_pass, 1)
        num_above = plus(num_above_group, self._suffix_sum_lanes(digit_count))
        with utils.when(self._contains_kth(num_above, digit_count, k_left)):
            found = joined([digit, arith.subi(k_left, num_above), digit_count, word(0)])
            store(found, self.smem, word(0), 4 * (FOUND + 4 * digit_pass))

    def _suffix_sum_lanes(self, lane_count: Any) -> Any:
        """Returns the sum over the lanes after this one."""
        suffix_sum = lane_count
        for distance in (1, 2, 4, 8, 16):
            suffix_sum = self._lanes(DOWN, suffix_sum, distance)
        return arith.subi(suffix_sum, lane_count)

    def _contains_kth(self, num_above: Any, count: Any, k_left: Any) -> Any:
        """Whether the last selected number is among `count` numbers that have `num_above` numbers
        above them."""
        reaches_k = arith.cmpi(arith.CmpIPredicate.uge, plus(num_above, count), k_left)
        return arith.andi(self._less(num_above, k_left), reaches_k)

    def _sum_cluster_words(self, offset: Any, fixed: int, words: int) -> list[Any]:
        """Returns words of shared memory, summed over the cluster's CTAs."""
        words_per_cta = [
            self._load_cta_words(word(i), offset, fixed, words) for i in range(self.blocks)
        ]
        return [plus(*cta_words) for cta_words in zip(*words_per_cta, strict=True)]

    def _load_cta_words(self, block: Any, offset: Any, fixed: int, words: int) -> list[Any]:
        """Loads words of a CTA's shared memory."""
        if self.blocks == 1:
            return load(self.smem, offset, fixed, words)
        constraints = ",".join(["=r"] * words) + ",r,r,~{memory}"
        return asm(
            OF_BLOCK[words], [i32()] * words, [self._shared(offset, fixed), block], constraints
        )

    def _write(self, threshold: Any, num_equal_wanted: Any) -> None:
        """Writes the places of the numbers above the threshold, and of the first
        `num_equal_wanted` equal ones."""

        def kinds(four: list[Any]) -> list[Any]:
            """1 for a number above the threshold, 2**16 for an equal one, else 0."""
            kinds = []
            for key in four:
                above = arith.cmpi(arith.CmpIPredicate.sgt, key, threshold)
                equal = arith.select(self._equal(key, threshold), word(2**16), word(0))
                kinds.append(arith.select(above, word(1), equal))
            return kinds

        def parts(sums: Any) -> tuple[Any, Any]:
            return arith.andi(sums, word(0xFFFF)), arith.shrui(sums, word(16))

        count = self._each([word(0)], lambda carry, _, four: [plus(*carry, *kinds(four))])
        counts = [self._redux_warp(x) for x in parts(*count)]
        with utils.when(self._equal(self.lane, word(0))):
            for i, x in enumerate(counts):
                store(x, self.smem, times(self.warp, 8), 4 * (COUNTS + i))
        self._sync()
        before = self._prefix_sum_cluster()
        if self.blocks > 1:  # the others may exit once this CTA has read their counts
            asm("barrier.cluster.arrive.release.aligned;", [], [], "~{memory}", convergent=True)
        row_address = llvm.ptrtoint(
            ir.IntegerType.get_signless(64),
            pointer(self.out, times(self.row, 4 * self.top_k)),
        )

        def write(carry: list[Any], first: Any, four: list[Any]) -> list[Any]:
            kind_of_keys = kinds(four)
            lane_total = plus(*kind_of_keys)
            inclusive_sum = lane_total
            for distance in (1, 2, 4, 8, 16):
                inclusive_sum = self._lanes(UP, inclusive_sum, distance)
            total = self._lanes("shfl.sync.idx.b32 $0, $1, {}, 0x1f, -1;", inclusive_sum, 31)
            with utils.when(arith.cmpi(arith.CmpIPredicate.ne, lane_total, word(0))):
                before = arith.subi(inclusive_sum, lane_total)
                for j, one in enumerate(kind_of_keys):
                    here = zip(carry, parts(before), strict=True)
                    num_above_before, num_equal_before = (plus(x, y) for x, y in here)
                    is_above, is_equal = parts(one)
                    is_first_equal = arith.extui(
                        i32(), self._less(num_equal_before, num_equal_wanted)
                    )
                    is_selected = arith.ori(is_above, arith.andi(is_equal, is_first_equal))
                    index = plus(num_above_before, arith.minui(num_equal_before, num_equal_wanted))
                    byte_offset = arith.extui(ir.IntegerType.get_signless(64), times(index, 4))
                    operands = [
                        arith.addi(row_address, byte_offset),
                        plus(first, word(j)),
                        is_selected,
                    ]
                    asm(WRITE, [], operands, "l,r,r,~{memory}")
                    before = plus(before, one)
            return [plus(x, y) for x, y in zip(carry, parts(total), strict=True)]

        self._each(list(before), write)
        if self.blocks > 1:
            asm("barrier.cluster.wait.acquire.aligned;", [], [], "~{memory}", convergent=True)

    def _prefix_sum_cluster(self) -> tuple[Any, Any]:
        """Returns the sums of the counts of all warps of the cluster before this one."""
        num_above = num_equal = word(0)
        for first in range(0, self.blocks * WARPS, 32):
            warp = plus(self.lane, word(first))
            clamped = arith.minui(warp, word(self.blocks * WARPS - 1))
            word_offset = times(arith.andi(clamped, word(WARPS - 1)), 8)
            block = arith.shrui(clamped, word(WARPS.bit_length() - 1))
            pair = self._load_cta_words(block, word_offset, 4 * COUNTS, 2)
            is_earlier = self._less(warp, self.team)
            num_above, num_equal = (
                plus(x, arith.select(is_earlier, y, word(0)))
                for x, y in zip((num_above, num_equal), pair, strict=True)
            )
        return self._redux_warp(num_above), self._redux_warp(num_equal)

    def _shared(self, offset: Any, fixed: int) -> Any:
        """Returns an address in shared memory, as a word."""
        return llvm.ptrtoint(i32(), pointer(self.smem, offset, fixed))

    def _lanes(self, code: str, x: Any, number: int) -> Any:
        return asm(code.format(number), [i32()], [x], "=r,r", convergent=True)[0]

    def _redux_warp(self, x: Any) -> Any:
        code = "redux.sync.add.u32 $0, $1, 0xffffffff;"
        return asm(code, [i32()], [x], "=r,r", convergent=True)[0]

    def _less(self, x: Any, y: Any) -> Any:
        return arith.cmpi(arith.CmpIPredicate.ult, x, y)

    def _equal(self, x: Any, y: Any) -> Any:
        return arith.cmpi(arith.CmpIPredicate.eq, x, y)
