"""Ops with poison wherever no live token is: real rows keep their bits, padding is 0.

`mla_append`, `gated_delta_net_decode` and `gated_delta_rule_prefill` have this in the whole step
(`test_steps.py`), and alone in `ops/mla/test_append.py`, `ops/gdn/test_layer_decode.py` and
`ops/gdn/test_prefill.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn import gdn, mla
from jaxattn.arena import Arena
from jaxattn.core.cache.formats import LatentFormat
from tests.helpers.poison import (
    DIMS,
    POISONS,
    block_scales,
    devices,
    every_poison,
    fill,
    fp8_scale,
    is_zero,
    same_bits,
)

SCALE = 192**-0.5
NO_PAGE = {"-1": -1, "0": 0, "last": None, "max": 2**31 - 1, "min": -(2**31)}


def attention(lens, *, dims, q_len=1, poison=None, tail=-1, width=None, seed=0):
    """Arguments of `mla_decode`: what the rows of `lens` tokens do not own is poison.

    A negative length is that of a padding row too. Page 0 belongs to no row.
    """
    rng = np.random.default_rng(seed)
    owned = [-(-max(n, 0) // dims.page) for n in lens]
    pages, width = sum(owned) + 3, width or max(owned) + 2
    order = iter(1 + rng.permutation(pages - 1))
    tail = pages - 1 if tail is None else tail
    tables = np.full((len(lens), width), tail, np.int32)
    cache = fill((2, pages, dims.page, dims.rank + dims.rope), dims.dtype, poison)
    q = fill((len(lens), q_len, dims.heads, dims.rank + dims.rope), dims.dtype, poison)
    for row, length in enumerate(lens):
        if length > 0:
            q[row] = rng.normal(size=q.shape[1:])
            # Tokens before the row's first are padding inside a real row.
            q[row, : max(q_len - length, 0)] = fill(q[row, :1].shape, dims.dtype, poison)
        for j in range(owned[row]):
            tables[row, j] = next(order)
            valid = min(dims.page, length - j * dims.page)
            cache[1, tables[row, j], :valid] = rng.normal(size=(valid, cache.shape[-1]))
    return tuple(map(jnp.asarray, (q, cache, tables, np.asarray(lens, np.int32))))


def decode(args, dims, *, arena=None, poison=None):
    """(out, lse) in an arena that held poison; NumPy's, which are sliced without compiling."""
    q = args[0]
    if arena is None:
        spec = mla.scratch(
            batch=q.shape[0],
            q_len=q.shape[1],
            num_heads=dims.heads,
            kv_lora_rank=dims.rank,
            dtype=q.dtype,
            max_pages=args[2].shape[1],
        )
        arena = filled(spec, poison)
    out, lse, _ = attend(dims)(*args, arena)
    return np.asarray(out), np.asarray(lse)


@functools.cache
def attend(dims):
    """Compiled once for a shape, whatever the poison."""

    def step(q, cache, tables, lens, arena):
        return mla.mla_decode(
            q,
            cache,
            tables,
            lens,
            scale=SCALE,
            layer=1,
            kv_lora_rank=dims.rank,
            arena=arena,
            implementation=dims.implementation,
        )

    return jax.jit(step)


def filled(spec, poison):
    arena = Arena.allocate(spec)
    return jax.tree.map(lambda leaf: jnp.asarray(fill(leaf.shape, leaf.dtype, poison)), arena)


def check_decode(lens, dims, poison, *, tail=-1, **options):
    """Runs the case without poison and with it, and compares; `tail` is of the poisoned tables."""
    clean = decode(attention(lens, dims=dims, tail=0, **options), dims)
    args = attention(lens, dims=dims, poison=poison, tail=tail, **options)
    out, lse = decode(args, dims, poison=poison)
    real = np.asarray(lens) > 0
    same_bits(out[real], clean[0][real])
    same_bits(lse[real], clean[1][real])
    is_zero(out[~real])
    assert np.isneginf(np.asarray(lse)[~real]).all()
    assert np.isfinite(np.asarray(out, np.float32)).all()
    if real.any():
        assert np.asarray(out, np.float32)[real].any()
        for one, other in zip(fp8_scale(out), fp8_scale(clean[0][real]), strict=True):
            same_bits(one[None], other[None])
        np.testing.assert_array_equal(block_scales(out), block_scales(clean[0]))
    q_len = options.get("q_len", 1)
    for row in np.flatnonzero(real & (np.asarray(lens) < q_len)):
        is_zero(out[row, : q_len - lens[row]])
    return out


