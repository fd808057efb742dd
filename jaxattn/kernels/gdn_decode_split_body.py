"""The body of the delta rule's decode where a state's rows have four blocks.

For one token a row, and so few states that each may have four multiprocessors: what counts then
are latencies. The blocks of a key head's value heads are a cluster, and a block has 32 rows of one
state [Dv, Dk], which go from memory to registers and back. It convolves all of q, k and its head's
values. All that it needs of the others is the sum of their outputs' squares, for the norm
(cluster.py); who has that may also overwrite the convolution's state, which they have read.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.cluster import Squares
from jaxattn.kernels.gdn_decode_inputs import DIM, Inputs, Op, convolved, factors_of, gates, silu
from jaxattn.kernels.hopper import meet

SPLIT = 4  # blocks of a state
ROWS = DIM // SPLIT  # of a block

# A warp has a quarter of the rows, eight threads a row.
MATRIX = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, DIM), (ROWS // 4, DIM), (4, 32), (4,))),
    warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1,
)  # fmt: skip
BY_VALUE, BY_KEY = MATRIX.reduce(1), MATRIX.reduce(0)


def _squares(op: Op, *, interpret: bool) -> Squares:
    return Squares(op.group * SPLIT, SPLIT, BY_VALUE, interpret=interpret)


def scratch_types(op: Op, *, interpret: bool) -> list[Any]:
    vectors = plgpu.SMEM((3 * DIM,), jnp.float32)  # q, k and the values
    return [vectors, *_squares(op, interpret=interpret).scratch_types()]


def _down(vector: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(vector, (ROWS, DIM), [0])


def _across(vector: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(vector, (ROWS, DIM), [1])


def _of_rows(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=BY_VALUE, optimized=False)


def make_body(op: Op, first_row: int, *, interpret: bool) -> Any:
    """The interpreter also wants `between`: memory of any content, [B, Hk, blocks of a cluster]."""
    squares = _squares(op, interpret=interpret)
    meets = op.conv or op.norm  # whether blocks have to do with each other

    def body(
        qkvz_ref, ba_ref, weights_ref, layer_ref, reads_ref, writes_ref, pool_ref, conv_ref,
        out_ref, vectors, *scratch, between=None,
    ):  # fmt: skip
        row, key_head = lax.axis_index("row"), lax.axis_index("key_head")
        part = lax.axis_index("part")
        if meets:
            if interpret:
                scratch = between.at[row, key_head], *scratch
            squares.open(scratch, part)
        layer, slot = layer_ref[0] * op.affine[0] + op.affine[1], reads_ref[row]
        target = writes_ref[row, 0] if op.keep else writes_ref[row]
        own = layer if op.stacked else 0  # row of weights
        head, piece = key_head * op.group + lax.div(part, SPLIT), lax.rem(part, SPLIT)
        slots = pool_ref.shape[1]

        def in_pool(slot: Any) -> Any:
            return (slot >= 0) & (slot < slots)

        live = in_pool(slot) & (layer >= 0) & (layer < pool_ref.shape[0])
        out = out_ref.at[first_row + row * op.value_heads + head, pl.ds(piece * ROWS, ROWS)]
        here = Inputs(op, qkvz_ref, ba_ref, weights_ref, conv_ref, row, key_head, [head])

        def states(slot: Any) -> Any:
            return pool_ref.at[layer, slot, pl.ds(head * DIM + piece * ROWS, ROWS)]

        def keep_inputs(some: list[Any]) -> None:
            @pl.when(in_pool(target))
            def _():
                for window in some:
                    here.keep(layer, target, 0, window)

        @pl.when(live)
        def _update():
            # Every load comes before what waits for the first one: latencies run side by side.
            state = plgpu.load(states(slot), layout=MATRIX, optimized=False)
            new, b_and_a = here.new(), here.b_and_a()
            windows = [
                here.window(layer, own, slot, *each) for each in zip(here.firsts, new, strict=True)
            ]
            (of_gates,) = here.of_gates(own, b_and_a)
            if op.norm:
                z = _of_rows(qkvz_ref.at[row, 0, pl.ds(here.first_gate(head) + piece * ROWS, ROWS)])
                norm = _of_rows(weights_ref.at[own, pl.ds(here.first_norm + piece * ROWS, ROWS)])

            for i, (_, window, taps) in enumerate(windows):
                vectors.at[pl.ds(i * DIM, DIM)][...] = convolved(window, taps, 0)
            ((decay, beta),) = gates(*of_gates)
            meet(interpret=interpret)  # vectors are there, and every warp has its inputs
            q, k = (plgpu.load(vectors.at[pl.ds(i * DIM, DIM)], layout=BY_KEY) for i in range(2))
            v = plgpu.load(vectors.at[pl.ds(2 * DIM + piece * ROWS, ROWS)], layout=BY_VALUE)
            q_factor, k_factor, k_q = factors_of(op, q, k)
            q, k = _across(q * q_factor), _across(k * k_factor)
            state = state.astype(jnp.float32)
            delta = beta * (v - decay * (state * k).sum(axis=1))
            y = decay * (state * q).sum(axis=1) + delta * k_q
            if meets:
                squares.ready()
                squares.send(y)

            @pl.when(in_pool(target))
            def _store():
                after = state * decay + _down(delta) * k
                states(target)[...] = plgpu.layout_cast(after.astype(pool_ref.dtype), MATRIX)

            if meets:
                mean_square = squares.receive() * (1.0 / DIM)
            if op.norm:
                y *= lax.rsqrt(mean_square + op.eps) * (norm * silu(z))
            out[...] = y.astype(out_ref.dtype)
            if op.conv:
                pl.when(part == 0)(lambda: keep_inputs(windows[:2]))
                pl.when(piece == 0)(lambda: keep_inputs(windows[2:]))

        @pl.when(jnp.logical_not(live))
        def _padding():
            if meets:
                squares.ready()  # no block ends before another has begun
            zeros = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_VALUE)
            out[...] = zeros.astype(out_ref.dtype)

    return body
