"""Partial results merged by the kernel, by one warpgroup and by several, against float64."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import both_devices, no_races

from jaxattn.kernels import mla_combine
from jaxattn.kernels.mla_combine import combine
from jaxattn.kernels.mla_schedule import Schedule


@both_devices
@pytest.mark.parametrize("sharers", [1, 3])
def test_parts_that_see_nothing_much_and_nan(sharers, implementation, monkeypatch):
    monkeypatch.setattr(mla_combine, "BLOCKS", 4)  # so few that a lone warpgroup has several rows
    interpret = implementation != "mosaic_gpu"
    rng, rows, number = np.random.default_rng(sharers), 8, 29
    partial = rng.standard_normal((2 * number, rows, 512)).astype(np.float32)
    lse = (100 * rng.standard_normal((2 * number, rows))).astype(np.float32)
    lse[6, :] = -np.inf
    lse[:, 1] = -np.inf  # a row that sees nothing anywhere
    lse[4, 2] = np.nan
    # Row 0 of the batch was written whole; row 1 has all parts, the first of them in slot 5.
    used = [5, *range(2, 2 * number, 2)]
    unused = np.setdiff1d(np.arange(2 * number), used)
    partial[unused], lse[unused] = np.nan, np.nan
    slots = jnp.asarray([[0, 5], [0, number], [0, 0]], jnp.int32)
    schedule = Schedule(jnp.zeros((2, number + 1), jnp.int32), slots)
    whole = rng.standard_normal((rows, 512)).astype(np.float32)
    out = jnp.asarray(np.concatenate([np.full((3, 512), 7), whole, np.full((rows, 512), np.nan)]))

    def run(out, partial, own_lse, lse):
        refs = [jax.new_ref(out), jax.new_ref(partial.reshape(-1, 512))]
        merged = combine(
            refs, [3, 0], own_lse, lse, schedule, used=rows, sharers=sharers,
            interpret=interpret, detect_races=interpret,
        )  # fmt: skip
        return jax.freeze(refs[0]), merged

    own_lse = jnp.asarray([[1.5] * rows, [np.nan] * rows], jnp.float32)
    with no_races() if interpret else contextlib.nullcontext():
        given = out, partial, own_lse, jnp.asarray(lse)
        out, merged = jax.block_until_ready(jax.jit(run)(*given))
    np.testing.assert_array_equal(out[: 3 + rows], np.concatenate([np.full((3, 512), 7), whole]))
    np.testing.assert_array_equal(merged[0], own_lse[0])

    exact = lse[used].astype(np.float64)
    top = np.where(np.isneginf(exact.max(axis=0)), 0.0, exact.max(axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(exact - top)
        expected = np.einsum("pr,prd->rd", weights, partial[used]) / weights.sum(axis=0)[:, None]
        expected_lse = top + np.log(weights.sum(axis=0))
    expected[1] = 0
    np.testing.assert_allclose(out[3 + rows :], expected, atol=1e-4)
    np.testing.assert_allclose(merged[1], expected_lse, rtol=1e-5)
    assert np.isnan(out[3 + rows + 2]).all() and np.isneginf(merged[1, 1])
