"""The body of the delta rule's decode: the work of a CTA for its value heads.

A CTA convolves the channels of its q, k and v, and computes the gates (prologue.py). It processes
the states [Dv, Dk] tile by tile through a ring in shared memory. Loads, arithmetic and stores thus
overlap, also with those of the other CTAs on the multiprocessor. A tile stays in registers over the
S tokens. Both products with it use the state before a token's update (S q is exp(g) S q + delta (k
q)), so that their sums overlap. Decays per channel multiply the state before both. The output is
normalized and gated when all of its head is there.

A row of one token takes little more than its latencies. So warps synchronize only where one reads
or overwrites data of another warp or of a copy; Pallas would synchronize around every store. In
shared memory q and k are as the convolution leaves them, and every warp computes their inverse
lengths itself. These factors are applied before q and k are multiplied with a state, so that no sum
of large numbers overflows that would not overflow for unit vectors.
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

from jaxattn.kernels.gdn.decode.prologue import (
    CHANNEL,
    DIM,
    GdnDecodeConfig,
    GdnDecodeInputs,
    convolved,
    factors_of,
    gated,
    gates,
    products,
)
from jaxattn.kernels.hopper.instructions import swizzled, warpgroup_barrier


@dataclasses.dataclass(frozen=True)
class GdnDecodeTileConfig:
    """The tiling of the states.

    Attributes:
        tile: Rows of a state [Dv, Dk] that are in registers at a time.
        stages: Tiles in the ring.
        parts: CTAs that share a key head's value heads, a cluster.
        split: Whether four CTAs share a state's rows; the other attributes are then unused.
    """

    tile: int = 64
    stages: int = 2
    parts: int = 1
    split: bool = False

    def __post_init__(self):
        if self.tile not in (32, 64, 128) or self.stages < 2:
            raise ValueError(f"tile must be 32, 64 or 128 and stages at least 2, got {self}")


def _steps_and_stages(op: GdnDecodeConfig, config: GdnDecodeTileConfig) -> tuple[int, int]:
    """Returns the tiles that a CTA processes, and the stages of its ring, at most as many."""
    steps = op.group // config.parts * DIM // config.tile
    return steps, min(config.stages, steps)


def scratch_types(
    op: GdnDecodeConfig, config: GdnDecodeTileConfig, state_dtype: Any
) -> dict[str, Any]:
    heads = op.group // config.parts
    _, stages = _steps_and_stages(op, config)
    ring = (stages, config.tile, DIM)
    cluster = config.parts > 1 and op.conv
    return {
        "ring": plgpu.SMEM(ring, state_dtype, transforms=_tile_transforms(state_dtype)),
        # q, k and the values, followed by the decays per channel, if there are any.
        "vectors": plgpu.SMEM((op.q_len, (2 + heads * (1 + op.channels)) * DIM), jnp.float32),
        # The output before its norm.
        "out_smem": plgpu.SMEM((op.q_len, heads * DIM), jnp.float32),
        "loaded": plgpu.Barrier(num_barriers=stages),  # a tile has been loaded
        # Decays, then betas; with one head they stay in registers.
        "scalars": plgpu.SMEM((2 * heads, op.q_len), jnp.float32) if heads > 1 else None,
        "all_read": plgpu.ClusterBarrier(collective_axes=("part",)) if cluster else None,
    }


def shared_bytes(op: GdnDecodeConfig, config: GdnDecodeTileConfig, state_dtype: Any) -> int:
    """Returns the shared memory of a CTA, without its barriers."""
    every = scratch_types(op, config, state_dtype).values()
    arrays = [x for x in every if hasattr(x, "dtype")]
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)


def _tile_transforms(state_dtype: Any) -> Any:
    """A tile of float32 is row-major, so that a copy has whole rows, one piece of memory; by
    default, JAX would choose a swizzle. A tile of bfloat16 is swizzled, and copied 128 bytes of a
    row at a time: row-major, with 16 bytes per thread, it is slower."""
    if state_dtype == jnp.float32:
        return (plgpu.TilingTransform((8, DIM)),)  # type: ignore[abstract]
    return swizzled(state_dtype)


def _layout(tile: int) -> Any:
    """The register layout of a tile [tile, Dk]: a quarter of its rows per warp, eight threads per
    row.

    A float32 row's 32 keys are 128 bytes of shared memory, so that a warp's 16-byte loads have no
    bank conflict. Of k and q, which are held next to the states, a thread has an eighth. In
    bfloat16 the keys are 64 bytes, and 16 threads have rows four apart, which lie in different
    halves of the swizzled 128 bytes. With neighboring rows every load and store would be two and a
    select.
    """
    tiles = ((tile, DIM), (tile // 4, DIM), (8, 32), (4, 32), (2, 32), (4,))
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-11,), lane_dims=(-3, -7, -2), vector_dim=-1
    )


class GdnDecodeCta:
    """A CTA that processes the value heads of a key head in a row, or a part of them, tile after
    tile."""

    def __init__(
        self, op: GdnDecodeConfig, config: GdnDecodeTileConfig, first_row: int, *, interpret: bool,
        qkvz_ref: Any, ba_ref: Any, f_ref: Any, z_ref: Any, weights_ref: Any, layer_ref: Any,
        affine_ref: Any, reads_ref: Any, writes_ref: Any, pool_ref: Any, conv_ref: Any,
        out_ref: Any,
        ring: Any, vectors: Any, out_smem: Any, loaded: Any, scalars: Any, all_read: Any,
    ):  # fmt: skip
        """`first_row`: the first row of the output."""
        self.op, self.first_row, self.interpret = op, first_row, interpret
        self.tile, self.heads = config.tile, op.group // config.parts
        self.steps, self.stages = _steps_and_stages(op, config)
        self.matrix = _layout(config.tile)
        self.by_value, self.by_key = self.matrix.reduce(1), self.matrix.reduce(0)
        self.pool_ref, self.out_ref, self.ring, self.vectors = pool_ref, out_ref, ring, vectors
        self.out_smem, self.loaded, self.scalars = out_smem, loaded, scalars
        self.all_read = all_read
        self.row, key_head = lax.axis_index("row"), lax.axis_index("key_head")
        self.part = lax.axis_index("part") if config.parts > 1 else 0
        self.layer = layer_ref[0] * affine_ref[0] + affine_ref[1]
        self.slot = reads_ref[self.row]
        self.own = self.layer if op.stacked else 0  # row of weights
        self.first_head = key_head * op.group + self.part * self.heads
        self.slots = pool_ref.shape[1]
        if op.keep:
            self.targets = {token: writes_ref[self.row, token] for token in range(op.q_len)}
        else:
            self.targets = {op.q_len - 1: writes_ref[self.row]}
        # Both numbers are loaded at once: one after the other would take twice as long.
        self.live = self._in_pool(self.slot) & (self.layer >= 0) & (self.layer < pool_ref.shape[0])
        heads = [self.first_head + head for head in range(self.heads)]
        self.here = GdnDecodeInputs(
            op, qkvz_ref, ba_ref, f_ref, z_ref, weights_ref, conv_ref, self.row, key_head, heads
        )  # fmt: skip

    def run(self) -> None:
        # Loaded before the slot is known, if there is enough for that to pay off.
        early = self.here.given() if self.heads > 1 else None
        pl.when(self.live)(lambda: self._update(early))

        @pl.when(jnp.logical_not(self.live))
        def _padding():
            zeros = plgpu.layout_cast(jnp.zeros((DIM,), jnp.float32), CHANNEL)
            for head in range(self.heads):
                for token in range(self.op.q_len):
                    self._out_at(token, head)[...] = zeros.astype(self.out_ref.dtype)

    def _in_pool(self, slot: Any) -> Any:
        # A slot past the layer's last would be the next layer's: TMA sees them as one axis.
        return (slot >= 0) & (slot < self.slots)

    def _states(self, slot: Any, step: Any) -> Any:
        rows = pl.ds(self.first_head * DIM + step * self.tile, self.tile)
        return self.pool_ref.at[self.layer, slot, rows]

    def _fetch(self, step: Any) -> None:
        at = lax.rem(step, self.stages)
        plgpu.copy_gmem_to_smem(self._states(self.slot, step), self.ring.at[at], self.loaded.at[at])

    def _out_at(self, token: int, head: int) -> Any:
        at = (self.row * self.op.q_len + token) * self.op.value_heads + self.first_head + head
        return self.out_ref.at[self.first_row + at]

    def _keep_inputs(self, window: Any) -> None:
        for token, target in self.targets.items():
            keep = functools.partial(self.here.keep, self.layer, target, token, window)
            pl.when(self._in_pool(target))(keep)

    def _update(self, early: Any) -> None:
        """Processes a row with a state: its inputs, its tiles, its output."""
        op, here = self.op, self.here
        for step in range(self.stages):
            self._fetch(step)

        # Every load is issued before the first use, so that latencies overlap.
        new, b_and_a, z = early or here.given()
        windows = here.windows(self.layer, self.own, self.slot, new)
        of_gates = here.of_gates(self.own, b_and_a)
        if op.norm:
            norm = here.norm_weight(self.own)
        decays_and_betas = self._gates(of_gates)
        for i, (_, window, taps) in enumerate(windows):
            for token in range(op.q_len):
                to = self.vectors.at[token, pl.ds(i * DIM, DIM)]
                to[...] = convolved(window, taps, token)
        times: Any = None
        if op.norm:  # the factor of the normed output
            times = [[norm * gated(op, x) for x in of_head] for of_head in z]
        warpgroup_barrier(
            interpret=self.interpret
        )  # the vectors are there, and every warp has its inputs
        if self.all_read is not None:
            plgpu.barrier_arrive(self.all_read)
        if op.conv:
            for window in windows[2:]:
                self._keep_inputs(window)
        self._loop_over_tiles(decays_and_betas)
        warpgroup_barrier(interpret=self.interpret)  # the output is there for every warp
        self._write(times)
        if self.all_read is not None:
            plgpu.barrier_wait(self.all_read)
        if op.conv:

            @pl.when(self.part == 0)
            def _():
                for window in windows[:2]:
                    self._keep_inputs(window)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _gates(self, of_gates: Any) -> list[tuple[Any, Any]]:
        """Returns the (decay, beta) of each token. With several heads they are also in shared
        memory, from which they are read, as are decays per channel."""
        found = []
        for head, each in enumerate(of_gates):
            for token, (decay, beta) in enumerate(gates(self.op, *each)):
                found.append((decay, beta))
                if self.op.channels:
                    self._decays(token, head)[...] = decay
                elif self.scalars is not None:
                    self.scalars[head, token] = decay
                if self.scalars is not None:
                    self.scalars[self.heads + head, token] = beta
        return found

    def _decays(self, token: int, head: Any) -> Any:
        """The shared memory of the decays per channel of a head."""
        return self.vectors.at[token, pl.ds((2 + self.heads + head) * DIM, DIM)]

    def _q_and_k(self, token: int) -> list[jax.Array]:
        at = (pl.ds(i * DIM, DIM) for i in range(2))
        return [plgpu.load(self.vectors.at[token, some], layout=self.by_key) for some in at]

    def _over_keys(self, vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, (self.tile, DIM), [0])

    def _loop_over_tiles(self, decays_and_betas: list[tuple[Any, Any]]) -> None:
        """Computes every token's update and output, tile by tile."""
        op, steps, stages = self.op, self.steps, self.stages
        qk = [self._q_and_k(token) for token in range(op.q_len)]
        factors = [factors_of(op, map(jnp.sum, products(op, *each))) for each in qk]

        def units(token: int, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
            q_factor, k_factor, _ = factors[token]
            return q * q_factor, k * k_factor

        # With one token they stay in registers; with several there is no room for that.
        only = units(0, *qk[0]) if op.q_len == 1 else None
        only_decays = None
        if op.channels and op.q_len == 1 and self.heads == 1:
            only_decays = plgpu.load(self._decays(0, 0), layout=self.by_key)

        @pl.loop(0, steps)
        def _tile(step):
            at = lax.rem(step, stages)
            head = lax.div(step * self.tile, DIM)
            plgpu.barrier_wait(self.loaded.at[at])
            state = plgpu.load(self.ring.at[at], layout=self.matrix).astype(jnp.float32)
            own_rows = pl.ds(step * self.tile, self.tile)
            for token in range(op.q_len):
                unit = only or units(token, *self._q_and_k(token))
                q, k = (lax.broadcast_in_dim(x, (self.tile, DIM), [1]) for x in unit)
                if self.scalars is None:
                    decay, beta = decays_and_betas[token]
                else:
                    decay = self.scalars[head, token]
                    beta = self.scalars[self.heads + head, token]
                values = self.vectors.at[token, pl.ds(2 * DIM + step * self.tile, self.tile)]
                v = plgpu.load(values, layout=self.by_value)
                if op.channels:
                    if op.q_len > 1 or self.heads > 1:
                        decay = plgpu.load(self._decays(token, head), layout=self.by_key)
                    else:
                        decay = only_decays
                    state = state * lax.broadcast_in_dim(decay, (self.tile, DIM), [1])
                    decay = 1.0
                delta = beta * (v - decay * (state * k).sum(axis=1))
                out = decay * (state * q).sum(axis=1) + delta * factors[token][2]
                state = state * decay + self._over_keys(delta) * k
                self.out_smem.at[token, own_rows][...] = out
                if token in self.targets:
                    self._store(state, token, step, at)

            if stages < steps:

                @pl.when((step > 0) & (step - 1 + stages < steps))
                def _refill():
                    # After this wait, the tile before this one has been read and stored.
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    self._fetch(step - 1 + stages)

    def _store(self, state: jax.Array, token: int, step: jax.Array, at: jax.Array) -> None:
        """Stores the state after a token, if there is a slot for it."""
        target = self.targets[token]

        @pl.when(self._in_pool(target))
        def _():
            if self.op.keep and token > 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            here = self.ring.at[at]
            here[...] = state.astype(self.ring.dtype)  # a thread writes what it read
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(here, self._states(target, step))

    def _write(self, times: Any) -> None:
        """Stores the output, normed and gated."""
        op = self.op
        for head in range(self.heads):
            for token in range(op.q_len):
                head_out = self.out_smem.at[token, pl.ds(head * DIM, DIM)]
                out = plgpu.load(head_out, layout=CHANNEL, optimized=False)
                if op.norm:
                    whole = plgpu.load(head_out, layout=self.by_key)
                    mean_square = jnp.sum(whole * whole) * (1.0 / DIM)
                    out *= lax.rsqrt(mean_square + op.eps) * times[head][token]
                self._out_at(token, head)[...] = out.astype(self.out_ref.dtype)
