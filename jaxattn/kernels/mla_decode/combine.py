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

from jaxattn.kernels.hopper.machine import interpret_mode
from jaxattn.kernels.mla_decode.rows_scores import LOG2E
from jaxattn.kernels.mla_decode.rows_values import RANK
from jaxattn.kernels.mla_decode.schedule import Schedule

AHEAD = 8  # partial results that are read at a time, of a row
# Most rows that are cut have two. Where there are no more than FEW of them, four rows are merged
# side by side and share AHEAD; of more, two rows, each with as many.
FEW, FEW_BESIDE, MANY_BESIDE = 8, 4, 2
# Blocks without work cost more the more there are, and those with work more the longer they are.
BLOCKS, LONGEST = 512, 16
SHARED_ROWS, SHARERS = 256, 4  # so few rows have many partial results, and this many warpgroups


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
        sharers = 1 if interpret or batch * used > SHARED_ROWS else SHARERS
    chunk = 1  # rows of a block
    # Several warpgroups do one row and leave: none waits for the others to have read its sum, which
    # that of a second row would overwrite.
    while (
        sharers == 1
        and chunk < LONGEST
        and used % (2 * chunk) == 0
        and batch * used // (2 * chunk) >= BLOCKS
    ):
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

        def read(packed: Any, places: list[Any]) -> tuple[list[jax.Array], list[jax.Array]]:
            """(LSEs, pieces) of a row's partial results."""
            at = [partial_ref.at[first_rows[1] + slot * rows + packed] for slot in places]
            lses = [partial_lse_ref[slot, packed] for slot in places]
            return lses, [plgpu.load(piece, layout=layout) for piece in at]

        def merged(packed: list[Any], ahead: int) -> list[Any]:
            """What a warpgroup has of the rows' partial results: all, or every so many."""

            def add(j, states):
                numbers = [(j * sharers + wg) * ahead + k for k in range(ahead)]
                places = [schedule.slot_of(slots, jnp.minimum(k, number - 1)) for k in numbers]
                every = []
                for state, (lses, pieces) in zip(
                    states, [read(at, places) for at in packed], strict=True
                ):
                    there = [
                        jnp.where(k < number, lse, -jnp.inf)
                        for k, lse in zip(numbers, lses, strict=True)
                    ]
                    every.append(merge(state, there, pieces))
                return every

            steps = lax.div(number + sharers * ahead - 1, sharers * ahead)
            nothing = jnp.float32(0)
            empty = (jnp.float32(-jnp.inf), nothing, full(nothing))
            return lax.fori_loop(0, steps, add, [empty] * len(packed))

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

        def write(packed: Any, top: Any, total: Any, out: Any) -> None:
            @pl.when(wg == 0)
            def _():
                empty = top == -jnp.inf
                written = out * full(jnp.where(empty, 0.0, 1 / total))
                at = first_rows[0] + row * rows + packed
                out_ref.at[at][...] = written.astype(out_ref.dtype)
                lse = top + jnp.log2(total) * (1 / LOG2E)
                lse_ref[row, packed] = jnp.where(empty, -jnp.inf, lse)

        def each(beside: int, ahead: int) -> None:
            @pl.loop(0, chunk // beside)
            def _(i):
                first = lax.axis_index("chunk") * chunk + i * beside
                packed = [first + k for k in range(beside)]
                for at, state in zip(packed, merged(packed, ahead), strict=True):
                    write(at, *(state if sharers == 1 else gathered(state)))

        many = number > (FEW if chunk > 1 else 0)
        pl.when(many)(lambda: each(min(MANY_BESIDE, chunk), AHEAD))
        if chunk > 1:
            beside = min(FEW_BESIDE, chunk)
            pl.when((number > 0) & ~many)(lambda: each(beside, AHEAD // beside))

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
