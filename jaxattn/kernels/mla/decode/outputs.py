"""Outputs of the MLA decode kernels: the arrays to write to, and the result.

A kernel writes rows of 2-D arrays, which are its own or whole lanes of the arena. A row that was
not split has its output there; a split row has its partial results, which combine.py then merges
into the output.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.arena import Arena, Region
from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer
from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.attention.split_kv_schedule import may_split
from jaxattn.kernels.mla.decode.arguments import ContextParallelMerge, MlaDecodeCall
from jaxattn.kernels.mla.decode.combine import SplitRows, combine
from jaxattn.kernels.mla.decode.distributed_combine import distributed_combine
from jaxattn.kernels.mla.decode.latent_tile import RANK
from jaxattn.kernels.mla.decode.workspace import spec_of


class MlaDecodeOutputs:
    """The arrays that the launch of a call writes.

    Attributes:
        rows: Packed rows that are kept per request.
        parts: The parts of the call's schedule.
        first_rows: The first row of the output, and of the partial results, in the arrays of
            `refs`.
        split: Whether there are partial results.
        sinks: float32 [rows], or None. Split rows use the sinks only when they are merged.
        refs: The arrays.
        inputs, outputs: Inputs and outputs of the launch. Entries for partial results are None if
            there are none.
    """

    def __init__(
        self,
        call: MlaDecodeCall,
        rows: int,
        sinks: jax.Array | None = None,
        *,
        split: bool | None = None,
    ):
        assert call.schedule is not None
        self.call, self.rows, self.parts = call, rows, call.schedule.parts
        self.sinks = sinks
        batch, parts, arena = call.batch, self.parts, call.arena
        self.split = may_split(batch, parts) if split is None else split
        self.spec = spec_of(batch, rows, RANK, call.dtype, parts if self.split else 1)
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
        an arena begin at any even one."""
        return self.first_rows[0] % 8 == 0 and self.refs[0].shape[0] % 8 == 0

    def finish(self, written: Mapping[str, jax.Array], *, interpret: bool) -> tuple[Any, ...]:
        """Returns (out [B, S, H, R], lse [B, S, H]), and the arena if there is one; or, where the
        outputs of several GPUs are merged, (out [B, 1, H / N, R], the arena or None, the mailbox).

        `written` is the result of the launch.
        """
        call, (batch, q_len, num_heads) = self.call, self.call.shape
        used = q_len * num_heads
        lse, partial_lse = written["lse_ref"], written.get("partial_lse_ref")
        if call.merge is not None:
            return self._merge_context_parallel(call.merge, lse, partial_lse)
        if partial_lse is not None:
            split = SplitRows(self.refs, self.first_rows, lse, partial_lse)
            lse = combine(call, split, sinks=self.sinks, interpret=interpret)
        lanes, arena = self._lanes()
        # The used rows of a single request are contiguous: one slice, where XLA would make two.
        kept = used if batch == 1 else self.rows
        first = self.first_rows[0]
        out = lanes["out"][first : first + batch * kept].reshape(batch, kept, RANK)
        out = out[:, :used].reshape(batch, q_len, num_heads, RANK)
        lse = lse[:, :used].reshape(batch, q_len, num_heads)
        return (out, lse) if arena is None else (out, lse, arena)

    def _merge_context_parallel(
        self, merge: ContextParallelMerge, lse: jax.Array, partial_lse: jax.Array | None
    ) -> tuple[jax.Array, Arena | None, SymmetricBuffer]:
        call = self.call
        if partial_lse is None or call.q_len > 1:
            raise Refusal(
                "mla_decode: combining outputs of several GPUs needs rows of one token and a "
                f"schedule that may split them, got {call.batch} rows of {call.q_len} tokens in "
                f"{self.parts} parts"
            )
        split = SplitRows(self.refs, self.first_rows, lse, partial_lse)
        out, mailbox = distributed_combine(call, split, merge)
        return out[:, None], self._lanes()[1], mailbox

    def _lanes(self) -> tuple[dict[str, jax.Array], Arena | None]:
        """The arrays that the launches wrote, by name, and the arena that contains them."""
        lanes = {name: jax.freeze(ref) for name, ref in zip(self.names, self.refs, strict=True)}
        arena = self.call.arena
        if arena is not None:
            for name, lane in lanes.items():
                arena = arena.with_lane(self.spec, name, lane)
        return lanes, arena


def _own_lane(region: Region) -> tuple[jax.Array, int]:
    return jnp.empty((math.prod(region.shape) // RANK, RANK), region.dtype), 0