# The reproducer of the pull requests: one real row, all others padding.


@pytest.mark.sampled
@devices
@every_poison
@pytest.mark.parametrize("q_len", [1, 4])
def test_one_real_row_among_127_of_padding(q_len, poison, device):
    check_decode([512] + [0] * 127, DIMS[device], poison, q_len=q_len)


@pytest.mark.slow(
    reason="padding that a larger batch reads; padding/test_ops.py finds it with 127 rows, and "
    "padding/test_steps.py in the whole step, too"
)
@devices
@every_poison
def test_one_real_row_among_1023_of_padding(poison, device):
    check_decode([1200] + [0] * 1023, DIMS[device], poison)


@devices
@every_poison
def test_padding_first_between_and_last(poison, device):
    page = DIMS[device].page
    check_decode([0, 13, 0, 0, page * 2, 1, 0], DIMS[device], poison)


@devices
def test_padding_alone_and_none(device):
    check_decode([0, 0, 0], DIMS[device], "nan")
    check_decode([9, 64, 65], DIMS[device], "nan")


@devices
def test_every_length_up_to_a_tile(device):
    """1 to 33 tokens, which 32 splits of a row never fill, in a batch one above a power of two."""
    check_decode([*range(1, 34), *[0] * 32], DIMS[device], "nan")


@devices
@every_poison
@pytest.mark.parametrize("away", [-1, 0, 1])
def test_lengths_around_a_page_and_a_tile(away, poison, device):
    page = DIMS[device].page
    lens = [1, page + away, 2 * page + away, 0, 128 + away]
    check_decode([max(n, 1) if n else 0 for n in lens], DIMS[device], poison)


@pytest.mark.parametrize("page", [4, 16])
def test_thirteen_tokens_on_pages_of_four(page):
    check_decode([13, 0, 1], dataclasses.replace(DIMS["cpu"], page=page), "0xFF")


@devices
@pytest.mark.parametrize("tail", NO_PAGE)
def test_whatever_stands_in_a_table_past_its_row(tail, device):
    lens = [5, 0, DIMS[device].page + 1]
    check_decode(lens, DIMS[device], "nan", tail=NO_PAGE[tail], width=6)


@pytest.mark.parametrize("q_len", [1, 4])
def test_a_negative_length_is_padding(q_len):
    """The most negative one too, which less S tokens would be a long row's."""
    check_decode([20, -1, -(2**31), 1 - 2**31], DIMS["cpu"], "nan", q_len=q_len)


@every_poison
def test_a_length_of_garbage_reaches_no_other_row(poison):
    """2^31 - 1 tokens in a row without a page: traced, as a step has it, it cannot be refused."""
    dims, lens = DIMS["cpu"], [13, 0, 70, 0]
    clean = decode(attention(lens, dims=dims, q_len=2), dims)
    q, cache, tables, lengths = attention(lens, dims=dims, q_len=2, poison=poison)
    for garbage in (2**31 - 1, 2**31 - 64, 10**6):
        out, lse = decode((q, cache, tables, lengths.at[1].set(garbage)), dims, poison=poison)
        for row in (0, 2):
            same_bits(out[row], clean[0][row])
            same_bits(lse[row], clean[1][row])
        # Nothing is made up for it.
        is_zero(out[1::2])
        assert np.isneginf(np.asarray(lse)[1::2]).all()
        with pytest.raises(ValueError, match=f"seq_lens .* holds {garbage}, but block_tables"):
            mla.mla_decode(q, cache, tables, lengths.at[1].set(garbage), scale=SCALE, layer=1)


@devices
@every_poison
def test_a_request_shorter_than_its_query(poison, device):
    check_decode([2, 0, 4, 3, 70], DIMS[device], poison, q_len=4)


