"""Mixture of experts: routing as it is published, and a sum over experts as a loop computes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.arena import Arena
from jaxattn.core.layer_index import LayerIndex
from jaxattn.moe import Router, mixture_of_experts, route, scratch
from jaxattn.nn import MixtureOfExperts
from jaxattn.ops.moe.router_logits import router_products, split_router, sum_split_logits
from tests.helpers.at_once import at_once
from tests.helpers.draws import normals
from tests.helpers.moe_cases import expected, moe_case

V2_LITE = Router(experts=8, top_k=3, scores="softmax")
V2 = Router(experts=12, top_k=3, scores="softmax", groups=4, top_groups=2, scale=16.0)
V3 = Router(
    experts=16, top_k=4, scores="sigmoid", groups=4, top_groups=2, best_of_group=2,
    normalize=True, scale=2.5,
)  # fmt: skip
QWEN = Router(experts=10, top_k=4, scores="softmax", normalize=True)
routers = pytest.mark.parametrize(
    "router", [V2_LITE, V2, V3, QWEN], ids=["v2-lite", "v2", "v3", "qwen"]
)


def routed(logits, bias, router):
    """One token after another, in float64, as checkpoints' own code does it."""
    ids, weights = [], []
    for row in np.asarray(logits, np.float64):
        exp = np.exp(row - row.max())
        scores = exp / exp.sum() if router.scores == "softmax" else 1 / (1 + np.exp(-row))
        choice = scores + (0 if bias is None else np.asarray(bias, np.float64))
        size = router.experts // router.groups
        groups = [sorted(choice[g * size : (g + 1) * size])[::-1] for g in range(router.groups)]
        totals = [sum(group[: router.best_of_group]) for group in groups]
        kept = sorted(range(router.groups), key=lambda g: -totals[g])[: router.top_groups]
        allowed = [e for e in range(router.experts) if e // size in kept]
        best = sorted(allowed, key=lambda e: -choice[e])[: router.top_k]
        taken = scores[best] / (scores[best].sum() if router.normalize else 1)
        ids.append(best), weights.append(taken * router.scale)
    return np.array(ids), np.array(weights)


@pytest.mark.sampled
@routers
def test_tokens_choose_as_a_loop_over_them_does(router):
    draw = normals(1)
    logits = draw(50, router.experts, scale=2)
    bias = draw(router.experts) if router.scores == "sigmoid" else None
    ids, weights = at_once(route, logits, bias, router)
    wanted_ids, wanted = routed(logits, bias, router)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(weights, wanted, rtol=1e-5)
    assert (ids.dtype, weights.dtype) == (jnp.int32, jnp.float32)


def test_the_bias_chooses_and_does_not_weigh():
    router = Router(experts=4, top_k=1, scores="sigmoid")
    ids, weights = route(jnp.array([[3.0, 0.0, 0.0, 0.0]]), jnp.array([0.0, 0.0, 9.0, 0.0]), router)
    assert ids.tolist() == [[2]] and weights[0, 0] == jax.nn.sigmoid(0.0)


def case(tokens=7, experts=5, top=2, **options):
    sizes = dict(features=6, width=4, layers=0, dtype=jnp.float32)
    return moe_case(tokens, experts, top, **(sizes | options))


@pytest.mark.parametrize("experts, top", [(5, 2), (8, 1), (3, 3)])
def test_the_sum_over_the_chosen_experts(experts, top):
    args = case(experts=experts, top=top)
    found = at_once(mixture_of_experts, *args)
    np.testing.assert_allclose(found, expected(*args), rtol=2e-5, atol=2e-5)


def test_of_fp8_weights_each_block_has_its_scale():
    *args, scales = case(features=256, width=192, fp8=True)
    y = at_once(mixture_of_experts, *args, **scales)
    np.testing.assert_allclose(y, expected(*args, **scales), rtol=2e-4, atol=2e-4)


def test_a_layer_of_a_stack():
    x, ids, weights, gate_up, down = case(layers=3)
    own = at_once(mixture_of_experts, x, ids, weights, gate_up[2], down[2])
    by_number = at_once(mixture_of_experts, x, ids, weights, gate_up, down, layer=2)
    traced = jax.jit(
        lambda n: mixture_of_experts(x, ids, weights, gate_up, down, layer=LayerIndex(n, 2, 0))
    )(1)
    np.testing.assert_array_equal(by_number, own)
    np.testing.assert_allclose(traced, own, rtol=1e-6)


def test_an_id_of_no_expert_adds_exactly_nothing():
    x, ids, weights, gate_up, down = case()
    some = ids.at[2].set(-1).at[4, 1].set(5)
    y = at_once(mixture_of_experts, x, some, weights, gate_up, down)
    assert not np.asarray(y[2]).any()
    np.testing.assert_allclose(y, expected(x, some, weights, gate_up, down), rtol=2e-5, atol=2e-5)


def test_a_nan_in_a_token_stays_in_that_token():
    x, *rest = case()
    run = jax.jit(mixture_of_experts)
    clean, found = (np.asarray(run(each, *rest)) for each in (x, x.at[2].set(jnp.nan)))
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(clean, 2, 0))


