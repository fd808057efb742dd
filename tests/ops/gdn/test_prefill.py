"""The chunked delta rule on a state pool, in XLA, against a float64 recurrence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxattn import gdn
from jaxattn.ops.gdn.prefill import gated_delta_rule_prefill
from tests.helpers.gdn_cases import make, make_state, oracle, relative

TOKENS, SLOTS, EVERY = 100, 8, 32
# Everything but shapes is data: one compilation for all of these.
prefill = jax.jit(partial(gated_delta_rule_prefill, chunk_size=16, use_qk_l2norm=False))


def check(lens, reads, writes=None, fresh=(), kept=None, gates="logsigmoid", poison=np.nan):
    """Runs sequences of `lens` tokens, with poison wherever nothing may be read, and checks every
    output, every state and the bits of every slot that nobody writes."""
    writes = reads if writes is None else writes
    kept = [] if kept is None else kept
    # Padded to five sequences and three checkpoints each, for that one compilation.
    count = 5
    lens = [*lens, *[0] * (count - len(lens))]
    reads, writes = ([*slots, *[-1] * (count - len(slots))] for slots in (reads, writes))
    kept = np.array([*kept, *[[-1] * 3] * (count - len(kept))])
    ends = np.cumsum([0, *lens]).astype(np.int32)
    live = [0 <= slot < SLOTS for slot in reads]
    inputs = make(1, TOKENS, 1, 2, 32, 16, gates)
    real = np.zeros(TOKENS, bool)
    for i in range(count):
        real[ends[i] : ends[i + 1]] = live[i]
    for x in inputs:
        x[:, ~real] = poison
    pool, states = np.full((2, SLOTS, 2, 16, 32), poison, np.float32), make_state(SLOTS, 2, 32, 16)
    for i in range(count):
        if live[i] and i not in fresh:
            pool[1, reads[i]] = states[reads[i]]
    out, new = prefill(
        *inputs,
        pool,
        np.array(reads, np.int32),
        write_indices=np.array(writes, np.int32),
        has_initial_state=np.array([i not in fresh for i in range(count)]),
        cu_seqlens=ends,
        layer=jnp.int32(1),
        checkpoints=gdn.Checkpoints(slots=kept.astype(np.int32), tokens=EVERY),
    )
    np.testing.assert_array_equal(out[:, ~real], 0)
    untouched = np.ones((2, SLOTS), bool)

    def check_state(slot, i, tokens):
        initial = None if i in fresh else states[reads[i]][None]
        part = [x[:, ends[i] : ends[i] + tokens] for x in inputs]
        expected_out, expected = oracle(*part, initial_state=initial)
        assert relative(out[:, ends[i] : ends[i] + tokens], expected_out) < 1e-5
        if 0 <= slot < SLOTS:
            assert relative(new[1, slot], expected[0]) < 1e-5
            untouched[1, slot] = False

    for i in range(count):
        if live[i] and lens[i]:
            check_state(writes[i], i, lens[i])
            for j in range(min(lens[i] // EVERY, 3)):
                check_state(kept[i, j], i, (j + 1) * EVERY)
    bits = lambda x: np.asarray(x)[untouched].view(np.uint32)  # noqa: E731
    np.testing.assert_array_equal(bits(new), bits(pool))
    return out, new


# --- slots --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gates", ["logsigmoid", "none", "half", "some_cleared", "all_cleared"])
def test_shuffled_slots_beside_padding_and_empty_sequences(gates):
    """Slot 0 and the last slot are live, and what nobody owns is NaN."""
    check([33, 4, 0, 32, 20], [7, -1, 3, 0, 5], gates=gates)


@pytest.mark.parametrize("poison", [np.inf, -np.inf, 3e38])
def test_nothing_is_read_where_nobody_wrote(poison):
    kept = [[1, 1, 1], [2, 2, 2], [4, -1, 6]]
    check([31, 4, 63, 2], [7, -1, 3, 0], fresh=[0], kept=kept, poison=poison)


@pytest.mark.parametrize(
    "lens", [[1, 15, 16, 17, 31], [0, 0, 0, 0, 100], [48, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
)
def test_lengths_are_data(lens):
    check(lens, [5, 2, 0, 7, 1])


def test_padding_alone_touches_nothing():
    check([33, 4, 0, 32, 20], [-1] * 5)


def test_a_slot_outside_the_pool_is_padding():
    check([33, 4, 10, 32, 20], [7, 2**31 - 1, -7, 0, SLOTS], kept=[[-1] * 3, [1] * 3])
    check([33, 4, 0, 32, 20], [7, 1, 2, 0, 5], [SLOTS, -7, 2, 2**31 - 1, 5])


def test_a_fresh_sequence_starts_from_zeros_in_a_slot_of_nan():
    check([33, 4, 0, 32, 20], [7, 1, 3, 0, 5], fresh=[0, 2, 3])


def test_several_sequences_start_from_one_slot():
    check([33, 4, 0, 32, 20], [2, 2, 2, 2, 0], [1, 3, 4, -1, 0])


def test_checkpoints_go_to_their_slots():
    """Column j is the state after 32 (j + 1) tokens: past a sequence's end it is ignored."""
    check([32, 31, 33], [0, 1, 2], kept=[[3, 6, 6], [4, 4, 4], [5, 7, -1]])
    check([96, 0, 2], [0, 1, -1], [-1, 1, 4], fresh=[0], kept=[[7, -1, 2], [3, 3, 3], [5, 5, 5]])
    # Over its own initial state, which was read before.
    check([96, 0, 2], [0, 1, 4], [5, 1, 4], kept=[[-1, 0, 6], [3, 3, 3], [5, 5, 5]])


