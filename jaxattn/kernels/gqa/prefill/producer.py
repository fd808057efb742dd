"""The producer warpgroup of `gqa_prefill`: it loads queries, and the keys and values of every
step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gqa.prefill.smem import GqaPrefillSmem
from jaxattn.kernels.gqa.prefill.tile_config import ROWS, GqaPrefillTileConfig
from jaxattn.kernels.gqa.prefill.tile_scheduler import BASE, GqaKeyTile, GqaQueryTile

KEYS, VALUES = 0, 1  # in the cache's axis of two


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaPrefillSources:
    """The refs of queries, keys and values in global memory.

    Attributes:
        q: [B, R, heads, D].
        k, v: [B, T, Hk, D], of the new tokens.
        k_rest: [B, T, P], the last dims of the keys where all heads share them, or None.
        cache: [L, 2 N, C, Hk D], with the keys of page n at 2 n, followed by its values, or None.
        table, layer: int32 [B, M] and [1], for the cache.
        sharing: The number of `heads` that share a key-value head.
    """

    q: Any
    k: Any
    v: Any
    k_rest: Any
    cache: Any
    table: Any
    layer: Any
    sharing: int

    def kv_head(self, head: jax.Array) -> jax.Array:
        return head if self.sharing == 1 else lax.div(head, jnp.int32(self.sharing))

    def pages(self, tile: GqaQueryTile, step: GqaKeyTile, keys: int) -> list[jax.Array]:
        """Returns the cache's pages of a step of `keys` keys. Past the prefix's end or left of the
        window it returns the nearest page inside, since a table may hold anything there; the keys
        are masked."""
        if self.cache is None:
            return []
        size, width = self.cache.shape[2], self.table.shape[1]
        end = jnp.clip(lax.div(tile.prefix + (size - 1), size) - 1, 0, width - 1)
        begin = jnp.minimum(lax.div(tile.low, size), end)
        first = lax.div(step.first, size)
        places = (jnp.clip(first + j, begin, end) for j in range(max(keys // size, 1)))
        return [self.table[tile.row, place] for place in places]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaPrefillProducer:
    """The loop over a CTA's tiles, ahead of the consumer warpgroups.

    Attributes:
        copies: The number of boxes of a step of the cache.
    """

    config: GqaPrefillTileConfig
    sources: GqaPrefillSources
    memory: GqaPrefillSmem
    copies: int

    def tile(self, tiles: Any, tile: GqaQueryTile, carry: tuple[jax.Array, jax.Array]) -> Any:
        """Starts the copies of a tile. `carry` counts steps, and tiles with queries."""
        done, loaded = carry

        def each(i: jax.Array, _: Any) -> None:
            step = tiles.step(tile, i)
            # The page numbers are loaded before the wait for a free stage.
            pages = self.sources.pages(tile, step, self.config.keys)
            self._load(KEYS, done + i, tile, step, pages)
            # The queries' memory is free when the last tile's last keys have been read, as is the
            # stage of the second keys.
            pl.when(i == 0)(functools.partial(self._load_queries, tile, loaded))
            self._load(VALUES, done + i, tile, step, pages)

        lax.fori_loop(0, tile.steps, each, None)
        if self.config.own_output:
            return done + tile.steps, loaded + (tile.steps > 0).astype(jnp.int32)
        # Zeros leave through the queries' memory too: loading the queries establishes who owns it.
        pl.when(tile.steps == 0)(functools.partial(self._load_queries, tile, loaded))
        return done + tile.steps, loaded + 1

    def _load_queries(self, tile: GqaQueryTile, loaded: jax.Array) -> None:
        memory = self.memory
        for wg in range(self.config.warpgroups):
            free = functools.partial(plgpu.barrier_wait, memory.queries_read.at[wg])
            pl.when(loaded > 0)(free)
            rows = pl.ds(pl.multiple_of(tile.start, ROWS) + wg * ROWS, ROWS)
            mine = self.sources.q.at[tile.row, rows, tile.head]
            plgpu.copy_gmem_to_smem(mine, memory.queries.at[wg], memory.queries_loaded.at[wg])

    def _load(
        self,
        kind: int,
        number: jax.Array,
        tile: GqaQueryTile,
        step: GqaKeyTile,
        pages: list[jax.Array],
    ) -> None:
        """Starts the copies of a step's keys or values; `number` counts the steps."""
        memory, keys = self.memory, self.config.keys
        slot = lax.rem(number, jnp.int32(self.config.stages))
        pieces, all_keys_exist, read = (
            (memory.keys, memory.keys_loaded, memory.keys_read),
            ((memory.values,), memory.values_loaded, memory.values_read),
        )[kind]
        free = functools.partial(plgpu.barrier_wait, read.at[slot])
        pl.when(number >= self.config.stages)(free)
        whole, *others = (piece.at[slot] for piece in pieces)
        there = all_keys_exist.at[slot]
        head = self.sources.kv_head(tile.head)

        def of_cache() -> None:
            size, dim = self.sources.cache.shape[2], whole.shape[-1]
            tokens = min(size, keys)
            inside: Any = lax.rem(step.first, size) if size > keys else 0
            dims = pl.ds(pl.multiple_of(head * dim, dim), dim)
            for j, page in enumerate(pages):
                place = self.sources.layer[0], 2 * page + kind, pl.ds(inside, tokens), dims
                to = whole.at[pl.ds(j * tokens, tokens)]
                plgpu.copy_gmem_to_smem(self.sources.cache.at[place], to, there)

        def of_new() -> None:
            at = pl.ds(pl.multiple_of(step.first, keys), keys)
            if len(tile.bounds) > BASE:
                at = pl.ds(pl.multiple_of(tile.bounds[BASE] + step.first, 8), keys)
            of_heads = self.sources.v if kind == VALUES else self.sources.k
            plgpu.copy_gmem_to_smem(of_heads.at[tile.row, at, head], whole, there)
            for rest in others:
                plgpu.copy_gmem_to_smem(self.sources.k_rest.at[tile.row, at], rest, there)
            for _ in range(self.copies - 1):  # the barrier counts a cached step's boxes
                plgpu.barrier_arrive(there)

        if self.sources.cache is None:
            of_new()
        else:
            lax.cond(step.cached, of_cache, of_new)

    def drain(self, carry: tuple[jax.Array, jax.Array]) -> None:
        """Waits for the remaining completions: a thread that waits on a barrier must observe each
        one."""
        done, loaded = carry
        memory, stages = self.memory, self.config.stages

        @pl.loop(jnp.maximum(done - stages, 0), done)
        def _(i: jax.Array) -> None:
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(memory.keys_read.at[slot])
            plgpu.barrier_wait(memory.values_read.at[slot])

        @pl.when(loaded > 0)
        def _() -> None:
            for wg in range(self.config.warpgroups):
                plgpu.barrier_wait(memory.queries_read.at[wg])
