"""Offsets and slots that are known are checked, inside `jax.jit` as outside: NumPy's, and lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gated_delta_net_decode, gdn
from jaxattn.core.validation.array_checks import keep_concrete
from jaxattn.ops.gdn.prefill import gated_delta_rule_prefill
from tests.helpers.at_once import at_once
from tests.helpers.gdn_cases import make, make_state, relative

SEQUENCE = make(1, 40, 1, 2, 16, 8)
ROWS = make(2, 1, 1, 2, 16, 8)
POOL = make_state(6, 2, 16, 8)
GATES = {"A_log": np.zeros(2, np.float32), "dt_bias": np.zeros(2, np.float32)}
CHANNELS = 2 * 16 + 2 * 8


def zeros(*shape):
    return np.zeros(shape, np.float32)


def chunk(q, **given):
    return gdn.chunk_gated_delta_rule(q, *SEQUENCE[1:], **given)


def recurrent(q, **given):
    return gdn.recurrent_gated_delta_rule(q, *SEQUENCE[1:], **given)


def prefill(q, state_indices=(1, 3), cu_seqlens=(0, 10, 40), **given):
    kept = gdn.Checkpoints(slots=given.pop("checkpoints.slots", [[-1], [-1]]), tokens=16)
    given |= dict(cu_seqlens=cu_seqlens, chunk_size=16, checkpoints=kept)
    return gated_delta_rule_prefill(q, *SEQUENCE[1:], POOL, state_indices, **given)


def decode(q, state_indices=(1, 3), **given):
    return gdn.gated_delta_rule_decode(q, *ROWS[1:], POOL, state_indices, **GATES, **given)


def layer(qkvz, state_indices=(1, 3), **given):
    weights, conv_state = zeros(4 + 8 + 4 * CHANNELS), zeros(6, 3, CHANNELS)
    ba = zeros(2, 1, 4)
    return gated_delta_net_decode(qkvz, ba, weights, conv_state, POOL, state_indices, **given)


def conv(x, **given):
    return gdn.causal_conv1d(x, zeros(3, 4), **given)


def update(x, state_indices=(1, 3), **given):
    return gdn.causal_conv1d_update(x, zeros(3, 4), zeros(6, 3, 3), state_indices, **given)


# Of each op its first argument, which jit makes a tracer.
FIRST = {
    chunk: SEQUENCE.q,
    recurrent: SEQUENCE.q,
    prefill: SEQUENCE.q,
    conv: zeros(1, 40, 3),
    decode: ROWS.q,
    layer: zeros(2, 1, CHANNELS + 16),
    update: zeros(2, 1, 3),
}
OFFSETS = [
    ("cu_seqlens", [0, 30, 10], r"never decrease .*\[0, 30, 10\]"),
    ("cu_seqlens", [0, 10, 41], r"within the 40 tokens, got \[0, 10, 41\]"),
    ("cu_seqlens", [1, 10, 40], "start at 0"),
    ("cu_seqlens", [0, 10, 2**32 + 40], r"within the 40 tokens"),
]
SLOTS = [
    ("state_indices", [3, 3], r"slot\(s\) \[3\] more than once"),
    ("state_indices", [0, 6], r"must lie in \[-1, 6\)"),
    ("state_indices", [0, 2**32], r"must lie in \[-1, 6\)"),
    ("write_indices", [2, 2], r"slot\(s\) \[2\] more than once"),
    ("write_indices", [0, 9], r"must lie in \[-1, 6\)"),
    ("write_indices", [3, 0], "row 0 writes slot 3, which row 1 reads"),
]
KEPT = [
    ("checkpoints.slots", [[0], [6]], r"side by side, must lie in \[-1, 6\)"),
    ("checkpoints.slots", [[2, 2], [-1, -1]], r"slot\(s\) \[2\] more than once"),
]
CASES = [
    *((op, *case) for op in (chunk, recurrent, prefill, conv) for case in OFFSETS),
    *((op, *case) for op in (prefill, decode, layer, update) for case in SLOTS),
    *((prefill, *case) for case in KEPT),
]


@pytest.mark.parametrize("inside", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", [np.array, list], ids=["numpy", "list"])
@pytest.mark.parametrize("op, name, values, message", CASES)
def test_what_is_known_and_wrong_is_an_error(op, name, values, message, kind, inside):
    def call(first):
        return op(first, **{name: kind(values)})

    with pytest.raises(ValueError, match=f"{name}.* {message}"):
        (jax.jit(call) if inside else call)(FIRST[op])


@pytest.mark.parametrize(
    "op, name, values, message",
    [
        *((op, *case) for op in (prefill, decode, layer, update) for case in SLOTS[3:5]),
        *((op, "write_indices", [[2], [2]], "more than once") for op in (decode, layer, update)),
        (prefill, "checkpoints.slots", [[0], [6]], r"must lie in \[-1, 6\)"),
        (prefill, "checkpoints.slots", [[2, 2], [-1, -1]], r"slot\(s\) \[2\] more than once"),
    ],
)
def test_known_writes_are_checked_beside_reads_that_are_not(op, name, values, message):
    step = jax.jit(lambda first, reads: op(first, reads, **{name: values}))
    with pytest.raises(ValueError, match=f"{name}.* {message}"):
        step(FIRST[op], jnp.array([1, 3]))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64])
def test_unsigned_numbers_are_compared_as_what_they_are(dtype):
    with pytest.raises(ValueError, match="never decrease"):
        chunk(SEQUENCE.q, cu_seqlens=np.array([0, 30, 10], dtype))
    with pytest.raises(ValueError, match="more than once"):
        decode(ROWS.q, write_indices=np.array([2, 2], dtype))
    slots = np.array([1, 3], dtype)
    written, alone = at_once(decode, ROWS.q, slots, write_indices=slots), at_once(decode, ROWS.q)
    for x, y in zip(written, alone, strict=True):
        np.testing.assert_array_equal(x, y)
    kept = [
        at_once(prefill, SEQUENCE.q, write_indices=np.array([1, 3]), **{"checkpoints.slots": x})
        for x in (np.array([[4], [5]], dtype), [[4], [5]])
    ]
    np.testing.assert_array_equal(*(state for _, state in kept))


@pytest.mark.sampled
@pytest.mark.parametrize("op", [chunk, recurrent, prefill, conv])
def test_offsets_given_as_a_list_equal_those_of_a_device(op):
    ends = [0, 10, 40]
    here, there = (jax.jit(lambda x, e=e: op(x, cu_seqlens=e)[0]) for e in (ends, jnp.array(ends)))
    traced = jax.jit(lambda x, ends: op(x, cu_seqlens=ends)[0])
    expected = np.asarray(traced(FIRST[op], jnp.array(ends)))
    for step in (here, there):
        actual = step(FIRST[op])
        assert np.array_equal(actual, expected) or relative(actual, expected) < 1e-6


@pytest.mark.parametrize("op", [decode, layer, update])
def test_slots_after_every_token_as_a_list(op):
    traced = jax.jit(lambda x, slots: op(x, write_indices=slots))
    expected = traced(FIRST[op], jnp.array([[2], [4]]))
    for x, y in zip(jax.jit(lambda x: op(x, write_indices=[[2], [4]]))(FIRST[op]), expected,
                    strict=True):  # fmt: skip
        np.testing.assert_array_equal(x, y)


def test_a_list_of_tracers_is_an_array():
    @jax.jit
    def stack(x):
        return keep_concrete([x, 2])

    np.testing.assert_array_equal(stack(1), [1, 2])
    assert isinstance(keep_concrete((1, 2)), np.ndarray) and keep_concrete(None) is None
