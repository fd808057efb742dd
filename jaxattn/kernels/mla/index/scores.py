"""The indexer's scores, sum_h w_h relu(q_h . k_t), of each token of an item and each of its keys.

    products [64 keys, (token, head)] = keys [64, 128] queries^T        by wgmma, keys from pages
    score of a token = sum over its heads of w relu(product)            4 lanes have a key's numbers

Warpgroups work independently. Each has a part of the tiles of all items, its item's queries in
shared memory, and a ring of key tiles that TMA fills. FP8 keys are converted to the queries' dtype
in registers; a key's scale, which is not negative, multiplies its score.

Scores are stored as int32 numbers with the same order, -0 as 0. Where a tile extends beyond the
keys that the tokens see, numbers are stored that nobody reads.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.packed_row_layouts import BY_COLUMN
from jaxattn.kernels.attention.split_kv_schedule import PAGE, copies_of
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS
from jaxattn.kernels.hopper.fp8_conversion import SWIZZLED, plain_product, widened
from jaxattn.kernels.hopper.instructions import swizzled, warpgroup_barrier
from jaxattn.kernels.hopper.mlir import arith, llvm, utils
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    element,
    i32,
    number,
    plus,
    single,
    store,
    times,
    word,
)
from jaxattn.kernels.mla.index.radix_select import LOWEST
from jaxattn.kernels.mla.index.work_tiles import IndexRows, IndexTiling, tiles_of

DIM = 128  # dims of a key
BY_KEY = plgpu.Layout.WGMMA.reduce(1)
# Bytes of shared memory for queries and keys; barriers take some of the rest.
ROOM = 216 * 1024
MOST_WARPGROUPS = 3  # warpgroups of a CTA; two if a product has more than 128 columns


def ordered(scores: jax.Array) -> jax.Array:
    """Returns float32 scores as int32 with the same order; -0 becomes 0, and none becomes LOWEST.
    NaN is above all: a GPU's arithmetic produces only one NaN, with these bits."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    bits = jnp.where(scores == scores, bits, 0x7FFFFFFF)
    bits = jnp.where(bits == LOWEST, 0, bits)
    return jnp.maximum(bits ^ (lax.shift_right_arithmetic(bits, 31) & 0x7FFFFFFF), LOWEST + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexScoreConfig:
    """The static properties of a launch, known when it is traced."""

    tiling: IndexTiling
    top_k: int
    page_size: int
    dtype: Any  # the queries' dtype
    keys: Any  # the keys' dtype
    interpret: bool

    @property
    def fp8(self) -> bool:
        return jnp.dtype(self.keys).itemsize == 1

    @property
    def query_bytes(self) -> int:
        return self.tiling.columns * DIM * jnp.dtype(self.dtype).itemsize

    @property
    def tile_bytes(self) -> int:
        return PAGE * DIM * jnp.dtype(self.keys).itemsize

    @property
    def warpgroups(self) -> int:
        """The number of warpgroups, as many as have room for three tiles each and for their
        registers."""
        if self.interpret:
            return 1
        fit = ROOM // (self.query_bytes + 3 * self.tile_bytes)
        return max(2, min(MOST_WARPGROUPS if self.tiling.columns <= 128 else 2, fit))

    @property
    def depth(self) -> int:
        """The number of a warpgroup's tiles in shared memory."""
        if self.interpret:
            return 2
        return min(8, (ROOM // self.warpgroups - self.query_bytes) // self.tile_bytes)

    @property
    def blocks(self) -> int:
        return 2 if self.interpret else NUM_SMS

    @property
    def parts(self) -> int:
        return self.blocks * self.warpgroups

    def scratch_types(self) -> dict[str, Any]:
        teams, tiles = self.warpgroups, swizzled(self.dtype)
        columns = self.tiling.columns
        of_keys = SWIZZLED if self.fp8 else tiles
        return {
            "q_smem": plgpu.SMEM((teams, columns, DIM), self.dtype, transforms=tiles),
            "k_smem": plgpu.SMEM((teams, self.depth, PAGE, DIM), self.keys, transforms=of_keys),
            "q_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=teams),
            "k_loaded": plgpu.Barrier(
                num_arrivals=copies_of(self.page_size), num_barriers=(teams, self.depth)
            ),
        }


def index_scores(
    config: IndexScoreConfig, *, interpret: bool, detect_races: bool, **inputs: Any
) -> jax.Array:
    """Returns int32 [items * tokens, width], the scores of a group's items; `IndexScoreRefs` has
    the inputs."""
    rows = config.tiling.group * config.tiling.tokens
    return launch(
        lambda lens_ref, query_lens_ref, first_ref, **refs: IndexScoreWarpgroup(
            config,
            IndexScoreRefs(
                rows=IndexRows(config.tiling, lens_ref, query_lens_ref, first_ref), **refs
            ),
        ).run(),
        name="mla_index_scores",
        grid={"block": config.blocks},
        inputs=inputs,
        outputs={"out_ref": jax.ShapeDtypeStruct((rows, config.tiling.width), jnp.int32)},
        scratch=config.scratch_types(),
        warpgroups=config.warpgroups,
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        detect_races=detect_races,
    )["out_ref"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexScoreRefs:
    """The refs of operands and the result, then of shared memory and barriers."""

    q_ref: Any  # [items, N, 128]
    weights_ref: Any  # float32 [items, N]
    keys_ref: Any  # [L, pages, C, 128]
    scale_ref: Any  # float32 [L, pages, C] for FP8 keys, else None
    layer_ref: Any
    table_ref: Any
    rows: IndexRows
    begins_ref: Any  # `part_begins`; None: a CTA processes all items
    out_ref: Any
    q_smem: Any
    k_smem: Any
    q_loaded: Any
    k_loaded: Any


class IndexScoreWarpgroup:
    """One warpgroup, which computes a part of all items' tiles."""

    def __init__(self, config: IndexScoreConfig, refs: IndexScoreRefs) -> None:
        self.config, self.refs = config, refs
        self.wg = lax.axis_index("wg")
        self.part = lax.axis_index("block") * config.warpgroups + self.wg
        self.layer = refs.layer_ref[0]
        self.piece = min(config.page_size, PAGE)  # keys per copy

    def run(self) -> None:
        config, refs, items = self.config, self.refs, self.config.tiling.group
        if refs.begins_ref is None:
            first, before, stop = jnp.int32(0), jnp.int32(0), jnp.int32(items)
            total = lax.fori_loop(0, items, lambda i, n: n + self._tiles(i), jnp.int32(0))
        else:
            first, before, total = (refs.begins_ref[i, self.part] for i in range(3))
            stop = refs.begins_ref[0, self.part + 1] + 1
        each, more = lax.div(total, config.parts), lax.rem(total, config.parts)
        begin = self.part * each + jnp.minimum(self.part, more)
        end = begin + each + jnp.where(self.part < more, 1, 0)

        def item(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
            before, done = carry
            behind = before + self._tiles(index)
            tile = jnp.maximum(begin, before)
            count = jnp.maximum(jnp.minimum(end, behind) - tile, 0)
            pl.when(count > 0)(lambda: self._item(index, tile - before, count, done))
            return behind, lax.rem(done + count, config.depth)

        lax.fori_loop(first, stop, item, (before, jnp.int32(0)))

    def _tiles(self, index: jax.Array) -> jax.Array:
        return tiles_of(self.refs.rows.most(index), self.config.top_k)

    def _item(self, index: jax.Array, first: jax.Array, count: jax.Array, done: jax.Array) -> None:
        """Computes tiles of one item.

        Args:
            first: The first tile of the item.
            done: The warpgroup's tiles before this item.
        """
        config, refs, depth = self.config, self.refs, self.config.depth
        row = refs.rows.row(index)
        last_page = lax.div(refs.rows.most(index) - 1, config.page_size)

        def load(i: jax.Array) -> None:
            slot = lax.rem(done + i, depth)
            for j in range(copies_of(config.page_size)):
                key = (first + i) * PAGE + j * self.piece
                page, inside = self._page(row, key, last_page)
                plgpu.copy_gmem_to_smem(
                    refs.keys_ref.at[self.layer, page, pl.ds(inside, self.piece)],
                    refs.k_smem.at[self.wg, slot, pl.ds(j * self.piece, self.piece)],
                    refs.k_loaded.at[self.wg, slot],
                )

        for i in range(depth):
            pl.when(i < count)(partial(load, jnp.int32(i)))
        plgpu.copy_gmem_to_smem(
            refs.q_ref.at[index], refs.q_smem.at[self.wg], refs.q_loaded.at[self.wg]
        )
        weights = plgpu.load(refs.weights_ref.at[index], layout=BY_COLUMN, optimized=False)
        plgpu.barrier_wait(refs.q_loaded.at[self.wg])

        def tile(i: jax.Array, scale: Any) -> Any:
            slot = lax.rem(done + i, depth)
            following = self._scale(row, (first + jnp.minimum(i + 1, count - 1)) * PAGE, last_page)
            plgpu.barrier_wait(refs.k_loaded.at[self.wg, slot])
            products = self._products(slot)
            warpgroup_barrier(interpret=config.interpret)  # all four warps have read the keys
            pl.when(i + depth < count)(lambda: load(i + depth))
            self._store(products, weights, scale, index, (first + i) * PAGE)
            return following

        lax.fori_loop(0, count, tile, self._scale(row, first * PAGE, last_page))

    def _page(self, row: jax.Array, key: jax.Array, last: jax.Array) -> tuple[Any, Any]:
        """Returns the page of a row's key and the key's offset in it; never a page after the row's
        last."""
        size = self.config.page_size
        page = self.refs.table_ref[row, jnp.minimum(lax.div(key, size), last)]
        return page, lax.rem(key, size) if size > PAGE else 0

    def _scale(self, row: jax.Array, key: jax.Array, last: jax.Array) -> Any:
        """Returns the scale of each key of a tile; pages of FP8 keys have at least 64 tokens."""
        if self.refs.scale_ref is None:
            return None
        page, inside = self._page(row, key, last)
        here = self.refs.scale_ref.at[self.layer, page, pl.ds(inside, PAGE)]
        return plgpu.load(here, layout=BY_KEY, optimized=False)

    def _products(self, slot: jax.Array) -> jax.Array:
        config = self.config
        keys, queries = self.refs.k_smem.at[self.wg, slot], self.refs.q_smem.at[self.wg]
        shape = PAGE, config.tiling.columns
        if config.fp8 and config.interpret:
            return plain_product(keys[...], queries[...])
        left = widened(keys, config.dtype) if config.fp8 else keys

        def product(ref: Any) -> Any:
            plgpu.wgmma(ref, left, queries.transpose((1, 0)))
            return ref[...]

        return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))

    def _store(
        self, products: jax.Array, weights: jax.Array, scale: Any, index: jax.Array, key: jax.Array
    ) -> None:
        tiling, out = self.config.tiling, self.refs.out_ref
        first = index * tiling.tokens
        if self.config.interpret:
            weighted = jnp.maximum(products, 0) * weights[None, :]
            for token in range(tiling.tokens):
                some = weighted[:, token * tiling.heads : (token + 1) * tiling.heads]
                scores = some.sum(axis=1) if scale is None else some.sum(axis=1) * scale
                out[first + token, pl.ds(key, PAGE)] = ordered(scores)
            return
        place = (first * tiling.width + key) * 4
        of_keys = () if scale is None else (scale,)
        types = plgpu.RefType(), plgpu.Layout.WGMMA, BY_COLUMN, plgpu.Layout.WG_SPLAT
        run = plgpu.inline_mgpu(arg_types=(*types, *[BY_KEY] * len(of_keys)))
        run(self._store_inline)(out, products, weights, place, *of_keys)

    def _store_inline(
        self, ctx: Any, out: Any, products: Any, weights: Any, place: Any, scale: Any = None
    ) -> None:
        """Reduces and stores the scores. In each 8 columns a thread has two neighboring columns of
        a key and of the key 8 below. Four lanes have a key's columns, and each of them stores the
        scores of every fourth token."""
        del ctx
        tiling, thread = self.config.tiling, WarpgroupThread()
        zero, groups = number(0.0), tiling.heads // 8
        numbers, factors = list(products.registers.flat), list(weights.registers.flat)
        scores = []  # for each token: the scores of both keys
        for token in range(tiling.tokens):
            both = [zero, zero]
            for group in range(token * groups, (token + 1) * groups):
                for half in range(2):
                    for i in range(2):
                        positive = arith.maximumf(element(numbers[2 * group + half], i), zero)
                        both[half] = llvm.intr_fma(positive, element(factors[group], i), both[half])
            scores.append(both)
        for distance in (1, 2):
            scores = [
                [arith.addf(x, utils.shfl_bfly(x, distance)) for x in both] for both in scores
            ]
        if scale is not None:
            factors = [self._scalar(x) for x in scale.registers.flat]
            scores = [
                [arith.mulf(x, y) for x, y in zip(both, factors, strict=True)] for both in scores
            ]
        key = plus(times(thread.warp, 16), thread.g)
        base = plus(single(place), times(key, 4))
        for token in range(0, tiling.tokens, 4):
            some = scores[token : token + 4]
            at = plus(base, times(plus(thread.t, word(token)), 4 * tiling.width))
            mine = some[-1]
            for lane in reversed(range(len(some) - 1)):
                is_lane = arith.cmpi(arith.CmpIPredicate.eq, thread.t, word(lane))
                mine = [arith.select(is_lane, x, y) for x, y in zip(some[lane], mine, strict=True)]
            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, thread.t, word(len(some)))):
                for half, score in enumerate(mine):
                    store(self._ordered(score), out, at, 32 * half)

    @staticmethod
    def _scalar(register: Any) -> Any:
        return element(register, 0) if "vector" in str(register.type) else register

    @staticmethod
    def _ordered(score: Any) -> Any:
        bits = arith.bitcast(i32(), score)
        negative_zero = arith.cmpi(arith.CmpIPredicate.eq, bits, word(2**31))
        bits = arith.select(negative_zero, word(0), bits)
        sign = arith.shrsi(bits, word(31))
        bits = arith.xori(bits, arith.andi(sign, word(0x7FFFFFFF)))
        return arith.maxsi(bits, word(LOWEST + 1))