@devices
def test_a_token_before_its_rows_first_is_zero_beside_the_rows_own_nan(device):
    dims = DIMS[device]
    q, cache, tables, lengths = attention([2, 9], dims=dims, poison="nan", q_len=4)
    clean = decode((q, cache, tables, lengths), dims)
    cache = cache.at[1, tables[0, 0], 0].set(jnp.nan)
    out, lse = decode((q, cache, tables, lengths), dims, poison="nan")
    is_zero(out[0, :2])
    assert np.isneginf(np.asarray(lse)[0, :2]).all()
    assert np.isnan(np.asarray(out[0, 2:], np.float32)).all()
    same_bits(out[1], clean[0][1])


@devices
def test_the_order_of_rows_changes_no_bit(device):
    dims, lens = DIMS[device], [70, 0, 13, 128, 0, 1]
    args = attention(lens, dims=dims, poison="nan", width=20)
    out, lse = decode(args, dims, poison="nan")
    order = np.random.default_rng(0).permutation(len(lens))
    q, cache, tables, lengths = args
    shuffled = decode((q[order], cache, tables[order], lengths[order]), dims, poison="0xFF")
    same_bits(shuffled[0], out[order])
    same_bits(shuffled[1], lse[order])


@devices
def test_a_nan_in_a_real_row_stays_there_and_shows(device):
    dims, lens = DIMS[device], [70, 0, 13]
    q, cache, tables, lengths = attention(lens, dims=dims, poison="3e38")
    clean = decode((q, cache, tables, lengths), dims)
    cache = cache.at[1, tables[2, 0], 3].set(jnp.nan)
    out, lse = decode((q, cache, tables, lengths), dims)
    assert np.isnan(np.asarray(out[2], np.float32)).all() and np.isnan(np.asarray(lse[2])).all()
    same_bits(out[0], clean[0][0])
    is_zero(out[1])


