"""An RMS-norm prologue: the CTAs of a product norm the residual stream that it reads.

    y = norm(x + added) @ W = factor * (((x + added) * weight) @ W)

A separate launch for the norm has a start and an end, and reads next to nothing in between. Here
each CTA of `linear_layer` first starts to load its matrix. Then it computes its part of
(x + added) * weight, and the squares of this part. The factor needs the squares of all K, so it
comes last. The CTAs of a cluster together have all K, and read one another's squares when they
exchange their sums.

The CTAs of the first tile also store the sum and the normed token.

`added` may be the results of a token's experts before their sum. Each CTA then sums them, in the
order of `moe_combine`.
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

PAIR = 128  # numbers of K that a warpgroup computes at a time: two steps of the product
STEP = PAIR // 2
TILE = 8 * STEP  # numbers of a step's tile in shared memory: rows of 8 tokens, ours is the first
MOST_PAIRS = 4  # pairs of a CTA: the sums stay in registers
CHANNEL = plgpu.Layout.WG_STRIDED((PAIR,), vec_size=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedRows:
    """Rows whose sum is added: for each k `weights[0, k] * row`, exactly 0 where k has no row.

    Attributes:
        rows: float32, panels of K's columns one below the other.
        positions: int32, the row in a panel of each k, or -1.
        weights: float32 [1, number of k].
        first: The row where the first panel begins.
        height: The rows of a panel.
    """

    rows: Any
    positions: Any
    weights: Any
    first: int
    height: int

    @property
    def constants(self) -> "WeightedRows":
        """The same without its arrays."""
        return dataclasses.replace(self, rows=None, positions=None, weights=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RmsNormPrologueParams:
    """The operands of the norm before a product of one token.

    Attributes:
        added: The array [1, K], or `WeightedRows`, that is added to the stream x.
        weights: The weights of all norms, [N, K].
        affine: (a, b), for the norm `a * layer + b`.
        gives: Whether the launch also returns the normed token.
    """

    added: Any
    weights: Any
    affine: tuple[int, int]
    eps: float
    gives: bool = False

    @property
    def constants(self) -> "RmsNormPrologueParams":
        """The same without its arrays: a body that captures no array is one kernel for many
        launches."""
        parts = self.added.constants if isinstance(self.added, WeightedRows) else None
        return dataclasses.replace(self, added=parts, weights=None)

    @property
    def operands(self) -> dict[str, Any]:
        """The operands of a launch, by the names of the refs that `RmsNormPrologue` takes."""
        parts = self.added if isinstance(self.added, WeightedRows) else None
        return {
            "added_ref": self.added if parts is None else parts.rows,
            "norms_ref": self.weights,
            "positions_ref": parts and parts.positions,
            "shares_ref": parts and parts.weights,
        }


def refusal(tokens: int, steps: int, parts: int) -> str | None:
    """Returns why CTAs cannot norm K numbers in `steps` steps and `parts` parts; None if they
    can."""
    if tokens != 1:
        return f"the kernel normalizes only one token; got {tokens}"
    if steps % (2 * parts) or steps > 2 * MOST_PAIRS * parts:
        return (
            f"the kernel normalizes K in parts of {PAIR} to {PAIR * MOST_PAIRS}, a multiple of "
            f"{PAIR}; got K={steps * STEP} with {parts=}"
        )
    return None


def smem(steps: int, dtype: Any, *, interpret: bool) -> Any:
    """Returns the scratch of the token as the product reads it, and as the warpgroup writes it, in
    the same bytes."""
    shape = (steps, 8, STEP)
    if interpret:
        return plgpu.SMEM(shape, dtype)
    tiles = plgpu.SMEM(shape, dtype, transforms=swizzled(dtype))
    return plgpu.RefUnion(tiles, plgpu.SMEM((steps * TILE,), dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RmsNormPrologue:
    """The prologue of one CTA.

    Attributes:
        x_ref, added_ref: [1, K].
        parts: The `WeightedRows` that `added_ref` has instead of [1, K], or None.
        positions_ref, shares_ref: Those of `parts`.
        row: The row of the norms' weights.
        total_ref, normed_ref: [1, K]; the second may be None.
        x_smem: The result of `smem`.
        first: The CTA's first number of K.
        pairs: The pairs of steps of its numbers.
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
        """Writes the operand, and returns (the sums, the sums times weights, the squares by
        thread)."""
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
        """Returns a function that loads the addend of a pair of steps."""
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
                # A select, and not a product: without a row, the loaded numbers may be NaN.
                there = full(place) >= 0
                total += jnp.where(there, row * full(share), full(jnp.float32(0)))
            return total

        return summed

    def _put(self, pair: int, x: jax.Array) -> None:
        if self.interpret:
            for half in (0, 1):
                self.x_smem[2 * pair + half, 0] = x[half * STEP : (half + 1) * STEP]
            return
        # The first row of a tile is not swizzled. Each half of the pair must be such a row. The
        # other half then overwrites rows of other tokens, whose products nobody reads.
        for half in (0, 1):
            begin = (2 * pair + half) * TILE - half * STEP
            store(self.x_smem[1].at[pl.ds(begin, PAIR)], x, interpret=False)

    def factor(self, squares: jax.Array) -> jax.Array:
        """Returns the norm's factor from the squares by thread, of all K."""
        return lax.rsqrt(jnp.sum(squares) * (1.0 / self.x_ref.shape[1]) + self.eps)

    def give(self, sums: list[jax.Array], weighted: list[jax.Array], factor: jax.Array) -> None:
        """Stores the CTA's part of the sum, and of its norm."""
        for pair, (total, each) in enumerate(zip(sums, weighted, strict=True)):
            some = self._some(pair)
            self.total_ref.at[0, some][...] = total
            if self.normed_ref is not None:
                self.normed_ref.at[0, some][...] = (each * factor).astype(self.normed_ref.dtype)

    def _some(self, pair: int) -> Any:
        return pl.ds(pl.multiple_of(self.first + pair * PAIR, PAIR), PAIR)

    def _load(self, ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=CHANNEL, optimized=False).astype(jnp.float32)
