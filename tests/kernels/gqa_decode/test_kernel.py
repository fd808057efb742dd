"""The Mosaic GPU kernel of `gqa_decode` against float64, in the interpreter and on a Hopper GPU."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.arena import Arena
from jaxattn.kernels.gqa_decode.launch import gqa_decode_mosaic
from jaxattn.kernels.gqa_decode.schedule import PairSchedule, decode_schedule
from jaxattn.kernels.gqa_decode.scratch import scratch
from jaxattn.kernels.mla_decode.schedule import Schedule
from tests.helpers.gqa_cases import assert_gqa_close, expected_shape, gqa_case
from tests.helpers.kernel_cases import both_devices, no_races

kernel = jax.jit(
    gqa_decode_mosaic,
    static_argnames=("scale", "window", "soft_cap", "interpret", "detect_races"),
)


def decode(case, implementation, **arguments):
    """In the interpreter with race detection."""
    interpret = implementation == "mosaic_gpu_interpret"
    with no_races() if interpret else contextlib.nullcontext():
        outs = kernel(
            *case.args, scale=case.q.shape[-1] ** -0.5, layer=case.layer, interpret=interpret,
            detect_races=interpret, **case.options, **arguments,
        )  # fmt: skip
        return jax.block_until_ready(outs)


def cut_at(case, cuts):
    """The schedule whose parts begin at these (pair, step)."""
    kv_heads = case.kv_cache.shape[4]
    pairs = case.q.shape[0] * kv_heads
    places, steps = np.array([*cuts, (pairs, 0)], np.int32).T
    line = Schedule.of(jnp.asarray(places), jnp.asarray(steps), pairs)
    return PairSchedule(line, kv_heads, case.q.shape[1], case.options["window"])


@both_devices
@pytest.mark.parametrize("group, dim", [(1, 64), (5, 128), (16, 256)])
def test_matches_float64(group, dim, implementation):
    case = gqa_case([70, 0, 1], group=group, kv_heads=2, dim=dim)
    assert_gqa_close(case, *decode(case, implementation, schedule=cut_at(case, [(0, 0)])))
