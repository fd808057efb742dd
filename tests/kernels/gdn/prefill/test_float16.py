"""The delta rule's prefill kernels in float16, at the sizes of a GPU, against float64."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxattn.ops.gdn.prefill import gated_delta_rule_prefill
from tests.helpers.gdn_prefill_cases import (
    BOUND,
    assert_matches,
    assert_pool_matches,
    make_case,
    on_a_pool,
    oracle,
    run,
)
from tests.helpers.kernel_cases import relative

pytestmark = pytest.mark.gpu

LENS = [1, 300, 0, 64, 659]  # 1024 tokens
heads = pytest.mark.parametrize("value_heads", [4, 8])
splits = pytest.mark.parametrize("split_tokens", [0, 256])


def make(value_heads, **options):
    assert sum(LENS) == 1024
    return make_case(
        LENS, key_heads=2, value_heads=value_heads, dtype=jnp.float16, gates=0.05, **options
    )


@heads
@splits
def test_packed_sequences(value_heads, split_tokens):
    case = make(value_heads)
    out, states = run(case, "mosaic_gpu", split_tokens=split_tokens)
    assert out.dtype == jnp.float16 and states.dtype == jnp.float32
    assert_matches(case, out, states)
    expected, finals = oracle(case)
    for head in range(value_heads):
        assert relative(out[:, : case.tokens, head], expected[:, :, head]) < BOUND
        assert relative(states[:, head], finals[:, head]) < BOUND


@heads
@splits
def test_rows_that_are_normalized_already(value_heads, split_tokens):
    """One sequence without offsets, and keys that the kernel takes as they are."""
    case = make_case(
        [1024], key_heads=2, value_heads=value_heads, dtype=jnp.float16, gates=0.05, padding=0
    )
    norm = lambda x: x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)  # noqa: E731
    case.q, case.k = (norm(x).astype(jnp.float16) for x in (case.q, case.k))
    out, states = run(case, "mosaic_gpu", split_tokens=split_tokens, use_qk_l2norm=False)
    assert_matches(case, out, states, l2norm=False)


@heads
@splits
def test_states_by_slot(value_heads, split_tokens):
    """Shuffled slots, one fresh sequence, one of padding, and checkpoints of two."""
    kept = [[-1] * 5, [9, 3, -1, -1, -1], [-1] * 5, [-1] * 5, [4, -1, 8, 6, 10]]
    pooled = on_a_pool(
        make(value_heads, padding=3), [11, 0, 2, -1, 7], [11, 1, 2, 5, 7], kept, num_slots=12,
        every=128, fresh=[4],
    )  # fmt: skip
    options = dict(split_tokens=split_tokens, implementation="mosaic_gpu")
    step = functools.partial(gated_delta_rule_prefill, **options)
    assert_pool_matches(pooled, *jax.jit(step)(**pooled.arguments))
