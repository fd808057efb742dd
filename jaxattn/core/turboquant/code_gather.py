"""Gather of a TurboQuant cache's codes: each number is read from its bytes in the group.

`slot_layout.unpack` transposes the bytes of a group part by part, for which XLA makes several
passes over memory. This module uses a table of the bits of each code, and reads them in one pass.
Both give the same numbers; this one is for many tokens at a time.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt8

from jaxattn.core.turboquant.codec import TurboCodes, TurboFormat
from jaxattn.core.turboquant.slot_layout import GROUP, NIBBLE_OF, places


@dataclasses.dataclass(frozen=True, eq=False)
class CodeBits:
    """Some bits of each number of a group: (byte >> right & mask) << left.

    Attributes:
        byte: int32 [16 D], index of the group's byte.
        right, mask, left: uint8 [16 D].
    """

    byte: np.ndarray
    right: np.ndarray
    mask: np.ndarray
    left: np.ndarray

    def read(self, groups: UInt8[Array, "g bytes"]) -> UInt8[Array, "g n"]:
        # One index per number, so that XLA reads where it writes, in the order of the result.
        first = jnp.arange(groups.shape[0], dtype=jnp.int32)[:, None] * groups.shape[1]
        found = groups.reshape(-1).at[first + self.byte].get(mode="promise_in_bounds")
        return (found >> self.right & self.mask) << self.left


def page_codes(form: TurboFormat, pages: UInt8[Array, "*p bytes"]) -> TurboCodes:
    """Returns the codes of whole pages, [*p, C, D] and [*p, C].

    Args:
        pages: Pages of one head each.
    """
    before, groups = pages.shape[:-1], pages.reshape(-1, GROUP * form.slot_bytes)

    def codes(some: Sequence[CodeBits]) -> jax.Array:
        parts = [bits.read(groups) for bits in some]
        whole = functools.reduce(jnp.bitwise_or, parts)
        return whole.reshape(*before, -1, form.head_dim)

    keys, values = codes(_keys(form)), codes(_values(form))
    if form.key_bits == 4:
        keys = _decode_sign_magnitude(keys)
    if form.value_bits == 4:
        values = _decode_sign_magnitude(values)
    numbers = groups[:, -GROUP * form.meta_bytes :].reshape(len(groups), -1, GROUP, 2)
    pairs = numbers.astype(jnp.uint16)
    halves = lax.bitcast_convert_type(pairs[..., 0] | pairs[..., 1] << 8, jnp.float16)
    of_tokens = [x.reshape(*before, -1) for x in jnp.moveaxis(halves, 1, 0)]
    *norm, scale, minimum = of_tokens
    return TurboCodes(keys, values, norm[0] if norm else None, scale, minimum)


def _decode_sign_magnitude(sized: jax.Array) -> jax.Array:
    """Converts four bits, the distance from the middle and the sign above it, to the code."""
    size = sized & 7
    return jnp.where(sized > 7, 7 - size, size + 8).astype(jnp.uint8)


@functools.cache
def _keys(form: TurboFormat) -> tuple[CodeBits, ...]:
    """Returns the bits of keys: size and sign (4 bits), or parts from three nibbles (3 bits)."""
    d = np.arange(form.head_dim)
    c, j, t, i = d // 32, d // 16 % 2, d // 4 % 4, d % 4
    if form.key_bits == 8:
        return (_bits(form, ((c * 4 + t) * 2 + j) * 4 + i, 0, 255, 0),)
    if form.key_bits == 4:
        word, place = 8 * (4 * c + t), 4 * j + i
        sign = word + np.array(NIBBLE_OF)[place]
        return (
            _nibble(form, word + place, right=0, mask=7),
            _nibble(form, sign, right=3, mask=1, left=3),
        )
    b, q = d // 64, d // 16 % 4
    return _of_three(form, q, [4 * (3 * (4 * b + t) + r) + i for r in range(3)])


@functools.cache
def _values(form: TurboFormat) -> tuple[CodeBits, ...]:
    d, blocks, first = np.arange(form.head_dim), form.head_dim // 64, 2 * form.key_bytes
    m, w, h, g = d // 64, d // 16 % 4, d // 8 % 2, d % 8
    if form.value_bits == 4:
        return (_nibble(form, first + 2 * ((w * 8 + g) * blocks + m) + h, right=0, mask=15),)
    rows = [(w * 2 + g // 4) * 3 + r for r in range(3)]
    return _of_three(form, g % 4, [first + 2 * (row * blocks + m) + h for row in rows])


def _of_three(form: TurboFormat, q: np.ndarray, nibbles: list[np.ndarray]) -> tuple[CodeBits, ...]:
    """Returns nibble q of four that are stored as three, whose highest bits form the fourth."""
    fourth = q == 3
    own = np.select([q == r for r in range(3)], nibbles, nibbles[0])
    return (
        _nibble(form, own, right=np.where(fourth, 3, 0), mask=np.where(fourth, 1, 7),
                left=np.where(fourth, 2, 0)),
        *(
            _nibble(form, nibbles[r], right=3, mask=np.where(fourth, 1, 0), left=2 - r)
            for r in (1, 2)
        ),
    )  # fmt: skip


def _nibble(
    form: TurboFormat, at: np.ndarray, *, right: int | np.ndarray, mask: int | np.ndarray,
    left: int | np.ndarray = 0,
) -> CodeBits:  # fmt: skip
    """Returns bits of a nibble of each token's slot."""
    return _bits(form, at // 2, right + 4 * (at % 2), mask, left)


def _bits(
    form: TurboFormat, at: np.ndarray, right: int | np.ndarray, mask: int | np.ndarray,
    left: int | np.ndarray,
) -> CodeBits:  # fmt: skip
    """Returns bits of a byte of each token's slot, for all 16 tokens of a group."""
    shape = GROUP, form.head_dim
    others = (np.broadcast_to(x, shape).astype(np.uint8).ravel() for x in (right, mask, left))
    return CodeBits(places(form)[:, at].ravel(), *others)