def test_a_prompt_goes_on_from_its_checkpoint():
    out, pool = check([97], [0], fresh=[0], kept=[[3, 6, 1]])
    rest = [np.roll(x, -64, axis=1) for x in make(1, TOKENS, 1, 2, 32, 16, "logsigmoid")]
    kept = np.full((5, 3), -1, np.int32)
    kept[0, 0] = 2
    again, after = prefill(
        *rest,
        pool,
        np.array([6, -1, -1, -1, -1], np.int32),
        write_indices=np.array([4, -1, -1, -1, -1], np.int32),
        has_initial_state=np.ones(5, bool),
        cu_seqlens=np.array([0, 33, 33, 33, 33, 33], np.int32),
        layer=jnp.int32(1),
        checkpoints=gdn.Checkpoints(slots=kept, tokens=EVERY),
    )
    assert relative(again[:, :33], out[:, 64:97]) < 1e-6
    assert relative(after[1, 4], pool[1, 0]) < 1e-6  # the final state
    assert relative(after[1, 2], pool[1, 1]) < 1e-6  # the checkpoint after 96 tokens


def test_prefill_then_decode_equals_a_longer_prefill():
    lens = np.array([17, 3, 33, 2, 20])
    ends = np.cumsum([0, *lens]).astype(np.int32)
    inputs, rng = make(1, TOKENS, 1, 2, 32, 16), np.random.default_rng(2)
    a, b = (rng.standard_normal((1, TOKENS, 2)).astype(np.float32) for _ in range(2))
    gates = {"A_log": np.log([0.5, 4]).astype(np.float32), "dt_bias": np.zeros(2, np.float32)}
    sequence = (*inputs[:3], *gdn.gdn_gates(a, b, **gates))
    slots = np.array([7, 1, 3, 0, 5], np.int32)
    options = dict(
        write_indices=slots,
        has_initial_state=np.zeros(5, bool),
        layer=jnp.int32(1),
        checkpoints=gdn.Checkpoints(slots=np.full((5, 3), -1, np.int32), tokens=EVERY),
    )
    pool = np.full((2, SLOTS, 2, 16, 32), np.nan, np.float32)
    expected, whole = prefill(*sequence, pool, slots, cu_seqlens=ends, **options)
    last = ends[1:] - 1
    shorter = (np.delete(x, last, axis=1) for x in sequence)
    shorter = (np.pad(x, ((0, 0), (0, 5)) + ((0, 0),) * (x.ndim - 2)) for x in shorter)
    _, pool = prefill(
        *shorter, pool, slots, cu_seqlens=ends - np.arange(6, dtype=np.int32), **options
    )
    out, pool = gdn.gated_delta_rule_decode(
        *(np.moveaxis(x[:, last], 0, 1) for x in (*inputs[:3], a, b)),
        pool,
        slots,
        layer=1,
        use_qk_l2norm=False,
        implementation="xla",
        **gates,
    )
    assert relative(out[:, 0], expected[0, last]) < 1e-5
    assert relative(pool[1, slots], whole[1, slots]) < 1e-5


