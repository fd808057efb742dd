"""Lookup-table dequantization: TurboQuant codes to register operands of an FP8 wgmma, by byte
permutes.

A register holds four e4m3 numbers: for keys [64 tokens, D], four dims of a token; for values
[D, 64 tokens], four tokens of a dim. The order of the codes is in turboquant/slot_layout.py. One
PRMT selects a byte of a table of eight for each of four nibbles; a sign is or-ed to it. The
operations per number, except the PRMTs, are

    keys      0 operations of 8 bits, 0.88 of 4, 0.66 of 3
    values    1.13 of 4 bits, 1.63 of 3

The code does not depend on the type of a word (`WordOpsProtocol`): on the GPU it is a register of
each thread, in tests an array of all 128 threads' registers.
"""

from typing import Any, Protocol

import numpy as np

from jaxattn.core.turboquant.codec import E4M3, TurboFormat, levels
from jaxattn.core.turboquant.slot_layout import GROUP
from jaxattn.kernels.attention.split_kv_schedule import PAGE

GROUPS = PAGE // GROUP  # of a step
SIGNS = 0x80808080
SIZES = 0x77777777  # of a code without its sign, or without another code's bits
# The bits of a fourth word in three words, after shifting these to the right by 1, 2 and 3.
SPARE = (0x44444444, 0x22222222, 0x11111111)
EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531  # of two words, the first one's first


class WordOpsProtocol(Protocol):
    """32-bit words of a warpgroup's threads, and a step's codes in shared memory.

    Attributes:
        warp, g, t: Each thread's position: lane 4 g + t of a warp.

    `held` is a constant that stays in a register, for an operand that cannot be an immediate.
    """

    warp: Any
    g: Any
    t: Any

    def plus(self, *terms: Any) -> Any: ...
    def times(self, x: Any, by: int) -> Any: ...
    def both(self, x: Any, mask: int) -> Any: ...
    def either(self, x: Any, y: Any) -> Any: ...
    def right(self, x: Any, by: int) -> Any: ...
    def left(self, x: Any, by: int) -> Any: ...
    def permute(self, low: Any, high: Any, selectors: Any) -> Any: ...
    def constant(self, value: int) -> Any: ...
    def held(self, value: int) -> Any: ...
    def choose(self, x: Any, equals: int, this: Any, that: Any) -> Any: ...
    def load(self, at: Any, fixed: int, count: int) -> list[Any]: ...


def _table(numbers: Any) -> tuple[int, int]:
    """Returns eight e4m3 numbers as two words."""
    low, high = np.asarray(numbers, np.float32).astype(E4M3).view(np.uint32)
    return int(low), int(high)


def key_table(bits: int) -> tuple[int, int]:
    """Returns the sizes of 16 levels, or 8 levels."""
    return _table(levels(bits)[8:] if bits == 4 else levels(bits))


def value_table(bits: int) -> tuple[int, int]:
    """Returns, for a code counted from the middle, its size, or the number itself."""
    return _table(np.arange(8) + 0.5 if bits == 4 else np.arange(8) - 3.5)


def _held(on: WordOpsProtocol, table: tuple[int, int]) -> tuple[Any, Any]:
    """Returns a table's words. One operand of a permute may be an immediate."""
    return on.held(table[0]), on.constant(table[1])


def middle(bits: int) -> float:
    """Returns the middle of the codes of values."""
    return (2**bits - 1) / 2


