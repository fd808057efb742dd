"""The routing kernel beside the reference: the same experts, ties included, and their weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.layer_index import LayerIndex
from jaxattn.kernels.moe.routing.router import route_mosaic
from jaxattn.kernels.moe.routing.small_batch_alignment import align_small_batch
from jaxattn.ops.moe import routing
from jaxattn.ops.moe.routing import Router
from tests.helpers.at_once import at_once
from tests.helpers.draws import normals
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


def route(*given, **options):
    """Compiled as one, as NumPy arrays."""
    return jax.device_get(at_once(routing.route, *given, **options))


def choose_experts(*given, **options):
    return jax.device_get(at_once(routing.choose_experts, *given, **options))


def drawn(router, tokens):
    """Logits and biases of few values, so that many scores are equal."""
    rng = np.random.default_rng(tokens)
    logits = np.round(4 * rng.standard_normal((tokens, router.experts), np.float32)) / 2
    bias = np.round(8 * rng.standard_normal(router.experts, np.float32)) / 16
    return jnp.asarray(logits), jnp.asarray(bias) if router.scores == "sigmoid" else None


@pytest.mark.sampled
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


@pytest.mark.sampled
@both_devices
@pytest.mark.parametrize("name", ["v2-lite", "v3"])
@pytest.mark.parametrize("always, gated", [(0, False), (2, False), (1, True)])
def test_halves_shared_experts_their_gate_and_padding_are_in_the_launch(
    name, always, gated, implementation
):
    router = ROUTERS[name]
    logits, bias = drawn(router, 3)
    behind = np.full((3, 32), np.nan, np.float32)
    behind[:, 0] = -2.0, 0.0, 90.0
    columns = np.concatenate([logits, behind], axis=1)
    low = np.sin(np.arange(columns.size, dtype=np.float32)).reshape(columns.shape) / 4
    low = np.round(low * 64) / 64  # the sum of the halves is exact
    halves = jnp.asarray(np.concatenate([columns - low, low], axis=1))
    valid = jnp.array([1, 0, 5])
    ids, weights, _ = choose_experts(
        halves, bias, router, halves=True, always=always, gated=gated, valid=valid,
        implementation=implementation,
    )  # fmt: skip
    wanted_ids, wanted = route(logits, bias, router, implementation="xla")
    top_k = router.top_k
    np.testing.assert_array_equal(ids[::2, :top_k], wanted_ids[::2])
    np.testing.assert_allclose(weights[:, :top_k], wanted, rtol=1e-5)
    assert (np.asarray(ids[1]) == -1).all()
    assert ids[0, top_k:].tolist() == [router.experts + i for i in range(always)]
    opened = 1 / (1 + np.exp(-np.array([-2.0, 0.0, 90.0]))) if gated else np.ones(3)
    np.testing.assert_allclose(
        weights[:, top_k:], np.repeat(opened[:, None], always, axis=1), rtol=1e-5
    )


@both_devices
def test_one_tokens_list_of_work_is_made_where_it_is_routed(implementation):
    """And of a token of padding, which has none."""
    router = ROUTERS["v2-lite"]
    logits, _ = drawn(router, 1)
    x = normals(1)(1, 192, dtype=jnp.bfloat16)
    interpret = implementation == "mosaic_gpu_interpret"

    @jax.jit
    def routed(valid):
        return routing.choose_experts(
            logits, None, router, always=2, valid=valid, x=x, implementation=implementation
        )

    alone = jax.jit(functools.partial(align_small_batch, interpret=interpret), static_argnums=2)
    for valid in (1, 0):
        with no_races(when=interpret):
            ids, _, listed = jax.block_until_ready(routed(jnp.array([valid])))
        wanted, rows = alone(ids, x, 66)
        assert int(listed.work.total[0]) == int(wanted.total[0]) == 8 * valid
        np.testing.assert_array_equal(listed.work.tiles[:, :8], wanted.tiles[:, :8])
        np.testing.assert_array_equal(listed.work.positions, wanted.positions)
        np.testing.assert_array_equal(listed.rows[0], rows[0])


@both_devices
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_gates_column_beside_the_experts_makes_rows_that_can_be_copied(tokens, implementation):
    router = ROUTERS["v2-lite"]
    logits, _ = drawn(router, tokens)
    gates = jnp.array([[-2.0], [0.0], [90.0]])[:tokens]
    ids, weights, _ = choose_experts(
        jnp.concatenate([logits, gates], axis=1), None, router, always=1, gated=True,
        x=jnp.ones((1, 256), jnp.bfloat16) if tokens == 1 else None, implementation=implementation,
    )  # fmt: skip
    wanted_ids, wanted = route(logits, None, router, implementation="xla")
    np.testing.assert_array_equal(ids[:, :-1], wanted_ids)
    np.testing.assert_allclose(weights[:, :-1], wanted, rtol=1e-5)
    np.testing.assert_allclose(weights[:, -1:], jax.nn.sigmoid(gates), rtol=1e-5)


@pytest.mark.parametrize("features, top_k", [(64, 6), (256, 128)])
def test_a_token_or_experts_that_no_list_is_made_for_are_routed_alone(features, top_k):
    router = Router(experts=160, top_k=top_k, scores="softmax")
    logits, _ = drawn(router, 1)
    x = jnp.ones((1, features), jnp.bfloat16)
    chosen = functools.partial(
        routing.choose_experts, router=router, always=1, implementation="mosaic_gpu_interpret"
    )
    *_, listed = jax.eval_shape(lambda: chosen(logits, None, x=x))
    assert listed is None


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
        logits, bias = drawn(router, 1)
        both = jnp.tile(jnp.pad(logits, ((0, 0), (0, 32))), 2)
        options = dict(experts=router.experts, halves=True, always=1, gated=True)
        with no_races():
            chosen = route_mosaic(both, bias, **router.choice, **options, interpret=True)
            jax.block_until_ready(chosen)


def test_the_gradient_is_the_references():
    router = Router(experts=32, top_k=2, scores="sigmoid", normalize=True)
    logits, bias = drawn(router, 2)

    def loss(implementation):
        def of(logits):
            found = routing.route(logits, bias, router, implementation=implementation)
            return (found[1] ** 2).sum()

        return jax.jit(jax.grad(of))(logits)

    np.testing.assert_allclose(loss("mosaic_gpu_interpret"), loss("xla"), rtol=1e-6)


def test_what_the_kernel_does_not_have_is_refused():
    router = Router(experts=10, top_k=2, scores="softmax")
    with pytest.raises(NotImplementedError, match="a multiple of 32 experts, at most 1024"):
        routing.route(jnp.zeros((3, 10)), None, router, implementation="mosaic_gpu_interpret")


@both_devices
def test_a_layers_bias_is_read_where_it_lies_in_its_stack(implementation):
    router = ROUTERS["v3"]
    logits, bias = drawn(router, 2)
    stack = jnp.full((5, 256), jnp.nan).at[3].set(bias)
    layer = LayerIndex(jnp.int32(1), 2, 1)
    found = choose_experts(logits, stack, router, layer=layer, implementation=implementation)
    wanted = route(logits, bias, router, implementation="xla")
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)
