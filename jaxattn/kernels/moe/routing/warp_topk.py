"""The K best of a token's scores, computed by each warp for itself: no warp waits for another.

A lane has every 32nd expert in registers. A score becomes a word with the same order, so that one
instruction finds the best of a warp's lanes, and another the lowest expert that has it. A NaN is
better than any number.
"""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, utils
from jaxattn.kernels.hopper.ptx import asm, asm_word, i32, load, plus, store, times, word

LANES = 32
# Maps a float's bits: all of them inverted if it is negative, else only the highest.
ORDERED = (
    "{ .reg .b32 sign; shr.s32 sign, $1, 31; or.b32 sign, sign, 0x80000000; xor.b32 $0, $1, sign; }"
)
TAKEN = 0  # below every number, -inf included
NOBODY = 0xFFFFFFFF


def warp_topk(scores: Any, ids: Any, top_k: int) -> None:
    """Writes the places of the best scores; equal ones in the order of their places.

    Args:
        scores: float32 [E] in shared memory, a multiple of 32.
        ids: int32 [K] in shared memory, which every warp writes with the same values.
    """
    plain = plgpu.RefType()
    plgpu.inline_mgpu(arg_types=(plain, plain))(
        lambda _, scores, ids: _best(scores, ids, scores.type.shape[0], top_k)
    )(scores, ids)


def _best(scores: Any, ids: Any, experts: int, top_k: int) -> None:
    lane = arith.andi(utils.thread_idx(), word(LANES - 1))
    numbers, keys = [], []
    for first in range(0, experts, LANES):
        [bits] = load(scores, times(lane, 4), 4 * first, 1)
        keys.append(asm_word(ORDERED, bits, movable=True))
        numbers.append(plus(lane, word(first)))
    for k in range(top_k):
        best = _redux_warp("max", _tree(arith.maxui, keys))
        mine = [
            arith.select(_equal(key, best), number, word(NOBODY))
            for key, number in zip(keys, numbers, strict=True)
        ]
        place = _redux_warp("min", _tree(arith.minui, mine))
        store(place, ids, word(4 * k))
        keys = [
            arith.select(_equal(number, place), word(TAKEN), key)
            for key, number in zip(keys, numbers, strict=True)
        ]


def _equal(x: Any, y: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.eq, x, y)


def _redux_warp(what: str, x: Any) -> Any:
    code = f"redux.sync.{what}.u32 $0, $1, 0xffffffff;"
    return asm(code, [i32()], [x], "=r,r", convergent=True)[0]


def _tree(combine: Any, values: list[Any]) -> Any:
    """Reduces all values by `combine`, two neighbors at a time."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [*(combine(x, y) for x, y in pairs), *values[len(values) // 2 * 2 :]]
    return values[0]
