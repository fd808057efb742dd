"""A block-scaled page's scales, as the two products of `mla_decode` take them.

What is widened has no scales, so that it is exact in bfloat16. Scores are summed block by block in
float32, in units of a block's scales of each token: after a block's product the sum is multiplied by
its scale over the next block's, after the last one's by that block's scale. P is multiplied by a
block's scales before it meets its values.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, utils
from jaxattn.kernels.hopper.registers import (
    Thread,
    f32,
    i32,
    load,
    number,
    plus,
    single,
    store,
    times,
    word,
)
from jaxattn.kernels.mla_decode.rows_memory import BLOCKS, SCALE_BYTES
from jaxattn.kernels.mla_decode.schedule import PAGE

# In scores a scale counts as no less than this part of the token's largest, so that sums in units
# of it are finite: beside that one's its numbers are nothing in float32.
LEAST_PART = 2.0**-40
LEAST = 2.0**-120


def turn_scales(
    stored: Any, scales: Any, left: jax.Array, block: jax.Array, following: jax.Array, *,
    interpret: bool,
) -> None:  # fmt: skip
    """Writes a block's scales of a page.

    Args:
        stored: bytes [64, 16], of each token the scales of its four blocks.
        scales: float32 [2, 4, 64], to be written: what the scores so far are multiplied by behind
            the block's product, and the block's scales, 0 behind the first `left` tokens.
        block: the block, 0 to 3.
        following: the one whose product follows, or -1.
    """
    if interpret:
        _interpreted(stored, scales, left, block, following)
        return
    scalar = plgpu.Layout.WG_SPLAT

    def run(ctx: Any, stored: Any, scales: Any, *scalars: Any) -> None:
        del ctx
        _turn(stored, scales, *(single(x) for x in scalars))

    types = (plgpu.RefType(), plgpu.RefType(), scalar, scalar, scalar)
    plgpu.inline_mgpu(arg_types=types)(run)(stored, scales, left, block, following)


def _interpreted(stored: Any, scales: Any, left: Any, block: Any, following: Any) -> None:
    numbers = lax.bitcast_convert_type(stored[...].reshape(PAGE, BLOCKS, 4), jnp.float32)
    largest = jnp.nanmax(jnp.abs(numbers), axis=1, initial=0.0)
    least = jnp.maximum(largest * LEAST_PART, LEAST)[:, None]
    kept = jnp.where(jnp.abs(numbers) < least, least, numbers)
    pick = lambda x, at: jnp.take(x, at, axis=1)  # noqa: E731
    units = jnp.where(following < 0, 1.0, pick(kept, jnp.maximum(following, 0)))
    scales[0, block] = pick(kept, block) / units
    scales[1, block] = jnp.where(jnp.arange(PAGE) < left, pick(numbers, block), 0)


def _size(x: Any) -> Any:
    """Without its sign."""
    return arith.bitcast(f32(), arith.andi(arith.bitcast(i32(), x), word(0x7FFFFFFF)))


def _turn(stored: Any, scales: Any, left: Any, block: Any, following: Any) -> None:
    """A token a thread."""
    token = Thread().index
    with utils.when(arith.cmpi(arith.CmpIPredicate.slt, token, word(PAGE))):
        first = times(token, SCALE_BYTES)
        each = load(stored, first, 0, BLOCKS, f32())
        largest = number(0.0)
        for x in each:
            largest = arith.maxnumf(largest, _size(x))
        least = arith.maxnumf(arith.mulf(largest, number(LEAST_PART)), number(LEAST))

        def kept(x: Any) -> Any:
            small = arith.cmpf(arith.CmpFPredicate.OLT, _size(x), least)
            return arith.select(small, least, x)

        (mine,) = load(stored, plus(first, times(block, 4)), 0, 1, f32())
        later = arith.maxsi(following, word(0))
        (other,) = load(stored, plus(first, times(later, 4)), 0, 1, f32())
        none = arith.cmpi(arith.CmpIPredicate.slt, following, word(0))
        unit = arith.select(none, number(1.0), kept(other))
        at = plus(times(block, 4 * PAGE), times(token, 4))
        store(arith.divf(kept(mine), unit), scales, at)
        inside = arith.cmpi(arith.CmpIPredicate.slt, token, left)
        store(arith.select(inside, mine, number(0.0)), scales, at, 4 * PAGE * BLOCKS)
