"""Access to single registers of a thread, for what Pallas has no operation for: words, PTX,
fragments.

All functions run inside `plgpu.inline_mgpu`, where an array is a `FragmentedArray`: the registers
that the thread holds of it. Each register is an MLIR value, mostly a vector of two numbers. A word
is an int32 value.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, ir, llvm, mgpu, utils, vector


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def f32() -> Any:
    return ir.F32Type.get()


def word(value: int) -> Any:
    """Returns a constant word, from 0 to 2**32 - 1 or negative."""
    return mgpu.c(value - 2**32 if value >= 2**31 else value, i32())


def number(value: float) -> Any:
    """Returns a float32 constant."""
    return mgpu.c(value, f32())


def plus(*terms: Any) -> Any:
    """Returns the sum of words."""
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def times(x: Any, by: int) -> Any:
    """Returns a word times a constant."""
    return arith.muli(x, word(by))


class WarpgroupThread:
    """The thread's position: `index` in its warpgroup, the index `warp` of its warp, and lane 4
    `g` + `t`."""

    def __init__(self) -> None:
        index = utils.thread_idx()
        self.index = arith.andi(index, word(127))
        self.warp = arith.andi(arith.shrui(index, word(5)), word(3))
        self.g = arith.andi(arith.shrui(index, word(2)), word(7))
        self.t = arith.andi(index, word(3))


def single(scalar: Any) -> Any:
    """Returns the value of a scalar that `inline_mgpu` was given in the layout WG_SPLAT."""
    return scalar.registers.item()


def joined(values: list[Any]) -> Any:
    """Returns a vector of values of one type."""
    return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), values)


def pairs(values: list[Any]) -> list[Any]:
    """Returns vectors of two, as most fragments consist of."""
    return [joined(values[i : i + 2]) for i in range(0, len(values), 2)]


def element(of: Any, index: int) -> Any:
    """Returns a vector's element."""
    return vector.extract(of, [], [index])


def fragmented(registers: Any, shape: tuple[int, ...], layout: Any) -> Any:
    """Returns the array [*shape] of which the thread holds these registers, in the layout's
    order."""
    registers = np.array(list(registers), dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def pointer(ref: Any, offset: Any, fixed: int = 0) -> Any:
    """Returns a pointer `offset` + `fixed` bytes after the beginning of `ref`; in global memory the
    offset may have 64 bits."""
    byte = ir.IntegerType.get_signless(8)
    place = utils.memref_ptr(ref)
    for dynamic, static in (([offset], -(2**31)), ([], fixed)):
        flags = llvm.GEPNoWrapFlags.none
        place = llvm.getelementptr(place.type, place, dynamic, [static], byte, flags)
    return place


def load(ref: Any, offset: Any, fixed: int, words: int, of: Any = None) -> list[Any]:
    """Loads `words` words of shared memory, or values `of` another type, from `pointer` on."""
    loaded = llvm.load(ir.VectorType.get((words,), of or i32()), pointer(ref, offset, fixed))
    return [element(loaded, i) for i in range(words)]


def store(value: Any, ref: Any, offset: Any, fixed: int = 0) -> None:
    """Stores a value or a vector to memory, from `pointer` on."""
    llvm.store(value, pointer(ref, offset, fixed))


def asm(
    code: str,
    results: list[Any],
    operands: list[Any],
    constraints: str,
    *,
    movable: bool = False,
    convergent: bool = False,
) -> list[Any]:
    """Emits a line of PTX: `results` are types, and one value is returned for each.

    Args:
        constraints: LLVM's, of results and then operands: r is a word, f a float32 number.
        movable: Whether the compiler may move it, merge equal ones, or drop it if its results are
            unused.
        convergent: Whether it must not be moved into a branch, like instructions of a whole warp.
    """
    if not results:
        of_all = ir.Type.parse("!llvm.void")
    else:
        of_all = results[0] if len(results) == 1 else llvm.StructType.get_literal(results)
    out = llvm.inline_asm(
        of_all,
        operands,
        code,
        constraints,
        has_side_effects=not movable,
        convergent=convergent or None,
    )
    if len(results) <= 1:
        return [out] * len(results)
    return [llvm.extractvalue(of_one, out, [i]) for i, of_one in enumerate(results)]


# $1 plus the upper bits of the lane's number, which are 0. Shuffles that move nothing hide from
# ptxas that these bits are 0, and that $1 is a constant.
HELD = (
    "{ .reg .b32 some; mov.u32 some, %laneid; shfl.sync.bfly.b32 some, some, 0, 0x1f, -1; "
    "shr.u32 some, some, 5; add.u32 some, some, $1; shfl.sync.bfly.b32 $0, some, 0, 0x1f, -1; }"
)


def register_constant(value: int) -> jax.Array:
    """Returns a constant word that stays in a register. ptxas rematerializes a constant for each
    use that takes no immediate, but it does not see that this word is one. Call it outside of
    loops."""
    out = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(return_type=out)
    def make(_: Any) -> Any:
        (x,) = asm(HELD, [i32()], [word(value)], "=r,r", convergent=True)
        return mgpu.FragmentedArray.splat(x, (), is_signed=True)

    return make()


def without_constants(x: jax.Array, layout: Any, zero: jax.Array) -> jax.Array:
    """Returns x of 16 bits, as a register operand of more than one wgmma; `zero` is a
    `register_constant`.

    ptxas 13.0 may write a part of such an operand that it knows to be constant after the first
    wgmma, which then reads the register's previous contents. Here it knows of no constant part.
    """
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=(layout, splat),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout),
    )
    def run(_: Any, x: Any, zero: Any) -> Any:
        def both(pair: Any) -> Any:
            return llvm.bitcast(pair.type, arith.ori(llvm.bitcast(i32(), pair), single(zero)))

        return fragmented([both(pair) for pair in x.registers.flat], x.shape, x.layout)

    return run(x, zero)


def zeros(shape: tuple[int, int]) -> jax.Array:
    """Returns the initial float32 accumulators of a product. Here ptxas sees that they are 0, and
    starts the product without them. A constant from another basic block would be copied as a whole.
    """
    out = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(return_type=out)
    def make(_: Any) -> Any:
        (x,) = asm("mov.f32 $0, 0f00000000;", [f32()], [], "=f")
        return mgpu.FragmentedArray.splat(x, shape, mgpu.WGMMA_LAYOUT)

    return make()


def asm_word(code: str, *words: Any, movable: bool = False) -> Any:
    """Emits a line of PTX that computes a word, $0, from words."""
    constraints = ",".join(["=r"] + ["r"] * len(words))
    return asm(code, [i32()], list(words), constraints, movable=movable)[0]


def mma(kind: str, left: list[Any], right: list[Any], sums: list[Any]) -> list[Any]:
    """Returns a warp's [16, 8] float32: sums + left [16, 16] right [16, 8], in registers of two
    numbers."""
    code = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0,$1,$2,$3}}, "
        "{$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return asm(code, [f32()] * 4, [*left, *right, *sums], "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")


def tree(combine: Callable[[Any, Any], Any], values: list[Any]) -> Any:
    """Reduces all values by `combine`, two neighbors at a time; their number is a power of two."""
    while len(values) > 1:
        values = [combine(x, y) for x, y in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def reduce_lanes(combine: Callable[[Any, Any], Any], x: Any, lanes: int) -> Any:
    """Reduces x by `combine` over groups of `lanes` neighboring lanes, a power of two; each lane
    gets the result."""
    distance = 1
    while distance < lanes:
        x = combine(x, utils.shfl_bfly(x, distance))
        distance *= 2
    return x
