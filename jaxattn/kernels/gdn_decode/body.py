"""The body of the delta rule's decode: what a block does for the value heads that it has.

It convolves the channels of its q, k and v, prepares the gates (inputs.py), and takes
the states [Dv, Dk] tile by tile through a ring in shared memory, so that loads, arithmetic and
stores overlap, with those of the other blocks on the multiprocessor as well. A tile stays in
registers over the S tokens. Both products with it are of the state before a token's update (S q is
exp(g) S q + delta (k q)), so that their sums run side by side. The output is normalised and gated
when all of its head is there.

A row of one token takes little more than its latencies. So warps wait for each other only where one
reads or overwrites what another, or a copy, has to do with: Pallas would have them wait around
every store. And q and k are in shared memory as the convolution leaves them; every warp adds up for
itself what makes them unit vectors. They are before they meet a state, that a sum of large numbers
does not overflow which the unit vectors' would not.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn_decode.inputs import (
    CHANNEL,
    DIM,
    Inputs,
    Op,
    convolved,
    factors_of,
    gates,
    products,
)
from jaxattn.kernels.hopper.elementwise import silu
from jaxattn.kernels.hopper.machine import meet, swizzled


@dataclasses.dataclass(frozen=True)
class Config:
    """How the states are cut up.

    Attributes:
        tile: rows of a state [Dv, Dk] that are in registers at a time.
        stages: tiles in the ring.
        parts: blocks that share a key head's value heads, a cluster.
        split: a state's rows have four blocks, and what is said above does not count.
    """

    tile: int = 64
    stages: int = 2
    parts: int = 1
    split: bool = False

    def __post_init__(self):
        if self.tile not in (32, 64, 128) or self.stages < 2:
            raise ValueError(f"tile must be 32, 64 or 128 and stages at least 2, got {self}")


def _steps_and_stages(op: Op, config: Config) -> tuple[int, int]:
    """Tiles that a block takes, and places in its ring: no more than it has tiles."""
    steps = op.group // config.parts * DIM // config.tile
    return steps, min(config.stages, steps)


def scratch_types(op: Op, config: Config, state_dtype: Any) -> list[Any]:
    heads = op.group // config.parts
    _, stages = _steps_and_stages(op, config)
    ring = (stages, config.tile, DIM)
    types = [
        plgpu.SMEM(ring, state_dtype, transforms=_tile_transforms(state_dtype)),
        plgpu.SMEM((op.q_len, (2 + heads) * DIM), jnp.float32),  # q, k and the values
        plgpu.SMEM((op.q_len, heads * DIM), jnp.float32),  # the output before its norm
        plgpu.Barrier(num_barriers=stages),  # tile loaded
    ]
    if heads > 1:
        types.append(plgpu.SMEM((2 * heads, op.q_len), jnp.float32))  # decays, betas
    if config.parts > 1 and op.conv:
        types.append(plgpu.ClusterBarrier(collective_axes=("part",)))
    return types


def shared_bytes(op: Op, config: Config, state_dtype: Any) -> int:
    """Of a block, without its barriers."""
    arrays = (x for x in scratch_types(op, config, state_dtype) if hasattr(x, "dtype"))
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)


def _tile_transforms(state_dtype: Any) -> Any:
    """A tile of float32 is row-major, so that a copy is of whole rows, one piece of memory; left to
    itself, JAX would choose a swizzle. One of bfloat16 is swizzled, and copied 128 bytes of a row
    at a time: row-major, with 16 bytes a thread, it is slower."""
    if state_dtype == jnp.float32:
        return (plgpu.TilingTransform((8, DIM)),)  # type: ignore[abstract]
    return swizzled(state_dtype)


def _layout(tile: int) -> Any:
    """Registers of a tile [tile, Dk]: a warp a quarter of its rows, eight threads a row.

    A float32 row's 32 keys are 128 bytes of shared memory, so that a warp's 16-byte loads meet no
    bank conflict; and of k and q, held beside the states, a thread has an eighth. Of bfloat16 they
    are 64 bytes, and 16 threads have rows four apart, which lie in different halves of 128 bytes,
    swizzled as they are: with neighbouring rows every load and store would be two and a choice.
    """
    tiles = ((tile, DIM), (tile // 4, DIM), (8, 32), (4, 32), (2, 32), (4,))
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-11,), lane_dims=(-3, -7, -2), vector_dim=-1
    )


def make_body(op: Op, config: Config, first_row: int, *, interpret: bool) -> Any:
    q_len, group, tile = op.q_len, op.group, config.tile
    heads = group // config.parts
    steps, stages = _steps_and_stages(op, config)
    matrix = _layout(tile)
    by_value, by_key = matrix.reduce(1), matrix.reduce(0)

    def rows(vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, (tile, DIM), [0])

    def columns(vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, (tile, DIM), [1])

    def q_and_k(vectors: Any, token: int) -> list[jax.Array]:
        at = (pl.ds(i * DIM, DIM) for i in range(2))
        return [plgpu.load(vectors.at[token, some], layout=by_key) for some in at]

    def body(
        qkvz_ref, ba_ref, weights_ref, layer_ref, reads_ref, writes_ref, pool_ref, conv_ref,
        out_ref, ring, vectors, out_smem, loaded, *rest,
    ):  # fmt: skip
        scalars = rest[0] if heads > 1 else None
        all_read = rest[-1] if config.parts > 1 and op.conv else None
        row, key_head = lax.axis_index("row"), lax.axis_index("key_head")
        part = lax.axis_index("part") if config.parts > 1 else 0
        layer, slot = layer_ref[0] * op.affine[0] + op.affine[1], reads_ref[row]
        own = layer if op.stacked else 0  # row of weights
        first_head = key_head * group + part * heads
        slots = pool_ref.shape[1]

        if op.keep:
            targets = {token: writes_ref[row, token] for token in range(q_len)}
        else:
            targets = {q_len - 1: writes_ref[row]}

        def in_pool(slot: Any) -> Any:
            # One past the layer's slots would be the next layer's: TMA sees them as one axis.
            return (slot >= 0) & (slot < slots)

        # Both numbers are asked for at once: one after the other would take twice as long.
        live = in_pool(slot) & (layer >= 0) & (layer < pool_ref.shape[0])

        def states(slot: Any, step: Any) -> Any:
            return pool_ref.at[layer, slot, pl.ds(first_head * DIM + step * tile, tile)]

        def fetch(step: Any) -> None:
            at = lax.rem(step, stages)
            plgpu.copy_gmem_to_smem(states(slot, step), ring.at[at], loaded.at[at])

        def out_at(token: int, head: int) -> Any:
            at = (row * q_len + token) * op.value_heads + first_head + head
            return out_ref.at[first_row + at]

        here = Inputs(
            op,
            qkvz_ref,
            ba_ref,
            weights_ref,
            conv_ref,
            row,
            key_head,
            [first_head + head for head in range(heads)],
        )
        # Asked for before the slot is there, where it is enough for that to pay.
        early = here.given() if heads > 1 else None

        def keep_inputs(window: Any) -> None:
            for token, target in targets.items():
                pl.when(in_pool(target))(functools.partial(here.keep, layer, target, token, window))

        @pl.when(live)
        def _update():
            for step in range(stages):
                fetch(step)

            # Every load comes before what waits for the first one: latencies run side by side.
            new, b_and_a, z = early or here.given()
            windows = here.windows(layer, own, slot, new)
            of_gates = here.of_gates(own, b_and_a)
            if op.norm:
                norm = here.norm_weight(own)

            decays_and_betas = []  # of the first head, the only one where these are read
            for head, each in enumerate(of_gates):
                for token, (decay, beta) in enumerate(gates(*each)):
                    decays_and_betas.append((decay, beta))
                    if scalars is not None:
                        scalars[head, token] = decay
                        scalars[heads + head, token] = beta

            for i, (_, window, taps) in enumerate(windows):
                for token in range(q_len):
                    vectors.at[token, pl.ds(i * DIM, DIM)][...] = convolved(window, taps, token)
            if op.norm:  # what the normed output is times
                times = [[norm * silu(x) for x in of_head] for of_head in z]
            meet(interpret=interpret)  # vectors are there, and every warp has its inputs
            if all_read is not None:
                plgpu.barrier_arrive(all_read)
            if op.conv:
                for window in windows[2:]:
                    keep_inputs(window)
            qk = [q_and_k(vectors, token) for token in range(q_len)]
            qk_factors = [factors_of(op, map(jnp.sum, products(op, *each))) for each in qk]

            def units(token: int, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
                q_factor, k_factor, _ = qk_factors[token]
                return q * q_factor, k * k_factor

            # Of one token they stay in registers; of several there is no room for that.
            only = units(0, *qk[0]) if q_len == 1 else None

            @pl.loop(0, steps)
            def _tile(step):
                at = lax.rem(step, stages)
                head = lax.div(step * tile, DIM)
                plgpu.barrier_wait(loaded.at[at])
                state = plgpu.load(ring.at[at], layout=matrix).astype(jnp.float32)
                own_rows = pl.ds(step * tile, tile)
                for token in range(q_len):
                    q, k = (columns(x) for x in only or units(token, *q_and_k(vectors, token)))
                    k_q = qk_factors[token][2]
                    if scalars is None:
                        decay, beta = decays_and_betas[token]
                    else:
                        decay, beta = scalars[head, token], scalars[heads + head, token]
                    values = vectors.at[token, pl.ds(2 * DIM + step * tile, tile)]
                    v = plgpu.load(values, layout=by_value)
                    delta = beta * (v - decay * (state * k).sum(axis=1))
                    out = decay * (state * q).sum(axis=1) + delta * k_q
                    state = state * decay + rows(delta) * k
                    out_smem.at[token, own_rows][...] = out
                    if token not in targets:
                        continue

                    @pl.when(in_pool(targets[token]))
                    def _store(token=token, target=targets[token], state=state):
                        if op.keep and token > 0:
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        ring.at[at][...] = state.astype(ring.dtype)  # a thread writes what it read
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(ring.at[at], states(target, step))

                if stages < steps:

                    @pl.when((step > 0) & (step - 1 + stages < steps))
                    def _refill():
                        # Behind this wait, the tile before this one is read and stored.
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        fetch(step - 1 + stages)

            meet(interpret=interpret)  # the output is there for every warp
            for head in range(heads):
                for token in range(q_len):
                    head_out = out_smem.at[token, pl.ds(head * DIM, DIM)]
                    out = plgpu.load(head_out, layout=CHANNEL, optimized=False)
                    if op.norm:
                        whole = plgpu.load(head_out, layout=by_key)
                        mean_square = jnp.sum(whole * whole) * (1.0 / DIM)
                        out *= lax.rsqrt(mean_square + op.eps) * times[head][token]
                    out_at(token, head)[...] = out.astype(out_ref.dtype)
            if all_read is not None:
                plgpu.barrier_wait(all_read)
            if op.conv:

                @pl.when(part == 0)
                def _():
                    for window in windows[:2]:
                        keep_inputs(window)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(jnp.logical_not(live))
        def _padding():
            zeros = plgpu.layout_cast(jnp.zeros((DIM,), jnp.float32), CHANNEL)
            for head in range(heads):
                for token in range(q_len):
                    out_at(token, head)[...] = zeros.astype(out_ref.dtype)

    return body
