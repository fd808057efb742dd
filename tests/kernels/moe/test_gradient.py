"""Gradients of a mixture of experts against float64: in the interpreter, and on a Hopper GPU.

The reference is dense: every expert multiplies every token, and a mask says whose result counts.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.dispatch import Refusal, traced_for_hopper
from jaxattn.core.numerics.swiglu import ClampedSwiGLU, swiglu
from jaxattn.kernels.moe.backward import activation_gradient, launch
from jaxattn.kernels.moe.backward.activation_gradient import swiglu_gradient
from jaxattn.kernels.moe.backward.launch import (
    ExpertOperands,
    forward_with_residuals,
    gradients,
)
from jaxattn.kernels.moe.backward.weight_gradient import (
    DEPTH,
    WeightGradientTileConfig,
    weight_gradient,
)
from jaxattn.kernels.moe.grouped_gemm_mainloop import neighbors
from jaxattn.kernels.moe.tile_config import choose
from jaxattn.moe import Router, mixture_of_experts, route
from jaxattn.ops.moe.routing import choose_experts
from tests.helpers.draws import normals
from tests.helpers.kernel_cases import both_devices, no_races, relative, slow_interpreted, x64
from tests.helpers.moe_cases import moe_case

CLAMPED = ClampedSwiGLU(alpha=1.702, limit=0.5)
NAMES = ("x", "weights", "gate_up", "down", "gate_up_bias", "down_bias")


@pytest.fixture
def small_tiles(monkeypatch):
    """Two stages and few blocks, which the interpreter's code repeats the body for."""
    short = {"stages": 2, "blocks": 2}
    of_product, of_weights = launch.product_config, WeightGradientTileConfig

    def cut_short(**sizes):
        config = choose(**sizes)
        both = {
            name: dataclasses.replace(getattr(config, name), **short)
            for name in ("gate_up", "down")
        }
        return dataclasses.replace(config, **both)

    monkeypatch.setattr(launch, "choose", cut_short)
    monkeypatch.setattr(
        launch, "product_config", lambda *sizes: dataclasses.replace(of_product(*sizes), **short)
    )
    monkeypatch.setattr(
        "jaxattn.kernels.moe.backward.weight_gradient.tile_config_of",
        lambda *sizes: of_weights(consumers=1, parts=1, columns=64, **short),
    )


def case(tokens, experts, top_k, *, chosen=None, biases=False, **sizes):
    """(operands in the order of NAMES, ids, the gradient of the output), of one layer."""
    made = moe_case(tokens, experts, top_k, layers=0, biases=biases, **sizes)
    x, ids, weights, gate_up, down = made[:5]
    ids = ids if chosen is None else jnp.broadcast_to(jnp.asarray(chosen, jnp.int32), ids.shape)
    ids = ids.at[0, 0].set(-1)
    beside = tuple(made[5].values()) if biases else (None, None)
    cotangent = jnp.asarray(np.random.default_rng(9).normal(size=x.shape), jnp.float32)
    return (x, weights, gate_up, down, *beside), ids, cotangent


def expected(operands, ids, cotangent, activation=None):
    """The gradients in float64, in the order of NAMES."""

    def total(x, weights, gate_up, down, gate_up_bias, down_bias):
        experts = jnp.arange(gate_up.shape[0])
        shares = jnp.where(ids[..., None] == experts, weights[..., None], 0).sum(1)
        both = jnp.einsum("tf,ejf->tej", x, gate_up)
        both = both if gate_up_bias is None else both + gate_up_bias
        h = (activation or swiglu)(*jnp.split(both, 2, axis=-1))
        y = jnp.einsum("tei,efi->tef", h, down)
        y = y if down_bias is None else y + down_bias
        return ((y * shares[..., None]).sum(1) * cotangent).sum()

    with x64():
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), operands)
        return jax.tree.map(np.asarray, jax.grad(total, argnums=tuple(range(6)))(*wide))


def found(operands, ids, cotangent, activation=None, implementation=None):
    def total(x, weights, gate_up, down, gate_up_bias, down_bias):
        y = mixture_of_experts(
            x, ids, weights, gate_up, down, gate_up_bias=gate_up_bias, down_bias=down_bias,
            activation=activation, implementation=implementation,
        )  # fmt: skip
        return (y * cotangent).sum()

    return jax.jit(jax.grad(total, argnums=tuple(range(6))))(*operands)


def assert_near(gradients, wanted, most):
    for name, gradient, exact in zip(NAMES, gradients, wanted, strict=True):
        if exact is not None:
            assert relative(gradient, exact) < most, name


CASES = {
    "an expert has no token": dict(tokens=9, experts=3, top_k=2, chosen=[0, 2]),
    "one expert has all": dict(tokens=70, experts=2, top_k=1, chosen=[1], width=128),
    "biases, clamped": dict(tokens=5, experts=3, top_k=2, features=320, biases=True),
}


