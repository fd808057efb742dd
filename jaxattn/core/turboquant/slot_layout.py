"""The bytes of a TurboQuant cache: a token's slot, and the layout of 16 slots in memory.

A page of C tokens and one key-value head is C / 16 groups of 16 tokens, one after another:

    group    16 tokens' keys | their values | their float16 numbers, each kind by itself

Within a group, the codes have the order in which the 128 threads of a warpgroup (warp w, lane 4 g +
t) use them for an FP8 wgmma. Adjacent threads thus read adjacent codes. Of keys, a thread has
tokens g and 8 + g; of values, tokens 4 t + i and dims 64 m + 16 w + 8 h + g. No two tokens share a
byte, so appending a token reads nothing.

    keys, 8 bits    [c][g][t][j][h][i]          dim 32 c + 16 j + 4 t + i
    keys, 4 bits    [b][g][t][c][h][word]       dim 64 b + 32 c + 16 j + 4 t + i
    keys, 3 bits    [g][t][b][r][h][half word]  dim 64 b + 16 q + 4 t + i
    values, 4 bits  [w][g][t][m][i]             a byte is dims h = 0 and, above it, h = 1
    values, 3 bits  [w][f][r][t][m][i]          g = 4 f + q

A nibble of four bits holds a sign, set if the code is in the lower half, and the code's distance
from the middle. In a word of keys the signs are separate from their codes: that of code i is at
nibble 2 i + 1, that of code 4 + i at nibble 2 i. Four nibbles of three bits, q, are stored as
three, r: the bits of the fourth are the highest bits of the others.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt8

from jaxattn.core.turboquant.codec import TurboCodes, TurboFormat

GROUP = 16  # tokens
# The code whose sign each nibble of a word of keys holds.
SIGN_OF = (4, 0, 5, 1, 6, 2, 7, 3)
NIBBLE_OF = tuple(SIGN_OF.index(i) for i in range(8))
# Bits of the fourth pair of nibbles that each of the other three holds, one place higher each.
SPARE = (0x44, 0x22, 0x11)


def pack(form: TurboFormat, codes: TurboCodes) -> UInt8[Array, "*t slot"]:
    """Packs each token into a slot: the bytes of its key, its value, and its float16 numbers."""
    parts = [_pack_keys(form, codes.keys), _pack_values(form, codes.values)]
    numbers = [x for x in (codes.norm, codes.scale, codes.minimum) if x is not None]
    words = lax.bitcast_convert_type(jnp.stack(numbers, axis=-1), jnp.uint16)
    both = jnp.stack([words & 0xFF, words >> 8], axis=-1).astype(jnp.uint8)
    parts.append(both.reshape(*words.shape[:-1], -1))
    return jnp.concatenate(parts, axis=-1)


def unpack(form: TurboFormat, slots: UInt8[Array, "*t slot"]) -> TurboCodes:
    """Inverts `pack`."""
    ends = [form.key_bytes, form.key_bytes + form.value_bytes]
    keys, values, numbers = jnp.split(slots, ends, axis=-1)
    pairs = numbers.reshape(*numbers.shape[:-1], -1, 2).astype(jnp.uint16)
    halves = lax.bitcast_convert_type(pairs[..., 0] | pairs[..., 1] << 8, jnp.float16)
    norm = halves[..., 0] if form.rotated else None
    return TurboCodes(
        _unpack_keys(form, keys), _unpack_values(form, values), norm, halves[..., -2],
        halves[..., -1],
    )  # fmt: skip


def group(form: TurboFormat, slots: UInt8[Array, "*p 16 slot"]) -> UInt8[Array, "*p bytes"]:
    """Converts the slots of 16 tokens to the bytes of their group."""
    before = slots.shape[:-2]
    parts = jnp.split(slots, np.cumsum([form.key_bytes, form.value_bytes]).tolist(), axis=-1)
    return jnp.concatenate(
        [
            _permute_axes(part, sizes, order).reshape(*before, -1)
            for part, (sizes, order) in zip(parts, _orders(form), strict=True)
        ],
        axis=-1,
    )


def ungroup(form: TurboFormat, groups: UInt8[Array, "*p bytes"]) -> UInt8[Array, "*p 16 slot"]:
    """Inverts `group`."""
    before = groups.shape[:-1]
    ends = np.cumsum([GROUP * form.key_bytes, GROUP * form.value_bytes]).tolist()
    parts = []
    for part, (sizes, order) in zip(jnp.split(groups, ends, axis=-1), _orders(form), strict=True):
        stored = tuple(sizes[axis] for axis in order)
        back = tuple(np.argsort(order).tolist())
        parts.append(_permute_axes(part, stored, back).reshape(*before, GROUP, -1))
    return jnp.concatenate(parts, axis=-1)


@functools.cache
def places(form: TurboFormat) -> np.ndarray:
    """Returns int32 [16, slot]: the place in a group of each byte of each token's slot."""
    count = GROUP * form.slot_bytes
    numbers = np.arange(count, dtype=np.int32).reshape(GROUP, form.slot_bytes)
    with jax.ensure_compile_time_eval():
        at = np.asarray(jax.jit(group, static_argnums=0)(form, numbers))
    return np.argsort(at).astype(np.int32).reshape(GROUP, form.slot_bytes)


