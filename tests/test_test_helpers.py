"""What makes the suite quicker changes nothing that a test could see."""

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a CPU's tests")


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
