"""Grouped-query prefill: inputs whose unowned memory is poison, and a float64 oracle in NumPy.

Poison is NaN in queries, keys, values and gates past a row's new tokens and before its first
position. In the cache it is NaN in pages that no row owns, the tails of pages, the new tokens'
places, everything left of a window, and every other layer. Block tables end, and begin left of a
window, with invalid page numbers.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from tests.helpers.kernel_cases import NO_SUCH_PAGE, relative


@dataclasses.dataclass
class PrefillCase:
    """The arguments of a prefill.

    Attributes:
        new: q [B, T, H, D], k and v [B, T, Hk, D].
        cached: kv_cache [L, N, 2, C, Hk, D] and block tables [B, M].
        lengths: seq_lens and query_lens.
        options: window, soft_cap, scale, and arrays sinks and gate.
        keys, values: All tokens of each row, [len, Hk, D].
    """

    new: tuple[Array, Array, Array]
    cached: tuple[Array, Array]
    lengths: tuple[Array, Array]
    options: dict[str, Any]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    layer: int = 1

    @property
    def args(self) -> tuple[Array, ...]:
        return *self.new, *self.cached, *self.lengths


def prefill_case(
    lens: list[int],
    new: list[int],
    *,
    tokens: int | None = None,
    group: int = 2,
    kv_heads: int = 1,
    dim: int = 128,
    page: int = 16,
    dtype: Any = jnp.bfloat16,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    sinks: bool = False,
    gate: bool = False,
    seed: int = 0,
) -> PrefillCase:
    """Rows of `lens` tokens, of which the last `new` are new; T is `tokens` or the maximum."""
    rng = np.random.default_rng(seed)
    tokens, heads = tokens or max(new), group * kv_heads

    def drawn(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32).astype(dtype)

    keys, values = ([drawn(n, kv_heads, dim) for n in lens] for _ in range(2))
    q, gates = drawn(len(lens), tokens, heads, dim), drawn(len(lens), tokens, heads, dim)
    fresh = np.full((2, len(lens), tokens, kv_heads, dim), np.nan, dtype)
    needed = [-(-n // page) for n in lens]
    shuffled = iter(rng.permutation(sum(needed) + 3))
    cache = np.full((2, sum(needed) + 3, 2, page, kv_heads, dim), np.nan, dtype)
    tables = np.full((len(lens), max(needed) + 2), NO_SUCH_PAGE, np.int32)
    for b, (length, count) in enumerate(zip(lens, new, strict=True)):
        first = max(count - length, 0)
        prefix = max(length - count, 0) if count else length
        begin = 0 if window is None else max(prefix - window + 1, 0)
        for j in range(begin // page, needed[b]):
            tables[b, j] = next(shuffled)
        for both, of in enumerate((keys[b], values[b])):
            fresh[both, b, first:count] = of[length - (count - first) :]
            for t in range(begin, prefix):
                cache[1, tables[b, t // page], both, t % page] = of[t]
        real = (np.arange(tokens) >= first) & (np.arange(tokens) < count)
        q[b, ~real], gates[b, ~real] = np.nan, np.nan
    options: dict[str, Any] = {"window": window, "soft_cap": soft_cap, "scale": scale}
    if sinks:
        options["sinks"] = jnp.asarray(2 * rng.normal(size=heads), jnp.float32)
    if gate:
        options["gate"] = jnp.asarray(gates)
    return PrefillCase(
        (jnp.asarray(q), jnp.asarray(fresh[0]), jnp.asarray(fresh[1])),
        (jnp.asarray(cache), jnp.asarray(tables)),
        (jnp.asarray(lens, jnp.int32), jnp.asarray(new, jnp.int32)),
        options,
        keys,
        values,
    )


def prefill_oracle(case: PrefillCase, heads: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
    """(out [B, T, H, D], lse [B, T, H]) in float64; (0, -inf) for padding."""
    q = np.asarray(case.new[0], np.float64)
    _, tokens, count, dim = q.shape
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    options = case.options
    scale, window = options["scale"] or dim**-0.5, options["window"]
    group = count // case.new[1].shape[2]
    for b, new in enumerate(np.asarray(case.lengths[1]).tolist()):
        length = len(case.keys[b])
        rows = np.arange(max(new - length, 0), new)
        position, key = (length - new + rows)[:, None], np.arange(length)
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        for h in range(count)[heads] if len(rows) else ():
            k, v = (x[b][:, h // group].astype(np.float64) for x in (case.keys, case.values))
            scores = q[b, rows, h] @ k.T * scale
            if (cap := options["soft_cap"]) is not None:
                scores = cap * np.tanh(scores / cap)
            scores = np.where(seen, scores, -np.inf)
            top = scores.max(axis=1)
            sink = -np.inf
            if options.get("sinks") is not None:
                sink = np.float64(options["sinks"][h])
                top = np.maximum(top, sink)
            p = np.exp(scores - top[:, None])
            total = p.sum(axis=1) + np.exp(sink - top)
            out[b, rows, h] = p @ v / total[:, None]
            lse[b, rows, h] = top + np.log(total)
    if options.get("gate") is not None:
        gate = np.asarray(options["gate"], np.float64)
        out = np.where(np.isneginf(lse)[..., None], 0, out / (1 + np.exp(-gate)))
    return out[:, :, heads], lse[:, :, heads]


def assert_prefill_close(
    case: PrefillCase, out: Array, lse: Array, heads: slice = slice(None)
) -> None:
    """Compares with the oracle: P is rounded to the queries' dtype before the product with V.

    So each output row is within 1e-3 or 2/128 of its largest value, and all are within 4e-3 in
    relative L2. The LSE is within 1e-5 or 4 float32 ulp. Padding is exactly 0 and -inf.
    """
    expected, expected_lse = prefill_oracle(case, heads)
    out, lse = out[:, :, heads], lse[:, :, heads]
    assert out.shape == expected.shape and out.dtype == case.new[0].dtype
    dead = np.isneginf(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), dead)
    np.testing.assert_allclose(np.asarray(lse, np.float64), expected_lse, atol=1e-5, rtol=5e-7)
    assert (np.asarray(out)[dead] == 0).all()
    error = np.abs(np.asarray(out, np.float64) - expected).max(axis=-1)
    assert (error <= np.maximum(1e-3, 2 / 128 * np.abs(expected).max(axis=-1))).all(), error.max()
    assert relative(out, expected) < 4e-3
