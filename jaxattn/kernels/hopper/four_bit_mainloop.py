"""A mainloop over K with 4-bit weights, whose tiles come through a ring of pipeline stages.

A step of K is a few consecutive tiles of a row of tiles. A warpgroup applies the scales as it
widens its tiles (four_bit_dequantization.py), so the accumulators stay in registers over all of K.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxattn.core.numerics.four_bit_tiles import ROWS, FourBitFormat
from jaxattn.kernels.hopper.four_bit_dequantization import LINE, accumulated, shrunk, widened
from jaxattn.kernels.hopper.fp8_conversion import plain_product

MMA_COLUMNS = 32  # up to this many columns, mma of single warps is faster than wgmma


def lines_of_step(form: FourBitFormat, depth: int) -> int:
    """Returns the lines of a step with `depth` numbers of K."""
    return depth // form.columns * form.tile_bytes // LINE


@dataclasses.dataclass(frozen=True, kw_only=True)
class FourBitMainloop:
    """The accumulation of one warpgroup.

    Attributes:
        form: The format of the weights.
        dtype: The dtype of the tokens.
        columns: N, the number of tokens.
        arrived: Waits for a step's stage to be loaded, and returns its index.
        tiles: Returns the tiles in such a stage for each of the warpgroup's parts, [lines, 128].
        tokens: The tokens of all stages, [stage, tile, N, columns of a tile].
        read: The empty barriers of the stages.
    """

    form: FourBitFormat
    dtype: DTypeLike
    columns: int
    arrived: Callable[[Any], Any]
    tiles: Callable[[Any], list[Any]]
    tokens: Any
    read: Any
    interpret: bool

    def __call__(self, steps: Any, done: Any) -> list[jax.Array]:
        """Returns, for each part, the sums [64, N] over `steps` steps.

        Args:
            done: The steps before the first.
        """
        if self.interpret:
            sums = self._plain_sums
        else:
            sums = self._by_mma if self.columns <= MMA_COLUMNS else self._by_wgmma
        grown = 1 / shrunk(self.form, self.dtype)
        return [total * grown for total in sums(steps, done)]

    @property
    def _parts(self) -> int:
        return len(self.tiles(0))

    @property
    def _places(self) -> range:
        """The tiles of a step."""
        return range(self.tokens.shape[1])

    def _weights(self, tiles: Any, place: int) -> jax.Array:
        count = self.form.tile_bytes // LINE
        tile = tiles.at[pl.ds(place * count, count)]
        return widened(tile, self.dtype, self.form, interpret=self.interpret)

    def _zeros(self) -> list[jax.Array]:
        zero = jnp.zeros((ROWS, self.columns), jnp.float32)
        if not self.interpret:
            zero = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
        return [zero] * self._parts

    def _by_mma(self, steps: Any, done: Any) -> list[jax.Array]:
        """Accumulates by mma, for few tokens."""

        def step(s: Any, totals: list[jax.Array]) -> list[jax.Array]:
            slot = self.arrived(done + s)
            tokens = [self.tokens.at[slot, place] for place in self._places]
            totals = [
                accumulated(total, tiles, tokens, self.form)
                for total, tiles in zip(totals, self.tiles(slot), strict=True)
            ]
            plgpu.barrier_arrive(self.read.at[slot])
            return totals

        return lax.fori_loop(0, steps, step, self._zeros())

    def _by_wgmma(self, steps: Any, done: Any) -> list[jax.Array]:
        def accumulate(*accs: Any) -> list[jax.Array]:
            @pl.loop(0, steps)
            def _step(s):
                slot = self.arrived(done + s)
                for place in self._places:
                    tokens = self.tokens.at[slot, place].transpose((1, 0))
                    every = [self._weights(tiles, place) for tiles in self.tiles(slot)]
                    for acc, weights in zip(accs, every, strict=True):
                        plgpu.wgmma(acc, weights, tokens)
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(self.read.at[slot])

            return [acc[...] for acc in accs]

        shape = (ROWS, self.columns)
        return pl.run_scoped(accumulate, *[plgpu.ACC(shape, jnp.float32)] * self._parts)

    def _plain_sums(self, steps: Any, done: Any) -> list[jax.Array]:
        """Accumulates in the interpreter, whose wgmma takes no register operand."""

        def step(s: Any, totals: list[jax.Array]) -> list[jax.Array]:
            slot = self.arrived(done + s)
            for place in self._places:
                tokens = self.tokens.at[slot, place][...]
                totals = [
                    total + plain_product(self._weights(tiles, place), tokens)
                    for total, tiles in zip(totals, self.tiles(slot), strict=True)
                ]
            plgpu.commit_smem()  # fence between these loads and the next copy to the stage
            plgpu.barrier_arrive(self.read.at[slot])
            return totals

        return lax.fori_loop(0, steps, step, self._zeros())
