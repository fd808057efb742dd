"""MLA decode of FP8 caches with more packed rows than the products have columns, against float64 of
what the cache holds."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mla
from jaxattn.kernels.mla.decode.launch import uses_swap_ab
from tests.helpers.kernel_cases import (
    assert_mla_close,
    both_devices,
    mla_case,
    no_races,
    slow_interpreted,
)
from tests.kernels.mla.decode.test_swap_ab import (
    Held,
    Stored,
    assert_as_xla,
    assert_every_fp8_number,
    fp8_formats,
    stored,
    stored_case,
)
from tests.kernels.mla.decode.test_warp_specialized import cut_at, dealt_out, even_cuts, kernel


def decode(some: Stored, implementation, *, q=None, **arguments):
    """On the GPU as the op calls it; in the interpreter with race detection."""
    case, kv_scale = some.case, None if some.kv_scale is None else jnp.float32(some.kv_scale)
    assert not uses_swap_ab(*case.q.shape[1:3], case.kv_cache)
    interpret = implementation != "mosaic_gpu"
    with no_races() if interpret else contextlib.nullcontext():
        outs = kernel(
            case.q if q is None else q, *case.args[1:], scale=case.scale, interpret=interpret,
            layer=case.layer, kv_scale=kv_scale,
            query_lens=case.query_lens, **arguments,
        )  # fmt: skip
        return jax.block_until_ready(outs)


@pytest.mark.sampled
@slow_interpreted(
    "a scale of another token; found by rows with fewer query tokens there and cut rows with heads "
    "as columns too"
)
@pytest.mark.parametrize(
    "format, page, output_by_tma", [("float8_e4m3fn", 16, True), ("uint8", 64, False)]
)
def test_cut_rows_tails_and_a_row_without_tokens(format, page, output_by_tma, implementation):
    """Pieces of 3, 2, 1 and 1 pages, one after another in a part; places come round."""
    some = stored(format, [290, 0, 20, 64], heads=36, page=page, table_tail=-1)
    schedule = cut_at(some.case, [(0, 0), (0, 3)])
    outs = decode(some, implementation, schedule=schedule, output_by_tma=output_by_tma)
    assert_mla_close(some.held, *outs)


@both_devices
def test_rows_with_fewer_query_tokens_and_a_nan_of_their_own(implementation):
    """And of one page in two tiles; the NaN shows in its row alone."""
    some = stored("uint8", [70, 2, 3], heads=33, q_len=2, page=32)
    for case in (some.case, some.held):
        case.query_lens = jnp.asarray([1, 2, 2], jnp.int32)
    cache = np.array(some.case.kv_cache)
    cache[1, some.case.block_tables[1, 0], 0, 300] = 0x7F
    some.case.kv_cache = jnp.asarray(cache)
    outs = decode(some, implementation, schedule=cut_at(some.case, [(0, 0)]))
    out, lse = map(np.asarray, outs)
    assert np.isnan(out[1]).all() and np.isnan(lse[1]).all()
    np.testing.assert_array_equal(out[0, 1], 0)
    names, others = ("q", "block_tables", "seq_lens", "query_lens"), np.array([0, 2])
    rows = {name: getattr(some.held, name)[others] for name in names}
    assert_mla_close(dataclasses.replace(some.held, **rows), out[others], lse[others])


@pytest.mark.gpu
@fp8_formats
@pytest.mark.parametrize("heads, q_len", [(33, 1), (128, 1), (130, 1), (64, 2), (11, 6), (16, 4)])
@pytest.mark.parametrize("page", [16, 64, 128])
def test_published_shapes(heads, q_len, page, format):
    """Of normal data; and each number as close as FlashMLA's tests want it, of their data."""
    rng = np.random.default_rng(heads * 10 + q_len)
    lens = [int(n) for n in rng.integers(0, 700, 6)] + [0, 1, 20, 63, 64, 65, 140, 4096]
    for clamped in (False, True):
        some = stored(
            format, lens, q_len=q_len, heads=heads, seed=heads, clamped=clamped, page=page
        )
        assert_mla_close(some.held, *decode(some, "mosaic_gpu"), each=clamped)


@pytest.mark.gpu
@fp8_formats
def test_more_rows_than_parts(format):
    some = stored(format, [3, 0, 700, 50] * 70, heads=128)
    assert_mla_close(some.held, *decode(some, "mosaic_gpu"))
    assert_mla_close(some.held, *decode(some, "mosaic_gpu", schedule=dealt_out(some.case, 66)))


@pytest.mark.gpu
@fp8_formats
@pytest.mark.parametrize("parts", [1, 2, 7, 66])
def test_parts_of_long_rows(parts, format):
    lens = [16384, 5000, 0, 64]
    some = stored(format, lens, heads=128)
    schedule = cut_at(some.case, even_cuts(lens, parts))
    assert_mla_close(some.held, *decode(some, "mosaic_gpu", schedule=schedule))


