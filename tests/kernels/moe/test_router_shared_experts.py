"""Router, choice and the shared experts' gate and up in one launch, beside the launches one by one.

Weights of other layers and of experts that nobody chose are NaN, and so is the arena.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.arena import Arena
from jaxattn.core.dispatch import Refusal
from jaxattn.core.layer_index import LayerIndex
from jaxattn.kernels.moe.launch import mixture_of_experts_mosaic, scratch
from jaxattn.kernels.moe.router_shared_experts import router_shared_experts_mosaic
from jaxattn.ops.linear.norm_linear import PendingNorm
from jaxattn.ops.moe.experts import mixture_of_experts
from jaxattn.ops.moe.router_logits import router_products, split_router
from jaxattn.ops.moe.router_shared_experts import router_shared_experts, supports_fused_router
from jaxattn.ops.moe.routing import Router, choose_experts
from tests.helpers.draws import normals
from tests.helpers.kernel_cases import both_devices, no_races, relative, slow, slow_interpreted
from tests.helpers.moe_cases import expected

LAYER = LayerIndex(jnp.int32(1), 2, 0)  # the layer 2 of 3
ROUTERS = {
    "v2-lite": (Router(experts=64, top_k=6, scores="softmax"), 2),
    "glm": (Router(experts=64, top_k=4, scores="sigmoid", normalize=True, scale=1.8), 1),
}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "routers", "bias", "gate_up", "down", "exact"],
    meta_fields=["router", "always"],
)
@dataclasses.dataclass(frozen=True)
class Case:
    router: Router
    always: int
    x: jax.Array
    routers: jax.Array  # [3, F, 128]
    bias: jax.Array | None  # [3, 64]
    gate_up: jax.Array  # [3, 64 + always, 2 I, F]
    down: jax.Array
    exact: jax.Array  # the layer's router, float32

    @property
    def options(self):
        return dict(layer=LAYER, always=self.always)

    @property
    def spec(self):
        experts, hidden, size = self.gate_up.shape[1], self.x.shape[1], self.down.shape[-1]
        return scratch(
            tokens=1, top_k=self.router.top_k + self.always, experts=experts, hidden=hidden,
            expert_size=size, dtype=self.x.dtype,
        )  # fmt: skip

    def arena(self):
        return Arena.allocate(self.spec).poison()

    @partial(jax.jit, static_argnames="implementation")
    def open(self, implementation, valid=None):
        return router_shared_experts(
            self.x, self.routers, self.bias, self.gate_up, self.router, **self.options,
            valid=valid, arena=self.arena(), implementation=implementation,
        )  # fmt: skip


@partial(jax.jit, static_argnames=("name", "features", "width", "dtype"))
def drawn(name, features=256, width=64, dtype=jnp.bfloat16) -> Case:
    router, always = ROUTERS[name]
    keys = jax.random.split(jax.random.key(len(name) + features), 5)
    draw = lambda key, *shape: jax.random.normal(key, shape)  # noqa: E731
    experts = 64 + always
    of_layer = draw(keys[1], features, 64) * features**-0.5
    x = draw(keys[0], 1, features).astype(dtype)
    bias = None
    if router.scores == "sigmoid":
        bias = jnp.full((3, 64), jnp.nan).at[2].set(draw(keys[2], 64) / 8)
    halves = split_router(of_layer)
    ids, _, _ = choose_experts(
        router_products(x, halves[None], LayerIndex(jnp.int32(0), 1, 0), "xla"),
        None if bias is None else bias[2], router, halves=True, always=always,
        implementation="xla",
    )  # fmt: skip

    def stack(key, *shape):
        values = draw(key, experts, *shape) * shape[-1] ** -0.5
        none = jnp.full((3, experts, *shape), jnp.nan, dtype)
        return none.at[2, ids[0]].set(values[ids[0]].astype(dtype))

    gate_up, down = stack(keys[3], 2 * width, features), stack(keys[4], features, width)
    routers = jnp.full((3, *halves.shape), jnp.nan, halves.dtype).at[2].set(halves)
    return Case(router, always, x, routers, bias, gate_up, down, of_layer)


@partial(jax.jit, static_argnames="implementation")
def result(case, implementation, opened):
    ids, weights, listed, arena = opened
    return mixture_of_experts(
        case.x, ids, weights, case.gate_up, case.down, layer=LAYER,
        arena=arena, listed=listed, implementation=implementation,
    )[0]  # fmt: skip


def weights_in_float64(case, tokens, ids):
    """The weights [top_k] of the experts of one token, by the float32 router."""
    logits = np.asarray(tokens, np.float64) @ np.asarray(case.exact, np.float64)
    scores = 1 / (1 + np.exp(-logits))
    if case.router.scores == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum()
    own = scores[0, np.asarray(ids[0, : case.router.top_k])]
    return own / own.sum() * case.router.scale if case.router.normalize else own


@pytest.mark.slow(
    reason="a token with other experts or another sum; found by the same checks behind a norm "
    "there and by nn/test_moe too"
)
@both_devices
@pytest.mark.parametrize("name", ["v2-lite", slow("glm")])
def test_a_token_gets_its_experts_and_their_sum(name, implementation):
    case = drawn(name)
    opened = case.open(implementation, valid=jnp.array([1]))
    y = result(case, implementation, opened)
    ids, weights, listed, _ = opened
    wanted_ids, wanted, no_list, _ = case.open("xla")
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(weights, wanted, rtol=1e-5)
    pairs = case.router.top_k + case.always
    assert int(listed.work.total[0]) == pairs and int(listed.left[0]) == case.router.top_k
    assert no_list is None
    layer = case.gate_up[2], case.down[2]
    assert relative(y, expected(case.x, wanted_ids, wanted, *layer)) < 1e-3
    own = weights_in_float64(case, case.x, ids)
    np.testing.assert_allclose(weights[0, : case.router.top_k], own, rtol=1e-4)
    np.testing.assert_array_equal(weights[0, case.router.top_k :], 1)
    # Each half of K has a sum of its own here, and is in one chain in launches one by one: h of the
    # experts may differ by an ulp of bfloat16.
    sizes = dict(layer=LAYER.index, interpret=implementation == "mosaic_gpu_interpret")
    apart = jax.jit(partial(mixture_of_experts_mosaic, **sizes))(
        case.x, ids, weights, case.gate_up, case.down
    )
    np.testing.assert_allclose(y, apart, rtol=0, atol=2**-8 * float(jnp.abs(apart).max()))


@slow_interpreted(
    "padding that reads an expert; found by padding in moe/test_router and moe/test_kernel too"
)
def test_padding_has_no_expert_and_reads_none(implementation):
    case = drawn("glm")
    nothing = dataclasses.replace(case, gate_up=jnp.full_like(case.gate_up, jnp.nan))
    opened = nothing.open(implementation, valid=jnp.array([0]))
    ids, _, listed, _ = opened
    assert (np.asarray(ids) == -1).all()
    assert int(listed.work.total[0]) == int(listed.left[0]) == 0
    np.testing.assert_array_equal(result(case, implementation, opened), 0)


@slow_interpreted("a NaN in another token; found by moe/test_kernel's NaN too")
def test_a_nan_stays_in_its_token(implementation):
    case = drawn("v2-lite")
    case = dataclasses.replace(
        case, x=case.x.at[0, 3].set(jnp.nan),
        gate_up=jnp.nan_to_num(case.gate_up), down=jnp.nan_to_num(case.down),
    )  # fmt: skip
    ids, weights, *_ = opened = case.open(implementation, valid=jnp.array([1]))
    assert ((np.asarray(ids) >= 0) & (np.asarray(ids) < 66)).all()
    assert np.isnan(weights[0, : case.router.top_k]).all()
    assert np.isnan(result(case, implementation, opened)).all()


@pytest.mark.slow(
    reason="a race between the router and the experts; found by the race with a norm there too"
)
def test_no_race():
    case = drawn("glm")
    with no_races():
        opened = router_shared_experts_mosaic(
            case.x, case.routers, case.bias, case.gate_up, experts=64, choice=case.router.choice,
            always=1, layer=jnp.int32(2), affine=(1, 0), valid=jnp.array([1]), arena=case.arena(),
            interpret=True,
        )  # fmt: skip
        jax.block_until_ready(opened)


@pytest.mark.gpu
@pytest.mark.parametrize("name, width", [("v2-lite", 1408), ("glm", 1536)])
def test_real_sizes(name, width):
    case = drawn(name, 2048, width)
    opened = case.open("mosaic_gpu")
    wanted_ids, wanted, *_ = case.open("xla")
    np.testing.assert_array_equal(opened[0], wanted_ids)
    np.testing.assert_allclose(opened[1], wanted, rtol=1e-5)
    y = result(case, "mosaic_gpu", opened)
    of_layer = case.gate_up[2], case.down[2]
    assert relative(y, expected(case.x, wanted_ids, wanted, *of_layer)) < 1e-3


@pytest.mark.slow(
    reason="a dtype that is taken as bfloat16; found by moe/test_kernel's float16 and the lowering "
    "of both too"
)
def test_float16():
    case = drawn("glm", dtype=jnp.float16)
    case = dataclasses.replace(case, routers=case.routers.astype(jnp.float16))
    y = result(case, "mosaic_gpu_interpret", case.open("mosaic_gpu_interpret"))
    ids, weights, *_ = case.open("xla")
    assert relative(y, expected(case.x, ids, weights, case.gate_up[2], case.down[2])) < 1e-3


def test_what_the_kernel_does_not_have_is_refused():
    case = drawn("glm")
    fits = partial(supports_fused_router, case.x, case.routers, case.gate_up, case.router)
    assert fits(1) and not fits(0)
    two = jnp.concatenate([case.x] * 2)
    assert not supports_fused_router(two, case.routers, case.gate_up, case.router, 1)
    gated = jnp.pad(case.routers, ((0, 0), (0, 0), (0, 64)))
    assert not supports_fused_router(case.x, gated, case.gate_up, case.router, 1)
    in_float32 = case.routers.astype(jnp.float32)
    assert not supports_fused_router(case.x, in_float32, case.gate_up, case.router, 1)
    with pytest.raises(Refusal, match="64 experts and no gate"):
        router_shared_experts_mosaic(
            case.x, gated, case.bias, case.gate_up, experts=64, choice=case.router.choice,
            always=1, layer=jnp.int32(2), affine=(1, 0), valid=None, arena=case.arena(),
            interpret=True,
        )  # fmt: skip


def unnormed(case, implementation):
    """A stream whose norm is about the case's token, and that norm in float64."""
    draw = normals(7)
    added = draw(*case.x.shape)
    norms = np.full((6, case.x.shape[1]), np.nan, np.float32)
    norms[5] = draw(case.x.shape[1], mean=1, scale=0.1)
    norms = jnp.asarray(norms)
    stream = PendingNorm(
        case.x.astype(jnp.float32), added, norms, layer=LayerIndex(LAYER.repeat, 4, 1), eps=1e-6,
        dtype=jnp.bfloat16, implementation=implementation,
    )  # fmt: skip
    total = np.asarray(case.x, np.float64) + np.asarray(added, np.float64)
    normed = total / np.sqrt((total**2).mean() + 1e-6) * np.asarray(norms[5], np.float64)
    return stream, total, normed


