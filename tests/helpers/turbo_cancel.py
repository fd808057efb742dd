"""TurboQuant caches in which some rows' values cancel, which shows rounding errors best.

One key has a weight of an eighth and a score of 6 or more, and its value is the opposite of the sum
of the others. So the output is a 24th as long as a value.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxattn.core.turboquant.codec import TurboFormat
from tests.helpers.turbo_cases import TurboCase, hadamard64, turbo_case
from tests.helpers.turbo_compiled import dequantize, pack, page_slots, quantize, slot_pages

SHARE, SCORE, LEFT = 0.12, 6.2, 1 / 24


def cancelling_case(lens: list[int], preset: str, *, seed: int = 0, **options: int) -> TurboCase:
    """Like `turbo_case`, but the last token's first query of each KV head sees such a key."""
    case = turbo_case(lens, preset, seed=seed, **options)
    rng = np.random.default_rng(seed + 1)
    form, dim = case.form, case.q.shape[-1]
    heads, kv_heads = case.q.shape[2], case.kv_cache.shape[2]
    page = form.page_size(case.kv_cache)
    q = np.asarray(case.q, np.float64)
    slots = np.array(page_slots(form, case.kv_cache))
    turn = np.eye(dim) if preset == "k8v4" else hadamard64(dim)
    for row, length in enumerate(lens):
        pages = np.asarray(case.block_tables)[row, : -(-length // page)]
        for head in range(kv_heads):
            query = q[row, -1, head * (heads // kv_heads)]
            k, v = _others(query, length, rng)
            own = int(rng.integers(length))
            k += _along(query, _wanted(query, k) * np.ones(length))
            k[own] += _along(query, 2.0)
            stored = _kept(form, k, v)
            # The weights of the others, from the keys that the cache stores.
            weights = np.exp((stored[0] @ turn) @ query * dim**-0.5)
            weights[own] = 0
            want = np.log(SHARE / (1 - SHARE) * weights.sum())
            for _ in range(3):  # because rounding a key to few bits changes its score
                score = (_kept(form, k, v)[0][own] @ turn) @ query * dim**-0.5
                k[own] += _along(query, want - score)
            rest = weights @ stored[1] / np.exp(want)
            left = rng.normal(size=dim)
            v[own] = LEFT / SHARE * np.linalg.norm(rest) / np.linalg.norm(left) * left - rest
            some = np.asarray(pack(form, quantize(form, *_single(k, v))))
            for at, number in enumerate(pages):
                held = min(page, length - at * page)
                slots[case.layer, number, head, :held] = some[at * page : at * page + held]
    cache = slot_pages(form, jnp.asarray(slots))
    return dataclasses.replace(case, kv_cache=cache)


def crafted(case: TurboCase, x: np.ndarray) -> np.ndarray:
    """[B, Hk, ...]: the part of results [B, S, H, ...] for queries whose values cancel."""
    return np.asarray(x)[:, -1, :: case.q.shape[2] // case.kv_cache.shape[2]]


def _others(query: np.ndarray, length: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Keys, and values with a common part."""
    k, v = rng.normal(size=(2, length, query.size))
    return k, v + SHARE * rng.normal(size=query.size)


def _wanted(query: np.ndarray, k: np.ndarray) -> float:
    """The amount to add to all scores, so that the heavy key's score becomes `SCORE`."""
    scores = k @ query * query.size**-0.5
    total = np.log(np.exp(scores).sum() * SHARE / (1 - SHARE))
    return float(SCORE + 0.3 - total)


def _along(query: np.ndarray, scores: np.ndarray | float) -> np.ndarray:
    """The change of keys that adds `scores` to their scores."""
    return np.multiply.outer(scores, query / (query @ query) * query.size**0.5)


def _kept(form: TurboFormat, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """Keys, rotated if the format rotates them, and values after a round trip through the cache."""
    return [np.asarray(x, np.float64) for x in dequantize(form, quantize(form, *_single(k, v)))]


def _single(*arrays: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(x, np.float32) for x in arrays]
