"""The Mosaic GPU kernel of grouped-query prefill against float64, in the interpreter and on a
Hopper GPU. What is poison is in tests/helpers/gqa_prefill_cases.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gqa
from jaxattn.core.cache.formats import KVFormat
from jaxattn.kernels.gqa.prefill import launch
from jaxattn.kernels.gqa.prefill.tile_config import CONFIGS
from jaxattn.ops.gqa import prefill as prefill_op
from jaxattn.ops.gqa import prefill_mosaic
from tests.helpers.gqa_prefill_cases import PrefillCase, assert_prefill_close, prefill_case
from tests.helpers.kernel_cases import both_devices, no_races, relative, slow, slow_interpreted, x64

ARRAYS = ("sinks", "gate", "kv_scale")


def compiled(case: PrefillCase, implementation, layer=1):
    """The op for cases of these options and shapes, which is compiled once."""
    arrays = {name: case.options.pop(name) for name in ARRAYS if name in case.options}
    fixed = dict(case.options)
    case.options |= arrays
    op = functools.partial(gqa.gqa_prefill, implementation=implementation, **fixed)
    step = jax.jit(op)
    return lambda case: step(*case.args, layer=jnp.int32(layer), **arrays)


def attend(case: PrefillCase, implementation, layer=1):
    return compiled(case, implementation, layer)(case)


def run(case: PrefillCase, implementation) -> None:
    assert_prefill_close(case, *attend(case, implementation))


@pytest.fixture
def traced_anew(monkeypatch):
    """The op is traced with what a test sets, and not found as another test left it."""
    monkeypatch.setattr(prefill_op, "prefill_mosaic", prefill_op.prefill_mosaic.__wrapped__)


def grouped_case(dim: int, group: int, kv_heads: int) -> PrefillCase:
    """A prefix that ends in a page, one that ends with it, none, and padding."""
    return prefill_case([37, 21, 9, 0], [9, 5, 9, 0], group=group, kv_heads=kv_heads, dim=dim)


@pytest.mark.slow_cases(
    reason="a group's rows in the wrong tile; found by a group of 5 of another width there and by "
    "groups of masks and epilogues too"
)
@pytest.mark.sampled
@both_devices
@pytest.mark.parametrize(
    "dim, group, kv_heads",
    [slow(64, 1, 2), slow(64, 5, 1), slow(128, 4, 1), slow(128, 8, 2), (256, 5, 1)],
)
def test_groups(dim, group, kv_heads, implementation):
    run(grouped_case(dim, group, kv_heads), implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_group_from_1_to_16(dim):
    for group in range(1, 17):
        run(grouped_case(dim, group, 2), "mosaic_gpu")


@pytest.mark.slow_cases(
    reason="a mask or scale of another page size; found by windows of 7, 1 and 100 too"
)
@pytest.mark.sampled
@both_devices
@pytest.mark.parametrize(
    "options",
    [
        dict(window=7, sinks=True),
        slow(dict(window=140, page=64)),
        dict(soft_cap=2.0, gate=True, group=3),
        dict(dim=64, window=1, sinks=True, gate=True),
        dict(dim=256, gate=True, sinks=True, page=128),
        slow(dict(scale=0.3, page=32)),
    ],
    ids=str,
)
def test_masks_and_epilogues(options, implementation):
    # The last has more new tokens than the row has: the first two have no position.
    run(prefill_case([150, 200, 3], [10, 3, 5], **options), implementation)


@pytest.mark.slow_cases(reason="a shift of another head; found by a group of 3 at 64 dims too")
@both_devices
@pytest.mark.parametrize("dim, tokens, group", [(64, 20, 3), slow(128, 300, 1), slow(256, 9, 5)])
def test_what_all_scores_lack_before_the_soft_cap(dim, tokens, group, implementation):
    """One vector is taken off all keys, and its products with the queries are given beside."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, tokens, 2 * group, dim)).astype(np.float16)
    k, v = rng.normal(size=(2, 2, tokens, 2, dim)).astype(np.float16)
    common = np.round(3 * rng.normal(size=(2, 1, 2, dim)))
    lacks = np.einsum("bthd,bhd->bth", q, np.repeat(common[:, 0], group, axis=1)) * dim**-0.5
    counts = [tokens, tokens - 3]
    bounds = jnp.asarray([[0, n, 0, n, 0] for n in counts], jnp.int32)
    attend = functools.partial(
        launch.gqa_prefill_mosaic, scale=dim**-0.5, soft_cap=4.0,
        interpret=implementation == "mosaic_gpu_interpret",
    )  # fmt: skip
    found, lse = jax.jit(attend)(q, k, v, bounds, shift=jnp.asarray(lacks, jnp.float32))
    for b, n in enumerate(counts):
        for h in range(2 * group):
            keys = k[b, :n, h // group].astype(np.float64) + common[b, 0, h // group]
            scores = 4 * np.tanh(q[b, :n, h].astype(np.float64) @ keys.T * dim**-0.5 / 4)
            p = np.where(np.tri(n, dtype=bool), np.exp(scores), 0)
            wanted = p @ v[b, :n, h // group].astype(np.float64) / p.sum(axis=1, keepdims=True)
            assert relative(found[b, :n, h], wanted) < 2e-3
            np.testing.assert_allclose(lse[b, :n, h], np.log(p.sum(axis=1)), atol=5e-4)


@pytest.mark.slow(
    reason="a tile of another head; found by groups there and by the same test on a GPU too"
)
@both_devices
@pytest.mark.parametrize("dim, window", [slow(64, None), (128, 100), slow(256, None)])
def test_heads_are_not_packed_where_tokens_are_many(
    dim, window, implementation, traced_anew, monkeypatch
):
    monkeypatch.setattr(launch, "FEW_TOKENS", 0)
    options = dict(dim=dim, window=window, gate=True, sinks=True)
    run(prefill_case([390, 130, 70], [140, 130, 3], **options), implementation)


@pytest.mark.slow(
    reason="a step that is left unmasked; found by float64 of groups and of caches in blocks "
    "there, and by the same test on a GPU, too"
)
@both_devices
@pytest.mark.parametrize("lens, new", [([390, 300, 70], [140, 300, 3]), slow([640], [33])])
@pytest.mark.parametrize("dim", [slow(64), 128, slow(256)])
def test_steps_that_all_rows_see_apart(dim, lens, new, implementation, traced_anew, monkeypatch):
    """Some of them, none, and all but the last one's; a prefix of whole steps and one of others."""
    monkeypatch.setattr(launch, "FEW_TOKENS", 0)
    run(prefill_case(lens, new, dim=dim, gate=True, sinks=True), implementation)


@slow_interpreted(
    "a result that is not rescaled; found by caches that are read in blocks, of several "
    "steps, and by the same test on a GPU too"
)
def test_maxima_that_grow_little_and_much(implementation):
    """By up to 2**30 from a step of 64 keys to the next; the reference moves beyond 2**8."""
    case = prefill_case([500], [9], dim=256, group=1, kv_heads=1, scale=1.0)
    keys = np.asarray(case.keys[0], np.float64)[:, 0]
    scores = np.asarray(case.new[0], np.float64)[0, :, 0] @ keys[:491].T / np.log(2)
    maxima = np.maximum.accumulate(
        [part.max(-1) for part in np.split(scores, range(64, 491, 64), 1)]
    )
    grown = np.diff(maxima, axis=0)
    assert ((grown > 0) & (grown < 8)).any() and (grown > 8).any()
    run(case, implementation)


@pytest.mark.slow(
    reason="a number that is converted to another dtype; found by float64 at bfloat16 there too"
)
@both_devices
def test_float16_and_64_bit_numbers(implementation):
    with x64():
        run(prefill_case([50, 7], [20, 7], dtype=jnp.float16), implementation)


@pytest.mark.slow(
    reason="a barrier's phase that is wrong for a second tile; found by race detection at 128 "
    "dims there and by the same test on a GPU too"
)
@both_devices
@pytest.mark.parametrize("blocks", [slow(1), 3])
def test_resident_blocks_take_many_tiles(blocks, implementation, traced_anew, monkeypatch):
    for dim in (64, 256):
        config = dataclasses.replace(CONFIGS[dim], blocks=blocks, l2_bytes=1)
        monkeypatch.setitem(CONFIGS, dim, config)
        case = prefill_case([200, 70, 0], [200, 3, 0], dim=dim, group=1, kv_heads=2)
        run(case, implementation)


@slow_interpreted(
    "a NaN in another row; found by all tests there, where what a row does not own is NaN, by a "
    "NaN in mla/prefill/test_kernel, and by the same test on a GPU, too"
)
def test_a_nan_among_a_rows_own_keys_stays_in_its_row(implementation):
    case = prefill_case([40, 40], [40, 40], group=1, kv_heads=2)
    q, k, v = case.new
    case.new = q, k.at[0, 3, 1, 5].set(jnp.nan), v
    out, lse = attend(case, implementation)
    assert np.isnan(out[0, 3:, 1]).all() and np.isnan(lse[0, 3:, 1]).all()
    for finite in (out[1], lse[1], out[0, :, 0], out[0, :3, 1], lse[0, :3, 1]):
        assert np.isfinite(finite).all()


@slow_interpreted(
    "a chunk whose mask is moved; found by prompts behind prefixes compared with float64 too"
)
def test_a_cut_prompt_is_the_whole_prompt(implementation):
    whole = prefill_case([90], [90], dim=64)
    out, lse = attend(whole, implementation)
    last = prefill_case([90], [41], dim=64)
    assert np.array_equal(whole.keys[0], last.keys[0])
    last.new = whole.new[0][:, 49:], *last.new[1:]
    cut, cut_lse = attend(last, implementation)
    assert relative(cut, np.asarray(out[:, 49:], np.float64)) < 4e-3
    np.testing.assert_allclose(cut_lse, lse[:, 49:], atol=1e-5)


@pytest.mark.slow_cases(reason="a race at another width; found by races at 128 dims too")
@pytest.mark.parametrize(
    "dim, options", [slow(64, {}), (128, dict(window=60)), slow(256, dict(gate=True))]
)
def test_no_race_in_the_interpreter(dim, options, traced_anew, monkeypatch):
    monkeypatch.setattr(launch, "FEW_TOKENS", 0)
    monkeypatch.setitem(CONFIGS, dim, dataclasses.replace(CONFIGS[dim], blocks=2))
    case = prefill_case([330, 5], [200, 5], dim=dim, **options)
    with no_races():
        outs = jax.block_until_ready(attend(case, "mosaic_gpu_interpret"))
    assert_prefill_close(case, *outs)


@slow_interpreted("a gradient of masked keys; found by attention/test_backward too")
def test_attention_without_a_cache_and_its_gradient(implementation):
    lengths = jnp.array([40, 3], jnp.int32)
    case = prefill_case([40, 3], [40, 3], sinks=True, window=20)
    real = (jnp.arange(40) < lengths[:, None])[..., None]

    def loss(arrays, implementation):
        *new, sinks = arrays
        out, lse = gqa.gqa_attention(
            *new, sinks=sinks, window=20, lengths=lengths, implementation=implementation
        )
        value = out.astype(jnp.float32).sum() + jnp.where(real, lse, 0).sum()
        return value, (out, lse)

    grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    arrays = (*case.new, case.options["sinks"])
    got, outs = grad(arrays, implementation)
    assert_prefill_close(case, *outs)
    expected, _ = grad(arrays, "xla")
    for a, b in zip(got, expected, strict=True):
        assert np.isfinite(a).all() and relative(a, np.asarray(b, np.float64)) < 1e-2


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(dim=32), "head_dim 64, 128 or 256, got 32"),
        (dict(dtype=np.float32), "q in bfloat16 or float16, got float32"),
    ],
)
def test_refuses_what_it_does_not_serve(change, words):
    case = prefill_case([5], [3], **change)
    with pytest.raises(NotImplementedError, match=words):
        attend(case, "mosaic_gpu_interpret")
    assert attend(case, None)[0].shape == case.new[0].shape


