"""A kernel that is launched again is made once, and another one is not taken for it."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mla
from jaxattn.core.dispatch import traced_for_hopper
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.build.trace_cache import cache_key, share_launches
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import RmsNormPrologueParams
from jaxattn.kernels.linear import linear, rms_norm
from jaxattn.ops.linear.rms_norm import rms_norm_layer

X = jax.ShapeDtypeStruct((2, 256), jnp.bfloat16)
WEIGHTS = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16)


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch):
    monkeypatch.setattr(rms_norm, "require_hopper", lambda *args, **kwargs: None)


def norm(x, weights, layer, eps=1e-6):
    return rms_norm.rms_norm_mosaic(x, weights, layer=layer, eps=eps, dtype=x.dtype)[1]


def kernels(step):
    """How many kernels a step is lowered to."""
    anew = jax.jit(lambda *given: step(*given))  # JAX keeps the trace of a function
    text = anew.trace(X, WEIGHTS).lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall("custom_call @mosaic_gpu", text))


def twice(x, weights, second=1e-6):
    return norm(norm(x, weights, 0), weights, 1, second)


def test_launches_of_one_kernel_are_one_within_it_alone():
    with share_launches():
        assert kernels(twice) == 1
    assert kernels(twice) == 2


def test_another_constant_in_the_body_is_another_kernel():
    with share_launches():
        assert kernels(functools.partial(twice, second=1e-5)) == 2


def test_a_norm_within_a_product_is_no_other_kernel_for_another_layer(monkeypatch):
    monkeypatch.setattr(linear, "require_hopper", lambda *args, **kwargs: None)
    weights = jax.ShapeDtypeStruct((2, 1024, 128), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((1, 1024), jnp.float32)

    def step(x, added, norms, weights):
        found = []
        for layer in range(2):
            normed = RmsNormPrologueParams(added=added, weights=norms, affine=(1, 0), eps=1e-6)
            y, x = linear.linears_mosaic(
                x, [weights], layer=layer, out_dtypes=[jnp.float32], norm=normed
            )
            found += [x, y]  # JAX lowers launches of which it uses other results apart
        return found

    def count():
        anew = jax.jit(lambda *given: step(*given))
        traced = anew.trace(row, row, jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16), weights)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return len(re.findall("custom_call @mosaic_gpu", text))

    with share_launches():
        assert count() == 1
    assert count() == 2


def test_steps_that_share_have_one_kernel_in_common():
    found, shared = set(), {}
    for step in (twice, lambda x, weights: norm(x, weights, 2)):
        with share_launches(shared):
            found |= {str(jax.make_jaxpr(step)(X, WEIGHTS).eqns[-1].params["jaxpr"])}
    assert len(shared) == 1 and len(found) == 1


def test_each_launch_has_its_own_operands():
    x = jax.random.normal(jax.random.key(0), X.shape, X.dtype)
    weights = jax.random.normal(jax.random.key(1), WEIGHTS.shape, WEIGHTS.dtype)

    def step(x, weights):
        named = functools.partial(rms_norm_layer, implementation="mosaic_gpu_interpret", eps=1e-6)
        return [named(x, weights, layer=layer) for layer in (2, 0)]

    with share_launches():
        got = jax.jit(step)(x, weights)
    for one, wanted in zip(got, jax.jit(step)(x, weights), strict=True):
        np.testing.assert_array_equal(one, wanted)
    assert not np.array_equal(*got)


def interpreted(body, layers=1):
    """A number of what the body writes."""
    out = launch(
        body,
        name="scaled",
        grid={"block": 1},
        inputs={"x_ref": jnp.ones((1, 128)), "weights_ref": jnp.ones((layers, 128))},
        outputs={"out_ref": jax.ShapeDtypeStruct((1, 128), jnp.float32)},
        interpret=True,
    )
    return out["out_ref"][0, 0]


def of_loop(*scales, layers=1):
    """Bodies that have one variable in common, whose last value is there once all are launched."""
    found = []
    for scale in scales:

        def body(x_ref, weights_ref, out_ref):
            out_ref[...] = x_ref[...] * scale  # noqa: B023

        found.append(interpreted(body, layers))
    return found


class Changing:
    def run(self, x_ref, weights_ref, out_ref):
        out_ref[...] = x_ref[...] * self.scale


def of_object(*scales):
    changing, found = Changing(), []
    for scale in scales:
        changing.scale = scale
        found.append(interpreted(changing.run))
    return found


def signed(zero):
    def body(x_ref, weights_ref, out_ref):
        out_ref[...] = jnp.copysign(x_ref[...], zero)

    return interpreted(body)


@pytest.mark.parametrize(
    "step, wanted",
    [
        pytest.param(lambda: of_loop(1.0, 2.0) + of_loop(1.0, layers=3), (1, 2, 1), id="variable"),
        pytest.param(lambda: of_object(1.0, 3.0), (1, 3), id="attribute"),
        pytest.param(lambda: (signed(0.0), signed(-0.0)), (1, -1), id="sign of zero"),
    ],
)
def test_each_launch_does_what_its_own_body_says(step, wanted):
    with share_launches():
        assert tuple(map(float, jax.jit(lambda: step())())) == wanted


@dataclasses.dataclass(frozen=True)
class Cut:
    tile: int
    scale: float | None = None

    def run(self):
        return self.tile


def body(cut, *, wide=False):
    return lambda ref, width=3: (cut, ref, width, wide)


def with_scale(scale):
    def held():
        return 0

    held.scale = scale
    return held


def elsewhere(function):
    return types.FunctionType(function.__code__, {})


@pytest.mark.parametrize(
    "one, other",
    [
        pytest.param(1, 1.0, id="a whole and a float"),
        pytest.param(1, True, id="a number and a boolean"),
        pytest.param(Cut(1), Cut(1, 0.5), id="one field of a dataclass"),
        pytest.param(Cut(1), Cut(True), id="a field's type"),
        pytest.param(body(Cut(1)), body(Cut(2)), id="what a function holds"),
        pytest.param(body(1), body(1, wide=True), id="the second thing that it holds"),
        pytest.param(body(1), lambda ref, width=3: (ref, width), id="a function's code"),
        pytest.param(Cut(1).run, Cut(2).run, id="a method's object"),
        pytest.param(functools.partial(body, 1), functools.partial(body, 2), id="partial"),
        pytest.param(
            functools.partial(body, wide=True), functools.partial(body, wide=False), id="keywords"
        ),
        pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, id="the order of a dict"),
        pytest.param(X, WEIGHTS, id="shapes"),
        pytest.param(0.0, -0.0, id="the sign of zero"),
        pytest.param(np.float32(0), np.float32(-0.0), id="the sign of NumPy's zero"),
        pytest.param(frozenset({1}), frozenset({True}), id="what is in a set"),
        pytest.param(with_scale(1), with_scale(2), id="a function's attribute"),
        pytest.param(elsewhere(norm), elsewhere(norm), id="a function's module"),
    ],
)
def test_what_differs_is_told_apart(one, other):
    assert cache_key(one) != cache_key(other)
    assert cache_key(one) == cache_key(one)


def test_what_is_made_anew_of_the_same_is_the_same():
    assert cache_key(body(Cut(1))) == cache_key(body(Cut(1)))
    assert cache_key(Cut(1).run) == cache_key(Cut(1).run)
    assert cache_key(Cut) == cache_key(Cut)
    assert cache_key([Cut(1), {"a": X}]) == cache_key(
        [Cut(1), {"a": jax.ShapeDtypeStruct(X.shape, X.dtype)}]
    )


def test_an_object_is_the_same_until_it_changes():
    one, other = Changing(), Changing()
    before = cache_key(one)
    assert cache_key(one) == before != cache_key(other)
    one.scale = 2.0
    assert cache_key(one) != before


def recursive():
    def run():
        return run

    return run


def early():
    def run():
        return later

    if not run:
        later = 1
    return run


@pytest.mark.parametrize(
    "value",
    [jnp.zeros(2), np.zeros(2), {1, 2}, recursive(), early()],
    ids=["jax", "numpy", "set", "recursive", "early"],
)
def test_what_cannot_be_told_is_not_shared(value):
    with pytest.raises(TypeError):
        cache_key(value)


def test_the_launches_of_two_layers_attention_are_two_kernels():
    """The attention, and what merges the parts of a row that is cut."""
    shape = jax.ShapeDtypeStruct
    cache, tables = shape((2, 64, 64, 576), jnp.bfloat16), shape((8, 16), jnp.int32)
    q, lens = shape((8, 1, 16, 576), jnp.bfloat16), shape((8,), jnp.int32)

    def step(q, cache, tables, lens):
        outs = (mla.mla_decode(q, cache, tables, lens, scale=1.0, layer=n)[0] for n in range(2))
        return sum(outs)

    with traced_for_hopper(True), share_launches():
        lowered = jax.jit(step).trace(q, cache, tables, lens).lower(lowering_platforms=("cuda",))
    calls = re.findall("custom_call @mosaic_gpu", lowered.as_text())
    assert len(calls) == 2