def test_a_token_does_not_depend_on_the_others():
    args = [np.asarray(each) for each in case(tokens=9)]
    together = jax.jit(mixture_of_experts)(*args)
    of_one = jax.jit(mixture_of_experts)
    for row in range(9):
        alone = of_one(*(each[row : row + 1] for each in args[:3]), *args[3:])
        np.testing.assert_allclose(alone[0], together[row], rtol=1e-6, atol=1e-6)


def dense(x, ids, weights, gate_up, down):
    """Every expert of every token, and those not chosen times 0."""
    share = (jax.nn.one_hot(ids, gate_up.shape[0]) * weights[..., None]).sum(1)
    gate, up = jnp.split(jnp.einsum("tf,ejf->tej", x, gate_up), 2, axis=-1)
    return jnp.einsum("tei,efi,te->tf", jax.nn.silu(gate) * up, down, share)


def test_the_gradient_is_that_of_the_dense_sum():
    args = case()
    rest = args[1]

    def loss(function):
        return lambda x, weights, *matrices: (function(x, rest, weights, *matrices) ** 2).sum()

    operands = (args[0], *args[2:])
    with jax.default_matmul_precision("highest"):
        found, wanted = (
            jax.jit(jax.grad(loss(f), argnums=range(4)))(*operands)
            for f in (mixture_of_experts, dense)
        )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shared", [6, 8])  # as wide as one and a half experts, and as two
def test_a_module_routes_adds_the_shared_experts_and_trains(shared):
    def computed():
        module = MixtureOfExperts(
            6, 4, V3, shared_size=shared, dtype="float32", out_init_scale=0.5, rngs=nnx.Rngs(0)
        )
        x = normals(2)(2, 5, 6)
        flat = x.reshape(-1, 6)
        logits = jnp.matmul(flat, module.router[...], precision="highest")
        ids, weights = route(logits, module.correction_bias[...], V3)
        gate_up, down = module.gate_up_proj[...], module.down_proj[...]
        assert module.has_shared == (shared == 6) and len(down) == 16 + (0 if shared == 6 else 2)
        with jax.default_matmul_precision("highest"):
            wanted = dense(flat, ids, weights, gate_up, down)
            if module.has_shared:
                wanted += module.shared(flat)
            else:  # the last two of the stack are one MLP of 8 columns
                gate, up = gate_up[16:].reshape(2, 2, 4, 6).swapaxes(0, 1).reshape(2, 8, 6)
                wide = down[16:].swapaxes(0, 1).reshape(6, 8)
                wanted += (jax.nn.silu(flat @ gate.T) * (flat @ up.T)) @ wide.T
        grads = nnx.grad(lambda module: (module(x) ** 2).mean())(module)
        trained = grads["router"][...], grads["down_proj"][...][-1]
        return module(x), wanted.reshape(x.shape), trained

    y, wanted, trained = at_once(computed)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    assert all(map(np.any, trained))


SOFTMAX = Router(experts=16, top_k=3, scores="softmax", normalize=True)


@pytest.mark.parametrize("shared", [6, 8])
def test_a_gate_opens_the_shared_experts_of_each_token(shared):
    """The module without them, and they alone, times a sigmoid of the token."""

    def computed():
        sizes = dict(dtype="float32", rngs=nnx.Rngs(0))
        module = MixtureOfExperts(6, 4, SOFTMAX, shared_size=shared, shared_gate=True, **sizes)
        x = normals(2)(2, 5, 6)
        flat, gate = x.reshape(-1, 6), module.shared_gate[...]
        logits = jnp.matmul(flat, module.router[...], precision="highest")
        ids, weights = route(logits, None, SOFTMAX)
        gate_up, down = module.gate_up_proj[...], module.down_proj[...]
        with jax.default_matmul_precision("highest"):
            routed = dense(flat, ids, weights, gate_up, down)
            if module.has_shared:
                alone = module.shared(flat)
            else:
                both = jnp.broadcast_to(jnp.array([16, 17], ids.dtype), (10, 2))
                alone = dense(flat, both, jnp.ones((10, 2)), gate_up, down)
            wanted = routed + jax.nn.sigmoid(flat @ gate) * alone
        grads = nnx.grad(lambda module: (module(x) ** 2).mean())(module)
        return module(x), wanted.reshape(x.shape), grads["shared_gate"][...]

    y, wanted, trained = at_once(computed)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    assert np.any(trained)


