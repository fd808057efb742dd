"""The mainloop of a warpgroup of `mla_decode_swap_ab` over the FP8 pages of a piece.

fp8_register_operands.py widens pages in registers, without their scales. A token has one scale
per block of 128 dims. The scale of a block multiplies the token's scores, so that there is one
product per block, and its P, so that there is one P per block:

    scores^T = rope + sum_b s_b (K_b Q_b^T)          out_b^T += V_b^T (s_b P / unit)^T

The unit, a power of two, is 2**-14 of the largest scale so far, or down to half of that, and the
output is rescaled when it grows. Float16 then keeps a token's share down to 2**-39 of that scale.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import BLOCK
from jaxattn.kernels.attention.packed_row_layouts import BY_ROW, SCORES
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.mla.decode.latent_tile import BLOCKS, RANK, ROPE
from jaxattn.kernels.mla.decode.swap_ab.cta_context import SwapAbCta
from jaxattn.kernels.mla.decode.swap_ab.fp8_register_operands import MlaFp8Operands, unknown_zero
from jaxattn.kernels.mla.decode.swap_ab.mainloop import (
    Accumulators,
    SwapAbMainloop,
    SwapAbWorkTile,
    iota,
    over_keys,
    product,
)
from jaxattn.kernels.mla.decode.swap_ab.smem import DEPTH, TILES, WARPGROUPS

# Blocks whose values are widened while the scores are exchanged, 32 registers each.
AHEAD = 3
# P is float16. This factor leaves it room below 1, and above, because the largest scale may be
# nearly twice the power of two that stands for it.
ROOM = 2.0**14
# The least unit of block scales; smaller scales share it, for which float16 has room.
LEAST_UNIT = 2.0**-114


def next_unit(unit: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a power of two, at least `largest` / 2 / ROOM, and its reciprocal."""
    bits = lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    power = lax.bitcast_convert_type(bits, jnp.float32)
    unit = jnp.maximum(unit, power * (1 / ROOM))
    bits = (254 << 23) - lax.bitcast_convert_type(unit, jnp.int32)
    return unit, lax.bitcast_convert_type(bits, jnp.float32)


