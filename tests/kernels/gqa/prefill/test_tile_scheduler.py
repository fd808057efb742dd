"""The line of tiles, apart from the kernel."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn.kernels.gqa.prefill.tile_scheduler import GqaPrefillTileScheduler

KEYS, ROWS = 16, 32


@settings(deadline=None)
@given(
    first=st.integers(0, 40),
    queries=st.integers(1, 90),
    prefix=st.integers(0, 100),
    more=st.integers(-50, 30),
    packed=st.sampled_from([1, 3]),
    item=st.integers(0, 5),
    warpgroup=st.integers(0, 1),
)
def test_seen_first_counts_the_first_steps_that_all_rows_see(
    first, queries, prefix, more, packed, item, warpgroup
):
    """Beside `all_visible` and `all_keys_exist` of each step; `more` keys than queries are new."""
    tiles = GqaPrefillTileScheduler(
        rows=ROWS, keys=KEYS, packed=packed, count=6, heads=1, group=1, window=None
    )
    bounds = jnp.asarray([[first, queries, prefix, max(queries + more, 0), more]], jnp.int32)
    tile = tiles.at(jnp.int32(item), np.asarray(bounds))
    row = tile.start + warpgroup * ROWS // 2
    steps = [tiles.step(tile, jnp.int32(i)) for i in range(int(tile.steps))]
    seen = [bool(tiles.all_visible(tile, step, row, ROWS // 2)) for step in steps]
    number = int(tiles.count_unmasked_steps(tile, row))
    assert min(number, len(steps)) == [*seen, False].index(False)
    assert all(bool(tiles.all_keys_exist(tile, step)) for step in steps[: max(number, 0)])
