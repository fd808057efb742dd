"""What a GPU has of half a head before it sends it, and what all GPUs' pieces make, beside float64.

The sending is tested on GPUs alone: tests/parallel/test_gpus_context_parallel_decode.py.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.collectives import peer_transfer as peers
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.mla.decode.combine import CombineReduction
from jaxattn.kernels.mla.decode.distributed_combine import (
    SHARERS,
    DistributedCombineCta,
    exchange_smem,
    mailbox_shape,
)
from tests.helpers.kernel_cases import both_devices, no_races
from tests.kernels.mla.decode.test_combine import PARTS, SLOTS, merged_exactly

ROWS, HEAD, FIRST = 8, 2, 3


def run(body, grid, inputs, outputs, scratch, interpret):
    with no_races() if interpret else contextlib.nullcontext():
        found = jax.jit(
            lambda inputs: launch(
                body,
                name="test",
                grid=grid,
                inputs=inputs,
                outputs=outputs,
                scratch=scratch,
                warpgroups=SHARERS,
                compiler_params=peers.COMPILER,
                interpret=interpret,
            )
        )(jax.tree.map(jnp.asarray, inputs))
        return jax.tree.map(np.asarray, jax.block_until_ready(found))


@pytest.mark.sampled
@both_devices
def test_the_state_of_rows_that_are_cut_and_of_rows_that_are_not(implementation):
    batch, rng = len(SLOTS), np.random.default_rng(5)
    partial = rng.standard_normal((2 * PARTS, ROWS, 512)).astype(np.float32)
    lse = (5 * rng.standard_normal((2 * PARTS, ROWS))).astype(np.float32)
    lse[[6, 59, 60]] = -np.inf  # two of these are all that a row has
    unused = np.setdiff1d(np.arange(2 * PARTS), sum(SLOTS, []))
    partial[unused], lse[unused] = np.nan, np.nan
    partial[:, HEAD + 1 :] = np.nan
    first = [each[0] if each else 0 for each in SLOTS]
    others = [each[1] - 2 if each else 0 for each in SLOTS]
    slots = np.asarray([first, [len(each) for each in SLOTS], others], np.int32)
    lens, scheduled_lens = np.arange(batch, dtype=np.int32), np.arange(batch, dtype=np.int32)
    scheduled_lens[-1] += 1  # a row of which the schedule knows another length is as it was
    alone = rng.standard_normal((FIRST + batch * ROWS, 512)).astype(jnp.bfloat16)
    alone_lse = rng.standard_normal((batch, ROWS)).astype(np.float32)

    def body(sums, tops, totals, barrier, state_ref, found_ref, **given) -> None:
        row, half = lax.axis_index("row"), lax.axis_index("half")
        sharers = CombineReduction(SHARERS, sums, tops, totals, barrier)
        block = DistributedCombineCta([FIRST, 0], ROWS, sharers, out=None, **given)
        state, lse = block.state(row, HEAD, half)

        @pl.when(lax.axis_index("wg") == 0)
        def _():
            state_ref.at[row, pl.ds(half * 256, 256)][...] = state
            every = plgpu.layout_cast(lax.broadcast_in_dim(lse, (256,), []), peers.STATE)
            found_ref.at[row, pl.ds(half * 256, 256)][...] = every

    given = dict(
        partial_lse=lse, slots=slots, lens=lens, scheduled_lens=scheduled_lens, alone=alone
    )
    given |= dict(partial=partial.reshape(-1, 512), lse=alone_lse)
    shape = jax.ShapeDtypeStruct((batch, 512), jnp.float32)
    interpret = implementation != "mosaic_gpu"
    found = run(
        body, {"row": batch, "half": 2}, given, {"state_ref": shape, "found_ref": shape},
        exchange_smem(), interpret,
    )  # fmt: skip
    for row, some in enumerate(SLOTS):
        expected = alone[FIRST + row * ROWS + HEAD].astype(np.float32), alone_lse[row, HEAD]
        if some and some is not SLOTS[-1]:
            out, of_all = merged_exactly(partial[some, : HEAD + 1], lse[some, : HEAD + 1])
            expected = out[HEAD], of_all[HEAD]
        np.testing.assert_allclose(found["state_ref"][row], expected[0], atol=1e-4)
        np.testing.assert_allclose(found["found_ref"][row], expected[1], rtol=1e-5)


@pytest.mark.sampled
@both_devices
@pytest.mark.parametrize("seen", [(1, 1, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0)])
def test_the_states_of_all_gpus_make_one_output(seen, implementation):
    """Those of GPUs that saw no key count for nothing."""
    rng, gpus = np.random.default_rng(6), len(seen)
    pieces = rng.standard_normal((gpus, 512)).astype(np.float32)
    lses = np.where(seen, 5 * rng.standard_normal(gpus), -np.inf).astype(np.float32)

    def body(pieces_ref, lses_ref, out) -> None:
        half = lax.axis_index("half")
        given = dict.fromkeys(
            ("partial_lse", "slots", "lens", "scheduled_lens", "alone", "partial")
        )
        block = DistributedCombineCta([0, 0], ROWS, None, lse=None, out=out, **given)
        dims = pl.ds(half * 256, 256)
        states = [
            (plgpu.load(pieces_ref.at[i, dims], layout=peers.STATE, optimized=False), lses_ref[i])
            for i in range(gpus)
        ]
        pl.when(lax.axis_index("wg") == 0)(lambda: block.write(0, 0, half, states))

    found = run(
        body, {"half": 2}, {"pieces_ref": pieces, "lses_ref": lses},
        {"out": jax.ShapeDtypeStruct((1, 1, 512), jnp.bfloat16)}, {},
        implementation != "mosaic_gpu",
    )["out"][0, 0]  # fmt: skip
    expected, _ = merged_exactly(pieces[:, None], lses[:, None])
    np.testing.assert_allclose(found.astype(np.float32), expected[0], atol=2e-2)


def test_a_mailbox_has_a_count_for_each_half_of_each_head_and_for_the_states_of_all():
    assert mailbox_shape(2, 32) == (128, 512)
