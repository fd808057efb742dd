"""The body of the delta rule's decode where a state's rows have four blocks.

For one token a row, and so few states that each may have four multiprocessors: what counts then
are latencies. The blocks of a key head's value heads are a cluster, and a block has 32 rows of one
state [Dv, Dk], which go from memory to registers and back. It convolves their 32 values, and all of
q and k. All that it needs of the others is the sum of their outputs' squares, for the norm
(cluster.py); who has that may also overwrite the convolution's state of q and k, which they have
read.

Half of its time it waits for memory. What no slot says where it is, it asks for before it knows the
slot; and for everything else at once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn_decode.inputs import (
    CHANNEL,
    DIM,
    Channels,
    Inputs,
    Op,
    convolved,
    factors_of,
    gates,
    products,
)
from jaxattn.kernels.hopper.block_sums import BlockSums
from jaxattn.kernels.hopper.cluster import Squares, block_of_cluster
from jaxattn.kernels.hopper.elementwise import silu
from jaxattn.kernels.hopper.machine import asked_for, made_here, meet

SPLIT = 4  # blocks of a state
ROWS = DIM // SPLIT  # of a block

# A warp has a quarter of the rows, eight threads a row.
MATRIX = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, DIM), (ROWS // 4, DIM), (4, 32), (4,))),
    warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1,
)  # fmt: skip
# Each warp has all of a block's values, of which it convolves every one.
VALUES = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS,), (1,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)
BY_VALUE, BY_KEY = MATRIX.reduce(1), MATRIX.reduce(0)


def _squares(op: Op, *, interpret: bool) -> Squares:
    return Squares(op.group * SPLIT, SPLIT, BY_VALUE, interpret=interpret)


def _lengths(op: Op, *, interpret: bool) -> BlockSums:
    """Of q and k."""
    return BlockSums(3 if op.l2norm else 1, CHANNEL, interpret=interpret)


def scratch_types(op: Op, *, interpret: bool) -> list[Any]:
    vectors = plgpu.SMEM((2 * DIM + ROWS,), jnp.float32)  # q, k and the values
    lengths = _lengths(op, interpret=interpret).scratch_type()
    scalars = plgpu.SMEM((2,), jnp.float32)  # decay, beta
    return [vectors, lengths, scalars, *_squares(op, interpret=interpret).scratch_types()]


def _down(vector: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(vector, (ROWS, DIM), [0])


def _across(vector: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(vector, (ROWS, DIM), [1])


def make_body(op: Op, first_row: int, *, interpret: bool) -> Any:
    """The interpreter also wants `between`: memory of any content, [B, Hk, blocks of a cluster]."""
    squares, lengths = _squares(op, interpret=interpret), _lengths(op, interpret=interpret)
    meets = op.conv or op.norm  # whether blocks have to do with each other

    def body(
        qkvz_ref, ba_ref, weights_ref, layer_ref, reads_ref, writes_ref, pool_ref, conv_ref,
        out_ref, vectors, sums, scalars, *scratch, between=None,
    ):  # fmt: skip
        row, key_head = lax.axis_index("row"), lax.axis_index("key_head")
        part = block_of_cluster(op.group * SPLIT, interpret=interpret)
        layer, slot = layer_ref[0] * op.affine[0] + op.affine[1], reads_ref[row]
        target = writes_ref[row, 0] if op.keep else writes_ref[row]
        if meets:
            if interpret:
                scratch = between.at[row, key_head], *scratch
            squares.open(scratch, part)
        own = layer if op.stacked else 0  # row of weights
        head, piece = key_head * op.group + lax.div(part, SPLIT), lax.rem(part, SPLIT)
        slots = pool_ref.shape[1]

        def in_pool(slot: Any) -> Any:
            return (slot >= 0) & (slot < slots)

        live = in_pool(slot) & (layer >= 0) & (layer < pool_ref.shape[0])
        out = out_ref.at[first_row + row * op.value_heads + head, pl.ds(piece * ROWS, ROWS)]
        here = Inputs(op, qkvz_ref, ba_ref, weights_ref, conv_ref, row, key_head, [head])
        here.channels[2] = Channels(here.channels[2].first + piece * ROWS, ROWS, VALUES)

        def states(slot: Any) -> Any:
            return pool_ref.at[layer, slot, pl.ds(head * DIM + piece * ROWS, ROWS)]

        # Asked for before the slot is there.
        new, b_and_a = here.new(), here.b_and_a()
        if op.norm:
            own_gates = Channels(here.first_gate(head) + piece * ROWS, ROWS, BY_VALUE)
            z = own_gates.load(qkvz_ref.at[row, 0])
        if meets:
            squares.ready()

        @pl.when(live)
        def _update():
            # Every load comes before what waits for the first one: latencies run side by side.
            windows = here.windows(layer, own, slot, new)
            (of_gates,) = here.of_gates(own, b_and_a)
            if op.norm:
                of_norm = Channels(here.first_norm + piece * ROWS, ROWS, BY_VALUE)
                norm = of_norm.load(weights_ref.at[own])

            state = plgpu.load(states(slot), layout=MATRIX, optimized=False)
            asked_for(interpret=interpret)

            q, k, v = (convolved(window, taps, 0) for _, window, taps in windows)
            for first, x in ((0, q), (DIM, k), (2 * DIM, v)):
                vectors.at[pl.ds(first, x.size)][...] = x
            lengths.put(sums, list(products(op, q, k)))
            for i, x in enumerate(gates(*of_gates)[0]):
                scalars[i] = x
            meet(interpret=interpret)  # vectors are there, and every warp has its inputs
            decay, beta = scalars[0], scalars[1]
            q, k = (plgpu.load(vectors.at[pl.ds(i * DIM, DIM)], layout=BY_KEY) for i in range(2))
            v = plgpu.load(vectors.at[pl.ds(2 * DIM, ROWS)], layout=BY_VALUE)
            q_factor, k_factor, k_q = factors_of(op, lengths.get(sums))
            q, k = _across(q * q_factor), _across(k * k_factor)
            state = state.astype(jnp.float32)
            delta = beta * (v - decay * (state * k).sum(axis=1))
            y = decay * (state * q).sum(axis=1) + delta * k_q
            if meets:
                squares.send(y)

            @pl.when(in_pool(target))
            def _store():
                after = state * decay + _down(delta) * k
                states(target)[...] = plgpu.layout_cast(after.astype(pool_ref.dtype), MATRIX)
                if op.conv:
                    here.keep(layer, target, 0, windows[2])

            if op.norm:
                times = made_here(norm * silu(z), BY_VALUE, interpret=interpret)
            if meets:
                mean_square = squares.receive() * (1.0 / DIM)
            if op.norm:
                y *= lax.rsqrt(mean_square + op.eps) * times
            out[...] = y.astype(out_ref.dtype)
            if op.conv:

                @pl.when((part == 0) & in_pool(target))
                def _keep():
                    for window in windows[:2]:
                        here.keep(layer, target, 0, window)

        @pl.when(jnp.logical_not(live))
        def _padding():
            zeros = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_VALUE)
            out[...] = zeros.astype(out_ref.dtype)

    return body