@devices
def test_a_bucket_that_was_full_before(device):
    """A large batch leaves its results in the arena; a small one is served from it afterwards."""
    dims = DIMS[device]
    large = attention([33] * 32, dims=dims, seed=1)
    spec = mla.scratch(
        batch=32, q_len=1, num_heads=dims.heads, kv_lora_rank=dims.rank, max_pages=128
    )
    small = attention([17, 0], dims=dims)
    own = mla.scratch(
        batch=2,
        q_len=1,
        num_heads=dims.heads,
        kv_lora_rank=dims.rank,
        max_pages=small[2].shape[1],
    )
    arena = filled(spec | own, "3e38")
    *_, arena = attend(dims)(*large, arena)
    out, lse = decode(small, dims, arena=arena)
    clean = decode(small, dims)
    same_bits(out, clean[0])
    same_bits(lse, clean[1])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_page_tables_of_any_kind_over_a_pool_of_poison(data):
    """Every byte that no live token owns is 0x7F or worse; tables past a row hold anything."""
    dims = DIMS["cpu"]
    page, width, rows, pages = dims.page, 4, 4, 20
    lens = data.draw(st.lists(st.integers(0, page * width), min_size=rows, max_size=rows))
    order = iter(data.draw(st.permutations(range(pages))))
    garbage = st.integers(-(2**31), 2**31 - 1)
    poison = data.draw(st.sampled_from(list(POISONS)))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    shape = (2, pages, page, dims.rank + dims.rope)
    clean, dirty = fill(shape, dims.dtype, None), fill(shape, dims.dtype, poison)
    tables = np.zeros((rows, width), np.int32)
    wild = np.asarray(
        data.draw(st.lists(garbage, min_size=rows * width, max_size=rows * width)), np.int32
    ).reshape(rows, width)
    q = rng.normal(size=(rows, 2, dims.heads, shape[-1])).astype(jnp.dtype(dims.dtype))
    for row, length in enumerate(lens):
        for j in range(-(-length // page)):
            wild[row, j] = tables[row, j] = next(order)
            valid = min(page, length - j * page)
            tokens = rng.normal(size=(valid, shape[-1]))
            clean[1, tables[row, j], :valid] = dirty[1, tables[row, j], :valid] = tokens
    lengths = jnp.asarray(lens, jnp.int32)
    wanted = decode((jnp.asarray(q), jnp.asarray(clean), jnp.asarray(tables), lengths), dims)
    poisoned = q.copy()
    poisoned[np.asarray(lens) == 0] = fill(q.shape[1:], dims.dtype, poison)
    args = (jnp.asarray(poisoned), jnp.asarray(dirty), jnp.asarray(wild), lengths)
    out, lse = decode(args, dims, poison=poison)
    same_bits(out, wanted[0])
    same_bits(lse, wanted[1])
    is_zero(np.asarray(out)[np.asarray(lens) == 0])


@functools.cache
def quantized_case(kind):
    """(cache, arguments of `mla_decode`, which tokens are owned, the step), compiled once."""
    dims = dataclasses.replace(DIMS["cpu"], rank=128)
    args = attention([13, 0, dims.page, 1], dims=dims, width=4)
    format = LatentFormat(kind, dims.rank, dims.rope)
    scale = 0.02 if format.per_tensor else None

    def step(q, cache, tables, lens):
        options = dict(kv_lora_rank=dims.rank, kv_scale=scale, implementation="xla")
        return mla.mla_decode(q, cache, tables, lens, scale=SCALE, layer=1, **options)

    owned = np.asarray(args[1], np.float32).any(axis=-1)
    return np.asarray(format.pack(args[1], scale)), args, owned, jax.jit(step)


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x7E])
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "uint8"])
def test_bytes_of_an_fp8_cache_that_nobody_wrote(kind, byte):
    """Numbers, rotated dims and block scales: NaN, and 448 under a scale of 8e37."""
    clean, (q, _, tables, lens), owned, step = quantized_case(kind)
    dirty = clean.copy()
    dirty.view(np.uint8)[~owned] = byte
    wanted, found = (step(q, jnp.asarray(cache), tables, lens) for cache in (clean, dirty))
    for one, other in zip(found, wanted, strict=True):
        same_bits(one, other)
    is_zero(found[0][1])
    assert np.isfinite(np.asarray(found[0], np.float32)).all() and np.asarray(found[0])[0].any()


# Writing into the cache ---------------------------------------------------------------------------


