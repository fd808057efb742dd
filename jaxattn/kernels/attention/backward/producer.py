"""The producer warpgroup of `attention_backward`: it loads tiles of keys and values, and for each
step the queries and the output's gradients. Between loads it has dQ stored."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.backward.query_gradient import QueryGradientStorer
from jaxattn.kernels.attention.backward.smem import BackwardSmem
from jaxattn.kernels.attention.backward.tile_config import DIMS, BackwardTileConfig
from jaxattn.kernels.attention.backward.tile_scheduler import BackwardTileScheduler, KeyTile


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardSources:
    """The refs of the operands in global memory.

    Attributes:
        q: [B, T, H, D].
        k, v: [B, T, Hk, D] and [B, T, Hk, Dv].
        k_rest: [B, T, P], the last dims of the keys where all heads share them, or None.
        grads: [B, T, H, Dv], the gradient of the output.
        stats: float32 [B, H, 2, whole steps], the LSE and delta.
    """

    q: Any
    k: Any
    k_rest: Any
    v: Any
    grads: Any
    stats: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardProducer:
    """The loop over a CTA's tiles, ahead of the consumer warpgroups."""

    config: BackwardTileConfig
    tiles: BackwardTileScheduler
    sources: BackwardSources
    memory: BackwardSmem
    storer: QueryGradientStorer

    def tile(self, tile: KeyTile, carry: tuple[jax.Array, jax.Array]) -> Any:
        """Starts the copies of a tile. `carry` counts steps and tiles."""
        done, loaded = carry
        memory, sources, config = self.memory, self.sources, self.config
        pl.when(loaded > 0)(lambda: plgpu.barrier_wait(memory.tile_read.at[0]))
        key_slice = pl.ds(pl.multiple_of(tile.number * config.keys, config.keys), config.keys)
        barrier = memory.tile_loaded.at[0]
        key_index = tile.row, key_slice, tile.head
        rest = None if sources.k_rest is None else sources.k_rest.at[tile.row, key_slice]
        self._copy(sources.k.at[key_index], memory.keys.at[0], barrier, rest)
        self._copy(sources.v.at[key_index], memory.values.at[0], barrier)
        steps = self.tiles.steps(tile)
        stages = config.stages

        @pl.loop(0, jnp.where(steps > 0, steps + stages, 0))
        def _(i: jax.Array) -> None:
            # The dQ of the step whose pipeline stage is loaded next.
            stored_step = i - stages
            load = functools.partial(self._step, tile, done, i)
            pl.when(stored_step >= 0)(lambda: self.storer.begin(tile, stored_step))
            if not config.shared_places:
                pl.when(i < steps)(load)
            pl.when(stored_step >= 0)(lambda: self.storer.end(tile, stored_step))
            if config.shared_places:  # the consumers wait there before they read what was loaded
                pl.when(i < steps)(load)

        return done + steps, loaded + 1

    def _copy(self, source: Any, destination: Any, barrier: Any, rest: Any = None) -> None:
        """Starts the copies of all pieces; `rest` holds the last ones."""
        for piece in range(destination.shape[0]):
            begin, ref = piece * DIMS, source
            if begin >= source.shape[1]:
                begin, ref = begin - source.shape[1], rest
            plgpu.copy_gmem_to_smem(ref.at[:, pl.ds(begin, DIMS)], destination.at[piece], barrier)

    def _step(self, tile: KeyTile, done: jax.Array, i: jax.Array) -> None:
        memory, sources, config = self.memory, self.sources, self.config
        number = done + i
        head, m = self.tiles.step(tile, i)
        query_slice = pl.ds(pl.multiple_of(m * config.queries, config.queries), config.queries)

        def free(read: Any, stages: int) -> jax.Array:
            slot = lax.rem(number, jnp.int32(stages))
            pl.when(number >= stages)(lambda: plgpu.barrier_wait(read.at[slot]))
            return slot

        slot = free(memory.queries_read, config.stages)
        barrier = memory.queries_loaded.at[slot]
        self._copy(sources.q.at[tile.row, query_slice, head], memory.queries.at[slot], barrier)
        stats = sources.stats.at[tile.row, head, :, query_slice]
        plgpu.copy_gmem_to_smem(stats, memory.row_stats.at[slot], barrier)
        slot = free(memory.outputs_read, config.output_stages)
        barrier = memory.outputs_loaded.at[slot]
        self._copy(sources.grads.at[tile.row, query_slice, head], memory.outputs.at[slot], barrier)

    def drain(self, carry: tuple[jax.Array, jax.Array]) -> None:
        """Waits for the remaining completions: a thread that waits on a barrier must observe each
        one."""
        done, loaded = carry
        memory, config = self.memory, self.config
        rings = (memory.queries_read, config.stages), (memory.outputs_read, config.output_stages)
        for read, stages in rings:

            @pl.loop(jnp.maximum(done - stages, 0), done)
            def _(i: jax.Array, read: Any = read, stages: int = stages) -> None:
                plgpu.barrier_wait(read.at[lax.rem(i, jnp.int32(stages))])

        pl.when(loaded > 0)(lambda: plgpu.barrier_wait(memory.tile_read.at[0]))
