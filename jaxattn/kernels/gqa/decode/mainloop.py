"""The body of `gqa_decode`: one producer warpgroup, and two or three consumers that take steps in
turns.

Packed rows (query token, head of the group) are the columns (N) of both products, so that eight of
them cost eight columns:

    scores^T [64 tokens, N] = K Q^T          K [64, D] of a step and KV head
    out^T    [D, N]        += V^T P^T        V [64, D] of the same tokens, seen transposed

The softmax reads the scores transposed through shared memory, so that half a warp has a column's
scores; P returns the same way. The stages of keys are free again as soon as the scores are done,
before those of the values. At a piece's end epilogue.py merges the warpgroups' results.

mma.py has the products, for 16-bit and for FP8 caches.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.packed_row_layouts import BY_ROW, SCORES
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.gqa.decode.cta import (
    GqaDecodeConfig,
    GqaDecodeCta,
    GqaDecodeRefs,
    GqaDecodeTile,
)
from jaxattn.kernels.gqa.decode.fp8_register_operands import P_EXPONENT, GqaFp8Operands
from jaxattn.kernels.gqa.decode.load.producer import GqaDecodeProducer, LoadPipeline, place_of
from jaxattn.kernels.gqa.decode.load.query_gather import QueryGather
from jaxattn.kernels.gqa.decode.mma import products_of
from jaxattn.kernels.gqa.decode.smem import GqaDecodeSmem
from jaxattn.kernels.gqa.decode.split_kv.work_iterator import KEYS, VALUES
from jaxattn.kernels.hopper.store.transposed_store import store_transposed


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaMainloopConfig(GqaDecodeConfig):
    """The static properties of a `gqa_decode` launch.

    Attributes:
        dtype: The dtype of queries and P as operands.
        fp8: Whether keys and values are e4m3.
        ahead: Stages of a warpgroup's rings, of keys and of values.
    """

    dtype: Any
    fp8: bool
    ahead: tuple[int, int]


class GqaDecodeMainloop(GqaDecodeCta[GqaMainloopConfig, GqaDecodeSmem]):
    def __init__(self, cut: GqaMainloopConfig, refs: GqaDecodeRefs, memory: GqaDecodeSmem):
        super().__init__(cut, refs, memory)
        self.products = products_of(
            cut.columns, cut.head_dim, fp8=cut.fp8, interpret=cut.interpret
        )  # fmt: skip
        self.scores_smem = memory.scores.at[self.wg].at[:, pl.ds(0, PAGE)]
        self.p_smem = memory.p.at[self.wg]
        self.rescale_smem = memory.stats.at[0, self.wg]

    def tiles(self) -> GqaFp8Operands | None:
        return GqaFp8Operands(self.cut.head_dim) if self.cut.fp8 else None

    def first_key(self, pair: jax.Array) -> jax.Array | None:
        return self.part.first_key(pair)

    def load(self) -> None:
        memory, ahead = self.memory, self.cut.ahead
        rings = (
            LoadPipeline(ahead[KEYS], memory.keys_loaded, memory.keys_read, self._copies(KEYS)),
            LoadPipeline(
                ahead[VALUES], memory.values_loaded, memory.values_read, self._copies(VALUES)
            ),
        )
        queries = QueryGather(
            q_ref=self.refs.q_ref, rows=self.rows, part=self.part, memory=memory,
            scale=self.cut.scale, kv_scale_ref=self.refs.kv_scale_ref,
        )  # fmt: skip
        GqaDecodeProducer(
            part=self.part, queries=queries, memory=memory, rings=rings,
            consumers=self.cut.consumers, interpret=self.cut.interpret,
        ).run(self.write_empty_rows)  # fmt: skip

    def factor(self, pair: jax.Array, queries_at: jax.Array) -> Any:
        if not self.cut.fp8:
            return self.cut.scale
        factors = self.memory.factors.at[queries_at]
        return self.over_keys(plgpu.load(factors, layout=BY_ROW, optimized=False))

    def _copies(self, kind: int) -> Any:
        """Returns `LoadPipeline.copies`: one copy for each contiguous run of tokens."""
        to = self.memory.keys if kind == KEYS else self.memory.values
        tokens = min(self.cut.page_size, PAGE)

        def copies(pair, numbers, step, wg, slot):
            boxes = self.part.boxes(kind, pair, numbers, step)
            return [
                (box, to.at[wg, slot, pl.ds(j * tokens, tokens)]) for j, box in enumerate(boxes)
            ]

        return copies

    def empty(self) -> Any:
        nothing = self.init_output(self.products.rows)
        return self.init_max(), self.init_sum(), (nothing,) * self.products.blocks

    def result(self, state: Any) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
        top, total, accs = state
        return accs, top, total

    def step(self, piece: GqaDecodeTile, i: jax.Array, state: Any) -> Any:
        (top, total, accs), memory, cut = state, self.memory, self.cut
        step = piece.first_step + cut.consumers * i
        keys_at, values_at = (
            lax.rem(place_of(piece.done + step, cut.consumers)[1], n) for n in cut.ahead
        )
        token = piece.first_token + step * PAGE
        plgpu.barrier_wait(memory.keys_loaded.at[self.wg, keys_at])
        keys = memory.keys.at[self.wg, keys_at]
        scores = self.products.scores(keys, memory.queries, piece.queries_at)
        top, p, rescale = self._online_softmax(scores, piece, token, top)
        # All four warps have their scores, because they synchronized to exchange them.
        plgpu.barrier_arrive(memory.keys_read.at[self.wg, keys_at])
        total = total * self.over_keys(rescale) + p
        self.p_smem[...] = p.astype(cut.dtype)
        self.rescale_smem[...] = rescale
        values = memory.values.at[self.wg, values_at]
        plgpu.barrier_wait(memory.values_loaded.at[self.wg, values_at])
        self._clear(values, piece, token)
        plgpu.commit_smem()
        accs = self.products.add(accs, values, self.p_smem, self.rescale_smem)
        plgpu.commit_smem()  # all four warps have read the values
        plgpu.barrier_arrive(memory.values_read.at[self.wg, values_at])
        return top, total, accs

    def _online_softmax(
        self, scores: jax.Array, piece: GqaDecodeTile, token: jax.Array, top: jax.Array
    ) -> Any:
        """Returns (maxima, P, rescaling) with a step's scores, whose first token is `token`."""
        store_transposed(self.scores_smem, scores, interpret=self.cut.interpret)
        plgpu.commit_smem()
        scores = plgpu.load(self.scores_smem, layout=SCORES, optimized=False)
        scores = self.softened(scores, piece.factor, piece, token)[1]
        # The maximum is lowered by this power of two, so that a float16 P is larger by it, as is
        # its sum.
        room = P_EXPONENT if self.cut.dtype == jnp.float16 else 0
        new_top = jnp.maximum(top, scores.max(axis=1) - room)
        p = jnp.exp2(scores - self.over_keys(new_top))
        return new_top, p, jnp.exp2(top - new_top)

    def _clear(self, values: Any, piece: GqaDecodeTile, token: jax.Array) -> None:
        """Zeroes the values that no query of the row sees: 0 * NaN is NaN."""
        outside = piece.length < token + PAGE
        if piece.begin is not None:
            outside |= token < piece.begin

        @pl.when(outside)
        def _():
            self.products.clear(values, piece, token)