@slow_interpreted(
    "a gradient of another expert; found by race detection of the same kernels, where an expert "
    "has no token, by the op's gradient in XLA there, and by the same test on a GPU, too"
)
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_float64(name, implementation, request):
    if implementation == "mosaic_gpu_interpret":
        request.getfixturevalue("small_tiles")
    sizes = CASES[name]
    made = case(**sizes)
    activation = CLAMPED if "biases" in sizes else None
    gradients = found(*made, activation, implementation)
    assert_near(gradients, expected(*made, activation), 1e-2)
    used = np.unique(made[1])
    for stack in gradients[2:4]:
        unused = np.setdiff1d(np.arange(len(stack)), used)
        assert not np.any(stack[unused])  # NaN neither
    assert not np.any(gradients[1][0, 0]) and np.all(np.any(gradients[1], axis=0))


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_xla_matches_float64(name):
    sizes = CASES[name]
    made = case(**sizes, dtype=jnp.float32)
    activation = CLAMPED if "biases" in sizes else None
    assert_near(found(*made, activation, "xla"), expected(*made, activation), 1e-4)


def test_no_race_and_nothing_of_padding_or_of_other_layers(small_tiles):
    """Padding tokens, their gradients and the other layer's weights are NaN; and two stages. An
    expert has no token."""
    operands, ids, cotangent = case(9, 3, 2, chosen=[0, 2])
    ids = ids.at[3].set(-1)
    x, weights, *stacks = operands[:4]
    poisoned = [x.at[3].set(jnp.nan), weights, *(jnp.stack([s * jnp.nan, s]) for s in stacks)]

    @jax.jit
    def run(x, weights, gate_up, down, cotangent):
        given = ExpertOperands(x, weights, gate_up, down, None, None)
        y, kept = forward_with_residuals(given, ids, layer=1, interpret=True)
        return y, gradients(kept, cotangent, interpret=True)

    with no_races():
        y, made = jax.block_until_ready(run(*poisoned, cotangent.at[3].set(jnp.nan)))
    assert not np.any(y[3]) and not np.any(made.x[3]) and not np.any(made.weights[3])
    wanted = expected(operands, ids, cotangent)
    assert_near((made.x, made.weights, made.gate_up[1], made.down[1], None, None), wanted, 1e-2)
    for stack in (made.gate_up, made.down):
        assert not np.any(stack[0]) and not np.any(stack[1, 1])


@pytest.mark.gpu
def test_the_forward_of_a_gradient_is_the_op():
    (x, weights, gate_up, down, *_), ids, _ = case(9, 3, 2)
    op = functools.partial(mixture_of_experts, implementation="mosaic_gpu")
    alone = jax.jit(op)(x, ids, weights, gate_up, down)
    y, _ = jax.jit(lambda *args: jax.vjp(lambda x: op(x, *args[1:]), args[0]))(
        x, ids, weights, gate_up, down
    )
    np.testing.assert_array_equal(y, alone)


@pytest.mark.gpu
@pytest.mark.large  # XLA's products take 22 GiB
@pytest.mark.parametrize("chosen", [None, [5, -1, -1, -1, -1, -1]])
def test_v2_lite_has_the_same_bits_twice(chosen):
    made = case(2048, 64, 6, features=2048, width=1408, chosen=chosen)
    first, second = (found(*made, implementation="mosaic_gpu") for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert_near(first, found(*made, implementation="xla"), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(192, 64), (256, 128), (128, 256), (128, 128), (64, 128)])
def test_each_tile_of_the_weights_gradient(shape):
    rng = np.random.default_rng(0)
    steps = np.array([3, 0, 1], np.int32)
    starts = (np.cumsum(steps) - steps) * DEPTH
    left, right = (
        jnp.asarray(rng.normal(size=(steps.sum() * DEPTH, size)), jnp.bfloat16) for size in shape
    )
    out = weight_gradient(left, right, jnp.asarray(starts), jnp.asarray(steps), name="test")
    for expert, (start, step) in enumerate(zip(starts, steps, strict=True)):
        some = slice(start, start + step * DEPTH)
        wanted = np.asarray(left[some], np.float64).T @ np.asarray(right[some], np.float64)
        np.testing.assert_allclose(out[expert], wanted, rtol=1e-2, atol=0.2)


def test_rounding_moves_nothing_across_a_limit():
    for limit in (7.0, 0.3):
        below, above = neighbors(limit, jnp.bfloat16)
        assert below < limit < above
        assert {below, above} == {float(jnp.bfloat16(below)), float(jnp.bfloat16(above))}
        assert above - below <= limit / 64


