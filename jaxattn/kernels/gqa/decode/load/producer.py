"""The producer warpgroup of `gqa_decode` and `turbo_decode`: it loads queries and each step's
cache.

It walks the part ahead of the consumers, and fills rings, one set for each consumer warpgroup. A
stage of a ring is filled again as soon as its contents have been read.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.work_iterator import SchedulePosition
from jaxattn.kernels.gqa.decode.load.query_gather import QueryLoaderProtocol
from jaxattn.kernels.gqa.decode.smem import QUERIES
from jaxattn.kernels.gqa.decode.split_kv.work_iterator import HeadWorkIterator
from jaxattn.kernels.hopper.instructions import warpgroup_barrier


def place_of(step: jax.Array, consumers: int) -> tuple[jax.Array, jax.Array]:
    """Returns (warpgroup, its turn) for a part's step."""
    return lax.rem(step, consumers), lax.div(step, consumers)


@dataclasses.dataclass(frozen=True)
class LoadPipeline:
    """A ring of pipeline stages per consumer warpgroup.

    Attributes:
        steps: The number of stages per warpgroup.
        loaded, read: Full and empty barriers [w, steps].
        copies: Returns the (source, destination) pairs of a step's copies, from (pair, the cache's
            pages, step, warpgroup, its stage in the ring).
    """

    steps: int
    loaded: Any
    read: Any
    copies: Callable[
        [jax.Array, list[jax.Array], jax.Array, jax.Array, jax.Array], list[tuple[Any, Any]]
    ]


class PipelineState(NamedTuple):
    """The consumer and stages of a step. It is incremented from step to step: a division takes
    longer than a step's copy.

    Attributes:
        wg: The warpgroup.
        num_steps: The number of steps that this warpgroup had before.
        slots: The step's stage in each ring.
    """

    wg: jax.Array
    num_steps: jax.Array
    slots: tuple[jax.Array, ...]

    def next(self, consumers: int, rings: tuple[LoadPipeline, ...]) -> "PipelineState":
        """Returns the state of the next step."""
        around = self.wg == consumers - 1
        slots = tuple(
            jnp.where(around, jnp.where(slot == ring.steps - 1, 0, slot + 1), slot)
            for slot, ring in zip(self.slots, rings, strict=True)
        )
        wg = jnp.where(around, 0, self.wg + 1)
        return PipelineState(wg, self.num_steps + around.astype(jnp.int32), slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaDecodeProducer:
    """The loop of the producer warpgroup.

    Attributes:
        queries: The loader of queries.
        memory: The shared memory; `queries_read` are the barriers of the places of queries.
        rings: The rings, in the order in which a step's copies start.
        consumers: The number of consumer warpgroups.
    """

    part: HeadWorkIterator
    queries: QueryLoaderProtocol
    memory: Any
    rings: tuple[LoadPipeline, ...]
    consumers: int
    interpret: bool

    def run(self, between: Callable[[], None]) -> None:
        """Runs all loads, and waits for all barriers: a thread that waits on a barrier must observe
        each of its completions. `between` is called when all loads have been issued."""
        self.part.prefetch_next(interpret=self.interpret)
        number, done = self.part.each_piece(self._piece, (jnp.int32(0), jnp.int32(0)))
        between()
        self.part.prefetch_lines(interpret=self.interpret)  # again, for the next call

        # The completions that nobody has waited for: those of each ring's last steps, and of the
        # last queries.
        for ring in self.rings:

            @pl.loop(jnp.maximum(done - self.consumers * ring.steps, 0), done)
            def _drain(step, ring=ring):
                wg, turn = place_of(step, self.consumers)
                plgpu.barrier_wait(ring.read.at[wg, lax.rem(turn, ring.steps)])

        @pl.loop(jnp.maximum(number - QUERIES, 0), number)
        def _drain_queries(i):
            plgpu.barrier_wait(self.memory.queries_read.at[lax.rem(i, QUERIES)])

    def _piece(
        self, position: SchedulePosition, start: jax.Array, steps: jax.Array, carry: Any
    ) -> Any:
        number, done = carry
        pair, stop = position.row, start + steps
        slot_index = lax.rem(number, QUERIES)
        # The first page numbers and the queries are loaded before anything is waited for.
        numbers_of = self.part.numbers_of(pair, stop)
        numbers = numbers_of(start), numbers_of(start + 1)
        pending_queries = self.queries.ask(pair)
        wg, turn = place_of(done, self.consumers)
        pipeline_state = PipelineState(
            wg, turn, tuple(lax.rem(turn, ring.steps) for ring in self.rings)
        )

        def step(i, carry):
            (numbers, following), pipeline_state = carry
            later = numbers_of(start + i + 2)  # needed only after the next step
            for ring, slot in zip(self.rings, pipeline_state.slots, strict=True):
                free = functools.partial(plgpu.barrier_wait, ring.read.at[pipeline_state.wg, slot])
                pl.when(pipeline_state.num_steps >= ring.steps)(free)
                for source, destination in ring.copies(
                    pair, numbers, start + i, pipeline_state.wg, slot
                ):
                    plgpu.copy_gmem_to_smem(
                        source, destination, ring.loaded.at[pipeline_state.wg, slot]
                    )
            # A barrier only distinguishes odd phases from even ones: no warp may be a phase behind.
            warpgroup_barrier(interpret=self.interpret)
            return (following, later), pipeline_state.next(self.consumers, self.rings)

        carry = step(jnp.int32(0), (numbers, pipeline_state))
        read = self.memory.queries_read.at[slot_index]
        pl.when(number >= QUERIES)(lambda: plgpu.barrier_wait(read))
        self.queries.put(pending_queries, pair, slot_index)
        lax.fori_loop(1, steps, step, carry)
        return number + 1, done + steps
