"""The norm of a residual stream, made by the blocks of the product that reads it.

    y = norm(x + added) @ W = factor * (((x + added) * weight) @ W)

A launch of the norm alone begins and ends, and reads next to nothing meanwhile. Here each block of
`linear_layer` first asks for its matrix. Then it makes its part of (x + added) * weight, and the
squares of this part. The factor needs the squares of all K, so it comes last. The blocks of a
cluster have all K between them, and read one another's squares as they do their sums.

The blocks of the first tile also store the sum and the normed token.

What is added may be the results of a token's experts, which have not been summed up. Then each
block sums them, in the order in which `moe_combine` would.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.instructions import fence_proxy_async, swizzled, warpgroup_barrier
from jaxattn.kernels.hopper.store.unoptimized_store import store

PAIR = 128  # numbers of K that a warpgroup makes at a time: two steps of the product
STEP = PAIR // 2
TILE = 8 * STEP  # numbers of a step's tile in shared memory: rows of 8 tokens, the first is ours
MOST_PAIRS = 4  # of a block: what is summed stays in registers
CHANNEL = plgpu.Layout.WG_STRIDED((PAIR,), vec_size=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedRows:
    """Rows whose sum is added: of each k `weights[0, k] * row`, exactly 0 where k has no row.

    Attributes:
        rows: float32, panels of K's columns one below the other.
        positions: int32, of each k its row in a panel, or -1.
        weights: float32 [1, number of k].
        first: row where the first panel begins.
        height: rows of a panel.
    """

    rows: Any
    positions: Any
    weights: Any
    first: int
    height: int

    @property
    def constants(self) -> "WeightedRows":
        """Without its arrays."""
        return dataclasses.replace(self, rows=None, positions=None, weights=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RmsNormPrologueParams:
    """What comes before a product of one token.

    Attributes:
        added: what is added to the stream x, [1, K], or `WeightedRows` of it.
        weights: the weights of all norms, [N, K].
        affine: (a, b), for the norm `a * layer + b`.
        gives: whether the launch also gives the normed token.
    """

    added: Any
    weights: Any
    affine: tuple[int, int]
    eps: float
    gives: bool = False

    @property
    def constants(self) -> "RmsNormPrologueParams":
        """Without its arrays: a body that holds no array is one kernel for many launches."""
        parts = self.added.constants if isinstance(self.added, WeightedRows) else None
        return dataclasses.replace(self, added=parts, weights=None)

    @property
    def operands(self) -> dict[str, Any]:
        """Of a launch, by the names of references that `RmsNormPrologue` takes."""
        parts = self.added if isinstance(self.added, WeightedRows) else None
        return {
            "added_ref": self.added if parts is None else parts.rows,
            "norms_ref": self.weights,
            "positions_ref": parts and parts.positions,
            "shares_ref": parts and parts.weights,
        }


def refusal(tokens: int, steps: int, parts: int) -> str | None:
    """Why blocks cannot make the norm of K numbers in so many steps and parts; None if they can."""
    if tokens != 1:
        return f"the kernel norms one token; got {tokens}"
    if steps % (2 * parts) or steps > 2 * MOST_PAIRS * parts:
        return (
            f"the kernel norms K in parts of {PAIR} to {PAIR * MOST_PAIRS}, a multiple of {PAIR}; "
            f"got {steps * STEP} for {parts} blocks"
        )
    return None


def smem(steps: int, dtype: Any, *, interpret: bool) -> Any:
    """The token as the product reads it, and the same bytes as the warpgroup writes them."""
    shape = (steps, 8, STEP)
    if interpret:
        return plgpu.SMEM(shape, dtype)
    tiles = plgpu.SMEM(shape, dtype, transforms=swizzled(dtype))
    return plgpu.RefUnion(tiles, plgpu.SMEM((steps * TILE,), dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RmsNormPrologue:
    """The code of a block.

    Attributes:
        x_ref, added_ref: [1, K].
        parts: what `added_ref` has in the place of [1, K], or None.
        positions_ref, shares_ref: of parts.
        row: of the norms' weights.
        total_ref, normed_ref: [1, K]; the second may be None.
        x_smem: of `smem`.
        first: the block's first number of K.
        pairs: of its numbers.
    """

    x_ref: Any
    added_ref: Any
    weights_ref: Any
    row: Any
    total_ref: Any
    normed_ref: Any
    x_smem: Any
    first: Any
    pairs: int
    eps: float
    interpret: bool
    parts: WeightedRows | None = None
    positions_ref: Any = None
    shares_ref: Any = None

    @property
    def operand(self) -> Any:
        """[steps, 8, 64], the token in each step's first row."""
        return self.x_smem if self.interpret else self.x_smem[0]

    def make(self) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
        """(the sums, the sums times weights, the squares by thread), with the operand written."""
        sums, weighted = [], []
        added = self._added()
        for pair in range(self.pairs):
            some = self._some(pair)
            total = self._load(self.x_ref.at[0, some]) + added(pair)
            sums.append(total)
            weighted.append(total * self._load(self.weights_ref.at[self.row, some]))
        for pair, each in enumerate(weighted):
            self._put(pair, each.astype(self.operand.dtype))
        fence_proxy_async(interpret=self.interpret)
        warpgroup_barrier(interpret=self.interpret)
        first, *rest = (each * each for each in sums)
        return sums, weighted, sum(rest, first)

    def _added(self) -> Callable[[int], jax.Array]:
        """What is added to a pair of steps."""
        parts = self.parts
        if parts is None:
            return lambda pair: self._load(self.added_ref.at[0, self._some(pair)])

        def full(value: Any) -> jax.Array:
            return plgpu.layout_cast(lax.broadcast_in_dim(value, (PAIR,), []), CHANNEL)

        width = self.added_ref.shape[1]
        numbers = range(self.shares_ref.shape[1])
        places = [self.positions_ref[k] for k in numbers]
        shares = [self.shares_ref[0, k] for k in numbers]

        def summed(pair: int) -> jax.Array:
            column = self.first + pair * PAIR
            of_panel = parts.first + lax.div(column, width) * parts.height
            some = pl.ds(pl.multiple_of(lax.rem(column, width), PAIR), PAIR)
            rows = [
                self._load(self.added_ref.at[of_panel + jnp.maximum(place, 0), some])
                for place in places
            ]
            total = full(jnp.float32(0))
            for place, share, row in zip(places, shares, rows, strict=True):
                # A select: where there is no row, what was read may be NaN.
                there = full(place) >= 0
                total += jnp.where(there, row * full(share), full(jnp.float32(0)))
            return total

        return summed

    def _put(self, pair: int, x: jax.Array) -> None:
        if self.interpret:
            for half in (0, 1):
                self.x_smem[2 * pair + half, 0] = x[half * STEP : (half + 1) * STEP]
            return
        # The first row of a tile is not swizzled. Each half of the pair is to be such a row, and
        # the other half falls where the tiles of other tokens lie, whose products nobody reads.
        for half in (0, 1):
            begin = (2 * pair + half) * TILE - half * STEP
            store(self.x_smem[1].at[pl.ds(begin, PAIR)], x, interpret=False)

    def factor(self, squares: jax.Array) -> jax.Array:
        """Of the squares by thread, of all K."""
        return lax.rsqrt(jnp.sum(squares) * (1.0 / self.x_ref.shape[1]) + self.eps)

    def give(self, sums: list[jax.Array], weighted: list[jax.Array], factor: jax.Array) -> None:
        """Stores the block's part of the sum, and of its norm."""
        for pair, (total, each) in enumerate(zip(sums, weighted, strict=True)):
            some = self._some(pair)
            self.total_ref.at[0, some][...] = total
            if self.normed_ref is not None:
                self.normed_ref.at[0, some][...] = (each * factor).astype(self.normed_ref.dtype)

    def _some(self, pair: int) -> Any:
        return pl.ds(pl.multiple_of(self.first + pair * PAIR, PAIR), PAIR)

    def _load(self, ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=CHANNEL, optimized=False).astype(jnp.float32)
