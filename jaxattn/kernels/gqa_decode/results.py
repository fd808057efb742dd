"""How the decode kernels of grouped queries see a call's heads, where they write, and what becomes
of it.

A kernel writes rows of 2-D arrays, arrays of its own or the arena's whole lanes: a pair's output,
or for a pair that was cut its partial results, which `gqa_decode_combine` then merges into the
output.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.arena import Arena
from jaxattn.kernels.gqa_decode.combine import combine
from jaxattn.kernels.gqa_decode.memory import block_columns
from jaxattn.kernels.gqa_decode.schedule import may_cut
from jaxattn.kernels.gqa_decode.scratch import spec_of
from jaxattn.kernels.mla_decode.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Packing:
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

    def pack(self, x: jax.Array) -> jax.Array:
        """[B, S, H, D] as [pairs, rows, D]."""
        x = x.reshape(self.batch, self.q_len, self.kv_heads, self.group, self.head_dim)
        x = x.swapaxes(1, 2).reshape(self.pairs, self.used, self.head_dim)
        return jnp.pad(x, ((0, 0), (0, self.rows - self.used), (0, 0)))

    def pack_heads(self, x: jax.Array) -> jax.Array:
        """[H] as [Hk, rows]."""
        x = jnp.tile(x.reshape(self.kv_heads, self.group), (1, self.q_len))
        return jnp.pad(x, ((0, 0), (0, self.rows - self.used)))

    def unpack(self, x: jax.Array) -> jax.Array:
        """[pairs, rows, ...] as [B, S, H, ...]."""
        x = x[:, : self.used]
        x = x.reshape(self.batch, self.kv_heads, self.q_len, self.group, *x.shape[2:])
        return x.swapaxes(1, 2).reshape(self.batch, self.q_len, self.num_heads, *x.shape[4:])


class Results:
    """Where a launch writes.

    Attributes:
        first_rows: of the output, and of the partial results, in the arrays of `refs`.
        refs: those arrays.
        inputs, outputs: of the launch. What concerns partial results is None where there are none.
    """

    def __init__(self, arena: Arena | None, line: Schedule, packing: Packing, dtype: Any):
        self.arena, self.line, self.packing = arena, line, packing
        pairs, rows, dim = packing.pairs, packing.rows, packing.head_dim
        self.split = may_cut(pairs, line.parts, line.max_pages)
        self.spec = spec_of(pairs, rows, dim, dtype, line.parts, self.split)
        regions = dict(self.spec.regions)
        self.names = ["out", *(["partial_out"] if self.split else [])]
        if arena is None:
            kinds = [regions[name] for name in self.names]
            lanes = [(jnp.empty((math.prod(x.shape) // dim, dim), x.dtype), 0) for x in kinds]
        else:
            lanes = [arena.lane(self.spec, name, width=dim) for name in self.names]
        self.refs = [jax.new_ref(lane) for lane, _ in lanes]
        self.first_rows = [first for _, first in lanes]
        counts = [pairs, *([2 * line.parts] if self.split else [])]
        types = [jax.ShapeDtypeStruct((count, rows), jnp.float32) for count in counts]
        self.inputs: dict[str, Any] = {"out_ref": self.refs[0], "partial_ref": None}
        self.outputs: dict[str, Any] = {"lse_ref": types[0], "partial_lse_ref": None}
        if self.split:
            self.inputs["partial_ref"], self.outputs["partial_lse_ref"] = self.refs[1], types[1]

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
            sinks, gate: packed; pairs that were cut get theirs here.
        """
        packing, arena = self.packing, self.arena
        lse = written["lse_ref"]
        if self.split:
            lse = combine(
                self.refs, self.first_rows, lse, written["partial_lse_ref"], self.line, sinks, gate,
                kv_heads=packing.kv_heads, interpret=interpret, detect_races=detect_races,
            )  # fmt: skip
        lanes = {name: jax.freeze(ref) for name, ref in zip(self.names, self.refs, strict=True)}
        if arena is None:
            out = lanes["out"].reshape(packing.pairs, packing.rows, packing.head_dim)
        else:
            for name, lane in lanes.items():
                arena = arena.with_lane(self.spec, name, lane)
            out = arena.read(self.spec, "out")
        out, lse = packing.unpack(out), packing.unpack(lse)
        return (out, lse) if arena is None else (out, lse, arena)
