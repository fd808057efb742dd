"""What a block of `turbo_decode` keeps in shared memory, and how its threads are divided."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.turbo_slots import GROUP
from jaxattn.core.turboquant import E4M3, TurboFormat
from jaxattn.kernels.gqa_decode.memory import BARRIER_BYTES, QUERIES
from jaxattn.kernels.gqa_turbo.codes import GROUPS
from jaxattn.kernels.hopper.machine import RESERVED_BYTES, SHARED_BYTES, swizzled
from jaxattn.kernels.mla_decode.columns_memory import MARGIN
from jaxattn.kernels.mla_decode.schedule import PAGE

TERMS = 2  # e4m3 numbers that make up one of a query's, or of P's
ROW = 32  # bytes that a copy counts in: each slot has an even number of them, of 16 tokens
ALIGNED = 128  # bytes, of what is copied to shared memory
# Warpgroups that take a part's steps in turns, where there is room for two steps of each. Three
# have 152 registers each, two have 232.
MOST_CONSUMERS, LEAST_CONSUMERS = 3, 2
REGISTERS = {3: 152, 2: 232}
MOST_STEPS = 6  # of a warpgroup, in shared memory or on their way there


@dataclasses.dataclass(frozen=True)
class Room:
    """
    Attributes:
        consumers: w, warpgroups that compute; one more loads.
        steps: of each of them, whose codes are in shared memory or on their way there.
        group_rows: of 32 bytes, from a group of 16 tokens to the next.
    """

    consumers: int
    steps: int
    group_rows: int

    @property
    def pitch(self) -> int:
        """Bytes from a group to the next."""
        return self.group_rows * ROW


def whole_steps(page_size: int) -> bool:
    """Whether a page has all tokens of a step, so that one copy brings them."""
    return page_size >= PAGE


def room_of(form: TurboFormat, columns: int, page_size: int) -> Room:
    """How a block's memory is divided, of so many packed rows."""
    rows = GROUP * form.slot_bytes // ROW
    if not whole_steps(page_size):  # each group is a copy, and begins where one may
        rows = -(-rows * ROW // ALIGNED) * ALIGNED // ROW
    queries = QUERIES * TERMS * columns * form.head_dim
    free = SHARED_BYTES - RESERVED_BYTES - BARRIER_BYTES - queries
    for consumers in range(MOST_CONSUMERS, LEAST_CONSUMERS - 1, -1):
        exchanged = columns * ((PAGE + form.head_dim + 2 * MARGIN + 6) * 4 + TERMS * PAGE)
        steps = (free // consumers - exchanged) // (GROUPS * rows * ROW)
        if steps >= 2 or consumers == LEAST_CONSUMERS:
            return Room(consumers, min(steps, MOST_STEPS), rows)
    raise AssertionError


class Memory(NamedTuple):
    """A block's shared memory; w is a warpgroup, N its columns.

    Attributes:
        codes: uint8 [w, steps, 4, rows, 32], as they come, a group of 16 tokens each.
        queries: e4m3 [2, 2 N, D], both terms, of this piece and the next.
        scores: float32 [w, N, 64 and a margin].
        p: e4m3 [w, 2 N, 64], both terms.
        outputs: float32 [w, N, D and a margin], at a piece's end.
        stats: float32 [3, w, N]: rescaling, and at a piece's end maxima and sums.
        units: float32 [2, w, N]: what 1 stands for in P, and at a piece's end the minima's share.
        codes_loaded, queries_loaded: barriers of what has come.
        codes_read, queries_read: and of what may be overwritten.
        both_there: of the warpgroups.
    """

    codes: Any
    queries: Any
    scores: Any
    p: Any
    outputs: Any
    stats: Any
    units: Any
    codes_loaded: Any
    queries_loaded: Any
    codes_read: Any
    queries_read: Any
    both_there: Any


def scratch_types(form: TurboFormat, columns: int, page_size: int) -> list[Any]:
    """Of `Memory`, in its order."""
    room, dim = room_of(form, columns, page_size), form.head_dim
    w, terms = room.consumers, TERMS * columns

    def barriers(arrivals: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=(w, room.steps))

    return [
        *Memory(
            codes=plgpu.SMEM((w, room.steps, GROUPS, room.group_rows, ROW), jnp.uint8),
            queries=plgpu.SMEM(
                (QUERIES, terms, dim), E4M3, transforms=swizzled(E4M3, min(dim, 128))
            ),
            scores=plgpu.SMEM((w, columns, PAGE + MARGIN), jnp.float32),
            p=plgpu.SMEM((w, terms, PAGE), E4M3, transforms=swizzled(E4M3, PAGE)),
            outputs=plgpu.SMEM((w, columns, dim + MARGIN), jnp.float32),
            stats=plgpu.SMEM((3, w, columns), jnp.float32),
            units=plgpu.SMEM((2, w, columns), jnp.float32),
            codes_loaded=barriers(1 if whole_steps(page_size) else GROUPS),
            queries_loaded=plgpu.Barrier(num_arrivals=1, num_barriers=QUERIES),
            codes_read=barriers(1),
            queries_read=plgpu.Barrier(num_arrivals=w, num_barriers=QUERIES),
            both_there=plgpu.Barrier(num_arrivals=w),
        )
    ]