def key_registers(on: WordOpsProtocol, form: TurboFormat, pitch: int) -> list[Any]:
    """Returns the registers of [64 tokens, D]: for each 16 dims, those of tokens g and then of
    8 + g.

    Args:
        pitch: Bytes from a group of 16 tokens to the next.
    """
    blocks, bits = form.head_dim // 64, form.key_bits
    lane = on.plus(on.times(on.g, 4), on.t)
    group = on.times(on.warp, pitch)
    if bits == 8:
        at = on.plus(group, on.times(lane, 16))
        return [x for c in range(2 * blocks) for x in on.load(at, 512 * c, 4)]
    low, high = _held(on, key_table(bits))
    if bits == 4:
        at = on.plus(group, on.times(lane, 16))
        some: list[Any] = []
        for b in range(blocks):
            words = on.load(at, 512 * b, 4)
            for c in range(2):
                halves = [_eight(on, low, high, x) for x in words[2 * c : 2 * c + 2]]
                some += [one[j] for j in range(2) for one in halves]
        return some
    at = on.plus(group, on.times(lane, 12 * blocks))
    words = [x for i in range(3) for x in on.load(at, 4 * blocks * i, blocks)]
    some = []
    for b in range(blocks):
        three = words[3 * b : 3 * b + 3]
        for word in (*(on.both(x, SIZES) for x in three), _fourth(on, three)):
            some += [on.permute(low, high, word), on.permute(low, high, on.right(word, 16))]
    return some


def value_registers(on: WordOpsProtocol, form: TurboFormat, pitch: int) -> list[Any]:
    """Returns the registers of [D, 64 tokens]: for each 64 dims and each 16 tokens, the dims g,
    then 8 + g."""
    blocks, bits = form.head_dim // 64, form.value_bits
    low, high = _held(on, value_table(bits))
    of_group: list[list[tuple[Any, Any]]] = []
    for number in range(GROUPS):
        first = number * pitch + GROUP * form.key_bytes
        if bits == 4:
            thread = on.plus(on.times(on.warp, 32), on.times(on.g, 4), on.t)
            words = on.load(on.times(thread, 4 * blocks), first, blocks)
        else:
            words = _three_bit_values(on, first, blocks)
        of_group.append([_four_tokens(on, low, high, x, signed=bits == 4) for x in words])
    return [of_group[n][m][h] for m in range(blocks) for n in range(GROUPS) for h in range(2)]


def _eight(on: WordOpsProtocol, low: Any, high: Any, word: Any) -> tuple[Any, Any]:
    """Returns the numbers of a word of keys, four and four."""
    sizes = on.both(word, SIZES)
    first = on.permute(low, high, sizes)
    second = on.permute(low, high, on.right(sizes, 16))
    return (
        on.either(first, on.both(word, SIGNS)),
        on.either(second, on.both(on.left(word, 4), SIGNS)),
    )


def _fourth(on: WordOpsProtocol, three: list[Any]) -> Any:
    """Returns the word in the highest bits of three words' nibbles."""
    moved = [on.both(on.right(x, i + 1), SPARE[i]) for i, x in enumerate(three)]
    return on.either(on.either(moved[0], moved[1]), moved[2])


def _four_tokens(
    on: WordOpsProtocol, low: Any, high: Any, word: Any, *, signed: bool
) -> tuple[Any, Any]:
    """Returns the numbers of two dims, from a word of values with one token per byte."""
    sizes = on.both(word, SIZES) if signed else word
    first = on.permute(low, high, sizes)
    second = on.permute(low, high, on.right(sizes, 16))
    dims = [
        on.permute(first, second, on.constant(which)) for which in (EVEN_BYTES, ODD_BYTES)
    ]  # fmt: skip
    if not signed:
        return dims[0], dims[1]
    signs = on.both(on.left(word, 4), SIGNS), on.both(word, SIGNS)
    return on.either(dims[0], signs[0]), on.either(dims[1], signs[1])


def _three_bit_values(on: WordOpsProtocol, first: int, blocks: int) -> list[Any]:
    """A thread with g % 4 == 3 has the bits that the three threads before it hold."""
    place, size = on.both(on.g, 3), 16 * blocks
    rows = on.plus(on.times(on.warp, 2), on.right(on.g, 2))
    at = on.plus(on.times(rows, 3 * size), on.times(on.t, 4 * blocks))
    mine = on.plus(at, on.times(on.choose(place, 3, on.constant(0), place), size))
    others = [on.load(at, first + r * size, blocks) for r in (1, 2)]
    return [
        on.choose(place, 3, _fourth(on, [own, *two]), on.both(own, SIZES))
        for own, *two in zip(on.load(mine, first, blocks), *others, strict=True)
    ]
