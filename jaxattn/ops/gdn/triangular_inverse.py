"""The inverse of unit lower triangular matrices in plain JAX, with a custom gradient."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxattn.core.numerics.matmul import summed


@jax.custom_vjp
def unit_lower_inverse(a: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """Returns `(I + a)^-1` for strictly lower triangular `a` of a power-of-two size, in float32.

    Rows of diagonal blocks of 8 are substituted forward, then inverses are merged pairwise:
    `[[x, 0], [-y l x, y]]` inverts `[[x^-1, 0], [l, y^-1]]`. Unlike the product
    `(I - a)(I + a^2)(I + a^4)...`, this forms no power of `a`: with equal keys those reach 1e18.
    """
    size = a.shape[-1]
    block = min(size, 8)
    diagonal = _blocks(a, block, range(0, size, block), 0)
    eye = jnp.eye(block, dtype=a.dtype)
    inverse = jnp.broadcast_to(eye, diagonal.shape)
    for i in range(1, block):
        row = eye[i] - jnp.sum(diagonal[..., i, :, None] * inverse, axis=-2)
        inverse = lax.dynamic_update_slice_in_dim(inverse, row[..., None, :], i, axis=-2)
    while block < size:
        below = _blocks(a, block, range(block, size, 2 * block), -block)
        pairs = inverse.reshape(*a.shape[:-2], size // (2 * block), 2, block, block)
        x, y = pairs[..., 0, :, :], pairs[..., 1, :, :]
        inverse = lower_pairs(inverse, -_product(_product(y, below), x))
        block *= 2
    return inverse[..., 0, :, :]


def lower_pairs(
    blocks: Float[Array, "... n b b"], corners: Float[Array, "... n/2 b b"]
) -> Float[Array, "... n/2 2b 2b"]:
    """Returns blocks of twice the size, `[[blocks[0], 0], [corners[0], blocks[1]]]`."""
    size = blocks.shape[-1]
    row, column = jnp.arange(2)[:, None, None, None], jnp.arange(2)[:, None]
    pairs = blocks.reshape(*corners.shape[:-2], 2, size, size)
    # [..., pair, 2, b, 2, b]; XLA's CPU compiler takes twice as long for a concatenation.
    found = jnp.where(row > column, corners[..., None, :, None, :], 0)
    found = jnp.where(row == column, pairs[..., None, :], found)
    return found.reshape(*corners.shape[:-2], 2 * size, 2 * size)


def _blocks(a: Array, size: int, rows: range, offset: int) -> Array:
    """Returns the square blocks of `a` at the given rows, `offset` columns from the diagonal."""
    parts = (a[..., i : i + size, i + offset : i + offset + size] for i in rows)
    return jnp.stack(list(parts), axis=-3)


def _product(a: Array, b: Array) -> Array:
    return summed("...ij,...jk->...ik", a, b)


def _inverse_forward(a: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _inverse_backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_product(_product(transposed, cotangent), transposed), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
