"""The chunked form over the shapes and gates that others test theirs with, against float64.

FLA's tests/ops/test_gdn.py, FlashQLA's, FlashKDA's, tpu-inference's and SGLang-JAX's KDA tests.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn
from tests.helpers.gdn_prefill_cases import BOUND, Case, assert_matches, oracle
from tests.helpers.kernel_cases import relative


def make(lens, key_heads, value_heads, dim=128, norm=1.0, masked=0.0, dtype="bfloat16"):
    """Sequences side by side. g = logsigmoid(normal) / norm, and 0 in as many places as `masked`
    says."""
    rng = np.random.default_rng(0)
    count, tokens = len(lens), sum(lens)

    def draw(*shape):
        return rng.normal(size=(1, tokens, *shape))

    # As long as 1, as these tests have them who do not ask for that inside.
    q, k = (draw(key_heads, dim) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -np.logaddexp(0.0, -draw(value_heads)) / norm
    g *= rng.uniform(size=g.shape) >= masked
    return Case(
        *(jnp.asarray(x, dtype) for x in (q, k, draw(value_heads, dim))),
        jnp.asarray(g, jnp.float32),
        jnp.asarray(rng.uniform(size=g.shape), jnp.float32),
        jnp.asarray(rng.normal(size=(count, value_heads, dim, dim)), jnp.float32),
        jnp.asarray(np.cumsum([0, *lens]), jnp.int32),
        tokens,
    )


def run(case, rows, implementation, **options):
    """The op on so many rows of one length, or on what is packed (None)."""
    step = functools.partial(
        gdn.chunk_gated_delta_rule,
        implementation=implementation,
        initial_state=case.initial_state,
        output_final_state=True,
        **options,
    )
    if rows is None:
        return jax.jit(functools.partial(step, cu_seqlens=case.cu_seqlens))(*case.args)
    out, states = jax.jit(step)(*(x.reshape(rows, -1, *x.shape[2:]) for x in case.args))
    return out.reshape(1, -1, *out.shape[2:]), states


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows, length, key_heads, value_heads, values, l2norm, scale",
    [
        (4, 1024, 4, 4, {}, True, 0.1),
        (4, 1024, 4, 4, dict(masked=1.0), False, 0.1),
        (2, 1500, 4, 4, dict(norm=10.0), False, 0.1),
        (2, 1024, 4, 8, dict(norm=0.01), False, 128**-0.5),
        (2, 1024, 4, 8, dict(dtype="float16"), False, 0.1),
        (1, 1024, 4, 4, {}, False, 128**-0.5),
        (2, 2048, 8, 8, {}, False, 128**-0.5),
        (1, 4096, 16, 16, {}, False, 128**-0.5),
        (1, 1024, 2, 8, {}, False, 128**-0.5),
        (2, 2048, 4, 16, {}, False, 128**-0.5),
    ],
)
def test_rows_of_one_length(rows, length, key_heads, value_heads, values, l2norm, scale):
    case = make([length] * rows, key_heads, value_heads, **values)
    out, states = run(case, rows, "mosaic_gpu", use_qk_l2norm=l2norm, scale=scale)
    assert_matches(case, out, states, l2norm=l2norm, scale=scale)


def mixed(count, tokens):
    """So many lengths, of which every third is 0."""
    rng = np.random.default_rng(1)
    ends = np.sort(rng.choice(tokens, count - count // 3 - 1, replace=False))
    lens = np.diff(np.concatenate([[0], ends, [tokens]]))
    return np.insert(lens, np.arange(count // 3) * 2 + 1, 0).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lens, value_heads, masked",
    [
        ([15], 4, 0.0),
        ([256, 244, 500], 4, 0.0),
        ([256, 244, 500], 8, 0.5),
        ([15, 85, 200, 900, 800], 8, 0.0),
        ([31, 65, 64], 8, 0.0),
        ([100, 200, 900, 1800, 1096], 8, 0.0),
        ([1300, 547, 2048, 963, 271, 3063], 8, 0.0),
        ([256, 128, 128], 8, 0.0),
        ([1] * 64, 8, 0.0),
        ([8192], 8, 0.5),
        (mixed(33, 32768), 4, 0.0),
    ],
)
def test_packed_sequences(lens, value_heads, masked):
    case = make(lens, 2, value_heads, masked=masked)
    out, states = run(case, None, "mosaic_gpu", use_qk_l2norm=True)
    assert_matches(case, out, states)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype, bound", [("float32", 1e-5), ("bfloat16", BOUND)])
@pytest.mark.parametrize(
    "rows, length, heads, dim, gates",
    [
        (2, 75, 4, 64, dict(norm=0.01)),
        (2, 500, 3, 60, {}),
        (2, 1000, 3, 64, dict(masked=0.5)),
        (3, 1024, 4, 100, dict(norm=0.1)),
        (1, 2048, 4, 128, dict(masked=1.0)),
    ],
)
def test_widths_that_xla_runs(rows, length, heads, dim, gates, dtype, bound):
    case = make([length] * rows, heads, heads, dim, dtype=dtype, **gates)
    out, states = run(case, rows, "xla")
    expected, expected_states = oracle(case, l2norm=False, scale=dim**-0.5)
    assert relative(out, expected) < bound
    assert relative(states, expected_states) < bound


def test_mixed_lengths():
    lens = mixed(33, 32768)
    assert len(lens) == 33 and sum(lens) == 32768 and min(lens) == 0 < lens[0]
