"""Causal attention and its gradients by their kernels on a Hopper GPU, against NumPy's float64.

Each case crosses a width with options and with a kind of bounds. Padding is NaN in the operands
and in the cotangents, and what XLA allocates for the results was NaN before.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gqa, mla
from tests.helpers.kernel_cases import relative

RAGGED = (0, 1, 63, 64, 65, 0, 200)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Attention of `batch` rows of `tokens`.

    Attributes:
        heads, kv_heads, dim, values: of the arrays.
        is_mla: whether `mla.causal_attention` is meant, and not `gqa.gqa_attention`.
        rope: dims of k_pe; None has no k_pe.
        bounds: "whole", "lengths", "segment_ids" or "cu_seqlens".
        lens: tokens of each row, or of each sequence; of `segment_ids` those of all rows, which
            the rows begin with 0, 1, 2, ... of them left out, and end with padding.
        options: window, soft_cap; and sinks and gate, True where there are some.
    """

    batch: int = 1
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    values: int
    is_mla: bool = False
    rope: int | None = None
    dtype: Any = jnp.bfloat16
    bounds: str = "whole"
    lens: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def static(self) -> dict[str, Any]:
        return {name: x for name, x in self.options if name in ("window", "soft_cap")}


def gqa_case(dim: int, heads: int, kv_heads: int, tokens: int, **more: Any) -> Case:
    options = tuple((name, more.pop(name)) for name in OPTIONS if name in more)
    return Case(
        tokens=tokens, heads=heads, kv_heads=kv_heads, dim=dim, values=dim, options=options, **more
    )


def mla_case(dim: int, values: int, heads: int, tokens: int, **more: Any) -> Case:
    return Case(
        is_mla=True, tokens=tokens, heads=heads, kv_heads=heads, dim=dim, values=values, **more
    )


OPTIONS = "window", "soft_cap", "sinks", "gate"
HALF = {"dtype": jnp.float16}
LENGTHS = {"bounds": "lengths"}
SEGMENTS = {"bounds": "segment_ids", "lens": RAGGED}
PACKED = {"bounds": "cu_seqlens"}
LONG = (1000, 0, 1, 63, 64, 65, 129)
CASES = (
    # One width after another: whole rows, padding, packed sequences, all options at once.
    gqa_case(64, 4, 4, 300),
    gqa_case(64, 2, 1, 5, sinks=True),
    gqa_case(64, 8, 1, 520, batch=3, lens=(520, 0, 65), sinks=True, **LENGTHS, **HALF),
    gqa_case(64, 8, 2, 1400, lens=LONG, window=100, **PACKED),
    gqa_case(64, 27, 3, 257, batch=2, soft_cap=5.0, gate=True, sinks=True, **SEGMENTS),
    gqa_case(64, 16, 16, 1111, batch=2, window=64, soft_cap=20.0, **HALF),
    gqa_case(128, 4, 4, 1000, batch=5, lens=(1000, 999, 1, 64, 129), **LENGTHS),
    gqa_case(128, 8, 2, 1337, lens=LONG, sinks=True, **PACKED, **HALF),
    gqa_case(128, 8, 1, 450, batch=3, **SEGMENTS),
    gqa_case(128, 27, 3, 515, window=200, sinks=True, gate=True),
    gqa_case(128, 8, 8, 700, batch=3, soft_cap=8.0, sinks=True, window=1, **SEGMENTS, **HALF),
    gqa_case(128, 32, 8, 1100, batch=2),
    gqa_case(256, 4, 4, 333, batch=3, lens=(333, 0, 64), **LENGTHS),
    gqa_case(256, 8, 2, 1400, lens=LONG, **PACKED),
    gqa_case(256, 8, 1, 640, batch=2, window=130, soft_cap=30.0, sinks=True, **SEGMENTS, **HALF),
    gqa_case(256, 9, 3, 321, gate=True, sinks=True, **HALF),
    gqa_case(256, 8, 4, 1100, batch=3),
    mla_case(192, 128, 4, 1000),
    mla_case(192, 128, 4, 1111, batch=4, rope=64, lens=(1111, 0, 1, 65), **LENGTHS, **HALF),
    mla_case(192, 128, 5, 1400, rope=64, lens=LONG, **PACKED),
    mla_case(192, 128, 3, 450, batch=3, **SEGMENTS, **HALF),
    mla_case(192, 128, 16, 1100, batch=2, rope=64),
    mla_case(256, 256, 2, 500, batch=3, lens=(500, 64, 3), **LENGTHS),
    mla_case(256, 256, 3, 1400, rope=64, lens=LONG, **PACKED, **HALF),
    mla_case(256, 256, 4, 333, batch=2, rope=64, **SEGMENTS),
)


