"""What makes the suite quicker changes nothing that a test could see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.moved_by_numpy import move_by_numpy

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a CPU's tests")

X = np.linspace(-3, 3, 60, dtype=np.float32).reshape(3, 4, 5)


def moves(dtype):
    """Arrays that operations of their own make, outside of `jax.jit`."""
    x = jnp.asarray(X.astype(dtype))
    yield from (x, x[0], x[-1], x[1:, ..., None], x[:, ::2], x[::-1, 1:1], x[jnp.int32(2)])
    yield from (x.reshape(12, 5), x.T, x.transpose(2, 0, 1), jnp.expand_dims(x, 1), x.copy())
    yield from (jnp.concatenate([x, x], 1), jnp.stack([x, x], -1), *x)
    yield from (jnp.broadcast_to(x[:, :1], (2, 3, 4, 5)), jnp.full((3, 2), 1, dtype))
    yield from (jnp.zeros((0, 3), dtype), x.astype(jnp.float32), x.astype(jnp.bfloat16))
    yield jax.lax.dynamic_slice(x, (jnp.int32(2), -9, 3), (2, 2, 2))


def others():
    yield from (jnp.asarray(2), jnp.array(3.5)[None], jnp.broadcast_to(1.0, (3,)))
    yield from (jnp.asarray(np.arange(3)), jnp.asarray(np.float64(3)), jnp.asarray(X[:, ::-1]))
    with jax.enable_x64(True):
        yield from (jnp.asarray(np.arange(3))[1:], jnp.asarray(X.astype(np.float64))[0])


def every_array():
    yield from others()
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32, jnp.bool_):
        yield from moves(dtype)


def test_what_numpy_moves_is_what_jax_moves():
    of_jax = list(every_array())
    end = move_by_numpy()
    try:
        of_numpy = list(every_array())
    finally:
        end()
    for one, other in zip(of_numpy, of_jax, strict=True):
        assert (one.aval, one.sharding, one.committed) == (
            other.aval, other.sharding, other.committed,
        )  # fmt: skip
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_what_numpy_moved_has_memory_of_its_own_and_can_be_donated():
    given = np.zeros(4096, np.float32)
    end = move_by_numpy()
    try:
        whole, part = jnp.asarray(given), jnp.asarray(given)[64:2112]
        with pytest.raises(TypeError, match="cannot reshape array of shape"):
            part.reshape(7)
        gone = jnp.zeros(4)
        gone.delete()
        with pytest.raises(RuntimeError, match="deleted"):
            gone[1:]
    finally:
        end()
    change = jax.jit(lambda x: x.at[0].set(1), donate_argnums=0)
    for x in (whole, part):
        place = x.unsafe_buffer_pointer()
        assert place != given.ctypes.data
        changed = change(x)
        assert changed.unsafe_buffer_pointer() == place and x.is_deleted()
    assert not given.any()


def test_programs_of_the_same_text_are_compiled_once_and_others_apart(monkeypatch):
    from jax._src import compiler

    found = []
    once = compiler.backend_compile_and_load  # as tests/conftest.py has it
    monkeypatch.setattr(
        compiler,
        "backend_compile_and_load",
        lambda *given: found.append(once(*given)) or found[-1],
    )
    x = np.ones(3, np.float32)
    for factor in (7, 7, 8):
        y = np.asarray(jax.jit(lambda x, by=factor: x * by + 0.125)(x))
        np.testing.assert_array_equal(y, factor + 0.125)
    told = []
    for name in ("one", "other"):  # programs that call back differ by their functions
        jax.jit(lambda x, name=name: jax.debug.callback(lambda _: told.append(name), x))(x)
    jax.effects_barrier()
    one, again, other = found[:3]
    assert one is again and other is not one
    assert told == ["one", "other"]
