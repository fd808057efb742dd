"""A step of `turbo_decode` in fewer instructions, for a launch that is asked for it by name.

No GPU has run it: benchmarks/log/gqa.md says what is predicted. What differs from `Body`:

- A table's word that a byte permute takes from a register stays in one (registers.held).
- s P is divided by a power of two, and log2 of e is in the queries' factors.
- A step of which all rows see all keys branches around the masks.
- Values' codes are unpacked while the keys' product runs, where there are registers for both.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gqa_decode.block import Piece, Refs
from jaxattn.kernels.gqa_decode.fp8 import EXPONENT_AT, FLOAT_BIAS
from jaxattn.kernels.gqa_turbo.body import Body, CodedCut
from jaxattn.kernels.gqa_turbo.fragments import Fragments, joined_terms
from jaxattn.kernels.gqa_turbo.memory import FEW, TERMS, Memory
from jaxattn.kernels.hopper.machine import asked_for, meet
from jaxattn.kernels.hopper.turned import store_turned
from jaxattn.kernels.mla_decode.columns_memory import SCORES
from jaxattn.kernels.mla_decode.rows_scores import LOG2E, MASKED
from jaxattn.kernels.mla_decode.schedule import PAGE

# s P is less than 2**8 once it is divided by its unit, a power of two. 2**-111 is the least that
# the largest of s is taken for; numbers of float16 are above it.
P_EXPONENT, LEAST_EXPONENT = 7, 16
EXPONENT = 0xFF << EXPONENT_AT
REGISTERS_OF_FOUR = (32, 112)  # of four warpgroups that compute, as `memory.REGISTERS`


class LeanBody(Body):
    def __init__(self, cut: CodedCut, refs: Refs, memory: Memory):
        super().__init__(cut, refs, memory)
        self.fragments = Fragments(cut.form, cut.room.pitch, interpret=cut.interpret, holds=True)

    def factor(self, pair: jax.Array, queries_at: jax.Array) -> jax.Array:
        soft_cap = self.cut.soft_cap
        return super().factor(pair, queries_at) * (
            LOG2E if soft_cap is None else 2 * LOG2E / soft_cap
        )

    def step(self, piece: Piece, i: jax.Array, state: Any) -> Any:
        (top, total, minima, accs), memory, cut = state, self.memory, self.cut
        slot, token = self._loaded(piece, i)
        codes = memory.codes.at[self.wg, slot]
        places = self.iota(0).astype(jnp.float32)
        norm, *numbers = self.fragments.numbers(codes, places)
        whole, seen = self.all_seen(piece, token), lambda: self.seen(piece, token)
        # Selected: 0 times the NaN of a token that a row does not see would be NaN.
        mask = lambda *numbers: [jnp.where(seen(), x, 0.0) for x in numbers]  # noqa: E731
        scale, middle = lax.cond(whole, lambda *numbers: list(numbers), mask, *numbers)
        scale, unit = self._divided(scale)
        units_smem = memory.units.at[lax.rem(i, 2), self.wg]
        units_smem[...] = unit
        product, values = self._beside(
            self.fragments.keys(codes), memory.queries.at[piece.queries_at],
            lambda: self.fragments.values(codes),
        )  # fmt: skip
        store_turned(self.scores_smem, product, interpret=cut.interpret)
        meet(interpret=cut.interpret)
        # All four warps have the step's codes, as they met to exchange their scores.
        plgpu.barrier_arrive(memory.codes_read.at[self.wg, slot])
        scores = plgpu.load(self.scores_smem, layout=SCORES, optimized=False)
        scores = self._powers(scores * (piece.factor if norm is None else piece.factor * norm))
        hide = lambda x: jnp.where(seen(), x, MASKED)  # noqa: E731
        scores = lax.cond(whole, lambda x: x, hide, scores)
        old, top = top, jnp.maximum(top, scores.max(axis=1))
        p, rescale = jnp.exp2(scores - self.over_keys(top)), jnp.exp2(old - top)
        total = total * self.over_keys(rescale) + p
        minima = minima * self.over_keys(rescale) + p * middle
        self._store_weights(p * scale, rescale)
        return top, total, minima, self._added(accs, values, units_smem)

    def _powers(self, scores: jax.Array) -> jax.Array:
        """log2 of weights, of scores times `factor`."""
        if self.cut.soft_cap is None:
            return scores
        # tanh, whose approximate instruction is off by 2**-11 of the cap.
        return (1.0 - 2.0 / (jnp.exp2(scores) + 1.0)) * (self.cut.soft_cap * LOG2E)

    def _divided(self, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        up, unit = self._unit(jnp.abs(scale).max(axis=1))
        return scale * self.over_keys(up), unit

    def _unit(self, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(by what scales are multiplied so that s P has room, its unit), of the largest scale."""
        largest = lax.bitcast_convert_type(largest, jnp.int32) & EXPONENT
        largest = jnp.maximum(largest, LEAST_EXPONENT << EXPONENT_AT)

        def power(biased: jax.Array) -> jax.Array:
            return lax.bitcast_convert_type(biased, jnp.float32)

        up = ((2 * FLOAT_BIAS + P_EXPONENT) << EXPONENT_AT) - largest
        return power(up), power(largest - (P_EXPONENT << EXPONENT_AT))

    def _beside(
        self, left: jax.Array, right: Any, make: Callable[[], tuple[jax.Array, ...]]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """A block [64, K] times both terms, as `_multiply`; and what `make` returns."""
        columns = self.cut.columns
        if self.cut.interpret or columns * self.cut.head_dim > FEW:
            return self._multiply((left,), right)[0], make()

        def run(ref: Any) -> Any:
            plgpu.wgmma(ref, left, right.transpose((1, 0)))
            # Between two of these, or ptxas makes it before or after all that the tensor cores do.
            asked_for(interpret=False)
            made = make()
            asked_for(interpret=False)
            return ref[...], made

        product, made = pl.run_scoped(run, plgpu.ACC((PAGE, TERMS * columns), jnp.float32))
        return joined_terms(product, interpret=False), made
