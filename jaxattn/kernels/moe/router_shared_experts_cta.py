"""The CTAs of the kernel `router_shared_experts`: the router's cluster, and the shared experts'."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.instructions import warpgroup_barrier
from jaxattn.kernels.hopper.reduce.cluster_reduction import cluster_barrier, cluster_block_index
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import (
    MOST_PAIRS,
    RmsNormPrologue,
    RmsNormPrologueParams,
)
from jaxattn.kernels.hopper.store.transposed_store import store_transposed
from jaxattn.kernels.hopper.store.unoptimized_store import store
from jaxattn.kernels.moe.fp8_accumulators import PRODUCT
from jaxattn.kernels.moe.panel_matrix import PanelMatrix
from jaxattn.kernels.moe.routing.small_batch_alignment import PAIRS
from jaxattn.kernels.moe.routing.token_alignment import EXPERT, FROM, GROUPS, TO
from jaxattn.kernels.moe.routing.topk_gating import THREADS, TopkGating
from jaxattn.kernels.moe.tile_config import GROUP, ROWS

EXPERTS = 64
COLUMNS = 2 * EXPERTS  # of a router in two halves: the M of two wgmmas
DEPTH = 128  # numbers of K of a copy
PARTS = 8  # CTAs of a cluster
STAGES = 5  # copies that a CTA has in flight
SHARERS = 2  # CTAs of a cluster that divide the K numbers of 64 columns
MOST_NORMED = PARTS * DEPTH * MOST_PAIRS // 2  # features
ROW = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterExpertsConfig:
    """The static properties of a launch, known when it is traced.

    Attributes:
        width: I.
        steps: Steps of K.
        results: The location of the rows of h; an expert's 8 rows begin at 8 times its index among
            the ids.
    """

    always: int
    width: int
    steps: int
    affine: tuple[int, int]
    results: PanelMatrix
    choice: TopkGating
    interpret: bool

    @property
    def pieces(self) -> int:
        """The pieces of a shared expert, each for some CTAs."""
        return self.width // ROWS

    @property
    def items(self) -> int:
        return self.always * self.pieces


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterExpertsRefs:
    """The refs of a CTA: operands and results, then its shared memory and barriers."""

    x: Any
    router: Any  # [L, F, 128]
    bias: Any  # [L, E], or None
    gate_up: Any  # [L, E, 2 I, F]
    layer: Any
    valid: Any  # or None
    h: Any
    interpreter_sums: Any  # the interpreter's, for a cluster's sums and squares
    interpreter_shared_sums: Any  # the same, for gate and up
    added: Any  # for a norm, as its weights, the sum and the normed token; else None
    norms: Any
    ids: Any
    weights: Any
    tiles: Any
    total: Any
    left: Any
    positions: Any
    summed: Any
    normed: Any
    ring: Any  # [stage, 2, 64, 128]: gate and up, or twice 64 rows of the router
    x_smem: Any  # [stage, 8, 128]; with a norm `smem` of its K
    out_smem: Any  # [8, 64]
    sums_smem: Any  # [8, 128]
    shared_smem: Any  # [2, 64, 8], for gate and up
    logits_smem: Any
    bias_smem: Any
    scores_smem: Any
    choice_smem: Any
    ids_smem: Any
    loaded: Any  # full barriers
    bias_loaded: Any
    cluster_barrier: Any


class RouterExpertsCta:
    """A CTA of the cluster that does the gating, or of one that multiplies a shared expert."""

    def __init__(
        self,
        cut: RouterExpertsConfig,
        normed: RmsNormPrologueParams | None,
        refs: RouterExpertsRefs,
    ):
        self.cut, self.normed, self.refs = cut, normed, refs
        layer = self.number = refs.layer[0]
        self.zero = jnp.minimum(layer, 0)
        self.layer = layer * cut.affine[0] + cut.affine[1]
        self.is_token = True if refs.valid is None else refs.valid[0] != 0
        self.part = cluster_block_index(PARTS, interpret=cut.interpret)
        self.tile = lax.axis_index("tile")

    def run(self) -> None:
        pl.when(self.tile == 0)(self._route)
        number = (self.tile - 1) * PARTS + self.part
        item, sharer = lax.div(number, SHARERS), lax.rem(number, SHARERS)
        pl.when((self.tile > 0) & self.is_token)(partial(self._share, item, sharer))

    def _load(self, begin: Any, weights: Any, step: Any) -> None:
        """Loads a step of K; `weights(K)` returns two tiles of it."""
        refs, slot = self.refs, lax.rem(step, STAGES)
        k_slice = pl.ds(pl.multiple_of((begin + step) * DEPTH, DEPTH), DEPTH)
        if self.normed is None:
            tokens = refs.x.at[pl.ds(self.zero, GROUP), k_slice]
            plgpu.copy_gmem_to_smem(tokens, refs.x_smem.at[slot], refs.loaded.at[slot])
        for half, source in enumerate(weights(k_slice)):
            plgpu.copy_gmem_to_smem(source, refs.ring.at[slot, half], refs.loaded.at[slot])

    def _begin(self, begin: Any, steps: Any, weights: Any) -> None:
        """Loads the first steps, as many as there are stages."""
        for step in range(min(STAGES, self.cut.steps)):
            pl.when(step < steps)(partial(self._load, begin, weights, jnp.int32(step)))

    def _stream(self, begin: Any, steps: Any, weights: Any, product: Any) -> None:
        """Calls `product(slot, halves)` for each step of K, with the token's two halves of it."""
        cut, refs = self.cut, self.refs
        load = partial(self._load, begin, weights)

        @pl.loop(0, steps)
        def _step(step):
            slot = lax.rem(step, STAGES)
            plgpu.barrier_wait(refs.loaded.at[slot])
            if self.normed is None:
                half_slices = [pl.ds(half * ROWS, ROWS) for half in (0, 1)]
                halves = [refs.x_smem.at[slot, :, half_slice] for half_slice in half_slices]
            else:
                operand = self.norm(0, 0).operand
                halves = [operand.at[2 * step + half] for half in (0, 1)]
            product(slot, [tokens.transpose((1, 0)) for tokens in halves])  # all before are done

            @pl.when((step > 0) & (step + STAGES - 1 < steps))
            def _reload():
                warpgroup_barrier(
                    interpret=cut.interpret
                )  # all four warps' products have read the stage
                load(step + STAGES - 1)

    def norm(self, first_k: Any, pairs: int) -> RmsNormPrologue:
        """Returns the prologue for `pairs` pairs of steps from `first_k` of K."""
        refs, normed = self.refs, self.normed
        assert normed is not None
        return RmsNormPrologue(
            x_ref=refs.x, added_ref=refs.added, weights_ref=refs.norms,
            row=self.number * normed.affine[0] + normed.affine[1], total_ref=refs.summed,
            normed_ref=refs.normed, x_smem=refs.x_smem, first=first_k, pairs=pairs, eps=normed.eps,
            interpret=self.cut.interpret,
        )  # fmt: skip

    # --- the router and the gating

    def _route(self) -> None:
        cut, refs = self.cut, self.refs
        begin, end = (lax.div((self.part + offset) * cut.steps, PARTS) for offset in (0, 1))

        def weights(k_slice: Any) -> list[Any]:
            rows = [pl.multiple_of(k_slice.start + half * ROWS, ROWS) for half in (0, 1)]
            return [refs.router.at[self.layer, pl.ds(row, ROWS)] for row in rows]

        self._begin(begin, end - begin, weights)
        if refs.bias is not None:

            @pl.when(self.part == 0)  # the CTA that chooses, and waits for the copy
            def _bias():
                refs.bias_smem[...] = cut.choice.full(jnp.float32(0))
                plgpu.commit_smem()
                of_bias = refs.bias.at[self.layer, pl.ds(0, EXPERTS)]
                plgpu.copy_gmem_to_smem(
                    of_bias, refs.bias_smem.at[pl.ds(0, EXPERTS)], refs.bias_loaded
                )

        norm = None
        if self.normed is not None:
            norm = self.norm(begin * DEPTH, cut.steps // PARTS)
            sums, weighted, squares = norm.make()

        def accumulate(acc: Any) -> jax.Array:
            def product(slot: Any, halves: list[Any]) -> None:
                for half, tokens in enumerate(halves):
                    plgpu.wgmma(acc, refs.ring.at[slot, half].transpose((1, 0)), tokens)
                plgpu.wgmma_wait(2)

            self._stream(begin, end - begin, weights, product)
            return acc[...]

        products = pl.run_scoped(accumulate, plgpu.ACC((COLUMNS, GROUP), jnp.float32))
        store_transposed(refs.sums_smem, products, interpret=cut.interpret)
        if norm is not None:
            refs.sums_smem.at[1][...] = squares  # in the memory of a next token's sums
        if refs.interpreter_sums is not None:
            for row in range(1 + (norm is not None)):
                refs.interpreter_sums[self.tile, row, self.part] = refs.sums_smem[row]
        cluster_barrier(refs.cluster_barrier, interpret=cut.interpret)
        factor = None if norm is None else norm.factor(self._summed(1))
        pl.when(self.part == 0)(partial(self._choose, factor))
        if norm is not None and factor is not None:
            norm.give(sums, weighted, factor)
        # until the first CTA has read all sums
        cluster_barrier(refs.cluster_barrier, interpret=cut.interpret)

    def _summed(self, row: int, blocks: Sequence[Any] = range(PARTS)) -> jax.Array:
        """Returns a row of the sums, added over CTAs of the cluster."""

        def of(other: Any) -> Any:
            if self.refs.interpreter_sums is not None:
                return self.refs.interpreter_sums.at[self.tile, row, other]
            return plgpu.cluster_ref(self.refs.sums_smem, {"part": jnp.int32(other)}).at[row]

        first, *rest = (plgpu.load(of(other), layout=ROW, optimized=False) for other in blocks)
        return sum(rest, first)

    def _choose(self, factor: jax.Array | None) -> None:
        cut, refs = self.cut, self.refs
        logits = self._summed(0)
        logits = logits if factor is None else logits * factor
        refs.logits_smem.at[pl.ds(0, COLUMNS)][...] = logits
        warpgroup_barrier(interpret=cut.interpret)
        layout = cut.choice.layout
        high, low = (
            plgpu.load(
                refs.logits_smem.at[pl.ds(first_logit, THREADS)], layout=layout, optimized=False
            )
            for first_logit in (0, EXPERTS)
        )
        bias = None
        if refs.bias is not None:
            plgpu.barrier_wait(refs.bias_loaded)
            bias = plgpu.load(refs.bias_smem, layout=layout)
        ids, weights = cut.choice.take(
            high + low, bias, refs.scores_smem, refs.choice_smem, refs.ids_smem
        )
        ids = [*ids, *(jnp.int32(EXPERTS + i) for i in range(cut.always))]
        weights = [*weights, *[jnp.float32(1)] * cut.always]
        for k, (expert, weight) in enumerate(zip(ids, weights, strict=True)):
            refs.ids[0, k] = jnp.where(self.is_token, expert, -1)
            refs.weights[0, k] = weight
        self._list(ids)

    def _list(self, ids: list[jax.Array]) -> None:
        """Writes the work list: tile k is the k-th expert's, and its rows begin at 8 k."""
        refs, choice = self.refs, self.cut.choice
        layout = plgpu.Layout.WG_STRIDED((PAIRS,), vec_size=1)

        def full(value: Any) -> jax.Array:
            value = lax.broadcast_in_dim(jnp.asarray(value, jnp.int32), (PAIRS,), [])
            return plgpu.layout_cast(value, layout)

        pair = plgpu.broadcasted_iota(jnp.int32, (PAIRS,), 0, layout=layout)
        expert = full(0)
        for k, expert_id in enumerate(ids):
            expert = jnp.where(pair == full(k), full(expert_id), expert)
        count = jnp.where(self.is_token, len(ids), 0)
        entries = {EXPERT: expert, FROM: full(0), TO: pair * full(GROUP), GROUPS: full(1)}
        for field, entry_values in entries.items():
            refs.tiles.at[field][...] = entry_values
        refs.positions[...] = jnp.where(pair < full(count), pair * full(GROUP), full(-1))
        refs.total[...] = full(count)
        refs.left[...] = full(jnp.minimum(count, choice.top_k))

    # --- the shared experts

    def _share(self, item: jax.Array, sharer: jax.Array) -> None:
        """Computes a CTA's part of K. A CTA without its own item repeats the last item, and stores
        nothing."""
        cut, refs = self.cut, self.refs
        is_own_item = (item < cut.items) & (sharer == 0)
        item = jnp.minimum(item, cut.items - 1)
        shared_expert = lax.div(item, cut.pieces)
        column = (item - shared_expert * cut.pieces) * ROWS
        of_expert = refs.gate_up.at[self.layer, EXPERTS + shared_expert]
        begin, end = (lax.div((sharer + offset) * cut.steps, SHARERS) for offset in (0, 1))

        def weights(k_slice: Any) -> list[Any]:
            rows = [pl.multiple_of(column + up * cut.width, ROWS) for up in (0, 1)]
            return [of_expert.at[pl.ds(row, ROWS), k_slice] for row in rows]

        self._begin(begin, end - begin, weights)
        squares = None
        if self.normed is not None:
            norm = self.norm(begin * DEPTH, cut.steps // SHARERS)
            squares = norm.make()[2]

        def accumulate(*accs: Any) -> list[jax.Array]:
            def product(slot: Any, halves: list[Any]) -> None:
                for half, tokens in enumerate(halves):
                    half_slice = pl.ds(half * ROWS, ROWS)
                    for up, acc in enumerate(accs):
                        plgpu.wgmma(acc, refs.ring.at[slot, up, :, half_slice], tokens)
                plgpu.wgmma_wait(4)

            self._stream(begin, end - begin, weights, product)
            return [acc[...] for acc in accs]

        sums = pl.run_scoped(accumulate, *[plgpu.ACC((ROWS, GROUP), jnp.float32)] * 2)
        for matrix, total in enumerate(sums):
            store(refs.shared_smem.at[matrix], total, interpret=cut.interpret)
        if squares is not None:
            refs.sums_smem.at[1][...] = squares
        if refs.interpreter_shared_sums is not None:
            refs.interpreter_shared_sums[self.tile, self.part] = refs.shared_smem[...]
            refs.interpreter_sums[self.tile, 1, self.part] = refs.sums_smem[1]
        cluster_barrier(refs.cluster_barrier, interpret=cut.interpret)
        sharers = [self.part - sharer + other for other in range(SHARERS)]
        gate, up = (self._reduce_split_k(sharers, matrix) for matrix in (0, 1))
        if squares is not None:
            factor = self.norm(begin, 0).factor(self._summed(1, sharers))
            gate, up = gate * factor, up * factor
        y = gate / (1.0 + jnp.exp(-gate)) * up

        @pl.when(is_own_item)
        def _store():
            store_transposed(refs.out_smem, y.astype(refs.out_smem.dtype), interpret=cut.interpret)
            plgpu.commit_smem()
            row = (cut.choice.top_k + shared_expert) * GROUP
            destination = cut.results.at(refs.h, row, GROUP, column, ROWS)
            plgpu.copy_smem_to_gmem(refs.out_smem, destination)
            plgpu.wait_smem_to_gmem(0)

        # until the others have read the sums
        cluster_barrier(refs.cluster_barrier, interpret=cut.interpret)

    def _reduce_split_k(self, sharers: list[Any], matrix: int) -> jax.Array:
        """Returns the sum of gate's or up's parts, in the order of K."""

        def of(other: Any) -> Any:
            if self.refs.interpreter_shared_sums is not None:
                return self.refs.interpreter_shared_sums.at[self.tile, other, matrix]
            return plgpu.cluster_ref(self.refs.shared_smem, {"part": other}).at[matrix]

        first, *rest = (
            plgpu.load(of(sharer), layout=PRODUCT, optimized=False) for sharer in sharers
        )
        return sum(rest, first)
