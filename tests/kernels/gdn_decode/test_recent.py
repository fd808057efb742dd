"""Decode with recent tokens beside the states, against a float64 recurrence token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn
from jaxattn.kernels.gdn_decode.recent import PLACES, Recent, recent_decode_mosaic
from tests.helpers.at_once import at_once
from tests.helpers.kernel_cases import both_devices, no_races, relative

DIM, KEY_HEADS, HEADS, SLOTS, LAYERS, LAYER = 128, 1, 2, 4, 2, 1


class Steps:
    """A pool whose rows are at different counts, NaN in every place that is not filled, and its
    states in float64."""

    def __init__(self, slots, filled, *, dtype=np.float32, strong=False):
        self.rng, self.slots = np.random.default_rng(0), np.array(slots, np.int32)
        state = self.rng.normal(size=(LAYERS, SLOTS, HEADS, DIM, DIM))
        self.begun = self.pool = jnp.asarray(state, dtype)
        self.A_log, self.dt_bias = self.rng.normal(size=(2, HEADS)).astype(np.float32)
        if strong:  # a decay of 0, and one of 1
            self.A_log[:] = 9.0, -40.0
        self.filled = np.array(filled, np.int32)
        room = gdn.recent_tokens(SLOTS, KEY_HEADS, HEADS, layers=LAYERS)
        places = [np.full(x.shape, np.nan, np.float32) for x in room]
        for slot, count in zip(self.slots, self.filled, strict=True):
            if slot >= 0:
                for x in places:
                    some = x[LAYER, slot, :, :count]
                    some[...] = self.rng.uniform(0.05, 0.1, size=some.shape)
        self.recent = Recent(*map(jnp.asarray, places))
        self.exact = {slot: self.whole(row) for row, slot in enumerate(self.slots) if slot >= 0}

    def whole(self, row):
        """The state with what stands beside it, in float64."""
        slot = self.slots[row]
        whole = np.asarray(self.pool[LAYER, slot], np.float64)
        keys, deltas, decays = (np.asarray(x[LAYER, slot], np.float64) for x in self.recent)
        keys = np.repeat(keys, HEADS // KEY_HEADS, axis=0)
        for j in range(self.filled[row]):
            whole = whole * decays[:, j, None, None] + deltas[:, j, :, None] * keys[:, j, None]
        return whole

    def draw(self):
        """q, k, v, a, b of a token per row."""
        batch = len(self.slots)
        shapes = ((KEY_HEADS, DIM), (KEY_HEADS, DIM), (HEADS, DIM))
        tokens = (self.rng.normal(size=(batch, 1, *shape)) for shape in shapes)
        gates = self.rng.normal(size=(2, batch, 1, HEADS)).astype(np.float32)
        return (*(jnp.asarray(x, jnp.bfloat16) for x in tokens), *map(jnp.asarray, gates))

    def check(self, given, out, bound=1e-5):
        q, k, v, a, b = (np.asarray(x, np.float64)[:, 0] for x in given)
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        q, k = (np.repeat(x, HEADS // KEY_HEADS, axis=1) for x in (q, k))
        for row, slot in enumerate(self.slots):
            if slot < 0:
                assert (np.asarray(out[row]) == 0).all()
                continue
            rate = np.exp(np.float64(self.A_log)) * np.logaddexp(0, a[row] + self.dt_bias)
            beta = 1 / (1 + np.exp(-b[row]))
            state = self.exact[slot] * np.exp(-rate)[:, None, None]
            delta = beta[:, None] * (v[row] - np.einsum("hvk,hk->hv", state, k[row]))
            self.exact[slot] = state = state + delta[:, :, None] * k[row][:, None]
            expected = np.einsum("hvk,hk->hv", state, q[row]) * DIM**-0.5
            assert relative(out[row, 0], expected) < max(bound, 5e-3)
            self.filled[row] = (self.filled[row] + 1) % PLACES
            assert relative(self.whole(row), state) < bound

    def check_others(self):
        begun, now = (np.asarray(x, np.float32) for x in (self.begun, self.pool))
        unused = [slot for slot in range(SLOTS) if slot not in self.slots]
        np.testing.assert_array_equal(now[1 - LAYER], begun[1 - LAYER])
        np.testing.assert_array_equal(now[LAYER, unused], begun[LAYER, unused])
        for x in self.recent:
            assert np.isnan(np.asarray(x[1 - LAYER])).all()
            assert np.isnan(np.asarray(x[LAYER])[unused]).all()


def op(steps, given, implementation, filled=None):
    step = functools.partial(
        gdn.gated_delta_rule_decode, layer=LAYER, implementation=implementation
    )
    q, k, v, a, b = given
    return jax.jit(step)(
        q, k, v, a, b, steps.pool, jnp.asarray(steps.slots), A_log=steps.A_log,
        dt_bias=steps.dt_bias, recent=steps.recent,
        filled=jnp.asarray(steps.filled if filled is None else filled),
    )  # fmt: skip


@both_devices
@pytest.mark.parametrize("strong", [False, True])
def test_rows_fold_at_different_steps(implementation, strong):
    steps = Steps([2, -1, 0], [13, 0, 9], strong=strong)
    for _ in range(5):
        given = steps.draw()
        out, steps.pool, steps.recent = op(steps, given, implementation)
        steps.check(given, out)
    steps.check_others()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_xla_by_the_recurrence(dtype):
    steps = Steps([2, -1, 0], [0, 0, 5], dtype=dtype)
    for _ in range(20):
        given = steps.draw()
        out, steps.pool, steps.recent = op(steps, given, "xla")
        steps.check(given, out, 1e-5 if dtype == np.float32 else 1e-2)
    steps.check_others()


@both_devices
def test_fewer_filled_go_back(implementation):
    steps = Steps([1], [4])
    first, other = steps.draw(), steps.draw()
    *_, steps.recent = op(steps, first, implementation)
    out, steps.pool, steps.recent = op(steps, other, implementation)
    steps.check(other, out)  # as if the first had not been


def test_no_race_in_the_interpreter():
    steps = Steps([2, -1, 0], [14, 0, 3])
    weights = jnp.asarray(np.concatenate([steps.A_log, steps.dt_bias]))
    for _ in range(2):
        given = q, k, v, a, b = steps.draw()
        qkv = jnp.concatenate([x.reshape(3, 1, -1) for x in (q, k, v)], axis=-1)
        with no_races():
            out, steps.pool, steps.recent = jax.block_until_ready(
                at_once(
                    recent_decode_mosaic, qkv, jnp.concatenate([b, a], -1), weights, steps.pool,
                    steps.recent, jnp.asarray(steps.slots), jnp.asarray(steps.filled),
                    num_key_heads=KEY_HEADS, layer=LAYER, scale=DIM**-0.5, interpret=True,
                    detect_races=True,
                )
            )  # fmt: skip
        steps.check(given, out)


def test_what_does_not_fit_is_named():
    steps = Steps([1], [0])
    given = steps.draw()
    with pytest.raises(ValueError, match=r"filled must lie in \[0, 16\), got \[16\]"):
        q, k, v, a, b = given
        gdn.gated_delta_rule_decode(
            q, k, v, a, b, steps.pool, steps.slots, A_log=steps.A_log, dt_bias=steps.dt_bias,
            layer=LAYER, recent=steps.recent, filled=np.array([16]),
        )  # fmt: skip
    steps.recent = gdn.recent_tokens(SLOTS + 1, KEY_HEADS, HEADS, layers=LAYERS)
    with pytest.raises(ValueError, match=r"recent.keys must be float32 \[2, 4, 1, 16, 128\]"):
        op(steps, given, "xla")
