"""Grouped-query decode: inputs whose unowned memory is poison, and a float64 oracle in NumPy.

Poison is NaN in every page that no row owns, every page's tail, everything left of a window and
every other layer. Block tables end, and begin left of a window, with invalid page numbers.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.core.cache.formats import FP8, FP8_MAX
from jaxattn.kernels.gqa.decode.arguments import GqaDecodeCall
from jaxattn.kernels.gqa.decode.launch import gqa_decode_mosaic
from tests.helpers.kernel_cases import NO_SUCH_PAGE, poisoned, relative


@dataclasses.dataclass
class GQACase:
    q: Array  # [B, S, H, D]
    kv_cache: Array  # [L, N, 2, C, Hk, D]
    block_tables: Array
    seq_lens: Array
    layer: int
    options: dict[str, Any]  # window, soft_cap, and arrays sinks, gate, query_lens, kv_scale

    @property
    def args(self) -> tuple[Array, Array, Array, Array]:
        return self.q, self.kv_cache, self.block_tables, self.seq_lens


def gqa_case(
    lens: list[int],
    *,
    group: int = 4,
    kv_heads: int = 2,
    dim: int = 128,
    q_len: int = 1,
    page: int = 64,
    dtype: Any = jnp.bfloat16,
    scales: Any = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    gate: bool = False,
    query_lens: list[int] | None = None,
    table_tail: int = NO_SUCH_PAGE,
    layers: int = 2,
    layer: int = 1,
    seed: int = 0,
) -> GQACase:
    """Random queries, and a poisoned cache whose rows hold `lens` tokens on shuffled pages.

    With `scales`, [2, Hk], the cache is FP8, and its numbers times the scales are of order 1.
    """
    rng = np.random.default_rng(seed)
    needed = [-(-n // page) for n in lens]
    shuffled = iter(rng.permutation(sum(needed) + 3))
    tables = np.full((len(lens), max(needed) + 2), table_tail, np.int32)
    owned, blocks = [], []
    for row, length in enumerate(lens):
        queries = q_len if query_lens is None else query_lens[row]
        begin = 0 if window is None else max(length - queries - (window - 1), 0)
        for j in range(begin // page, needed[row]):
            tables[row, j] = next(shuffled)
            token = j * page + np.arange(page)
            held = (token >= begin) & (token < length)
            block = rng.normal(size=(2, page, kv_heads, dim))
            if scales is not None:
                block /= np.asarray(scales)[:, None, :, None]
                block = np.clip(block, -FP8_MAX, FP8_MAX)
            held_or_nan = np.where(held[None, :, None, None], block, np.nan)
            blocks.append(held_or_nan.astype(dtype if scales is None else FP8))
            owned.append(tables[row, j])
    shape = (layers, sum(needed) + 3, 2, page, kv_heads, dim)
    held_blocks = np.array(blocks, dtype if scales is None else FP8).reshape(-1, *shape[2:])
    cache = poisoned(np.array(owned, np.int32), held_blocks, shape=shape, layer=layer)
    heads = group * kv_heads
    drawn = lambda *shape: rng.normal(size=shape)  # noqa: E731
    options: dict[str, Any] = {"window": window, "soft_cap": soft_cap}
    if scales is not None:
        options["kv_scale"] = jnp.asarray(scales, jnp.float32)
    q = drawn(len(lens), q_len, heads, dim)
    if query_lens is not None:
        options["query_lens"] = jnp.asarray(query_lens, jnp.int32)
        beyond = np.arange(q_len) >= np.asarray(query_lens)[:, None]
        q[beyond] = np.nan
    if sinks:
        options["sinks"] = jnp.asarray(2 * drawn(heads), jnp.float32)
    if gate:
        gates = drawn(len(lens), q_len, heads, dim)
        gates[np.asarray(lens) == 0] = np.nan
        options["gate"] = jnp.asarray(gates.astype(dtype))
    return GQACase(
        jnp.asarray(q.astype(dtype)), cache, jnp.asarray(tables), jnp.asarray(lens, jnp.int32),
        layer, options,
    )  # fmt: skip


def launch_gqa_decode(
    q: Array,
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    interpret: bool = False,
    detect_races: bool = False,
    **asked: Any,
) -> tuple[Array, ...]:
    """Launches the kernel for a call with these arguments, without the op's checks."""
    call = GqaDecodeCall(
        q=q, kv_cache=kv_cache, block_tables=block_tables, seq_lens=seq_lens, **asked
    )
    return gqa_decode_mosaic(call, interpret=interpret, detect_races=detect_races)


