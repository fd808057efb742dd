"""The routing kernel beside the reference: the same experts, ties included, and their weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.kernels.moe.route import route_mosaic
from jaxattn.ops.moe import Router, route
from tests.helpers.kernel_cases import both_devices, no_races

ROUTERS = {
    "v2-lite": Router(experts=64, top_k=6, scores="softmax"),
    "v2": Router(experts=160, top_k=6, scores="softmax", groups=8, top_groups=3, scale=16.0),
    "v3": Router(
        experts=256, top_k=8, scores="sigmoid", groups=8, top_groups=4, best_of_group=2,
        normalize=True, scale=2.5,
    ),
    "qwen": Router(experts=512, top_k=10, scores="softmax", normalize=True),
}  # fmt: skip


def drawn(router, tokens):
    """Logits and biases of few values, so that many scores are equal."""
    keys = jax.random.split(jax.random.key(tokens), 2)
    logits = jnp.round(4 * jax.random.normal(keys[0], (tokens, router.experts))) / 2
    bias = jnp.round(8 * jax.random.normal(keys[1], (router.experts,))) / 16
    return logits, bias if router.scores == "sigmoid" else None


@both_devices
@pytest.mark.parametrize("name", ROUTERS)
def test_the_same_experts_as_by_sorting(name, implementation):
    router = ROUTERS[name]
    logits, bias = drawn(router, 2 if implementation == "mosaic_gpu_interpret" else 200)
    ids, weights = route(logits, bias, router, implementation=implementation)
    wanted_ids, wanted = route(logits, bias, router, implementation="xla")
    # A rounding of one device's exp may order two scores otherwise; none is so near in sigmoid's.
    same = np.asarray(ids == wanted_ids).all(axis=1)
    assert same.all() if implementation == "mosaic_gpu_interpret" else same.mean() > 0.97
    np.testing.assert_allclose(weights, wanted, rtol=1e-5)


@both_devices
def test_a_nan_in_a_token_is_in_its_weights_alone(implementation):
    router = ROUTERS["v2-lite"]
    logits = drawn(router, 3)[0].at[1].set(jnp.nan)
    ids, weights = route(logits, None, router, implementation=implementation)
    assert np.isnan(weights[1]).all() and not np.isnan(weights[::2]).any()
    assert (ids >= 0).all() and (ids < 64).all()


@both_devices
def test_an_expert_that_is_switched_off_is_chosen_once_at_most(implementation):
    router = Router(experts=32, top_k=4, scores="sigmoid")
    bias = jnp.full(32, -jnp.inf).at[jnp.array([5, 9])].set(0.0)
    ids, _ = route(drawn(router, 2)[0], bias, router, implementation=implementation)
    assert {tuple(sorted(row)) for row in ids.tolist()} == {(0, 1, 5, 9)}


def test_no_race():
    for router in (ROUTERS["v2-lite"], ROUTERS["v3"]):
        options = {
            name: getattr(router, name)
            for name in ("top_k", "groups", "top_groups", "best_of_group", "normalize", "scale")
        }
        sigmoid = router.scores == "sigmoid"
        with no_races():
            chosen = route_mosaic(
                *drawn(router, 1), sigmoid=sigmoid, interpret=True, detect_races=True, **options
            )
            jax.block_until_ready(chosen)


def test_the_gradient_is_the_references():
    router = Router(experts=32, top_k=2, scores="sigmoid", normalize=True)
    logits, bias = drawn(router, 2)

    def loss(implementation):
        def of(logits):
            return (route(logits, bias, router, implementation=implementation)[1] ** 2).sum()

        return jax.grad(of)(logits)

    np.testing.assert_allclose(loss("mosaic_gpu_interpret"), loss("xla"), rtol=1e-6)


def test_what_the_kernel_does_not_have_is_refused():
    router = Router(experts=10, top_k=2, scores="softmax")
    with pytest.raises(NotImplementedError, match="a multiple of 32 experts, at most 1024"):
        route(jnp.zeros((3, 10)), None, router, implementation="mosaic_gpu_interpret")
