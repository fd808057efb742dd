"""The Mosaic GPU kernel of `gated_delta_rule_decode` against float64, interpreted and on a GPU."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn
from jaxattn.arena import Arena
from jaxattn.kernels.gdn.decode import launch as gdn_decode
from tests.helpers.kernel_cases import (
    assert_alike,
    both_devices,
    gdn_case,
    gdn_oracle,
    one_block_a_head,
    relative,
    slow,
    slow_interpreted,
    x64,
)


@functools.cache
def step_of(implementation, split=True):
    """Compiled once for a shape, whatever test comes first."""

    def step(*args, **given):
        with contextlib.nullcontext() if split else one_block_a_head():
            return gdn.gated_delta_rule_decode(*args, **given, implementation=implementation)

    return jax.jit(step)


def decode(case, implementation, *, arena=None):
    given = dict(layer=case.layer, **case.gates)
    results = step_of(implementation)(*case.args, arena=arena, **given)
    if implementation == "mosaic_gpu" and case.q.shape[1] == 1:
        assert_alike(results[:2], step_of(implementation, split=False)(*case.args, **given))
    return results


def assert_matches(case, out, state, *, bound=5e-3):
    expected, expected_state = gdn_oracle(case)
    slots, state = np.asarray(case.state_indices), np.asarray(state)
    assert relative(out, expected) < bound
    assert (
        relative(
            state[case.layer, slots[slots >= 0]], expected_state[case.layer, slots[slots >= 0]]
        )
        < 1e-5
    )
    assert (np.asarray(out)[slots < 0] == 0).all()
    # Every other slot and layer keeps its bits; NaN is one of them.
    untouched = np.ones(state.shape[:2], bool)
    untouched[case.layer, slots[slots >= 0]] = False
    bits = lambda x: np.asarray(x)[untouched].view(np.uint32)  # noqa: E731
    np.testing.assert_array_equal(bits(state), bits(case.state))


@both_devices
@pytest.mark.parametrize("q_len", [1, 3])
def test_shuffled_slots_beside_padding(q_len, implementation):
    case = gdn_case([4, -1, 0], num_slots=5, q_len=q_len)
    assert_matches(case, *decode(case, implementation))


@pytest.mark.slow_cases(
    reason="a head's key that is another head's; found by the other two forms too"
)
@pytest.mark.parametrize(
    "l2norm, key_heads", [(True, 1), slow(True, 2), slow(False, 1), (False, 2)]
)
def test_four_blocks_a_state_in_the_interpreter(l2norm, key_heads, monkeypatch):
    """Which have nothing to tell each other here."""
    monkeypatch.setattr(
        gdn_decode, "choose_config", lambda *_, **__: gdn_decode.GdnDecodeTileConfig(split=True)
    )
    case = gdn_case([2, -1, 0], num_slots=4, key_heads=key_heads, value_heads=2)
    case.q, case.k = case.q / 10, case.k / 10
    step = functools.partial(
        gdn.gated_delta_rule_decode, **case.gates, layer=case.layer, use_qk_l2norm=l2norm
    )
    step = jax.jit(step, static_argnames="implementation")
    out, state = step(*case.args, implementation="mosaic_gpu_interpret")
    expected, expected_state = step(*case.args, implementation="xla")
    assert relative(out, expected) < 5e-3
    np.testing.assert_allclose(state, expected_state, rtol=1e-5, atol=1e-5)


@both_devices
def test_float32(implementation):
    case = gdn_case([1, 0], num_slots=2, key_heads=2, value_heads=2, dtype=jnp.float32)
    assert_matches(case, *decode(case, implementation), bound=1e-5)


@both_devices
def test_a_key_of_zeros_adds_nothing(implementation):
    case = gdn_case([1, 0], num_slots=2, key_heads=2, value_heads=2, dtype=jnp.float32)
    case.k, case.v = jnp.zeros_like(case.k), jnp.full_like(case.v, 1e36)
    assert_matches(case, *decode(case, implementation), bound=1e-5)


@pytest.mark.slow_cases(reason="a norm of inf that gives NaN; found by the other norms too")
@pytest.mark.sampled
@both_devices
@pytest.mark.parametrize("q_len", [1, slow(2)])
@pytest.mark.parametrize(
    "q, k, states",
    [
        slow(1e20, 1e20, 1), (1e25, 1e14, 1), (1, 1e30, 1), slow(1e18, 1e18, 1),
        slow(1, 1e37, 100), (1e37, 1, 100), slow(1e30, 1e30, 1e10),
    ],
)  # fmt: skip
def test_queries_and_keys_whose_squares_overflow(q, k, states, q_len, implementation):
    """A norm that is infinite leaves zeros, as in XLA, and no NaN."""
    case = gdn_case([1, 0], num_slots=2, q_len=q_len, dtype=jnp.float32)
    case.q, case.k, case.state = case.q * q, case.k * k, case.state * states
    out, state = decode(case, implementation)
    expected, expected_state = decode(case, "xla")
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state[case.layer], expected_state[case.layer], rtol=1e-4, atol=1e-5)


@both_devices
def test_products_of_long_vectors_and_a_strong_decay(implementation):
    """exp(g) times the norm's factor alone would be subnormal, or 0."""
    case = gdn_case([1, 0], num_slots=2, dtype=jnp.float32)
    case.q, case.k, case.v = case.q * 1e15, case.k * 1e15, jnp.zeros_like(case.v)
    case.a = case.a * 0 + 4
    case.A_log, case.b = jnp.full_like(case.A_log, math.log(15)), jnp.full_like(case.b, 10)
    assert_matches(case, *decode(case, implementation), bound=1e-5)