@pytest.mark.slow_cases(reason="codes that are unpacked wrongly; found by pages of 8 tokens too")
@both_devices
@pytest.mark.parametrize("form, page, window", [slow("fp8", 16, None), ("bfloat16", 8, 45)])
def test_other_caches_are_read_in_blocks(
    form, page, window, implementation, traced_anew, monkeypatch
):
    monkeypatch.setattr(prefill_mosaic, "PREFIX_BLOCK", 32)
    monkeypatch.setattr(prefill_mosaic, "UNPACKED_BYTES", 0)
    options = dict(window=window, sinks=True, gate=True)
    case = prefill_case([150, 37, 9, 0], [10, 5, 9, 0], page=page, **options)
    format = KVFormat(form, 128)
    scale = jnp.array([[2**-5], [2**-6]], jnp.float32) if format.scaled else None
    cache, tables = case.cached
    stored = format.pack(jnp.moveaxis(cache, 2, 3), scale)
    case.cached = jnp.moveaxis(stored, 3, 2), tables
    if format.scaled:  # what is cached is rounded; powers of two divide exactly anywhere
        case.options["kv_scale"] = scale
        for row, (length, new) in enumerate(zip(*map(np.asarray, case.lengths), strict=True)):
            for of, factor in zip((case.keys, case.values), (2**-5, 2**-6), strict=True):
                prefix = of[row][: max(length - new, 0)]
                rounded = (prefix.astype(np.float32) / factor).astype(jnp.float8_e4m3fn)
                prefix[...] = (rounded.astype(np.float32) * np.float32(factor)).astype(prefix.dtype)
    run(case, implementation)


