"""Outputs of the MLA decode kernels: places to write, and the result.

A kernel writes rows of 2-D arrays, arrays of its own or the arena's whole lanes: a row's output, or
for a row that was cut its partial results, which `mla_combine` then merges into the output.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.arena import Arena, Region
from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.attention.tile_scheduler import Schedule, may_split
from jaxattn.kernels.mla.decode.combine import combine
from jaxattn.kernels.mla.decode.distributed_combine import (
    DistributedCombineArgs,
    distributed_combine,
)
from jaxattn.kernels.mla.decode.warp_specialized.smem import RANK
from jaxattn.kernels.mla.decode.workspace import spec_of


class MlaDecodeOutputs:
    """Where a launch writes.

    Attributes:
        rows: packed rows that are kept of a request.
        first_rows: of the output, and of the partial results, in the arrays of `refs`.
        split: whether there are partial results.
        refs: those arrays.
        inputs, outputs: of the launch. What concerns partial results is None where there are none.
    """

    def __init__(
        self,
        arena: Arena | None,
        schedule: Schedule,
        seq_lens: jax.Array,
        shape: tuple[int, int, int],
        rows: int,
        dtype: Any,
        met: DistributedCombineArgs | None = None,
    ):
        """`shape`: (B, S, H). `met`: with what several GPUs' outputs meet."""
        self.arena, self.schedule, self.seq_lens = arena, schedule, seq_lens
        self.met = met
        self.shape, self.rows = shape, rows
        batch, parts = shape[0], schedule.parts
        self.spec = spec_of(batch, rows, RANK, dtype, parts)
        self.split = may_split(batch, parts)
        names = ["out", *(["partial_out"] if self.split else [])]
        regions = dict(self.spec.regions)
        if arena is None:
            lanes = [_own_lane(regions[name]) for name in names]
        else:
            lanes = [arena.lane(self.spec, name, width=RANK) for name in names]
        self.names, self.first_rows = names, [first for _, first in lanes]
        self.refs = [jax.new_ref(lane) for lane, _ in lanes]
        counts = [batch, *([2 * parts] if self.split else [])]
        types = [jax.ShapeDtypeStruct((count, self.rows), jnp.float32) for count in counts]
        self.inputs: dict[str, Any] = {"out_ref": self.refs[0], "partial_ref": None}
        self.outputs: dict[str, Any] = {"lse_ref": types[0], "partial_lse_ref": None}
        if self.split:
            self.inputs["partial_ref"], self.outputs["partial_lse_ref"] = self.refs[1], types[1]

    def in_whole_tiles(self) -> bool:
        """Whether the output begins and ends with tiles of 8 rows, as TMA writes them; regions of
        an arena begin at any second one."""
        return self.first_rows[0] % 8 == 0 and self.refs[0].shape[0] % 8 == 0

    def finish(
        self, written: Mapping[str, jax.Array], *, interpret: bool, detect_races: bool
    ) -> tuple[Any, ...]:
        """(out [B, S, H, R], lse [B, S, H]), and the arena if there is one; where outputs met,
        (out [B, 1, H / N, R], the arena or None, inbox, counts).

        `written` is what the launch returned.
        """
        (batch, q_len, num_heads), arena = self.shape, self.arena
        used = q_len * num_heads
        lse = written["lse_ref"]
        if self.met is not None:
            return self._meet(self.met, lse, written.get("partial_lse_ref"))
        if self.split:
            lse = combine(
                self.refs, self.first_rows, lse, written["partial_lse_ref"], self.schedule,
                self.seq_lens, used=used, interpret=interpret, detect_races=detect_races,
            )  # fmt: skip
        lanes, arena = self._lanes()
        # Of one request the used rows lie together: one slice, where XLA would make two of it.
        kept = used if batch == 1 else self.rows
        first = self.first_rows[0]
        out = lanes["out"][first : first + batch * kept].reshape(batch, kept, RANK)
        out = out[:, :used].reshape(batch, q_len, num_heads, RANK)
        lse = lse[:, :used].reshape(batch, q_len, num_heads)
        return (out, lse) if arena is None else (out, lse, arena)

    def _meet(
        self, met: DistributedCombineArgs, lse: jax.Array, partial_lse: jax.Array | None
    ) -> tuple[Any, ...]:
        batch, q_len, _ = self.shape
        if partial_lse is None or q_len > 1:
            raise Refusal(
                f"mla_decode: outputs of several GPUs meet where rows of one token may be cut, and "
                f"these are {batch} rows of {q_len} tokens in {self.schedule.parts} parts"
            )
        out, inbox, counts = distributed_combine(
            self.refs, self.first_rows, lse, partial_lse, self.schedule, self.seq_lens, met=met
        )
        return out[:, None], self._lanes()[1], inbox, counts

    def _lanes(self) -> tuple[dict[str, jax.Array], Arena | None]:
        """What the launches wrote to, by name, and the arena with it."""
        lanes = {name: jax.freeze(ref) for name, ref in zip(self.names, self.refs, strict=True)}
        arena = self.arena
        if arena is not None:
            for name, lane in lanes.items():
                arena = arena.with_lane(self.spec, name, lane)
        return lanes, arena


def _own_lane(region: Region) -> tuple[jax.Array, int]:
    return jnp.empty((math.prod(region.shape) // RANK, RANK), region.dtype), 0