def test_rows_of_a_batch_on_a_plain_bfloat16_pool():
    inputs = make(2, 75, 2, 4, 32, 16, "slow")
    pool = make_state(5, 4, 32, 16).astype(jnp.bfloat16)
    pool[[1, 4]] = np.nan
    slots = np.array([4, 2], np.uint8)
    kept = gdn.Checkpoints(slots=np.array([[-1], [3]], np.int32), tokens=64)
    run = jax.jit(gated_delta_rule_prefill)
    fresh = np.array([False, True])
    out, new = run(*inputs, pool, slots, has_initial_state=fresh, checkpoints=kept)
    start = np.stack([np.zeros_like(pool[2]), pool[2]]).astype(np.float32)
    expected, final = oracle(*inputs, initial_state=start, l2norm=True)
    _, middle = oracle(*(x[:, :64] for x in inputs), initial_state=start, l2norm=True)
    assert relative(out, expected) < 1e-5
    assert new.dtype == jnp.bfloat16
    assert relative(new[slots], final) < 3e-3 and relative(new[3], middle[1]) < 3e-3
    np.testing.assert_array_equal(np.asarray(new)[[0, 1]].view(np.uint16), pool[[0, 1]].view("u2"))


@pytest.mark.slow(
    reason="offsets of more runs than blocks; found by packed sequences and the kernel with few "
    "blocks too"
)
def test_two_thousand_and_fifty_short_documents():
    lens = np.random.default_rng(1).integers(0, 5, 2050)
    ends = np.cumsum([0, *lens]).astype(np.int32)
    inputs = make(1, ends[-1] + 7, 1, 2, 8)
    for x in inputs:
        x[:, ends[-1] :] = np.nan
    slots = np.random.default_rng(2).permutation(2051)[:2050].astype(np.int32)
    pool = make_state(2051, 2, 8)
    run = jax.jit(partial(gated_delta_rule_prefill, chunk_size=16))
    out, new = run(*inputs, pool, slots, cu_seqlens=ends)
    expected, final = oracle(*inputs, initial_state=pool[slots], cu_seqlens=ends, l2norm=True)
    assert relative(out[:, : ends[-1]], expected[:, : ends[-1]]) < 1e-5
    assert relative(new[slots], final) < 1e-5
    untouched = np.append(slots[lens == 0], np.setdiff1d(np.arange(2051), slots))
    np.testing.assert_array_equal(np.asarray(new)[untouched], pool[untouched])


def test_no_token_leaves_the_pool_as_it_is():
    pool = make_state(3, 2, 32, 16)
    out, new = gated_delta_rule_prefill(*make(1, 0, 1, 2, 32, 16), pool, np.array([2]))
    assert out.shape == (1, 0, 2, 16)
    np.testing.assert_array_equal(new, pool)


def test_a_donated_stack_is_updated_in_place_in_a_scan_over_layers():
    layers, slots = 4, 1024
    kept = gdn.Checkpoints(slots=[[1, 3], [4, -1], [7, 6]], tokens=32)
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731

    def step(pool, inputs, ends):
        def body(pool, layer):
            out, pool = gated_delta_rule_prefill(
                *inputs, pool, jnp.array([0, 2, 5]), cu_seqlens=ends, layer=layer, chunk_size=16,
                checkpoints=kept, implementation="xla",
            )  # fmt: skip
            return pool, out

        return lax.scan(body, pool, jnp.arange(layers))

    heads = (shape(1, 64, 1, 32), shape(1, 64, 1, 32), shape(1, 64, 2, 16))
    inputs = (*heads, shape(1, 64, 2), shape(1, 64, 2))
    ends = jax.ShapeDtypeStruct((4,), jnp.int32)
    lowered = jax.jit(step, donate_argnums=0).lower(shape(layers, slots, 2, 16, 32), inputs, ends)
    memory = lowered.compile().memory_analysis()
    layer_bytes = slots * 2 * 16 * 32 * 4
    assert memory.alias_size_in_bytes == layers * layer_bytes
    assert memory.temp_size_in_bytes < layer_bytes / 2


# --- errors -------------------------------------------------------------------------------------


