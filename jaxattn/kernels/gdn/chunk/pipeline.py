"""The ring of stages through which a producer warpgroup copies chunks to its consumers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

STAGES = 3  # chunks in shared memory
CHANNEL_STAGES = 2  # for decays per channel, with two arrays of keys


def next_slot(slot: Any, stages: int = STAGES) -> Any:
    """Returns the next stage in turn; a remainder by 3 takes twenty dependent instructions."""
    return jnp.where(slot == stages - 1, 0, slot + 1)


def stream(
    loaded: Any, read: Any, before: Any, steps: Any, issue: Any, stages: int = STAGES,
) -> jax.Array:  # fmt: skip
    """Runs the producer warpgroup: `issue(i, slot, barrier)` copies chunk i when its stage is free,
    after `before` earlier chunks. Returns how many it has copied in all."""

    @pl.loop(0, steps)
    def _(i):
        slot = lax.rem(before + i, jnp.int32(stages))

        @pl.when(before + i >= stages)
        def _():
            plgpu.barrier_wait(read.at[slot])

        issue(i, slot, loaded.at[slot])

    return before + steps


def drain(read: Any, copied: Any, stages: int = STAGES) -> None:
    """Waits for the remaining completions: a thread that waits on a barrier must observe each
    one."""

    @pl.loop(jnp.maximum(copied - stages, 0), copied)
    def _(i):
        plgpu.barrier_wait(read.at[lax.rem(i, jnp.int32(stages))])