@both_devices
def test_a_batch_of_padding_touches_nothing(implementation):
    case = gdn_case([-1, -1], num_slots=3)
    out, state = decode(case, implementation)
    assert (np.asarray(out) == 0).all()
    assert np.isnan(state).all()


@both_devices
@pytest.mark.parametrize("slot", [3, 2**31 - 1, -7])
def test_a_slot_outside_the_pool_is_padding(slot, implementation):
    case = gdn_case([1, -1], num_slots=3, layer=0)
    case.state_indices = case.state_indices.at[1].set(slot)
    out, state = decode(case, implementation)
    case.state_indices = case.state_indices.at[1].set(-1)
    assert_matches(case, out, state)


@both_devices
def test_unsigned_slots(implementation):
    case = gdn_case([200], num_slots=201, layers=1, layer=0)
    signed = case.state_indices
    case.state_indices = signed.astype(jnp.uint8)
    out, state = decode(case, implementation)
    case.state_indices = signed
    assert_matches(case, out, state)


@slow_interpreted("int64 addresses; found by x64 of every kernel in ops/test_transforms too")
def test_with_x64_enabled(implementation):
    case = gdn_case([1, -1], num_slots=2, q_len=2)
    with x64():
        assert_matches(case, *decode(case, implementation))


@both_devices
def test_writes_into_a_poisoned_arena(implementation):
    case = gdn_case([2, -1], num_slots=3, q_len=2)
    spec = gdn.scratch(batch=2, q_len=2, num_v_heads=2, dtype=jnp.bfloat16)
    arena = jax.tree.map(lambda lane: jnp.full_like(lane, jnp.nan), Arena.allocate(spec))
    out, state, arena = decode(case, implementation, arena=arena)
    assert_matches(case, out, state)
    np.testing.assert_array_equal(arena.read(spec, "out"), out)


def test_refuses_what_it_has_no_code_for():
    case = gdn_case([0], num_slots=1, q_len=9)
    with pytest.raises(NotImplementedError, match="1 to 8 tokens per row, got S=9"):
        decode(case, "mosaic_gpu_interpret")
    case = gdn_case([0], num_slots=1)
    case.q, case.k, case.state = case.q[..., :64], case.k[..., :64], case.state[..., :64]
    with pytest.raises(NotImplementedError, match="Dk=64, Dv=128"):
        decode(case, "mosaic_gpu_interpret")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "key_heads, value_heads, q_len", [(2, 8, 4), (16, 16, 1), (16, 32, 1), (16, 48, 4)]
)
def test_published_heads(key_heads, value_heads, q_len):
    slots = [int(i) for i in np.random.default_rng(0).permutation(9)] + [-1]
    case = gdn_case(slots, num_slots=12, q_len=q_len, key_heads=key_heads, value_heads=value_heads)
    assert_matches(case, *decode(case, "mosaic_gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 4])
def test_one_real_row_among_127_of_padding(q_len):
    case = gdn_case([5] + [-1] * 127, num_slots=6, q_len=q_len)
    case.q = case.q.at[1:].set(jnp.nan)
    assert_matches(case, *decode(case, "mosaic_gpu"))


@pytest.mark.gpu
@pytest.mark.large
def test_slot_offsets_beyond_2_31_elements():
    num_slots = 2**31 // (32 * 128 * 128) + 3
    case = gdn_case([num_slots - 1, 0], num_slots=num_slots, value_heads=32, layers=1, layer=0)
    first, last = (case.state[0, slot] for slot in (0, num_slots - 1))
    out, state = decode(case, "mosaic_gpu")
    small = gdn_case([1, 0], num_slots=2, value_heads=32, layers=1, layer=0)
    small.state = jnp.stack([first, last])[None]
    expected, expected_state = gdn_oracle(small)
    assert relative(out, expected) < 5e-3
    assert relative(state[0, num_slots - 1], expected_state[0, 1]) < 1e-5


@pytest.mark.gpu
def test_the_same_bits_every_run():
    case = gdn_case(list(range(64)), num_slots=64, key_heads=16, value_heads=32)
    step = jax.jit(
        functools.partial(
            gdn.gated_delta_rule_decode, **case.gates, layer=case.layer, implementation="mosaic_gpu"
        )
    )
    first = step(*case.args)
    for _ in range(100):
        again = step(*case.args)
        assert bool((again[0] == first[0]).all())
        assert bool((again[1][case.layer] == first[1][case.layer]).all())
