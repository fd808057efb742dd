"""The body of `turbo_decode`: one producer warpgroup, and two to four consumers that take steps in
turns.

Packed rows (query token, head of the group) are the columns (N) of both products, whose left
operand is codes dequantized to e4m3 numbers in registers:

    scores^T [64 tokens, 2 N] = K Q^T           K as codes; the tokens' norms multiply the scores
    out^T    [D, 2 N]         = V^T (s P)^T     V counted from the middle code

Q and s P, the probabilities times their tokens' scales, are two e4m3 terms each, as adjacent groups
of columns. To fit e4m3, s P is divided by a unit per packed row and step; the product times that
unit is added to float32 sums. The values of the middle codes contribute a sum over tokens only,
which joins the output at a piece's end. The rest is that of gqa_decode, in decode/cta.py and
gqa/decode/load/producer.py: a stage is free as soon as all warps have its codes in registers.

With few packed rows a warpgroup takes two of its steps at a time, and a last odd one by itself.
Work that does not depend on the number of tokens is then done once per 128 tokens: maxima between
lanes, P's way through shared memory, the rescaling of sums. For the preset that is faster without
this, see smem.py.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.numerics.matmul import EXPONENT_AT, FLOAT_BIAS
from jaxattn.core.turboquant.codec import TurboFormat
from jaxattn.kernels.attention.packed_row_layouts import BY_COLUMN, BY_ROW, SCORES
from jaxattn.kernels.attention.softmax_constants import LOG2E, MASKED
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.gqa.decode.cta import (
    GqaDecodeConfig,
    GqaDecodeCta,
    GqaDecodeRefs,
    GqaDecodeTile,
)
from jaxattn.kernels.gqa.decode.load.producer import GqaDecodeProducer, LoadPipeline, place_of
from jaxattn.kernels.gqa.decode.smem import over_out
from jaxattn.kernels.hopper.instructions import issue_loads, warpgroup_barrier
from jaxattn.kernels.hopper.ptx import zeros
from jaxattn.kernels.hopper.store.transposed_store import store_transposed
from jaxattn.kernels.turboquant.fp8_split import store_terms
from jaxattn.kernels.turboquant.operands import TurboOperands, joined_terms
from jaxattn.kernels.turboquant.query_rotation import RotatedQueryGather
from jaxattn.kernels.turboquant.smem import (
    FEW,
    TERMS,
    TurboCtaResources,
    TurboDecodeSmem,
    summed_dims,
)
from jaxattn.kernels.turboquant.work_iterator import TurboWorkIterator

# s P is less than 2**8 after the division by its unit, a power of two. 2**-111 is the least value
# assumed for the largest of s; numbers of float16 are above it.
P_EXPONENT, LEAST_EXPONENT = 7, 16
EXPONENT = 0xFF << EXPONENT_AT
FEW_COLUMNS = 16  # for which the sums of all dims fit in registers together with the output
MINIMA = 2  # index in `TurboDecodeSmem.units`, after two units

Numbers = list[jax.Array]  # of the tokens of each step


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurboDecodeConfig(GqaDecodeConfig):
    """The static properties of a `turbo_decode` launch.

    Attributes:
        form: The cache's format.
        room: The division of the CTA's memory.
    """

    form: TurboFormat
    room: TurboCtaResources


class TurboDecodeMainloop(GqaDecodeCta[TurboDecodeConfig, TurboDecodeSmem]):
    part: TurboWorkIterator

    def __init__(self, cut: TurboDecodeConfig, refs: GqaDecodeRefs, memory: TurboDecodeSmem):
        super().__init__(cut, refs, memory)
        self.fragments = TurboOperands(cut.form, cut.room.pitch, interpret=cut.interpret)
        self.few = cut.columns * cut.head_dim <= FEW
        self.rescale_smem = memory.stats.at[0, self.wg]
        self.minima_smem = memory.units.at[MINIMA, self.wg]

    def pairs(self) -> TurboWorkIterator:
        return TurboWorkIterator(**self.of_pairs(), form=self.cut.form, tokens=self.cut.page_size)

    def load(self) -> None:
        memory, cut = self.memory, self.cut

        def copies(pair, numbers, step, wg, slot):
            return self.part.copies(pair, numbers, step, memory.codes.at[wg, slot])

        queries = RotatedQueryGather(
            q_ref=self.refs.q_ref, rows=self.rows, part=self.part, memory=memory, scale=cut.scale,
            kv_scale_ref=None, form=cut.form,
        )  # fmt: skip
        GqaDecodeProducer(
            part=self.part, queries=queries, memory=memory, consumers=cut.consumers,
            interpret=cut.interpret,
            rings=(LoadPipeline(cut.room.steps, memory.codes_loaded, memory.codes_read, copies),),
        ).run(self.write_empty_rows)  # fmt: skip

    def factor(self, pair: jax.Array, queries_at: jax.Array) -> jax.Array:
        factors, soft_cap = self.memory.factors.at[queries_at], self.cut.soft_cap
        factor = self.over_keys(plgpu.load(factors, layout=BY_ROW, optimized=False))
        return factor * (LOG2E if soft_cap is None else 2 * LOG2E / soft_cap)

    def empty(self) -> Any:
        none, blocks = self.init_sum(), self.cut.head_dim // PAGE
        return self.init_max(), none, none, (self.init_output(PAGE),) * blocks

    def result(self, state: Any) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
        top, total, minima, accs = state
        self.minima_smem[...] = minima.sum(axis=1)
        plgpu.commit_smem()
        middles = self._of_columns(self.minima_smem)
        return tuple(acc + middles for acc in accs), top, total

    def steps(self, piece: GqaDecodeTile, num_steps: jax.Array, state: Any) -> Any:
        together = self.cut.room.together
        several = lambda j, state: self._taken(piece, j * together, together, state)  # noqa: E731
        one = lambda i, state: self._taken(piece, i, 1, state)  # noqa: E731
        turns = lax.div(num_steps, together)
        state = lax.fori_loop(0, turns, several, state)
        return state if together == 1 else lax.fori_loop(turns * together, num_steps, one, state)

    def _taken(self, piece: GqaDecodeTile, i: jax.Array, count: int, state: Any) -> Any:
        """Returns the state after `count` steps from this warpgroup's `i`-th on."""
        (top, total, minima, accs), memory, cut = state, self.memory, self.cut
        places = self.iota(0).astype(jnp.float32)
        slots, tokens = self._all_loaded(piece, i, count)
        codes = [memory.codes.at[self.wg, slot] for slot in slots]
        numbers = [self.fragments.numbers(each, places) for each in codes]
        norms, scales, middles = map(list, zip(*numbers, strict=True))
        whole = functools.reduce(jnp.logical_and, (self.all_visible(piece, t) for t in tokens))
        # Selected, because 0 times the NaN of a token that a row does not see would be NaN.
        hidden = functools.partial(self._apply_mask, piece, tokens)
        mask = lambda *numbers: hidden(0.0, numbers)  # noqa: E731
        scales, middles = lax.cond(whole, lambda *numbers: list(numbers), mask, scales, middles)
        scales, unit = self._normalize_scales(scales)
        # There are two buffers, since other warps may still read the last one. The store comes
        # before the warps synchronize, so that the lanes' exchange is not delayed until the scores
        # are there.
        turn = lax.div(i, cut.room.together)
        units_smem = memory.units.at[lax.rem(turn, 2), self.wg]
        units_smem[...] = unit
        queries, values = memory.queries.at[piece.queries_at], []
        for k, each in enumerate(codes):
            make = functools.partial(self.fragments.values, each)
            product, made = self._beside(self.fragments.keys(each), queries, make)
            values.append(made)
            store_transposed(self._scores(k), product, interpret=cut.interpret)
        warpgroup_barrier(interpret=cut.interpret)
        # All four warps have the codes, because they synchronized to exchange their scores.
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
        self, piece: GqaDecodeTile, i: jax.Array, count: int
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Waits for the codes of `count` of this warpgroup's steps. Returns (their stages in the
        ring, the steps' first tokens)."""
        memory, cut = self.memory, self.cut
        step = piece.first_step + cut.consumers * i
        slot = lax.rem(place_of(piece.done + step, cut.consumers)[1], cut.room.steps)
        token = piece.first_token + step * PAGE
        slots, tokens = [slot], [token]
        for _ in range(1, count):
            slot = jnp.where(slot == cut.room.steps - 1, 0, slot + 1)
            token += cut.consumers * PAGE
            slots.append(slot)
            tokens.append(token)
        for slot in slots:
            plgpu.barrier_wait(memory.codes_loaded.at[self.wg, slot])
        return slots, tokens

    def _apply_mask(
        self, piece: GqaDecodeTile, tokens: Any, instead: float, kinds: Any
    ) -> list[Numbers]:
        """Returns the numbers of each kind and step, replaced by `instead` where a packed row does
        not see a token."""
        seen = [self.seen(piece, token) for token in tokens]
        return [
            [jnp.where(s, x, instead) for s, x in zip(seen, kind, strict=True)] for kind in kinds
        ]

    def _powers(self, scores: jax.Array) -> jax.Array:
        """Returns log2 of weights, from scores times `factor`."""
        if self.cut.soft_cap is None:
            return scores
        # tanh by exp2, since the approximate instruction is off by 2**-11 of the cap.
        return (1.0 - 2.0 / (jnp.exp2(scores) + 1.0)) * (self.cut.soft_cap * LOG2E)

    def _normalize_scales(self, scales: Numbers) -> tuple[Numbers, jax.Array]:
        """Returns the tokens' scales, divided so that s P fits e4m3, and the divisor of each row.

        No p is above 1, so the largest scale bounds s P. It needs no score: lanes exchange it
        before they wait for the first product.
        """
        largest = functools.reduce(jnp.maximum, map(jnp.abs, scales)).max(axis=1)
        largest = lax.bitcast_convert_type(largest, jnp.int32) & EXPONENT
        largest = jnp.maximum(largest, LEAST_EXPONENT << EXPONENT_AT)

        def power(biased: jax.Array) -> jax.Array:
            return lax.bitcast_convert_type(biased, jnp.float32)

        up = self.over_keys(power(((2 * FLOAT_BIAS + P_EXPONENT) << EXPONENT_AT) - largest))
        return [scale * up for scale in scales], power(largest - (P_EXPONENT << EXPONENT_AT))

    def _beside(
        self, left: tuple[jax.Array, ...], right: Any, make: Callable[[], tuple[jax.Array, ...]]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Returns [64, N], blocks [64, `summed_dims`] times both terms [2 N, D] in shared memory;
        and the result of `make`. The latter overlaps with the products if there are registers for
        both."""
        places = [right]
        if len(left) > 1:
            dims = summed_dims(self.cut.form)
            places = [right.at[:, pl.ds(i * dims, dims)] for i in range(len(left))]
        if self.cut.interpret:
            return functools.reduce(jnp.add, map(_plain_product, left, places)), make()
        out_type = plgpu.ACC((PAGE, TERMS * self.cut.columns), jnp.float32)
        if not self.few:
            products = [
                pl.run_scoped(functools.partial(_product, some, place), out_type)
                for some, place in zip(left, places, strict=True)
            ]
            return joined_terms(functools.reduce(jnp.add, products), interpret=False), make()

        def run(*refs: Any) -> Any:
            for ref, some, place in zip(refs, left, places, strict=True):
                plgpu.wgmma(ref, some, place.transpose((1, 0)))
            # `make` is between two of these; otherwise ptxas moves it before or after all
            # tensor-core work.
            issue_loads(interpret=False)
            made = make()
            issue_loads(interpret=False)
            return [ref[...] for ref in refs], made

        products, made = pl.run_scoped(run, *[out_type] * len(left))
        return joined_terms(functools.reduce(jnp.add, products), interpret=False), made

    def _block(self, k: int) -> jax.Array:
        """The index of a step's scores and P, among the steps taken together."""
        return self.wg + k * self.cut.consumers

    def _scores(self, k: int) -> Any:
        return self.memory.scores.at[self._block(k), :, pl.ds(0, PAGE)]

    def _terms(self, k: int) -> tuple[Any, Any]:
        columns, block = self.cut.columns, self.memory.p.at[self._block(k)]
        first, second = (block.at[pl.ds(i * columns, columns)] for i in range(TERMS))
        return first, second

    def _sums(self, values: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
        """Returns blocks [64 dims, N] of the sum of all steps' values times their weights."""
        weights = [self.memory.p.at[self._block(k)] for k in range(len(values))]
        blocks = list(zip(*values, strict=True))
        if self.cut.interpret:
            return [
                functools.reduce(jnp.add, map(_plain_product, block, weights)) for block in blocks
            ]

        def run(refs: Any, blocks: Any) -> None:
            for k, some in enumerate(weights):
                for ref, block in zip(refs, blocks, strict=True):
                    plgpu.wgmma(ref, block[k], some.transpose((1, 0)))

        # With many columns, one block's sums at a time.
        groups = [blocks] if self.cut.columns <= FEW_COLUMNS else [[block] for block in blocks]
        products: list[jax.Array] = []
        for group in groups:
            nothing = [zeros((PAGE, TERMS * self.cut.columns)) for _ in group]
            sums = pl.run_state(functools.partial(run, blocks=group))(
                [plgpu.ACC.init(each) for each in nothing]
            )
            products += [joined_terms(each, interpret=False) for each in sums]
        return products

    def _of_columns(self, ref: Any) -> jax.Array:
        """Broadcasts a number of each packed row over its sums of 64 dims."""
        return over_out(plgpu.load(ref, layout=BY_COLUMN), PAGE)


def _product(left: jax.Array, right: Any, ref: Any) -> jax.Array:
    plgpu.wgmma(ref, left, right.transpose((1, 0)))
    return ref[...]


def _plain_product(left: jax.Array, right: Any) -> jax.Array:
    """Returns [M, K] times both terms [2 N, K], [M, N], in the interpreter."""
    return joined_terms(jnp.dot(left, right[...].astype(jnp.float32).T), interpret=True)
