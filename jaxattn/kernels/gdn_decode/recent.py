"""Decode of a delta rule with a few recent tokens beside each state.

A state is read at every step, and written at every sixteenth only. Until then a token's key, delta
and decay lie beside the state. With S the state in the pool, tokens 0 to c - 1 beside it, and
p_j the product of the decays of all tokens after j, the new one's included,

    S_new x = S (p x) + sum_j delta_j ((k_j p_j) x)     for x the new key and the new query

where p is p_0 times the decay of token 0. So a step needs two products with S, and 2 c products of
keys. Decays are numbers, or vectors over Dk (KDA). No factor is above 1, so that nothing overflows
which the recurrence would not. The token that fills the last place folds all of them into the
state. Rows fold at different steps. A smaller c takes tokens back, as far as the last fold.

Limits: Dk = Dv = 128, one token per row. Reference: `jaxattn.ops.gdn.recent`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import without_gradient
from jaxattn.kernels.gdn.decode.cluster_mainloop import SPLIT
from jaxattn.kernels.gdn.decode.launch import refuse
from jaxattn.kernels.gdn.decode.mainloop import GdnDecodeCta, GdnDecodeTileConfig, scratch_types
from jaxattn.kernels.gdn.decode.prologue import (
    CHANNEL,
    DIM,
    GdnDecodeConfig,
    factors_of,
    gates,
    products,
)
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import (
    NUM_SMS,
    fence_proxy_async,
    require_hopper,
    warpgroup_barrier,
)
from jaxattn.kernels.hopper.store.row_store import store

PLACES = 16
KEPT = PLACES - 1  # the last token is folded at once
SOME = 4  # places that are copied at a time: few tokens need no more
COPIES = 3 * -(-KEPT // SOME)  # of keys, deltas and decays
TILE = 32  # rows of a state that are in registers at a time


class Recent(NamedTuple):
    """What lies beside the states of a pool, for a stack of layers; L = 1 without a stack."""

    keys: jax.Array  # float32 [L, Z, Hk, 16, 128], unit vectors where the op normalises them
    deltas: jax.Array  # float32 [L, Z, Hv, 16, 128]
    decays: jax.Array  # float32 [L, Z, Hv, 16], with decays per channel [L, Z, Hv, 16, 128]


class Rows:
    """What the rows of 128 numbers in shared memory are.

    The first 32 are as many as a tile that sums are taken of. Decays per channel are read once, by
    the threads that have the channels; what stands in their rows comes after them.
    """

    KEYS, DELTAS, DECAYS = 0, KEPT, 2 * KEPT
    SUMS = TILE
    Q, K, V, PAST = range(TILE + 2, TILE + 6)

    @staticmethod
    def count(op: GdnDecodeConfig) -> int:
        return 3 * KEPT if op.channels else Rows.PAST


def choose_config(group: int, states: int) -> GdnDecodeTileConfig:
    """Few states have four blocks each. Of as many as have a place at once, four blocks per
    multiprocessor with two tiles each, a block has the more tiles the fewer there are."""
    if states * SPLIT <= NUM_SMS:
        return GdnDecodeTileConfig(TILE, 2, group, split=True)
    stages = next(
        (stages for most, stages in ((2, 4), (3, 3), (4, 2)) if states <= most * NUM_SMS), 3
    )
    return GdnDecodeTileConfig(TILE, stages, group)


class RecentBlock(GdnDecodeCta):
    """A value head of a row, or 32 rows of its state."""

    def __init__(
        self, op: GdnDecodeConfig, config: GdnDecodeTileConfig, *args: Any, keys_ref: Any,
        deltas_ref: Any, decays_ref: Any, filled_ref: Any, rows: Any, decays: Any = None,
        **kwargs: Any,
    ):  # fmt: skip
        super().__init__(op, config, *args, **kwargs)
        self.rows, self.decays = rows, decays
        self.first_copy = config.stages  # its barrier
        self.piece = lax.axis_index("piece") if config.split else 0
        if config.split:
            self.steps //= SPLIT
            self.stages = min(self.stages, self.steps)
        self.first_value = self.piece * (self.steps * TILE)
        self.keys, self.deltas = (rows.at[pl.ds(at, KEPT)] for at in (Rows.KEYS, Rows.DELTAS))
        self.head = self.first_head
        self.key_head = lax.div(self.head, jnp.int32(op.group))
        at = self.layer, self.slot
        self.all_keys = keys_ref.at[(*at, self.key_head)]
        self.all_deltas = deltas_ref.at[(*at, self.head)]
        self.all_decays = decays_ref.at[(*at, self.head)]
        self.filled = jnp.clip(filled_ref[self.row], 0, KEPT)
        self.fold = self.filled == KEPT

    def run(self) -> None:
        pl.when(self.live)(self._step)

        @pl.when(jnp.logical_not(self.live) & (self.piece == 0))
        def _padding():
            zeros = plgpu.layout_cast(jnp.zeros((DIM,), jnp.float32), CHANNEL)
            self._out_at(0, 0)[...] = zeros.astype(self.out_ref.dtype)

    def _states(self, slot: Any, step: Any) -> Any:
        first = self.head * DIM + self.first_value + step * TILE
        return self.pool_ref.at[self.layer, slot, pl.ds(first, TILE)]

    def _step(self) -> None:
        self._each_some(self._fetch_some)
        for step in range(self.stages):
            self._fetch(step)
        new, b_and_a, _ = self.here.given()
        ((decay, beta),) = gates(self.op, *self.here.of_gates(self.own, b_and_a)[0])
        self._each_some(self._wait_for_some)
        past = self._scale_keys(decay)
        new = [x.astype(jnp.float32) for (x,) in new]
        for row, x in zip((Rows.Q, Rows.K, Rows.V), new, strict=True):
            self.rows.at[row][...] = x
        warpgroup_barrier(interpret=self.interpret)  # these are there, and keys are scaled
        q, k = (plgpu.load(self.rows.at[row], layout=self.by_key) for row in (Rows.Q, Rows.K))
        q_factor, k_factor, k_q = factors_of(self.op, map(jnp.sum, products(self.op, q, k)))
        self._sums(q * q_factor, k * k_factor)
        pl.when(jnp.logical_not(self.fold))(lambda: self._append(new[1] * k_factor, decay))
        warpgroup_barrier(interpret=self.interpret)
        self._tiles(q * q_factor, k * k_factor, k_q, past, beta)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _each_some(self, do: Any) -> None:
        for some in range(-(-KEPT // SOME)):
            pl.when(self.filled > some * SOME)(functools.partial(do, some))

    def _fetch_some(self, some: int) -> None:
        first = some * SOME
        count = min(SOME, KEPT - first)
        of_rows = [(self.all_keys, Rows.KEYS), (self.all_deltas, Rows.DELTAS)]
        if self.op.channels:
            of_rows.append((self.all_decays, Rows.DECAYS))
        elif some == 0:
            plgpu.copy_gmem_to_smem(self.all_decays, self.decays, self._copied(some, 2))
        for i, (source, row) in enumerate(of_rows):
            target = self.rows.at[pl.ds(row + first, count)]
            plgpu.copy_gmem_to_smem(source.at[pl.ds(first, count)], target, self._copied(some, i))

    def _copied(self, some: int, i: int) -> Any:
        """The barrier of a copy."""
        return self.loaded.at[self.first_copy + 3 * some + i]

    def _wait_for_some(self, some: int) -> None:
        for i in range(3 if self.op.channels or some == 0 else 2):
            plgpu.barrier_wait(self._copied(some, i))

    def _scale_keys(self, decay: Any) -> Any:
        """Each key times the decays of all later tokens; returns the product of all decays. A
        thread has a channel."""

        def one(i: Any, later: Any) -> Any:
            j = self.filled - 1 - i
            key = self.keys.at[j]
            key[...] = plgpu.load(key, layout=CHANNEL, optimized=False) * later
            if not self.op.channels:
                return later * self.decays[j]
            of_channels = self.rows.at[Rows.DECAYS + j]
            return later * plgpu.load(of_channels, layout=CHANNEL, optimized=False)

        past = lax.fori_loop(0, self.filled, one, decay)
        if self.op.channels:
            self.rows.at[Rows.PAST][...] = past
        return past

    def _sums(self, q: jax.Array, k: jax.Array) -> None:
        """Products of the scaled keys with the new key and the new query. Those of deltas and of
        places that are not filled are not looked at."""
        rows = plgpu.load(self.rows.at[pl.ds(Rows.KEYS, TILE)], layout=self.matrix)
        for i, x in enumerate((k, q)):
            sums = self.rows.at[Rows.SUMS + i, pl.ds(0, TILE)]
            sums[...] = (rows * self._across(x)).sum(axis=1)

    def _across(self, vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, (TILE, DIM), [1])

    def _tiles(self, q: Any, k: Any, k_q: Any, past: Any, beta: Any) -> None:
        if self.op.channels:
            past = plgpu.load(self.rows.at[Rows.PAST], layout=self.by_key)
        own_k = self.rows.at[Rows.K]
        own_k[...] = k  # until a fold: registers are few
        past_k, past_q = k * past, q * past

        @pl.loop(0, self.steps)
        def _tile(step):
            at = lax.rem(step, self.stages)
            plgpu.barrier_wait(self.loaded.at[at])
            state = plgpu.load(self.ring.at[at], layout=self.matrix).astype(jnp.float32)
            if self.stages < self.steps:

                @pl.when(jnp.logical_not(self.fold) & (step + self.stages < self.steps))
                def _next():
                    warpgroup_barrier(interpret=self.interpret)  # the tile is read
                    fence_proxy_async(interpret=self.interpret)
                    self._fetch(step + self.stages)

            rows = pl.ds(self.first_value + step * TILE, TILE)
            v = plgpu.load(self.rows.at[Rows.V, rows], layout=self.by_value)

            def one(j, carry):
                delta = plgpu.load(self.deltas.at[j, rows], layout=self.by_value)
                of_keys = (self.rows[Rows.SUMS + i, j] for i in range(2))
                return tuple(x + some * delta for x, some in zip(carry, of_keys, strict=True))

            seen = [(state * self._across(x)).sum(axis=1) for x in (past_k, past_q)]
            by_key, by_query = lax.fori_loop(0, self.filled, one, tuple(seen))
            delta = beta * (v - by_key)
            out = self._out_at(0, 0).at[rows]
            store(out, (by_query + delta * k_q).astype(self.out_ref.dtype))

            @pl.when(jnp.logical_not(self.fold))
            def _():
                store(self.all_deltas.at[self.filled, rows], delta)

            @pl.when(self.fold)
            def _():
                def folded(j, state):
                    delta = plgpu.load(self.deltas.at[j, rows], layout=self.by_value)
                    key = plgpu.load(self.keys.at[j], layout=self.by_key)
                    return state + self._over_keys(delta) * self._across(key)

                decays = past
                if self.op.channels:
                    decays = self._across(plgpu.load(self.rows.at[Rows.PAST], layout=self.by_key))
                whole = lax.fori_loop(0, KEPT, folded, state * decays)
                key = self._across(plgpu.load(own_k, layout=self.by_key))
                self._store(whole + self._over_keys(delta) * key, 0, step, at)

            if self.stages < self.steps:

                @pl.when(self.fold & (step > 0) & (step - 1 + self.stages < self.steps))
                def _refill():
                    fence_proxy_async(interpret=self.interpret)  # the tile before this one is read
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    self._fetch(step - 1 + self.stages)

    def _append(self, key: jax.Array, decay: Any) -> None:
        """The new token's, but for its delta."""

        @pl.when(self.piece == 0)
        def _():
            store(self.all_decays.at[self.filled], decay)

            @pl.when(lax.rem(self.head, jnp.int32(self.op.group)) == 0)
            def _():
                store(self.all_keys.at[self.filled], key)


