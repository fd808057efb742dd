"""A step's codes as register operands, with a stand-in for the interpreter.

Both terms (fp8_split.py) are columns n and N + n of one product, and `joined_terms` adds them up.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.turboquant.codec import E4M3, TurboFormat, of_levels
from jaxattn.core.turboquant.slot_layout import GROUP, ungroup, unpack
from jaxattn.kernels.attention.packed_row_layouts import SCORES
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.hopper.mlir import arith, ir, mgpu, utils, vector
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm_word,
    f32,
    fragmented,
    joined,
    load,
    number,
    plus,
    register_constant,
    single,
    times,
    word,
)
from jaxattn.kernels.turboquant.cache.lut_dequantization import (
    GROUPS,
    key_registers,
    key_table,
    middle,
    value_registers,
    value_table,
)
from jaxattn.kernels.turboquant.fp8_split import SECOND_TERM
from jaxattn.kernels.turboquant.smem import summed_dims


class WordRegisters:
    """The `WordOpsProtocol` of a thread; `ref` is a step's codes, `low` the held constant, if
    any."""

    def __init__(self, ref: Any, low: Any = None):
        place = WarpgroupThread()
        self.low = low
        self.ref, self.warp, self.g, self.t = ref, place.warp, place.g, place.t

    def plus(self, *terms: Any) -> Any:
        return plus(*terms)

    def times(self, x: Any, by: int) -> Any:
        return times(x, by)

    def both(self, x: Any, mask: int) -> Any:
        return arith.andi(x, word(mask))

    def either(self, x: Any, y: Any) -> Any:
        return arith.ori(x, y)

    def right(self, x: Any, by: int) -> Any:
        return arith.shrui(x, word(by))

    def left(self, x: Any, by: int) -> Any:
        return arith.shli(x, word(by))

    def constant(self, value: int) -> Any:
        return word(value)

    def held(self, value: int) -> Any:
        return word(value) if self.low is None else self.low

    def permute(self, low: Any, high: Any, selectors: Any) -> Any:
        return asm_word("prmt.b32 $0, $1, $2, $3;", low, high, selectors, movable=True)

    def choose(self, x: Any, equals: int, this: Any, that: Any) -> Any:
        return arith.select(arith.cmpi(arith.CmpIPredicate.eq, x, word(equals)), this, that)

    def load(self, at: Any, fixed: int, count: int) -> list[Any]:
        return load(self.ref, at, fixed, count)


class TurboOperands:
    """The operands of a step's codes, in the form of `TurboDecodeSmem.codes`.

    Args:
        form: The cache's format.
        pitch: Bytes from a group of 16 tokens to the next.
        interpret: Whether the interpreter runs; its operands are float32, and its products plain.
    """

    def __init__(self, form: TurboFormat, pitch: int, *, interpret: bool):
        self.form, self.pitch, self.interpret = form, pitch, interpret
        self.middle = middle(form.value_bits)
        key_low = key_table(form.key_bits)[0] if form.rotated else 0
        self.lows = [
            None if interpret else register_constant(x)
            for x in (key_low, value_table(form.value_bits)[0])
        ]

    def keys(self, codes: Any) -> tuple[jax.Array, ...]:
        """Returns operands [64 tokens, dims] of some dims each, without their norms."""
        dims = summed_dims(self.form)
        blocks = self.form.head_dim // dims
        if self.interpret:
            stored = self._stored(codes)
            if not self.form.rotated:
                wide = lax.bitcast_convert_type(stored.keys, E4M3).astype(jnp.float32)
            else:
                wide = of_levels(self.form.key_bits, stored.keys)
            return tuple(wide[:, i * dims : (i + 1) * dims] for i in range(blocks))
        return self._operands(codes, key_registers, (PAGE, dims), blocks, self.lows[0])

    def values(self, codes: Any) -> tuple[jax.Array, ...]:
        """Returns operands [64 dims, 64 tokens] of 64 dims each, counted from the middle of the
        codes."""
        blocks = self.form.head_dim // PAGE
        if self.interpret:
            wide = (self._stored(codes).values.astype(jnp.float32) - self.middle).T
            return tuple(wide[i * PAGE : (i + 1) * PAGE] for i in range(blocks))
        return self._operands(codes, value_registers, (PAGE, PAGE), blocks, self.lows[1])

    def numbers(self, codes: Any, scores: jax.Array) -> tuple[jax.Array | None, Any, Any]:
        """Returns each token's (norm or None, scale, value of the middle code), as `scores`
        [N, 64]."""
        if self.interpret:
            stored = self._stored(codes)
            kinds = [stored.norm] if stored.norm is not None else []
            kinds += [stored.scale, stored.minimum]
            wide = [jnp.broadcast_to(x.astype(jnp.float32), scores.shape) for x in kinds]
        else:
            count = self.form.meta_bytes // 2
            out = plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, SCORES)
            run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCORES), return_type=(out,) * count)
            wide = run(lambda ctx, ref, like: self._numbers(ref, like, count))(codes, scores)
        *norm, scale, minimum = wide
        return (norm[0] if norm else None), scale, minimum + scale * self.middle

    def _stored(self, codes: Any) -> Any:
        groups = codes[...].reshape(GROUPS, -1)[:, : GROUP * self.form.slot_bytes]
        return unpack(self.form, ungroup(self.form, groups).reshape(PAGE, -1))

    def _operands(
        self, codes: Any, made: Any, shape: tuple[int, int], count: int, low: Any
    ) -> tuple[jax.Array, ...]:
        def run(ctx: Any, ref: Any, *lows: Any) -> Any:
            four = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
            words = made(WordRegisters(ref, *map(single, lows)), self.form, self.pitch)
            registers = [vector.bitcast(four, joined([x])) for x in words]
            size = len(registers) // count
            parts = [registers[i * size : (i + 1) * size] for i in range(count)]
            return tuple(fragmented(some, shape, mgpu.WGMMA_LAYOUT_8BIT) for some in parts)

        out = plgpu.ShapeDtypeStruct(shape, E4M3, plgpu.Layout.WGMMA_8BIT)
        lows = () if low is None else (low,)
        types = plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * len(lows)
        return plgpu.inline_mgpu(arg_types=types, return_type=(out,) * count)(run)(codes, *lows)

    def _numbers(self, codes: Any, scores: Any, count: int) -> Any:
        """A thread has the same four tokens in each row."""
        four = arith.andi(utils.thread_idx(), word(15))
        at = plus(
            times(arith.shrui(four, word(2)), self.pitch), times(arith.andi(four, word(3)), 8)
        )
        first = GROUP * (self.form.key_bytes + self.form.value_bytes)
        halves = ir.VectorType.get((4,), ir.F16Type.get())
        wide = ir.VectorType.get((4,), f32())
        found = []
        for kind in range(count):
            words = joined(load(codes, at, first + 2 * GROUP * kind, 2))
            some = arith.extf(wide, vector.bitcast(halves, words))
            found.append(fragmented([some] * scores.registers.size, scores.shape, scores.layout))
        return tuple(found)


def joined_terms(product: jax.Array, *, interpret: bool) -> jax.Array:
    """Returns [M, N] from a product [M, 2 N] whose columns are both terms."""
    rows, columns = product.shape[0], product.shape[1] // 2
    if interpret:
        return product[:, :columns] + product[:, columns:] * (1 / SECOND_TERM)

    def run(ctx: Any, x: Any) -> Any:
        return x[:, :columns] + x[:, columns:] * number(1 / SECOND_TERM)

    layout = plgpu.Layout.WGMMA
    out = plgpu.ShapeDtypeStruct((rows, columns), jnp.float32, layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=out)(run)(product)
