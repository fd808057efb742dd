"""4-bit weights in tiles, in the kernels' layout: codes, scales and zero points side by side.

A matrix [R, K] is stored as [R / 64, K / C, bytes], tiles of [64, C]. C is 64 columns, or 128 if
these share a scale. A tile begins with its codes. Lane 4 g + t of warp w holds rows 16 w + g and
the one 8 below, as wgmma needs its left operand in registers: one word per row and 32 columns. A
thread thus reads 64 columns as 16 bytes: both rows of the first 32, then both rows of the others.

    word        number h of pair j is column 8 j + 2 t + h, in the half h
    INT4        pair j has the bits 4 j to 4 j + 3 of its half, less 8 or the zero point
    MXFP4       pair j has the bits 3 j to 3 j + 2, exponent and mantissa, and a sign `SIGNS[j]`

After the codes follow the scales, [32, groups, 2] for (w, g), the tile's groups and both rows:
bytes of E8M0, or 16 bits each. With zero points, each scale is followed by its own in 16 bits.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

ROWS, WORD_COLUMNS, UNIT = 64, 32, 64
MOST_POWER = 192  # of E8M0 in tiles: 2**65, to which larger scales are clipped
SIGNS = (13, 12, 15, 14)  # bit of MXFP4's signs by pair, in their half of a word
MXFP4_GROUP, INT4_GROUPS = 32, (32, 128)

type Kind = Literal["mxfp4", "int4"]
type ScaleDType = Literal["e8m0", "bfloat16", "float16"]
INT4_SCALES: tuple[ScaleDType, ...] = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class FourBitFormat:
    """The interpretation of 4-bit numbers.

    Attributes:
        kind: "mxfp4" is a sign, two bits of exponent and one of mantissa; "int4" is an integer.
        group: Number of columns that share a scale.
        scale: Dtype of the scales; "e8m0" are powers of two.
        zeros: Whether each group has its own zero point; otherwise it is 8.

    Raises:
        ValueError: The kernels do not support the format; the message lists the supported ones.
    """

    kind: Kind
    group: int = 32
    scale: ScaleDType = "bfloat16"
    zeros: bool = False

    def __post_init__(self) -> None:
        if self.kind == "mxfp4":
            served = (self.group, self.scale, self.zeros) == (MXFP4_GROUP, "e8m0", False)
        else:
            served = self.group in INT4_GROUPS and self.scale in INT4_SCALES
        if not served:
            raise ValueError(
                f"{self} is not implemented: MXFP4 needs e8m0 scales of {MXFP4_GROUP} columns and "
                f"no zero points, and INT4 needs bfloat16 or float16 scales of {INT4_GROUPS} "
                "columns"
            )

    @property
    def columns(self) -> int:
        """The number of columns per tile."""
        return max(self.group, UNIT)

    @property
    def code_bytes(self) -> int:
        """The bytes of a tile before its scales."""
        return ROWS * self.columns // 2

    @property
    def scale_bytes(self) -> int:
        """The bytes of the scales of a thread's two rows, with their zero points."""
        each = 1 if self.scale == "e8m0" else 4 if self.zeros else 2
        return 2 * (self.columns // self.group) * each

    @property
    def tile_bytes(self) -> int:
        return self.code_bytes + ROWS // 2 * self.scale_bytes

    def with_scales(self, dtypes: Collection[str | None]) -> "FourBitFormat | None":
        """Returns the format with the dtype of a checkpoint's scales.

        Returns None if the scales have several dtypes, or one that the format does not support.
        """
        if self.scale == "e8m0" or len(dtypes) != 1:
            return self if set(dtypes) == {"uint8"} else None
        for dtype in INT4_SCALES:
            if set(dtypes) == {dtype}:
                return dataclasses.replace(self, scale=dtype)
        return None

    def fits(self, rows: int, columns: int) -> bool:
        """Returns whether a matrix consists of whole tiles."""
        return rows % ROWS == 0 and columns % self.columns == 0

    def tiles(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Returns the shape of a matrix in tiles.

        Raises:
            ValueError: The matrix does not consist of whole tiles.
        """
        if not self.fits(rows, columns):
            raise ValueError(
                f"matrix [{rows}, {columns}] does not divide into tiles of {ROWS} x {self.columns}"
            )
        return rows // ROWS, columns // self.columns, self.tile_bytes

    def matrix(self, tiles: tuple[int, ...]) -> tuple[int, int]:
        """Returns (rows, columns) of a matrix from the last three sizes of its tiles."""
        return tiles[-3] * ROWS, tiles[-2] * self.columns


def pack(
    codes: Int[Array, "*n R K"],
    scales: Array,
    zeros: Int[Array, "*n R G"] | None,
    form: FourBitFormat,
) -> UInt8[Array, "*n r c B"]:
    """Packs a matrix into tiles.

    Args:
        codes: Codes of 4 bits each, in the format's encoding.
        scales: [*n, R, K / group] in the format's dtype; E8M0 as uint8.
        zeros: Zero points of the same shape, for a format that has them.
    """
    *stack, rows, columns = codes.shape
    down, across, _ = form.tiles(rows, columns)
    words = form.columns // WORD_COLUMNS
    # Row 16 w + 8 r + g of a tile, column 32 n + 8 j + 2 t + h.
    each = codes.astype(jnp.uint16).reshape(*stack, down, 4, 2, 8, across, words, 4, 4, 2)
    parts: Any = [each[..., j, :, :] for j in range(4)]
    if form.kind == "int4":
        halves = [part << 4 * j for j, part in enumerate(parts)]
    else:
        halves = [(part & 7) << 3 * j | (part >> 3) << SIGNS[j] for j, part in enumerate(parts)]
    half = halves[0] | halves[1] | halves[2] | halves[3]  # [*n, down, w, r, g, across, n, t, h]
    half = half.reshape(*half.shape[:-3], words // 2, 2, 4, 2)
    # To [*n, down, across, unit, w, g, t, n % 2, r, h].
    half = _permute(half, len(stack), (0, 4, 5, 1, 3, 7, 6, 2, 8))
    code_bytes = _bytes(half).reshape(*stack, down, across, form.code_bytes)
    groups = form.columns // form.group

    def by_thread(x: Array) -> Array:
        x = x.reshape(*stack, down, 4, 2, 8, across, groups)
        return _permute(x, len(stack), (0, 4, 1, 3, 5, 2))  # [*n, down, across, w, g, group, r]

    scales = by_thread(scales)
    if form.scale == "e8m0":
        scales = jnp.minimum(scales, MOST_POWER)
    else:
        scales = lax.bitcast_convert_type(scales.astype(form.scale), jnp.uint16)
    if form.zeros:
        assert zeros is not None
        scales = jnp.stack([scales, by_thread(zeros.astype(jnp.uint16))], axis=-1)
    scale_bytes = scales if form.scale == "e8m0" else _bytes(scales)
    scale_bytes = scale_bytes.reshape(*stack, down, across, -1).astype(jnp.uint8)
    return jnp.concatenate([code_bytes, scale_bytes], axis=-1)


def unpack(
    tiles: UInt8[Array, "*n r c B"], form: FourBitFormat
) -> tuple[Int[Array, "*n R K"], Array, Int[Array, "*n R G"] | None]:
    """Inverts `pack`: returns codes, scales and zero points."""
    *stack, down, across, _ = tiles.shape
    rows, columns = form.matrix(tiles.shape)
    words, groups = form.columns // WORD_COLUMNS, form.columns // form.group
    code_bytes, rest = tiles[..., : form.code_bytes], tiles[..., form.code_bytes :]
    half = _halves(code_bytes).reshape(*stack, down, across, words // 2, 4, 8, 4, 2, 2, 2)
    half = _permute(half, len(stack), (0, 3, 7, 4, 1, 2, 6, 5, 8))
    half = half.reshape(*stack, down, 4, 2, 8, across, words, 4, 2)
    if form.kind == "int4":
        parts = [half >> 4 * j & 15 for j in range(4)]
    else:
        parts = [half >> 3 * j & 7 | (half >> SIGNS[j] & 1) << 3 for j in range(4)]
    codes = jnp.stack(parts, axis=-3).reshape(*stack, rows, columns)

    def by_row(x: Array) -> Array:
        x = x.reshape(*stack, down, across, 4, 8, groups, 2)
        return _permute(x, len(stack), (0, 2, 5, 3, 1, 4)).reshape(*stack, rows, -1)

    if form.scale == "e8m0":
        return codes.astype(jnp.uint8), by_row(rest), None
    numbers, zeros = _halves(rest), None
    if form.zeros:
        pairs = numbers.reshape(*numbers.shape[:-1], -1, 2)
        numbers, zeros = pairs[..., 0], by_row(pairs[..., 1]).astype(jnp.uint8)
    scales = lax.bitcast_convert_type(by_row(numbers), jnp.dtype(form.scale))
    return codes.astype(jnp.uint8), scales, zeros


def dequantize(
    tiles: UInt8[Array, "*n r c B"], form: FourBitFormat, dtype: DTypeLike
) -> Float[Array, "*n R K"]:
    """Returns the numbers: each code times its scale in float32, rounded once."""
    codes, scales, zeros = unpack(tiles, form)
    if form.kind == "mxfp4":
        groups = codes.reshape(*scales.shape, MXFP4_GROUP)
        return from_e2m1(groups, scales[..., None]).reshape(codes.shape).astype(dtype)
    groups = codes.reshape(*scales.shape, form.group).astype(jnp.int32)
    groups = groups - (8 if zeros is None else zeros[..., None].astype(jnp.int32))
    wide = groups.astype(jnp.float32) * scales[..., None].astype(jnp.float32)
    return wide.reshape(codes.shape).astype(dtype)


def quantize(weights: Float[Array, "*n R K"], form: FourBitFormat) -> UInt8[Array, "*n r c B"]:
    """Rounds weights without a 4-bit checkpoint to the format's nearest numbers."""
    groups = weights.astype(jnp.float32).reshape(*weights.shape[:-1], -1, form.group)
    most = jnp.maximum(jnp.abs(groups).max(-1), 2.0**-60)
    if form.kind == "mxfp4":
        exponent = jnp.floor(jnp.log2(most)).astype(jnp.int32) - 2
        numbers = groups * jnp.exp2(-exponent.astype(jnp.float32))[..., None]
        codes = jnp.sum(jnp.abs(numbers)[..., None] > jnp.asarray(BETWEEN), axis=-1)
        codes = codes | jnp.where(numbers < 0, 8, 0)
        return pack(codes.reshape(weights.shape), (exponent + 127).astype(jnp.uint8), None, form)
    low, high = jnp.minimum(groups.min(-1), 0), jnp.maximum(groups.max(-1), 0)
    step = jnp.maximum(high - low, 2.0**-60) / 15 if form.zeros else most / 7
    scales = step.astype(form.scale)
    wide = scales.astype(jnp.float32)
    zeros = jnp.clip(jnp.round(-low / wide), 0, 15) if form.zeros else jnp.full(wide.shape, 8.0)
    numbers = jnp.round(groups / wide[..., None]) + zeros[..., None]
    codes = jnp.clip(numbers, 0, 15).astype(jnp.uint8)
    return pack(codes.reshape(weights.shape), scales, zeros.astype(jnp.uint8), form)


BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints between neighbors of E2M1


def from_e2m1(codes: Int[Array, "..."], scales: Int[Array, "..."]) -> Float[Array, "..."]:
    """Converts 4-bit numbers (sign, two exponent bits, one mantissa bit) times 2**(scales - 127).

    The function assembles the bits, because devices flush products below 2**-126 to 0. As in
    transformers, a scale of 255 is 2**128.
    """
    codes, scales = codes.astype(jnp.uint16), scales.astype(jnp.int32)
    sign, exponent, mantissa = codes >> 3 << 15, (codes >> 1 & 3).astype(jnp.int32), codes & 1
    small = exponent == 0  # 0 and 0.5
    power = scales + jnp.where(small, -1, exponent - 1)
    # The leading 1 and the mantissa's bit, in the positions of bfloat16's seven mantissa bits.
    significand = jnp.where(small, 128 * mantissa, 128 | mantissa << 6)
    normal = power.astype(jnp.uint16) << 7 | significand & 127
    subnormal = significand >> jnp.clip(1 - power, 0, 15).astype(jnp.uint16)
    bits = jnp.where(power > 0, normal, subnormal)
    bits = jnp.where(power > 254, 0x7F80, bits)
    bits = jnp.where(significand == 0, 0, bits)
    return lax.bitcast_convert_type((bits | sign).astype(jnp.uint16), jnp.bfloat16)


def _permute(x: Array, first: int, order: tuple[int, ...]) -> Array:
    """Reorders the axes after the `first`; those that `order` omits stay last."""
    rest = range(len(order), x.ndim - first)
    return jnp.transpose(x, (*range(first), *(first + i for i in (*order, *rest))))


def _bytes(halves: Int[Array, "..."]) -> UInt8[Array, "..."]:
    """Converts 16-bit numbers to bytes, little-endian."""
    return lax.bitcast_convert_type(halves, jnp.uint8).reshape(*halves.shape[:-1], -1)


def _halves(bytes_: UInt8[Array, "*n B"]) -> Int[Array, "*n b"]:
    """Converts bytes to 16-bit numbers."""
    return lax.bitcast_convert_type(bytes_.reshape(*bytes_.shape[:-1], -1, 2), jnp.uint16)
