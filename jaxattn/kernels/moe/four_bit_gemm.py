"""The part of `grouped_product` that knows weights of 4 bits: copies, sums and tile configurations.

Weights lie in tiles (core/numerics/four_bit_tiles.py), and a step of K is some tiles of a row of
them. A warpgroup widens its tiles in registers (hopper/four_bit_operands.py), and wgmma takes them
from there. Scales are multiplied in before, so sums stay in the accumulator over all of K.

To widen takes as long as to read, so two warpgroups at least work on a multiprocessor: one has
gate's rows and another up's, or each has rows of its own.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.kernels.hopper.device import NUM_SMS, RESERVED_BYTES, SHARED_BYTES
from jaxattn.kernels.hopper.four_bit_operands import LINE, accumulated, shrunk, widened
from jaxattn.kernels.hopper.fp8_operands import plain_product
from jaxattn.kernels.moe.tile_config import (
    BARRIER_BYTES,
    BLOCK,
    GROUP,
    MOST_STAGES,
    ROWS,
    TOKEN_TILES,
    GemmTileConfig,
    MoeTileConfig,
    panel,
    token_tile,
)

MMA_COLUMNS = 32  # up to which single warps' mma is faster than wgmma
FEW_COLUMNS = 32  # of tokens, with which two blocks have registers enough


def lines(weights: jax.Array) -> jax.Array:
    """Tiles [L, E, ..., K / C, bytes] as [L, E, R / 64, lines, 128], as they are copied."""
    layers, experts, *down, across, size = weights.shape
    return weights.reshape(layers, experts, math.prod(down), across * size // LINE, LINE)


def lines_of_step(form: FourBitFormat, depth: int) -> int:
    """Of so many numbers of K."""
    return depth // form.columns * form.tile_bytes // LINE


class FourBitAccumulators:
    """Sums of a `GroupedGemmCta` over all of K, with weights of 4 bits."""

    def __init__(self, block: Any, form: FourBitFormat):
        self.block, self.form = block, form

    def __call__(self, now: Any, done: jax.Array) -> list[jax.Array]:
        del now
        block, cut = self.block, self.block.cut
        grown = 1 / shrunk(self.form, block.refs.tokens.dtype)
        if cut.interpret:
            sums = self._plain_sums
        else:
            sums = self._by_mma if cut.columns <= MMA_COLUMNS else self._by_wgmma
        return [total * grown for total in sums(done)]

    def _by_mma(self, done: jax.Array) -> list[jax.Array]:
        """Of few tokens."""
        block, cut = self.block, self.block.cut
        places = range(cut.product.depth // self.form.columns)

        def step(s: Any, totals: list[jax.Array]) -> list[jax.Array]:
            slot, _ = block.arrived(done + s)
            tokens = [self._tokens(slot, place) for place in places]
            totals = [
                accumulated(total, block.refs.weights_smem.at[slot, *each], tokens, self.form)
                for total, each in zip(totals, self._mine, strict=True)
            ]
            plgpu.barrier_arrive(block.refs.read.at[slot])
            return totals

        zero = plgpu.layout_cast(jnp.zeros((ROWS, cut.columns), jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, cut.steps, step, [zero] * len(self._mine))

    def _by_wgmma(self, done: jax.Array) -> list[jax.Array]:
        block, cut = self.block, self.block.cut

        def accumulate(*accs: Any) -> list[jax.Array]:
            @pl.loop(0, cut.steps)
            def _step(s):
                slot, _ = block.arrived(done + s)
                for place in range(cut.product.depth // self.form.columns):
                    tokens = self._tokens(slot, place).transpose((1, 0))
                    every = [self._weights(slot, place, each) for each in self._mine]
                    for acc, weights in zip(accs, every, strict=True):
                        plgpu.wgmma(acc, weights, tokens)
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(block.refs.read.at[slot])

            return [acc[...] for acc in accs]

        return pl.run_scoped(accumulate, *block.accumulators[: len(self._mine)])

    @property
    def _mine(self) -> list[tuple[Any, Any]]:
        """(part, which of its 64 rows) of what is the warpgroup's."""
        product = self.block.cut.product
        if product.split:
            return [(self.block.wg, 0)]
        return [(part, self.block.wg) for part in range(product.parts)]

    def _weights(self, slot: Any, place: int, each: tuple[Any, Any]) -> jax.Array:
        block, count = self.block, self.form.tile_bytes // LINE
        tile = block.refs.weights_smem.at[slot, *each, pl.ds(place * count, count)]
        dtype = block.refs.tokens.dtype
        return widened(tile, dtype, self.form, interpret=block.cut.interpret)

    def _tokens(self, slot: Any, place: int) -> Any:
        return self.block.refs.tokens_smem.at[slot, place]

    def _plain_sums(self, done: jax.Array) -> list[jax.Array]:
        """In the interpreter, whose wgmma takes nothing from registers."""
        block, cut = self.block, self.block.cut

        def step(s: Any, totals: list[jax.Array]) -> list[jax.Array]:
            slot, _ = block.arrived(done + s)
            for place in range(cut.product.depth // self.form.columns):
                tokens = self._tokens(slot, place)[...]
                totals = [
                    total + plain_product(self._weights(slot, place, each), tokens)
                    for total, each in zip(totals, self._mine, strict=True)
                ]
            plgpu.commit_smem()  # a fence between a load and the next copy to its place
            plgpu.barrier_arrive(block.refs.read.at[slot])
            return totals

        zero = jnp.zeros((ROWS, cut.columns), jnp.float32)
        return lax.fori_loop(0, cut.steps, step, [zero] * len(self._mine))


def choose_four_bit(
    form: FourBitFormat,
    *,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    expert_size: int,
) -> MoeTileConfig:
    """The cut for these sizes.

    With few tokens two blocks work on a multiprocessor, and each has two warpgroups that multiply.
    """
    pairs = tokens * top_k
    used = min(experts, pairs)
    columns = token_tile(pairs, experts, tokens, TOKEN_TILES[-1])

    def product(rows: int, depth: int, gated: bool) -> GemmTileConfig:
        step = next(n for n in (BLOCK, 3 * ROWS, ROWS) if depth % n == 0 and n % form.columns == 0)
        wide = rows % (2 * ROWS) == 0 and used * (rows // (2 * ROWS)) >= 2 * NUM_SMS
        together = 2 if columns <= FEW_COLUMNS and not (wide and gated) else 1
        made = GemmTileConfig(
            consumers=2 if wide else 1, parts=2 if gated else 1, split=gated and not wide,
            depth=step, together=together,
        )  # fmt: skip
        items = used * (rows // made.rows)
        blocks = min(max(items, NUM_SMS), together * NUM_SMS)
        made = dataclasses.replace(made, blocks=blocks, together=-(-blocks // NUM_SMS))
        return dataclasses.replace(made, stages=_stages(made, form, columns, 2 if gated else 4))

    return MoeTileConfig(
        columns=columns,
        gate_up=product(expert_size, hidden, True),
        down=product(hidden, expert_size, False),
    )


def _stages(made: GemmTileConfig, form: FourBitFormat, columns: int, of_result: int) -> int:
    """All that shared memory has room for."""
    weights = made.parts * made.consumers * lines_of_step(form, made.depth) * LINE
    stage = -(-weights // 1024) * 1024 + columns * made.depth * 2
    results = made.rows * columns * (of_result + 4 * made.split)
    room = SHARED_BYTES // made.together - RESERVED_BYTES - BARRIER_BYTES - results
    return max(2, min(MOST_STAGES, room // stage))