def bounds_of(case: Case) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """What the op is told, the valid tokens of each row, and the first key of each token."""
    lengths = np.full(case.batch, case.tokens, np.int32)
    first = np.zeros((case.batch, case.tokens), np.int32)
    given: dict[str, np.ndarray] = {}
    if case.bounds == "lengths":
        lengths = np.array(case.lens, np.int32)
        given = {"lengths": lengths}
    elif case.bounds == "cu_seqlens":
        ends = np.cumsum((0, *case.lens)).astype(np.int32)
        lengths, given = ends[-1:], {"cu_seqlens": ends}
        first[0, : ends[-1]] = np.repeat(ends[:-1], case.lens)
    elif case.bounds == "segment_ids":
        ids = np.zeros_like(first)
        for row in range(case.batch):
            lens = case.lens[row:]
            lengths[row] = min(sum(lens), case.tokens)
            of_each = np.repeat(np.arange(1, len(lens) + 1), lens)[: case.tokens]
            ids[row, : lengths[row]] = of_each
            begins = np.repeat(np.cumsum((0, *lens[:-1])), lens)[: case.tokens]
            first[row, : lengths[row]] = begins
        given = {"segment_ids": ids}
    window = case.static.get("window")
    if window is not None:
        first = np.maximum(first, np.arange(case.tokens, dtype=np.int32) - (window - 1))
    return given, lengths, first


def dense(case: Case, x: dict[str, np.ndarray], first: np.ndarray, lengths: np.ndarray) -> Any:
    """(out, lse, their pullback) in float64 of operands without NaN."""
    group, q, k, v = case.heads // case.kv_heads, x["q"], x["k"], x["v"]
    if "k_pe" in x:
        pe = np.broadcast_to(x["k_pe"][:, :, None], (*k.shape[:3], x["k_pe"].shape[-1]))
        k = np.concatenate([k, pe], axis=-1)
    scale, cap = case.dim**-0.5, case.static.get("soft_cap")
    q, k, v = (y.swapaxes(1, 2) for y in (q, k, v))
    k, v = (np.repeat(y, group, axis=1) for y in (k, v))
    s, slope = q @ k.swapaxes(2, 3) * scale, 1.0
    if cap is not None:
        tanh = np.tanh(s / cap)
        s, slope = cap * tanh, 1 - tanh**2
    t = np.arange(case.tokens)
    seen = (t <= t[:, None]) & (t >= first[..., None]) & (t[:, None] < lengths[:, None, None])
    s = np.where(seen[:, None], s, -np.inf)
    sinks = x.get("sinks")
    low = np.full(s.shape[:3], -np.inf) if sinks is None else sinks[None, :, None]
    top = np.maximum(s.max(axis=-1), low)
    top = np.where(np.isneginf(top), 0, top)[..., None]
    p = np.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    total += 0 if sinks is None else np.exp(low[..., None] - top)
    there = (t < lengths[:, None])[:, None, :, None]
    p /= np.where(there, total, 1)
    lse = np.where(there, top + np.log(np.where(there, total, 1)), -np.inf)[..., 0]
    attended = p @ v
    opens = 1.0
    if "gate" in x:
        opens = 1 / (1 + np.exp(-x["gate"].swapaxes(1, 2)))
    out = attended * opens

    def pullback(d_out: np.ndarray, d_lse: np.ndarray) -> dict[str, np.ndarray]:
        d_out, d_lse = d_out.swapaxes(1, 2), d_lse.swapaxes(1, 2)
        grads = {}
        if "gate" in x:
            grads["gate"] = (d_out * attended * opens * (1 - opens)).swapaxes(1, 2)
        d_out = d_out * opens
        delta = (d_out * attended).sum(axis=-1) - d_lse
        if sinks is not None:
            weight = np.where(there[..., 0], np.exp(low - np.where(there[..., 0], lse, 0)), 0)
            grads["sinks"] = -(weight * delta).sum(axis=(0, 2))
        ds = p * (d_out @ v.swapaxes(2, 3) - delta[..., None]) * slope * scale
        dk, dv = ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ d_out
        dk, dv = (
            y.reshape(case.batch, case.kv_heads, group, case.tokens, -1).sum(axis=2).swapaxes(1, 2)
            for y in (dk, dv)
        )
        if "k_pe" in x:
            own = x["k"].shape[-1]
            dk, grads["k_pe"] = dk[..., :own], dk[..., own:].sum(axis=2)
        return grads | {"q": (ds @ k).swapaxes(1, 2), "k": dk, "v": dv}

    return out.swapaxes(1, 2), lse.swapaxes(1, 2), pullback


@functools.partial(jax.jit, static_argnames=("case", "implementation"))
def value_and_gradients(
    operands: Any, bounds: Any, cotangents: Any, *, case: Case, implementation: str
) -> Any:
    op: Any = gqa.gqa_attention
    if case.is_mla:
        op = functools.partial(mla.causal_attention, scale=case.dim**-0.5)

    def run(operands: Any) -> Any:
        return op(**operands, **bounds, **case.static, implementation=implementation)

    outs, pullback = jax.vjp(run, operands)
    return outs, pullback(cotangents)[0]


