"""Tile configurations of `attention_backward` for each width, and its shared memory."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.work_queue import scratch as queue_scratch
from jaxattn.kernels.hopper.instructions import swizzled

ROWS = 64  # rows of a product of a warpgroup
DIMS = 64  # dims of a piece, as wide as wgmma's tiles in shared memory
WARPGROUPS = 2  # that compute; one more loads and stores


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardTileConfig:
    """How the kernel is cut.

    Attributes:
        dims, values: of a query and of a value, multiples of 64.
        keys: of a tile. With 128 each warpgroup has 64 of them; with 64 both have all, and half of
            the dims of dk and dv each.
        queries: of a step.
        stages, output_stages: steps whose queries, and output gradients, are in shared memory or on
            their way.
        ahead: whether a step begins the next one's scores, or ends the last one's dK: with fewer
            registers.
        compute_registers, memory_registers: of a thread; 504 of all three warpgroups together.
        blocks: resident blocks, each taking many tiles; None: one for each multiprocessor.
        heads_together: key-value heads that are worked on at one time, at most. They share the L2.
    """

    dims: int
    values: int
    keys: int = 128
    queries: int = 64
    stages: int = 2
    output_stages: int = 2
    ahead: bool = True
    compute_registers: int = 240
    memory_registers: int = 24
    blocks: int | None = None
    heads_together: int = 16

    @property
    def by_dims(self) -> bool:
        """Whether the warpgroups share the dims of dk and dv, and not the keys."""
        return self.keys == ROWS

    def pieces(self, dims: int) -> int:
        return dims // DIMS

    def own_pieces(self, dims: int) -> int:
        """Pieces of dk or dv that a warpgroup sums."""
        return self.pieces(dims) // (WARPGROUPS if self.by_dims else 1)

    @property
    def parts(self) -> int:
        """Parts of a step's dq, 64 queries and 64 dims each."""
        return self.pieces(self.dims) * self.queries // ROWS

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The parts that leave by each place in shared memory, one after another."""
        even = self.parts // WARPGROUPS
        if even == 1:
            return tuple((part,) for part in range(self.parts))
        return tuple(tuple(range(wg * even, (wg + 1) * even)) for wg in range(WARPGROUPS))

    @property
    def shared_places(self) -> bool:
        """Whether a step's parts wait for one another."""
        return self.parts > len(self.places)


# (dims of a query, of a value): widths that the kernel has.
CONFIGS = {
    (64, 64): BackwardTileConfig(dims=64, values=64, queries=128),
    (128, 128): BackwardTileConfig(dims=128, values=128),
    (192, 128): BackwardTileConfig(dims=192, values=128, ahead=False),
    (256, 256): BackwardTileConfig(dims=256, values=256, keys=64, output_stages=1),
}


class BackwardSmem(NamedTuple):
    """A block's shared memory and barriers; s is a stage.

    Attributes:
        keys, values: [1, pieces, keys, 64], the tile's; on their way out, its dk and dv.
        queries, outputs: [s, pieces, queries, 64], the latter gradients of the output.
        row_stats: float32 [s, 2, queries], LSE and delta of each query.
        scores: [1, keys, queries], gradients of the scores.
        query_grads: float32 [places, 64, 64], parts of dq on their way out.
        tile_loaded, queries_loaded, outputs_loaded: what has come.
        tile_read, queries_read, outputs_read: what may be overwritten.
        scores_written, scores_read: by both warpgroups.
        query_grads_written, query_grads_read: of each place.
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
    query_grads_written: Any
    query_grads_read: Any
    queue: Any


def scratch_types(config: BackwardTileConfig, dtype: Any) -> BackwardSmem:
    """Types of a `BackwardSmem`."""
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
