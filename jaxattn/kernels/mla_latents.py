"""How `mla_decode_columns` takes 64 tokens of a cache to shared memory, as keys of 16 bits.

A 16-bit cache comes by TMA as it is. An FP8 cache comes to registers, a page ahead of its use, and
is widened on its way to shared memory: a thread takes 8 numbers of a token at a time, so that it
reads 8 bytes beside its neighbours' and writes 16 without a conflict.
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
from jaxlib.mlir.dialects import vector

from jaxattn.kernels.mla_body import RANK, ROPE
from jaxattn.mla_cache import BLOCK, BYTES, FP8

BLOCKS = RANK // BLOCK  # of a token's numbers that share a scale
FIRST_SCALE = RANK  # byte of a block-scaled token
FIRST_ROPE = FIRST_SCALE + 4 * BLOCKS


def _rows_of(width: int, vector: int) -> Any:
    """Registers of [n, width]: `vector` numbers a thread, threads side by side along a row."""
    across = width // vector
    down = 32 // across
    tiling = plgpu.Tiling(((4 * down, width), (down, width), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


NUMBERS = _rows_of(BLOCK, 8)
ROPE_NUMBERS = _rows_of(ROPE, 8)
ROPE_BYTES = _rows_of(2 * ROPE, 16)
SCALE_OF_ROW = NUMBERS.reduce(1)


def _scale_layouts(tokens: int) -> tuple[Any, Any]:
    """Of [tokens, 4] bytes and of the [tokens] float32 that they are: a token a thread."""
    down = tokens // 4
    lanes = (-2, plgpu.Replicated(32 // down))
    as_bytes = plgpu.Tiling(((tokens, 4), (down, 4)))
    as_floats = plgpu.Tiling(((tokens,), (down,), (1,)))
    return (
        plgpu.Layout.TILED(as_bytes, warp_dims=(-4,), lane_dims=lanes, vector_dim=-1),
        plgpu.Layout.TILED(as_floats, warp_dims=(-3,), lane_dims=lanes, vector_dim=-1),
    )


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


class Latents:
    """An FP8 cache's tokens on their way: what a thread holds of them, in `STEPS` steps.

    Step 0 is the rope numbers and the scales, step i + 1 the numbers of block i.

    Args:
        dtype: of the cache, float8_e4m3fn or uint8 (block-scaled).
        tokens: that lie together in the cache, of the 64 that are taken at a time.
    """

    STEPS = 1 + BLOCKS

    def __init__(self, dtype: Any, tokens: int, interpret: bool):
        self.scaled = dtype == BYTES
        self.tokens = tokens
        self.interpret = interpret
        self.scale_bytes, self.scale_floats = _scale_layouts(tokens)

    def fetch(self, source: Any, step: int) -> list[jax.Array]:
        """What the cache holds of `source` [tokens, Ds], as it is stored."""

        def load(first: int, width: int, layout: Any) -> jax.Array:
            some = source.at[:, pl.ds(first, width)]
            return plgpu.load(some, layout=layout, optimized=False)

        if step > 0:
            return [load((step - 1) * BLOCK, BLOCK, NUMBERS)]
        if not self.scaled:
            return [load(RANK, ROPE, ROPE_NUMBERS)]
        scales = [load(FIRST_SCALE + 4 * i, 4, self.scale_bytes) for i in range(BLOCKS)]
        return [load(FIRST_ROPE, 2 * ROPE, ROPE_BYTES), *scales]

    def unpack(self, fetched: list[jax.Array], step: int, kv: Any, rope: Any, scale: Any) -> None:
        """Writes what was fetched to shared memory, as bfloat16: kv [tokens, R], rope [tokens, P].

        Per-tensor numbers are written without their scale, which is the caller's; of block-scaled
        ones `scale` [4, tokens] has the scales from step 0 on.
        """
        tokens = self.tokens
        if step > 0:
            value = self._wide(fetched[0])
            if self.scaled:
                of_row = plgpu.load(scale.at[step - 1], layout=SCALE_OF_ROW)
                of_row = lax.broadcast_in_dim(of_row, (tokens, BLOCK), [0])
                value *= plgpu.layout_cast(of_row, NUMBERS)
            kv[:, pl.ds((step - 1) * BLOCK, BLOCK)] = value.astype(jnp.bfloat16)
        elif self.scaled:
            layouts = ROPE_BYTES, ROPE_NUMBERS
            shape = tokens, ROPE
            rope[...] = _reinterpret(fetched[0], jnp.bfloat16, shape, *layouts, self.interpret)
            layouts = self.scale_bytes, self.scale_floats
            for i, some in enumerate(fetched[1:]):
                scale[i] = _reinterpret(some, jnp.float32, (tokens,), *layouts, self.interpret)
        else:
            rope[...] = self._wide(fetched[0]).astype(jnp.bfloat16)

    def _wide(self, x: jax.Array) -> jax.Array:
        x = lax.bitcast_convert_type(x, FP8) if self.scaled else x
        return x.astype(jnp.float32)
