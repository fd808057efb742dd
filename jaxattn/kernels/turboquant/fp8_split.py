"""A number as two e4m3 terms: x rounded, and 16 times the remainder.

At most 2**-8 of x is lost, as in a bfloat16.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.turboquant.codec import E4M3
from jaxattn.kernels.attention.packed_row_layouts import SCORES
from jaxattn.kernels.gqa.decode.fp8_operands import EXPONENT_AT, FLOAT_BIAS
from jaxattn.kernels.hopper.mlir import arith, ir, vector
from jaxattn.kernels.hopper.ptx import asm, element, f32, fragmented, i32, joined, number

SECOND_TERM = 16.0
TERM_EXPONENT = 7  # the largest query of a row is from 2**7 to 2**8


def divided_queries(
    q: jax.Array, wide: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns queries [N, D] in the range of e4m3, and float32 [N], the factors of their scores,
    which are powers of two.

    Args:
        q: float32.
        wide: Broadcasts a number of each row over the row's dims.
    """
    largest = jnp.max(jnp.abs(q), axis=1)
    exponent = lax.shift_right_logical(lax.bitcast_convert_type(largest, jnp.int32), EXPONENT_AT)
    # NaN, and float32's largest and smallest numbers, are divided by less.
    exponent = jnp.minimum(jnp.maximum(exponent, TERM_EXPONENT + 1), 2 * FLOAT_BIAS)

    def power(biased: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(lax.shift_left(biased, EXPONENT_AT), jnp.float32)

    by = wide(power(2 * FLOAT_BIAS + TERM_EXPONENT - exponent))
    return q * by, power(exponent - TERM_EXPONENT)


def store_terms(targets: tuple[Any, Any], x: jax.Array, *, interpret: bool) -> None:
    """Stores both terms of x [N, K], in the register layout of scores, each to its target [N,
    K]."""
    if interpret:
        first = x.astype(E4M3)
        terms: Any = first, ((x - first.astype(jnp.float32)) * SECOND_TERM).astype(E4M3)
    else:
        out = plgpu.ShapeDtypeStruct(x.shape, E4M3, SCORES)
        run = plgpu.inline_mgpu(arg_types=(SCORES,), return_type=(out, out))
        terms = run(lambda ctx, x: _terms(x))(x)
    for target, term in zip(targets, terms, strict=True):
        target[...] = term


def _terms(x: Any) -> Any:
    four = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
    code = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
    )
    back = (
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; "
        "cvt.rn.f16x2.e4m3x2 $1, high; }"
    )
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    first, second = [], []
    for register in x.registers.flat:
        numbers = [element(register, i) for i in range(4)]
        (packed,) = asm(code, [i32()], numbers, "=r,f,f,f,f", movable=True)
        first.append(vector.bitcast(four, joined([packed])))
        halves = asm(back, [i32(), i32()], [packed], "=r,=r,r", movable=True)
        kept = [vector.bitcast(pair, joined([half])) for half in halves]
        rest = []
        for i, one in enumerate(numbers):
            rounded = arith.extf(f32(), element(kept[i // 2], i % 2))
            rest.append(arith.mulf(arith.subf(one, rounded), number(SECOND_TERM)))
        (packed,) = asm(code, [i32()], rest, "=r,f,f,f,f", movable=True)
        second.append(vector.bitcast(four, joined([packed])))
    return tuple(fragmented(some, x.shape, x.layout) for some in (first, second))
