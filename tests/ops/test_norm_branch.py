"""A residual stream and copies of its norm: their gradient's kernel against float64, and the op."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import nn
from jaxattn.core.dispatch import Refusal, kernels_untraced, traced_for_hopper
from jaxattn.core.numerics.rms_norm import rms_norm
from jaxattn.kernels.linear.rms_norm_gradient import rms_norm_gradient
from jaxattn.ops.linear import norm_branch
from jaxattn.ops.linear.norm_branch import rms_norm_branch
from tests.helpers.draws import normals
from tests.helpers.kernel_cases import no_races, relative

EPS = 1e-3
ON_BOTH = pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
ROUNDING = {jnp.bfloat16: 3e-3, jnp.float16: 4e-4, jnp.float32: 1e-5}


def operands(tokens, features, dtype=jnp.float32, weight_dtype=jnp.float32, of_y=jnp.bfloat16):
    """x, the weight, two gradients of the norm, and that of the stream."""
    draw = normals(tokens)
    x, weight = draw(tokens, features, scale=2), draw(features, mean=1, scale=0.25)
    given = [draw(tokens, features).astype(of_y) for _ in range(2)]
    return x.astype(dtype), weight.astype(weight_dtype), given, draw(tokens, features).astype(dtype)


def expected(x, weight, of_y, of_stream):
    """The formulas of the kernel's docstring in float64."""
    x, weight, of_y, of_stream = (
        np.asarray(each).astype(np.float64) for each in (x, weight, jnp.stack(of_y), of_stream)
    )
    of_y = of_y.sum(0)
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    normed, given = x * inverse, of_y * weight
    of_x = inverse * (given - normed * (given * normed).mean(-1, keepdims=True))
    return of_x + of_stream, (of_y * normed).sum(0)


def compiled(interpret, rounded_to=jnp.bfloat16):
    kernel = functools.partial(
        rms_norm_gradient, eps=EPS, rounded_to=rounded_to, interpret=interpret
    )
    return jax.jit(kernel)


def check(found, wanted, dtype):
    of_x, rounded, of_weight = found
    assert of_x.dtype == dtype and rounded.dtype == jnp.bfloat16
    assert relative(of_x, wanted[0]) < ROUNDING[dtype] and relative(of_weight, wanted[1]) < 1e-5
    assert relative(rounded, wanted[0]) < ROUNDING[jnp.bfloat16]


@ON_BOTH
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tokens, features", [(1, 128), (5, 512), (3, 320), (2, 5120), (530, 128)])
def test_the_kernel_matches_float64(tokens, features, dtype, interpret):
    """Also an odd multiple of 64 features, a wide row, and more tokens than CTAs."""
    given = operands(tokens, features, dtype)
    with no_races(when=interpret):
        found = compiled(interpret)(*given)
    check(found, expected(*given), dtype)


@ON_BOTH
def test_one_gradient_alone_and_no_other_dtype(interpret):
    x, weight, of_y, stream = operands(3, 256, jnp.bfloat16, jnp.bfloat16, jnp.float32)
    found = compiled(interpret, None)(x, weight, of_y[:1])
    wanted = expected(x, weight, of_y[:1], 0 * stream)
    assert found[1] is None
    assert relative(found[0], wanted[0]) < 3e-3 and relative(found[2], wanted[1]) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("features", [2048, 2880, 7168])
def test_a_layer_s_tokens_match_float64_with_the_same_bits_twice(features):
    given = operands(8191, features, weight_dtype=jnp.bfloat16)
    once, again = (compiled(False)(*given) for _ in range(2))
    check(once, expected(*given), jnp.float32)
    for a, b in zip(once, again, strict=True):
        np.testing.assert_array_equal(a, b)


@ON_BOTH
def test_a_nan_reaches_its_own_token_and_the_weight(interpret):
    x, *rest = operands(9, 256)
    clean = compiled(interpret)(x, *rest)
    of_x, _, of_weight = compiled(interpret)(x.at[4, 7].set(jnp.nan), *rest)
    assert jnp.isnan(of_x[4]).all() and jnp.isnan(of_weight).all()
    np.testing.assert_array_equal(of_x.at[4].set(0), clean[0].at[4].set(0))


@pytest.mark.parametrize("shape", [(2, 96), (2, 8192), (0, 128)])
def test_the_kernel_refuses_other_widths_and_no_tokens(shape):
    x = jnp.zeros(shape)
    with pytest.raises(Refusal, match="multiple of 64 features from 128 to 7168"):
        rms_norm_gradient(x, jnp.ones(shape[1]), [x], x, eps=EPS, interpret=True)


@pytest.fixture
def by_kernel(monkeypatch):
    """The op takes its kernel, in the interpreter."""
    interpreted = functools.partial(rms_norm_gradient, interpret=True)
    monkeypatch.setattr(norm_branch, "require_hopper", lambda *_, **__: None)
    monkeypatch.setattr(norm_branch, "rms_norm_gradient", interpreted)


def by_op(x, added, weight, gradient_dtype=None):
    return rms_norm_branch(
        x, weight, added=added, eps=EPS, readers=2, gradient_dtype=gradient_dtype
    )


