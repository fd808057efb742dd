"""Shared memory of `attention_backward`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.backward.tile_config import (
    DIMS,
    ROWS,
    WARPGROUPS,
    BackwardTileConfig,
)
from jaxattn.kernels.attention.work_queue import scratch as queue_scratch
from jaxattn.kernels.hopper.instructions import swizzled


class BackwardSmem(NamedTuple):
    """A CTA's shared memory and barriers; s is a pipeline stage.

    Attributes:
        keys, values: [1, pieces, keys, 64], the tile's keys and values; in the epilogue, its dk and
            dv.
        queries, outputs: [s, pieces, queries, 64], the queries and the gradients of the output.
        row_stats: float32 [s, 2, queries], LSE and delta of each query.
        scores: [1, keys, queries], gradients of the scores.
        query_grads: float32 [places, 64, 64], parts of dq on their way out.
        tile_loaded, queries_loaded, outputs_loaded: Full barriers of these buffers.
        tile_read, queries_read, outputs_read: Empty barriers: the buffer may be overwritten.
        scores_written, scores_read: Arrived at by both warpgroups.
        query_grads_written, query_grads_read: One barrier for each place.
        queue: The refs of `WorkQueue`.
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
    query_grads_written: Any
    query_grads_read: Any
    queue: Any


def scratch_types(config: BackwardTileConfig, dtype: Any) -> BackwardSmem:
    """Returns the scratch types of a `BackwardSmem`."""
    stages, outputs, queries = config.stages, config.output_stages, config.queries
    places = len(config.places)
    key_pieces, value_pieces = (config.pieces(dims) for dims in (config.dims, config.values))

    def tile(*shape: int, of: Any = dtype) -> Any:
        return plgpu.SMEM(shape, of, transforms=swizzled(of))

    def barriers(arrivals: int, number: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)

    return BackwardSmem(
        keys=tile(1, key_pieces, config.keys, DIMS),
        values=tile(1, value_pieces, config.keys, DIMS),
        queries=tile(stages, key_pieces, queries, DIMS),
        outputs=tile(outputs, value_pieces, queries, DIMS),
        row_stats=plgpu.SMEM((stages, 2, queries), jnp.float32),
        scores=tile(1, config.keys, queries),
        query_grads=tile(places, ROWS, DIMS, of=jnp.float32),
        tile_loaded=barriers(key_pieces + value_pieces, 1),
        queries_loaded=barriers(key_pieces + 1, stages),
        outputs_loaded=barriers(value_pieces, outputs),
        tile_read=barriers(WARPGROUPS, 1),
        queries_read=barriers(WARPGROUPS, stages),
        outputs_read=barriers(WARPGROUPS, outputs),
        scores_written=barriers(WARPGROUPS, 1),
        scores_read=barriers(WARPGROUPS, 1),
        query_grads_written=barriers(1, places),
        query_grads_read=barriers(1, places),
        queue=queue_scratch(WARPGROUPS),
    )