def recent_decode_mosaic(
    name: str,
    qkv: jax.Array,
    ba: jax.Array,
    weights: jax.Array,
    state: jax.Array,
    recent: Recent,
    slots: jax.Array,
    filled: jax.Array,
    *,
    num_key_heads: int,
    layer: jax.Array | int | None = None,
    scale: float,
    l2norm: bool = True,
    f: jax.Array | None = None,
    lower_bound: float | None = None,
    config: GdnDecodeTileConfig | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[jax.Array, jax.Array, Recent]:
    """A token per row.

    Args:
        name, qkv, ba, weights, f, lower_bound: as `gdn_decode_mosaic` has them without `eps`.
        state: float32 or bfloat16 [L, Z, Hv, 128, 128] with `layer`, or without L.
        slots: int32 [B], -1 for padding.
        filled: int32 [B], tokens beside each row's state, 0 to 15. What they are afterwards is the
            caller's to say: one more, or 0 of 15.

    Returns:
        (out [B, 1, Hv, 128], state, recent).
    """
    require_hopper(name, interpret=interpret)
    batch, tokens, _ = qkv.shape
    heads = state.shape[-3]
    refuse(name, batch, tokens, state.shape[-3:], None)
    operands = without_gradient(name, (qkv, ba, f, weights, state, recent))
    qkv, ba, f, weights, state, recent = operands
    op = GdnDecodeConfig(
        q_len=1, key_heads=num_key_heads, value_heads=heads, conv=False, norm=False, l2norm=l2norm,
        stacked=False, keep=False, scale=scale, eps=0.0, channels=f is not None,
        lower_bound=lower_bound,
    )  # fmt: skip
    config = config or choose_config(op.group, batch * heads)
    pool = state.reshape(-1, *state.shape[-4:-3], heads * DIM, DIM)
    beside = (x if layer is not None else x[None] for x in recent)
    refs = [jax.new_ref(x) for x in (pool, *beside)]
    types = scratch_types(op, config, state.dtype) | {
        "rows": plgpu.SMEM((Rows.count(op), DIM), jnp.float32),
        "loaded": plgpu.Barrier(num_barriers=config.stages + COPIES),  # together: less memory
    }
    types |= dict.fromkeys(("vectors", "out_smem", "all_read"))
    if not op.channels:
        types["decays"] = plgpu.SMEM((PLACES,), jnp.float32)
    inputs = {
        "qkvz_ref": qkv,
        "ba_ref": ba,
        "f_ref": f,
        "z_ref": None,
        "weights_ref": weights.reshape(-1, weights.shape[-1]),
        "layer_ref": jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1),
        "affine_ref": jnp.asarray((1, 0), jnp.int32),
        "reads_ref": slots.astype(jnp.int32),
        "writes_ref": slots.astype(jnp.int32),
        "pool_ref": refs[0],
        "conv_ref": None,
        "keys_ref": refs[1],
        "deltas_ref": refs[2],
        "decays_ref": refs[3],
        "filled_ref": filled,
    }
    more_axes = {"part": op.group} if op.group > 1 else {}
    if config.split:
        more_axes["piece"] = SPLIT
    block = functools.partial(RecentBlock, op, config, 0, interpret=interpret)
    out = launch(
        lambda **refs: block(**refs).run(),
        name="gdn_decode_recent" if f is None else "kda_decode_recent",
        grid={"row": batch, "key_head": num_key_heads} | more_axes,
        inputs=inputs,
        outputs={"out_ref": jax.ShapeDtypeStruct((batch * heads, DIM), qkv.dtype)},
        scratch=types,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # reductions stay inside a warp
            unsafe_no_auto_barriers=True,
        ),
        interpret=interpret,
        detect_races=detect_races,
    )
    after, *new = [jax.freeze(x) for x in refs]
    new = [x.reshape(old.shape) for x, old in zip(new, recent, strict=True)]
    out = out["out_ref"].reshape(batch, 1, heads, DIM)
    return out, after.reshape(state.shape), Recent(*new)
