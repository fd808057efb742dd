"""Merges the partial results of the pairs that `gqa_decode` cut; sinks and gate join here.

A block for eight packed rows of a pair and 64 of its dims. A pair that lies in one part was written
whole, and its blocks leave at once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gqa_decode.memory import ACROSS
from jaxattn.kernels.gqa_decode.merge import gated, with_sink
from jaxattn.kernels.gqa_decode.rows import WIDTH, PackedRows
from jaxattn.kernels.hopper.launch import launch
from jaxattn.kernels.mla_decode.columns_memory import BY_ROW, SCORES
from jaxattn.kernels.mla_decode.rows_scores import EMPTY, LOG2E
from jaxattn.kernels.mla_decode.schedule import Schedule

AHEAD = 8  # partial results that are read at a time, four registers each


def combine(
    refs: list[Any],
    first_rows: list[int],
    lse: jax.Array,
    partial_lse: jax.Array,
    line: Schedule,
    sinks: jax.Array | None,
    gate: jax.Array | None,
    *,
    q_len: int,
    group: int,
    kv_heads: int,
    interpret: bool = False,
    detect_races: bool = False,
) -> jax.Array:
    """Writes the merged pairs to the output and returns the LSE of all.

    Args:
        refs: the output's rows [.., D], and the partial results' float32 [.., D].
        first_rows: where in each the op's own rows begin.
        lse: float32 [B * S * H].
        partial_lse: float32 [2 * parts, rows], natural logarithm.
        sinks: float32 [H].
        gate: [B * S * H, D].
        q_len, group, kv_heads: S, query heads of a KV head, and Hk.
    """
    pairs, rows = line.slots.shape[1], partial_lse.shape[1]
    out_ref, partial_ref = refs
    lse_ref = jax.new_ref(lse)

    def wide(vector: jax.Array) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, (ACROSS, WIDTH), [0]), SCORES)

    def body(partial_lse_ref, slots_ref, sinks_ref, gate_ref, out_ref, partial_ref, lse_ref):
        pair, chunk, piece = (lax.axis_index(name) for name in ("pair", "chunk", "dims"))
        mine, dims = pl.ds(chunk * ACROSS, ACROSS), pl.ds(piece * WIDTH, WIDTH)
        slots = [slots_ref[i, pair] for i in range(3)]
        number = slots[1]
        packed = PackedRows(
            q_len=q_len, group=group, kv_heads=kv_heads, columns=ACROSS, first=chunk * ACROSS,
            interpret=interpret,
        )  # fmt: skip
        head = lax.rem(pair, kv_heads)
        place = packed.row_of(lax.div(pair, kv_heads), head)

        def add(j, state):
            top, total, out = state
            numbers = [j * AHEAD + k for k in range(AHEAD)]
            places = [line.slot_of(slots, jnp.minimum(k, number - 1)) for k in numbers]
            of_rows = [
                pl.ds(first_rows[1] + slot * rows + chunk * ACROSS, ACROSS) for slot in places
            ]
            pieces = [
                plgpu.load(partial_ref.at[at, dims], layout=SCORES, optimized=False)
                for at in of_rows
            ]
            lses = [
                plgpu.load(partial_lse_ref.at[slot, mine], layout=BY_ROW, optimized=False) * LOG2E
                for slot in places
            ]
            lses = [
                jnp.where(k < number, lse, -jnp.inf) for k, lse in zip(numbers, lses, strict=True)
            ]
            new_top = functools.reduce(jnp.maximum, lses, top)
            rescale = jnp.exp2(top - new_top)
            total, out = total * rescale, out * wide(rescale)
            for lse, one in zip(lses, pieces, strict=True):
                weight = jnp.exp2(lse - new_top)
                total += weight
                out += wide(weight) * one
            return new_top, total, out

        @pl.when(number > 0)
        def _merge():
            state = (
                plgpu.layout_cast(jnp.full((ACROSS,), EMPTY, jnp.float32), BY_ROW),
                plgpu.layout_cast(jnp.zeros((ACROSS,), jnp.float32), BY_ROW),
                plgpu.layout_cast(jnp.zeros((ACROSS, WIDTH), jnp.float32), SCORES),
            )
            steps = lax.div(number + (AHEAD - 1), AHEAD)
            top, total, out = lax.fori_loop(0, steps, add, state)
            empty = total == 0
            if sinks_ref is not None:
                sink = packed.of_heads(sinks_ref, head)
                # The sum was relative to `top`, and so is the output.
                new_top, total = with_sink(top, total, sink)
                out = out * wide(jnp.exp2(top - new_top))
                top = new_top
            out = out * wide(1 / total)
            if gate_ref is not None:
                out = gated(out, packed.load(gate_ref, place, piece * WIDTH, WIDTH))
            out = jnp.where(wide(empty.astype(jnp.float32)) > 0, 0.0, out)
            packed.store(out_ref, first_rows[0] + place, piece * WIDTH, out.astype(out_ref.dtype))

            @pl.when(piece == 0)
            def _lse():
                lse = (top + jnp.log2(total)) * (1 / LOG2E)
                packed.store_numbers(lse_ref, place, jnp.where(empty, -jnp.inf, lse))

    launch(
        body,
        name="gqa_decode_combine",
        grid={"pair": pairs, "chunk": rows // ACROSS, "dims": out_ref.shape[1] // WIDTH},
        inputs={
            "partial_lse_ref": partial_lse,
            "slots_ref": line.slots,
            "sinks_ref": sinks,
            "gate_ref": gate,
            "out_ref": out_ref,
            "partial_ref": partial_ref,
            "lse_ref": lse_ref,
        },
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
        detect_races=detect_races,
    )
    return jax.freeze(lse_ref)