@slow_interpreted("steps of another row's prefix; found by the same test on a GPU too")
def test_a_rows_bits_do_not_depend_on_the_prefix_of_others(implementation):
    # Pages of 8 are read in blocks, where some row has a prefix.
    case = prefill_case([9, 150], [9, 10], page=8, gate=True, sinks=True)
    step = compiled(case, implementation)
    both, _ = step(case)
    case.lengths = jnp.array([9, 0], jnp.int32), jnp.array([9, 0], jnp.int32)
    alone, _ = step(case)
    assert np.array_equal(np.asarray(both[0, :9]), np.asarray(alone[0, :9]))


@pytest.mark.gpu  # the interpreter has no counter
def test_numbers_that_are_known_when_it_is_compiled():
    # 16 x 8 tiles and layer 0 as constants: the counter of tiles must not be the layer's number.
    case = prefill_case([1200, 900], [1200, 900], group=1, kv_heads=16, dim=64)
    new, lengths, (cache, tables) = case.new, case.lengths, case.cached
    out, lse = jax.jit(
        lambda *new: gqa.gqa_prefill(
            *new, cache[1:], tables, *lengths, layer=0, implementation="mosaic_gpu"
        )
    )(*new)
    assert_prefill_close(case, out, lse)


@pytest.mark.gpu
def test_a_prefix_beyond_2_to_the_31_elements():
    """The last pages of a pool of more elements, and 2**32 bytes."""
    small = prefill_case([300, 65], [40, 9], group=4, kv_heads=8, page=64)
    (cache, tables), count = small.cached, small.cached[0].shape[1]
    pages = 2**31 // cache[0, 0].size + 2 * count
    pool = jnp.zeros((1, pages, *cache.shape[2:]), cache.dtype)
    pool = jax.jit(lambda pool, some: pool.at[:, -count:].set(some), donate_argnums=0)(
        pool, cache[1:]
    )
    moved = jnp.where(tables < count, tables + pages - count, tables)
    large = dataclasses.replace(small, cached=(pool, moved))
    expected = attend(small, "mosaic_gpu")
    for some, same in zip(attend(large, "mosaic_gpu", layer=0), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(some, np.float32), np.asarray(same, np.float32))