def test_errors_name_the_argument_and_what_was_given():
    inputs, pool = make(1, 40, 2, 4, 16, 8), make_state(6, 4, 16, 8)
    ends, slots = np.array([0, 10, 40]), np.array([1, 3])

    def refused(message, error=ValueError, inputs=inputs, pool=pool, slots=slots, **changes):
        options = {"cu_seqlens": ends, "chunk_size": 16} | changes
        with pytest.raises(error, match=message):
            gated_delta_rule_prefill(*inputs, pool, slots, **options)

    def kept(message, indices, tokens=16, error=ValueError, **changes):
        checkpoints = gdn.Checkpoints(slots=np.array(indices), tokens=tokens)
        refused(message, error, checkpoints=checkpoints, **changes)

    refused(r"q must be \[B, T, Hk, Dk\].*\(40, 2, 16\)", inputs=(inputs.q[0], *inputs[1:]))
    refused(r"Hv=3 .* multiple of the Hk=2", inputs=(*inputs[:2], inputs.v[:, :, :3], *inputs[3:]))
    refused(r"cu_seqlens .*never decrease.*\[0, 30, 10\]", cu_seqlens=np.array([0, 30, 10]))
    refused(r"cu_seqlens .*within the 40 tokens.*\[0, 10, 41\]", cu_seqlens=np.array([0, 10, 41]))
    refused(r"chunk_size .* got 48", chunk_size=48)
    refused(r"chunk_size must be an integer, got 16.0", TypeError, chunk_size=16.0)
    refused(r"split_tokens must be .*chunk_size=16, got 24", split_tokens=24)
    refused(r"split_tokens must be an integer, got 16.0", TypeError, split_tokens=16.0)
    refused(r"split_tokens must be an integer, got '16'", TypeError, split_tokens="16")
    refused(r"state must be .*4, 8, 16.*got \(6, 4, 16, 8\)", pool=pool.swapaxes(-1, -2))
    halves = pool.astype(np.float16)
    refused(r"state must be float32 or bfloat16, got float16", TypeError, pool=halves)
    refused(r"layer .*\(6, 4, 8, 16\)", layer=0)
    refused(r"layer=1 .*\(1, 6, 4, 8, 16\)", pool=pool[None], layer=1)
    refused(r"state_indices must be integers of shape \[2\].*\[3\]", slots=np.array([0, 1, 2]))
    refused(r"state_indices .*\[-1, 6\).*\[0, 6\]", slots=np.array([0, 6]))
    refused(r"state_indices .* \[3\] more than once", slots=np.array([3, 3]))
    refused("has_initial_state must be bool, got int", TypeError, has_initial_state=slots)
    refused(r"has_initial_state must be \[2\], got \[1\]", has_initial_state=np.array([True]))
    writes = lambda message, slots: refused(message, write_indices=np.array(slots))  # noqa: E731
    writes(r"write_indices must be integers of shape \[2\].*\[2, 1\]", [[1], [3]])
    writes(r"write_indices must lie in \[-1, 6\).*\[\[0\], \[9\]\]", [0, 9])
    writes(r"write_indices .* \[2\] more than once", [2, 2])
    writes(r"row 0 writes slot 3, which row 1 reads", [3, 1])
    refused("checkpoints must be a Checkpoints, got dict", TypeError, checkpoints={})
    refused("output_norm must be an OutputNorm, got tuple", TypeError, output_norm=(1, 2))
    kept(r"checkpoints.tokens must be an integer, got None", [[0], [2]], None, TypeError)
    kept(r"checkpoints.tokens must be a positive multiple of chunk_size=16, got 24", [[0], [2]], 24)
    kept(r"checkpoints.tokens must be a positive multiple of chunk_size=16, got 0", [[0], [2]], 0)
    kept(r"checkpoints.tokens must be an integer, got 16.0", [[0], [2]], 16.0, TypeError)
    kept(r"checkpoints.slots must be integers of shape \[2, M\].*\[2\]", [0, 2])
    floats = [[0.0], [2.0]]
    kept(r"checkpoints.slots must be integers of.*float64", floats, error=TypeError)
    kept(r"checkpoints.slots, side by side, must lie in \[-1, 6\)", [[0], [7]])
    kept(r"side by side, must not name a slot twice, got slot\(s\) \[2\]", [[0, 2], [2, -1]])
    kept(r"side by side, must not name a slot twice, got slot\(s\) \[1\]", [[0, 1], [2, -1]])
    kept(r"row 0 writes slot 3, which row 1 reads", [[3], [-1]], write_indices=np.array([0, 2]))
    bad = {"inputs": tuple(x.astype(jnp.bfloat16) for x in inputs[:3]) + inputs[3:]}
    refused("Dk=16, Dv=8.*'xla'", NotImplementedError, implementation="mosaic_gpu_interpret", **bad)
    refused("unknown implementation='cuda'", implementation="cuda")
