"""Tile configurations of `attention_backward` for each width of the heads, and its shared memory."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.work_queue import scratch as queue_scratch
from jaxattn.kernels.hopper.device import swizzled

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
ROWS = 64  # rows of a product of a warpgroup
WARPGROUPS = 2  # that compute; one more loads


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardTileConfig:
    """How the kernel is cut.

    Attributes:
        pieces: dims of the pieces in which queries and keys come.
        values: dims of a value.
        keys: of a tile. With 128 each warpgroup has 64 of them; with 64 both have all, and half of
            the dims of dk and dv each.
        queries: of a step.
        stages: steps whose queries and output gradients are in shared memory, or on their way.
        compute_registers, memory_registers: of a thread; 504 of all three warpgroups together.
        blocks: resident blocks, each taking many tiles; None: one for each multiprocessor.
        heads_together: key-value heads that are worked on at one time, at most. They share the L2.
    """

    pieces: tuple[int, ...]
    values: int
    keys: int = 128
    queries: int = 64
    stages: int = 2
    compute_registers: int = 240
    memory_registers: int = 24
    blocks: int | None = None
    heads_together: int = 16

    @property
    def by_dims(self) -> bool:
        """Whether the warpgroups share the dims of dk and dv, and not the keys."""
        return self.keys == ROWS

    @property
    def dim(self) -> int:
        return sum(self.pieces)

    @property
    def key_grads(self) -> tuple[int, ...]:
        """Dims of a warpgroup's pieces of dk."""
        return tuple(dims // 2 for dims in self.pieces) if self.by_dims else self.pieces

    @property
    def value_grads(self) -> int:
        return self.values // 2 if self.by_dims else self.values

    def query_grads(self, wg: int) -> tuple[int, int, int, int]:
        """A warpgroup's part of a step's dq: (first query, piece, first dim of it, dims)."""
        if self.queries > ROWS:
            return wg * ROWS, 0, 0, self.pieces[0]
        if len(self.pieces) > 1:
            return 0, wg, 0, self.pieces[wg]
        half = self.pieces[0] // 2
        return 0, 0, wg * half, half


# (dims of a query, of a value): widths that the kernel has.
CONFIGS = {
    (64, 64): BackwardTileConfig(pieces=(64,), values=64, queries=128),
    (128, 128): BackwardTileConfig(pieces=(128,), values=128),
    (192, 128): BackwardTileConfig(pieces=(128, 64), values=128),
    (256, 256): BackwardTileConfig(pieces=(256,), values=256, keys=64, stages=1),
}


class BackwardSmem(NamedTuple):
    """A block's shared memory and barriers; s is a stage.

    Attributes:
        keys: a tuple of [keys, dims], the tile's; on their way out, its dk.
        values: [keys, Dv] likewise.
        queries: a tuple of [s, queries, dims].
        outputs: [s, queries, Dv], gradients of the output.
        row_stats: float32 [s, 2, queries], LSE and delta of each query.
        scores: [keys, queries], gradients of the scores.
        query_grads: float32 of each warpgroup, its part of dq on its way out.
        tile_loaded, queries_loaded, outputs_loaded: what has come.
        tile_read, queries_read, outputs_read: what may be overwritten.
        scores_written, scores_read: by both warpgroups.
        queue: of `WorkQueue`.
    """

    keys: Any
    values: Any
    queries: Any
    outputs: Any
    row_stats: Any
    scores: Any
    query_grads: Any
    tile_loaded: Any
    queries_loaded: Any
    outputs_loaded: Any
    tile_read: Any
    queries_read: Any
    outputs_read: Any
    scores_written: Any
    scores_read: Any
    queue: Any


def scratch_types(config: BackwardTileConfig, dtype: Any) -> BackwardSmem:
    """Types of a `BackwardSmem`."""
    stages, pieces = config.stages, config.pieces

    def tile(*shape: int, of: Any = dtype) -> Any:
        return plgpu.SMEM(shape, of, transforms=swizzled(of))

    def barriers(arrivals: int, number: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)

    return BackwardSmem(
        keys=tuple(tile(config.keys, dims) for dims in pieces),
        values=tile(config.keys, config.values),
        queries=tuple(tile(stages, config.queries, dims) for dims in pieces),
        outputs=tile(stages, config.queries, config.values),
        row_stats=plgpu.SMEM((stages, 2, config.queries), jnp.float32),
        scores=tile(config.keys, config.queries),
        query_grads=tuple(
            tile(ROWS, config.query_grads(wg)[-1], of=jnp.float32) for wg in range(WARPGROUPS)
        ),
        tile_loaded=barriers(len(pieces) + 1, 1),
        queries_loaded=barriers(len(pieces) + 1, stages),
        outputs_loaded=barriers(1, stages),
        tile_read=barriers(WARPGROUPS, 1),
        queries_read=barriers(WARPGROUPS, stages),
        outputs_read=barriers(WARPGROUPS, stages),
        scores_written=barriers(WARPGROUPS, 1),
        scores_read=barriers(WARPGROUPS, 1),
        queue=queue_scratch(WARPGROUPS),
    )