def gqa_oracle(case: GQACase) -> tuple[np.ndarray, np.ndarray]:
    """(out [B, S, H, D], lse [B, S, H]) in float64; (0, -inf) if a token sees no key."""
    q, lens, tables = (np.asarray(x) for x in (case.q, case.seq_lens, case.block_tables))
    batch, q_len, heads, dim = q.shape
    page, kv_heads = case.kv_cache.shape[3:5]
    options, group = case.options, heads // kv_heads
    window, cap = options.get("window"), options.get("soft_cap")
    queries = np.asarray(options.get("query_lens", np.full(batch, q_len)))
    out, lse = np.zeros(q.shape), np.full((batch, q_len, heads), -np.inf)
    layer = np.asarray(case.kv_cache)[case.layer]
    for b, s in np.ndindex(batch, q_len):
        end = lens[b] - queries[b] + s + 1
        if s >= queries[b] or end <= 0 or lens[b] == 0:
            continue
        keys = np.arange(0 if window is None else max(end - window, 0), end)
        held = layer[tables[b, keys // page], :, keys % page].astype(np.float64)  # [n, 2, Hk, D]
        if options.get("kv_scale") is not None:
            held *= np.asarray(options["kv_scale"], np.float64)[..., None]
        for h in range(heads):
            k, v = held[:, 0, h // group], held[:, 1, h // group]
            scores = k @ q[b, s, h].astype(np.float64) * dim**-0.5
            if cap is not None:
                scores = cap * np.tanh(scores / cap)
            every = scores
            if options.get("sinks") is not None:
                every = np.append(scores, np.float64(options["sinks"][h]))
            top = every.max()
            total = np.exp(every - top).sum()
            out[b, s, h] = np.exp(scores - top) / total @ v
            lse[b, s, h] = top + np.log(total)
    if options.get("gate") is not None:
        gate = np.asarray(options["gate"], np.float64)
        out = np.where(np.isneginf(lse)[..., None], 0, out / (1 + np.exp(-gate)))
    return out, lse


def with_sinks_at_their_ends(case: GQACase) -> None:
    """Sets half of the sinks to -inf, which has no effect, and one so high that it dominates."""
    case.options["sinks"] = case.options["sinks"].at[::2].set(-np.inf).at[3].set(30.0)


def assert_gqa_close(case: GQACase, out: Array, lse: Array) -> None:
    """Compares with the oracle: P is rounded to the queries' dtype before the product with V.

    So each output row is within 2/128 of its largest value and 4e-3 in relative L2, and the LSE is
    within 2e-5.
    """
    expected, expected_lse = gqa_oracle(case)
    assert out.shape == expected.shape and out.dtype == case.q.dtype
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    np.testing.assert_allclose(np.asarray(lse, np.float64), expected_lse, atol=2e-5, rtol=0)
    dead = np.isneginf(expected_lse)
    assert (np.asarray(out)[dead] == 0).all()
    error = np.abs(np.asarray(out, np.float64) - expected).max(axis=-1)
    assert (error <= 2 / 128 * np.abs(expected).max(axis=-1)).all(), error.max()
    assert dead.all() or relative(out, expected) < 4e-3


def expected_shape(case: GQACase) -> dict[str, int]:
    """The arguments of `decode_schedule` and `scratch` other than the lengths."""
    _, q_len, num_heads, head_dim = case.q.shape
    page_size, num_kv_heads = case.kv_cache.shape[3:5]
    return dict(
        q_len=q_len, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        max_pages=case.block_tables.shape[1], page_size=page_size,
    )  # fmt: skip