def page_slots(form: TurboFormat, pages: UInt8[Array, "*p bytes"]) -> UInt8[Array, "*p C slot"]:
    """Returns the slots of whole pages."""
    groups = pages.reshape(*pages.shape[:-1], -1, GROUP * form.slot_bytes)
    return ungroup(form, groups).reshape(*pages.shape[:-1], -1, form.slot_bytes)


def slot_pages(form: TurboFormat, slots: UInt8[Array, "*p C slot"]) -> UInt8[Array, "*p bytes"]:
    """Inverts `page_slots`."""
    *before, tokens, size = slots.shape
    groups = slots.reshape(*before, tokens // GROUP, GROUP, size)
    return group(form, groups).reshape(*before, tokens * size)


def _orders(form: TurboFormat) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns (sizes, order) for keys, values and numbers.

    Sizes are the axes of a group's slots, and the order is that in memory.
    """
    blocks = form.head_dim // 64
    keys = {
        # (h g)(c)(t)(j)(i)
        8: ((2, 8, 2 * blocks, 4, 2, 4), (2, 1, 3, 4, 0, 5)),
        # (h g)(b)(c)(t)(bytes of a word)
        4: ((2, 8, blocks, 2, 4, 4), (2, 1, 4, 3, 0, 5)),
        # (h g)(b)(t)(r)(bytes of half a word)
        3: ((2, 8, blocks, 4, 3, 2), (1, 3, 2, 4, 0, 5)),
    }
    values = {
        # (t i)(w)(g)(m)
        4: ((4, 4, 4, 8, blocks), (2, 3, 0, 4, 1)),
        # (t i)(w)(f)(r)(m)
        3: ((4, 4, 4, 2, 3, blocks), (2, 3, 4, 0, 5, 1)),
    }
    numbers = ((GROUP, form.meta_bytes // 2, 2), (1, 0, 2))
    return [keys[form.key_bits], values[form.value_bits], numbers]


def _permute_axes(x: jax.Array, sizes: tuple[int, ...], order: tuple[int, ...]) -> jax.Array:
    """Splits the last axes of x into `sizes`, and reorders them."""
    before = x.shape[: _leading(x.shape, sizes)]
    x = x.reshape(*before, *sizes)
    return x.transpose(*range(len(before)), *(len(before) + axis for axis in order))


def _leading(shape: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Returns how many axes of a shape precede those with as many elements as `sizes`."""
    at, left = len(shape), math.prod(sizes)
    while left > 1:
        at -= 1
        left //= shape[at]
    return at


def _pack_keys(form: TurboFormat, keys: jax.Array) -> jax.Array:
    before, blocks = keys.shape[:-1], form.head_dim // 64
    if form.key_bits == 8:  # (c)(j)(t)(i)
        return _permute_axes(keys, (2 * blocks, 2, 4, 4), (0, 2, 1, 3)).reshape(*before, -1)
    if form.key_bits == 4:  # (c)(j)(t)(i), eight of a thread's side by side
        some = _permute_axes(keys, (2 * blocks, 2, 4, 4), (0, 2, 1, 3)).reshape(*before, -1, 8)
        below, size = _sign_and_magnitude(some)
        return _pack_nibbles(size | _reorder_last_axis(below, SIGN_OF) << 3).reshape(*before, -1)
    # (b)(q)(t)(i), four of a thread's side by side
    some = _permute_axes(keys, (blocks, 4, 4, 4), (0, 2, 1, 3))
    return _pack_three_bits(_pack_nibbles(some), -2).reshape(*before, -1)


def _unpack_keys(form: TurboFormat, stored: jax.Array) -> jax.Array:
    before, blocks = stored.shape[:-1], form.head_dim // 64
    if form.key_bits == 8:
        return _permute_axes(stored, (2 * blocks, 4, 2, 4), (0, 2, 1, 3)).reshape(*before, -1)
    if form.key_bits == 4:
        nibbles = _unpack_nibbles(stored.reshape(*before, -1, 4))
        some = _index(nibbles >> 3, nibbles & 7, NIBBLE_OF)
        return _permute_axes(some, (2 * blocks, 4, 2, 4), (0, 2, 1, 3)).reshape(*before, -1)
    some = _unpack_nibbles(_unpack_three_bits(stored.reshape(*before, blocks, 4, 3, 2), -2))
    return _permute_axes(some, (blocks, 4, 4, 4), (0, 2, 1, 3)).reshape(*before, -1)


def _pack_values(form: TurboFormat, values: jax.Array) -> jax.Array:
    before, blocks = values.shape[:-1], form.head_dim // 64
    some = _permute_axes(values, (blocks, 4, 2, 8), (1, 3, 0, 2))  # (m)(w)(h)(g)
    if form.value_bits == 4:
        below, size = _sign_and_magnitude(some)
        return _pack_nibbles(size | below << 3).reshape(*before, -1)
    some = _pack_nibbles(some).reshape(*before, 4, 2, 4, blocks)
    return _pack_three_bits(some, -2).reshape(*before, -1)


def _unpack_values(form: TurboFormat, stored: jax.Array) -> jax.Array:
    before, blocks = stored.shape[:-1], form.head_dim // 64
    if form.value_bits == 4:
        nibbles = _unpack_nibbles(stored.reshape(*before, -1, 1))
        some = _index(nibbles >> 3, nibbles & 7, (0, 1))
    else:
        some = _unpack_nibbles(
            _unpack_three_bits(stored.reshape(*before, 4, 2, 3, blocks), -2)[..., None]
        )
    return _permute_axes(some, (4, 8, blocks, 2), (2, 0, 3, 1)).reshape(*before, -1)


def _sign_and_magnitude(codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (whether a 4-bit code is in the lower half, its distance from the middle)."""
    below = (codes < 8).astype(jnp.uint8)
    return below, jnp.where(codes < 8, 7 - codes, codes - 8).astype(jnp.uint8)


def _index(signs: jax.Array, size: jax.Array, nibble_of: tuple[int, ...]) -> jax.Array:
    below = _reorder_last_axis(signs, nibble_of) > 0
    return jnp.where(below, 7 - size, size + 8).astype(jnp.uint8)


def _reorder_last_axis(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Reorders the last axis without an index array, which kernels do not support."""
    return jnp.stack([x[..., i] for i in order], axis=-1)


def _pack_nibbles(codes: jax.Array) -> jax.Array:
    """Packs [.., 2 n] to bytes [.., n], the first in the lower half; n = 1 loses its axis."""
    both = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(jnp.uint8)
    return both[..., 0] if both.shape[-1] == 1 else both


def _unpack_nibbles(stored: jax.Array) -> jax.Array:
    """Inverts `_pack_nibbles`, for bytes [.., n]."""
    both = jnp.stack([stored & 15, stored >> 4], axis=-1)
    return both.reshape(*stored.shape[:-1], -1)


def _pack_three_bits(x: jax.Array, axis: int) -> jax.Array:
    """Packs four bytes along an axis, with three bits per nibble, into three."""
    *others, last = (lax.index_in_dim(x, i, axis, keepdims=False) for i in range(4))
    some = [one | (last & SPARE[i]) << 1 + i for i, one in enumerate(others)]
    return jnp.stack(some, axis=axis).astype(jnp.uint8)


def _unpack_three_bits(x: jax.Array, axis: int) -> jax.Array:
    """Inverts `_pack_three_bits`."""
    some = [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(3)]
    last = functools.reduce(jnp.bitwise_or, [one >> 1 + i & SPARE[i] for i, one in enumerate(some)])
    return jnp.stack([*(one & 0x77 for one in some), last], axis=axis).astype(jnp.uint8)
