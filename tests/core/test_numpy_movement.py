"""What the suite moves by NumPy has the bits, the type and the place that XLA's program gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import compiler

from tests.helpers import numpy_movement

FLOATS = np.array([[np.nan, np.inf, 1e38, 1e-42], [65504, 65520, -0.0, 1.00390625]], np.float32)
NUMBERS = np.array([[300, -5], [2**31 - 1, -(2**31)]], np.int32)
MOVES = [
    (FLOATS, lambda x: x[1]),
    (FLOATS, lambda x: x[:, 1:3]),
    (FLOATS, lambda x: x[..., -1]),
    (FLOATS, lambda x: x[0, ::2]),
    (FLOATS, lambda x: lax.dynamic_slice(x, (5, -3), (1, 2))),
    (FLOATS, lambda x: x.reshape(4, 2)),
    (FLOATS, lambda x: lax.transpose(x, (1, 0))),
    (FLOATS, lambda x: lax.squeeze(x[None, :, :1], (0, 2))),
    (FLOATS, lambda x: lax.broadcast_in_dim(x, (3, 2, 4), (1, 2))),
    (FLOATS, lambda x: lax.concatenate([x, x], 1)),
    (FLOATS, lambda x: x.astype(jnp.bfloat16)),
    (FLOATS, lambda x: x.astype(jnp.float16)),
    (FLOATS, lambda x: x.astype(bool)),
    (FLOATS, lambda x: lax.bitcast_convert_type(x, jnp.int32)),
    (NUMBERS, lambda x: x.astype(jnp.int8)),
    (NUMBERS, lambda x: x.astype(jnp.float16)),
    (NUMBERS, lambda x: x.astype(jnp.float32)),
]


@pytest.mark.parametrize("bound", [False, True], ids=["free", "bound"])
def test_the_bits_are_xlas_and_nothing_is_compiled(bound, monkeypatch):
    device = jax.devices()[0] if bound else None
    given = [(jax.device_put(x, device), move) for x, move in MOVES]
    wanted = [jax.jit(move)(x) for x, move in given]
    monkeypatch.setattr(compiler, "backend_compile_and_load", None)
    for (x, move), expected in zip(given, wanted, strict=True):
        found = move(x)
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
        assert found.aval == expected.aval and found.committed == expected.committed == bound


def test_a_result_has_memory_of_its_own():
    x = jax.device_put(FLOATS)
    row = x[1]
    x.delete()
    np.testing.assert_array_equal(row, FLOATS[1])


def test_what_an_engine_moves_is_compiled():
    name = numpy_movement.COUNTED[2] + "some_step.py"
    assert "engine" in name
    called = {}
    exec(compile("def moved(x): return x[:3, 2:]", name, "exec"), called)
    made, real = [], compiler.backend_compile_and_load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "backend_compile_and_load", lambda *a: made.append(1) or real(*a))
        called["moved"](jnp.asarray(np.zeros((17, 19))))
    assert made
