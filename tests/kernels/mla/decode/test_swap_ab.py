"""MLA decode with heads as columns, and FP8 caches, against float64 of what the cache holds."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mla
from jaxattn.arena import Arena
from jaxattn.core.cache.formats import LatentFormat
from jaxattn.kernels.attention.split_kv_schedule import packed_rows
from jaxattn.kernels.hopper.device import plain_copies
from jaxattn.kernels.mla.decode.swap_ab.launch import block_columns
from tests.helpers.kernel_cases import (
    MLACase,
    assert_mla_close,
    both_devices,
    launch_mla_decode,
    mla_case,
    no_races,
    slow,
    slow_interpreted,
)
from tests.kernels.mla.decode.test_warp_specialized import (
    cut_at,
    dealt_out,
    even_cuts,
    in_the_batchs_order,
    kernel,
)

KV_SCALE = 0.013
formats = pytest.mark.parametrize("format", ["bfloat16", "float8_e4m3fn", "uint8"])
fp8_formats = pytest.mark.parametrize("format", ["float8_e4m3fn", "uint8"])


@dataclasses.dataclass
class Stored:
    """A case, its cache in some format and the latents that it holds, in float32."""

    case: MLACase
    held: MLACase  # its cache a `Held`
    kv_scale: float | None


@functools.partial(jax.jit, static_argnames="format")
def packed(latents, kv_scale, format: LatentFormat):
    """In one program: what lies between takes several times a cache's memory."""
    cache = format.pack(latents, kv_scale)
    if not format.block_scaled:
        return cache
    return jnp.where(jnp.isnan(latents).any(axis=-1, keepdims=True), jnp.uint8(0xFF), cache)


@functools.partial(jax.jit, static_argnames="format")
def unpacked(cache, kv_scale, format: LatentFormat):
    return format.unpack(cache, kv_scale).astype(jnp.float32)


@dataclasses.dataclass
class Held:
    """The latents in a cache, in float32, of the pages that are asked for."""

    cache: jax.Array
    kv_scale: float | None

    @property
    def shape(self):
        return self.cache.shape

    def __getitem__(self, index):
        return unpacked(self.cache[index], self.kv_scale, LatentFormat(self.cache.dtype))


def stored(format: str, *args, **kwargs) -> Stored:
    """Like `mla_case`; every byte of a token that no row owns is NaN's, scales included."""
    return stored_case(format, mla_case(*args, **kwargs))


def stored_case(format: str, case: MLACase) -> Stored:
    """The case, its latents stored in that format."""
    latents = LatentFormat(format)
    kv_scale = KV_SCALE if latents.per_tensor else None
    case.kv_cache = packed(case.kv_cache, kv_scale, latents)
    return Stored(case, dataclasses.replace(case, kv_cache=Held(case.kv_cache, kv_scale)), kv_scale)


def decode(some: Stored, implementation, *, schedule=None, arena=None):
    """On the GPU as it is called; in the interpreter with race detection."""
    case, kv_scale = some.case, None if some.kv_scale is None else jnp.float32(some.kv_scale)
    interpret = implementation != "mosaic_gpu"
    if not interpret:
        skip_where_it_is_refused(case.kv_cache.dtype)
    with no_races() if interpret else contextlib.nullcontext():
        outs = kernel(
            *case.args, scale=case.scale, columns=True, interpret=interpret,
            layer=case.layer, kv_scale=kv_scale,
            query_lens=case.query_lens, schedule=schedule, arena=arena,
        )  # fmt: skip
        return jax.block_until_ready(outs)


def skip_where_it_is_refused(dtype) -> None:
    """`test_assembler` has what happens there."""
    if LatentFormat(dtype).block_scaled and not plain_copies():
        pytest.skip("this assembler copies no page of a block-scaled cache: the other kernel runs")


def assert_as_xla(some: Stored, out, lse) -> None:
    """As close as `assert_mla_close` wants it, and NaN where XLA's is."""
    case = some.case
    wanted = mla.mla_decode(
        *case.args, scale=case.scale, layer=case.layer, kv_scale=some.kv_scale,
        implementation="xla",
    )  # fmt: skip
    out, expected = (np.asarray(x, np.float64) for x in (out, wanted[0]))
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    error = np.nan_to_num(np.abs(out - expected).max(axis=-1))
    assert (error <= 2 / 128 * np.nan_to_num(np.abs(expected).max(axis=-1))).all(), error
    np.testing.assert_allclose(lse, wanted[1], atol=1e-5, rtol=0)