def check_norm(name, implementation, **sizes):
    case = drawn(name, **sizes)
    gate_up, down = (jnp.nan_to_num(x, nan=0.01) for x in (case.gate_up, case.down))
    case = dataclasses.replace(case, gate_up=gate_up, down=down)
    stream, total, normed = unnormed(case, implementation)
    opened = router_shared_experts(
        stream, case.routers, case.bias, case.gate_up, case.router, **case.options, valid=None,
        arena=case.arena(), implementation=implementation,
    )  # fmt: skip
    ids, weights, listed, _ = opened
    np.testing.assert_allclose(stream.total, total, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(listed.rows[:1].astype(jnp.float32), normed, rtol=2**-8, atol=1e-6)
    case = dataclasses.replace(case, x=jnp.asarray(stream))
    own = weights_in_float64(case, normed, ids)
    np.testing.assert_allclose(weights[0, : case.router.top_k], own, rtol=2e-2)
    wanted = expected(jnp.asarray(normed), ids, weights, case.gate_up[2], case.down[2])
    assert relative(result(case, implementation, opened), wanted) < 6e-3


@slow_interpreted(
    "a norm that is not the router's; found by races with a norm there and by nn/test_moe, which "
    "compares one launch with the module, too"
)
@pytest.mark.parametrize("name", ["v2-lite", "glm"])
def test_the_norm_comes_before_the_router(name, implementation):
    check_norm(name, implementation, features=1024)


@pytest.mark.gpu
@pytest.mark.parametrize("name, width", [("v2-lite", 1408), ("glm", 1536)])
def test_the_norm_at_real_sizes(name, width):
    check_norm(name, "mosaic_gpu", features=2048, width=width)


def test_no_race_with_a_norm():
    case, rng = drawn("glm"), np.random.default_rng(3)
    # Experts are all 0, since drawing 65 of this size takes a second.
    nothing = partial(jnp.zeros, dtype=jnp.bfloat16)
    case = dataclasses.replace(
        case, x=jnp.asarray(rng.normal(size=(1, 1024)), jnp.bfloat16),
        routers=jnp.asarray(rng.normal(size=(3, 1024, 128)), jnp.bfloat16),
        gate_up=nothing((3, 65, 128, 1024)), down=nothing((3, 65, 8, 64)),
    )  # fmt: skip
    stream, *_ = unnormed(case, "mosaic_gpu_interpret")
    token, norm = stream.before(LAYER)
    with no_races():
        opened = router_shared_experts_mosaic(
            token, case.routers, case.bias, case.gate_up, experts=64, choice=case.router.choice,
            always=1, layer=LAYER.repeat, affine=(2, 0), valid=jnp.array([1]), arena=case.arena(),
            norm=norm, interpret=True,
        )  # fmt: skip
        jax.block_until_ready(opened)
