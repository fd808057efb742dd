"""Merges the partial results of the rows that `mla_decode` split, in their rows of the output.

A block for some packed rows of a request. A request that lies in one part was written whole by
`mla_decode`, and its blocks leave at once.
"""

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
BLOCKS = 1024  # about as many blocks as the GPU runs at a time


def combine(
    refs: list[Any],
    first_rows: list[int],
    lse: jax.Array,
    partial_lse: jax.Array,
    schedule: Schedule,
    *,
    used: int,
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
    """
    batch, rows = lse.shape
    used = -(-used // 8) * 8
    chunk = 1
    while chunk < 8 and batch * used // (2 * chunk) >= BLOCKS:
        chunk *= 2
    out_ref, partial_ref = refs
    lse_ref = jax.new_ref(lse)

    layout = plgpu.Layout.WG_STRIDED((RANK,), vec_size=4)

    def full(value: Any) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(value, (RANK,), []), layout)

    def body(partial_lse_ref, slots_ref, out_ref, partial_ref, lse_ref):
        row = lax.axis_index("row")
        slots = [slots_ref[i, row] for i in range(3)]
        number = slots[1]

        @pl.when(number > 0)
        def _():
            @pl.loop(0, chunk)
            def _(i):
                packed = lax.axis_index("chunk") * chunk + i
                blocks = lax.div(number + AHEAD - 1, AHEAD)

                def slot(index: Any) -> Any:
                    return schedule.slot_of(slots, jnp.minimum(index, number - 1))

                def find_top(j, top):
                    for k in range(AHEAD):
                        top = jnp.maximum(top, partial_lse_ref[slot(j * AHEAD + k), packed])
                    return top

                top = lax.fori_loop(0, blocks, find_top, jnp.float32(-jnp.inf))
                nothing = top == -jnp.inf
                base = jnp.where(nothing, 0.0, top)

                def add(j, carry):
                    total, out = carry
                    for k in range(AHEAD):
                        index = j * AHEAD + k
                        weight = partial_lse_ref[slot(index), packed]
                        weight = jnp.exp2((weight - base) * LOG2E)
                        weight = jnp.where(index < number, weight, 0.0)
                        piece = partial_ref.at[first_rows[1] + slot(index) * rows + packed]
                        total += weight
                        out += full(weight) * plgpu.load(piece, layout=layout)
                    return total, out

                init = (jnp.float32(0), full(jnp.float32(0)))
                total, out = lax.fori_loop(0, blocks, add, init)
                factor = jnp.where(nothing, 0.0, 1 / total)
                out = out * full(factor)
                out_ref.at[first_rows[0] + row * rows + packed][...] = out.astype(out_ref.dtype)
                lse = base + jnp.log2(total) * (1 / LOG2E)
                lse_ref[row, packed] = jnp.where(nothing, -jnp.inf, lse)

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(batch, used // chunk),
        grid_names=("row", "chunk"),
        kernel_name="mla_decode_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret_mode(interpret, detect_races=detect_races),
    )
    with jax.enable_x64(False):
        kernel(partial_lse, schedule.slots, out_ref, partial_ref, lse_ref)
    return jax.freeze(lse_ref)
