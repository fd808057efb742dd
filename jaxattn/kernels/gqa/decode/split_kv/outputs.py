"""Outputs of the grouped-query decode kernels: head packing, places to write, and the result.

A kernel writes rows of 2-D arrays, arrays of its own or the arena's whole lanes: a pair's output,
or for a pair that was cut its partial results, which combine.py merges into the output.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.arena import Arena
from jaxattn.kernels.gqa.decode.smem import block_columns
from jaxattn.kernels.gqa.decode.split_kv.combine import combine
from jaxattn.kernels.gqa.decode.split_kv.oversubscription import OversubscribedSchedule
from jaxattn.kernels.gqa.decode.split_kv.tile_scheduler import PairSchedule, may_cut
from jaxattn.kernels.gqa.decode.split_kv.workspace import spec_of


@dataclasses.dataclass(frozen=True)
class GqaPacking:
    """Of [B, S, H, D], by pairs (row, KV head) and their packed rows s * group + j."""

    batch: int
    q_len: int
    num_heads: int
    head_dim: int
    kv_heads: int

    @property
    def group(self) -> int:
        return self.num_heads // self.kv_heads

    @property
    def pairs(self) -> int:
        return self.batch * self.kv_heads

    @property
    def used(self) -> int:
        """Packed rows of a pair."""
        return self.q_len * self.group

    @property
    def columns(self) -> int:
        """Packed rows of a block."""
        return block_columns(self.used, self.head_dim)[0]

    @property
    def tiles(self) -> int:
        """Blocks that share a pair's rows."""
        return block_columns(self.used, self.head_dim)[1]

    @property
    def rows(self) -> int:
        """Packed rows that are kept of a pair, in whole blocks."""
        return self.columns * self.tiles

    def flat(self, x: jax.Array | None) -> jax.Array | None:
        """[B, S, H, D] as [B * S * H, D]; None stays None."""
        return None if x is None else x.reshape(-1, self.head_dim)


class GqaDecodeOutputs:
    """Where a launch writes.

    Attributes:
        line: the parts of the launch.
        first_rows: of the output, and of the partial results, in the arrays of `refs`.
        refs: those arrays.
        inputs, outputs: of the launch. What concerns partial results is None where there are none.
    """

    def __init__(
        self, arena: Arena | None, schedule: PairSchedule, packing: GqaPacking, dtype: Any, *,
        fine: OversubscribedSchedule | None = None, interpret: bool,
    ):  # fmt: skip
        """`fine`: the schedule's, if the launch takes it in place of the usual line."""
        line = schedule.line
        self.arena, self.packing = arena, packing
        self.line = line if fine is None else fine.line
        pairs, rows, dim = packing.pairs, packing.rows, packing.head_dim
        shape = packing.batch, packing.q_len, packing.num_heads, dim
        self.split = may_cut(pairs, line.parts, line.max_pages)
        self.spec = spec_of(shape, rows, dtype, line.parts, self.split)
        regions = dict(self.spec.regions)
        self.names = ["out", *(["partial_out"] if self.split else [])]
        if arena is None:
            kinds = [regions[name] for name in self.names]
            lanes = [(jnp.empty((math.prod(x.shape) // dim, dim), x.dtype), 0) for x in kinds]
        else:
            lanes = [arena.lane(self.spec, name, width=dim) for name in self.names]
        self.refs = [jax.new_ref(lane) for lane, _ in lanes]
        self.first_rows = [first for _, first in lanes]
        lse, partial_lse = (
            jax.ShapeDtypeStruct(of, jnp.float32)
            for of in ((math.prod(shape[:3]),), (2 * line.parts, rows))
        )
        self.inputs: dict[str, Any] = {"out_ref": self.refs[0], "partial_ref": None}
        self.inputs |= {"slots_ref": None, "arrived_ref": None}
        self.outputs: dict[str, Any] = {"lse_ref": lse, "partial_lse_ref": None}
        if self.split:
            self.inputs["partial_ref"] = self.refs[1]
            self.outputs["partial_lse_ref"] = partial_lse
        if self.split and not interpret:
            self.inputs["slots_ref"] = self.line.slots
            self.inputs["arrived_ref"] = schedule.arrived_of(packing.tiles)

    def finish(
        self,
        written: Mapping[str, jax.Array],
        sinks: jax.Array | None,
        gate: jax.Array | None,
        *,
        interpret: bool,
        detect_races: bool,
    ) -> tuple[Any, ...]:
        """(out [B, S, H, D], lse [B, S, H]), and the arena if there is one.

        Args:
            written: what the launch returned.
            sinks, gate: as the launch has them; in the interpreter pairs that were cut get theirs
                here.
        """
        packing, arena = self.packing, self.arena
        lse = written["lse_ref"]
        if self.split and interpret:
            lse = combine(
                self.refs, self.first_rows, lse, written["partial_lse_ref"], self.line, sinks, gate,
                q_len=packing.q_len, group=packing.group, kv_heads=packing.kv_heads,
                detect_races=detect_races,
            )  # fmt: skip
        lanes = {name: jax.freeze(ref) for name, ref in zip(self.names, self.refs, strict=True)}
        shape = packing.batch, packing.q_len, packing.num_heads
        lse = lse.reshape(shape)
        if arena is None:
            return lanes["out"].reshape(*shape, packing.head_dim), lse
        for name, lane in lanes.items():
            arena = arena.with_lane(self.spec, name, lane)
        return arena.read(self.spec, "out"), lse, arena
