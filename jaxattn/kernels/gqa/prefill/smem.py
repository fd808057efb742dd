"""The tile configuration of `gqa_prefill` for each head dim, and its shared memory."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.work_queue import scratch as queue_scratch
from jaxattn.kernels.hopper.instructions import swizzled

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
PAGE_SIZES = (16, 32, 64, 128)  # page sizes that the kernel reads itself
ROWS = 64  # packed rows of a warpgroup
NARROW, SHORT = 512, 64  # the keys of a narrow window, and of its steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaPrefillTileConfig:
    """The tile sizes, pipeline stages and registers of the kernel.

    Attributes:
        keys: Keys of a step.
        warpgroups: Consumer warpgroups, 64 packed rows each; one more loads.
        stages: Pipeline stages of keys and values.
        own_output: Whether the output has its own shared memory. Otherwise it leaves through the
            queries' memory, and the next tile's queries are loaded only when it has left.
        compute_registers, memory_registers: Registers per thread of a consumer and of the producer.
            All warpgroups together may have 504 if there are three, and 512 if four.
        blocks: Resident CTAs, each taking many tiles; None: one per multiprocessor.
        l2_bytes: Keys and values of the heads that are worked on at one time.
    """

    keys: int
    warpgroups: int
    stages: int
    own_output: bool
    compute_registers: int
    memory_registers: int
    blocks: int | None = None
    l2_bytes: int = 24 * 2**20

    @property
    def rows(self) -> int:
        """The packed rows of a tile."""
        return self.warpgroups * ROWS


CONFIGS = {
    64: GqaPrefillTileConfig(
        keys=128, warpgroups=3, stages=4, own_output=True,
        compute_registers=160, memory_registers=32,
    ),
    128: GqaPrefillTileConfig(
        keys=128, warpgroups=2, stages=2, own_output=True,
        compute_registers=232, memory_registers=40,
    ),
    256: GqaPrefillTileConfig(
        keys=64, warpgroups=2, stages=2, own_output=False,
        compute_registers=232, memory_registers=40,
    ),
}  # fmt: skip


def config_of(head_dim: int, window: int | None) -> GqaPrefillTileConfig:
    """Returns the configuration. With a narrow window most steps are masked, and shorter steps have
    less to mask."""
    config = CONFIGS[head_dim]
    if window is None or window > NARROW or config.keys <= SHORT:
        return config
    return dataclasses.replace(config, keys=SHORT, stages=config.stages * config.keys // SHORT)


def refusal(dtype: Any, head_dim: int) -> str | None:
    """Returns what the kernel requires instead of these arguments; None if it accepts them."""
    if jnp.dtype(dtype) not in DTYPES:
        return f"q of bfloat16 or float16, and got {jnp.dtype(dtype).name}"
    if head_dim not in CONFIGS:
        return f"head_dim 64, 128 or 256, and got {head_dim}"
    return None


def copies_of(config: GqaPrefillTileConfig, page_size: int | None) -> int:
    """Returns the number of boxes in which a step's keys are copied from the cache; 1 without a
    cache."""
    return 1 if page_size is None else max(config.keys // page_size, 1)


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
