"""Decode with recent tokens beside the states, against a float64 recurrence token by token."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn, kda
from jaxattn.kernels.gdn_decode import recent
from jaxattn.kernels.gdn_decode.recent import PLACES, Recent
from tests.helpers.kernel_cases import both_devices, no_races, relative, slow

DIM, KEY_HEADS, HEADS, SLOTS, LAYERS, LAYER = 128, 1, 2, 4, 2, 1
this = sys.modules[__name__]


class Steps:
    """A pool whose rows are at different counts, NaN in every place that is not filled, and its
    states in float64. With `channels` a decay is of a channel (KDA)."""

    def __init__(self, slots, filled, *, dtype=np.float32, strong=False, channels=False):
        self.channels, self.of_decay = channels, (DIM,) if channels else ()
        self.rng, self.slots = np.random.default_rng(0), np.array(slots, np.int32)
        state = self.rng.normal(size=(LAYERS, SLOTS, HEADS, DIM, DIM))
        self.begun = self.pool = jnp.asarray(state, dtype)
        self.A_log = self.rng.normal(size=HEADS).astype(np.float32)
        self.dt_bias = self.rng.normal(size=(HEADS, *self.of_decay)).astype(np.float32)
        if strong:  # a decay of 0, and one of 1
            self.A_log[:] = 9.0, -40.0
            if channels:  # side by side: log decays from -1 to -1000, and 0
                self.A_log[:] = 0.0
                rates = 10 ** self.rng.uniform(0, 3, self.dt_bias.shape)
                self.dt_bias[...] = np.where(np.arange(DIM) % 3, rates, -1000.0)
        self.filled = np.array(filled, np.int32)
        room = (kda if channels else gdn).recent_tokens(SLOTS, KEY_HEADS, HEADS, layers=LAYERS)
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
            whole = whole * self.wide(decays[:, j]) + deltas[:, j, :, None] * keys[:, j, None]
        return whole

    def wide(self, decays):
        """As they meet states."""
        return decays[:, None] if self.channels else decays[:, None, None]

    def draw(self):
        """q, k, v, a, b of a token per row; with `channels` f stands for a."""
        batch = len(self.slots)
        shapes = ((KEY_HEADS, DIM), (KEY_HEADS, DIM), (HEADS, DIM))
        tokens = (self.rng.normal(size=(batch, 1, *shape)) for shape in shapes)
        gates = (
            self.rng.normal(size=(batch, 1, HEADS, *more)).astype(np.float32)
            for more in (self.of_decay, ())
        )
        return (*(jnp.asarray(x, jnp.bfloat16) for x in tokens), *map(jnp.asarray, gates))

    def check(self, given, out, bound=1e-5):
        q, k, v, a, b = (np.asarray(x, np.float64)[:, 0] for x in given)
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        q, k = (np.repeat(x, HEADS // KEY_HEADS, axis=1) for x in (q, k))
        for row, slot in enumerate(self.slots):
            if slot < 0:
                assert (np.asarray(out[row]) == 0).all()
                continue
            rate = np.exp(np.float64(self.A_log)).reshape(-1, *(1 for _ in self.of_decay))
            rate = rate * np.logaddexp(0, a[row] + self.dt_bias)
            beta = 1 / (1 + np.exp(-b[row]))
            state = self.exact[slot] * self.wide(np.exp(-rate))
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


@functools.cache
def compiled(channels, implementation, config):
    """The op, compiled once for all tests of the same shapes."""
    decode = kda.kda_decode if channels else gdn.gated_delta_rule_decode
    return jax.jit(functools.partial(decode, layer=LAYER, implementation=implementation))


def op(steps, given, implementation, filled=None, config=None):
    """`config` tells tests apart that give the kernel another one than it chooses."""
    q, k, v, a, b = given
    return compiled(steps.channels, implementation, config)(
        q, k, v, a, b, steps.pool, jnp.asarray(steps.slots), A_log=steps.A_log,
        dt_bias=steps.dt_bias, recent=steps.recent,
        filled=jnp.asarray(steps.filled if filled is None else filled),
    )  # fmt: skip


of_both = pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])


@both_devices
@pytest.mark.parametrize("strong", [slow(False), True])
@of_both
def test_rows_fold_at_different_steps(implementation, channels, strong):
    steps = Steps([2, -1, 0], [13, 0, 9], strong=strong, channels=channels)
    for _ in range(5):
        given = steps.draw()
        out, steps.pool, steps.recent = op(steps, given, implementation)
        steps.check(given, out)
    steps.check_others()


@pytest.mark.parametrize(
    "channels, stages, split",
    [
        *[(False, 2, True), (False, 4, False), (True, 2, False), (True, 4, True)],  # all pairs
        *[slow(*each) for each in ((False, 2, False), (False, 4, True))],
        *[slow(*each) for each in ((True, 2, True), (True, 4, False))],
    ],
)
def test_every_configuration(channels, stages, split, monkeypatch):
    """Those that few and many states have, in the interpreter: the same bits."""
    steps = Steps([2, -1, 0], [15, 0, 4], channels=channels)
    given = steps.draw()
    found = []
    for config in (recent.GdnDecodeTileConfig(recent.TILE, stages, HEADS // KEY_HEADS, split),
                   recent.GdnDecodeTileConfig(recent.TILE, 3, HEADS // KEY_HEADS)):  # fmt: skip
        monkeypatch.setattr(recent, "choose_config", lambda *_, config=config: config)
        found.append(op(steps, given, "mosaic_gpu_interpret", config=config))
    jax.tree.map(np.testing.assert_array_equal, *found)
    out, steps.pool, steps.recent = found[0]
    steps.check(given, out)
    steps.check_others()


@both_devices
@of_both
@pytest.mark.parametrize("long", [1e-30, 1e18, 1e30])
def test_queries_and_keys_of_any_length(implementation, channels, long):
    """Keys of zeros, and those whose squares overflow, as without places; no NaN."""
    steps = Steps([1, 0], [15, 6], channels=channels)
    q, k, *rest = (x.astype(jnp.float32) for x in steps.draw())
    given = q * long, k * long * jnp.array([0, 1.0])[:, None, None, None], *rest
    found, expected = (op(steps, given, each) for each in (implementation, "xla"))
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@of_both
@pytest.mark.parametrize("rows", [1, 40, 90, 120, 140])
def test_as_many_rows_as_choose_each_configuration(channels, rows, monkeypatch):
    """With 4 value heads: four blocks per state, then 4, 3, 2 and again 3 tiles per block."""
    monkeypatch.setattr(this, "SLOTS", rows)
    monkeypatch.setattr(this, "HEADS", 4)
    steps = Steps(range(rows), [row % PLACES for row in range(rows)], channels=channels)
    for _ in range(3):
        given = steps.draw()
        first, again = (op(steps, given, "mosaic_gpu") for _ in range(2))
        jax.tree.map(np.testing.assert_array_equal, first, again)
        out, steps.pool, steps.recent = first
        steps.check(given, out)


@pytest.mark.parametrize(
    "channels, dtype",
    [(False, np.float32), slow(False, jnp.bfloat16), slow(True, np.float32), (True, jnp.bfloat16)],
)
def test_xla_by_the_recurrence(channels, dtype):
    steps = Steps([2, -1, 0], [0, 0, 5], dtype=dtype, channels=channels)
    for _ in range(20):
        given = steps.draw()
        out, steps.pool, steps.recent = op(steps, given, "xla")
        steps.check(given, out, 1e-5 if dtype == np.float32 else 1e-2)
    steps.check_others()


@both_devices
@of_both
def test_states_of_16_bits(implementation, channels):
    steps = Steps([2, -1, 0], [14, 0, 9], dtype=jnp.bfloat16, channels=channels)
    for _ in range(3):
        given = steps.draw()
        out, steps.pool, steps.recent = op(steps, given, implementation)
        steps.check(given, out, 1e-2)
    steps.check_others()


@both_devices
@of_both
def test_fewer_filled_go_back(implementation, channels):
    steps = Steps([1, -1, 3], [4, 0, 9], channels=channels)
    first, other = steps.draw(), steps.draw()
    *_, steps.recent = op(steps, first, implementation)
    out, steps.pool, steps.recent = op(steps, other, implementation)
    steps.check(other, out)  # as if the first had not been


@of_both
def test_folded_states_go_on_alone(channels):
    steps = Steps([2, -1, 0], [15, 0, 4], channels=channels)
    fold = (kda if channels else gdn).fold_recent
    slots = jnp.asarray(steps.slots)
    pool = jax.jit(fold)(steps.pool, steps.recent, steps.filled, slots, layer=LAYER)
    steps.begun, untouched = pool, np.ones((LAYERS, SLOTS), bool)
    for slot, exact in steps.exact.items():
        assert relative(pool[LAYER, slot], exact) < 1e-6
        untouched[LAYER, slot] = False
    np.testing.assert_array_equal(np.asarray(pool)[untouched], np.asarray(steps.pool)[untouched])
    with pytest.raises(ValueError, match=r"fold_recent: filled must lie in \[0, 16\)"):
        fold(steps.pool, steps.recent, np.array([16, 0, 0]), steps.slots, layer=LAYER)
    with pytest.raises(TypeError, match=r"fold_recent: state_indices must be integers"):
        fold(steps.pool, steps.recent, steps.filled, None, layer=LAYER)
    with pytest.raises(TypeError, match=r"fold_recent: recent must be what recent_tokens returns"):
        fold(steps.pool, None, steps.filled, steps.slots, layer=LAYER)


def test_what_fold_recent_cannot_take_is_named():
    steps = Steps([1], [3])
    zeros = jnp.zeros((LAYERS, SLOTS, 3, PLACES, DIM), jnp.float32)

    def fold(recent=steps.recent, slots=steps.slots):
        return gdn.fold_recent(steps.pool, recent, steps.filled, slots, layer=LAYER)

    for keys, error, message in (
        (None, TypeError, r"recent\.keys must be an array, got NoneType"),
        ([1.0], TypeError, r"recent\.keys must be an array, got list"),
        (zeros[0, 0, 0], ValueError, r"recent\.keys must be float32 \[2, 4, 2, 16, 128\]"),
        (zeros, ValueError, r"recent\.keys has 3 heads, and state's 2 must be a multiple"),
        (zeros[:, :, :0], ValueError, r"recent\.keys has 0 heads, and state's 2 must be"),
    ):
        with pytest.raises(error, match=rf"fold_recent: {message}"):
            fold(steps.recent._replace(keys=keys))
    with pytest.raises(ValueError, match=r"fold_recent: state_indices must be integers of shape"):
        fold(slots=np.int32(1))


@of_both
def test_traced_counts_out_of_range_are_folded_as_decode_takes_them(channels):
    """Place 16 is nobody's; its decay of 0 would erase the state."""
    steps = Steps([1, 2], [15, 0], channels=channels)
    fold = jax.jit(functools.partial(kda.fold_recent if channels else gdn.fold_recent, layer=LAYER))
    room = Recent(*(jnp.nan_to_num(x) for x in steps.recent))
    found, wanted = (
        fold(steps.pool, room, np.array(counts, np.int32), steps.slots)
        for counts in ([16, -3], [15, 0])
    )
    np.testing.assert_array_equal(found, wanted)


