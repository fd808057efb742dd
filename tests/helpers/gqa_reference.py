"""Grouped-query attention in float64 NumPy, token by token, over poisoned pages.

Poison is in pages without an owner, the tails of pages and block tables, and tokens left of a
window.
"""

from typing import NamedTuple

import numpy as np

BEYOND = (2147480000, -1)


class Pool(NamedTuple):
    """A stack of layers, and the pages that each row owns in it."""

    cache: np.ndarray  # [L, N, 2, C, Hk, D]
    tables: np.ndarray  # [B, M], `beyond` past a row's pages
    lens: np.ndarray  # [B]
    keys: list  # per row [len, Hk, D]
    values: list


def make_pool(
    lens, *, page, kv_heads, dim, layer=1, seed=0, poison=np.nan, beyond=BEYOND[0], unread=None
):
    """Makes a poisoned cache.

    Args:
        unread: For each row, the number of first tokens that are left of every query's window. They
            are poison, and pages with only such tokens are `beyond` in the table.
    """
    rng = np.random.default_rng(seed)
    pages = [-(-n // page) for n in lens]
    order = rng.permutation(sum(pages) + 3).tolist()
    cache = np.full((3, len(order), 2, page, kv_heads, dim), poison, np.float32)
    tables = np.full((len(lens), max(*pages, 1) + 1), beyond, np.int32)
    keys, values = [], []
    for row, (n, used) in enumerate(zip(lens, pages, strict=True)):
        tables[row, :used] = [order.pop() for _ in range(used)]
        both = rng.standard_normal((2, n, kv_heads, dim)).astype(np.float32)
        keys.append(both[0]), values.append(both[1])
        first = 0 if unread is None else unread[row]
        for t in range(first, n):
            cache[layer, tables[row, t // page], :, t % page] = both[:, t]
        tables[row, : first // page] = beyond
    return Pool(cache, tables, np.array(lens, np.int32), keys, values)


def attend_numpy(
    q, keys, values, *, query_lens=None, scale=None, window=None, sinks=None, soft_cap=None,
    gate=None,
):  # fmt: skip
    """(out, lse) of the rows' last tokens, one by one; keys are indexed by their positions."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for b, s, h in np.ndindex(q.shape[:3]):
        new = q.shape[1] if query_lens is None else query_lens[b]
        last = len(keys[b]) - new + s
        if s >= new or last < 0:
            continue
        first = 0 if window is None else max(last - window + 1, 0)
        head = h // (q.shape[2] // keys[b].shape[1])
        seen = keys[b][first : last + 1, head].astype(np.float64)
        scores = seen @ q[b, s, h].astype(np.float64) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        top = scores.max() if sinks is None else max(scores.max(), sinks[h])
        p = np.exp(scores - top)
        total = p.sum() + (0 if sinks is None else np.exp(np.float64(sinks[h]) - top))
        out[b, s, h] = p @ values[b][first : last + 1, head].astype(np.float64) / total
        lse[b, s, h] = top + np.log(total)
        if gate is not None:
            out[b, s, h] /= 1 + np.exp(-gate[b, s, h].astype(np.float64))
    return out, lse


def assert_close(found, expected, atol=1e-5):
    out, lse = found
    np.testing.assert_allclose(np.float64(out), expected[0], atol=atol, rtol=atol)
    np.testing.assert_allclose(lse, expected[1], atol=atol, rtol=atol)
    unseen = np.isneginf(expected[1])
    assert not np.asarray(out)[unseen].any() and np.isneginf(np.asarray(lse)[unseen]).all()


def assert_same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
