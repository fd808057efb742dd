"""Shared memory of `gqa_prefill`."""

from typing import Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.work_queue import scratch as queue_scratch
from jaxattn.kernels.gqa.prefill.tile_config import ROWS, GqaPrefillTileConfig
from jaxattn.kernels.hopper.instructions import swizzled


class GqaPrefillSmem(NamedTuple):
    """A CTA's shared memory and barriers; w is a warpgroup, s a stage.

    Attributes:
        queries: [w, 64, D].
        outputs: [w, 64, D] on their way out, or None.
        keys, values: [s, keys, D]; keys are a tuple, one entry per piece of their dims.
        queries_loaded, keys_loaded, values_loaded, gate_loaded: Full barriers.
        queries_read, keys_read, values_read: Empty barriers: the buffer may be overwritten.
        turn: The tensor cores are this warpgroup's.
        cleared: Values that nobody owns are 0.
        queue: The refs of `WorkQueue`.
    """

    queries: Any
    outputs: Any
    keys: Any
    values: Any
    queries_loaded: Any
    keys_loaded: Any
    values_loaded: Any
    gate_loaded: Any
    queries_read: Any
    keys_read: Any
    values_read: Any
    turn: Any
    cleared: Any
    queue: Any


def scratch_types(
    config: GqaPrefillTileConfig, dtype: Any, head_dim: int, copies: int, pieces: tuple[int, ...]
) -> GqaPrefillSmem:
    """Returns the scratch types of a `GqaPrefillSmem`.

    `copies` are a step's boxes of values, `pieces` the dims of the keys' pieces.
    """
    tiles = swizzled(dtype)
    count, stages = config.warpgroups, config.stages

    def tile(*shape: int, dims: int = head_dim) -> Any:
        return plgpu.SMEM((*shape, dims), dtype, transforms=tiles)

    def barriers(arrivals: int, number: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)

    return GqaPrefillSmem(
        queries=tile(count, ROWS),
        outputs=tile(count, ROWS) if config.own_output else None,
        keys=tuple(tile(stages, config.keys, dims=dims) for dims in pieces),
        values=tile(stages, config.keys),
        queries_loaded=barriers(1, count),
        keys_loaded=barriers(copies + len(pieces) - 1, stages),
        values_loaded=barriers(copies, stages),
        gate_loaded=barriers(1, count),
        queries_read=barriers(1, count),
        keys_read=barriers(count, stages),
        values_read=barriers(count, stages),
        turn=barriers(1, count),
        cleared=barriers(count, 1),
        queue=queue_scratch(count),
    )
