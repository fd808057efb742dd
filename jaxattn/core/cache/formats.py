"""Cache formats: the page size, and the storage of MLA's latents and of keys and values.

A latent is R dims that keys and values share, and P rotated dims. FP8 formats store one scale per
cache (float8_e4m3fn), or one per 128 dims next to the codes (uint8). For keys and values the cache
stores one slot per token and head. A slot holds numbers of one dtype, e4m3 numbers with scales
elsewhere, or TurboQuant's codes with their norm, scale and minimum.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from jaxattn.core.validation.arguments import CACHES
from jaxattn.core.validation.array_checks import FLOATS, check_sizes, is_integer

FP8, BYTES = jnp.dtype("float8_e4m3fn"), jnp.dtype("uint8")
# The bits of e4m3 numbers. XLA on a CPU widens a whole FP8 array, but not one of integers, around a
# write to a part of it and around a gather.
FP8_BITS = jnp.dtype("int8")

# Bits of a key's and of a value's numbers (arXiv 2504.19874, under vLLM's names).
TURBOQUANT = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}
# Values of `Limits.cache_format` and --kv-cache-dtype. "auto" is the model's own format.
CACHE_FORMATS = ("auto", "bfloat16", "fp8", "fp8_block", *TURBOQUANT)


BLOCK = 128  # dims that share a scale
INDEX_KEYS = (*FLOATS, FP8.name)  # dtypes of an indexer's cached keys


FP8_MAX = 448.0


# Exponents of a scale: with the first, the smallest e4m3 number, 2**-9, is the smallest normal
# bfloat16. With the second, the largest, 448, is still a float32 number.
MIN_EXPONENT, MAX_EXPONENT = -117, 119


@dataclasses.dataclass(frozen=True)
class LatentFormat:
    """The storage of a token in a latent cache, `jnp.zeros((L, N, C, format.width), format.dtype)`.

    Attributes:
        dtype: Dtype of the cache, which determines the format.
        kv_lora_rank: R; a multiple of 128 if the cache is uint8.
        qk_rope_head_dim: P; 0 for a model without RoPE.

    Raises:
        TypeError: No format has that dtype, or R or P is not an integer.
        ValueError: R or P does not fit.
    """

    dtype: Any
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.dtype.name not in CACHES:
            raise TypeError(
                f"LatentFormat: dtype must be {' or '.join(CACHES)}, got {self.dtype.name}"
            )
        rank, rope = self.kv_lora_rank, self.qk_rope_head_dim
        for name, size in (("kv_lora_rank", rank), ("qk_rope_head_dim", rope)):
            if not is_integer(size):
                raise TypeError(
                    f"LatentFormat: {name} must be an integer, got {type(size).__name__} {size}"
                )
        if rank < 1 or rope < 0:
            raise ValueError(
                "kv_lora_rank must be at least 1 and qk_rope_head_dim at least 0, got "
                f"{rank} and {rope}"
            )
        if self.block_scaled and rank % BLOCK:
            raise ValueError(
                f"a uint8 (block-scaled) cache needs a kv_lora_rank that is a multiple of {BLOCK}, "
                f"got {rank}; use {FP8.name} with kv_scale"
            )

    @property
    def block_scaled(self) -> bool:
        return bool(self.dtype == BYTES)

    @property
    def per_tensor(self) -> bool:
        """Whether the stored numbers need `kv_scale`."""
        return bool(self.dtype == FP8)

    @property
    def quantized(self) -> bool:
        return self.block_scaled or self.per_tensor

    @property
    def width(self) -> int:
        """The number of elements in the cache's last axis."""
        if self.block_scaled:
            return self.kv_lora_rank + self.kv_lora_rank // BLOCK * 4 + self.qk_rope_head_dim * 2
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def nbytes(self) -> int:
        """The bytes of a token in one layer."""
        return self.width * self.dtype.itemsize

    def pack(self, latent: Float[Array, "*t D"], kv_scale: Any = None) -> Num[Array, "*t Ds"]:
        """Converts latents to the form in which the cache stores them."""
        if not self.quantized:
            return latent.astype(self.dtype)
        if self.per_tensor:
            return _to_fp8(_without_inf(latent) / kv_scale)
        # Sliced first, so that XLA sees that the rotated dims affect no scale.
        rank, tokens = self.kv_lora_rank, latent.shape[:-1]
        blocks = _without_inf(latent[..., :rank]).reshape(*tokens, rank // BLOCK, BLOCK)
        scales = _block_scales(blocks)
        parts = (
            _to_fp8(blocks / scales[..., None]),
            scales,
            latent[..., rank:].astype(jnp.bfloat16),
        )
        return jnp.concatenate([_as_bytes(x).reshape(*tokens, -1) for x in parts], axis=-1)

    def unpack(self, stored: Num[Array, "*t Ds"], kv_scale: Any = None) -> Float[Array, "*t D"]:
        """Converts stored latents back, to float32 if they are quantized, otherwise unchanged.

        The conversion is differentiable in `kv_scale`, but not in quantized numbers.
        """
        if self.per_tensor:
            return lax.stop_gradient(stored).astype(jnp.float32) * kv_scale
        if not self.block_scaled:
            return stored
        rank, tokens = self.kv_lora_rank, stored.shape[:-1]
        blocks = rank // BLOCK
        numbers, scales, rope = jnp.split(stored, [rank, rank + 4 * blocks], axis=-1)
        numbers = lax.bitcast_convert_type(numbers, FP8).astype(jnp.float32)
        scales = lax.bitcast_convert_type(scales.reshape(*tokens, blocks, 4), jnp.float32)
        rope = lax.bitcast_convert_type(rope.reshape(*tokens, -1, 2), jnp.bfloat16)
        values = numbers.reshape(*tokens, blocks, BLOCK) * scales[..., None]
        return jnp.concatenate([values.reshape(*tokens, rank), rope.astype(jnp.float32)], axis=-1)


@dataclasses.dataclass(frozen=True)
class IndexKeyFormat:
    """The storage of an indexer's keys: numbers of one dtype, or e4m3 with a scale per token.

    The scale is a power of two, or NaN for a key with NaN or Inf.

    Attributes:
        dtype: Dtype of the cache, which determines the format.
        head_dim: Dimension of a key.

    Raises:
        TypeError: No format has that dtype.
    """

    dtype: Any
    head_dim: int = 128

    def __post_init__(self) -> None:
        check_sizes("IndexKeyFormat", head_dim=self.head_dim)
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.dtype.name not in INDEX_KEYS:
            raise TypeError(
                f"IndexKeyFormat: dtype must be {' or '.join(INDEX_KEYS)}, got {self.dtype.name}"
            )

    @property
    def scaled(self) -> bool:
        """Whether the stored numbers need scales, one float32 per token."""
        return bool(self.dtype == FP8)

    def pack(self, keys: Float[Array, "*t D"]) -> tuple[Num[Array, "*t D"], Array | None]:
        """Returns the stored form of `keys`, and their scales or None."""
        if not self.scaled:
            return keys.astype(self.dtype), None
        keys = _without_inf(keys)
        scales = _block_scales(keys)
        numbers = _to_fp8(keys / scales[..., None])
        # The key's scores must be NaN for any query; a kernel that does not widen NaN finds it in
        # the scale.
        return numbers, jnp.where(jnp.isnan(keys).any(axis=-1), jnp.nan, scales)


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """The storage of a token's key and value of one head.

    Attributes:
        name: A floating dtype, "fp8" (e4m3; one scale for all keys and one for all values, or one
            of each per head), or a TurboQuant preset.
        head_dim: D; a power of two for a preset.

    Raises:
        ValueError: No format has the name, or D does not fit.
    """

    name: str
    head_dim: int

    def __post_init__(self) -> None:
        check_sizes("KVFormat", head_dim=self.head_dim)
        if self.name not in (*FLOATS, "fp8", *TURBOQUANT):
            names = ", ".join((*FLOATS, "fp8", *TURBOQUANT))
            raise ValueError(f"KVFormat: name must be one of {names}, got {self.name!r}")
        if self.name in TURBOQUANT and self.head_dim & (self.head_dim - 1):
            raise ValueError(
                f"KVFormat: {self.name} needs a head_dim that is a power of two, got "
                f"{self.head_dim}"
            )

    @classmethod
    def of(cls, dtype: Any, head_dim: int) -> "KVFormat":
        """Returns the format of a cache of floats, of e4m3 numbers, or of their bits."""
        dtype = jnp.dtype(dtype)
        return cls("fp8" if dtype in (FP8, FP8_BITS) else dtype.name, head_dim)

    @property
    def scaled(self) -> bool:
        """Whether the stored numbers need `kv_scale`."""
        return self.name == "fp8"

    @property
    def dtype(self) -> Any:
        """The dtype of the cache's array."""
        if self.name in TURBOQUANT:
            return BYTES
        return FP8 if self.scaled else jnp.dtype(self.name)

    @property
    def nbytes(self) -> int:
        """The bytes of a token's key and value of one head, in one layer."""
        if self.name not in TURBOQUANT:
            return 2 * self.head_dim * int(self.dtype.itemsize)
        key, value = (self.head_dim * bits // 8 for bits in TURBOQUANT[self.name])
        # A float16 norm per key, unless it is e4m3; a float16 scale and minimum per value.
        return key + (0 if TURBOQUANT[self.name][0] == 8 else 2) + value + 4

    def pack(self, kv: Float[Array, "*t 2 Hk D"], kv_scale: Any = None) -> Num[Array, "*t 2 Hk D"]:
        """Converts keys and values to the stored form of a cache of floats or e4m3 numbers.

        In e4m3 finite numbers saturate, and Inf, which e4m3 lacks, becomes NaN.
        """
        if not self.scaled:
            return kv.astype(self.dtype)
        return _to_fp8(_without_inf(kv) / kv_scale[..., None])

    def unpack(
        self, kv: Num[Array, "*t 2 Hk D"], kv_scale: Any = None
    ) -> Float[Array, "*t 2 Hk D"]:
        """Converts stored keys and values back: e4m3 numbers to float32, others unchanged.

        The conversion is differentiable in `kv_scale`, but not in quantized numbers.
        """
        if not self.scaled:
            return kv
        numbers = kv if kv.dtype == FP8 else lax.bitcast_convert_type(kv, FP8)
        return lax.stop_gradient(numbers).astype(jnp.float32) * kv_scale[..., None]

    def round_trip(
        self, kv: Float[Array, "*t 2 Hk D"], kv_scale: Any = None
    ) -> Float[Array, "*t 2 Hk D"]:
        """Returns keys and values as a cache returns them.

        In one program, XLA's GPU compiler would omit the rounding of `unpack(pack(kv))`.
        """
        return self.unpack(lax.optimization_barrier(self.pack(kv, kv_scale)), kv_scale)


def _as_bytes(x: jax.Array) -> jax.Array:
    """Returns the little-endian bytes, uint8 [*x.shape, itemsize]; XLA fuses the shifts."""
    word = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.itemsize}"))
    return jnp.stack([(word >> 8 * i).astype(BYTES) for i in range(x.itemsize)], axis=-1)


def _without_inf(latent: jax.Array) -> jax.Array:
    # Before any division or narrowing, where a finite number that overflows must saturate.
    return jnp.where(jnp.isinf(latent), jnp.nan, latent).astype(jnp.float32)


def _to_fp8(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -FP8_MAX, FP8_MAX).astype(FP8)  # the cast makes larger numbers NaN


def _block_scales(blocks: Float[Array, "*t n 128"]) -> Float[Array, "*t n"]:
    """Returns 2**ceil(log2(amax / 448)) of each block, exactly, from the bits of amax.

    The result is from 2**-117 to 2**119. NaN is ignored: it stays NaN by itself, and does not
    affect the numbers that share its scale.
    """
    amax = jnp.max(jnp.where(jnp.isnan(blocks), 0, jnp.abs(blocks)), axis=-1)
    # 448 is 1.75 * 2**8. The carry adds 1 to the exponent of a number above 1.75 * 2**k.
    carried = lax.bitcast_convert_type(amax, jnp.int32) + 0x1FFFFF
    exponent = jnp.clip((carried >> 23) - 8, MIN_EXPONENT + 127, MAX_EXPONENT + 127)
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


PAGE_SIZE = 64
