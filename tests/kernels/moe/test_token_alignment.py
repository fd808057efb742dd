"""The list of work: every chosen expert's tokens once, none for others, no two in one row."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.kernels.moe.panel_matrix import panel
from jaxattn.kernels.moe.routing import token_alignment as work_module
from jaxattn.kernels.moe.routing.large_batch_alignment import permute_tokens
from jaxattn.kernels.moe.routing.medium_batch_alignment import align_and_sort_tokens
from jaxattn.kernels.moe.routing.small_batch_alignment import align_small_batch
from jaxattn.kernels.moe.routing.token_alignment import EXPERT, FROM, GROUPS, TO, align_tokens
from jaxattn.kernels.moe.tile_config import (
    choose,
    compute_max_tiles,
    padded_rows,
    stages_of,
    token_tile,
)
from tests.helpers.at_once import at_once
from tests.helpers.draws import normals
from tests.helpers.kernel_cases import both_devices, no_races, slow

make = jax.jit(align_tokens, static_argnums=(1, 2))


def drawn(tokens, experts, top_k, *, some=None, seed=0):
    """Distinct ids of the first `some` experts, a tenth of them of no expert."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(some or experts)[:top_k] for _ in range(tokens)])
    ids[rng.random(ids.shape) < 0.1] = -1
    ids[rng.random(ids.shape) < 0.05] = experts + 3
    return ids.astype(np.int32)


def check(ids, experts, columns):
    check_list(make(jnp.asarray(ids), experts, columns), ids, experts, columns)


def check_list(work, ids, experts, columns):
    tiles = np.asarray(work.tiles).T[: int(work.total[0])]
    positions = np.asarray(work.positions)[: ids.size].reshape(ids.shape)
    valid = (ids >= 0) & (ids < experts)
    np.testing.assert_array_equal(positions >= 0, valid)
    rows = padded_rows(*ids.shape, experts, columns)
    # Every tile within the rows, none of them another's.
    owner = np.full(rows, -1)
    for number, tile in enumerate(tiles):
        mine = slice(tile[TO], tile[TO] + 8 * tile[GROUPS])
        assert tile[TO] + columns <= rows and 1 <= tile[GROUPS] <= columns // 8
        assert tile[TO] % 8 == 0 and (owner[mine] < 0).all()
        owner[mine] = number
    assert set(tiles[:, EXPERT]) == set(ids[valid])
    used = [(t, k) for t, k in np.ndindex(*ids.shape) if valid[t, k]]
    for t, k in used:
        tile = tiles[owner[positions[t, k]]]
        assert tile[EXPERT] == ids[t, k]
        source = tile[FROM] + positions[t, k] - tile[TO]
        if work.tokens is None:
            assert source == t
        else:
            assert tile[FROM] == tile[TO] and work.tokens[positions[t, k]] == t
    # A row is one token's, of one expert.
    assert len({(positions[t, k], t, ids[t, k]) for t, k in used}) == len(
        {positions[t, k] for t, k in used}
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    "tokens, experts, top_k, columns, some",
    [
        (1, 64, 6, 8, None),
        (3, 5, 2, 8, None),
        (8, 512, 10, 8, None),
        (33, 8, 3, 16, None),
        (33, 16, 2, 8, 2),
        (200, 6, 4, 32, None),
    ],
)
def test_every_pair_has_its_row(tokens, experts, top_k, columns, some):
    check(drawn(tokens, experts, top_k, some=some), experts, columns)


@both_devices
@pytest.mark.parametrize("tokens, experts, top_k", [(1, 64, 6), (8, 7, 5)])
def test_the_kernel_lists_few_tokens_as_xla_does(tokens, experts, top_k, implementation):
    ids = drawn(tokens, experts, top_k, seed=tokens)
    interpret = implementation == "mosaic_gpu_interpret"
    guard = no_races() if interpret else contextlib.nullcontext()
    with guard:
        x = normals(0)(tokens, 320, dtype=jnp.bfloat16)
        work, rows = at_once(
            align_small_batch,
            jnp.asarray(ids),
            x,
            experts,
            interpret=interpret,
        )
        jax.block_until_ready(rows)
    assert rows.shape == (8, 320)
    np.testing.assert_array_equal(rows[:tokens], x)
    check_list(work, ids, experts, 8)
    listed = make(jnp.asarray(ids), experts, 8)
    count = int(listed.total[0])
    assert int(work.total[0]) == count
    np.testing.assert_array_equal(work.tiles[:, :count], listed.tiles[:, :count])
    np.testing.assert_array_equal(work.positions[: ids.size], listed.positions)