class SwapAbFp8Mainloop(SwapAbMainloop):
    """The mainloop over pages with one scale for the cache, or with one per block of a token."""

    depth = DEPTH
    as_values = True

    def __init__(self, block: SwapAbCta, piece: SwapAbWorkTile):
        super().__init__(block, piece)
        self.fragments = MlaFp8Operands(self.refs.kv_ref.dtype)
        self.scaled = self.cut.latents.block_scaled
        self.versions = self.refs.p_smem.shape[1]
        # Many columns leave room for a block's 32 registers, but not for the next block's too.
        self.lag = 0 if self.scaled and self.cut.columns > 16 else 1
        self.blocks_ahead = AHEAD if self.cut.columns <= 16 else 0

    @property
    def unit_of_all(self) -> Any:
        return self.block.kv_scale / ROOM

    def load_first(self, numbers: list[list[jax.Array]]) -> None:
        piece = self.piece
        for k, some in enumerate(numbers):
            page = piece.first_page + k * WARPGROUPS
            load = lambda some=some, page=page, k=k: self._load_slot(some, page, k)  # noqa: E731
            pl.when(piece.num_pages > k)(load)

    def take_queries(self) -> None:
        block = self.block
        queries, rope = (x.at[0] for x in block.q_loads)
        self.fragments.halve_queries(queries, rope, block.q_factor_smem, self.wg)
        block.shared.meet()
        of_rows = plgpu.load(block.q_factor_smem, layout=BY_ROW, optimized=False)
        self.of_rows = over_keys(of_rows * block.factor)

    def _load_slot(self, numbers: list[jax.Array], page: jax.Array, slot: Any) -> None:
        kv, there, tokens = self.block.kv_smem, self.refs.loaded.at[self.wg, slot], self.tokens
        for j, source in enumerate(self.part.sources(numbers, page)):
            some = pl.ds(j * tokens, tokens)
            if self.scaled:
                # The page is copied as one piece of memory. In boxes of 128 bytes TMA would read
                # twice as often: a token has 656 bytes, so most boxes lie across two lines.
                to = kv.at[self.wg, slot, some]
                plgpu.copy_gmem_to_smem(source, to, there, oob_mode=plgpu.OOBFillMode.UNDEFINED)
                continue
            for block in range(TILES):
                # The 64 rope numbers come together with the 64 numbers before them.
                first = block * BLOCK if block < BLOCKS else RANK + ROPE - BLOCK
                to = kv.at[self.wg, slot, block, some]
                plgpu.copy_gmem_to_smem(source.at[:, pl.ds(first, BLOCK)], to, there)

    def _page(self, i: jax.Array, carry: Any) -> Any:
        top, total, unit, accs, numbers = carry
        piece, slot = self.piece, lax.rem(i, DEPTH)
        page = piece.first_page + WARPGROUPS * i
        left = self.length - page * PAGE
        plgpu.barrier_wait(self.refs.loaded.at[self.wg, slot])
        scores = self._scores_of(slot, left)
        ahead = lambda: [self._values(slot, block) for block in range(self.blocks_ahead)]  # noqa: E731
        top, total, p, rescale, begun = self._online_softmax(i, top, total, scores, ahead)
        scales = None
        if self.scaled:
            scales, largest = self._scales(slot, unit, left)
            old = unit
            unit, inverse = next_unit(unit, largest)
            p *= over_keys(inverse)
            rescale *= old * inverse
        else:
            p *= ROOM
        accs = self._add_scaled(accs, p, rescale, scales, begun, slot, left)
        plgpu.commit_smem()  # all four warps have read the page
        later = page + WARPGROUPS * DEPTH
        pl.when(i < piece.num_pages - DEPTH)(lambda: self._load_slot(numbers, later, slot))
        following = self.part.numbers(piece.row, later + WARPGROUPS, piece.stop)
        return top, total, unit, accs, following

    def _get_kv_slot(self, slot: jax.Array) -> Any:
        return self.block.kv_smem.at[self.wg, slot]

    def _values(self, slot: jax.Array, block: int) -> jax.Array:
        return self.fragments.values(self._get_kv_slot(slot), block)

    def _clear_tail(self, left: jax.Array) -> None:
        """Does nothing: the tail was cleared before the scores, since keys are in registers."""

    def _scores_of(self, slot: jax.Array, left: jax.Array) -> jax.Array:
        """Returns scores^T [64 tokens, N] with their scales, except the factor `of_rows`."""
        # The tail is cleared before the scores are exchanged, and so before it is read as values.
        pl.when(left < PAGE)(lambda: self.fragments.clear(self._get_kv_slot(slot), left))
        if self.scaled:
            self.fragments.turn_scales(self._get_kv_slot(slot), self.refs.score_smem.at[self.wg])
        products = 1 + BLOCKS * self.scaled
        return pl.run_scoped(
            lambda *refs: self._products(refs, slot), *[self.scores_type] * products
        )

    def _products(self, refs: Any, slot: jax.Array) -> jax.Array:
        """Computes the products. With scales, the rope's product and each block's have one `ref`
        each."""
        page, fragments, scaled = self._get_kv_slot(slot), self.fragments, self.scaled
        q, q_rope = self.block.q_operands
        zero = unknown_zero()
        product(refs[0], fragments.rope(page), q_rope.at[zero])
        scores: Any = None

        def add(i: int, running: int) -> jax.Array:
            done = plgpu.wgmma_accumulator_load(refs[i], wait_n=running)
            return done if i == 0 else fragments.plus_scaled(scores, done, page, i - 1)

        for i in range(BLOCKS):
            keys = fragments.keys(page, i)
            queries = q.at[zero, :, pl.ds(i * BLOCK, BLOCK)]
            product(refs[1 + i if scaled else 0], keys, queries)
            if scaled:
                scores = add(i, 1)
                if self.lag == 0 and i < BLOCKS - 1:
                    plgpu.wgmma_wait(0)
            else:
                plgpu.wgmma_wait(1)
        return add(BLOCKS, 0) if scaled else refs[0][...]

    def _scales(self, slot: jax.Array, unit: jax.Array, left: jax.Array) -> Any:
        """Returns, for each block, the scales of the scores' tokens, and the largest scale for each
        row."""
        del left
        tokens = iota(self.cut.columns, 1)
        scores = self.refs.score_smem.at[self.wg]
        return self.fragments.scales_of_keys(self._get_kv_slot(slot), scores, tokens, unit, SCORES)

    def _add_scaled(
        self, accs: Accumulators, p: jax.Array, rescale: jax.Array,
        scales: list[jax.Array] | None, begun: list[jax.Array], slot: jax.Array, left: jax.Array,
    ) -> Accumulators:  # fmt: skip
        """Returns the rescaled output plus P V; with `scales`, each block has its own P.

        Args:
            begun: Values of the first blocks, which are already widened.
        """
        del left

        def run(*refs: Any) -> Accumulators:
            def set_out(now: Accumulators) -> None:
                for ref, acc in zip(refs, now, strict=True):
                    ref[...] = acc

            def add(i: int, p_here: Any) -> None:
                values = begun[i] if i < len(begun) else self._values(slot, i)
                plgpu.wgmma(refs[i], values, p_here)
                plgpu.wgmma_wait(self.lag)

            self._each_block(accs, p, rescale, scales, unknown_zero, set_out, add)
            return tuple(ref[...] for ref in refs)

        return self._with_accumulators(run)

    def _each_block(
        self, accs: Accumulators, p: jax.Array, rescale: jax.Array,
        scales: list[jax.Array] | None, zero_of: Callable[[], Any],
        begin: Callable[[Accumulators], None], add: Callable[[int, Any], None],
    ) -> None:  # fmt: skip
        """Calls `begin(output, rescaled)`, then `add(block, its transposed P)` for each block. P
        goes through shared memory, as many blocks at a time as there is room for."""
        self.block.rescale_smem[self.wg] = rescale
        zero = zero_of()
        for start in range(0, BLOCKS if scales else 1, self.versions):
            if start:
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()  # all four warps' products have read P
            for version in range(self.versions):
                here = p * scales[start + version] if scales else p
                self.refs.p_smem[self.wg, version] = here.astype(jnp.float16)
            plgpu.commit_smem()
            if not start:
                begin(self._rescaled(accs))
            for i in range(start, start + self.versions) if scales else range(BLOCKS):
                add(i, self._transpose_p(i - start if scales else 0, zero))
