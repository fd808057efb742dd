"""The gated norm of whole sequences: its gradient's kernel against float64, and who computes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.dispatch import Refusal, kernels_untraced, traced_for_hopper
from jaxattn.core.numerics.rms_norm import gated_rms_norm
from jaxattn.kernels.gdn.gated_norm_gradient import gated_norm_gradient
from jaxattn.ops.gdn import gated_norm
from jaxattn.ops.gdn.gated_norm import gated_norm_of_sequences
from tests.helpers.draws import normals
from tests.helpers.kernel_cases import no_races, relative, slow

EPS = 1e-3
ON_BOTH = pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])


def operands(tokens, heads, more=0, dtype=jnp.bfloat16, weight_dtype=jnp.float32):
    """o, a projection that ends with z, the weight, and the gradient of the result."""
    draw = normals(tokens)
    o, gate = draw(tokens, heads, 128, scale=2), draw(tokens, more + heads * 128, scale=2)
    weight, of_y = draw(128, mean=1, scale=0.25), draw(tokens, heads, 128)
    return (
        *(each.astype(dtype) for each in (o, gate)),
        weight.astype(weight_dtype),
        of_y.astype(dtype),
    )


def expected(o, gate, weight, of_y, sigmoid=False):
    """The formulas of the kernel's docstring in float64."""
    o, gate, weight, of_y = (
        np.asarray(each).astype(np.float64) for each in (o, gate, weight, of_y)
    )
    z = gate[:, gate.shape[1] - o[0].size :].reshape(o.shape)
    inverse = 1 / np.sqrt((o * o).mean(-1, keepdims=True) + EPS)
    opened = 1 / (1 + np.exp(-z))
    factor = opened if sigmoid else z * opened
    slope = opened * (1 - opened) * (1 if sigmoid else z) + (0 if sigmoid else opened)
    normed, given = o * inverse, of_y * weight * factor
    of_o = inverse * (given - normed * (given * normed).mean(-1, keepdims=True))
    return of_o, of_y * normed * weight * slope, (of_y * factor * normed).sum((0, 1))


def compiled(sigmoid, interpret):
    kernel = functools.partial(gated_norm_gradient, eps=EPS, sigmoid=sigmoid, interpret=interpret)
    return jax.jit(kernel)


def check(found, wanted, dtype):
    rounding = {jnp.bfloat16: 3e-3, jnp.float16: 4e-4, jnp.float32: 1e-5}[dtype]
    for got, exact, most in zip(found, wanted, (rounding, rounding, 1e-5), strict=True):
        assert relative(got, exact) < most


@pytest.mark.slow_cases(
    reason="tokens of another round in one dtype; found by 135 tokens of bfloat16, and by fewer of "
    "each dtype there, too"
)
@ON_BOTH
@pytest.mark.parametrize(
    "tokens, heads, more, sigmoid, dtype",
    [
        *(
            (*sizes, dtype)
            for sizes in [(5, 8, 256, False), (1, 16, 0, True), (3, 3, 0, False), (2, 8, 64, True)]
            for dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        ),
        (135, 8, 0, False, jnp.bfloat16),
        slow(135, 8, 0, False, jnp.float16),
        slow(135, 8, 0, False, jnp.float32),
    ],
)
def test_the_kernel_matches_float64(tokens, heads, more, sigmoid, dtype, interpret):
    """Whole groups of heads in place, behind 64 columns and in groups that end with padding."""
    given = operands(tokens, heads, more, dtype)
    with no_races(when=interpret):
        found = compiled(sigmoid, interpret)(*given)
    assert [each.dtype for each in found] == [dtype, dtype, jnp.float32]
    check(found, expected(*given, sigmoid), dtype)


@ON_BOTH
def test_without_eps_the_padding_of_a_group_is_finite(interpret):
    kernel = functools.partial(gated_norm_gradient, eps=0.0, sigmoid=False, interpret=interpret)
    assert all(np.isfinite(each).all() for each in jax.jit(kernel)(*operands(5, 3)))


@pytest.mark.gpu
@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_layer_of_qwen_matches_float64_with_the_same_bits_twice(sigmoid):
    given = operands(8192, 32, 8192, weight_dtype=jnp.bfloat16)
    given = (given[0], given[1].at[:, :8192].set(jnp.nan), *given[2:])
    once, again = (compiled(sigmoid, False)(*given) for _ in range(2))
    check(once, expected(*given, sigmoid), jnp.bfloat16)
    for a, b in zip(once, again, strict=True):
        np.testing.assert_array_equal(a, b)


