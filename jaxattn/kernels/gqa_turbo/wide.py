"""Two steps of `turbo_decode` at a time, for a launch that is asked for it by name.

A step's exchanges, of maxima between lanes and of P through shared memory, and the rescaling of its
sums are as many for 128 tokens as for 64. No GPU has run it: benchmarks/log/gqa.md says what is
predicted. A step that is left over goes alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gqa_decode.block import Piece
from jaxattn.kernels.gqa_turbo.fragments import joined_terms
from jaxattn.kernels.gqa_turbo.lean import LeanBody
from jaxattn.kernels.gqa_turbo.memory import TERMS
from jaxattn.kernels.gqa_turbo.terms import store_terms
from jaxattn.kernels.hopper.machine import meet
from jaxattn.kernels.hopper.registers import zeros
from jaxattn.kernels.hopper.turned import store_turned
from jaxattn.kernels.mla_decode.columns_memory import SCORES
from jaxattn.kernels.mla_decode.rows_scores import MASKED
from jaxattn.kernels.mla_decode.schedule import PAGE

Numbers = list[jax.Array]  # of the tokens of each step


class WideBody(LeanBody):
    def steps(self, piece: Piece, taken: jax.Array, state: Any) -> Any:
        two = lambda j, state: self._together(piece, 2 * j, 2, state)  # noqa: E731
        one = lambda i, state: self._together(piece, i, 1, state)  # noqa: E731
        twice = lax.div(taken, 2)
        return lax.fori_loop(2 * twice, taken, one, lax.fori_loop(0, twice, two, state))

    def _together(self, piece: Piece, i: jax.Array, count: int, state: Any) -> Any:
        """The state after so many steps from this warpgroup's `i`-th on."""
        (top, total, minima, accs), memory, cut = state, self.memory, self.cut
        places = self.iota(0).astype(jnp.float32)
        slots, tokens = self._all_loaded(piece, i, count)
        codes = [memory.codes.at[self.wg, slot] for slot in slots]
        numbers = [self.fragments.numbers(each, places) for each in codes]
        norms, scales, middles = map(list, zip(*numbers, strict=True))
        whole = functools.reduce(jnp.logical_and, (self.all_seen(piece, t) for t in tokens))
        # Selected: 0 times the NaN of a token that a row does not see would be NaN.
        hidden = functools.partial(self._hidden, piece, tokens)
        mask = lambda *numbers: hidden(0.0, numbers)  # noqa: E731
        scales, middles = lax.cond(whole, lambda *numbers: list(numbers), mask, scales, middles)
        scales, unit = self._divided_alike(scales)
        # Of two places, since other warps may still read the last one.
        units_smem = memory.units.at[lax.rem(lax.div(i, 2), 2), self.wg]
        units_smem[...] = unit
        queries, values = memory.queries.at[piece.queries_at], []
        for k, each in enumerate(codes):
            make = functools.partial(self.fragments.values, each)
            product, made = self._beside(self.fragments.keys(each), queries, make)
            values.append(made)
            store_turned(self._scores(k), product, interpret=cut.interpret)
        meet(interpret=cut.interpret)
        # All four warps have the codes, as they met to exchange their scores.
        for slot in slots:
            plgpu.barrier_arrive(memory.codes_read.at[self.wg, slot])
        scores = []
        for k, norm in enumerate(norms):
            some = plgpu.load(self._scores(k), layout=SCORES, optimized=False)
            factor = piece.factor if norm is None else piece.factor * norm
            scores.append(self._powers(some * factor))
        hide = lambda *scores: hidden(MASKED, [scores])[0]  # noqa: E731
        scores = lax.cond(whole, lambda *scores: list(scores), hide, *scores)
        old, top = top, jnp.maximum(top, functools.reduce(jnp.maximum, scores).max(axis=1))
        rescale = jnp.exp2(old - top)
        by, wide_top = self.over_keys(rescale), self.over_keys(top)
        total, minima = total * by, minima * by
        for k, (score, scale, middle) in enumerate(zip(scores, scales, middles, strict=True)):
            p = jnp.exp2(score - wide_top)
            total, minima = total + p, minima + p * middle
            store_terms(self._terms(k), p * scale, interpret=cut.interpret)
        self.rescale_smem[...] = rescale
        plgpu.commit_smem()
        by, unit = (self._of_columns(x) for x in (self.rescale_smem, units_smem))
        products = self._sums(values)
        accs = tuple(acc * by + x * unit for acc, x in zip(accs, products, strict=True))
        return top, total, minima, accs

    def _all_loaded(
        self, piece: Piece, i: jax.Array, count: int
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """As `_loaded`, of so many of this warpgroup's steps."""
        slot, token = self._loaded(piece, i)
        slots, tokens, cut = [slot], [token], self.cut
        for _ in range(1, count):
            slot = jnp.where(slot == cut.room.steps - 1, 0, slot + 1)
            token += cut.consumers * PAGE
            plgpu.barrier_wait(self.memory.codes_loaded.at[self.wg, slot])
            slots.append(slot)
            tokens.append(token)
        return slots, tokens

    def _hidden(self, piece: Piece, tokens: Any, instead: float, kinds: Any) -> list[Numbers]:
        """Numbers of each kind and step, others where a packed row does not see a token."""
        seen = [self.seen(piece, token) for token in tokens]
        return [
            [jnp.where(s, x, instead) for s, x in zip(seen, kind, strict=True)] for kind in kinds
        ]

    def _divided_alike(self, scales: Numbers) -> tuple[Numbers, jax.Array]:
        """As `_divided`, by one unit of a row for all."""
        largest = functools.reduce(jnp.maximum, map(jnp.abs, scales)).max(axis=1)
        up, unit = self._unit(largest)
        by = self.over_keys(up)
        return [scale * by for scale in scales], unit

    def _block(self, k: int) -> jax.Array:
        """Where a step's scores and P are, of those taken together."""
        return self.wg + k * self.cut.consumers

    def _scores(self, k: int) -> Any:
        return self.memory.scores.at[self._block(k), :, pl.ds(0, PAGE)]

    def _terms(self, k: int) -> tuple[Any, Any]:
        columns, block = self.cut.columns, self.memory.p.at[self._block(k)]
        first, second = (block.at[pl.ds(i * columns, columns)] for i in range(TERMS))
        return first, second

    def _sums(self, values: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
        """Blocks [64 dims, N] of the sum of all steps' values times their weights."""
        weights = [self.memory.p.at[self._block(k)] for k in range(len(values))]
        if self.cut.interpret:
            each = [self._multiply(v, w) for v, w in zip(values, weights, strict=True)]
            return [functools.reduce(jnp.add, blocks) for blocks in zip(*each, strict=True)]

        def run(refs: Any) -> None:
            for blocks, some in zip(values, weights, strict=True):
                for ref, block in zip(refs, blocks, strict=True):
                    plgpu.wgmma(ref, block, some.transpose((1, 0)))

        shape = PAGE, TERMS * self.cut.columns
        products = pl.run_state(run)([plgpu.ACC.init(zeros(shape)) for _ in values[0]])
        return [joined_terms(product, interpret=False) for product in products]
