"""MLA in float64 NumPy, token by token, and paged caches with poison that no row may read."""

from typing import NamedTuple

import numpy as np

BEYOND = (2147480000, -1)


class Pool(NamedTuple):
    """A paged cache, and the pages that each row owns in it."""

    cache: np.ndarray  # [N, C, D], poison outside of the owned tokens
    tables: np.ndarray  # [B, M], `beyond` past a row's pages
    lens: np.ndarray  # [B]
    latents: list  # per row [len, D]


def make_pool(lens, *, page, dim, seed=0, poison=np.nan, beyond=BEYOND[0], width=None):
    rng = np.random.default_rng(seed)
    pages = [-(-n // page) for n in lens]
    width = width or max(*pages, 1) + 1
    order = rng.permutation(sum(pages) + 3).tolist()
    cache = np.full((len(order), page, dim), poison, np.float32)
    tables = np.full((len(lens), width), beyond, np.int32)
    latents = []
    for row, (n, used) in enumerate(zip(lens, pages, strict=True)):
        tables[row, :used] = [order.pop() for _ in range(used)]
        latents.append(rng.standard_normal((n, dim)).astype(np.float32))
        for t in range(n):
            cache[tables[row, t // page], t % page] = latents[-1][t]
    return Pool(cache, tables, np.array(lens, np.int32), latents)


def attend(query, keys, values, scale):
    """Attention of one query to the keys that it sees, in float64."""
    if len(keys) == 0:
        return np.zeros(values.shape[-1]), -np.inf
    scores = keys.astype(np.float64) @ query.astype(np.float64) * scale
    p = np.exp(scores - scores.max())
    return p @ values.astype(np.float64) / p.sum(), scores.max() + np.log(p.sum())


def decode_numpy(q, latents, scale, rank, query_lens=None):
    out, lse = np.zeros((*q.shape[:3], rank)), np.full(q.shape[:3], -np.inf)
    for b, s, h in np.ndindex(q.shape[:3]):
        new = q.shape[1] if query_lens is None else query_lens[b]
        seen = latents[b][: max(len(latents[b]) - new + s + 1, 0) if s < new else 0]
        out[b, s, h], lse[b, s, h] = attend(q[b, s, h], seen, seen[:, :rank], scale)
    return out, lse


def prefill_numpy(q, latents, query_lens, w_uk, w_uv, scale):
    """Prefill with every head's keys and values expanded, without absorption or a cache."""
    rank = w_uk.shape[2]
    out, lse = np.zeros((*q.shape[:3], w_uv.shape[2])), np.full(q.shape[:3], -np.inf)
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        latent, new = latents[b].astype(np.float64), query_lens[b]
        keys = np.concatenate([latent[:, :rank] @ w_uk[h].T, latent[:, rank:]], axis=1)
        values = latent[:, :rank] @ w_uv[h]
        for t in range(min(new, len(latent))):
            sees = len(latent) - new + t + 1
            out[b, t, h], lse[b, t, h] = attend(q[b, t, h], keys[:sees], values[:sees], scale)
    return out, lse


def assert_same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