def poison(megabytes: int) -> None:
    """NaN in the memory that XLA gives to the next results."""
    jax.block_until_ready([jnp.full(2**18 * megabytes, jnp.nan) for _ in range(4)])


def check(case: Case, implementation: str = "mosaic_gpu") -> dict[str, float]:
    """The error of each result, of a case that runs twice; it raises at what is plainly wrong."""
    rng = np.random.default_rng(0)
    given, lengths, first = bounds_of(case)
    there = np.arange(case.tokens) < lengths[:, None]
    own = case.dim - (case.rope or 0)
    tensors = {
        "q": (case.heads, case.dim),
        "k": (case.kv_heads, own),
        "v": (case.kv_heads, case.values),
    }
    if case.rope:
        tensors["k_pe"] = (case.rope,)
    asked = dict(case.options)
    if asked.get("gate"):
        tensors["gate"] = (case.heads, case.values)
    tensors["d_out"] = (case.heads, case.values)

    def masked(x: np.ndarray, fill: float) -> np.ndarray:
        return np.where(there.reshape(there.shape + (1,) * (x.ndim - 2)), x, x.dtype.type(fill))

    drawn = {
        name: np.asarray(
            jnp.asarray(rng.normal(size=(case.batch, case.tokens, *shape)), case.dtype)
        )
        for name, shape in tensors.items()
    }
    d_lse = rng.normal(size=(case.batch, case.tokens, case.heads)).astype(np.float32)
    dirty = {name: masked(x, np.nan) for name, x in drawn.items()}
    clean = {name: masked(x, 0).astype(np.float64) for name, x in drawn.items()}
    if asked.get("sinks"):
        dirty["sinks"] = rng.normal(size=case.heads).astype(np.float32)
        clean["sinks"] = dirty["sinks"].astype(np.float64)
    cotangents = dirty.pop("d_out"), masked(d_lse, np.nan)
    d_out = clean.pop("d_out")
    run = functools.partial(
        value_and_gradients, dirty, given, cotangents, case=case, implementation=implementation
    )
    results = []
    for _ in range(2):
        poison(64 if implementation == "mosaic_gpu" else 0)
        results.append(jax.tree.map(np.asarray, run()))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        assert one.tobytes() == other.tobytes(), "not the same bits twice"
    (out, lse), grads = results[0]
    wanted_out, wanted_lse, pullback = dense(case, clean, first, lengths)
    wanted = pullback(d_out, masked(d_lse, 0).astype(np.float64))
    assert np.isneginf(lse[~there]).all() and np.isfinite(lse[there]).all(), "lse"
    errors = {"lse": np.abs(lse[there] - wanted_lse[there]).max()}
    for name, got, right in (("out", out, wanted_out), *((n, grads[n], wanted[n]) for n in wanted)):
        assert np.isfinite(got).all(), f"{name} is not finite"
        if name != "sinks":
            assert not got[~there].any(), f"{name} of padding is not 0"
        errors[name] = relative(got, right)
    return errors


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case):
    errors = check(case)
    assert max(errors.values()) <= 1e-2, errors


@pytest.mark.parametrize(
    "case",
    [
        gqa_case(8, 4, 2, 7, batch=2, lens=(7, 4), bounds="lengths", sinks=True, gate=True),
        gqa_case(8, 2, 1, 9, lens=(4, 5), bounds="cu_seqlens", window=3, soft_cap=2.0, sinks=True),
    ],
    ids=str,
)
def test_the_gradients_of_float64_are_finite_differences(case):
    rng = np.random.default_rng(0)
    _, lengths, first = bounds_of(case)
    there = np.arange(case.tokens) < lengths[:, None]
    draw = lambda *shape: rng.normal(size=shape)  # noqa: E731
    lead = case.batch, case.tokens
    x = {"q": draw(*lead, case.heads, case.dim), "sinks": draw(case.heads)}
    x |= {name: draw(*lead, case.kv_heads, case.dim) for name in ("k", "v")}
    if dict(case.options).get("gate"):
        x["gate"] = draw(*lead, case.heads, case.dim)
    d_out = draw(*lead, case.heads, case.dim) * there[..., None, None]
    d_lse = draw(*lead, case.heads) * there[..., None]

    def loss(x):
        out, lse, _ = dense(case, x, first, lengths)
        return (out * d_out).sum() + (np.where(there[..., None], lse, 0) * d_lse).sum()

    grads = dense(case, x, first, lengths)[2](d_out, d_lse)
    assert grads.keys() == x.keys()
    for name in x:
        along = draw(*x[name].shape)
        ahead, behind = (loss(x | {name: x[name] + step * along}) for step in (1e-5, -1e-5))
        np.testing.assert_allclose(
            (grads[name] * along).sum(), (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-7, err_msg=name
        )
