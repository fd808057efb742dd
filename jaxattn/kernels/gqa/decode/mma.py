"""The products of a step of `gqa_decode`, one class for each storage format.

    scores [64, N] = K Q^T          K [64, D], Q [N, D]
    out    [D, N] += V^T P^T        V [64, D], P [N, 64]; in blocks of up to 128 dims

e4m3 keys and values go through registers on their way to a product, by fp8_register_operands.py.
The interpreter has no register operands, and no accumulators with an initial value.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.packed_row_layouts import BY_COLUMN
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.gqa.decode.cta import GqaDecodeTile
from jaxattn.kernels.gqa.decode.fp8_register_operands import GqaFp8Operands, block_width, in_order
from jaxattn.kernels.gqa.decode.smem import over_out

CLEARED = 64  # dims of values that are cleared at a time

type Accs = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class GqaDecodeMma:
    """The products of a 16-bit cache, with all operands in shared memory."""

    columns: int
    head_dim: int

    @property
    def rows(self) -> int:
        """The rows of a block of the output."""
        return block_width(self.head_dim)

    @property
    def blocks(self) -> int:
        return self.head_dim // self.rows

    def scores(self, keys: Any, queries: Any, at: jax.Array) -> jax.Array:
        """Returns the scores with the queries [N, D] at place `at`."""
        run = functools.partial(self._scores, keys, queries, at)
        return pl.run_scoped(run, plgpu.ACC((PAGE, self.columns), jnp.float32))

    def _scores(self, keys: Any, queries: Any, at: jax.Array, ref: Any) -> jax.Array:
        plgpu.wgmma(ref, keys, queries.at[at].transpose((1, 0)))
        return ref[...]

    def clear(self, values: Any, piece: GqaDecodeTile, token: jax.Array) -> None:
        """Zeroes the values that no query sees, of the 64 keys from `token` on."""
        for at in range(0, self.head_dim, CLEARED):
            some = values.at[:, pl.ds(at, CLEARED)]
            key = plgpu.broadcasted_iota(
                jnp.int32, (PAGE, CLEARED), 0, layout=plgpu.Layout.WGMMA
            ) + token  # fmt: skip
            inside = key < piece.length
            if piece.begin is not None:
                inside &= key >= piece.begin
            kept = plgpu.load(some, layout=plgpu.Layout.WGMMA)
            some[...] = jnp.where(inside, kept, jnp.zeros((), values.dtype))

    def add(self, accs: Accs, values: Any, p: Any, rescale: Any) -> Accs:
        """Returns the output times `rescale` [N], plus a step's values."""
        run = functools.partial(self._add, accs, values, p, rescale)
        out_type = plgpu.ACC((self.rows, self.columns), jnp.float32)
        return pl.run_scoped(run, *[out_type] * self.blocks)

    def _add(self, accs: Accs, values: Any, p: Any, rescale: Any, *refs: Any) -> Accs:
        accs = self._rescaled(accs, rescale)
        for ref, acc in zip(refs, accs, strict=True):
            ref[...] = acc
        for i, ref in enumerate(refs):
            self._add_block(ref, values, p.transpose((1, 0)), i)
        return tuple(ref[...] for ref in refs)

    def _rescaled(self, accs: Accs, rescale: Any) -> Accs:
        by = over_out(plgpu.load(rescale, layout=BY_COLUMN), self.rows)
        return tuple(acc * by for acc in accs)

    def _add_block(self, ref: Any, values: Any, p: Any, block: int) -> None:
        some = values.at[:, pl.ds(block * self.rows, self.rows)]
        plgpu.wgmma(ref, some.transpose((1, 0)), p)


@dataclasses.dataclass(frozen=True)
class GqaDecodeFp8Mma(GqaDecodeMma):
    """The products of an e4m3 cache, whose numbers become float16 in registers."""

    @functools.cached_property
    def tiles(self) -> GqaFp8Operands:
        return GqaFp8Operands(self.head_dim)

    def _scores(self, keys: Any, queries: Any, at: jax.Array, ref: Any) -> jax.Array:
        for i in range(self.blocks):
            some = queries.at[at, :, pl.ds(i * self.rows, self.rows)]
            plgpu.wgmma(ref, self.tiles.keys(keys, i), some.transpose((1, 0)))
            plgpu.wgmma_wait(1)
        return ref[...]

    def clear(self, values: Any, piece: GqaDecodeTile, token: jax.Array) -> None:
        first = jnp.int32(0) if piece.begin is None else piece.begin - token
        self.tiles.clear(values, first, piece.length - token)

    def _add_block(self, ref: Any, values: Any, p: Any, block: int) -> None:
        plgpu.wgmma(ref, self.tiles.values(values, block), p)
        plgpu.wgmma_wait(1)


@dataclasses.dataclass(frozen=True)
class InterpretedGqaMma(GqaDecodeMma):
    def add(self, accs: Accs, values: Any, p: Any, rescale: Any) -> Accs:
        accs = self._rescaled(accs, rescale)
        wide, weights = values[...].astype(jnp.float32), p[...].astype(jnp.float32).T
        some = [wide[:, i * self.rows : (i + 1) * self.rows].T for i in range(self.blocks)]
        return tuple(acc + jnp.dot(v, weights) for acc, v in zip(accs, some, strict=True))


@dataclasses.dataclass(frozen=True)
class InterpretedGqaFp8Mma(InterpretedGqaMma):
    def scores(self, keys: Any, queries: Any, at: jax.Array) -> jax.Array:
        wide = in_order(keys[...].astype(jnp.float32))
        return jnp.dot(wide, queries[at].astype(jnp.float32).T)


def products_of(columns: int, head_dim: int, *, fp8: bool, interpret: bool) -> GqaDecodeMma:
    made: type[GqaDecodeMma]
    if interpret:
        made = InterpretedGqaFp8Mma if fp8 else InterpretedGqaMma
    else:
        made = GqaDecodeFp8Mma if fp8 else GqaDecodeMma
    return made(columns, head_dim)
