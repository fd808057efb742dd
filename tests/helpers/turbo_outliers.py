"""TurboQuant caches of which one dim of every key, and of every query, is far from 0."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.helpers.turbo_cases import TurboCase, hadamard64, read_page, turbo_case
from tests.helpers.turbo_compiled import pack, page_slots, quantize, slot_pages

ROUNDING = 2.0**-11  # of float16, relative


def outlier_case(lens: list[int], preset: str, size: float, **options: Any) -> TurboCase:
    """As `turbo_case` with normal keys, values and queries, and `size` added to a dim of each."""
    case = turbo_case(lens, preset, **options)
    rng = np.random.default_rng(1)
    form, dim = case.form, case.q.shape[-1]
    page, at = form.page_size(case.kv_cache), int(rng.integers(dim))
    slots = np.array(page_slots(form, case.kv_cache))
    for row, length in enumerate(lens):
        for j in range(-(-length // page)):
            k, v = rng.normal(size=(2, slots.shape[2], page, dim)).astype(np.float32)
            k[..., at] += size
            number, held = int(case.block_tables[row, j]), min(page, length - j * page)
            some = np.asarray(pack(form, quantize(form, k, v)))
            slots[case.layer, number, :, :held] = some[:, :held]
    q = case.q.at[..., at].add(size)
    return dataclasses.replace(case, q=q, kv_cache=slot_pages(form, jnp.asarray(slots)))


def bounds_of_rounded_keys(case: TurboCase) -> tuple[np.ndarray, np.ndarray]:
    """What keys, weights and values in float16 change at most, for each [B, S, H]: (a score, and
    so the LSE; a result [.., D]). Of cases whose rows are all queries, without options."""
    q = np.asarray(case.q, np.float64)
    (batch, q_len, heads, dim), kv_heads = q.shape, case.kv_cache.shape[2]
    turn = np.eye(dim) if case.form.preset == "k8v4" else hadamard64(dim)
    kept = np.asarray(case.kv_cache)[case.layer]
    page = case.form.page_size(case.kv_cache)
    scores, results = np.zeros(q.shape[:3]), np.zeros(q.shape)
    for b, s, h in np.ndindex(batch, q_len, heads):
        length = int(case.seq_lens[b])
        owned = np.asarray(case.block_tables)[b, : -(-length // page)]
        held = [read_page(case.form, kept[n, h // (heads // kv_heads)]) for n in owned]
        k, v = (np.concatenate(x)[: length - q_len + s + 1] for x in zip(*held, strict=True))
        k = k @ turn
        p = np.exp(k @ q[b, s, h] * dim**-0.5)
        if case.form.rotated:  # float16 has every e4m3 number
            scores[b, s, h] = ROUNDING * (abs(k) @ abs(q[b, s, h])).max() * dim**-0.5
        # A score counts in the weight and in the sum of weights.
        share = np.expm1(2 * scores[b, s, h]) + 2 * ROUNDING
        results[b, s, h] = share * (p / p.sum()) @ abs(v)
    return scores, results
