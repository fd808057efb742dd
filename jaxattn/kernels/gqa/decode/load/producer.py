"""The warpgroup of `gqa_decode`, and of `turbo_decode`, that loads: queries, and each step's cache.

It walks the part ahead of those that compute, and fills rings, each warpgroup's own. A place in a
ring is filled again as soon as what lies there was read.
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

from jaxattn.kernels.attention.work_partition import SchedulePosition
from jaxattn.kernels.gqa.decode.load.query_gather import QueryLoaderProtocol
from jaxattn.kernels.gqa.decode.smem import QUERIES
from jaxattn.kernels.gqa.decode.split_kv.work_partition import HeadWorkPartition
from jaxattn.kernels.hopper.instructions import warpgroup_barrier


def place_of(step: jax.Array, consumers: int) -> tuple[jax.Array, jax.Array]:
    """(warpgroup, its turn) of a part's step."""
    return lax.rem(step, consumers), lax.div(step, consumers)


@dataclasses.dataclass(frozen=True)
class LoadPipeline:
    """
    Attributes:
        steps: of each warpgroup, that have a place.
        loaded, read: barriers [w, steps] of what has come, and of what may be overwritten.
        copies: (from, to) of a step of a pair, of (pair, the cache's pages, step, warpgroup, its
            place in the ring).
    """

    steps: int
    loaded: Any
    read: Any
    copies: Callable[
        [jax.Array, list[jax.Array], jax.Array, jax.Array, jax.Array], list[tuple[Any, Any]]
    ]


class PipelineState(NamedTuple):
    """Whose a step is. Counted on from step to step: a division takes longer than a step's copy.

    Attributes:
        wg: the warpgroup.
        turn: how many steps it had before.
        slots: the step's place in each ring.
    """

    wg: jax.Array
    turn: jax.Array
    slots: tuple[jax.Array, ...]

    def next(self, consumers: int, rings: tuple[LoadPipeline, ...]) -> "PipelineState":
        """Of the step after it."""
        around = self.wg == consumers - 1
        slots = tuple(
            jnp.where(around, jnp.where(slot == ring.steps - 1, 0, slot + 1), slot)
            for slot, ring in zip(self.slots, rings, strict=True)
        )
        wg = jnp.where(around, 0, self.wg + 1)
        return PipelineState(wg, self.turn + around.astype(jnp.int32), slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaDecodeProducer:
    """
    Attributes:
        queries: how they come.
        memory: has `queries_read`, barriers of the places of queries.
        rings: in the order in which a step's copies start.
        consumers: warpgroups that compute.
    """

    part: HeadWorkPartition
    queries: QueryLoaderProtocol
    memory: Any
    rings: tuple[LoadPipeline, ...]
    consumers: int
    interpret: bool

    def run(self, between: Callable[[], None]) -> None:
        """Everything, to the end: a thread that waits on a barrier has to see each of its
        completions. `between` is done when all has been asked for."""
        self.part.prefetch_next(interpret=self.interpret)
        number, done = self.part.each_piece(self._piece, (jnp.int32(0), jnp.int32(0)))
        between()
        self.part.prefetch_lines(interpret=self.interpret)  # again, for the next call

        # What nobody waited for: the last steps of each ring, and the last queries.
        for ring in self.rings:

            @pl.loop(jnp.maximum(done - self.consumers * ring.steps, 0), done)
            def _drain(step, ring=ring):
                wg, turn = place_of(step, self.consumers)
                plgpu.barrier_wait(ring.read.at[wg, lax.rem(turn, ring.steps)])

        @pl.loop(jnp.maximum(number - QUERIES, 0), number)
        def _drain_queries(i):
            plgpu.barrier_wait(self.memory.queries_read.at[lax.rem(i, QUERIES)])

    def _piece(
        self, place: SchedulePosition, start: jax.Array, steps: jax.Array, carry: Any
    ) -> Any:
        number, done = carry
        pair, stop = place.row, start + steps
        at = lax.rem(number, QUERIES)
        # Before anything is waited for, the first pages' numbers and the queries are asked for.
        numbers_of = self.part.numbers_of(pair, stop)
        numbers = numbers_of(start), numbers_of(start + 1)
        asked = self.queries.ask(pair)
        wg, turn = place_of(done, self.consumers)
        turns = PipelineState(wg, turn, tuple(lax.rem(turn, ring.steps) for ring in self.rings))

        def step(i, carry):
            (numbers, following), turns = carry
            later = numbers_of(start + i + 2)  # which nobody waits for before the next step's end
            for ring, slot in zip(self.rings, turns.slots, strict=True):
                free = functools.partial(plgpu.barrier_wait, ring.read.at[turns.wg, slot])
                pl.when(turns.turn >= ring.steps)(free)
                for some, to in ring.copies(pair, numbers, start + i, turns.wg, slot):
                    plgpu.copy_gmem_to_smem(some, to, ring.loaded.at[turns.wg, slot])
            # A barrier tells odd rounds from even ones: no warp may be a round behind.
            warpgroup_barrier(interpret=self.interpret)
            return (following, later), turns.next(self.consumers, self.rings)

        carry = step(jnp.int32(0), (numbers, turns))
        read = self.memory.queries_read.at[at]
        pl.when(number >= QUERIES)(lambda: plgpu.barrier_wait(read))
        self.queries.put(asked, pair, at)
        lax.fori_loop(1, steps, step, carry)
        return number + 1, done + steps
