"""Merges the partial results of the rows that `mla_decode` split, in their rows of the output.

A block for some packed rows of a request. A request that lies in one part was written whole by
`mla_decode`, and its blocks leave at once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper import interpret_mode
from jaxattn.kernels.mla_body import LOG2E, RANK
from jaxattn.kernels.mla_schedule import Schedule

AHEAD = 8  # partial results that are read at a time
BLOCKS = 1024  # about as many warpgroups as the GPU runs at a time
SHARERS = 4


def combine(
    refs: list[Any],
    first_rows: list[int],
    lse: jax.Array,
    partial_lse: jax.Array,
    schedule: Schedule,
    *,
    used: int,
    sharers: int | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> jax.Array:
    """Writes the merged rows to the output and returns their LSE.

    Args:
        refs: the output's rows [.., 512], and the partial results' float32 [.., 512].
        first_rows: where in each the op's own rows begin.
        lse: float32 [B, rows].
        partial_lse: float32 [2 * parts, rows], natural logarithm.
        used: packed rows that somebody reads, the first ones.
        sharers: warpgroups that share the partial results of a row; None: four where rows are few,
            and so cut in many, but in the interpreter one.
    """
    batch, rows = lse.shape
    used = -(-used // 8) * 8
    if sharers is None:
        sharers = 1 if interpret or batch * used > BLOCKS // SHARERS else SHARERS
    chunk = 1
    # Several warpgroups do one row and leave: none waits for the others to have read its sum, which
    # that of a second row would overwrite.
    while sharers == 1 and chunk < 8 and batch * used // (2 * chunk) >= BLOCKS:
        chunk *= 2
    out_ref, partial_ref = refs
    lse_ref = jax.new_ref(lse)
    layout = plgpu.Layout.WG_STRIDED((RANK,), vec_size=4)

    def full(value: Any) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(value, (RANK,), []), layout)

    def weight_of(lse: jax.Array, top: jax.Array) -> jax.Array:
        """exp(lse - top), 0 where nothing was seen."""
        return jnp.exp2((lse - jnp.where(top == -jnp.inf, 0.0, top)) * LOG2E)

    def merge(state: Any, lses: list[jax.Array], pieces: list[jax.Array]) -> Any:
        """A sum of weights and of weighted pieces, relative to the greatest LSE so far."""
        top, total, out = state
        new_top = functools.reduce(jnp.maximum, lses, top)
        rescale = weight_of(top, new_top)
        total, out = total * rescale, out * full(rescale)
        for lse, piece in zip(lses, pieces, strict=True):
            weight = weight_of(lse, new_top)
            total += weight
            out += full(weight) * piece
        return new_top, total, out

    def body(partial_lse_ref, slots_ref, out_ref, partial_ref, lse_ref, *shared):
        row, wg = lax.axis_index("row"), lax.axis_index("wg")
        slots = [slots_ref[i, row] for i in range(3)]
        number = slots[1]

        def merged(packed: Any) -> Any:
            """What a warpgroup has of the row's partial results: all, or every so many."""

            def add(j, state):
                first = (j * sharers + wg) * AHEAD
                lses, pieces = [], []
                for k in range(AHEAD):
                    slot = schedule.slot_of(slots, jnp.minimum(first + k, number - 1))
                    lse = partial_lse_ref[slot, packed]
                    lses.append(jnp.where(first + k < number, lse, -jnp.inf))
                    piece = partial_ref.at[first_rows[1] + slot * rows + packed]
                    pieces.append(plgpu.load(piece, layout=layout))
                return merge(state, lses, pieces)

            steps = lax.div(number + sharers * AHEAD - 1, sharers * AHEAD)
            nothing = jnp.float32(0)
            return lax.fori_loop(0, steps, add, (jnp.float32(-jnp.inf), nothing, full(nothing)))

        def gathered(state: Any) -> Any:
            """Of all warpgroups, for the first."""
            sums, tops, totals, there = shared
            tops[wg], totals[wg] = state[:2]
            sums.at[wg][...] = state[2]
            plgpu.barrier_arrive(there)
            plgpu.barrier_wait(there)
            every = [plgpu.load(sums.at[i], layout=layout) for i in range(sharers)]
            top = functools.reduce(jnp.maximum, [tops[i] for i in range(sharers)])
            weights = [weight_of(tops[i], top) for i in range(sharers)]
            total = sum(totals[i] * weight for i, weight in enumerate(weights))
            return top, total, sum(full(weights[i]) * part for i, part in enumerate(every))

        @pl.when(number > 0)
        def _():
            @pl.loop(0, chunk)
            def _(i):
                packed = lax.axis_index("chunk") * chunk + i
                state = merged(packed)
                top, total, out = state if sharers == 1 else gathered(state)

                @pl.when(wg == 0)
                def _write():
                    empty = top == -jnp.inf
                    written = out * full(jnp.where(empty, 0.0, 1 / total))
                    at = first_rows[0] + row * rows + packed
                    out_ref.at[at][...] = written.astype(out_ref.dtype)
                    lse = top + jnp.log2(total) * (1 / LOG2E)
                    lse_ref[row, packed] = jnp.where(empty, -jnp.inf, lse)

    shared: list[Any] = [
        plgpu.SMEM((sharers, RANK), jnp.float32),
        plgpu.SMEM((sharers,), jnp.float32),
        plgpu.SMEM((sharers,), jnp.float32),
        plgpu.Barrier(num_arrivals=sharers),
    ]
    kernel = plgpu.kernel(
        body,
        out_type=(),
        scratch_types=shared[: None if sharers > 1 else 0],
        grid=(batch, used // chunk),
        grid_names=("row", "chunk"),
        num_threads=sharers,
        thread_name="wg",
        kernel_name="mla_decode_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret_mode(interpret, detect_races=detect_races),
    )
    with jax.enable_x64(False):
        kernel(partial_lse, schedule.slots, out_ref, partial_ref, lse_ref)
    return jax.freeze(lse_ref)
