"""Decode of the gated delta rule with a few recent tokens beside each state.

A state is read at every step, and written at every sixteenth only. Until then a token's key, delta
and decay lie beside the state. With S the state in the pool and tokens 0 to c - 1 beside it,

    S_j x = d_j S_{j-1} x + delta_j (k_j x)         for x the new key and the new query

so a step needs S k and S q, and 2 c products of keys. The token that fills the last place folds all
of them into the state, in the order of the recurrence. Rows fold at different steps. A smaller c
takes tokens back, as far as the last fold.

Limits: Dk = Dv = 128, one token per row, float32 states. Reference: `jaxattn.ops.gdn.recent`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import without_gradient
from jaxattn.kernels.gdn_decode.body import Block, Config, _layout, scratch_types
from jaxattn.kernels.gdn_decode.inputs import CHANNEL, DIM, Op, factors_of, products
from jaxattn.kernels.gdn_decode.launch import refuse
from jaxattn.kernels.hopper.launch import launch
from jaxattn.kernels.hopper.machine import meet, require_hopper, shown
from jaxattn.kernels.hopper.narrow import store

PLACES = 16
HALF = PLACES // 2
ROWS = 2 * PLACES  # the smallest tile of `_layout`


class Recent(NamedTuple):
    """What lies beside the states of a pool, for a stack of layers; L = 1 without a stack."""

    keys: jax.Array  # float32 [L, Z, Hk, 16, 128], unit vectors where the op normalises them
    deltas: jax.Array  # float32 [L, Z, Hv, 16, 128]
    decays: jax.Array  # float32 [L, Z, Hv, 16]


class RecentBlock(Block):
    """A value head of a row."""

    def __init__(
        self, *args: Any, keys_ref: Any, deltas_ref: Any, decays_ref: Any, filled_ref: Any,
        rows: Any, decays: Any, sums: Any, new_delta: Any, new_key: Any, beside: Any, more: Any,
        **kwargs: Any,
    ):  # fmt: skip
        super().__init__(*args, **kwargs)
        # Keys, then deltas: together they are as many rows as a tile that a sum is taken of.
        self.rows, self.decays = rows, decays
        self.keys, self.deltas = (rows.at[pl.ds(at, PLACES)] for at in (0, PLACES))
        self.sums, self.new_delta, self.new_key = sums, new_delta, new_key
        self.beside, self.more = beside, more
        self.head = self.first_head
        self.key_head = lax.div(self.head, jnp.int32(self.op.group))
        at = self.layer, self.slot
        self.all_keys = keys_ref.at[(*at, self.key_head)]
        self.all_deltas = deltas_ref.at[(*at, self.head)]
        self.all_decays = decays_ref.at[(*at, self.head)]
        self.filled = jnp.clip(filled_ref[self.row], 0, PLACES - 1)
        self.fold = self.filled == PLACES - 1

    def _update(self, early: Any) -> None:
        del early
        for step in range(self.stages):
            self._fetch(step)
        plgpu.copy_gmem_to_smem(self.all_decays, self.decays, self.beside)
        self._fetch_half(0, self.beside)
        pl.when(self.filled > HALF)(lambda: self._fetch_half(1, self.more))
        new, b_and_a, _ = self.here.given()
        ((decay, beta),) = self._gates(self.here.of_gates(self.own, b_and_a))
        for i, (x,) in enumerate(new):
            self.vectors.at[0, pl.ds(i * DIM, DIM)][...] = x.astype(jnp.float32)
        meet(interpret=self.interpret)
        plgpu.barrier_wait(self.beside)
        pl.when(self.filled > HALF)(lambda: plgpu.barrier_wait(self.more))
        self._sums()
        meet(interpret=self.interpret)
        self._tiles(decay, beta)
        meet(interpret=self.interpret)
        pl.when(jnp.logical_not(self.fold))(lambda: self._append(decay))
        self._write(None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _fetch_half(self, half: int, barrier: Any) -> None:
        """Half of the places: few tokens need no more."""
        some = pl.ds(HALF * half, HALF)
        for source, target in ((self.all_keys, self.keys), (self.all_deltas, self.deltas)):
            plgpu.copy_gmem_to_smem(source.at[some], target.at[some], barrier)

    def _units(self, layout: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q and k as they meet a state, and their product."""
        q, k = (
            plgpu.load(self.vectors.at[0, pl.ds(i * DIM, DIM)], layout=layout) for i in range(2)
        )
        q_factor, k_factor, k_q = factors_of(self.op, map(jnp.sum, products(self.op, q, k)))
        return q * q_factor, k * k_factor, k_q

    def _sums(self) -> None:
        """Products of the keys beside the state with the new key and the new query. Those of deltas
        and of places that are not filled are not looked at."""
        layout = _layout(ROWS)
        keys = plgpu.load(self.rows, layout=layout)
        q, k, _ = self._units(layout.reduce(0))
        for i, x in enumerate((k, q)):
            self.sums.at[i][...] = (keys * lax.broadcast_in_dim(x, (ROWS, DIM), [1])).sum(axis=1)

    def _tiles(self, decay: Any, beta: Any) -> None:
        q_unit, k_unit, k_q = self._units(self.by_key)
        self.new_key[...] = k_unit
        q, k = (lax.broadcast_in_dim(x, (self.tile, DIM), [1]) for x in (q_unit, k_unit))

        @pl.loop(0, self.steps)
        def _tile(step):
            at = lax.rem(step, self.stages)
            plgpu.barrier_wait(self.loaded.at[at])
            state = plgpu.load(self.ring.at[at], layout=self.matrix).astype(jnp.float32)
            rows = pl.ds(step * self.tile, self.tile)
            values = self.vectors.at[0, pl.ds(2 * DIM + step * self.tile, self.tile)]
            v = plgpu.load(values, layout=self.by_value)

            def one(j, carry):
                delta = plgpu.load(self.deltas.at[j, rows], layout=self.by_value)
                each = zip(carry, (self.sums[0, j], self.sums[1, j]), strict=True)
                return tuple(self.decays[j] * x + of_keys * delta for x, of_keys in each)

            seen = (state * k).sum(axis=1), (state * q).sum(axis=1)
            by_key, by_query = lax.fori_loop(0, self.filled, one, seen)
            delta = beta * (v - decay * by_key)
            self.out_smem.at[0, rows][...] = decay * by_query + delta * k_q
            self.new_delta.at[rows][...] = delta

            @pl.when(self.fold)
            def _():
                def folded(j, state):
                    delta = plgpu.load(self.deltas.at[j, rows], layout=self.by_value)
                    key = plgpu.load(self.keys.at[j], layout=self.by_key)
                    of_key = lax.broadcast_in_dim(key, (self.tile, DIM), [1])
                    return self.decays[j] * state + self._over_keys(delta) * of_key

                whole = lax.fori_loop(0, PLACES - 1, folded, state)
                self._store(decay * whole + self._over_keys(delta) * k, 0, step, at)

            if self.stages < self.steps:

                @pl.when((step > 0) & (step - 1 + self.stages < self.steps))
                def _refill():
                    shown(interpret=self.interpret)  # the tile before this one is read
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    self._fetch(step - 1 + self.stages)

    def _append(self, decay: Any) -> None:
        delta = plgpu.load(self.new_delta, layout=CHANNEL, optimized=False)
        store(self.all_deltas.at[self.filled], delta)
        store(self.all_decays.at[self.filled], decay)

        @pl.when(lax.rem(self.head, jnp.int32(self.op.group)) == 0)
        def _():
            key = plgpu.load(self.new_key, layout=CHANNEL, optimized=False)
            store(self.all_keys.at[self.filled], key)


