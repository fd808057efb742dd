"""What is asked into L2 for each part of a schedule: the pages that its block reads first."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mla
from jaxattn.kernels.hopper.ahead import Ahead, askable, begun


@pytest.mark.parametrize(
    "lens, batch_invariant",
    [([1_000_000], True), ([5000, 0, 70, 12_000], False), ([0, 0, 64], True), ([300] * 40, False)],
)
def test_a_part_begins_with_pages_of_one_row_that_has_them(lens, batch_invariant):
    pages = -(-max(lens) // 64)
    schedule = mla.decode_schedule(
        jnp.asarray(lens, jnp.int32),
        q_len=1,
        num_heads=32,
        max_pages=pages,
        page_size=64,
        batch_invariant=batch_invariant,
    )
    tables = jnp.zeros((len(lens), pages), jnp.int32)
    ahead = Ahead(
        jnp.zeros((1, 1, 64, 576)), jnp.zeros(1, jnp.int32), tables, jnp.asarray(lens),
        schedule.cuts, schedule.order,
    )  # fmt: skip
    found = [begun(ahead, part) for part in range(ahead.parts)]
    asked = {
        (int(row), int(first) + i): None
        for row, first, count in found
        for i in range(max(int(count), 0))
    }
    # Each page once at most; with one row each page of it.
    assert len(asked) == sum(max(int(count), 0) for *_, count in found)
    assert all(page < -(-lens[row] // 64) for row, page in asked)
    if len(lens) == 1:
        assert sorted(page for _, page in asked) == list(range(pages))
    starts = {(int(row), int(first)) for row, first, count in found if count > 0}
    real = sum(length > 0 for length in lens)
    assert len(starts) >= min(real, 1)


def test_pages_of_64_tokens_in_a_stack_of_layers_can_be_asked_for():
    def cache(*shape, dtype=jnp.bfloat16):
        return np.zeros(shape, dtype)

    assert askable(cache(2, 3, 64, 576))
    assert askable(cache(2, 3, 64, 656, dtype=np.uint8))
    assert not askable(cache(3, 64, 576)) and not askable(cache(2, 3, 16, 576))
