"""TurboQuant caches in which some dims of every key and query are far from 0."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxattn.ops.gqa.scores import AttentionScoring, window_begins
from tests.helpers.turbo_cases import TurboCase, hadamard64, read_page, turbo_case
from tests.helpers.turbo_compiled import common_key, pack, page_slots, quantize, slot_pages

ROUNDING = 2.0**-11  # relative, in float16
SPLIT = 2.0**-8  # relative, with two e4m3 terms


def outlier_case(
    lens: list[int],
    preset: str,
    size: float,
    *,
    dims: int = 1,
    share: float = 1.0,
    differs: bool = False,
    **options: Any,
) -> TurboCase:
    """Like `turbo_case` with normal data, plus or minus `size` in some dims of keys and queries.

    Only a `share` of the tokens' keys is changed. With `differs`, each token has other dims and
    signs.
    """
    case = turbo_case(lens, preset, **options)
    rng = np.random.default_rng(1)
    form, dim = case.form, case.q.shape[-1]
    page = form.page_size(case.kv_cache)
    added = np.zeros(dim, np.float32)
    added[rng.permutation(dim)[:dims]] = size * (-1.0) ** np.arange(dims)

    def of_tokens() -> np.ndarray:
        """The change of a page's keys, [C, D]."""
        if not differs:
            return np.where(rng.random((page, 1)) < share, added, 0)
        return rng.permuted(np.tile(added, (page, 1)), axis=1)

    slots = np.array(page_slots(form, case.kv_cache))
    for row, length in enumerate(lens):
        for j in range(-(-length // page)):
            number = int(case.block_tables[row, j])
            if number >= slots.shape[1]:
                continue  # left of a window
            k, v = rng.normal(size=(2, slots.shape[2], page, dim)).astype(np.float32)
            k += of_tokens()
            some, kept = np.asarray(pack(form, quantize(form, k, v))), slots[case.layer, number]
            poison = (kept == 0xFF).all(axis=-1, keepdims=True)
            slots[case.layer, number] = np.where(poison, kept, some)
    q = (case.q.astype(jnp.float32) + added).astype(case.q.dtype)
    return dataclasses.replace(case, q=q, kv_cache=slot_pages(form, jnp.asarray(slots)))


def common64(case: TurboCase) -> np.ndarray:
    """[B, Hk, D], the common key that the op subtracts from the keys of each row."""
    new = case.options.get("query_lens")
    new = jnp.full_like(case.seq_lens, case.q.shape[1]) if new is None else new
    begins = window_begins(
        AttentionScoring(scale=1.0, window=case.options["window"]),
        jnp.maximum(case.seq_lens - new, 0), case.seq_lens,
    )  # fmt: skip
    at = jnp.full(1, case.layer, jnp.int32)
    arrays = case.kv_cache, case.block_tables, case.seq_lens, begins, at
    found = common_key(case.form, *arrays)
    return np.asarray(found, np.float64)


def bounds_of_rounded_keys(
    case: TurboCase, *, split: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds on the effect of rounding: (of scores and LSE [B, S, H], of results [B, S, H, D]).

    The rounding is that of keys, weights and values in float16. With `split`, it is that of rotated
    queries and weights in two e4m3 terms, with exact codes. Cases must not have a soft cap.
    """
    q = np.asarray(case.q, np.float64)
    (batch, q_len, heads, dim), kv_heads = q.shape, case.kv_cache.shape[2]
    turn = np.eye(dim) if case.form.preset == "k8v4" else hadamard64(dim)
    common = common64(case) if case.form.rotated else None
    kept = np.asarray(case.kv_cache)[case.layer]
    page = case.form.page_size(case.kv_cache)
    scores, results = np.zeros(q.shape[:3]), np.zeros(q.shape)
    window, sinks = case.options["window"], case.options.get("sinks")
    news = np.asarray(case.options.get("query_lens", np.full(batch, q_len)))
    for b, s, h in np.ndindex(batch, q_len, heads):
        length, n = int(case.seq_lens[b]), h // (heads // kv_heads)
        owned = np.asarray(case.block_tables)[b, : -(-length // page)]
        owned = np.where(owned < len(kept), owned, 0)  # left of a window
        held = [read_page(case.form, kept[number, n]) for number in owned]
        end = length - int(news[b]) + s + 1
        if s >= news[b]:
            continue
        begin = 0 if window is None else max(end - window, 0)
        k, v = (np.concatenate(x)[begin:end] for x in zip(*held, strict=True))
        if split:
            scores[b, s, h] = SPLIT * (abs(k) @ abs(turn @ q[b, s, h])).max() * dim**-0.5
        k = k @ turn
        logits = k @ q[b, s, h] * dim**-0.5
        every = logits if sinks is None else np.append(logits, np.float64(sinks[h]))
        p = np.exp(logits - every.max()) / np.exp(every - every.max()).sum()
        if common is not None and not split:  # float16 represents every e4m3 number
            rounded = ROUNDING * (abs(k - common[b, n]) @ abs(q[b, s, h])).max() * dim**-0.5
            scores[b, s, h] = rounded
        # A score affects the weight and the sum of weights.
        share = np.expm1(2 * scores[b, s, h]) + 2 * ROUNDING
        results[b, s, h] = share * p @ abs(v)
        if split:  # weights of values that are relative to the middle of a token's codes
            results[b, s, h] += 2 * SPLIT * p @ abs(v - (v.max(1) + v.min(1))[:, None] / 2)
    if case.options.get("gate") is not None:
        results = results / (1 + np.exp(-np.asarray(case.options["gate"], np.float64)))
    return scores, results
