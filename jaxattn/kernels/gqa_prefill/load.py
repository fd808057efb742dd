"""The warpgroup of `gqa_prefill` that loads: queries, and the keys and values of every step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gqa_prefill.memory import ROWS, Config, Memory
from jaxattn.kernels.gqa_prefill.tiles import Step, Tile

KEYS, VALUES = 0, 1  # in the cache's axis of two


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """Where queries, keys and values lie.

    Attributes:
        q: [B, R, heads, D].
        k, v: [B, T, Hk, D] of the new tokens.
        k_rest: [B, T, P], the last of the keys' dims where all heads share them, or None.
        cache: [L, 2 N, C, Hk D], keys of page n at 2 n and its values behind them, or None.
        table, layer: int32 [B, M] and [1], of the cache.
        sharing: of `heads` that have a key-value head in common.
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

    def pages(self, tile: Tile, step: Step, copies: int) -> list[jax.Array]:
        """The cache's pages of a step; past the prefix's end or left of the window the nearest
        within, since a table may hold anything there. What is read of it is masked."""
        size = self.cache.shape[2]
        width = self.table.shape[1]
        end = jnp.clip(lax.div(tile.prefix + (size - 1), size) - 1, 0, width - 1)
        begin = jnp.minimum(lax.div(tile.low, size), end)
        first = lax.div(step.first, size)
        return [self.table[tile.row, jnp.clip(first + j, begin, end)] for j in range(copies)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loader:
    """Walks over a block's tiles ahead of the warpgroups that compute.

    Attributes:
        copies: boxes of a step of the cache.
    """

    config: Config
    sources: Sources
    memory: Memory
    copies: int

    def tile(self, tiles: Any, tile: Tile, carry: tuple[jax.Array, jax.Array]) -> Any:
        """Starts the copies of a tile. `carry` counts steps, and tiles with queries."""
        done, loaded = carry

        def each(i: jax.Array, _: Any) -> None:
            step = tiles.step(tile, i)
            self._load(KEYS, done + i, tile, step)
            # Their place is free when the last tile's last keys have been read, as is the place of
            # the second keys.
            pl.when(i == 0)(functools.partial(self._load_queries, tile, loaded))
            self._load(VALUES, done + i, tile, step)

        lax.fori_loop(0, tile.steps, each, None)
        if self.config.own_output:
            return done + tile.steps, loaded + (tile.steps > 0).astype(jnp.int32)
        # Zeros leave through the queries' memory, too: whose it is is known by what is loaded.
        pl.when(tile.steps == 0)(functools.partial(self._load_queries, tile, loaded))
        return done + tile.steps, loaded + 1

    def _load_queries(self, tile: Tile, loaded: jax.Array) -> None:
        memory = self.memory
        for wg in range(self.config.warpgroups):
            free = functools.partial(plgpu.barrier_wait, memory.queries_read.at[wg])
            pl.when(loaded > 0)(free)
            rows = pl.ds(pl.multiple_of(tile.start, ROWS) + wg * ROWS, ROWS)
            mine = self.sources.q.at[tile.row, rows, tile.head]
            plgpu.copy_gmem_to_smem(mine, memory.queries.at[wg], memory.queries_loaded.at[wg])

    def _load(self, kind: int, number: jax.Array, tile: Tile, step: Step) -> None:
        memory, keys = self.memory, self.config.keys
        slot = lax.rem(number, jnp.int32(self.config.stages))
        to, there, read = (
            (memory.keys, memory.keys_loaded, memory.keys_read),
            (memory.values, memory.values_loaded, memory.values_read),
        )[kind]
        free = functools.partial(plgpu.barrier_wait, read.at[slot])
        pl.when(number >= self.config.stages)(free)
        head = self.sources.kv_head(tile.head)
        copies = self.copies

        def of_cache() -> None:
            size, dim = self.sources.cache.shape[2], to.shape[-1]
            tokens = min(size, keys)
            inside: Any = lax.rem(step.first, size) if size > keys else 0
            dims = pl.ds(pl.multiple_of(head * dim, dim), dim)
            for j, page in enumerate(self.sources.pages(tile, step, copies)):
                box = self.sources.cache.at[
                    self.sources.layer[0], 2 * page + kind, pl.ds(inside, tokens), dims
                ]
                some = to.at[slot, pl.ds(j * tokens, tokens)]
                plgpu.copy_gmem_to_smem(box, some, there.at[slot])

        def of_new() -> None:
            at = pl.ds(pl.multiple_of(step.first, keys), keys)
            whole = to.at[slot]
            if kind == VALUES:
                plgpu.copy_gmem_to_smem(
                    self.sources.v.at[tile.row, at, head], whole, there.at[slot]
                )
            elif self.sources.k_rest is None:
                plgpu.copy_gmem_to_smem(
                    self.sources.k.at[tile.row, at, head], whole, there.at[slot]
                )
            else:
                own = self.sources.k.shape[-1]
                first, rest = pl.ds(0, own), pl.ds(own, to.shape[-1] - own)
                of_head = self.sources.k.at[tile.row, at, head]
                plgpu.copy_gmem_to_smem(of_head, whole.at[:, first], there.at[slot])
                shared = self.sources.k_rest.at[tile.row, at]
                plgpu.copy_gmem_to_smem(shared, whole.at[:, rest], there.at[slot])
            for _ in range(copies - 1):  # the barrier counts a cached step's boxes
                plgpu.barrier_arrive(there.at[slot])

        if self.sources.cache is None:
            of_new()
        else:
            lax.cond(step.cached, of_cache, of_new)

    def drain(self, carry: tuple[jax.Array, jax.Array]) -> None:
        """A thread that waits on a barrier has to see each of its completions."""
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
