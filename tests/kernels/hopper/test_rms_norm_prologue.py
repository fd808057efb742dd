"""The launch that norms a token may first sum up what its experts made of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.arena import Arena
from jaxattn.core.layer_index import LayerIndex
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import RmsNormPrologueParams
from jaxattn.kernels.linear.linear import LinearTileConfig, linears_mosaic, sums_parts
from jaxattn.kernels.moe.combine import ExpertOutputs
from jaxattn.kernels.moe.launch import scratch
from jaxattn.kernels.moe.panel_matrix import PanelMatrix
from jaxattn.moe import mixture_of_experts
from jaxattn.ops.linear.norm_linear import PendingNorm, array_of
from tests.helpers.draws import normals
from tests.helpers.kernel_cases import no_races, slow
from tests.helpers.moe_cases import expected, moe_case

EPS = 1e-5


def results(features, positions, *, height=16, first=8, seed=0, interpret=False):
    """Rows of experts at these positions of each panel; all else is NaN."""
    rng = np.random.default_rng(seed)
    width = np.gcd(features, 1024)
    y = np.full((first + height * (features // width), width), np.nan, np.float32)
    rows = rng.standard_normal((len(positions), features), np.float32)
    for row, place in zip(rows, positions, strict=True):
        if place >= 0:
            for panel in range(features // width):
                some = slice(panel * width, (panel + 1) * width)
                y[first + panel * height + place] = row[some]
    weights = jnp.asarray(rng.random((1, len(positions)), np.float32))
    there = np.asarray(positions) >= 0
    total = (np.asarray(weights[0], np.float64) * there) @ np.where(there[:, None], rows, 0)
    found = ExpertOutputs(
        jnp.asarray(y), jnp.asarray([*positions, -1, -1], jnp.int32), weights,
        PanelMatrix(first, height, int(width)), features, 512, interpret,
    )  # fmt: skip
    return found, total


def stream(features, sizes, *, layers=2, seed=0):
    draw = normals(seed)
    x = draw(1, features, scale=3)
    norms = draw(2 * layers, features, mean=1, scale=0.2)
    scale = features**-0.5
    weights = [draw(layers, features, size, scale=scale, dtype=jnp.bfloat16) for size in sizes]
    return x, norms, weights


def check(features, sizes, positions, *, layer=1, height=16, config=None, interpret=False):
    unsummed, total = results(features, positions, height=height, interpret=interpret)
    x, norms, weights = stream(features, sizes)

    def run(norm):
        return linears_mosaic(
            x, weights, layer=jnp.int32(layer), out_dtypes=[jnp.float32] * len(sizes),
            config=config, norm=norm, interpret=interpret,
        )  # fmt: skip

    of_norm = dict(weights=norms, affine=(2, 1), eps=EPS, gives=True)
    found = run(RmsNormPrologueParams(added=unsummed.parts, **of_norm))
    apart = run(RmsNormPrologueParams(added=unsummed.total, **of_norm))
    for one, other in zip(found, apart, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    *products, summed, _ = found
    wanted = np.asarray(x[0], np.float64) + total
    np.testing.assert_allclose(summed[0], wanted, rtol=1e-5, atol=1e-5)
    row = wanted / np.sqrt((wanted**2).mean() + EPS) * np.asarray(norms[2 * layer + 1], np.float64)
    for y, weight in zip(products, weights, strict=True):
        close = row @ np.asarray(weight[layer], np.float64)
        assert np.linalg.norm(y[0] - close) <= 6e-3 * np.linalg.norm(close)


@pytest.mark.slow_cases(reason="an expert that is left out; found beside a pair without expert too")
@pytest.mark.parametrize("positions", [slow((8, 0, 3)), (0, -1, 5), slow((-1, -1))])
def test_the_sum_has_the_bits_of_a_launch_of_its_own(positions):
    check(512, (128, 64), positions, config=LinearTileConfig(parts=2, stages=2), interpret=True)


def test_no_race_and_panels_below_one_another():
    config = LinearTileConfig(parts=4, stages=2)
    with no_races():
        check(2048, (128,), (8, 1, 0, 7), config=config, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes, positions",
    [
        ((3072, 576), tuple(range(0, 64, 8))),
        ((12288, 64), tuple(range(0, 88, 8))),
        ((768, 576), (0, 8, 16, -1, 32)),
        ((1088,), (-1,)),
    ],
)
def test_real_sizes(sizes, positions):
    check(2048, sizes, positions, height=96)


@pytest.mark.slow(
    reason="an expert that is left out of a sum; found by the sum's bits and the race there and "
    "by nn/test_moe too"
)
@pytest.mark.parametrize(
    "implementation",
    ["xla", "mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)],
)
def test_experts_left_unsummed_go_into_the_next_products(implementation):
    x, ids, weights, gate_up, down = moe_case(1, 4, 2, features=256, width=64)
    ids = ids.at[0, 1].set(-1)
    sizes = dict(tokens=1, top_k=2, experts=4, hidden=256, expert_size=64)
    token, norms, products = stream(256, (128,))
    layer = LayerIndex(jnp.int32(1), 1, 0)

    def step(apart, arena):
        y, arena = mixture_of_experts(
            x, ids, weights, gate_up, down, layer=layer, arena=arena, apart=apart,
            implementation=implementation,
        )  # fmt: skip
        kernels = implementation != "xla"
        assert isinstance(y, ExpertOutputs) == (apart and kernels)
        unnormed = PendingNorm(
            token, y, norms, layer=layer, eps=EPS, dtype=jnp.bfloat16,
            implementation=implementation,
        )  # fmt: skip
        if not unnormed.serves(products, layer):
            assert implementation == "xla"
            return array_of(y, token.shape), unnormed.total
        (found,) = unnormed.linears(products, layer=layer, out_dtypes=[jnp.float32])
        return array_of(y, token.shape), unnormed.total, found

    arena = lambda: Arena.allocate(scratch(**sizes))  # noqa: E731
    found, apart = (jax.jit(step, static_argnums=0)(flag, arena()) for flag in (True, False))
    for one, other in zip(found, apart, strict=True):
        np.testing.assert_array_equal(one, other)
    wanted = expected(x, ids, weights, gate_up[1], down[1])
    np.testing.assert_allclose(found[0], wanted, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(found[1], token + found[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "sizes, rows, expected",
    [((3072, 576), 8, True), ((768, 576), 5, True), ((12288, 64), 11, False)],
)
def test_rows_are_summed_where_a_block_has_few_of_their_numbers(sizes, rows, expected):
    weights = [jax.ShapeDtypeStruct((2, 2048, size), jnp.bfloat16) for size in sizes]
    assert sums_parts(weights, rows) == expected


def test_without_an_arena_the_sum_is_an_array():
    args = moe_case(1, 4, 2)
    y = mixture_of_experts(*args, layer=0, apart=True)
    assert isinstance(y, jax.Array)
