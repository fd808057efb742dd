"""Exact mode: a row's log-probabilities are the same bits in any company, and when it is scored."""

import functools
import random

import jax
import numpy as np
import pytest

from jaxattn import Engine, Limits, Request
from jaxattn.engine.startup.decode_step_count import choose_decode_steps
from tests.helpers.exact_rows import (
    FAMILIES,
    LEAST,
    TINY,
    bits,
    compare,
    exact_engine,
    exact_model,
    on_gpu,
    random_rows,
)

REASON = "a mixer whose bits depend on other rows; found in the hybrids too"
FEW = ("gdn", "kda")  # between them all mixers, and experts


@functools.cache
def engine_of(family: str) -> Engine:
    return exact_engine(family, TINY, batch=4, num_pages=9)


@pytest.mark.parametrize(
    "family",
    [
        family if family == "gdn" else pytest.param(family, marks=pytest.mark.slow(reason=REASON))
        for family in FAMILIES
    ],
)
def test_no_bit_differs_in_other_company_or_when_a_row_is_scored(family):
    engine = engine_of(family)
    found = compare(engine, random_rows(random.Random(3), 14, TINY["vocab"]), random.Random(5))
    assert not found.differing
    assert found.preempted and found.replayed and found.cached and found.tokens > 150


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("family", FEW)
def test_no_bit_of_10_000_rows_differs(family):
    draw = random.Random(7)
    found = compare(on_gpu(family), random_rows(draw, 10_000, LEAST["vocab"]), draw)
    assert not found.differing
    assert found.preempted and found.replayed and found.cached