@pytest.mark.gpu
def test_scales_far_apart():
    """Of tokens and of blocks; and queries are far from 1."""
    some = stored("uint8", [200], heads=128)
    cache = np.array(some.case.kv_cache)
    scales = cache[..., 512:528].copy().view("<f4")
    for place, page in enumerate(np.asarray(some.case.block_tables)[0, :4]):
        exponents = np.random.default_rng(place).integers(-18, 3, scales[1, page].shape)
        scales[:, page] *= np.exp2(np.float32(exponents + 3 * place))
    cache[..., 512:528] = scales.view(np.uint8)
    powers = np.exp2(np.linspace(-11, -3, 128).round())
    for case in (some.case, some.held):
        case.q = case.q * jnp.asarray(powers[:, None], case.q.dtype)
    some.case.kv_cache = jnp.asarray(cache)
    some.held.kv_cache = Held(some.case.kv_cache, None)
    outs = decode(some, "mosaic_gpu", schedule=cut_at(some.case, [(0, 0)]))
    assert_mla_close(some.held, *outs, lse_rtol=2e-6)  # the LSE is up to 460


@pytest.mark.gpu
def test_own_scales_of_nan_and_of_0():
    some = stored("uint8", [3, 70, 3, 3], heads=40)
    cache, pages = np.array(some.case.kv_cache), np.asarray(some.case.block_tables)
    scales = cache[..., 512:528].copy().view("<f4")
    scales[1, pages[0, 0], 1, 2] = np.nan
    scales[1, pages[1, 0]] = scales[1, pages[2, 0], :3] = scales[1, pages[3, 0], 1, 3] = 0
    cache[..., 512:528] = scales.view(np.uint8)
    some.case.kv_cache = jnp.asarray(cache)
    out, lse = decode(some, "mosaic_gpu", schedule=cut_at(some.case, [(0, 0)]))
    assert_as_xla(some, out, lse)
    assert np.isnan(out[0]).all() and np.isfinite(out[1:]).all()


@pytest.mark.gpu
@fp8_formats
def test_every_fp8_number_under_any_scale(format):
    assert_every_fp8_number(format, heads=128)


@pytest.mark.gpu
@fp8_formats
def test_queries_in_two_parts_give_the_bits_of_one(format):
    some = stored(format, [300, 0, 66], heads=64, q_len=2)
    pair = some.case.q[..., :512], some.case.q[..., 512:]
    one, two = decode(some, "mosaic_gpu"), decode(some, "mosaic_gpu", q=pair)
    for x, y in zip(one, two, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.gpu
@fp8_formats
@pytest.mark.parametrize("lens", [[4096, 1000, 77, 0] * 16, [65536], [65, 700] * 70])
def test_the_same_bits_every_run(lens, format):
    some = stored(format, lens, heads=128)
    first = decode(some, "mosaic_gpu")
    assert_mla_close(some.held, *first)
    for _ in range(100):
        again = decode(some, "mosaic_gpu")
        assert all(bool((a == b).all()) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu
@fp8_formats
def test_a_row_keeps_its_bits_whoever_is_beside_it(format):
    rng = np.random.default_rng(3)
    some = stored(format, [5000] + [int(n) for n in rng.integers(1, 5000, 4)], heads=128)
    seen = []
    for others in (some.case.seq_lens, some.case.seq_lens.at[1:].set(0)):
        now = dataclasses.replace(some, case=dataclasses.replace(some.case, seq_lens=others))
        schedule = mla.decode_schedule(
            others, q_len=1, num_heads=128, max_pages=some.case.block_tables.shape[1],
            batch_invariant=True,
        )  # fmt: skip
        seen.append(decode(now, "mosaic_gpu", schedule=schedule)[0][0])
    assert bool((seen[0] == seen[1]).all())


@pytest.mark.gpu
@fp8_formats
def test_large_rope_numbers_and_queries_of_0_or_inf(format):
    case = mla_case([5] * 6, heads=34)
    q, page = np.array(case.q, np.float32), np.asarray(case.block_tables)[:, 0]
    q[0] = 0
    q[1] *= 2.0**-130  # subnormal
    q[2, 0, 0, 7], q[3, 0, 1, 570] = np.inf, -np.inf
    q[4, ..., 512:] *= 1000
    case.q = jnp.asarray(q, case.q.dtype)
    case.kv_cache = case.kv_cache.at[1, page[4], :, 512:].multiply(1e-3)
    some = stored_case(format, case)
    out, lse = decode(some, "mosaic_gpu", schedule=cut_at(case, [(0, 0)]))
    assert_as_xla(some, out, lse)