@pytest.mark.slow_cases(
    reason="a scale of another token; found by block scales of cut rows that the op reads there too"
)
@both_devices
@pytest.mark.parametrize(
    "format, ordered", [slow("bfloat16", False), slow("float8_e4m3fn", True), slow("uint8", True)]
)
def test_cut_rows_tails_and_a_row_without_tokens(format, ordered, implementation):
    some = stored(format, [131, 0, 1], heads=3)
    schedule = cut_at(some.case, [(0, 0), (0, 2)])
    if ordered:
        schedule = in_the_batchs_order(schedule)
    assert_mla_close(some.held, *decode(some, implementation, schedule=schedule))


@pytest.mark.slow(reason="a token of another page; found by cut rows with tails there too")
@both_devices
def test_ragged_rows_of_two_blocks_and_small_pages(implementation):
    some = stored("uint8", [33, 2], heads=12, q_len=3, page=32, table_tail=-1)
    for case in (some.case, some.held):
        case.query_lens = jnp.asarray([1, 3], jnp.int32)
    beyond = np.arange(3) >= np.asarray(some.case.query_lens)[:, None]
    some.case.q = jnp.where(beyond[..., None, None], jnp.nan, some.case.q)
    schedule = cut_at(some.case, [(0, 0)])
    out, lse = decode(some, implementation, schedule=schedule)
    assert_mla_close(some.held, out, lse)
    assert (np.asarray(out)[beyond] == 0).all()


@pytest.mark.slow_cases(
    reason="tokens that see one piece alone, a third tile of heads; found by five tokens of "
    "bfloat16 there and by the same test on a GPU too"
)
@both_devices
@pytest.mark.parametrize(
    "format, q_len, heads, lens, cuts",
    [
        ("bfloat16", 5, 3, [66], [(0, 0), (0, 1)]),  # three of five tokens see one piece alone
        slow("uint8", 8, 2, [65], [(0, 0), (0, 1)]),
        slow("bfloat16", 16, 1, [20, 10], [(0, 0)]),
        slow("float8_e4m3fn", 1, 130, [20], [(0, 0)]),
    ],
)
def test_many_tokens_and_many_heads(format, q_len, heads, lens, cuts, implementation):
    """Of one layer's cache, with a table that is wider than it has pages; and each number as close
    as FlashMLA's tests want it, of their data."""
    some = stored(format, lens, q_len=q_len, heads=heads, clamped=True)
    case = some.case
    case.block_tables = jnp.pad(case.block_tables, ((0, 0), (0, 8)), constant_values=-1)
    lone = dataclasses.replace(case, kv_cache=case.kv_cache[case.layer], layer=None)
    assert lone.block_tables.shape[1] > lone.kv_cache.shape[0]
    given = dataclasses.replace(some, case=lone)
    outs = decode(given, implementation, schedule=cut_at(case, cuts))
    assert_mla_close(some.held, *outs, each=True)


@both_devices
@pytest.mark.parametrize(
    "lens, q_len, heads, dtype",
    [
        ([131, 0, 1], 1, 3, jnp.bfloat16),
        pytest.param([4096, 63, 700], 2, 8, jnp.float16, marks=pytest.mark.gpu),
        pytest.param([9000] + [130] * 140, 1, 16, jnp.bfloat16, marks=pytest.mark.gpu),
        pytest.param([9000] + [130] * 140, 1, 20, jnp.bfloat16, marks=pytest.mark.gpu),
        pytest.param([500, 64], 1, 33, jnp.bfloat16, marks=pytest.mark.gpu),  # two blocks a part
    ],
)
def test_latents_without_rotated_dims(lens, q_len, heads, dtype, implementation):
    some = stored_case(
        jnp.dtype(dtype).name, mla_case(lens, q_len=q_len, heads=heads, dtype=dtype, dim=512)
    )
    schedule = cut_at(some.case, [(0, 0), (0, 2)]) if implementation != "mosaic_gpu" else None
    assert_mla_close(some.held, *decode(some, implementation, schedule=schedule))


@pytest.mark.slow(
    reason="a barrier's phase that is wrong for a second row; found by own scales of NaN and of 0, "
    "with more rows than parts, there too"
)
@both_devices
def test_rows_one_after_another(implementation):
    """Of 5, 1 and 2 pages in one part: the second warpgroup has 2, 0 and 1."""
    some = stored("uint8", [290, 20, 100], heads=2)
    schedule = cut_at(some.case, [(0, 0)])
    assert_mla_close(some.held, *decode(some, implementation, schedule=schedule))