def test_a_gate_without_shared_experts_is_refused():
    with pytest.raises(ValueError, match="shared_gate=True needs a shared_size above 0"):
        MixtureOfExperts(6, 4, SOFTMAX, shared_gate=True, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_gate_is_a_column_behind_the_routers(tokens):
    draw = normals(4)
    x = draw(tokens, 64, dtype=jnp.bfloat16)
    routers, gates = draw(2, 64, 24), draw(2, 64, 1)
    both = np.concatenate([routers[1], gates[1]], axis=-1).astype(np.float64)
    exact = np.asarray(x, np.float64) @ both
    place = LayerIndex(jnp.int32(1), 1, 0)
    for found in (
        sum_split_logits(router_products(x, routers, place, gates=gates)),
        sum_split_logits(
            router_products(x, split_router(routers, gates), place, gates=gates[:, :0])
        ),
    ):
        assert found.shape == (tokens, 64) and not np.any(found[:, 25:])
        np.testing.assert_allclose(found[:, :25], exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_router_in_halves_chooses_as_float32_does(tokens):
    draw = normals(4)
    x = draw(tokens, 64, dtype=jnp.bfloat16)
    routers = draw(2, 64, 24)
    exact = np.asarray(x, np.float64) @ np.asarray(routers[1], np.float64)
    place = LayerIndex(jnp.int32(1), 1, 0)
    for given in (routers, split_router(routers)):
        found = sum_split_logits(router_products(x, given, place))[:, :24]
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-4)
    published = routers.astype(jnp.bfloat16).astype(jnp.float32)
    assert not np.any(split_router(published)[..., 24:])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scores": "relu"}, "scores must be 'softmax' or 'sigmoid'; got 'relu'"),
        ({"groups": 3}, "experts=16 must be a multiple of groups=3"),
        ({"top_groups": 5}, "top_groups=5 must be from 1 to groups=4"),
        ({"best_of_group": 5}, "best_of_group=5 must be from 1 to 4"),
        ({"top_k": 9}, "top_k=9 must be from 1 to 8, the experts of top_groups=2 groups"),
    ],
)
def test_numbers_that_do_not_fit_are_named(change, message):
    fields = {name: getattr(V3, name) for name in V3.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        Router(**fields | change)


def test_what_does_not_fit_is_named():
    x, ids, weights, gate_up, down = case()
    stack = gate_up[None]
    for args, options, error, message in [
        ((x, ids, weights, gate_up, gate_up), {}, ValueError, "so F = 8, but x .* has F = 6"),
        ((x, ids, weights, gate_up[:, :6], down), {}, ValueError, "must have 2 I = 8 rows"),
        ((x, ids[:3], weights, gate_up, down), {}, ValueError, "ids .* has T = 3|so T = 3"),
        ((x, ids, weights, stack, down), {}, ValueError, "a stack of layers; give layer="),
        ((x, ids, weights, stack, down[None]), {"layer": 1}, ValueError, "layer=1 is out of range"),
        ((x, ids, weights, gate_up, down.astype("bfloat16")), {}, TypeError, "one dtype"),
        ((x, ids, weights, gate_up, down), {"arena": 3}, TypeError, "arena must be an Arena"),
        ((x, ids, weights, gate_up, down), {"down_scale": x}, ValueError, "have no down_scale"),
        ((x, ids * 1.0, weights, gate_up, down), {}, TypeError, "ids must be integers"),
    ]:
        with pytest.raises(error, match=message):
            mixture_of_experts(*args, **options)
    with pytest.raises(ValueError, match="must end in E = 16"):
        route(x, None, V3)
    *args, scales = case(fp8=True)
    with pytest.raises(ValueError, match=r"down_scale must be float32 \[5, 1, 1\]"):
        mixture_of_experts(*args, **scales | {"down_scale": scales["down_scale"][0]})
    with pytest.raises(ValueError, match="float8_e4m3fn weights need gate_up_scale"):
        mixture_of_experts(*args)


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(features=96, width=64), "F and I multiples of 64, got F = 96, I = 64"),
        (dict(features=128, width=64), "got x float32, gate_up float32"),
        (dict(features=128, width=64, fp8=True), "multiples of 128, got F = 128, I = 64"),
    ],
)
def test_a_kernel_that_does_not_serve_says_why(options, reason):
    *args, scales = case(**options) if options.get("fp8") else (*case(**options), {})
    with pytest.raises(NotImplementedError, match=reason):
        mixture_of_experts(*args, **scales, implementation="mosaic_gpu_interpret")


def test_the_arena_comes_back_and_one_too_small_is_refused():
    args = case(features=128, width=64, dtype=jnp.bfloat16)
    sizes = dict(tokens=7, top_k=2, experts=5, hidden=128, expert_size=64)
    y, arena = mixture_of_experts(*args, arena=Arena.allocate(scratch(**sizes)))
    assert y.shape == (7, 128) and isinstance(arena, Arena)
    small = Arena.allocate(scratch(**sizes | {"tokens": 1}))
    with pytest.raises(ValueError, match="mixture_of_experts: region"):
        mixture_of_experts(*args, arena=small, implementation="mosaic_gpu_interpret")
