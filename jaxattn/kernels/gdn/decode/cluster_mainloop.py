"""The body of the delta rule's decode where four CTAs share the rows of a state.

This body serves one token per row, and so few states that each may have four multiprocessors:
latency then dominates. The CTAs of a key head's value heads are a cluster. A CTA has 32 rows of one
state [Dv, Dk], which go from memory to registers and back. It convolves the rows' 32 values, and
all of q and k. It needs only one thing from the other CTAs, the sum of their outputs' squares for
the norm (cluster_reduction.py). A CTA that has this sum may also overwrite the convolution's state
of q and k, which the others have then read.

A CTA waits for memory half of its time. So it issues the loads whose addresses do not depend on the
slot before it knows the slot, and then all others at once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.decode.prologue import (
    CHANNEL,
    DIM,
    ChannelSlice,
    GdnDecodeConfig,
    GdnDecodeInputs,
    convolved,
    factors_of,
    gated,
    gates,
    products,
)
from jaxattn.kernels.hopper.instructions import issue_loads, pin_value, warpgroup_barrier
from jaxattn.kernels.hopper.reduce.block_reduction import BlockReduction
from jaxattn.kernels.hopper.reduce.cluster_reduction import ClusterSquareSum, cluster_block_index
from jaxattn.kernels.hopper.store.row_store import store

SPLIT = 4  # CTAs per state
ROWS = DIM // SPLIT  # rows of a CTA

# A warp has a quarter of the rows, with eight threads per row.
MATRIX = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, DIM), (ROWS // 4, DIM), (4, 32), (4,))),
    warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1,
)  # fmt: skip
# Each warp has all of a CTA's values, and convolves all of them.
VALUES = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS,), (1,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)
BY_VALUE, BY_KEY = MATRIX.reduce(1), MATRIX.reduce(0)


def _squares(op: GdnDecodeConfig, *, interpret: bool) -> ClusterSquareSum:
    return ClusterSquareSum(op.group * SPLIT, SPLIT, BY_VALUE, interpret=interpret)


def _lengths(op: GdnDecodeConfig, *, interpret: bool) -> BlockReduction:
    """The reduction for the lengths of q and k."""
    return BlockReduction(3 if op.l2norm else 1, CHANNEL, interpret=interpret)


def scratch_types(op: GdnDecodeConfig, *, interpret: bool) -> dict[str, Any]:
    return {
        # q, k and the values, and the decays per channel, if there are any.
        "vectors": plgpu.SMEM(((2 + op.channels) * DIM + ROWS,), jnp.float32),
        "sums": _lengths(op, interpret=interpret).scratch_type(),
        "scalars": plgpu.SMEM((2,), jnp.float32),  # decay, beta
        **_squares(op, interpret=interpret).scratch_types(),
    }


def _down(vector: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(vector, (ROWS, DIM), [0])


def _across(vector: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(vector, (ROWS, DIM), [1])


class GdnDecodeClusterCta:
    """A CTA with 32 rows of the state of a value head."""

    def __init__(
        self, op: GdnDecodeConfig, first_row: int, *, interpret: bool,
        qkvz_ref: Any, ba_ref: Any, f_ref: Any, z_ref: Any, weights_ref: Any, layer_ref: Any,
        affine_ref: Any, reads_ref: Any, writes_ref: Any, pool_ref: Any, conv_ref: Any,
        out_ref: Any,
        vectors: Any, sums: Any, scalars: Any, square_sums: Any = None, squares_sent: Any,
        between: Any = None,
    ):  # fmt: skip
        """Reads the indices of the CTA's row, heads and slots.

        Args:
            first_row: The first row of the output.
            between: For the interpreter, whose CTAs share no shared memory: global memory of any
                content, [B, Hk, CTAs of a cluster].
        """
        self.op, self.interpret = op, interpret
        self.layer_ref, self.pool_ref, self.out_ref = layer_ref, pool_ref, out_ref
        self.vectors, self.sums, self.scalars = vectors, sums, scalars
        self.squares = _squares(op, interpret=interpret)
        self.lengths = _lengths(op, interpret=interpret)
        self.meets = op.conv or op.norm  # whether the CTAs of a cluster depend on each other
        row, key_head = lax.axis_index("row"), lax.axis_index("key_head")
        self.part = cluster_block_index(op.group * SPLIT, interpret=interpret)
        self.layer, self.slot = layer_ref[0] * affine_ref[0] + affine_ref[1], reads_ref[row]
        self.target = writes_ref[row, 0] if op.keep else writes_ref[row]
        if self.meets:
            shown = between.at[row, key_head] if interpret else square_sums
            self.squares.open(shown, squares_sent, self.part)
        self.own = self.layer if op.stacked else 0  # row of weights
        self.head = key_head * op.group + lax.div(self.part, SPLIT)
        self.piece = lax.rem(self.part, SPLIT)
        self.slots = pool_ref.shape[1]
        self.live = self._in_pool(self.slot) & (self.layer >= 0) & (self.layer < pool_ref.shape[0])
        out_row = first_row + row * op.value_heads + self.head
        self.out = out_ref.at[out_row, pl.ds(self.piece * ROWS, ROWS)]
        self.here = GdnDecodeInputs(
            op, qkvz_ref, ba_ref, f_ref, z_ref, weights_ref, conv_ref, row, key_head, [self.head]
        )
        values = self.here.channels[2]
        self.here.channels[2] = ChannelSlice(values.first + self.piece * ROWS, ROWS, VALUES)

    def run(self) -> None:
        # Loaded before the slot is known.
        new, b_and_a = self.here.new(), self.here.b_and_a()
        z: Any = None
        if self.op.norm:
            (z,) = self.here.of_gate(self.head, self.piece * ROWS, ROWS, BY_VALUE)
        if self.meets:
            self.squares.ready()
        pl.when(self.live)(lambda: self._update(new, b_and_a, z))

        @pl.when(jnp.logical_not(self.live))
        def _padding():
            zeros = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_VALUE)
            store(self.out, zeros.astype(self.out_ref.dtype))

    def _in_pool(self, slot: Any) -> Any:
        return (slot >= 0) & (slot < self.slots)

    def _states(self, slot: Any) -> Any:
        rows = pl.ds(self.head * DIM + self.piece * ROWS, ROWS)
        return self.pool_ref.at[self.layer, slot, rows]

    def _update(self, new: Any, b_and_a: Any, z: Any) -> None:
        op, here = self.op, self.here
        # Every load is issued before the first use, so that latencies overlap.
        windows = here.windows(self.layer, self.own, self.slot, new)
        (of_gates,) = here.of_gates(self.own, b_and_a)
        if op.norm:
            of_norm = ChannelSlice(here.first_norm + self.piece * ROWS, ROWS, BY_VALUE)
            norm = of_norm.load(here.weights.at[self.own])

        state = plgpu.load(self._states(self.slot), layout=MATRIX, optimized=False)
        issue_loads(interpret=self.interpret)
        self._share([convolved(window, taps, 0) for _, window, taps in windows], of_gates)
        y, decay, delta, k, state = self._step(state)
        if self.meets:
            self.squares.send(y)

        @pl.when(self._in_pool(self.target))
        def _store():
            after = (state if op.channels else state * decay) + _down(delta) * k
            after = plgpu.layout_cast(after.astype(self.pool_ref.dtype), MATRIX)
            self._states(self.target)[...] = after
            if op.conv:
                here.keep(self.layer, self.target, 0, windows[2])

        if op.norm:
            times = pin_value(norm * gated(op, z), BY_VALUE, interpret=self.interpret)
        if self.meets:
            mean_square = self.squares.receive() * (1.0 / DIM)
        if op.norm:
            y *= lax.rsqrt(mean_square + op.eps) * times
        store(self.out, y.astype(self.out_ref.dtype))
        if op.conv:

            @pl.when((self.part == 0) & self._in_pool(self.target))
            def _keep():
                for window in windows[:2]:
                    here.keep(self.layer, self.target, 0, window)

    def _share(self, vectors: list[jax.Array], of_gates: Any) -> None:
        """Shares q, k and the values, the sums of q and k, and the gates with every warp."""
        q, k, v = vectors
        for first, x in ((0, q), (DIM, k), (2 * DIM, v)):
            self.vectors.at[pl.ds(first, x.size)][...] = x
        self.lengths.put(self.sums, list(products(self.op, q, k)))
        ((decay, beta),) = gates(self.op, *of_gates)
        if self.op.channels:
            self._decays[...] = decay
        else:
            self.scalars[0] = decay
        self.scalars[1] = beta
        warpgroup_barrier(
            interpret=self.interpret
        )  # the vectors are there, and every warp has its inputs

    @property
    def _decays(self) -> Any:
        """The shared memory of the decays per channel."""
        return self.vectors.at[pl.ds(2 * DIM + ROWS, DIM)]

    def _step(self, state: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the output, and the operands of the state's update: decay, delta, k and the
        state, broadcast.

        Decays per channel have already been applied to the state.
        """
        vectors, beta = self.vectors, self.scalars[1]
        decay: Any = 1.0 if self.op.channels else self.scalars[0]
        q, k = (plgpu.load(vectors.at[pl.ds(i * DIM, DIM)], layout=BY_KEY) for i in range(2))
        v = plgpu.load(vectors.at[pl.ds(2 * DIM, ROWS)], layout=BY_VALUE)
        q_factor, k_factor, k_q = factors_of(self.op, self.lengths.get(self.sums))
        q, k = _across(q * q_factor), _across(k * k_factor)
        state = state.astype(jnp.float32)
        if self.op.channels:
            state *= _across(plgpu.load(self._decays, layout=BY_KEY))
        delta = beta * (v - decay * (state * k).sum(axis=1))
        y = decay * (state * q).sum(axis=1) + delta * k_q
        return y, decay, delta, k, state