@pytest.mark.slow_cases(
    reason="a row of another part; found by own scales of NaN and of 0, whose rows are dealt out, "
    "there, and by ragged rows of such pages in mla/sparse/test_launch, too"
)
@both_devices
@pytest.mark.parametrize(
    "format, page", [pytest.param("float8_e4m3fn", 64, marks=pytest.mark.gpu), slow("uint8", 16)]
)
def test_more_rows_than_parts(format, page, implementation):
    some = stored(format, [3, 0, 70, 5], heads=2, q_len=2, page=page, table_tail=-1)
    for case in (some.case, some.held):
        case.query_lens = jnp.asarray([2, 0, 1, 2], jnp.int32)
    schedule = dealt_out(some.case, 2)
    assert_mla_close(some.held, *decode(some, implementation, schedule=schedule))


@slow_interpreted(
    "a NaN in another row; found by a scale of NaN there and by the same test on a GPU too"
)
@fp8_formats
@pytest.mark.parametrize("nan", [0x7F, pytest.param(0xFF, marks=pytest.mark.gpu)])
def test_a_nan_among_a_rows_own_keys_shows_in_that_row_alone(nan, format, implementation):
    if format != "uint8" and implementation != "mosaic_gpu":
        pytest.skip("the interpreter runs the other format")
    some = stored(format, [3, 66], heads=2)
    case = some.case
    nan = jnp.uint8(nan)
    if format != "uint8":
        nan = jax.lax.bitcast_convert_type(nan, jnp.float8_e4m3fn)
    case.kv_cache = case.kv_cache.at[1, case.block_tables[0, 0], 1, 300].set(nan)
    out, lse = decode(some, implementation, schedule=cut_at(case, [(0, 0)]))
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all()
    assert np.isfinite(out[1]).all() and np.isfinite(lse[1]).all()


