"""Pages asked into L2 before the launch that reads them: while a smaller one leaves memory idle.

A launch of attention begins with an empty pipeline, behind one that waits for other GPUs and reads
next to nothing. That one asks for the first pages of each part of a `Schedule`. Nothing waits for
them, and what is asked in vain does no harm.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, ir, mgpu, utils
from jaxattn.kernels.hopper.registers import Thread, asm, pointer, single, word

TOKENS = 64  # of a page
PAGES = 3  # of a part: what a launch asks for at its beginning
ALIGNED = 16  # bytes
SPLAT, PLAIN = plgpu.Layout.WG_SPLAT, plgpu.RefType()


class Ahead(NamedTuple):
    """What a launch will read.

    Attributes:
        kv_cache: [L, N, 64, D].
        layer: int32 [1].
        tables: int32 [B, M].
        lens: int32 [B], tokens of each row.
        cuts, order: of its `Schedule`, int32 [2, parts + 1] and [B] or None.
    """

    kv_cache: jax.Array
    layer: jax.Array
    tables: jax.Array
    lens: jax.Array
    cuts: jax.Array
    order: jax.Array | None

    @property
    def parts(self) -> int:
        return self.cuts.shape[1] - 1

    def inputs(self) -> dict[str, Any]:
        """Of the launch that asks."""
        return {f"ahead_{name}": each for name, each in self._asdict().items()}


def askable(kv_cache: jax.Array) -> bool:
    """Whether pages of a stack of layers can be asked for."""
    whole = kv_cache.ndim == 4 and kv_cache.shape[2] == TOKENS
    return whole and TOKENS * kv_cache.shape[3] * kv_cache.dtype.itemsize % ALIGNED == 0


def ask(part: jax.Array, given: dict[str, Any]) -> None:
    """The first pages of a part, by one thread; `given` are references to `Ahead.inputs`."""
    refs = Ahead(**{name: given[f"ahead_{name}"] for name in Ahead._fields})
    row, first, count = begun(refs, part)
    prefetch = plgpu.inline_mgpu(arg_types=(PLAIN, SPLAT, SPLAT))(_prefetch)
    for i in range(PAGES):

        @pl.when(i < count)
        def _(at=first + i):
            prefetch(refs.kv_cache, refs.layer[0], refs.tables[row, at])


def begun(of: Ahead, part: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(row, its first page, how many there are) of what a part begins with; `of` may be references.
    None are there where the part is empty, or its row has no tokens."""
    place, page = of.cuts[0, part], of.cuts[1, part]
    last_place, last_page = of.cuts[0, part + 1], of.cuts[1, part + 1]
    rows, most = of.tables.shape
    row = jnp.minimum(place, rows - 1)
    row = row if of.order is None else of.order[row]
    pages = jnp.minimum(lax.div(of.lens[row] + TOKENS - 1, TOKENS), most)
    stop = jnp.where(place == last_place, jnp.minimum(last_page, pages), pages)
    return row, page, jnp.where(place < rows, stop - page, 0)


def _prefetch(ctx: Any, kv_cache: Any, layer: Any, number: Any) -> None:
    """Asks for one page."""
    del ctx
    wide, stored = ir.IntegerType.get_signless(64), ir.MemRefType(kv_cache.type)
    nbytes = stored.shape[2] * stored.shape[3] * utils.bitwidth(stored.element_type) // 8
    layer, number = (arith.extui(wide, single(x)) for x in (layer, number))
    page = arith.addi(arith.muli(layer, mgpu.c(stored.shape[1], wide)), number)
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, Thread().index, word(0))):
        place = pointer(kv_cache, arith.muli(page, mgpu.c(nbytes, wide)))
        code = "cp.async.bulk.prefetch.L2.global [$0], $1;"
        asm(code, [], [place, word(nbytes)], "l,r")
