"""The loop over the repeats of a segment, and its repeats laid out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.models.looped import loop


@pytest.mark.parametrize(("repeats", "looped"), [(1, False), (2, False), (3, True)])
def test_few_repeats_are_laid_out_give_the_same_and_are_traced_once(monkeypatch, repeats, looped):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    stack = jnp.arange(1.0, 1 + 4 * repeats).reshape(repeats, 4)
    traced = []

    def body(carry, xs):
        traced.append(xs)
        following, weights = xs
        return carry * weights + following

    def of(laid_out):
        return jax.jit(lambda x: loop(repeats, body, x, (stack,), laid_out=laid_out))

    x = jnp.linspace(0.5, 1, 4)
    np.testing.assert_array_equal(of(2)(x), of(0)(x))
    traced.clear()
    lowered = of(2).lower(x)
    assert ("stablehlo.while" in lowered.as_text()) == looped
    assert len(traced) == 1
