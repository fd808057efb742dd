"""The passes over states with decays per channel (`chunk_kda`, `kda_prefill`) against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import kda
from jaxattn.kernels.gdn.prefill.chunk_plan import PrefillStatePool
from jaxattn.kernels.gdn.prefill.inter_chunk import launch as inter_chunk_launch
from jaxattn.kernels.gdn.prefill.kda_intra_chunk import launch as kda_launch
from jaxattn.kernels.gdn.prefill.launch import gdn_prefill_mosaic
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

make = functools.partial(make_case, channels=True)


@pytest.mark.slow_cases(
    reason="a tail of another sequence; found by states by slot in segments and the scalar "
    "gate's in one run too"
)
@both_devices
@pytest.mark.parametrize("split_tokens", [slow(0), slow(64)])
def test_packed_sequences_before_nan(split_tokens, implementation):
    case = make([1, 0, 130])
    assert_matches(case, *run(case, implementation, split_tokens=split_tokens))


def with_decays_from_one_to_zero(case):
    """The case, whose tokens have four heads of such decays."""
    g = np.array(case.g)
    g[:, : case.tokens, 0] = 0.0
    g[:, : case.tokens, 1] = -1000.0
    g[:, 7 : case.tokens : 5, 2, ::2] = -1000.0
    g[:, : case.tokens, 3] *= 1e-3
    g[:, 9, 3, 5] = -np.inf
    case.g = jnp.asarray(g)
    return case


def assert_each_head(case, out, states):
    """Every head by itself: their outputs differ in size."""
    expected, expected_states = oracle(case)
    for head in range(4):
        assert relative(out[:, : case.tokens, head], expected[:, :, head]) < BOUND
        assert relative(states[:, head], expected_states[:, head]) < BOUND


@slow_interpreted(
    "a decay that underflows in one run; found by KDA's race detection, whose segments have the "
    "same decays, and by the same test on a GPU too"
)
def test_decays_from_one_to_zero_side_by_side(implementation):
    case = with_decays_from_one_to_zero(make([130], key_heads=4, value_heads=4))
    out, states = run(case, implementation)
    assert_matches(case, out, states)
    assert_each_head(case, out, states)


@slow_interpreted(
    "powers of the triangular matrix that overflow; found by the gated delta rule's equal keys too"
)
def test_equal_keys_without_decay(implementation):
    """(I + A)^-1 of ones below the diagonal: powers of A would reach 1e18."""
    case = make([64], padding=0)
    case.k = jnp.broadcast_to(case.k[:, :1], case.k.shape)
    case.g, case.beta = jnp.zeros_like(case.g), jnp.ones_like(case.beta)
    assert_matches(case, *run(case, implementation))


@pytest.mark.slow(
    reason="a scale or a norm that is applied twice; found by decays from one to zero there and "
    "by ops/kda/test_kda too"
)
@both_devices
def test_keys_that_are_no_unit_vectors_and_a_negative_scale(implementation):
    case = make([70], value_heads=1, gates=0.2)
    case.k = case.k * 0.125
    options = {"use_qk_l2norm": False, "scale": -0.3}
    out, states = run(case, implementation, **options)
    assert_matches(case, out, states, l2norm=False, scale=-0.3)


@slow_interpreted(
    "a state written to another slot; found by KDA's race detection over a pool and by the gated "
    "delta rule's slots too"
)
def test_states_by_slot_beside_padding(implementation):
    pooled = on_a_pool(
        make([66, 3, 0, 1], padding=3), [5, -1, 2, 0], [3, 4, 2, 0],
        [[1], [4], [4], [4]], num_slots=6, fresh=[3], dtype=jnp.bfloat16,
    )  # fmt: skip
    step = functools.partial(kda.kda_prefill, implementation=implementation, split_tokens=64)
    assert_pool_matches(pooled, *jax.jit(step)(**pooled.arguments))


def test_no_race_in_the_interpreter(monkeypatch):
    """With a checkpoint over the slot that the sequence started from, blocks that draw more runs
    than one, and decays from one to zero side by side."""
    monkeypatch.setattr(inter_chunk_launch, "NUM_SMS", 3)
    monkeypatch.setattr(kda_launch, "NUM_SMS", 2)
    case = with_decays_from_one_to_zero(make([0, 70], key_heads=4, value_heads=4))
    pooled = on_a_pool(case, [0, 2], [0, 3], [[-1], [2]], num_slots=4)
    live, (reads, writes) = jnp.ones(2, bool), jnp.array([[0, 2], [-1, 3]])
    pool = PrefillStatePool(
        pooled.pool, jnp.ones(1, jnp.int32), live, reads, writes, jnp.array(pooled.kept), 64
    )
    with no_races():
        out, new = jax.block_until_ready(
            at_once(
                gdn_prefill_mosaic, *pooled.case.args, cu_seqlens=pooled.case.cu_seqlens,
                pool=pool, segment=64, scale=128**-0.5, use_qk_l2norm=True,
                interpret=True,
            )
        )  # fmt: skip
    assert_pool_matches(pooled, out, new)
    assert_each_head(pooled.case, out, new[1, jnp.array([0, 3])])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "lens, heads, gates",
    [
        ([8192], 4, 0.01),
        ([8192], 4, 1.0),
        ([1300, 547, 2048, 963, 271, 63], 32, 0.1),
        ([70], 96, 1),
    ],
)
def test_many_chunks_on_a_gpu(lens, heads, gates, dtype):
    case = make(lens, key_heads=heads, value_heads=heads, gates=gates, dtype=dtype)
    first, again = (run(case, "mosaic_gpu") for _ in range(2))
    assert_matches(case, *first)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    whole = run(case, "mosaic_gpu", split_tokens=0)
    assert relative(whole[1], np.asarray(first[1], np.float64)) < BOUND


@pytest.mark.gpu
def test_the_norm_with_a_sigmoid_on_a_gpu():
    case = make([300, 200], key_heads=32, value_heads=32, padding=12)
    rng = np.random.default_rng(0)
    norm = kda.OutputNorm(
        gate=jnp.asarray(rng.normal(size=(1, 512, 32 * 128)), jnp.bfloat16),
        weight=jnp.asarray(rng.normal(size=128), jnp.float32),
    )
    step = functools.partial(kda.kda_prefill, cu_seqlens=case.cu_seqlens, output_norm=norm)
    pool, slots = case.initial_state, jnp.arange(2)
    ours, theirs = (
        jax.jit(functools.partial(step, implementation=each))(*case.args, pool, slots)
        for each in ("mosaic_gpu", "xla")
    )
    for found, expected in zip(ours, theirs, strict=True):
        assert relative(found, np.asarray(expected, np.float64)) < 1e-2
    assert (np.asarray(ours[0][:, 500:]) == 0).all()