@pytest.mark.slow(
    reason="a sum that is rescaled wrongly; found by a block of scales of NaN and of 0 there, "
    "and by float64 of cut rows, too"
)
@pytest.mark.parametrize(
    "implementation, heads",
    [
        ("mosaic_gpu_interpret", 2),
        # 8 columns, 24, and four blocks of 32.
        *(pytest.param("mosaic_gpu", heads, marks=pytest.mark.gpu) for heads in (2, 20, 128)),
    ],
)
def test_scales_far_apart_and_growing(implementation, heads):
    """Of tokens and of blocks; the largest so far grows, and queries are far from 1."""
    some = stored("uint8", [200], heads=heads)
    cache = np.array(some.case.kv_cache)
    scales = cache[..., 512:528].copy().view("<f4")
    page = some.case.kv_cache.shape[2]
    for place, number in enumerate(np.asarray(some.case.block_tables)[0, : -(-200 // page)]):
        exponents = np.random.default_rng(place).integers(-18, 3, (page, 4)) + 3 * place
        scales[:, number] *= np.exp2(np.float32(exponents))
    cache[..., 512:528] = scales.view(np.uint8)
    for case in (some.case, some.held):
        powers = np.exp2(np.linspace(-11, -3, heads).round())
        case.q = case.q * jnp.asarray(powers[:, None], case.q.dtype)
    some.case.kv_cache = jnp.asarray(cache)
    some.held.kv_cache = Held(some.case.kv_cache, None)
    outs = decode(some, implementation, schedule=cut_at(some.case, [(0, 0)]))
    assert_mla_close(some.held, *outs, lse_rtol=2e-6)  # the LSE is up to 460


@both_devices
def test_own_scales_of_nan_and_of_0(implementation):
    """Of a block of a token; of a whole page, and so of all that one warpgroup reads; of a row.

    There are more rows than parts.
    """
    some = stored("uint8", [3, 70, 3, 3], heads=2)
    cache, pages = np.array(some.case.kv_cache), np.asarray(some.case.block_tables)
    scales = cache[..., 512:528].copy().view("<f4")
    scales[1, pages[0, 0], 1, 2] = np.nan
    scales[1, pages[1, 0]] = scales[1, pages[2, 0], :3] = scales[1, pages[3, 0], 1, 3] = 0
    cache[..., 512:528] = scales.view(np.uint8)
    some.case.kv_cache = jnp.asarray(cache)
    out, lse = decode(some, implementation, schedule=dealt_out(some.case, 2))
    assert_as_xla(some, out, lse)
    assert np.isnan(out[0]).all() and np.isfinite(out[1:]).all()
    assert (np.asarray(out[2]) == 0).all() and np.isfinite(lse[2]).all()


@slow_interpreted(
    "a scale of a query that is 0 or not finite; found by scales of NaN and 0 of the cache too"
)
@fp8_formats
def test_queries_of_0_subnormal_or_inf_and_large_rope_numbers(format, implementation):
    if format == "uint8" and implementation != "mosaic_gpu":
        pytest.skip("the interpreter runs the other format")
    case = mla_case([5] * 6, heads=2)
    q, page = np.array(case.q, np.float32), np.asarray(case.block_tables)[:, 0]
    q[0] = 0
    q[1] *= 2.0**-130  # subnormal
    q[2, 0, 0, 7], q[3, 0, 1, 570] = np.inf, -np.inf
    q[4, ..., 512:] *= 1000
    case.q = jnp.asarray(q, case.q.dtype)
    cache = case.kv_cache.at[1, page[4], :, 512:].multiply(1e-3)
    case.kv_cache = cache.at[1, page[5], :, :512].multiply(1e-3)
    some = stored_case(format, case)
    out, lse = decode(some, implementation, schedule=cut_at(case, [(0, 0)]))
    assert_as_xla(some, out, lse)
    nan = np.zeros((6, 1, 2), bool)
    nan[2, 0, 0] = nan[3, 0, 1] = True  # and not the head beside it
    np.testing.assert_array_equal(np.isnan(out), np.repeat(nan[..., None], 512, axis=3))


def test_a_blocks_rows_are_no_more_than_what_is_kept():
    for q_len in range(1, 17):
        for heads in range(1, 140):
            columns, blocks = block_columns(q_len, heads)
            assert q_len * heads <= columns * blocks <= packed_rows(q_len, heads)


@both_devices
def test_the_op_reads_an_fp8_cache_into_an_arena(implementation):
    """Cut rows, tails and a row without tokens."""
    some = stored("uint8", [131, 0, 1], heads=3)
    case = some.case
    case.block_tables = jnp.pad(case.block_tables, ((0, 0), (0, 10)), constant_values=-1)
    spec = mla.scratch(batch=3, q_len=1, num_heads=3, max_pages=case.block_tables.shape[1])
    arena = jax.tree.map(lambda lane: jnp.full_like(lane, jnp.nan), Arena.allocate(spec))
    step = functools.partial(mla.mla_decode, scale=case.scale, implementation=implementation)
    schedule = in_the_batchs_order(cut_at(case, [(0, 0), (0, 2)]))
    with no_races(when=implementation != "mosaic_gpu"):
        out, lse, arena = jax.block_until_ready(
            step(*case.args, layer=case.layer, arena=arena, schedule=schedule)
        )
    assert_mla_close(some.held, out, lse)
    np.testing.assert_array_equal(arena.read(spec, "out")[:, :3].reshape(out.shape), out)


def test_fp8_caches_want_bfloat16_queries():
    q, cache = jnp.zeros((1, 1, 2, 576), jnp.float16), jnp.zeros((1, 64, 656), jnp.uint8)
    with pytest.raises(NotImplementedError, match="q float16, kv_cache uint8"):
        launch_mla_decode(
            q, cache, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), scale=0.1,
            interpret=True,
        )  # fmt: skip


@pytest.mark.gpu
@formats
@pytest.mark.parametrize(
    "heads, q_len",
    [(1, 1), (1, 16), (2, 8), (3, 4), (9, 1), (16, 1), (16, 2), (20, 1), (128, 1), (130, 1)],
)
def test_published_shapes(heads, q_len, format):
    """Of normal data; and each number as close as FlashMLA's tests want it, of their data, whose
    weights are all alike."""
    rng = np.random.default_rng(heads * 10 + q_len)
    lens = [int(n) for n in rng.integers(0, 700, 6)] + [0, 1, 20, 63, 64, 65, 140, 4096]
    for clamped in (False, True):
        some = stored(format, lens, q_len=q_len, heads=heads, seed=heads, clamped=clamped)
        assert_mla_close(some.held, *decode(some, "mosaic_gpu"), each=clamped)


def assert_every_fp8_number(format, heads, **options):
    """A row of one token is that token's latents, to the bit, in every head."""
    latents = LatentFormat(format)
    exponents = [-117, -100, -9, 0, 7, 8, 100] if latents.block_scaled else [0]
    cache = np.zeros((1, len(exponents), 64, latents.width), np.uint8)
    numbers = np.arange(512) % 256
    cache[0, :, 0, :512] = np.where(numbers % 128 == 127, 0, numbers)  # but NaN
    if latents.block_scaled:
        scales = np.repeat(np.exp2(np.float32(exponents)), 4).astype("<f4").view(np.uint8)
        cache[0, :, 0, 512:528] = scales.reshape(-1, 16)
        kv_scale = None
    else:
        cache, kv_scale = cache.view(jnp.float8_e4m3fn), jnp.float32(2)
    q = jnp.zeros((len(exponents), 1, heads, 576), jnp.bfloat16)
    tables = jnp.arange(len(exponents), dtype=jnp.int32)[:, None]
    step = jax.jit(functools.partial(launch_mla_decode, scale=1.0, layer=0, **options))
    out, _ = step(q, jnp.asarray(cache), tables, jnp.ones_like(tables[:, 0]), kv_scale=kv_scale)
    expected = latents.unpack(jnp.asarray(cache)[0, :, 0], kv_scale)[:, :512]
    of_heads = jnp.stack([expected.astype(out.dtype)] * heads, axis=1)
    np.testing.assert_array_equal(out[:, 0], of_heads)


@pytest.mark.gpu
@fp8_formats
def test_every_fp8_number_under_any_scale(format):
    skip_where_it_is_refused(format)
    assert_every_fp8_number(format, heads=3, columns=True)


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("page", [16, 32, 128])
def test_pages_of_other_sizes_at_real_shapes(page, format):
    some = stored(format, [1, 15, 16, 17, 0, 127, 128, 129, 3000], heads=16, q_len=2, page=page)
    assert_mla_close(some.held, *decode(some, "mosaic_gpu"))


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("parts", [1, 2, 7, 16, 132])
def test_parts_of_long_rows(parts, format):
    lens = [16384, 5000, 0, 64]
    some = stored(format, lens, heads=16)
    schedule = cut_at(some.case, even_cuts(lens, parts))
    assert_mla_close(some.held, *decode(some, "mosaic_gpu", schedule=schedule))


@pytest.mark.gpu
@pytest.mark.large
@formats
def test_page_offsets_beyond_2_31_bytes(format):
    first_page = 2**31 // (64 * 576) + 1
    some = stored(format, [200, 64], heads=16, layers=1, layer=0, first_page=first_page)
    assert_mla_close(some.held, *decode(some, "mosaic_gpu"))


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("heads", [16, 128])
def test_a_row_keeps_its_bits_whoever_is_beside_it(heads, format):
    rng = np.random.default_rng(heads)
    some = stored(format, [5000] + [int(n) for n in rng.integers(1, 5000, 4)], heads=heads)
    seen = []
    for others in (some.case.seq_lens, some.case.seq_lens.at[1:].set(0)):
        now = dataclasses.replace(some, case=dataclasses.replace(some.case, seq_lens=others))
        schedule = mla.decode_schedule(
            others, q_len=1, num_heads=heads, max_pages=some.case.block_tables.shape[1],
            batch_invariant=True,
        )  # fmt: skip
        seen.append(decode(now, "mosaic_gpu", schedule=schedule)[0][0])
    assert bool((seen[0] == seen[1]).all())


@pytest.mark.gpu
@formats
@pytest.mark.parametrize(
    "lens, heads",
    [
        *(([4096, 1000, 77, 0] * 16, heads) for heads in (16, 20, 128)),
        *(([65536], heads) for heads in (16, 128)),  # parts that several warpgroups merge
    ],
)
def test_the_same_bits_every_run(lens, heads, format):
    some = stored(format, lens, heads=heads)
    first = decode(some, "mosaic_gpu")
    assert_mla_close(some.held, *first)
    for _ in range(100):
        again = decode(some, "mosaic_gpu")
        assert all(bool((a == b).all()) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lens, format, options",
    [
        ([300] * 264, "bfloat16", {}),  # more rows than parts
        ([700, 64, 130, 1] * 70, "bfloat16", {}),  # and some of them cut
        ([4096, 1000, 77, 0] * 8, "bfloat16", dict(q_len=2)),
        ([4096, 1000, 77, 0] * 8, "uint8", dict(q_len=2)),
        ([4096, 1000, 77, 0] * 8, "float16", dict(dtype=jnp.float16)),
        ([4096, 1000, 77, 0] * 8, "bfloat16", dict(dim=512)),
    ],
)
def test_the_same_bits_every_run_of_other_inputs(lens, format, options):
    some = stored(format, lens, heads=16, **options)
    first = decode(some, "mosaic_gpu")
    assert_mla_close(some.held, *first)
    for _ in range(100):
        again = decode(some, "mosaic_gpu")
        assert all(bool((a == b).all()) for a, b in zip(again, first, strict=True))
