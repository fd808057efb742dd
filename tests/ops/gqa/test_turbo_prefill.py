"""Prompts over a TurboQuant cache by the kernel that reads prompts, a block of tokens at a time."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxattn.core.turboquant import HEAD_DIMS, PRESETS, TurboFormat
from jaxattn.ops.gqa import turbo_prefill
from jaxattn.ops.gqa.turbo_prefill import UNPACKED_BYTES
from jaxattn.ops.gqa.turboquant import turbo_attention
from tests.helpers.kernel_cases import both_devices, slow
from tests.helpers.turbo_cancel import SCORE, cancelling_case, crafted
from tests.helpers.turbo_cases import assert_turbo_close, turbo_case, turbo_oracle
from tests.helpers.turbo_outliers import bounds_of_rounded_keys, outlier_case

pytestmark = pytest.mark.filterwarnings("ignore:the cache format:UserWarning")
traced = jax.jit(turbo_attention, static_argnames=("form", "window", "soft_cap", "implementation"))
# Keys, values and weights in float16.
BOUNDS = {"error": 4e-3, "lse_error": 4e-3}


def attend(case, implementation):
    return traced(
        *case.args, form=case.form, layer=case.layer, implementation=implementation, **case.options
    )


@both_devices
@pytest.mark.parametrize(
    "lens, preset, options",
    [
        ([150, 0, 20], "4bit_nc", dict(q_len=20, query_lens=[20, 5, 9], gate=True)),
        ([140, 9], "k8v4", dict(q_len=9, window=40, sinks=True, page=32)),
    ],
)
def test_blocks_are_one_softmax(lens, preset, options, implementation, monkeypatch):
    """Of blocks of 64 tokens; a row without tokens, and windows that begin within a block."""
    monkeypatch.setattr(turbo_prefill, "LEAST_BLOCK", 64)
    monkeypatch.setattr(turbo_prefill, "UNPACKED_BYTES", 1)
    turbo_prefill.turbo_prefill_mosaic.clear_cache()
    case = turbo_case(lens, preset, group=2, kv_heads=1, **options)
    assert_turbo_close(case, *attend(case, implementation), **BOUNDS)
    turbo_prefill.turbo_prefill_mosaic.clear_cache()


@pytest.mark.sampled
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("preset", PRESETS)
def test_values_that_cancel(preset, dim):
    """A key of an eighth of the weight, whose score is above 6; nothing is left of the values but
    a 24th and what quantization adds to it. XLA rounds the output alone."""
    case = cancelling_case([150, 64], preset, q_len=9, group=2, kv_heads=2, dim=dim)
    expected, lse = turbo_oracle(case)
    lengths = np.linalg.norm(crafted(case, expected), axis=-1)
    assert (lengths < 0.15 * dim**0.5).all() and (crafted(case, lse) > SCORE).all()
    assert_turbo_close(case, *attend(case, "xla"), error=4e-3)


@both_devices
@pytest.mark.parametrize(
    "preset, dim, page",
    [
        ("k3v4_nc", 128, 64),
        ("4bit_nc", 64, 32),
        *(slow(preset, dim, 64) for preset in PRESETS for dim in HEAD_DIMS),
        slow("3bit_nc", 256, 16),
    ],
)
def test_the_kernel_of_values_that_cancel(preset, dim, page, implementation):
    """Pages of whole steps have a kernel that unpacks them."""
    case = cancelling_case([150, 64], preset, q_len=9, group=2, kv_heads=2, dim=dim, page=page)
    assert_turbo_close(case, *attend(case, implementation), **BOUNDS)


@both_devices
@pytest.mark.parametrize(
    "preset, dim, size, error",
    [
        ("4bit_nc", 64, 12, 1e-2),
        slow("4bit_nc", 64, 6, 4e-3),
        slow("k3v4_nc", 128, 12, 6e-3),
        slow("3bit_nc", 256, 12, 4e-3),
        slow("k8v4", 64, 12, 4e-3),
    ],
)
def test_a_dim_far_from_zero(preset, dim, size, error, implementation):
    """What docs/caches.md says of such keys: a score's bound, and the errors of usual values."""
    case = outlier_case([150, 64], preset, size, q_len=9, group=2, kv_heads=2, dim=dim)
    out, lse = attend(case, implementation)
    expected, expected_lse = turbo_oracle(case)
    of_scores, of_results = bounds_of_rounded_keys(case)
    off = abs(np.asarray(out, np.float64) - expected)
    # The result is bfloat16; sums in float32.
    assert (off <= of_results + 2**-8 * abs(expected) + 1e-5).all()
    assert (abs(np.asarray(lse, np.float64) - expected_lse) <= of_scores + 4e-5).all()
    assert_turbo_close(case, out, lse, error=error, lse_error=1e-2)


def test_the_block_is_bounded_whatever_the_context():
    """No intermediate is larger than a block of unpacked float32 keys and values, of 131,072."""
    form = TurboFormat(preset="4bit_nc", head_dim=64)

    def op(q, cache, tables, lens):
        return turbo_attention(
            q, cache, tables, lens, form=form, implementation="mosaic_gpu_interpret"
        )

    shapes = [((1, 16, 32, 64), jnp.bfloat16), ((2048, 8, 64 * form.slot_bytes), jnp.uint8)]
    shapes += [((1, 2048), jnp.int32), ((1,), jnp.int32)]
    sizes = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            sizes.extend(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in eqn.outvars)
            for inner in jaxprs_in_params(eqn.params):
                walk(inner)

    walk(jax.make_jaxpr(op)(*(jax.ShapeDtypeStruct(*each) for each in shapes)).jaxpr)
    assert UNPACKED_BYTES <= max(sizes) <= 2 * UNPACKED_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "lens, group, kv_heads, dim, options",
    [
        ([4096, 2048], 4, 8, 128, dict(q_len=2048)),
        ([3000, 0, 700], 8, 2, 256, dict(q_len=300, gate=True, query_lens=[300, 0, 17])),
        ([2500, 129], 8, 8, 64, dict(q_len=100, sinks=True, window=128)),
        # One cached token, a page less one, a page; and a row that decodes.
        ([128, 191, 193, 700], 4, 2, 128, dict(q_len=129, query_lens=[127, 128, 129, 1])),
    ],
)
def test_real_shapes(lens, group, kv_heads, dim, options, preset):
    case = turbo_case(
        lens, preset, group=group, kv_heads=kv_heads, dim=dim, layers=1, layer=0, **options
    )
    assert_as_exact(case, *attend(case, "mosaic_gpu"))


def assert_as_exact(case, out, lse):
    """Each row against XLA's with float32 queries, whose output is not rounded."""
    wide = dataclasses.replace(case, q=case.q.astype(jnp.float32))
    expected, expected_lse = map(np.asarray, attend(wide, "xla"))
    seen = ~np.isneginf(np.asarray(lse))
    np.testing.assert_array_equal(seen, ~np.isneginf(expected_lse))
    np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=BOUNDS["lse_error"])
    some, other = (np.asarray(x, np.float32)[seen] for x in (out, expected))
    error = np.linalg.norm(some - other, axis=-1) / np.linalg.norm(other, axis=-1)
    assert error.max() < BOUNDS["error"] and (np.asarray(out)[~seen] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("preset", PRESETS)
def test_values_that_cancel_in_real_shapes(preset, dim):
    case = cancelling_case(
        [4096, 2048, 700, 20_000], preset, q_len=40, group=4, kv_heads=8, dim=dim, layers=1, layer=0
    )
    assert_as_exact(case, *attend(case, "mosaic_gpu"))
