"""The combine of a pair that `gqa_decode` split: merges partial results, and applies sinks and
gate.

The CTA whose piece of a pair is the last to arrive merges them. The interpreter has no atomic
operations: there a separate launch follows, with a CTA for eight packed rows of a pair and up to
128 of its dims.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.gate_and_sink import gated, with_sink
from jaxattn.kernels.attention.packed_row_layouts import BY_ROW, SCORES
from jaxattn.kernels.attention.softmax_constants import EMPTY, LOG2E
from jaxattn.kernels.attention.split_kv_schedule import Schedule
from jaxattn.kernels.gqa.decode.arguments import GqaDecodeCall
from jaxattn.kernels.gqa.decode.load.packed_rows import WIDTH, PackedRows
from jaxattn.kernels.gqa.decode.smem import ACROSS
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.instructions import issue_loads

# Partial results that are read at a time, by the number of groups of 64 dims: a result takes four
# registers for each group. FEW is for where few results are left.
MANY, FEW = {1: 16, 2: 8}, 8
AT_A_TIME = 2  # groups of 64 dims that the interpreter's launch merges at a time


def chunks_of(head_dim: int, consumers: int) -> int:
    """Returns the groups of 64 dims that each warpgroup merges at a time, so that one pass
    suffices."""
    return -(-head_dim // (WIDTH * consumers))


def _wide(vector: jax.Array) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (ACROSS, WIDTH), [0]), SCORES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitKvCombine:
    """The operands of the combine.

    Attributes:
        first_rows: First rows of the output, and of the partial results, in the arrays below.
        rows: Packed rows per pair in the partial results.
        out: [.., D], lse float32 [B * S * H].
        partial: float32 [.., D], partial_lse float32 [2 * parts, rows], natural logarithm.
        sinks: float32 [H], or None.
        gate: [B * S * H, D], or None.
    """

    first_rows: Sequence[int]
    rows: int
    out: Any
    lse: Any
    partial: Any
    partial_lse: Any
    sinks: Any
    gate: Any

    def write(
        self,
        row: Any,
        head: Any,
        slots: list[jax.Array],
        packed: PackedRows,
        first_dim: Any,
        chunks: int,
    ) -> None:
        """Merges and writes eight packed rows of the pair (row, KV head), and `chunks` groups of 64
        dims.

        Args:
            slots: The pair's entries of `Schedule.slots`.
            packed: The eight packed rows.
        """
        base_row = packed.row_of(row, head)
        first_dims = [pl.multiple_of(first_dim + i * WIDTH, WIDTH) for i in range(chunks)]
        gates = []
        if self.gate is not None:  # read from memory, while the partial results come from L2
            gates = [packed.load(self.gate, base_row, first, WIDTH) for first in first_dims]
            issue_loads(interpret=packed.interpret)
        top, total, outs = self._sum(slots, packed.first_row, first_dims)
        empty = total == 0
        share = 1 / total
        if self.sinks is not None:
            # The sum was relative to `top`, and so is the output.
            new_top, total = with_sink(top, total, packed.of_heads(self.sinks, head))
            share = jnp.exp2(top - new_top) / total
            top = new_top
        dead = _wide(empty.astype(jnp.float32)) > 0
        for i, (first, out) in enumerate(zip(first_dims, outs, strict=True)):
            out = out * _wide(share)
            if self.gate is not None:
                out = gated(out, gates[i])
            out = jnp.where(dead, 0.0, out)
            packed.store(self.out, self.first_rows[0] + base_row, first, out.astype(self.out.dtype))

        @pl.when(first_dim == 0)
        def _lse():
            lse = (top + jnp.log2(total)) * (1 / LOG2E)
            packed.store_numbers(self.lse, base_row, jnp.where(empty, -jnp.inf, lse))

    def _sum(self, slots: list[jax.Array], first_row: Any, first_dims: list[Any]) -> Any:
        """Returns (maximum of the log2 of weights, their sum divided by 2**that, outputs times that
        sum)."""
        num_pieces, row_slice = slots[1], pl.ds(pl.multiple_of(first_row, ACROSS), ACROSS)
        dims = [pl.ds(each, WIDTH) for each in first_dims]

        def add(begin: jax.Array, count: int, state: Any) -> Any:
            top, total, outs = state
            numbers = [begin + k for k in range(count)]
            places = [Schedule.slot_of(slots, jnp.minimum(k, num_pieces - 1)) for k in numbers]
            row_slices = [
                pl.ds(self.first_rows[1] + slot * self.rows + first_row, ACROSS) for slot in places
            ]
            pieces = [
                [plgpu.load(self.partial.at[rows, d], layout=SCORES, optimized=False) for d in dims]
                for rows in row_slices
            ]
            lses = [
                plgpu.load(self.partial_lse.at[slot, row_slice], layout=BY_ROW, optimized=False)
                * LOG2E
                for slot in places
            ]
            lses = [
                jnp.where(k < num_pieces, lse, -jnp.inf)
                for k, lse in zip(numbers, lses, strict=True)
            ]
            new_top = functools.reduce(jnp.maximum, lses, top)
            rescale = jnp.exp2(top - new_top)
            total, outs = total * rescale, [out * _wide(rescale) for out in outs]
            for lse, piece_dims in zip(lses, pieces, strict=True):
                weight = jnp.exp2(lse - new_top)
                total += weight
                outs = [
                    out + _wide(weight) * piece_values
                    for out, piece_values in zip(outs, piece_dims, strict=True)
                ]
            return new_top, total, tuple(outs)

        zeros = plgpu.layout_cast(jnp.zeros((ACROSS, WIDTH), jnp.float32), SCORES)
        state = (
            plgpu.layout_cast(jnp.full((ACROSS,), EMPTY, jnp.float32), BY_ROW),
            plgpu.layout_cast(jnp.zeros((ACROSS,), jnp.float32), BY_ROW),
            (zeros,) * len(dims),
        )
        pieces_per_round, num_done = MANY[len(dims)], jnp.int32(0)
        if pieces_per_round > FEW:
            rounds = lax.div(num_pieces, pieces_per_round)
            state = lax.fori_loop(
                0,
                rounds,
                lambda j, state: add(j * pieces_per_round, pieces_per_round, state),
                state,
            )
            num_done = rounds * pieces_per_round
        rounds = lax.div(num_pieces - num_done + (FEW - 1), FEW)
        return lax.fori_loop(0, rounds, lambda j, state: add(num_done + j * FEW, FEW, state), state)


def combine(
    call: GqaDecodeCall,
    line: Schedule,
    refs: list[Any],
    first_rows: list[int],
    lse: jax.Array,
    partial_lse: jax.Array,
) -> jax.Array:
    """In the interpreter, writes the pairs that were split to the output, and returns the LSE of
    all.

    Args:
        line: The parts of the launch.
        refs: The rows [.., D] of the output, and of the partial results.
        lse: float32 [B * S * H].
        first_rows, partial_lse: As in `SplitKvCombine`.
    """
    pairs, rows = line.slots.shape[1], partial_lse.shape[1]
    dims = refs[0].shape[1] // WIDTH
    chunks = min(dims, AT_A_TIME)
    lse_ref = jax.new_ref(lse)

    def body(slots_ref: Any, **refs: Any) -> None:
        pair, chunk, piece = (lax.axis_index(name) for name in ("pair", "chunk", "dims"))
        slots = [slots_ref[i, pair] for i in range(slots_ref.shape[0])]
        packed = PackedRows(
            q_len=call.q_len, group=call.group, kv_heads=call.kv_heads, columns=ACROSS,
            first_row=chunk * ACROSS, interpret=True,
        )  # fmt: skip
        combination = SplitKvCombine(first_rows=first_rows, rows=rows, **refs)
        row, head = lax.div(pair, call.kv_heads), lax.rem(pair, call.kv_heads)

        @pl.when(slots[1] > 0)
        def _merge() -> None:
            combination.write(row, head, slots, packed, piece * chunks * WIDTH, chunks)

    launch(
        body,
        name="gqa_decode_combine",
        grid={"pair": pairs, "chunk": rows // ACROSS, "dims": dims // chunks},
        inputs={
            "slots_ref": line.slots,
            "out": refs[0],
            "lse": lse_ref,
            "partial": refs[1],
            "partial_lse": partial_lse,
            "sinks": call.sinks,
            "gate": call.flat(call.gate),
        },
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=True,
    )
    return jax.freeze(lse_ref)