@every_poison
@pytest.mark.parametrize("tail", NO_PAGE)
def test_a_padding_tokens_latent_is_written_nowhere(poison, tail):
    dims = DIMS["cpu"]
    # A row and what is new of it; padding with what its row had; nothing new; fewer than are new.
    lens, new = [9, 0, 17, 2], [3, 2, 0, 3]
    _, cache, tables, lengths = attention(
        lens, dims=dims, poison="0x7F", tail=NO_PAGE[tail], width=5
    )
    rng = np.random.default_rng(0)
    latent = fill((4, 3, dims.rank + dims.rope), dims.dtype, poison)
    expected = np.asarray(cache).copy()
    for row, count in enumerate(new):
        for t in range(max(count - lens[row], 0), count if lens[row] else 0):
            latent[row, t] = rng.normal(size=latent.shape[-1])
            position = lens[row] - count + t
            expected[1, tables[row, position // dims.page], position % dims.page] = latent[row, t]
    after = mla.mla_cache_write(
        cache, jnp.asarray(latent), tables, lengths, query_lens=jnp.asarray(new, jnp.int32), layer=1
    )
    same_bits(after, expected)


# Prefill ------------------------------------------------------------------------------------------


@pytest.mark.sampled
@every_poison
@pytest.mark.parametrize("chunk", [1, 7, 8, 9])
def test_a_chunks_tail_and_its_prefix_pages(poison, chunk):
    dims = DIMS["cpu"]
    nope, value, tokens = 8, 8, 10
    # A prefix, padding with what its row had, no prefix, and more new tokens than the row has.
    lens, new = [5 + chunk, 0, chunk, max(chunk - 3, 1)], [chunk, 2, chunk, chunk]
    first = [max(count - length, 0) for count, length in zip(new, lens, strict=True)]

    def run(poison):
        rng = np.random.default_rng(0)
        _, cache, tables, lengths = attention(lens, dims=dims, poison=poison, tail=-1)
        q = fill((4, tokens, dims.heads, nope + dims.rope), dims.dtype, poison)
        latent = fill((4, tokens, dims.rank + dims.rope), dims.dtype, poison)
        for row, count in enumerate(new):
            for array in (q, latent):
                real = array[row, first[row] : count]
                real[...] = rng.normal(size=real.shape)
        weights = [
            jnp.asarray(rng.normal(size=size), dims.dtype)
            for size in ((dims.heads, nope, dims.rank), (dims.heads, dims.rank, value))
        ]
        return mla.mla_prefill(
            jnp.asarray(q),
            jnp.asarray(latent),
            *weights,
            cache,
            tables,
            lengths,
            jnp.asarray(new, jnp.int32),
            scale=SCALE,
            layer=1,
            block=16,
        )

    wanted, (out, lse) = run(None), run(poison)
    lse = np.asarray(lse)
    for row, count in enumerate(new):
        real = slice(first[row], count)
        same_bits(out[row, real], wanted[0][row, real])
        same_bits(lse[row, real], np.asarray(wanted[1])[row, real])
        assert np.isfinite(lse[row, real]).all() and np.asarray(out, np.float32)[row, real].all()
        for padding in (slice(0, first[row]), slice(count, None)):
            is_zero(out[row, padding])
            assert np.isneginf(lse[row, padding]).all()


def test_new_tokens_before_a_rows_first_are_no_keys():
    """Seven new tokens of a row of four: three are padding, the rest see the same."""
    dims, rng = DIMS["cpu"], np.random.default_rng(0)
    _, cache, tables, lengths = attention([4], dims=dims)
    shapes = (dims.heads, 8 + dims.rope), (dims.rank + dims.rope,), (8, dims.rank), (dims.rank, 8)
    q, latent = (rng.normal(size=(1, 4, *shape)) for shape in shapes[:2])
    weights = [
        jnp.asarray(rng.normal(size=(dims.heads, *shape)), dims.dtype) for shape in shapes[2:]
    ]

    def run(first):
        moved = (
            np.pad(x, [(0, 0), (first, 6 - first)] + [(0, 0)] * (x.ndim - 2)) for x in (q, latent)
        )
        args = (*(jnp.asarray(x, dims.dtype) for x in moved), *weights, cache, tables, lengths)
        out, _ = mla.mla_prefill(*args, jnp.asarray([first + 4], jnp.int32), scale=SCALE, layer=1)
        return np.asarray(out, np.float32)[0, first : first + 4]

    np.testing.assert_allclose(run(3), run(0), rtol=1e-2, atol=1e-2)


def test_parts_that_saw_nothing_merge_to_nothing():
    rng = np.random.default_rng(0)
    outs = [jnp.asarray(rng.normal(size=(4, 2, 8)), jnp.float32) for _ in range(2)]
    lses = [jnp.asarray(rng.normal(size=(4, 2)), jnp.float32) for _ in range(2)]
    # Row 1 saw nothing in its second part, row 2 nothing at all.
    lses[1] = lses[1].at[1].set(-jnp.inf).at[2].set(-jnp.inf)
    lses[0] = lses[0].at[2].set(-jnp.inf)
    clean = mla.merge_attention_states(outs, lses)
    # Nor is what they hold read.
    outs = [outs[0].at[2].set(jnp.nan), outs[1].at[1:3].set(jnp.nan)]
    merged = mla.merge_attention_states(outs, lses)
    for one, other in zip(merged, clean, strict=True):
        same_bits(one, other)
    same_bits(clean[0][1], outs[0][1])
    is_zero(clean[0][2])
    assert np.isneginf(np.asarray(clean[1][2])).all()


@every_poison
def test_rows_with_fewer_tokens_than_splits(poison):
    """Rows of 1 to 33 tokens in 32 splits: what the empty ones hold is never read."""
    rng, lens, splits = np.random.default_rng(0), np.arange(1, 34), 32
    scores, values = rng.normal(size=(33, 33)), rng.normal(size=(33, 33, 4))
    weights = np.where(np.arange(33) < lens[:, None], np.exp(scores), 0)
    outs, lses = {}, []
    for split in range(splits):
        mine = np.where(np.arange(33) % splits == split, weights, 0)
        total = mine.sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            out = (np.einsum("bk,bkd->bd", mine, values) / total[:, None])[:, None]
            lses.append(jnp.asarray(np.log(total)[:, None], jnp.float32))
        for kind in (None, poison):
            empty = fill(out.shape, np.float32, kind)
            held = np.where((total > 0)[:, None, None], out, empty).astype(np.float32)
            outs.setdefault(kind, []).append(jnp.asarray(held))
    assert np.isneginf(np.asarray(lses)).sum() == 31 * 32 / 2
    clean, dirty = (mla.merge_attention_states(outs[kind], lses) for kind in (None, poison))
    for one, other in zip(dirty, clean, strict=True):
        same_bits(one, other)
    wanted = np.einsum("bk,bkd->bd", weights, values) / weights.sum(-1)[:, None]
    np.testing.assert_allclose(np.asarray(dirty[0])[:, 0], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(dirty[1])[:, 0], np.log(weights.sum(-1)), rtol=1e-5)


# Recurrent states ---------------------------------------------------------------------------------


def delta_rule(slots, *, dims, pool_size, q_len=1, poison=None, seed=0):
    """Arguments of `gated_delta_rule_decode`, and its gates: padding and unowned slots poisoned."""
    rng = np.random.default_rng(seed)
    batch, head = len(slots), dims.head
    shapes = dict(
        q=(q_len, dims.key_heads, head),
        k=(q_len, dims.key_heads, head),
        v=(q_len, dims.value_heads, head),
        a=(q_len, dims.value_heads),
        b=(q_len, dims.value_heads),
    )
    tokens = {name: fill((batch, *shape), dims.dtype, poison) for name, shape in shapes.items()}
    state = fill((2, pool_size, dims.value_heads, head, head), np.float32, poison)
    for row, slot in enumerate(slots):
        if 0 <= slot < pool_size:
            for array in tokens.values():
                array[row] = rng.normal(size=array.shape[1:])
            state[1, slot] = rng.normal(size=state.shape[2:])
    gates = dict(
        A_log=jnp.asarray(np.log(rng.uniform(0.1, 16, dims.value_heads)), jnp.float32),
        dt_bias=jnp.asarray(rng.normal(size=dims.value_heads), jnp.float32),
    )
    args = (*tokens.values(), state, np.asarray(slots, np.int32))
    return tuple(map(jnp.asarray, args)), gates


def run_delta_rule(args, gates, dims, poison=None):
    q, v = args[0], args[2]
    spec = gdn.scratch(
        batch=q.shape[0],
        q_len=q.shape[1],
        num_v_heads=dims.value_heads,
        head_v_dim=dims.head,
        dtype=v.dtype,
    )
    o, state, _ = delta_step(dims)(*args, filled(spec, poison), gates)
    return np.asarray(o), np.asarray(state)


@functools.cache
def delta_step(dims):
    """Compiled once for a shape, whatever the poison."""

    def step(*args):
        *arguments, arena, gates = args
        return gdn.gated_delta_rule_decode(
            *arguments, layer=1, arena=arena, implementation=dims.implementation, **gates
        )

    return jax.jit(step)


@pytest.mark.sampled
@devices
@every_poison
@pytest.mark.parametrize(
    "slots, pool_size, q_len",
    [
        ([3] + [-1] * 127, 4, 1),
        ([0] + [-1] * 127, 4, 4),
        ([-1, 0, -1, 3, -1], 4, 1),
        ([1, 0, 2], 3, 1),
    ],
    ids=["1 of 128", "1 of 128, 4 tokens", "between", "no padding"],
)
def test_padding_rows_of_the_delta_rule(slots, pool_size, q_len, poison, device):
    dims = DIMS[device]
    options = dict(dims=dims, pool_size=pool_size, q_len=q_len)
    wanted_o, wanted = run_delta_rule(*delta_rule(slots, **options), dims)
    args, gates = delta_rule(slots, poison=poison, **options)
    o, state = run_delta_rule(args, gates, dims, poison)
    real = np.asarray(slots) >= 0
    same_bits(o[real], wanted_o[real])
    is_zero(o[~real])
    live = [slot for slot in slots if slot >= 0]
    same_bits(state[1, np.asarray(live)], wanted[1, np.asarray(live)])
    # No other slot of any layer changed a bit.
    others = [slot for slot in range(pool_size) if slot not in live]
    same_bits(state[0], args[5][0])
    if others:
        same_bits(state[1, np.asarray(others)], args[5][1, np.asarray(others)])
    for one, other in zip(fp8_scale(o), fp8_scale(wanted_o[real]), strict=True):
        same_bits(one[None], other[None])


@functools.cache
def packed(op):
    """Compiled once, whatever the lengths."""
    options = {} if op == "conv" else {"use_qk_l2norm": True}
    function = {
        "chunk": gdn.chunk_gated_delta_rule,
        "recurrent": gdn.recurrent_gated_delta_rule,
        "conv": gdn.causal_conv1d,
    }[op]
    return jax.jit(functools.partial(function, output_final_state=True, **options))


@pytest.mark.sampled
@every_poison
@pytest.mark.parametrize("length", [1, 63, 64, 65])
@pytest.mark.parametrize("op", ["chunk", "recurrent", "conv"])
def test_packed_sequences_end_where_they_end(op, length, poison):
    """Two sequences of 70 tokens' room: what stands behind the last is poison."""
    dims, room = DIMS["cpu"], 70
    ends = jnp.asarray([0, length // 2, length], jnp.int32)

    def run(poison):
        rng = np.random.default_rng(0)

        def draw(*shape):
            array = fill((1, room, *shape), np.float32, poison)
            array[:, :length] = rng.normal(size=(1, length, *shape))
            return array

        if op == "conv":
            weight = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
            return packed(op)(jnp.asarray(draw(6)), weight, cu_seqlens=ends)
        q, k = draw(dims.key_heads, 8), draw(dims.key_heads, 8)
        v, g, beta = draw(dims.value_heads, 8), draw(dims.value_heads), draw(dims.value_heads)
        g[:, :length] = -np.abs(g[:, :length])
        return packed(op)(*(jnp.asarray(x) for x in (q, k, v, g, beta)), cu_seqlens=ends)

    (wanted, wanted_state), (out, state) = (map(np.asarray, run(kind)) for kind in (None, poison))
    same_bits(out[:, :length], wanted[:, :length])
    same_bits(state, wanted_state)
    is_zero(out[0, length:])


@every_poison
@pytest.mark.parametrize("tokens", [1, 3])
def test_padding_rows_of_the_convolutions_update(poison, tokens):
    slots, pool_size, channels = [2, -1, 0, -1], 4, 6

    def run(poison):
        rng = np.random.default_rng(0)
        x = fill((4, tokens, channels), np.float32, poison)
        pool = fill((2, pool_size, 3, channels), np.float32, poison)
        for row, slot in enumerate(slots):
            if slot >= 0:
                x[row] = rng.normal(size=x.shape[1:])
                pool[1, slot] = rng.normal(size=pool.shape[2:])
        weight = jnp.asarray(rng.normal(size=(channels, 4)), jnp.float32)
        y, after = gdn.causal_conv1d_update(
            jnp.asarray(x), weight, jnp.asarray(pool), jnp.asarray(slots, jnp.int32), layer=1
        )
        return np.asarray(y), np.asarray(after), pool

    (wanted, wanted_pool, _), (y, pool, before) = run(None), run(poison)
    for row, slot in enumerate(slots):
        if slot < 0:
            is_zero(y[row])
        else:
            same_bits(y[row], wanted[row])
            same_bits(pool[1, slot], wanted_pool[1, slot])
    same_bits(pool[0], before[0])
    same_bits(pool[1, 1], before[1, 1])
    same_bits(pool[1, 3], before[1, 3])