@pytest.mark.parametrize("scores, normalize", [("softmax", False), ("sigmoid", True)])
def test_the_router_gets_its_gradient_through_the_chosen_weights(scores, normalize):
    router = Router(experts=32, top_k=3, scores=scores, normalize=normalize)
    logits, factors = normals(0)(5, 32), normals(1)(5, 3)

    def total(logits, implementation):
        return (route(logits, None, router, implementation=implementation)[1] * factors).sum()

    kernel, xla = (
        jax.jit(jax.grad(total), static_argnums=1)(logits, name)
        for name in ("mosaic_gpu_interpret", "xla")
    )
    np.testing.assert_allclose(kernel, xla, rtol=1e-5, atol=1e-6)
    assert np.any(xla)


@pytest.mark.parametrize("halves", [False, True])
def test_the_router_and_the_gate_of_shared_experts_get_gradients(halves):
    """Of padding, the third token, they are 0."""
    router = Router(experts=32, top_k=2, scores="softmax", normalize=True)
    logits = normals(0)(4, 128 if halves else 33)
    factors = normals(1)(4, 3).at[2].set(0)
    valid = jnp.array([True, True, False, True])

    def total(logits, implementation):
        ids, weights, _ = choose_experts(
            logits, None, router, halves=halves, always=1, gated=True, valid=valid,
            implementation=implementation,
        )  # fmt: skip
        return (weights * factors).sum(), ids

    kernel, xla = (
        jax.jit(jax.grad(total, has_aux=True), static_argnums=1)(logits, name)
        for name in ("mosaic_gpu_interpret", "xla")
    )
    np.testing.assert_array_equal(kernel[1], xla[1])
    np.testing.assert_allclose(kernel[0], xla[0], rtol=1e-5, atol=1e-6)
    assert np.any(xla[0][:, 32]) and not np.any(kernel[0][2])


def test_fp8_weights_warn_that_xla_computes_the_gradient():
    x, ids, weights, gate_up, down, scales = moe_case(2, 2, 1, width=128, layers=0, fp8=True)

    def total(x):
        return mixture_of_experts(x, ids, weights, gate_up, down, **scales).sum()

    with traced_for_hopper(True), pytest.warns(UserWarning, match="no gradient with quantized"):
        jax.jit(jax.grad(total)).trace(x)


def test_a_gradient_of_a_gradient_is_refused():
    operands, ids, _ = case(2, 2, 1)

    def total(x):
        y = mixture_of_experts(
            x, ids, operands[1], *operands[2:4], implementation="mosaic_gpu_interpret"
        )
        return (y * y).sum()

    with pytest.raises(NotImplementedError, match="mixture_of_experts: the kernel has no gradient"):
        jax.eval_shape(
            jax.grad(lambda x: jax.grad(total)(x).sum().astype(jnp.float32)), operands[0]
        )


def test_what_the_forward_refuses_the_gradient_refuses():
    operands, ids, cotangent = case(2, 2, 1, features=32)
    with pytest.raises(Refusal, match="multiples of 64, got F = 32"):
        found(operands, ids, cotangent, implementation="mosaic_gpu_interpret")


def test_tokens_in_float64_have_a_gradient_in_float64():
    operands, ids, cotangent = case(2, 2, 1)
    with x64():
        x = jnp.asarray(np.asarray(operands[0], np.float64))
        given = (x, *operands[1:]), ids, cotangent
        made = jax.eval_shape(
            functools.partial(found, implementation="mosaic_gpu_interpret"), *given
        )
    assert made[0].dtype == np.float64


@both_devices
@pytest.mark.parametrize("room", [1024, 512, 256])
def test_the_gradient_of_swiglu_computes_what_xla_does(room, implementation, monkeypatch):
    """Rows of padding get zeros, whatever they have; strong gates neither overflow nor give NaN. A
    block has four rows, two or one."""
    monkeypatch.setattr(activation_gradient, "MOST_NUMBERS", room)
    rng, rows, width = np.random.default_rng(3), 8, 256
    of_h, saved = (
        jnp.asarray(rng.normal(size=(rows, n)), jnp.bfloat16) for n in (width, 2 * width)
    )
    saved = saved.at[0, :2].set(jnp.array([-200.0, 200.0], jnp.bfloat16)).at[5].set(jnp.nan)
    shares, taken = jnp.asarray(rng.normal(size=rows), jnp.float32), jnp.arange(rows) != 5
    interpret = implementation == "mosaic_gpu_interpret"
    kernel = functools.partial(swiglu_gradient, interpret=interpret)
    with no_races() if interpret else contextlib.nullcontext():
        found = jax.block_until_ready(jax.jit(kernel)(of_h, saved, shares, taken))
    wide = (each.astype(jnp.float32) for each in (of_h, saved))
    wanted = launch.through_activation(*wide, shares, taken, swiglu)
    for got, want, most in zip(found, wanted, (3e-3, 3e-3, 1e-5), strict=True):
        assert relative(got, want) < most and not got[5].any()
