"""Outputs of the grouped-query decode kernels: the arrays to write to, and the result.

A kernel writes rows of 2-D arrays, which are its own or whole lanes of the arena. A pair that was
not split has its output there; a split pair has its partial results, which combine.py merges into
the output.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.kernels.attention.split_kv_schedule import Schedule
from jaxattn.kernels.gqa.decode.arguments import GqaDecodeCall
from jaxattn.kernels.gqa.decode.split_kv.combine import combine
from jaxattn.kernels.gqa.decode.split_kv.decode_schedule import may_cut
from jaxattn.kernels.gqa.decode.split_kv.workspace import spec_of


class GqaDecodeOutputs:
    """The arrays that the launch of a call writes.

    Attributes:
        line: The parts of the launch.
        first_rows: First rows of the output, and of the partial results, in the arrays of `refs`.
        refs: The arrays.
        inputs, outputs: Inputs and outputs of the launch. Entries for partial results are None if
            there are none.
    """

    def __init__(self, call: GqaDecodeCall, line: Schedule, *, interpret: bool):
        """`line`: the parts of the call's schedule, the usual one or the fine one."""
        assert call.schedule is not None
        schedule, arena = call.schedule, call.arena
        self.call, self.line, self.interpret = call, line, interpret
        usual = schedule.line
        rows, dim = call.rows, call.head_dim
        self.split = may_cut(call.pairs, usual.parts, usual.max_pages)
        self.spec = spec_of(call.q.shape, rows, call.q.dtype, usual.parts, self.split)
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
            for of in ((math.prod(call.q.shape[:3]),), (2 * usual.parts, rows))
        )
        self.inputs: dict[str, Any] = {"out_ref": self.refs[0], "partial_ref": None}
        self.inputs |= {"slots_ref": None, "arrived_ref": None}
        self.outputs: dict[str, Any] = {"lse_ref": lse, "partial_lse_ref": None}
        if self.split:
            self.inputs["partial_ref"] = self.refs[1]
            self.outputs["partial_lse_ref"] = partial_lse
        if self.split and not interpret:
            self.inputs["slots_ref"] = self.line.slots
            self.inputs["arrived_ref"] = schedule.arrived_of(call.tiles)

    def config(self) -> dict[str, Any]:
        """The fields of `GqaDecodeConfig` that depend on the call, its schedule and these
        arrays."""
        call = self.call
        assert call.schedule is not None
        return {
            "q_len": call.q_len,
            "group": call.group,
            "kv_heads": call.kv_heads,
            "head_dim": call.head_dim,
            "columns": call.columns,
            "out_rows": call.rows,
            "parts": self.line.parts,
            "first_rows": self.first_rows,
            "scale": call.scale,
            "window": call.window,
            "soft_cap": call.soft_cap,
            "page_size": call.page_size,
            "batch_invariant": call.schedule.batch_invariant,
            "interpret": self.interpret,
        }

    def finish(self, written: Mapping[str, jax.Array], *, detect_races: bool) -> tuple[Any, ...]:
        """Returns (out [B, S, H, D], lse [B, S, H]), and the arena if there is one.

        `written` is the result of the launch. In the interpreter this method merges the pairs that
        were split, and applies their sinks and gates.
        """
        call, arena = self.call, self.call.arena
        lse = written["lse_ref"]
        if self.split and self.interpret:
            lse = combine(
                call, self.line, self.refs, self.first_rows, lse, written["partial_lse_ref"],
                detect_races=detect_races,
            )  # fmt: skip
        lanes = {name: jax.freeze(ref) for name, ref in zip(self.names, self.refs, strict=True)}
        lse = lse.reshape(call.q.shape[:3])
        if arena is None:
            return lanes["out"].reshape(call.q.shape), lse
        for name, lane in lanes.items():
            arena = arena.with_lane(self.spec, name, lane)
        return arena.read(self.spec, "out"), lse, arena