def recent_decode_mosaic(
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
    config: Config | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[jax.Array, jax.Array, Recent]:
    """A token per row.

    Args:
        qkv, ba, weights: as `gdn_decode_mosaic` has them without `eps`.
        state: float32 [L, Z, Hv, 128, 128].
        slots: int32 [B], -1 for padding.
        filled: int32 [B], tokens beside each row's state, 0 to 15. What they are afterwards is the
            caller's to say: one more, or 0 of 15.

    Returns:
        (out [B, 1, Hv, 128], state, recent).
    """
    name = "gated_delta_rule_decode"
    require_hopper(name, interpret=interpret)
    batch, tokens, _ = qkv.shape
    heads = state.shape[-3]
    refuse(name, batch, tokens, state.shape[-3:], None)
    operands = without_gradient(name, (qkv, ba, weights, state, recent))
    qkv, ba, weights, state, recent = operands
    op = Op(
        q_len=1, key_heads=num_key_heads, value_heads=heads, conv=False, norm=False, l2norm=l2norm,
        stacked=False, keep=False, scale=scale, eps=0.0,
    )  # fmt: skip
    config = config or Config(32, 3, op.group)
    if config.parts != op.group:
        config = Config(config.tile, config.stages, op.group)
    pool = state.reshape(-1, *state.shape[-4:-3], heads * DIM, DIM)
    beside = (x if layer is not None else x[None] for x in recent)
    refs = [jax.new_ref(x) for x in (pool, *beside)]
    types = scratch_types(op, config, state.dtype) | {
        "rows": plgpu.SMEM((ROWS, DIM), jnp.float32),
        "decays": plgpu.SMEM((PLACES,), jnp.float32),
        "sums": plgpu.SMEM((2, ROWS), jnp.float32),
        "new_delta": plgpu.SMEM((DIM,), jnp.float32),
        "new_key": plgpu.SMEM((DIM,), jnp.float32),
        "beside": plgpu.Barrier(num_arrivals=3),
        "more": plgpu.Barrier(num_arrivals=2),  # keys and deltas of the second half
    }
    types["all_read"] = None
    inputs = {
        "qkvz_ref": qkv,
        "ba_ref": ba,
        "f_ref": None,
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
    heads_of_a_key = {"part": op.group} if op.group > 1 else {}
    block = functools.partial(RecentBlock, op, config, 0, interpret=interpret)
    out = launch(
        lambda **refs: block(**refs).run(),
        name="gdn_decode_recent",
        grid={"row": batch, "key_head": num_key_heads} | heads_of_a_key,
        inputs=inputs,
        outputs={"out_ref": jax.ShapeDtypeStruct((batch * heads, DIM), qkv.dtype)},
        scratch=types,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
        detect_races=detect_races,
    )
    after, *new = [jax.freeze(x) for x in refs]
    new = [x.reshape(old.shape) for x, old in zip(new, recent, strict=True)]
    out = out["out_ref"].reshape(batch, 1, heads, DIM)
    return out, after.reshape(state.shape), Recent(*new)
