"""Matrix products that accumulate in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

# float32: the exponent's bias, and the position of its lowest bit.
FLOAT_BIAS, EXPONENT_AT = 127, np.int32(23)
# Numbers from 2**15 on are scaled down, before they exceed float16's range.
FLOAT16_EXPONENT = 15
# Powers of two to which the delta rules then scale a state's rows, and a chunk's addition before X,
# which may enlarge it.
STATE_TO, ADDED_TO = 14, 8


def summed(spec: str, a: Array, b: Array) -> Array:
    """Computes `einsum(spec, a, b)`, summed in float32 (float64 for float64), without TF32.

    XLA's CPU backend does not support some layouts of 16-bit operands; `dot` supports all.
    """
    wide = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
    exact = lax.Precision.HIGHEST if a.dtype == wide else None
    return jnp.einsum(spec, a, b, precision=exact, preferred_element_type=wide)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def matmul(spec: str, a: Array, b: Array, dtype: jnp.dtype) -> Float[Array, "..."]:
    """Computes `einsum(spec, a, b)` of operands rounded to `dtype`, in float32.

    The gradient rounds its operands in the same way. By default a float32 cotangent would turn the
    backward matmuls of bfloat16 operands into slow float32 ones.
    """
    return summed(spec, a.astype(dtype), b.astype(dtype))


def _matmul_forward(spec: str, a: Array, b: Array, dtype: jnp.dtype):
    x, y = a.astype(dtype), b.astype(dtype)
    # Empty arrays carry the operands' dtypes, because a residual must be an array.
    return summed(spec, x, y), (x, y, jnp.zeros(0, a.dtype), jnp.zeros(0, b.dtype))


def _matmul_backward(spec: str, dtype: jnp.dtype, residuals, cotangent: Array):
    x, y, like_a, like_b = residuals
    inputs, out = spec.split("->")
    left, right = inputs.split(",")
    cotangent = cotangent.astype(dtype)
    da = summed(f"{out},{right}->{left}", cotangent, y)
    db = summed(f"{left},{out}->{right}", x, cotangent)
    return da.astype(like_a.dtype), db.astype(like_b.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes an einsum summed in float32 (float64 for float64), with no TF32 for float32."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    product = partial(summed, spec)
    if dtype == wide:
        return product(a, b)

    # XLA's CPU backend lacks a bfloat16 product summed in float32 for some layouts (jax 0.11.2).
    # The product of the operands in float32 gives the same number.
    def widened(a: jax.Array, b: jax.Array) -> jax.Array:
        return product(a.astype(wide), b.astype(wide))

    return lax.platform_dependent(a, b, cpu=widened, default=product)


def float16_scale(largest: jax.Array, to: int) -> tuple[jax.Array, jax.Array]:
    """Returns powers of two, float32, that scale numbers for float16 and scale products back.

    Up to 2**15 both are 1. Beyond, the largest number is scaled to at least 2**to. Infinities and
    NaN do not change.

    Args:
        largest: The largest magnitude, float32; it has no gradient.
        to: FLOAT16_EXPONENT - 1, or less if products of the numbers must also fit.
    """
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent = lax.shift_right_logical(bits, EXPONENT_AT) - FLOAT_BIAS
    shift = jnp.where(exponent >= FLOAT16_EXPONENT, exponent - to, 0)

    def power(biased: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(lax.shift_left(biased, EXPONENT_AT), jnp.float32)

    return power(FLOAT_BIAS - shift), power(FLOAT_BIAS + shift)