REAL = [
    ("32/8, D 128", dict(group=4, kv_heads=8, dim=128), [8192], [8192]),
    ("16/2, D 256", dict(group=8, kv_heads=2, dim=256, gate=True), [8192], [8192]),
    ("64/8, D 64", dict(group=8, kv_heads=8, dim=64, sinks=True), [8192], [8192]),
    ("window", dict(group=8, kv_heads=8, dim=64, sinks=True, window=128), [8192, 300], [4096, 300]),
    ("ragged", dict(group=4, kv_heads=8, dim=128), [2048, 1, 777, 0, 2000], [2048, 1, 777, 0, 1]),
    ("prefix", dict(group=4, kv_heads=8, dim=128, page=64), [32768, 9000], [2048, 1000]),
    ("page 16", dict(group=8, kv_heads=2, dim=256, page=16), [9000, 500], [1000, 500]),
    ("few", dict(group=5, kv_heads=4, dim=128, page=128), [5000, 40], [16, 16]),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options, lens, new", [case[1:] for case in REAL], ids=[c[0] for c in REAL]
)
def test_real_shapes_repeat_bit_by_bit(options, lens, new):
    case = prefill_case(lens, new, **options)
    out, lse = attend(case, "mosaic_gpu")
    assert_prefill_close(case, out, lse, slice(-1, None))
    for _ in range(10):
        for a, b in zip(attend(case, "mosaic_gpu"), (out, lse), strict=True):
            np.testing.assert_array_equal(
                np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
            )
