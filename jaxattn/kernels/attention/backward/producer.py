"""The warpgroup of `attention_backward` that loads: tiles of keys and values, and each step's queries
and output gradients."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.backward.smem import BackwardSmem, BackwardTileConfig
from jaxattn.kernels.attention.backward.tile_scheduler import BackwardTileScheduler, KeyTile


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardSources:
    """Where the operands lie.

    Attributes:
        q: [B, T, H, D].
        k, v: [B, T, Hk, D] and [B, T, Hk, Dv].
        k_rest: [B, T, P], the last of the keys' dims where all heads share them, or None.
        grads: [B, T, H, Dv] of the output.
        stats: float32 [B, H, 2, whole steps].
    """

    q: Any
    k: Any
    k_rest: Any
    v: Any
    grads: Any
    stats: Any

    def pieces(self, ref: Any, place: Any, rest: Any, config: BackwardTileConfig) -> list[Any]:
        """References to the pieces of queries or keys."""
        if len(config.pieces) == 1:
            return [ref.at[place]]
        dims, more = config.pieces
        whole = ref.at[place]
        last = whole.at[:, pl.ds(dims, more)] if rest is None else rest
        return [whole.at[:, pl.ds(0, dims)], last]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardProducer:
    """Walks over a block's tiles ahead of the warpgroups that compute."""

    config: BackwardTileConfig
    tiles: BackwardTileScheduler
    sources: BackwardSources
    memory: BackwardSmem

    def tile(self, tile: KeyTile, carry: tuple[jax.Array, jax.Array]) -> Any:
        """Starts the copies of a tile. `carry` counts steps and tiles."""
        done, loaded = carry
        memory, sources, config = self.memory, self.sources, self.config
        pl.when(loaded > 0)(lambda: plgpu.barrier_wait(memory.tile_read.at[0]))
        at = pl.ds(pl.multiple_of(tile.number * config.keys, config.keys), config.keys)
        there = memory.tile_loaded.at[0]
        rest = None if sources.k_rest is None else sources.k_rest.at[tile.row, at]
        keys = sources.pieces(sources.k, (tile.row, at, tile.head), rest, config)
        for piece, to in zip(keys, memory.keys, strict=True):
            plgpu.copy_gmem_to_smem(piece, to, there)
        plgpu.copy_gmem_to_smem(sources.v.at[tile.row, at, tile.head], memory.values, there)
        steps = self.tiles.steps(tile)
        lax.fori_loop(0, steps, functools.partial(self._step, tile, done), None)
        return done + steps, loaded + 1

    def _step(self, tile: KeyTile, done: jax.Array, i: jax.Array, _: Any) -> None:
        memory, sources, config = self.memory, self.sources, self.config
        number = done + i
        slot = lax.rem(number, jnp.int32(config.stages))
        again = number >= config.stages
        head, m = self.tiles.step(tile, i)
        at = pl.ds(pl.multiple_of(m * config.queries, config.queries), config.queries)
        pl.when(again)(lambda: plgpu.barrier_wait(memory.queries_read.at[slot]))
        there = memory.queries_loaded.at[slot]
        queries = sources.pieces(sources.q, (tile.row, at, head), None, config)
        for piece, to in zip(queries, memory.queries, strict=True):
            plgpu.copy_gmem_to_smem(piece, to.at[slot], there)
        stats = sources.stats.at[tile.row, head, :, at]
        plgpu.copy_gmem_to_smem(stats, memory.row_stats.at[slot], there)
        pl.when(again)(lambda: plgpu.barrier_wait(memory.outputs_read.at[slot]))
        grads = sources.grads.at[tile.row, at, head]
        plgpu.copy_gmem_to_smem(grads, memory.outputs.at[slot], memory.outputs_loaded.at[slot])

    def drain(self, carry: tuple[jax.Array, jax.Array]) -> None:
        """A thread that waits on a barrier has to see each of its completions."""
        done, loaded = carry
        memory, stages = self.memory, self.config.stages

        @pl.loop(jnp.maximum(done - stages, 0), done)
        def _(i: jax.Array) -> None:
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(memory.queries_read.at[slot])
            plgpu.barrier_wait(memory.outputs_read.at[slot])

        pl.when(loaded > 0)(lambda: plgpu.barrier_wait(memory.tile_read.at[0]))
