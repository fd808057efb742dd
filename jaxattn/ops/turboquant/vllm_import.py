"""Import of the slots of vLLM's TurboQuant cache (0.33.0) into this library's pages.

    cache uint8 [N, C, Hk, slot], a slot [key | value], plus one byte if that makes it even

    key     e4m3 D bytes; 4 bits D / 2 bytes, low nibble first; 3 bits 8 codes in 3 bytes
            then, unless it is e4m3, norm in float16
    value   4 or 3 bits as for keys, then scale and minimum in float16

Numbers of several bytes are little-endian. vLLM stores a key's own norm and divides it by the
length of the key's levels when it reads. This library stores the divided norm.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt8

from jaxattn.core.turboquant.codec import LARGEST_F16, TurboCodes, TurboFormat, level_length
from jaxattn.core.turboquant.slot_layout import GROUP, pack, slot_pages
from jaxattn.core.validation.arguments import OpArguments


def import_vllm_slots(
    cache: UInt8[Array, "N C Hk slot"], *, form: TurboFormat
) -> UInt8[Array, "N Hk bytes"]:
    """Converts one layer of vLLM's TurboQuant cache to this library's format.

    Codes, scales, minima and e4m3 keys carry over bit for bit. Quantization levels are e4m3 numbers
    here and float32 in vLLM, so a key differs by at most 2% of its length. The length is the same
    up to float16 rounding.

    Args:
        cache: A cache of vLLM's format `turboquant_` + `form.preset`, with C a multiple of 16.
        form: The format.

    Raises:
        TypeError, ValueError: The cache has a wrong dtype or shape; the message names it.
    """
    arguments = OpArguments("import_vllm_slots")
    cache = arguments.check("cache", cache, "N C Hk slot", ("uint8",))
    if cache.shape[1] % GROUP or cache.shape[-1] != form.slot_bytes:
        raise ValueError(
            f"import_vllm_slots: cache must be [N, C, Hk, {form.slot_bytes}] for {form.preset} at "
            f"head_dim {form.head_dim}, C a multiple of {GROUP}, got {cache.shape}"
        )
    codes = stored_codes(cache, form)
    if codes.norm is not None:
        divided = codes.norm.astype(jnp.float32) / level_length(form.key_bits, codes.keys)
        norm = jnp.clip(divided, -LARGEST_F16, LARGEST_F16).astype(jnp.float16)
        codes = codes._replace(norm=norm)
    return slot_pages(form, pack(form, codes).swapaxes(1, 2))


def stored_codes(cache: UInt8[Array, "*t slot"], form: TurboFormat) -> TurboCodes:
    """Decodes vLLM's slots; a norm is the key's own length."""
    sizes: list[Any] = [form.key_bytes, 2 if form.rotated else 0, form.value_bytes]
    at, parts = 0, []
    for size in (*sizes, 4):
        parts.append(cache[..., at : at + size])
        at += size
    stored, norm_bytes, values, numbers = parts
    norm = _halves(norm_bytes)[..., 0] if form.rotated else None
    both = _halves(numbers)
    keys = _codes(stored, form.key_bits)
    return TurboCodes(keys, _codes(values, form.value_bits), norm, both[..., 0], both[..., 1])


def _codes(stored: jax.Array, bits: int) -> jax.Array:
    if bits == 8:
        return stored
    if bits == 4:
        some = jnp.stack([stored & 15, stored >> 4], axis=-1)
        return some.reshape(*stored.shape[:-1], -1)
    triples = stored.reshape(*stored.shape[:-1], -1, 3).astype(jnp.uint32)
    word = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    some = jnp.stack([word >> 3 * i & 7 for i in range(8)], axis=-1).astype(jnp.uint8)
    return some.reshape(*stored.shape[:-1], -1)


def _halves(stored: jax.Array) -> jax.Array:
    pairs = stored.reshape(*stored.shape[:-1], -1, 2).astype(jnp.uint16)
    return lax.bitcast_convert_type(pairs[..., 0] | pairs[..., 1] << 8, jnp.float16)