@pytest.mark.slow_cases(
    reason="a pair in another tile; found by 17 tokens of 256 experts with races, and segments of "
    "70 tokens of 12 experts, of which 9 are used, too"
)
@both_devices
@pytest.mark.parametrize(
    "tokens, experts, top_k, columns, some",
    [
        slow(32, 64, 5, 8, None),
        slow(33, 12, 4, 16, 9),
        (17, 256, 9, 8, None),
        slow(43, 3, 3, 8, None),
    ],
)
def test_the_kernel_sorts_several_tokens_as_xla_does(
    tokens, experts, top_k, columns, some, implementation
):
    ids = drawn(tokens, experts, top_k, some=some, seed=tokens)
    interpret = implementation == "mosaic_gpu_interpret"
    guard = no_races() if interpret and tokens == 17 else contextlib.nullcontext()
    with guard:
        x = normals(0)(tokens, 320, dtype=jnp.bfloat16)
        work, rows = at_once(
            align_and_sort_tokens, jnp.asarray(ids), x, experts, columns,
            blocks=6 if interpret else None, interpret=interpret,
        )  # fmt: skip
        jax.block_until_ready(rows)
    check_sorted(work, rows, ids, x, experts, columns)


def check_sorted(work, rows, ids, x, experts, columns):
    """A kernel's list is XLA's, and each token is in its rows."""
    listed = make(jnp.asarray(ids), experts, columns)
    count = int(listed.total[0])
    assert int(work.total[0]) == count
    np.testing.assert_array_equal(work.tiles[:, :count], listed.tiles[:, :count])
    np.testing.assert_array_equal(work.positions[: ids.size], listed.positions)
    placed, rows, x = np.asarray(listed.positions).reshape(ids.shape), *map(np.asarray, (rows, x))
    for k in range(ids.shape[1]):
        here = placed[:, k] >= 0
        np.testing.assert_array_equal(rows[placed[here, k]], x[here])


@pytest.mark.slow_cases(
    reason="an expert without a thread; found by 17 tokens of 256 experts, in the same file, too"
)
@pytest.mark.parametrize(
    "tokens, experts, top_k, columns, some",
    [(70, 12, 4, 16, 9), slow(90, 140, 3, 16, None)],
    ids=["two segments", "experts behind the threads"],
)
def test_segments_are_permuted_as_xla_does(tokens, experts, top_k, columns, some):
    ids = drawn(tokens, experts, top_k, some=some, seed=tokens)
    x = normals(0)(tokens, 256, dtype=jnp.bfloat16)
    races = tokens == 70
    with no_races() if races else contextlib.nullcontext():
        work, rows = at_once(
            permute_tokens, jnp.asarray(ids), x, experts, columns, interpret=True,
        )  # fmt: skip
        jax.block_until_ready(rows)
    check_sorted(work, rows, ids, x, experts, columns)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens, experts, top_k, columns",
    [
        (193, 66, 8, 64),
        (2048, 66, 8, 128),
        (8192, 512, 10, 64),
        (5000, 256, 9, 128),
        (40000, 12, 2, 128),
    ],
)
def test_many_tokens_are_permuted_as_xla_does(tokens, experts, top_k, columns):
    ids = drawn(tokens, experts, top_k, seed=tokens)
    x = normals(0)(tokens, 256, dtype=jnp.bfloat16)
    work, rows = jax.jit(permute_tokens, static_argnums=(2, 3))(
        jnp.asarray(ids), x, experts, columns
    )
    check_sorted(work, rows, ids, x, experts, columns)


