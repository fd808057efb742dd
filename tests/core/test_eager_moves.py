"""What the suite computes by NumPy outside of `jax.jit` is what XLA computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU's suite replaces nothing")


def moved(x: jax.Array, at: jax.Array) -> dict[str, jax.Array]:
    return {
        "dynamic slice, cut at the end": jax.lax.dynamic_slice(x, (at, -at), (2, 3)),
        "slice": x[::2, 1:],
        "row": x[-1],
        "broadcast": jnp.broadcast_to(x[:, None], (4, 2, 5)),
        "reshape": x.reshape(-1),
        "transpose": x.T,
        "concatenate": jnp.concatenate([x, x], axis=1),
        **{str(dtype): x.astype(dtype) for dtype in ("float32", "float16", "bfloat16")},
    }


@CPU
def test_bits_and_dtypes_are_those_of_xla():
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32) * 1e5
    x[0, :4] = np.nan, np.inf, -0.0, 65519.0
    args = jnp.asarray(x), jnp.asarray(np.int32(3))
    compiled = jax.jit(moved)(*args)
    for name, found in moved(*args).items():
        assert (found.dtype, found.weak_type) == (compiled[name].dtype, False), name
        assert np.asarray(found).tobytes() == np.asarray(compiled[name]).tobytes(), name


@CPU
def test_results_own_their_memory_and_are_not_committed():
    memory = np.zeros(512, np.float32)  # what is aligned XLA would take as it is
    begin = -memory.ctypes.data % 64 // 4
    x = memory[begin : begin + 256].reshape(16, 16)
    found = jnp.asarray(x)
    x += 1
    assert not found.committed and not np.asarray(found).any()
    address = found.unsafe_buffer_pointer()
    assert jax.jit(lambda x: x + 1, donate_argnums=0)(found).unsafe_buffer_pointer() == address
    with pytest.raises(RuntimeError, match="deleted"):
        found[0]


@CPU
def test_64_bits_and_weak_types_stay_with_jax():
    assert jnp.asarray(np.arange(3)).dtype == jnp.int32
    assert jnp.asarray(2.0).weak_type and jnp.asarray(2.0)[None].weak_type
