"""What a rounding left is kept, on a GPU too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.cache.formats import KVFormat
from jaxattn.core.numerics.rounding_barrier import rounded
from jaxattn.ops.moe.router_logits import split_router

devices = pytest.mark.parametrize("device", ["any", pytest.param("gpu", marks=pytest.mark.gpu)])


@devices
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_the_way_back_is_another_number(dtype, device):
    x = jax.random.normal(jax.random.key(0), (4, 128))
    rest = jax.jit(lambda x: x - rounded(x, dtype).astype(jnp.float32))(x)
    exact = np.asarray(x) - np.asarray(x).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(rest, exact)
    assert np.count_nonzero(exact) > 400


@devices
def test_both_halves_of_a_router_are_there(device):
    router = jax.random.normal(jax.random.key(1), (64, 32))
    halves = np.asarray(jax.jit(split_router)(router), np.float64)
    high, low = np.split(halves, 2, axis=1)
    np.testing.assert_allclose((high + low)[:, :32], router, rtol=2**-16)
    assert not high[:, 32:].any() and not low[:, 32:].any()


@devices
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_keys_of_a_chunk_are_what_an_fp8_cache_returns(dtype, device):
    form, scale = KVFormat("fp8", 64), jnp.array([[0.5], [0.25]], jnp.float32)
    kv = jax.random.normal(jax.random.key(2), (16, 2, 1, 64), dtype)
    stored = np.asarray(form.pack(kv, scale))
    found = np.asarray(jax.jit(form.round_trip)(kv, scale))
    np.testing.assert_array_equal(found, form.unpack(jnp.asarray(stored), scale))
    assert np.count_nonzero(found != np.asarray(kv, np.float32)) > 1000
