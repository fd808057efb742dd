"""How tokens of an FP8 cache, in shared memory as they are stored, become numbers of 16 bits.

A token is taken in `STEPS` steps of 128 bytes: its rope numbers, then block after block of 128
dims. A thread takes 8 bytes of a token at a time, so that it reads them beside its neighbours' and
writes 16 without a conflict.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jaxattn.kernels.mla_body import RANK, ROPE
from jaxattn.kernels.mla_schedule import PAGE
from jaxattn.mla_cache import BLOCK, BYTES, FP8

BLOCKS = RANK // BLOCK  # of a token's numbers that share a scale
STEPS = 1 + BLOCKS
FIRST_SCALE = RANK  # byte of a block-scaled token
SCALE_BYTES = 4 * BLOCKS
FIRST_ROPE = FIRST_SCALE + SCALE_BYTES


def _rows_of(width: int, vector: int) -> Any:
    """Registers of [n, width]: `vector` numbers a thread, threads side by side along a row."""
    across = width // vector
    down = 32 // across
    tiling = plgpu.Tiling(((4 * down, width), (down, width), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


NUMBERS = _rows_of(BLOCK, 8)
ROPE_NUMBERS = _rows_of(ROPE, 8)
ROPE_BYTES = _rows_of(2 * ROPE, 16)


def _beside_numbers(width: int) -> Any:
    """Registers of [n, width]: all of a row with each of the threads that have its `NUMBERS`."""
    tiling, lanes = plgpu.Tiling(((8, width), (2, width))), (-2, plgpu.Replicated(16))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=lanes, vector_dim=-1)


SCALES, SCALES_AS_BYTES = _beside_numbers(BLOCKS), _beside_numbers(SCALE_BYTES)


def _reinterpret(x: jax.Array, dtype: Any, shape: Any, old: Any, new: Any, interpret: bool) -> Any:
    """A thread's bytes as wider numbers: Mosaic has no bitcast of its own to another width."""
    if interpret:
        return lax.bitcast_convert_type(x.reshape(*shape, -1), dtype)

    @plgpu.inline_mgpu(arg_types=(old,), return_type=plgpu.ShapeDtypeStruct(shape, dtype, new))
    def cast(ctx: Any, x: Any) -> Any:
        del ctx
        to = utils.dtype_to_ir_type(jnp.dtype(dtype))
        layout = new.to_mgpu()
        width = jnp.dtype(dtype).itemsize
        registers = x.registers.copy()
        for index, register in enumerate(x.registers.flat):
            (numbers,) = ir.VectorType(register.type).shape
            registers.flat[index] = vector.bitcast(
                ir.VectorType.get((numbers // width,), to), register
            )
        return mgpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape(shape)),
            _layout=layout,
            _is_signed=None,
        )

    return cast(x)


def _times_scale(numbers: jax.Array, scales: jax.Array, block: int, interpret: bool) -> jax.Array:
    """numbers [64, 128] * scales [64, 4] of their first column, in pairs of bfloat16: exact, since
    a scale is a power of two."""
    if interpret:
        return numbers * scales[:, block : block + 1]

    @plgpu.inline_mgpu(
        arg_types=(NUMBERS, SCALES),
        return_type=plgpu.ShapeDtypeStruct(numbers.shape, numbers.dtype, NUMBERS),
    )
    def times(ctx: Any, numbers: Any, scales: Any) -> Any:
        del ctx
        registers = numbers.registers.copy()
        pairs = zip(numbers.registers.flat, scales.registers.flat, strict=True)
        for index, (some, of_token) in enumerate(pairs):
            scale = vector.extract(of_token, [], [block])
            registers.flat[index] = arith.mulf(some, vector.broadcast(some.type, scale))
        return mgpu.FragmentedArray(_registers=registers, _layout=numbers.layout, _is_signed=None)

    return times(numbers, scales)


class Latents:
    """
    Args:
        dtype: of the cache, float8_e4m3fn or uint8 (block-scaled).
    """

    def __init__(self, dtype: Any, interpret: bool):
        self.scaled = dtype == BYTES
        self.interpret = interpret

    def columns(self, step: int) -> Any:
        """Of the cache's last axis, those that a step wants in shared memory: 128 of them."""
        if step > 0:
            return pl.ds((step - 1) * BLOCK, BLOCK)
        # The rope numbers of a per-tensor cache are 64, and come with the 64 before them.
        return pl.ds(FIRST_ROPE if self.scaled else RANK + ROPE - BLOCK, BLOCK)

    def read_scales(self, source: Any) -> jax.Array:
        """bfloat16 [64, 4] of the tokens' scales [64, 16] as bytes."""
        some = plgpu.load(source, layout=SCALES_AS_BYTES, optimized=False)
        layouts = SCALES_AS_BYTES, SCALES
        scales = _reinterpret(some, jnp.float32, (PAGE, BLOCKS), *layouts, self.interpret)
        return scales.astype(jnp.bfloat16)

    def read_rope(self, source: Any) -> jax.Array:
        """What a thread widens of `source` [64, 128] in step 0."""
        if self.scaled:
            return plgpu.load(source, layout=ROPE_BYTES, optimized=False)
        some = source.at[:, pl.ds(BLOCK - ROPE, ROPE)]
        return plgpu.load(some, layout=ROPE_NUMBERS, optimized=False)

    def read(self, source: Any) -> jax.Array:
        """What a thread widens of `source` [64, 128] in a later step."""
        return plgpu.load(source, layout=NUMBERS, optimized=False)

    def widen_rope(self, some: jax.Array) -> jax.Array:
        """bfloat16 [64, 64]; of a per-tensor cache, here and below, without its scale."""
        if not self.scaled:
            return self._wide(some)
        layouts = ROPE_BYTES, ROPE_NUMBERS
        return _reinterpret(some, jnp.bfloat16, (PAGE, ROPE), *layouts, self.interpret)

    def widen(self, some: jax.Array, block: int, scales: Any) -> jax.Array:
        """bfloat16 [64, 128]."""
        if not self.scaled:
            return self._wide(some)
        value = self._wide(lax.bitcast_convert_type(some, FP8))
        return _times_scale(value, scales, block, self.interpret)

    def _wide(self, numbers: jax.Array) -> jax.Array:
        return numbers.astype(jnp.float32).astype(jnp.bfloat16)
