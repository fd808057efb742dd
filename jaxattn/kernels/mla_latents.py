"""How tokens of an FP8 cache, in shared memory as they are stored, become numbers of 16 bits.

A token is taken in `STEPS` steps of 128 bytes: its rope numbers, then block after block of 128
dims. A thread takes 8 bytes of a token at a time, so that it reads them beside its neighbours' and
writes 16 without a conflict.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

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


# Two bytes of a word, each in the low byte of a lane of 16 bits, their signs in its high byte.
LOW_BYTES, HIGH_BYTES = 0x9180, 0xB3A2
# An e4m3 number's bits, put where bfloat16 has its own, are the number times 2**-120.
REBIAS = 0x7B80  # the bits of 2**120


def _bits(word: Any, which: int) -> Any:
    """Two e4m3 numbers of a word, `which` bytes of it, as bfloat16 numbers times 2**-120."""
    code = f"{{ .reg .b32 x; prmt.b32 x, $1, 0, {which}; shl.b32 x, x, 4; "
    return llvm.inline_asm(word.type, [word], code + "and.b32 $0, x, 0x87f087f0; }", "=r,r")


def _times(pair: Any, factor: Any) -> Any:
    """A product of pairs of bfloat16 that keeps numbers below the normal ones."""
    return llvm.inline_asm(pair.type, [pair, factor], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r")


def _carried(some: Any, x: Any, one: Any) -> Any:
    """Sets the sign bits of those parts of x, bytes or halves, whose other bits `one` overflows."""
    return arith.ori(some, arith.xori(x, arith.addi(x, one)))


def _widen(numbers: Any, scales: Any, block: int) -> Any:
    """bfloat16 of a fragment of e4m3 numbers, times the scales [64, 4] of their first column.

    By bits, in 4 instructions for 2 numbers that all run at the full rate; conversions do not. NaN
    and scales from 2**8 on, whose factor is beyond bfloat16, take the conversions: in a branch, as
    they are rare.
    """
    i32, bf16 = ir.IntegerType.get_signless(32), ir.BF16Type.get()
    in_pairs, in_words = ir.VectorType.get((4,), i32), ir.VectorType.get((2,), i32)
    out_type = ir.VectorType.get((8,), bf16)
    word = functools.partial(mgpu.c, ty=i32)
    words, of_tokens = [], []
    rare, rare_scale = word(0), word(0)
    for index, some in enumerate(numbers.registers.flat):
        both = vector.bitcast(in_words, some)
        words.append([vector.extract(both, [], [i]) for i in range(2)])
        for each in words[-1]:
            rare = _carried(rare, each, word(0x01010101))
        if scales is None:
            continue
        scale = vector.extract(scales.registers.flat[index], [], [block])
        pair = vector.broadcast(ir.VectorType.get((2,), bf16), scale)
        pair = vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), pair), [], [0])
        factor = _times(pair, word(REBIAS * 0x10001))
        of_tokens.append((scale, factor))
        rare_scale = _carried(rare_scale, factor, word(0x00800080))
    rare = arith.ori(
        arith.andi(rare, word(0x80808080 - 2**32)), arith.andi(rare_scale, word(0x80008000 - 2**32))
    )
    is_rare = arith.cmpi(arith.CmpIPredicate.ne, rare, word(0))
    size = len(words)
    branch = scf.IfOp(is_rare, [out_type] * size, has_else=True)  # type: ignore[call-arg]
    with ir.InsertionPoint(branch.then_block):
        wide = numbers.astype(ir.F32Type.get()).astype(bf16).registers
        results = list(wide.flat)
        for i, (scale, _) in enumerate(of_tokens):
            results[i] = arith.mulf(results[i], vector.broadcast(out_type, scale))
        scf.yield_(results)
    with ir.InsertionPoint(branch.else_block):
        results = []
        for i in range(size):
            factor = of_tokens[i][1] if of_tokens else word(REBIAS * 0x10001)
            pairs = [
                _times(_bits(each, which), factor)
                for each in words[i]
                for which in (LOW_BYTES, HIGH_BYTES)
            ]
            results.append(vector.bitcast(out_type, vector.from_elements(in_pairs, pairs)))
        scf.yield_(results)
    registers = np.array(list(branch.results), dtype=object).reshape(numbers.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=numbers.layout, _is_signed=None)


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
            return self._wide(some, ROPE_NUMBERS)
        layouts = ROPE_BYTES, ROPE_NUMBERS
        return _reinterpret(some, jnp.bfloat16, (PAGE, ROPE), *layouts, self.interpret)

    def widen(self, some: jax.Array, block: int, scales: Any) -> jax.Array:
        """bfloat16 [64, 128]: exact, since a scale is a power of two."""
        if not self.scaled:
            return self._wide(some, NUMBERS)
        some = lax.bitcast_convert_type(some, FP8)
        if self.interpret:
            return self._wide(some, NUMBERS) * scales[:, block : block + 1]
        return plgpu.inline_mgpu(
            arg_types=(NUMBERS, SCALES),
            return_type=plgpu.ShapeDtypeStruct(some.shape, jnp.bfloat16, NUMBERS),
        )(lambda ctx, numbers, scales: _widen(numbers, scales, block))(some, scales)

    def _wide(self, numbers: jax.Array, layout: Any) -> jax.Array:
        if self.interpret:
            return numbers.astype(jnp.float32).astype(jnp.bfloat16)
        return plgpu.inline_mgpu(
            arg_types=(layout,),
            return_type=plgpu.ShapeDtypeStruct(numbers.shape, jnp.bfloat16, layout),
        )(lambda ctx, numbers: _widen(numbers, None, 0))(numbers)