# Compiled once for the steps of a test.
kernel = jax.jit(
    functools.partial(recent.recent_decode_mosaic, "op"),
    static_argnames=("num_key_heads", "layer", "scale", "interpret", "detect_races", "config"),
)


def bare(steps, given, **options):
    """The kernel alone, interpreted."""
    q, k, v, a, b = given
    qkv = jnp.concatenate([x.reshape(len(steps.slots), 1, -1) for x in (q, k, v)], axis=-1)
    weights = np.concatenate([steps.A_log, steps.dt_bias.reshape(-1)])
    ba = b if steps.channels else jnp.concatenate([b, a], -1)
    return kernel(
        qkv, ba, jnp.asarray(weights), steps.pool, steps.recent,
        jnp.asarray(steps.slots), jnp.asarray(steps.filled), num_key_heads=KEY_HEADS, layer=LAYER,
        scale=DIM**-0.5, f=a.reshape(*a.shape[:2], -1) if steps.channels else None, interpret=True,
        **options,
    )  # fmt: skip


@of_both
@pytest.mark.parametrize("split", [False, True])
def test_no_race_in_the_interpreter(channels, split):
    steps = Steps([2, -1, 0], [14, 0, 3], channels=channels)
    config = recent.GdnDecodeTileConfig(recent.TILE, 2, HEADS // KEY_HEADS, split)
    for _ in range(2):
        given = steps.draw()
        with no_races():
            out, steps.pool, steps.recent = jax.block_until_ready(
                bare(steps, given, config=config, detect_races=True)
            )
        steps.check(given, out)


def test_what_does_not_fit_is_named():
    steps = Steps([1], [0])
    given = steps.draw()
    q, k, v, a, b = given
    call = functools.partial(
        gdn.gated_delta_rule_decode, q, k, v, a, b, steps.pool, steps.slots, A_log=steps.A_log,
        dt_bias=steps.dt_bias, layer=LAYER,
    )  # fmt: skip
    for filled in (np.array([16]), jnp.array([16])):
        with pytest.raises(ValueError, match=r"filled must lie in \[0, 16\), got \[16\]"):
            call(recent=steps.recent, filled=filled)
    for wrong in (None, [1.0]):
        with pytest.raises(TypeError, match=r"recent\.keys must be an array"):
            call(recent=steps.recent._replace(keys=wrong), filled=steps.filled)
    gone = jnp.copy(steps.recent.decays)
    gone.delete()
    with pytest.raises(ValueError, match=r"recent\.decays .* is deleted"):
        call(recent=steps.recent._replace(decays=gone), filled=steps.filled)
    steps.recent = gdn.recent_tokens(SLOTS + 1, KEY_HEADS, HEADS, layers=LAYERS)
    with pytest.raises(ValueError, match=r"recent.keys must be float32 \[2, 4, 1, 16, 128\]"):
        op(steps, given, "xla")
