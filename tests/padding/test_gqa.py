"""Grouped-query attention with poison wherever no live token is: real rows keep their bits.

The whole step has this in `tests/models/test_gqa_decoder.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gqa
from tests.helpers.poison import block_scales, every_poison, fill, fp8_scale, is_zero, same_bits

HEADS, KV_HEADS, DIM, PAGE, DTYPE = 6, 2, 8, 16, "bfloat16"
NO_PAGE = {"-1": -1, "0": 0, "max": 2**31 - 1, "min": -(2**31)}
WINDOW = 21
options = pytest.mark.parametrize("option", ["plain", "window", "sinks"])
GIVEN = {
    "plain": {},
    "window": dict(window=WINDOW, soft_cap=5.0),
    "sinks": dict(sinks=np.linspace(-1, 1, HEADS, dtype=np.float32)),
}


def case(lens, new, tokens, *, poison=None, tail=0, left=0):
    """(q, k, v, gate, cache, tables, lens, new): what the rows do not own is poison.

    Page 0 belongs to no row. `left`: the window of which tokens left are poison as well.
    """
    rng = np.random.default_rng(0)
    owned = [-(-n // PAGE) for n in lens]
    order = iter(1 + rng.permutation(sum(owned)))
    tables = np.full((len(lens), max(owned) + 2), tail, np.int32)
    cache = fill((2, sum(owned) + 2, 2, PAGE, KV_HEADS, DIM), DTYPE, poison)
    q, gate = (fill((len(lens), tokens, HEADS, DIM), DTYPE, poison) for _ in range(2))
    k, v = (fill((len(lens), tokens, KV_HEADS, DIM), DTYPE, poison) for _ in range(2))
    for row, length in enumerate(lens):
        first = max(new[row] - length, 0)  # tokens before the row's first are padding
        real = slice(first, new[row] if length else first)
        for x in (q, k, v, gate):
            x[row, real] = rng.normal(size=x[row, real].shape)
        both = rng.normal(size=(2, length, KV_HEADS, DIM))
        unread = max(length - new[row] + 1 - left, 0) if left else 0
        for j in range(owned[row]):
            tables[row, j] = next(order)
        for t in range(unread, length):
            cache[1, tables[row, t // PAGE], :, t % PAGE] = both[:, t]
        tables[row, : unread // PAGE] = tail
    lens, new = np.asarray(lens, np.int32), np.asarray(new, np.int32)
    return tuple(map(jnp.asarray, (q, k, v, gate, cache, tables, lens, new)))


@functools.cache
def attend(op, option):
    """Compiled once for a shape, whatever the poison."""

    def decode(q, k, v, gate, cache, tables, lens, new):
        given = dict(GIVEN[option], gate=gate, query_lens=new, layer=1)
        return gqa.gqa_decode(q, cache, tables, lens, implementation="xla", **given)

    def prefill(q, k, v, gate, cache, tables, lens, new):
        given = dict(GIVEN[option], gate=gate, layer=1)
        return gqa.gqa_prefill(q, k, v, cache, tables, lens, new, implementation="xla", **given)

    return jax.jit({"decode": decode, "prefill": prefill}[op])


def check(op, option, lens, new, tokens, poison, tail=-1):
    left = WINDOW if option == "window" else 0
    clean = attend(op, option)(*case(lens, new, tokens))
    found = attend(op, option)(*case(lens, new, tokens, poison=poison, tail=tail, left=left))
    place = np.arange(tokens)
    lens, new = np.asarray(lens)[:, None], np.asarray(new)[:, None]
    real = (lens > 0) & (place < new) & (place >= new - lens)
    for one, other in zip(found, clean, strict=True):
        same_bits(one[real], other[real])
    out, lse = found
    is_zero(out[~real])
    assert np.isneginf(np.asarray(lse)[~real]).all()
    assert np.isfinite(np.asarray(out, np.float32)).all() and np.asarray(out[real]).any()
    for one, other in zip(fp8_scale(out), fp8_scale(clean[0][real]), strict=True):
        same_bits(one[None], other[None])
    np.testing.assert_array_equal(block_scales(out), block_scales(clean[0]))


@pytest.mark.sampled
@every_poison
@options
@pytest.mark.parametrize("tokens", [1, 4])
def test_one_real_row_among_127_of_padding(poison, option, tokens):
    check("decode", option, [600] + [0] * 127, [tokens] * 128, tokens, poison)


@pytest.mark.sampled
@every_poison
@options
@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_ragged_rows_and_tokens(op, option, poison):
    lens = [0, 1, 15, 16, 17, 2, 40, 0, 33, 70]
    new = [4, 1, 4, 2, 1, 4, 0, 0, 3, 4]
    check(op, option, lens, new, 4, poison)


@pytest.mark.sampled
@options
@pytest.mark.parametrize("op", ["decode", "prefill"])
@pytest.mark.parametrize("tail", NO_PAGE)
def test_what_stands_in_a_table_past_a_row_is_never_a_page(op, option, tail):
    check(op, option, [17, 0, 40, 70], [1, 4, 2, 4], 4, "nan", NO_PAGE[tail])
