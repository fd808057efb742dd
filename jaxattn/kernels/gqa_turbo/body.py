"""The body of `turbo_decode`: a warpgroup loads, and two or three take a part's steps in turns.

Packed rows (query token, head of the group) are the columns of both products, whose left operand
is codes turned into e4m3 numbers in registers:

    scores^T [64 tokens, 2 N] = K Q^T           K as codes; the tokens' norms multiply the scores
    out^T    [D, 2 N]         = V^T (s P)^T     V counted from the middle code

Q and s P, the probabilities times their tokens' scales, are two e4m3 terms each, which stand side
by side as columns. s P is divided by a unit per packed row and step, so that e4m3 has room for it;
the product is added to float32 sums, times that unit. What the middle codes stand for is a sum over
tokens alone, and joins the output at a piece's end. The rest is gqa_decode's, of block.py and
load.py: a step's place is free as soon as all warps have its codes in registers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.turboquant import TurboFormat
from jaxattn.kernels.gqa_decode.block import Block, Cut, Piece, Refs
from jaxattn.kernels.gqa_decode.load import Loader, Ring, place_of
from jaxattn.kernels.gqa_decode.memory import over_out
from jaxattn.kernels.gqa_turbo.fragments import Fragments, joined_terms
from jaxattn.kernels.gqa_turbo.memory import TERMS, Memory, Room
from jaxattn.kernels.gqa_turbo.pairs import CodedPairs
from jaxattn.kernels.gqa_turbo.queries import TurnedQueries
from jaxattn.kernels.gqa_turbo.terms import store_terms
from jaxattn.kernels.hopper.machine import meet
from jaxattn.kernels.hopper.turned import store_turned
from jaxattn.kernels.mla_decode.columns_memory import BY_COLUMN, BY_ROW, SCORES
from jaxattn.kernels.mla_decode.schedule import PAGE

# What the largest that a row's s P can be becomes; and what that is at least taken for, so that no
# float32 number is divided by 0.
LARGEST_P, SMALLEST = 256.0, 1e-35
FEW_COLUMNS = 16  # whose sums of all dims are in registers beside the output
MINIMA = 2  # in `Memory.units`, behind two steps' units


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedCut(Cut):
    """
    Attributes:
        form: the cache's format.
        room: how the block's memory is divided.
    """

    form: TurboFormat
    room: Room


class Body(Block[CodedCut, Memory]):
    part: CodedPairs

    def __init__(self, cut: CodedCut, refs: Refs, memory: Memory):
        super().__init__(cut, refs, memory)
        self.fragments = Fragments(cut.form, cut.room.pitch, interpret=cut.interpret)
        self.scores_smem = memory.scores.at[self.wg, :, pl.ds(0, PAGE)]
        self.p_smem, self.rescale_smem = memory.p.at[self.wg], memory.stats.at[0, self.wg]
        self.minima_smem = memory.units.at[MINIMA, self.wg]

    def pairs(self) -> CodedPairs:
        return CodedPairs(**self.of_pairs(), form=self.cut.form, tokens=self.cut.page_size)

    def load(self) -> None:
        memory, cut = self.memory, self.cut

        def copies(pair, numbers, step, wg, slot):
            return self.part.copies(pair, numbers, step, memory.codes.at[wg, slot])

        queries = TurnedQueries(
            q_ref=self.refs.q_ref, rows=self.rows, part=self.part, memory=memory, scale=cut.scale,
            kv_scale_ref=None, form=cut.form,
        )  # fmt: skip
        Loader(
            part=self.part, queries=queries, memory=memory, consumers=cut.consumers,
            interpret=cut.interpret,
            rings=(Ring(cut.room.steps, memory.codes_loaded, memory.codes_read, copies),),
        ).run(self.write_empty_rows)  # fmt: skip

    def factor(self, pair: jax.Array, queries_at: jax.Array) -> jax.Array:
        factors = self.memory.factors.at[queries_at]
        return self.over_keys(plgpu.load(factors, layout=BY_ROW, optimized=False))

    def empty(self) -> Any:
        none, blocks = self.no_sum(), self.cut.head_dim // PAGE
        return self.no_top(), none, none, (self.no_output(PAGE),) * blocks

    def result(self, state: Any) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
        top, total, minima, accs = state
        self.minima_smem[...] = minima.sum(axis=1)
        plgpu.commit_smem()
        middles = self._of_columns(self.minima_smem)
        return tuple(acc + middles for acc in accs), top, total

    def step(self, piece: Piece, i: jax.Array, state: Any) -> Any:
        (top, total, minima, accs), memory, cut = state, self.memory, self.cut
        slot, token = self._loaded(piece, i)
        codes = memory.codes.at[self.wg, slot]
        places = self.iota(0).astype(jnp.float32)
        norm, scale, middle = self.fragments.numbers(codes, places)
        # Selected: 0 times the NaN of a token that a row does not see would be NaN.
        scale, unit = self._divided(jnp.where(self.seen(piece, token), scale, 0.0))
        # Of two places, since other warps may still read the last step's; and before the warps
        # meet, so that the lanes' exchange is not put off until the scores are there.
        units_smem = memory.units.at[lax.rem(i, 2), self.wg]
        units_smem[...] = unit
        keys = (self.fragments.keys(codes),)
        (product,) = self._multiply(keys, memory.queries.at[piece.queries_at])
        values = self.fragments.values(codes)
        store_turned(self.scores_smem, product, interpret=cut.interpret)
        meet(interpret=cut.interpret)
        # All four warps have the step's codes, as they met to exchange their scores.
        plgpu.barrier_arrive(memory.codes_read.at[self.wg, slot])
        scores = plgpu.load(self.scores_smem, layout=SCORES, optimized=False)
        by = piece.factor if norm is None else piece.factor * norm
        seen, scores = self.softened(scores, by, piece, token)
        old, top = top, jnp.maximum(top, scores.max(axis=1))
        p, rescale = jnp.exp2(scores - self.over_keys(top)), jnp.exp2(old - top)
        total = total * self.over_keys(rescale) + p
        minima = minima * self.over_keys(rescale) + jnp.where(seen, p * middle, 0.0)
        self._store_weights(p * scale, rescale)
        return top, total, minima, self._added(accs, values, units_smem)

    def _loaded(self, piece: Piece, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the place in the ring of this warpgroup's codes of a step, which are there; the step's
        first token)."""
        memory, cut = self.memory, self.cut
        step = piece.first + cut.consumers * i
        slot = lax.rem(place_of(piece.done + step, cut.consumers)[1], cut.room.steps)
        token = piece.first_token + step * PAGE
        plgpu.barrier_wait(memory.codes_loaded.at[self.wg, slot])
        return slot, token

    def _added(self, accs: Any, values: tuple[jax.Array, ...], units_smem: Any) -> Any:
        """The rescaled sums, and the step's values times its weights in shared memory."""
        by, unit = (self._of_columns(x) for x in (self.rescale_smem, units_smem))
        products = self._multiply(values, self.p_smem)
        return tuple(acc * by + x * unit for acc, x in zip(accs, products, strict=True))

    def _divided(self, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The scales of tokens, divided so that s P has room in e4m3; and by what, for each row.

        No p is above 1, so the largest scale says what s P can be at most. It needs no score: lanes
        tell each other of it before the first product is waited for.
        """
        largest = jnp.maximum(jnp.abs(scale).max(axis=1), SMALLEST)
        return scale * self.over_keys(LARGEST_P / largest), largest * (1 / LARGEST_P)

    def _store_weights(self, weights: jax.Array, rescale: jax.Array) -> None:
        """s P as two terms, and the rescaling, for all to read."""
        columns = self.cut.columns
        targets = tuple(self.p_smem.at[pl.ds(i * columns, columns)] for i in range(TERMS))
        store_terms(targets, weights, interpret=self.cut.interpret)
        self.rescale_smem[...] = rescale
        plgpu.commit_smem()

    def _multiply(self, left: tuple[jax.Array, ...], right: Any) -> list[jax.Array]:
        """Blocks [64, K] times both terms [2 N, K] in shared memory: blocks [64, N]."""
        columns = self.cut.columns
        if self.cut.interpret:
            both = right[...].astype(jnp.float32).T
            return [joined_terms(jnp.dot(block, both), interpret=True) for block in left]
        if columns > FEW_COLUMNS and len(left) > 1:  # one block's sums at a time
            return [product for block in left for product in self._multiply((block,), right)]

        def run(*refs: Any) -> list[jax.Array]:
            for ref, block in zip(refs, left, strict=True):
                plgpu.wgmma(ref, block, right.transpose((1, 0)))
            return [ref[...] for ref in refs]

        out_type = plgpu.ACC((PAGE, TERMS * columns), jnp.float32)
        products = pl.run_scoped(run, *[out_type] * len(left))
        return [joined_terms(product, interpret=False) for product in products]

    def _of_columns(self, ref: Any) -> jax.Array:
        """A number of each packed row, for its sums of 64 dims."""
        return over_out(plgpu.load(ref, layout=BY_COLUMN), PAGE)