def by_xla(x, added, weight):
    total = x if added is None else x + added
    return total, (rms_norm(total, weight, EPS),) * 2


def loss(branch, *given):
    """The stream's square, and functions of both copies, of which one is rounded."""
    total, (a, b) = branch(*given)
    a = a.astype(jnp.bfloat16).astype(jnp.float32)
    return (total.astype(jnp.float32) ** 2).sum() + (a**3).sum() + jnp.sin(b).sum()


def stacked(tokens=6, features=256, dtype=jnp.float32, weight_dtype=jnp.float32):
    x, weight, _, added = operands(tokens, features, dtype, weight_dtype)
    return x.reshape(2, -1, features), added.reshape(2, -1, features), weight


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("weight_dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_s_values_and_gradients_are_those_of_xla(by_kernel, weight_dtype, adds):
    x, added, weight = stacked(weight_dtype=weight_dtype)
    given = x, added if adds else None, weight
    argnums = (0, 1, 2) if adds else (0, 2)
    found, wanted = (
        jax.jit(jax.value_and_grad(functools.partial(loss, branch), argnums))(*given)
        for branch in (by_op, by_xla)
    )
    assert found[0] == wanted[0]
    for got, exact in zip(found[1], wanted[1], strict=True):
        assert got.dtype == exact.dtype
        most = 5e-3 if got.dtype == jnp.bfloat16 else 1e-5
        assert relative(got, np.asarray(exact, np.float64)) < most


def test_the_rounded_gradient_is_that_of_the_addend(by_kernel):
    x, added, weight = stacked()
    branch = functools.partial(by_op, gradient_dtype=jnp.bfloat16)
    of_x, of_added = jax.jit(jax.grad(functools.partial(loss, branch), argnums=(0, 1)))(
        x, added, weight
    )
    assert of_x.dtype == of_added.dtype == jnp.float32
    np.testing.assert_array_equal(of_added, of_x.astype(jnp.bfloat16).astype(jnp.float32))
    wanted = jax.grad(functools.partial(loss, by_xla))(x, added, weight)
    assert relative(of_x, np.asarray(wanted, np.float64)) < 3e-3


def test_a_scan_with_checkpoints_has_the_gradients_of_xla(by_kernel):
    x, added, weight = stacked()
    weights = jnp.stack([weight, weight + 0.5])

    def run(branch, weights, x):
        @jax.checkpoint
        def turn(x, weight):
            total, (a, b) = branch(x, None, weight)
            return total + jnp.sin(a) * b, None

        return jax.lax.scan(turn, x, weights)[0].sum()

    found, wanted = (jax.jit(jax.grad(functools.partial(run, branch), argnums=(0, 1)))(weights, x)
                     for branch in (by_op, by_xla))  # fmt: skip
    for got, exact in zip(found, wanted, strict=True):
        assert relative(got, np.asarray(exact, np.float64)) < 1e-5


def test_each_element_of_a_vmap_has_its_own_gradient(by_kernel):
    x, added, weight = stacked()
    gradient = jax.grad(lambda x, added: loss(by_op, x, added, weight), argnums=(0, 1))
    together = jax.jit(jax.vmap(gradient))(x, added)
    for number in range(2):
        alone = jax.jit(gradient)(x[number], added[number])
        for got, wanted in zip(together, alone, strict=True):
            assert relative(got[number], np.asarray(wanted, np.float64)) < 1e-5


def test_a_second_gradient_is_that_of_xla(by_kernel):
    x, _, weight = stacked(2, 128)

    def second(branch, x):
        first = jax.grad(lambda x: loss(branch, x, None, weight))
        return jax.grad(lambda x: jnp.square(first(x)).sum())(x)

    found, wanted = (jax.jit(functools.partial(second, branch))(x) for branch in (by_op, by_xla))
    assert relative(found, np.asarray(wanted, np.float64)) < 1e-5


def test_forward_mode_works_without_a_hopper_gpu_and_is_refused_with_one():
    x, added, weight = stacked()
    forward = lambda x: by_op(x, added, weight)  # noqa: E731
    jax.jvp(forward, (x,), (x,))
    with traced_for_hopper(True), kernels_untraced(True):
        with pytest.raises(TypeError, match="rms_norm_branch has no forward-mode gradient of x"):
            jax.jit(lambda x: jax.jvp(forward, (x,), (x,))).lower(x)


def test_the_norm_alone_keeps_forward_mode_on_a_hopper_gpu():
    norm, x = nn.RMSNorm(128), jnp.ones((2, 128))
    with traced_for_hopper(True):
        jax.jit(lambda x: jax.jvp(norm, (x,), (x,))).lower(x)


def test_a_branch_of_a_norm_has_the_norm_s_values():
    norm, x = nn.RMSNorm(96), normals(0)(2, 3, 96)
    total, (normed,) = norm.branch(x, x)
    np.testing.assert_array_equal(total, 2 * x)
    np.testing.assert_array_equal(normed, norm(2 * x))
    with pytest.raises(ValueError, match=r"added \(3, 96\) must have the shape of x \(2, 3, 96\)"):
        norm.branch(x, x[0])