@pytest.mark.slow(
    reason="a pair that is counted once; found by the same test on a GPU, and by the tokens that "
    "the kernel sorts and lists there, too"
)
@both_devices
def test_a_token_may_name_an_expert_more_than_once(implementation):
    ids = jnp.full((32, 4), 2, jnp.int32)
    x = normals(0)(32, 256, dtype=jnp.bfloat16)
    interpret = implementation == "mosaic_gpu_interpret"
    work, _ = at_once(
        align_and_sort_tokens, ids, x, 6, 16, blocks=4 if interpret else None, interpret=interpret
    )
    listed = make(ids, 6, 16)
    assert int(work.total[0]) == int(listed.total[0]) == 8
    np.testing.assert_array_equal(work.tiles[:, :8], listed.tiles[:, :8])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, experts, top_k", [(128, 513, 11), (128, 66, 8), (39, 257, 9)])
def test_the_kernel_sorts_as_many_as_it_has_registers_for(tokens, experts, top_k):
    test_the_kernel_sorts_several_tokens_as_xla_does(tokens, experts, top_k, 16, None, "mosaic_gpu")


def test_many_pairs_are_sorted_to_the_same_list(monkeypatch):
    ids = drawn(70, 9, 3)
    compared = at_once(align_tokens, jnp.asarray(ids), 9, 16)
    monkeypatch.setattr(work_module, "COMPARED", 0)
    for one, other in zip(compared, at_once(align_tokens, jnp.asarray(ids), 9, 16), strict=True):
        np.testing.assert_array_equal(one, other)


def test_without_any_expert_there_is_no_work():
    for tokens in (2, 20):
        work = make(np.full((tokens, 3), -1), 4, 8)
        assert int(work.total[0]) == 0 and (np.asarray(work.positions) == -1).all()


def test_all_tokens_of_one_expert_are_as_many_tiles_as_they_fill():
    work = make(np.full((40, 1), 2), 4, 16)
    tiles = np.asarray(work.tiles).T[: int(work.total[0])]
    assert tiles.tolist() == [[2, 0, 0, 2], [2, 16, 16, 2], [2, 32, 32, 1]]


def test_the_bounds_hold_for_the_worst_choice():
    for tokens, experts, top_k, columns in [(9, 4, 2, 8), (64, 3, 3, 16), (50, 64, 8, 32)]:
        for seed in range(2):
            check(drawn(tokens, experts, top_k, seed=seed), experts, columns)
        assert compute_max_tiles(tokens, top_k, experts, columns) >= min(experts, tokens * top_k)


SHAPES = {
    "v2-lite": dict(experts=64, top_k=6, hidden=2048, expert_size=1408),
    "qwen3-next": dict(experts=512, top_k=10, hidden=2048, expert_size=512, quantized=True),
    "v3": dict(experts=256, top_k=8, hidden=7168, expert_size=2048, quantized=True),
    "glm-4.7-flash": dict(experts=64, top_k=4, hidden=2048, expert_size=1536),
    "tiny": dict(experts=8, top_k=3, hidden=128, expert_size=64),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 8192])
def test_a_cut_fits_its_sizes_and_shared_memory(tokens, shape):
    config = choose(tokens=tokens, **shape)
    hidden, width = shape["hidden"], shape["expert_size"]
    stored = "float8_e4m3fn" if shape.get("quantized") else "bfloat16"
    for product, rows, depth, out in (
        (config.gate_up, width, hidden, "bfloat16"),
        (config.down, hidden, width, "float32"),
    ):
        of_item = product.rows * (1 if product is config.gate_up else product.parts)
        assert rows % of_item == 0 and depth % product.depth == 0
        assert panel(depth) % product.depth == 0 and panel(rows) % 64 == 0
        stages = stages_of(product, config.columns, "bfloat16", out, stored)
        wide = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}
        stage = product.parts * product.rows * product.depth * wide[stored]
        stage += config.columns * product.depth * 2
        results = product.rows * config.columns * wide[out]
        assert stages >= 3 and stages * stage + results <= 227 * 1024
        # Accumulators, and of FP8 the running sums beside them, leave a thread some registers.
        sums = product.parts * config.columns // 2
        assert sums * (2 if shape.get("quantized") else 1) <= 128


def test_few_tokens_are_one_small_tile_and_many_a_large_one():
    assert token_tile(6, 64, 1) == 8 and token_tile(48, 2, 8) == 8
    assert token_tile(49152, 64, 8192) == 128
    assert token_tile(49152, 64, 8192, max_tile=64) == 64
    with pytest.raises(dataclasses.FrozenInstanceError):
        choose(tokens=1, **SHAPES["v2-lite"]).columns = 16
