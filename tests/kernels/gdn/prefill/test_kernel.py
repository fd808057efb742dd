"""The Mosaic GPU kernels of `chunk_gated_delta_rule` against float64, interpreted and on a GPU."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn
from jaxattn.kernels.gdn.prefill import launch as gdn_prefill
from jaxattn.kernels.gdn.prefill.chunk_plan import PrefillStatePool
from jaxattn.kernels.gdn.prefill.inter_chunk import launch as gdn_prefill_state
from jaxattn.kernels.gdn.prefill.intra_chunk import launch as gdn_prefill_chunk
from jaxattn.kernels.gdn.prefill.launch import gdn_prefill_mosaic, segment_tokens
from jaxattn.ops.gdn.prefill import gated_delta_rule_prefill
from tests.helpers.at_once import at_once
from tests.helpers.gdn_prefill_cases import (
    BOUND,
    assert_matches,
    assert_pool_matches,
    make_case,
    on_a_pool,
    oracle,
    run,
)
from tests.helpers.kernel_cases import both_devices, no_races, relative, slow, slow_interpreted


@pytest.mark.slow_cases(
    reason="a tail of another sequence in one run; found by states by slot in segments there and "
    "by race detection of the norm in test_norm_epilogue, which has one run, too"
)
@both_devices
@pytest.mark.parametrize(
    "lens, value_heads", [slow([1, 0, 64], 2), slow([63], 3), slow([65, 2], 2)]
)
def test_packed_sequences_before_nan(lens, value_heads, implementation):
    case = make_case(lens, value_heads=value_heads)
    assert_matches(case, *run(case, implementation))


@both_devices
@pytest.mark.slow(
    reason="float16 operands, a negative scale; found by the gated norm in float16 too"
)
def test_a_batch_of_rows_in_float16(implementation):
    case = make_case([70, 70], key_heads=2, dtype=jnp.float16, padding=0)
    case.initial_state = jnp.zeros_like(case.initial_state)
    norm = lambda x: x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)  # noqa: E731
    case.q, case.k = (norm(x).astype(jnp.float16) for x in (case.q, case.k))
    rows = (x.reshape(2, 70, *x.shape[2:]) for x in case.args)
    step = functools.partial(gdn.chunk_gated_delta_rule, implementation=implementation, scale=-0.5)
    out, states = jax.jit(functools.partial(step, output_final_state=True))(*rows)
    assert states.shape == (2, 2, 128, 128) and states.dtype == jnp.float32
    out = out.reshape(1, 140, 2, 128)
    assert_matches(case, out, states, l2norm=False, scale=-0.5, bound=2e-3)


@pytest.mark.slow(
    reason="a gate that underflows; found by the same test on a GPU and by decays from one to "
    "zero in test_kda too"
)
@both_devices
@pytest.mark.parametrize("split_tokens", [slow(0), 64])
def test_gates_from_nothing_to_minus_1000(split_tokens, implementation):
    """And betas of 1e-6 before those of 1, with nothing beside what they wrote."""
    case = make_case([67], value_heads=4)
    beta, v, g, state = (np.array(x) for x in (case.beta, case.v, case.g, case.initial_state))
    beta[:, :32, 0], beta[:, 32:67, 0] = 1e-6, 1.0
    v[:, 32:67, 0] = state[:, 0] = 0.0
    g[..., 0], g[..., 1], g[..., 2:] = 0.0, -1000.0, 1e-3 * g[..., 2:]
    g[:, ::5, 2:] -= 1000.0
    g[0, 9, 3] = -np.inf
    case.beta, case.v, case.g, case.initial_state = map(jnp.asarray, (beta, v, g, state))
    out, states = run(case, implementation, split_tokens=split_tokens)
    assert_matches(case, out, states)
    expected, expected_states = oracle(case)
    for head in range(4):  # outputs differ in size: each head has to be right
        assert relative(out[:, :67, head], expected[:, :, head]) < BOUND
        assert relative(states[:, head], expected_states[:, head]) < BOUND


@pytest.mark.slow_cases(
    reason="a write where none may be; found by beta 1 there and padding with beta 0 in "
    "nn/test_nn too"
)
@both_devices
@pytest.mark.parametrize("beta", [slow(0.0), 1.0])
def test_equal_keys_without_decay(beta, implementation):
    """(I + A)^-1 of ones below the diagonal: powers of A would reach 1e18."""
    case = make_case([64], padding=0)
    case.k = jnp.broadcast_to(case.k[:, :1], case.k.shape)
    case.g, case.beta = jnp.zeros_like(case.g), jnp.full_like(case.beta, beta)
    assert_matches(case, *run(case, implementation))


@slow_interpreted(
    "a state of another slot; found by races of segments there, whose states have slots, by "
    "ops/gdn's cases of XLA and by the same test on a GPU too"
)
def test_states_by_slot_beside_padding(implementation):
    """Slot 0 and the last one are live; a fresh sequence, an empty one, and one that is padding.
    The first is cut in two segments."""
    pooled = on_a_pool(
        make_case([66, 3, 0, 1], padding=3), [5, -1, 2, 0], [3, 4, 2, 0],
        [[1], [4], [4], [4]], num_slots=6, fresh=[3], dtype=jnp.bfloat16,
    )  # fmt: skip
    options = dict(split_tokens=64, implementation=implementation)
    step = functools.partial(gated_delta_rule_prefill, **options)
    assert_pool_matches(pooled, *jax.jit(step)(**pooled.arguments))


@pytest.mark.slow_cases(
    reason="a race between warpgroups; found by races with several chunks, halves and segments too"
)
@pytest.mark.parametrize("segment, crowded", [slow(0, False), (64, True)])
def test_no_race_in_the_interpreter(segment, crowded, monkeypatch):
    """With a checkpoint over the slot that the sequence started from. Crowded: more to do than
    there are multiprocessors, so a warpgroup takes several chunks, and both value heads of one; and
    three blocks ten heads of runs, with ends in the middle of a chunk, no tokens, and padding."""
    if crowded:
        monkeypatch.setattr(gdn_prefill_chunk, "WARPGROUPS", 1)
        monkeypatch.setattr(gdn_prefill_chunk, "NUM_SMS", 1)
        monkeypatch.setattr(gdn_prefill_state, "NUM_SMS", 3)
        assert gdn_prefill_chunk.value_heads_at_once(3, 2, 2) == 2
        assert gdn_prefill_state.halves_in_a_block(2) == 2
    pooled = on_a_pool(make_case([0, 130]), [0, 2], [0, 3], [[-1], [2]], num_slots=4)
    live, (reads, writes) = jnp.ones(2, bool), jnp.array([[0, 2], [-1, 3]])
    pool = PrefillStatePool(
        pooled.pool, jnp.ones(1, jnp.int32), live, reads, writes, jnp.array(pooled.kept), 64
    )
    options = dict(scale=128**-0.5, use_qk_l2norm=True, interpret=True)
    with no_races():
        out, new = jax.block_until_ready(
            at_once(
                gdn_prefill_mosaic, *pooled.case.args, cu_seqlens=pooled.case.cu_seqlens,
                pool=pool, segment=segment, **options,
            )
        )  # fmt: skip
    assert_pool_matches(pooled, out, new)


@pytest.mark.slow(
    reason="a place that is loaded before it was read; found by races of segments there and on a "
    "GPU by one long sequence too"
)
@pytest.mark.parametrize("tokens, segment", [(330, 64), slow(650, 320)])
def test_no_race_where_places_in_shared_memory_are_loaded_again(tokens, segment, monkeypatch):
    """By six segments that are joined, by five chunks of a segment, and by runs of one block."""
    monkeypatch.setattr(gdn_prefill_state, "NUM_SMS", 1)
    case = make_case([tokens], value_heads=1)
    options = dict(scale=128**-0.5, use_qk_l2norm=True, interpret=True)
    with no_races():
        out, states = jax.block_until_ready(
            at_once(
                gdn_prefill_mosaic, *case.args, cu_seqlens=case.cu_seqlens,
                initial_state=case.initial_state, segment=segment, **options,
            )
        )  # fmt: skip
    assert_matches(case, out, states)


def test_lowered_for_a_gpu_the_pool_is_an_operand_and_a_result(monkeypatch):
    """Without a GPU: every operation has a lowering, and one kernel writes the donated pool, and
    counts in one number."""
    monkeypatch.setattr(gdn_prefill, "require_hopper", lambda *args, **kwargs: None)
    pooled = on_a_pool(make_case([130]), [1], [2], [[0]], num_slots=3)
    step = functools.partial(gated_delta_rule_prefill, split_tokens=64, implementation="mosaic_gpu")
    traced = jax.jit(step, donate_argnames="state").trace(**pooled.arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    aliased = [line for line in kernels if "output_operand_alias<" in line]
    assert len(kernels) == 4 and len(aliased) == 1
    assert aliased[0].count("output_operand_alias<") == 2
    assert aliased[0].count("tensor<2x3x2x128x128xf32>") == 2


def test_under_vmap_each_row_counts_for_itself():
    """The interpreter deals out the items in another way: seen in what is traced."""
    case = make_case([2], padding=0)
    states = jnp.stack([case.initial_state] * 3)
    step = functools.partial(
        gdn.chunk_gated_delta_rule, *case.args, implementation="mosaic_gpu_interpret"
    )
    rows = jax.vmap(lambda state: step(initial_state=state))
    assert re.findall(r"Ref{(\S+)} = new_ref", str(jax.make_jaxpr(rows)(states))) == ["i32[3,1]"]


@pytest.mark.gpu
def test_vmap_of_more_states_than_blocks_equals_each_alone():
    case = make_case([70, 0, 3] * 4, key_heads=4, value_heads=16)
    states = jnp.stack([case.initial_state, 2 * case.initial_state])

    @jax.jit
    def step(state):
        return gdn.chunk_gated_delta_rule(
            *case.args, initial_state=state, cu_seqlens=case.cu_seqlens, use_qk_l2norm=True,
            output_final_state=True, implementation="mosaic_gpu",
        )  # fmt: skip

    for row, both in zip(states, zip(*jax.vmap(step)(states), strict=True), strict=True):
        for one, alone in zip(both, step(row), strict=True):
            np.testing.assert_array_equal(one, alone)


@slow_interpreted(
    "segments joined wrongly; found by the same test on a GPU and by races in segments "
    "of 64 there too"
)
def test_segments_equal_one_run(implementation):
    """A NaN among the values stays in its channel: the transitions are made without values."""
    case = make_case([0, 140], gates=0.02)
    case.v = case.v.at[:, : case.tokens, 0, 5].set(0)
    case.initial_state = case.initial_state.at[:, 0, 5].set(0)
    broken = dataclasses.replace(case, v=case.v.at[0, 9, 0, 5].set(jnp.nan))
    out, states = run(broken, implementation, split_tokens=64)
    assert jnp.isnan(states[1, 0, 5]).all()
    out, states = out.at[:, : case.tokens, 0, 5].set(0), states.at[:, 0, 5].set(0)
    assert_matches(case, out, states)


def test_splits_of_half_a_chunk_are_an_error():
    with pytest.raises(ValueError, match="split_tokens must be None, 0 or a multiple"):
        run(make_case([8]), "xla", split_tokens=96)


@pytest.mark.parametrize(
    "length, count, value_heads", [(32768, 1, 8), (8192, 1, 8), (32768, 1, 32), (140, 2, 2)]
)
def test_segments_fill_the_machine_where_sequences_do_not(length, count, value_heads):
    segment = segment_tokens(length, count, value_heads)
    assert segment % 64 == 0
    assert (segment > 0) == (length > 140)
    assert segment_tokens(4 * 8192, 4, 32) == segment_tokens(64 * 1024, 64, 32) == 0


def test_refuses_what_it_has_no_code_for():
    case = make_case([8], padding=0)
    refused = functools.partial(run, implementation="mosaic_gpu_interpret")
    with pytest.raises(NotImplementedError, match="chunk_size=64, got chunk_size=32"):
        refused(case, chunk_size=32)
    with pytest.raises(NotImplementedError, match="got float32"):
        refused(dataclasses.replace(case, **{n: getattr(case, n).astype("f4") for n in "qkv"}))
    narrow = dataclasses.replace(case, q=case.q[..., :64], k=case.k[..., :64])
    narrow.initial_state = case.initial_state[..., :64]
    with pytest.raises(NotImplementedError, match="Dk=64"):
        refused(narrow)
    empty = dataclasses.replace(case, **{n: getattr(case, n)[:, :0] for n in ("q", "k", "v")})
    empty.g, empty.beta = case.g[:, :0], case.beta[:, :0]
    empty.cu_seqlens = jnp.zeros(2, jnp.int32)
    with pytest.raises(NotImplementedError, match="needs at least one token"):
        refused(empty)


def assert_matches_float32(case, out, states):
    """Long cases: the reference recurrence in float32, on the same device."""
    arguments = (x.astype(jnp.float32) for x in case.args)
    expected = jax.jit(
        functools.partial(
            gdn.recurrent_gated_delta_rule,
            **case.packed,
            use_qk_l2norm=True,
            output_final_state=True,
        )  # fmt: skip
    )(*arguments)
    assert relative(out, np.asarray(expected[0], np.float64)) < BOUND
    assert relative(states, np.asarray(expected[1], np.float64)) < BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("key_heads, value_heads", [(2, 8), (16, 16), (16, 32), (16, 48)])
def test_published_heads(key_heads, value_heads):
    step = jax.jit(
        functools.partial(
            gdn.chunk_gated_delta_rule,
            use_qk_l2norm=True,
            output_final_state=True,
            implementation="mosaic_gpu",
        )
    )
    for gates in (1.0, 0.002, 0.0, 100.0):
        lens = [15, 85, 0, 200, 900, 848, 2049]
        case = make_case(lens, key_heads=key_heads, value_heads=value_heads, gates=gates)
        assert_matches_float32(case, *step(*case.args, **case.packed))


@pytest.mark.gpu
@pytest.mark.parametrize("gates", [1.0, 0.002])
def test_one_long_sequence(gates):
    case = make_case([8192], key_heads=2, value_heads=8, gates=gates)
    assert_matches_float32(case, *run(case, "mosaic_gpu"))


def difference(actual, expected):
    """Relative L2 on the device: the pools here are gigabytes."""
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))


@functools.partial(jax.jit, static_argnames=("axes", "least"))
def worst(actual, expected, *, axes, least=0.0):
    """The largest relative L2 over `axes` of any part: one that is wrong among thousands does not
    show in the norm of all. No part counts as smaller than `least` times the mean of them."""
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    error, size = (jnp.sqrt(jnp.sum(x * x, axis=axes)) for x in (actual - expected, expected))
    return jnp.max(error / jnp.maximum(size, jnp.maximum(least * jnp.mean(size), 1e-30)))


def assert_pool_matches_xla(pooled, out, new):
    """Against the XLA implementation on float32 operands; other slots keep their bits."""
    arguments = pooled.arguments
    arguments |= {name: arguments[name].astype(jnp.float32) for name in ("q", "k", "v")}
    arguments["state"] = arguments["state"].astype(jnp.float32)
    step = functools.partial(gated_delta_rule_prefill, implementation="xla")
    expected, states = jax.jit(step)(**arguments)
    assert difference(out, expected) < BOUND
    written = ~np.isnan(np.asarray(states[:, :, 0, 0, 0]))
    for layer, slot in zip(*np.nonzero(written), strict=True):
        assert difference(new[layer, slot], states[layer, slot]) < BOUND
    # A slot of NaN was nobody's, or only read.
    np.testing.assert_array_equal(np.isnan(np.asarray(new[:, :, 0, 0, 0])), ~written)
    assert bool(jnp.isnan(new[0]).all())


SERVED = [1300, 547, 0, 2048, 963, 64, 1, 271, 3063]


def served_case(*, num_slots=40, **options):
    """A prefill batch of a server: prompts, an empty one, padding, and prefixes kept."""
    case, count = make_case([*SERVED, 40], **options), len(SERVED) + 1
    slots = np.random.default_rng(0).permutation(np.arange(1, num_slots - 1)).tolist()
    reads = [0, num_slots - 1, *(slots.pop() for _ in range(count - 3)), -1]
    writes = [0, slots.pop(), *reads[2:]]
    kept = [[slots.pop() if length >= 512 * (j + 1) and j < 3 else -1 for j in range(4)]
            for length in (*SERVED, 0)]  # fmt: skip
    return case, dict(
        reads=reads, writes=writes, kept=kept, every=512, num_slots=num_slots, fresh=[0, 4]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("split_tokens, dtype", [(0, jnp.bfloat16), (512, jnp.float32)])
def test_a_servers_batch_on_a_pool(split_tokens, dtype):
    case, slots = served_case(key_heads=16, value_heads=32, gates=0.05)
    pooled = on_a_pool(case, **slots, dtype=dtype)
    options = dict(split_tokens=split_tokens, implementation="mosaic_gpu")
    step = functools.partial(gated_delta_rule_prefill, **options)
    assert_pool_matches_xla(pooled, *jax.jit(step)(**pooled.arguments))


@pytest.mark.gpu
@pytest.mark.large
def test_many_short_documents_in_more_than_65535_blocks():
    """On a pool of 4 GiB, in shuffled slots."""
    lens = np.random.default_rng(1).integers(0, 5, 2050).tolist()
    case = make_case(lens, key_heads=16, value_heads=32)
    slots = np.random.default_rng(2).permutation(2060)[:2050]
    pool = jnp.zeros((2060, 32, 128, 128), jnp.float32).at[slots].set(case.initial_state)
    results = []
    for implementation in ("mosaic_gpu", "xla"):
        step = functools.partial(gated_delta_rule_prefill, implementation=implementation)
        wide = [x.astype(jnp.float32) if implementation == "xla" else x for x in case.args[:3]]
        arguments = (*wide, *case.args[3:], pool, slots)
        results.append(jax.jit(step)(*arguments, cu_seqlens=case.cu_seqlens))
    (out, new), (expected, states) = results
    assert difference(out, expected) < BOUND
    # Of each slot and head, and of each token and head: the errors of 65,600 states differ.
    assert worst(new, states, axes=(-2, -1)) < 2 * BOUND
    assert worst(out, expected, axes=-1, least=1.0) < 4 * BOUND
    kept = np.setdiff1d(np.arange(2060), slots[np.asarray(lens) > 0])
    assert bool((new[kept] == pool[kept]).all())


@pytest.mark.gpu
@pytest.mark.large
def test_slot_offsets_beyond_2_31_elements():
    """The last slots of a pool of 2^31 elements and those of a small one: one result, no copy."""
    num_slots = 2**31 // (32 * 128 * 128) + 4
    case = make_case([130, 70], key_heads=16, value_heads=32)
    step = functools.partial(
        gated_delta_rule_prefill,
        cu_seqlens=case.cu_seqlens,
        split_tokens=64,
        implementation="mosaic_gpu",
    )
    results = []
    for last in (3, num_slots - 1):
        pool = jnp.zeros((last + 1, 32, 128, 128), jnp.float32)
        pool = pool.at[jnp.array([last, 0])].set(case.initial_state)
        arguments = (*case.args, pool, jnp.array([last, 0]))
        others = dict(
            write_indices=jnp.array([last - 1, 0]),
            checkpoints=gdn.Checkpoints(slots=jnp.array([[last - 2, -1], [-1, -1]]), tokens=64),
        )
        compiled = jax.jit(step, donate_argnums=5).lower(*arguments, **others).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == pool.nbytes
        assert memory.temp_size_in_bytes < 2**28
        out, new = compiled(*arguments, **others)
        results.append((out, new[last - 2], new[last - 1], new[last], new[0]))
    for small, large in zip(*results, strict=True):
        assert bool((small == large).all())


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [127, 128])
def test_parts_and_decode_on_a_pool_equal_one_prefill(cut):
    """300 tokens at once; and `cut`, the rest but one, and that one by the decode kernel."""
    case = make_case([300], value_heads=4, key_heads=2, padding=0)
    rng = np.random.default_rng(3)
    a, b = (jnp.asarray(rng.normal(size=(1, 300, 4)), jnp.float32) for _ in range(2))
    gates = {"A_log": jnp.log(jnp.array([0.1, 1.0, 4.0, 16.0])), "dt_bias": jnp.zeros(4)}
    tokens = (*case.args[:3], *gdn.gdn_gates(a, b, **gates))
    pool, slot = jnp.full((3, 4, 128, 128), jnp.nan), jnp.array([2])
    step = jax.jit(functools.partial(gated_delta_rule_prefill, implementation="mosaic_gpu"))
    expected, whole = step(*tokens, pool, slot, has_initial_state=jnp.array([False]))
    outs = []
    for first, last in ((0, cut), (cut, 299)):
        part = (x[:, first:last] for x in tokens)
        out, pool = step(*part, pool, slot, has_initial_state=jnp.array([first > 0]))
        outs.append(out)
    out, pool = gdn.gated_delta_rule_decode(
        *(x[:, 299:] for x in (*case.args[:3], a, b)), pool, slot, implementation="mosaic_gpu",
        **gates,
    )  # fmt: skip
    assert difference(jnp.concatenate([*outs, out], axis=1), expected) < BOUND
    assert difference(pool[2], whole[2]) < BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("split_tokens", [0, 512])
@pytest.mark.parametrize("many", [True, False], ids=["many", "long"])
def test_the_same_bits_every_run(many, split_tokens):
    """With segments: the passes over transitions and over what is between segments as well."""
    if many:
        case, slots = served_case(key_heads=4, value_heads=8)
    else:
        case = make_case([8192, 300], key_heads=4, value_heads=8, gates=0.05)
        kept = [list(range(2, 18)), [-1] * 16]
        slots = dict(reads=[0, 20], writes=[1, 20], kept=kept, every=512, num_slots=24)
    pooled = on_a_pool(case, **slots)
    step = jax.jit(
        functools.partial(
            gated_delta_rule_prefill, split_tokens=split_tokens, implementation="mosaic_gpu",
        )
    )  # fmt: skip
    bits = lambda x: x.view(jnp.uint16 if x.dtype == jnp.bfloat16 else jnp.uint32)  # noqa: E731
    first = [bits(x) for x in step(**pooled.arguments)]
    for _ in range(100):
        again = step(**pooled.arguments)
        assert all(bool((bits(a) == b).all()) for a, b in zip(again, first, strict=True))
