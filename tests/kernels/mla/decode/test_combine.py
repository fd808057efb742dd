"""Partial results merged by the kernel, by one warpgroup and by several, against float64."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.kernels.attention.split_kv_schedule import Schedule
from jaxattn.kernels.mla.decode import combine as mla_combine
from jaxattn.kernels.mla.decode.arguments import MlaDecodeCall
from jaxattn.kernels.mla.decode.combine import SplitRows, combine
from tests.helpers.kernel_cases import both_devices, no_races, slow

# Of each row of the batch: the slots of its partial results. The first was written whole; one has
# all parts, its first one in slot 5; of the last the schedule knows another length.
SLOTS = [
    [],
    [5, *range(2, 58, 2)],
    [59, 60],
    [61, 64, 66, 68, 70, 72, 74, 76, 78],
    [81, 82, 84],
    [83, 86],
]
PARTS = 44


def merged_exactly(partial, lse):
    """Of pieces [n, rows, 512] and their LSE [n, rows], in float64."""
    exact = lse.astype(np.float64)
    top = np.where(np.isneginf(exact.max(axis=0)), 0.0, exact.max(axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(exact - top)
        out = np.einsum("pr,prd->rd", weights, partial) / weights.sum(axis=0)[:, None]
        found = top + np.log(weights.sum(axis=0))
    out[np.isneginf(found)] = 0
    return out, found


@pytest.mark.slow_cases(reason="a slot of another row; found by 1 and 16 parts and three rows too")
@pytest.mark.sampled
@both_devices
@pytest.mark.parametrize(
    "sharers, rows_of_a_block, rows, used",
    [
        (1, 1, 8, 8),
        slow(1, 2, 8, 8),
        slow(1, 8, 16, 8),
        (1, 16, 16, 16),
        (2, 1, 8, 8),
        (3, 1, 8, 8),
    ],
)
def test_parts_that_see_nothing_much_and_nan(
    sharers, rows_of_a_block, rows, used, implementation, monkeypatch
):
    batch = len(SLOTS)
    monkeypatch.setattr(mla_combine, "BLOCKS", batch * used // rows_of_a_block)
    interpret = implementation != "mosaic_gpu"
    rng = np.random.default_rng(sharers)
    partial = rng.standard_normal((2 * PARTS, rows, 512)).astype(np.float32)
    lse = (100 * rng.standard_normal((2 * PARTS, rows))).astype(np.float32)
    lse[6, :] = -np.inf
    lse[:, 1] = -np.inf  # a row that sees nothing anywhere
    lse[4, 2] = np.nan
    unused = np.setdiff1d(np.arange(2 * PARTS), sum(SLOTS, []))
    partial[unused], lse[unused] = np.nan, np.nan
    partial[:, used:], lse[:, used:] = np.nan, np.nan
    first = [each[0] if each else 0 for each in SLOTS]
    others = [each[1] - 2 if each else 0 for each in SLOTS]
    slots = jnp.asarray([first, [len(each) for each in SLOTS], others], jnp.int32)
    merges = [bool(some) and some is not SLOTS[-1] for some in SLOTS]
    lens, scheduled_lens = jnp.arange(batch), jnp.arange(batch).at[-1].add(1)
    schedule = Schedule(jnp.zeros((2, PARTS + 1), jnp.int32), slots, seq_lens=scheduled_lens)
    before = rng.standard_normal((3 + batch * rows + 2, 512)).astype(np.float32)
    before_lse = rng.standard_normal((batch, rows)).astype(np.float32)

    def run(out, partial, own_lse, lse):
        refs = [jax.new_ref(out), jax.new_ref(partial.reshape(-1, 512))]
        call = MlaDecodeCall(
            q=jnp.zeros((batch, 1, used - 1, 512)), kv_cache=None, block_tables=None,
            seq_lens=lens, scale=1.0, schedule=schedule,
        )  # fmt: skip
        merged = combine(
            call, SplitRows(refs, [3, 0], own_lse, lse), sharers=sharers, interpret=interpret,
        )  # fmt: skip
        return jax.freeze(refs[0]), merged

    with no_races() if interpret else contextlib.nullcontext():
        given = (before, partial, before_lse, lse)
        out, found = jax.block_until_ready(jax.jit(run)(*map(jnp.asarray, given)))
    expected, expected_lse = before.copy(), before_lse.copy()
    for row, some in enumerate(SLOTS):
        if merges[row]:
            here = 3 + row * rows
            expected[here : here + used], expected_lse[row, :used] = merged_exactly(
                partial[some, :used], lse[some, :used]
            )
    np.testing.assert_allclose(out, expected, atol=1e-4)
    np.testing.assert_allclose(found, expected_lse, rtol=1e-5)
    for row, some in enumerate(SLOTS):
        here = 3 + row * rows
        if not merges[row]:
            np.testing.assert_array_equal(out[here : here + rows], before[here : here + rows])
        assert np.isneginf(found[row, 1]) == merges[row]
        assert np.isnan(found[row, 2]) == (4 in some)


def test_a_rows_warpgroups_are_as_many_as_leave_no_block_without_a_place():
    """A token of 128 heads; two, and two rows, whose blocks of four warpgroups would take turns;
    few pieces a row; many rows."""
    shapes = [(1, 128, 66), (2, 128, 37), (2, 128, 16), (3, 128, 66)]
    assert [mla_combine._sharers(*shape) for shape in shapes] == [4, 2, 1, 1]
