"""What GPUs with parts of a row's pages send each other: outputs and their log-sum-exps, and the
best of the tokens that an indexer chooses among."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxattn import mla
from jaxattn.nn.attention.token_indexer import IndexPages, IndexQueries, chosen
from jaxattn.parallel import ContextParallelPages, DeviceGroup, Parallel
from jaxattn.parallel.context_parallel import _pack_out_lse, _unpack_out_lse
from tests.helpers.virtual_devices import on_virtual_devices


@pytest.mark.parametrize("dtype, numbers", [("bfloat16", 10), ("float16", 10), ("float32", 9)])
def test_outputs_and_their_lse_are_sent_bit_for_bit(dtype, numbers):
    random = np.random.default_rng(5)
    out = jnp.asarray(random.standard_normal((3, 2, 8)), dtype).at[0, 0, 0].set(jnp.nan)
    lse = jnp.asarray(random.standard_normal((3, 2)), jnp.float32).at[1].set(-jnp.inf)
    joined = _pack_out_lse(out, lse)
    assert joined.shape == (3, 2, numbers) and joined.dtype.itemsize == out.dtype.itemsize
    found, found_lse = _unpack_out_lse(joined, out.dtype)
    np.testing.assert_array_equal(found, out.astype(jnp.float32))
    np.testing.assert_array_equal(found_lse, lse)


@pytest.mark.parametrize("ways, top_k, layer", [(2, 11, None), (4, 30, 1)])
@on_virtual_devices
def test_the_tokens_chosen_over_gpus_are_those_of_one(ways, top_k, layer):
    """Most scores are equal, one GPU has fewer tokens than are chosen, and some rows have fewer in
    all. NaN is wherever no row owns a page. With `layer` keys are FP8 with scales, in a stack."""
    page, lens, tokens, heads, dim = 4, np.int32([90, 0, 23, 2]), 2, 3, 8
    stripes = -(-int(lens.max()) // (page * ways))
    rng = np.random.default_rng(0)
    tables = rng.permutation(len(lens) * stripes + 3)[: len(lens) * stripes]
    tables = tables.reshape(len(lens), stripes).astype(np.int32)
    keys = rng.integers(-1, 2, (len(lens), stripes * ways * page, dim)).astype(np.float32)
    keys[:, ::3] = 0
    keys[np.arange(keys.shape[1]) >= lens[:, None]] = np.nan
    scales = 2.0 ** rng.integers(-2, 3, keys.shape[:2]).astype(np.float32)

    def by_page(values):
        """A row's pages on one device, in order, and dealt out."""
        shape = (len(lens), stripes, ways, page, *values.shape[2:])
        apart = np.full((ways, tables.max() + 5, *shape[3:]), np.nan, values.dtype)
        apart[:, tables] = np.moveaxis(values.reshape(shape), 2, 0)
        return values.reshape(-1, *shape[3:]), apart

    pages = [by_page(keys)]
    if layer is not None:
        pages = [by_page(keys.astype(jnp.float8_e4m3fn)), by_page(scales)]
        # The other layers hold NaN.
        pages = [
            tuple(
                np.stack([x if i == layer else np.full_like(x, np.nan) for i in range(3)], axis)
                for axis, x in enumerate(each)
            )
            for each in pages
        ]
    (together, *scale), apart = zip(*pages, strict=True)
    q = rng.integers(-2, 3, (len(lens), tokens, heads, dim)).astype(np.float32)
    weights = rng.integers(-1, 2, (len(lens), tokens, heads)).astype(np.float32)
    places = np.arange(len(lens) * stripes * ways, dtype=np.int32).reshape(len(lens), -1)
    scale = dict(k_scale=scale[0]) if scale else {}
    expected = np.asarray(
        mla.mla_index(q, weights, together, places, lens, top_k=top_k, layer=layer, **scale)
    )

    parallel = Parallel(tensor=ways, context=ways)
    group = DeviceGroup(parallel, tuple(jax.devices()[:ways]))

    def run(cache, tables, lens):
        size = dict(page_size=page, q_len=tokens)
        spread = ContextParallelPages.of(parallel, tables, lens, **size)
        asked = IndexQueries(q, weights, None)
        rows = spread.places, lens, None
        own = IndexPages(*(x[0] for x in cache))
        found = chosen(own, asked, rows, top_k, layer, None, spread)
        own = spread.own_positions(found)
        return found, spread.row_positions(own)[None]

    on = PartitionSpec(parallel.axes("context"))
    step = group.step(run, (on, group.rows, group.rows), (group.rows, on))
    found, of_each = jax.jit(step)(apart, tables, lens)
    np.testing.assert_array_equal(found, expected)
    # Of each GPU those in its pages, which together are all.
    of_each = np.asarray(of_each)[:, :, 0].reshape(ways, *expected.shape)
    assert ((of_each >= 0).sum(0) == (expected >= 0)).all()
    np.testing.assert_array_equal(of_each.max(0), expected)
    for gpu, own in enumerate(of_each):
        assert (own[own >= 0] // page % ways == gpu).all()
    few = [[0, 0], [min(22, top_k), min(23, top_k)], [1, 2]]
    assert (expected >= 0).sum(-1).tolist() == [[top_k] * 2, *few]
