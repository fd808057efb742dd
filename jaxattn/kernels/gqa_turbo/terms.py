"""A number as two e4m3 ones: x rounded, and 16 times what is left.

2**-8 of x is lost at most, as of a bfloat16.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.core.rounding import rounded
from jaxattn.core.turboquant import E4M3
from jaxattn.kernels.gqa_decode.fp8 import EXPONENT_AT, FLOAT_BIAS

SECOND_TERM = 16.0
TERM_EXPONENT = 7  # the largest query of a row is from 2**7 to 2**8


def two_terms(x: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float32 number, at most 448, as two e4m3 ones, the second SECOND_TERM times too large.

    Args:
        first: x in e4m3; outside of a kernel by `rounded`.
    """
    return first, ((x - first.astype(jnp.float32)) * SECOND_TERM).astype(E4M3)


def query_terms(q: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Both terms of queries [..., D], and float32 [...]: what their scores are to be multiplied by,
    a power of two."""
    largest = jnp.max(jnp.abs(q), axis=-1)
    exponent = lax.shift_right_logical(lax.bitcast_convert_type(largest, jnp.int32), EXPONENT_AT)
    # Inf and NaN, and float32's largest and smallest, are divided by less.
    exponent = jnp.clip(exponent, TERM_EXPONENT + 1, 2 * FLOAT_BIAS)

    def power(biased: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(lax.shift_left(biased, EXPONENT_AT), jnp.float32)

    wide = q * power(2 * FLOAT_BIAS + TERM_EXPONENT - exponent)[..., None]
    return *two_terms(wide, rounded(wide, E4M3)), power(exponent - TERM_EXPONENT)
