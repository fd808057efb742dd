"""A mixture of experts as a module, where one launch opens it: the same sum, and it can be seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn import moe
from jaxattn.arena import Arena
from jaxattn.bench.model.expert_usage import ExpertChoices, RecordingExperts
from jaxattn.core.layer_index import LayerIndex
from jaxattn.nn import MixtureOfExperts
from jaxattn.nn import moe as nn_moe
from jaxattn.ops.moe.router_logits import split_router, training_logits
from jaxattn.ops.moe.routing import Router
from tests.helpers.kernel_cases import relative

FEATURES, SIZE = 128, 64
ROUTER = Router(experts=64, top_k=3, scores="sigmoid", normalize=True)


def module(kind=MixtureOfExperts):
    return kind(FEATURES, SIZE, ROUTER, shared_size=2 * SIZE, rngs=nnx.Rngs(3))


def stacks_of(experts):
    """Of one layer, as a bfloat16 model packs them."""
    names = nn_moe.stacked_names(None, bias=True)
    stacks = {name: getattr(experts, name)[...][None] for name in names}
    for name in nn_moe.EXPERTS:
        stacks[name] = stacks[name].astype(jnp.bfloat16)
    return stacks | {"router": split_router(stacks["router"])}


@nnx.jit(static_argnames="implementation")
def step(experts, x, implementation):
    arena = Arena.allocate(
        moe.scratch(tokens=1, top_k=5, experts=66, hidden=FEATURES, expert_size=SIZE)
    )
    return experts.step(
        x, stacks_of(experts), LayerIndex(jnp.int32(0), 1, 0), valid=jnp.ones((1, 1), jnp.int32),
        arena=arena, implementation=implementation,
    )[0]  # fmt: skip


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(5), (1, 1, FEATURES), jnp.bfloat16)


def test_a_token_is_opened_in_one_launch_and_gets_what_the_module_gives_it(x, monkeypatch):
    opened = []
    real = nn_moe.router_shared_experts

    def counted(*args, **options):
        opened.append(options["implementation"])
        return real(*args, **options)

    monkeypatch.setattr(nn_moe, "router_shared_experts", counted)
    experts = module()
    wanted = nnx.jit(lambda experts, x: experts(x))(experts, x)
    assert relative(step(experts, x, "mosaic_gpu_interpret"), wanted) < 1e-2
    assert opened == ["mosaic_gpu_interpret"]


def test_who_counts_experts_sees_them_where_they_are_opened(x):
    watched = module(RecordingExperts)
    watched.choices = ExpertChoices()
    jax.block_until_ready(step(watched, x, "xla"))
    jax.effects_barrier()
    (ids,) = watched.choices.seen
    logits = x.reshape(1, -1).astype(jnp.float32) @ watched.router[...]
    assert ids.shape == (1, 3)
    assert set(ids[0].tolist()) == set(np.argsort(np.asarray(logits[0]))[-3:].tolist())


def test_a_router_of_bfloat16_products_is_nearly_float32():
    """Its gradients are rounded as those of every other product."""
    rng = np.random.default_rng(0)
    x, router, of_logits = (rng.standard_normal(shape) for shape in ((9, 128), (128, 33), (9, 33)))
    given = (jnp.asarray(each, jnp.float32) for each in (x, router))
    logits, pull = jax.vjp(training_logits, *given)
    found = logits, *pull(jnp.asarray(of_logits, jnp.float32))
    for got, wanted, most in zip(
        found, (x @ router, of_logits @ router.T, x.T @ of_logits), (2e-5, 5e-3, 5e-3), strict=True
    ):
        assert got.dtype == jnp.float32 and relative(got, wanted) < most


def test_a_router_in_bfloat16_has_a_gradient_in_bfloat16_which_a_scan_adds_up():
    layer = MixtureOfExperts(
        64, 64, Router(experts=4, top_k=2, scores="softmax"), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(layer)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    x = jnp.ones((3, 2, 64), jnp.bfloat16)

    def loss(params):
        def one(total, x):
            return total + nnx.merge(graph, params)(x).astype(jnp.float32).sum(), None

        return jax.lax.scan(one, jnp.float32(0), x)[0]

    found = jax.eval_shape(jax.grad(loss), params)
    assert all(each.dtype == jnp.bfloat16 for each in jax.tree.leaves(found))