@ON_BOTH
def test_a_nan_reaches_its_own_row_and_the_weight(interpret):
    o, gate, weight, of_y = operands(9, 8)
    clean = compiled(False, interpret)(o, gate, weight, of_y)
    of_o, of_z, of_weight = compiled(False, interpret)(
        o.at[4, 2, 7].set(jnp.nan), gate, weight, of_y
    )
    assert (
        jnp.isnan(of_o[4, 2]).all() and jnp.isnan(of_z[4, 2]).all() and jnp.isnan(of_weight).all()
    )
    for found, wanted in zip((of_o, of_z), clean, strict=False):
        np.testing.assert_array_equal(found.at[4, 2].set(0), wanted.at[4, 2].set(0))


@pytest.mark.parametrize("shape", [(4, 8, 64), (0, 8, 128)])
def test_a_kernel_refuses_other_dims_and_no_tokens(shape):
    o = jnp.zeros(shape, jnp.bfloat16)
    gate, weight = o.reshape(shape[0], -1) if o.size else jnp.zeros((0, 1024)), jnp.ones(shape[2])
    with pytest.raises(Refusal, match="heads of 128 dims"):
        gated_norm_gradient(o, gate, weight, o, eps=EPS, interpret=True)


@pytest.fixture
def by_kernel(monkeypatch):
    """The op takes its kernel, in the interpreter."""
    interpreted = functools.partial(gated_norm_gradient, interpret=True)
    monkeypatch.setattr(gated_norm, "require_hopper", lambda *_, **__: None)
    monkeypatch.setattr(gated_norm, "gated_norm_gradient", interpreted)


def loss(norm, o, projection, weight):
    gate = projection[..., -o.shape[-1] * o.shape[-2] :]
    return jnp.square(norm(o, gate, projection, weight).astype(jnp.float32)).sum()


def by_op(o, gate, projection, weight):
    return gated_norm_of_sequences(o, gate, weight, eps=EPS, projection=projection)


def by_xla(o, gate, projection, weight):
    return gated_rms_norm(o, gate, weight, EPS)


@pytest.mark.parametrize("weight_dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_s_gradient_is_that_of_xla(by_kernel, weight_dtype):
    o, projection, weight, _ = operands(6, 8, 128, jnp.float32, weight_dtype)
    given = o.reshape(2, 3, 8, 128), projection.reshape(2, 3, -1), weight
    found, wanted = (
        jax.jit(jax.grad(functools.partial(loss, norm), argnums=(0, 1, 2)))(*given)
        for norm in (by_op, by_xla)
    )
    for got, exact, like in zip(found, wanted, given, strict=True):
        assert got.dtype == like.dtype
        assert relative(got, np.asarray(exact, np.float64)) < (
            1e-5 if got is not found[2] else 5e-3
        )
    assert not found[1][..., :128].any()


def test_each_element_of_a_vmap_has_its_own_gradient(by_kernel):
    o, projection, weight, _ = operands(4, 8, 0, jnp.float32)
    given = o[:, None], projection[:, None]
    gradient = jax.grad(lambda *each: loss(by_op, *each, weight), argnums=(0, 1))
    together = jax.jit(jax.vmap(gradient))(*given)
    for number in range(4):
        alone = jax.jit(gradient)(*(each[number] for each in given))
        for got, wanted in zip(together, alone, strict=True):
            assert relative(got[number], np.asarray(wanted, np.float64)) < 1e-5


def test_a_second_gradient_is_that_of_xla(by_kernel):
    o, projection, weight, _ = operands(1, 8, 0, jnp.float32)

    def second(norm, *given):
        first = jax.grad(functools.partial(loss, norm), argnums=(0, 1))
        return jax.grad(lambda *each: sum(jnp.square(g).sum() for g in first(*each)), (0, 1))(
            *given
        )

    found, wanted = (jax.jit(functools.partial(second, norm))(o, projection, weight)
                     for norm in (by_op, by_xla))  # fmt: skip
    for got, exact in zip(found, wanted, strict=True):
        assert relative(got, np.asarray(exact, np.float64)) < 1e-5


def test_forward_mode_works_without_a_hopper_gpu_and_is_refused_with_one():
    o, projection, weight, _ = operands(2, 8)
    forward = lambda o: by_op(o, projection, projection, weight)  # noqa: E731
    jax.jvp(forward, (o,), (o,))
    with traced_for_hopper(True), kernels_untraced(True):
        with pytest.raises(TypeError, match="gated_rms_norm has no forward-mode gradient of o"):
            jax.jit(lambda o: jax.jvp(forward, (o,), (o,))).lower(o)
