"""Random inputs for tests of the delta rule, and its recurrence in float64."""

from typing import NamedTuple

import numpy as np


class Inputs(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray


GATES = {
    "none": lambda rng, shape: np.zeros(shape),
    "logsigmoid": lambda rng, shape: -np.log1p(np.exp(-rng.random(shape))),
    "half": lambda rng, shape: np.where(
        rng.random(shape) < 0.5, 0.0, -np.log1p(np.exp(-rng.random(shape)))
    ),
    "slow": lambda rng, shape: -np.log1p(np.exp(-rng.random(shape))) / 100,
    "strong": lambda rng, shape: -np.log1p(np.exp(-rng.random(shape))) * 100,
    "all_cleared": lambda rng, shape: np.full(shape, -1000.0),
    "some_cleared": lambda rng, shape: np.where(
        rng.random(shape) < 0.2, -1000.0, -0.1 * rng.random(shape)
    ),
    "minus_infinity": lambda rng, shape: np.where(
        rng.random(shape) < 0.2, -np.inf, -0.1 * rng.random(shape)
    ),
}


def make(
    batch, length, key_heads, value_heads, key_dim, value_dim=None, gates="logsigmoid", beta=None,
    *, channels=False,
):  # fmt: skip
    """Random inputs; with `channels`, every channel of the key has its own decay."""
    rng = np.random.default_rng([batch, length, key_heads, value_heads, key_dim])
    k = rng.standard_normal((batch, length, key_heads, key_dim))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    heads = (batch, length, value_heads)
    inputs = Inputs(
        rng.standard_normal(k.shape),
        k,
        rng.standard_normal((*heads, value_dim or key_dim)),
        GATES[gates](rng, (*heads, key_dim) if channels else heads),
        rng.random(heads) if beta is None else np.full(heads, float(beta)),
    )
    return Inputs(*(x.astype(np.float32) for x in inputs))


def make_state(count, value_heads, key_dim, value_dim=None, seed=7):
    rng = np.random.default_rng(seed)
    shape = (count, value_heads, value_dim or key_dim, key_dim)
    return rng.standard_normal(shape).astype(np.float32)


def oracle(q, k, v, g, beta, initial_state=None, scale=None, cu_seqlens=None, l2norm=False):
    """The recurrence in float64, token by token; decays are [B, T, Hv], or [B, T, Hv, Dk].

    Returns the output of real tokens and all final states.
    """
    q, k, v, g, beta = (np.asarray(x).astype(np.float64) for x in (q, k, v, g, beta))
    if l2norm:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    channels, repeats = g.ndim == 4, v.shape[2] // k.shape[2]
    q, k = (np.repeat(x, repeats, axis=2) for x in (q, k))
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens is None:
        spans = [(row, 0, q.shape[1]) for row in range(q.shape[0])]
    else:
        spans = [(0, int(s), int(e)) for s, e in zip(cu_seqlens, cu_seqlens[1:], strict=False)]
    out = np.zeros(v.shape)
    finals = []
    for i, (row, start, end) in enumerate(spans):
        shape = (v.shape[2], v.shape[3], k.shape[3])
        state = np.zeros(shape) if initial_state is None else initial_state[i].astype(np.float64)
        for t in range(start, end):
            decay = np.exp(g[row, t])
            state = state * (decay[:, None] if channels else decay[:, None, None])
            seen = np.einsum("hvd,hd->hv", state, k[row, t])
            delta = beta[row, t][:, None] * (v[row, t] - seen)
            state = state + delta[:, :, None] * k[row, t][:, None, :]
            out[row, t] = scale * np.einsum("hvd,hd->hv", state, q[row, t])
        finals.append(state)
    return out, np.stack(finals)


def relative(actual, expected):
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    error, size = np.linalg.norm(actual - expected), np.linalg.norm(expected)
    return error if size < 1e-30 else error / size
