"""Mixture of experts: routing as it is published, and a sum over experts as a loop computes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.nn import MixtureOfExperts
from jaxattn.ops.moe import Router, mixture_of_experts, route

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


@routers
def test_tokens_choose_as_a_loop_over_them_does(router):
    keys = jax.random.split(jax.random.key(1), 2)
    logits = 2 * jax.random.normal(keys[0], (50, router.experts))
    bias = jax.random.normal(keys[1], (router.experts,)) if router.scores == "sigmoid" else None
    ids, weights = route(logits, bias, router)
    wanted_ids, wanted = routed(logits, bias, router)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(weights, wanted, rtol=1e-5)
    assert (ids.dtype, weights.dtype) == (jnp.int32, jnp.float32)


def test_the_bias_chooses_and_does_not_weigh():
    router = Router(experts=4, top_k=1, scores="sigmoid")
    ids, weights = route(jnp.array([[3.0, 0.0, 0.0, 0.0]]), jnp.array([0.0, 0.0, 9.0, 0.0]), router)
    assert ids.tolist() == [[2]] and weights[0, 0] == jax.nn.sigmoid(0.0)


def case(tokens=7, features=6, experts=5, width=4, top=2, seed=0):
    keys = jax.random.split(jax.random.key(seed), 5)
    x = jax.random.normal(keys[0], (tokens, features))
    ids = jax.vmap(lambda key: jax.random.permutation(key, experts)[:top])(
        jax.random.split(keys[1], tokens)
    )
    weights = jax.random.uniform(keys[2], (tokens, top))
    shapes = (experts, 2 * width, features), (experts, features, width)
    return (
        x,
        ids,
        weights,
        *(jax.random.normal(key, s) for key, s in zip(keys[3:], shapes, strict=True)),
    )


def dense(x, ids, weights, gate_up, down):
    """Every expert of every token, and those not chosen times 0."""
    share = (jax.nn.one_hot(ids, down.shape[0]) * weights[..., None]).sum(1)
    gate, up = jnp.split(jnp.einsum("tf,eif->tei", x, gate_up), 2, axis=-1)
    return jnp.einsum("tei,efi,te->tf", jax.nn.silu(gate) * up, down, share)


@pytest.mark.parametrize("experts, top", [(5, 2), (8, 1), (3, 3)])
def test_the_sum_over_the_chosen_experts(experts, top):
    args = case(experts=experts, top=top)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(mixture_of_experts(*args), dense(*args), rtol=2e-5, atol=2e-5)


def test_a_nan_in_a_token_stays_in_that_token():
    x, *rest = case()
    clean = mixture_of_experts(x, *rest)
    found = mixture_of_experts(x.at[2].set(jnp.nan), *rest)
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(clean, 2, 0))


def test_no_expert_adds_exactly_zero_and_a_layer_of_a_stack_is_that_layer():
    x, ids, weights, gate_up, down = case()
    ids = ids.at[3].set(-1).at[5, 1].set(-1)
    found = mixture_of_experts(x.at[3].set(jnp.nan), ids, weights, gate_up, down)
    assert not np.any(found[3])
    with jax.default_matmul_precision("highest"):
        wanted = dense(x, ids, weights, gate_up, down)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    stacks = (jnp.stack([jnp.full_like(each, jnp.nan), each]) for each in (gate_up, down))
    stacked = mixture_of_experts(x.at[3].set(jnp.nan), ids, weights, *stacks, layer=jnp.int32(1))
    np.testing.assert_array_equal(stacked, found)


def test_a_token_does_not_depend_on_the_others():
    args = case(tokens=9)
    together = mixture_of_experts(*args)
    for row in range(9):
        alone = mixture_of_experts(*(each[row : row + 1] for each in args[:3]), *args[3:])
        np.testing.assert_allclose(alone[0], together[row], rtol=1e-6, atol=1e-6)


def test_the_gradient_is_that_of_the_dense_sum():
    args = case()
    rest = args[1]

    def loss(function):
        return lambda x, weights, *matrices: (function(x, rest, weights, *matrices) ** 2).sum()

    operands = (args[0], *args[2:])
    with jax.default_matmul_precision("highest"):
        found, wanted = (
            jax.grad(loss(f), argnums=range(4))(*operands) for f in (mixture_of_experts, dense)
        )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_a_module_routes_adds_the_shared_expert_and_trains():
    module = MixtureOfExperts(
        6, 4, V3, shared_size=8, dtype="float32", out_init_scale=0.5, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(2), (2, 5, 6))
    y = module(x)
    flat = x.reshape(-1, 6)
    logits = jnp.matmul(flat, module.router[...], precision="highest")
    ids, weights = route(logits, module.correction_bias[...], V3)
    names = ("gate_up_proj", "down_proj")
    with jax.default_matmul_precision("highest"):
        wanted = dense(flat, ids, weights, *(getattr(module, name)[...] for name in names))
    np.testing.assert_allclose(y, wanted.reshape(x.shape) + module.shared(x), rtol=1e-4, atol=1e-5)
    grads = nnx.grad(lambda module: (module(x) ** 2).mean())(module)
    assert np.any(grads["router"][...]) and np.any(grads["shared"]["up_proj"]["weight"][...])


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


def test_shapes_that_do_not_fit_are_named():
    x, ids, weights, gate_up, down = case()
    with pytest.raises(ValueError, match=r"gate_up must be \[E, 2 I, 6\]"):
        mixture_of_experts(x, ids, weights, down, down)
    with pytest.raises(ValueError, match=r"ids and weights must be \[7, K\]"):
        mixture_of_experts(x, ids[:3], weights, gate_up, down)
    with pytest.raises(ValueError, match="must end in E = 16"):
        route(x, None, V3)
