"""The tile configuration of `gqa_prefill` for each head dim."""

import dataclasses
from typing import Any

import jax.numpy as jnp

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
        return f"q in bfloat16 or float16, got {jnp.dtype(dtype).name}"
    if head_dim not in CONFIGS:
        return f"head_dim 64, 128 or 256, got {head_dim}"
    return None


def copies_of(config: GqaPrefillTileConfig, page_size: int | None) -> int:
    """Returns the number of boxes in which a step's keys are copied from the cache; 1 without a
    cache."""
    return 1 if page_size is None else max(config.keys // page_size, 1)
