"""The packed rows of a pair, in callers' arrays [B, S, H, D]: no copy packs them.

Packed row s * group + j of the pair (row b, KV head h) is token s and query head h * group + j. It
is row (b * S + s) * H + h * group + j of an array [B * S * H, D]. A CTA has packed rows in
multiples of eight: past a pair's last one, loads return the last one again, and stores skip them.

A thread has four neighboring dims of one packed row in eight, as in the layout `SCORES`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.packed_row_layouts import BY_ROW, SCORES
from jaxattn.kernels.gqa.decode.smem import ACROSS
from jaxattn.kernels.hopper.mlir import arith, ir, llvm, mgpu, utils
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    element,
    fragmented,
    joined,
    plus,
    pointer,
    single,
    store,
    times,
    word,
)

WIDTH, OF_THREAD = 64, 4  # dims of a row in half a warp, and in a thread
SPLAT, PLAIN = plgpu.Layout.WG_SPLAT, plgpu.RefType()

# A function of the first of a thread's four dims: the two dims from which on it has two numbers
# each.
Order = Callable[[Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The packed rows of a CTA.

    Attributes:
        q_len: S.
        group: Query heads per KV head.
        kv_heads: Hk.
        columns: Packed rows of the CTA, a multiple of 8.
        first_row: The index of the first of them within the pair.
    """

    q_len: int
    group: int
    kv_heads: int
    columns: int
    first_row: Any
    interpret: bool

    @property
    def used(self) -> int:
        """The number of packed rows of a pair."""
        return self.q_len * self.group

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    def row_of(self, row: Any, head: Any) -> Any:
        """Returns the index of a pair's packed row 0 in [B * S * H, D]."""
        return row * (self.q_len * self.heads) + head * self.group

    def load(
        self, ref: Any, base_row: Any, first_dim: Any, width: int, order: Order | None = None
    ) -> jax.Array:
        """Loads numbers [columns, width] of an array [rows, D], with the pair's packed row 0 at
        `base_row`.

        Args:
            order: The order of the dims, if not as stored; `first_dim` is then the first of a
                block.
        """
        if self.interpret:
            dims = pl.ds(first_dim, width)
            return jnp.concatenate([ref[pl.ds(base_row + r, 1), dims] for r in self._rows()])
        out = plgpu.ShapeDtypeStruct((self.columns, width), ref.dtype, layout=SCORES)

        def run(ctx: Any, ref: Any, base_row: Any, first_row: Any, first_dim: Any) -> Any:
            del ctx
            dims, dtype = ir.MemRefType(ref.type).shape[1], ir.MemRefType(ref.type).element_type
            base_row, first_row, first_dim = map(single, (base_row, first_row, first_dim))
            registers = []
            for row, _ in self._of_thread(first_row):
                for chunk in range(0, width, WIDTH):
                    lane = plus(_dim(), word(chunk))
                    offsets = (lane,) if order is None else order(lane)
                    vector = ir.VectorType.get((OF_THREAD // len(offsets),), dtype)
                    byte_offsets = [
                        _offset(plus(base_row, row), dims, plus(first_dim, x), vector)
                        for x in offsets
                    ]
                    vectors = [llvm.load(vector, pointer(ref, begin)) for begin in byte_offsets]
                    numbers = [element(x, i) for x in vectors for i in range(vector.shape[0])]
                    registers.append(joined(numbers))
            return fragmented(registers, (self.columns, width), SCORES.to_mgpu())

        load = plgpu.inline_mgpu(arg_types=(PLAIN, SPLAT, SPLAT, SPLAT), return_type=out)(run)
        return load(ref, *map(jnp.int32, (base_row, self.first_row, first_dim)))

    def store(self, ref: Any, base_row: Any, first_dim: Any, x: jax.Array) -> None:
        """Stores numbers [columns, width] to an array [rows, D], with the pair's packed row 0 at
        `base_row`."""
        if self.interpret:
            dims = pl.ds(first_dim, x.shape[1])
            self._store_each(
                lambda i, r: ref.__setitem__((pl.ds(base_row + r, 1), dims), x[i : i + 1])
            )
            return

        def run(ctx: Any, ref: Any, base_row: Any, first_row: Any, first_dim: Any, x: Any) -> None:
            del ctx
            dims = ir.MemRefType(ref.type).shape[1]
            base_row, first_row, first_dim = map(single, (base_row, first_row, first_dim))
            registers = x.registers.reshape(self.columns // ACROSS, -1)
            for (row, exists), row_vectors in zip(
                self._of_thread(first_row), registers, strict=True
            ):
                with utils.when(exists):
                    begin = plus(first_dim, _dim())
                    byte_offset = _offset(plus(base_row, row), dims, begin, row_vectors[0].type)
                    for i, vector in enumerate(row_vectors):
                        store(vector, ref, byte_offset, i * WIDTH * _bytes(vector.type))

        types = (PLAIN, SPLAT, SPLAT, SPLAT, SCORES)
        plgpu.inline_mgpu(arg_types=types)(run)(
            ref, *map(jnp.int32, (base_row, self.first_row, first_dim)), x
        )

    def of_heads(self, ref: Any, head: Any) -> jax.Array:
        """Loads a number [columns] for each packed row, that of its query head of [H]; `head` is
        the pair's."""
        first_head = head * self.group
        if self.interpret:
            packed = [jnp.minimum(self.first_row + i, self.used - 1) for i in range(self.columns)]
            return jnp.concatenate(
                [ref[pl.ds(first_head + lax.rem(p, self.group), 1)] for p in packed]
            )
        out = plgpu.ShapeDtypeStruct((self.columns,), ref.dtype, layout=BY_ROW)

        def run(ctx: Any, ref: Any, base_head: Any, first_row: Any) -> Any:
            del ctx
            base_head, first_row = single(base_head), single(first_row)
            vector_type = ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type)
            registers = []
            for row, _ in self._of_thread(first_row):
                head_offset = arith.remui(row, word(self.heads)) if self.q_len > 1 else row
                byte_offset = _offset(plus(base_head, head_offset), 1, word(0), vector_type)
                registers.append(llvm.load(vector_type, pointer(ref, byte_offset)))
            return fragmented(registers, (self.columns,), BY_ROW.to_mgpu())

        load = plgpu.inline_mgpu(arg_types=(PLAIN, SPLAT, SPLAT), return_type=out)(run)
        return load(ref, *map(jnp.int32, (first_head, self.first_row)))

    def store_numbers(self, ref: Any, base_row: Any, x: jax.Array) -> None:
        """Stores a number of each packed row to [rows]."""
        if self.interpret:
            self._store_each(lambda i, r: ref.__setitem__((pl.ds(base_row + r, 1),), x[i : i + 1]))
            return

        def run(ctx: Any, ref: Any, base_row: Any, first_row: Any, x: Any) -> None:
            del ctx
            base_row, first_row = single(base_row), single(first_row)
            for (row, exists), number in zip(
                self._of_thread(first_row), x.registers.flat, strict=True
            ):
                with utils.when(exists):
                    store(number, ref, _offset(plus(base_row, row), 1, word(0), number.type))

        types = (PLAIN, SPLAT, SPLAT, BY_ROW)
        plgpu.inline_mgpu(arg_types=types)(run)(ref, *map(jnp.int32, (base_row, self.first_row)), x)

    def _of_thread(self, first_row: Any) -> list[tuple[Any, Any]]:
        """Returns, for a thread's packed rows, (offset from the pair's packed row 0, whether the
        row exists)."""
        thread = WarpgroupThread()
        half = arith.andi(arith.shrui(thread.index, word(4)), word(1))
        thread_row = plus(first_row, times(thread.warp, 2), half)
        offsets = []
        for i in range(0, self.columns, ACROSS):
            packed = plus(thread_row, word(i))
            exists = arith.cmpi(arith.CmpIPredicate.slt, packed, word(self.used))
            packed = arith.minsi(packed, word(self.used - 1))
            token = arith.divui(packed, word(self.group)) if self.q_len > 1 else word(0)
            offsets.append((plus(packed, times(token, self.heads - self.group)), exists))
        return offsets

    def _rows(self) -> list[Any]:
        """Returns the same for all packed rows, in the interpreter."""
        packed = [jnp.minimum(self.first_row + i, self.used - 1) for i in range(self.columns)]
        return [p + lax.div(p, self.group) * (self.heads - self.group) for p in packed]

    def _store_each(self, write: Callable[[int, Any], None]) -> None:
        for i, row in enumerate(self._rows()):

            @pl.when(self.first_row + i < self.used)
            def _(i=i, row=row):
                write(i, row)


def _dim() -> Any:
    """The first of a thread's dims, of 64."""
    return times(arith.andi(utils.thread_idx(), word(WIDTH // OF_THREAD - 1)), OF_THREAD)


def _bytes(vector: Any) -> int:
    return utils.bitwidth(vector.element_type) // 8


def _offset(row: Any, width: int, dim: Any, vector: Any) -> Any:
    """Returns the 64-bit byte offset of a number in rows of `width` numbers."""
    wide = ir.IntegerType.get_signless(64)
    number = arith.muli(arith.extui(wide, row), mgpu.c(width, wide))
    number = arith.addi(number, arith.extui(wide, dim))
    return arith.muli(number, mgpu.c(_bytes(vector), wide))
