"""Float64 NumPy references of the ops, for the few rows and heads that a bench checks.

XLA takes longer to compile the references than a bench needs to measure a shape.
"""

from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import ArrayLike

EPS = 1e-6  # epsilon of the norms


def exact(x: ArrayLike | jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def relative_l2(actual: ArrayLike | jax.Array, expected: np.ndarray) -> float:
    return float(np.linalg.norm(exact(actual) - expected) / np.linalg.norm(expected))


def worst(errors: Sequence[float]) -> float:
    """The greatest error, or NaN if any is NaN; Python's `max` may ignore a NaN."""
    return float(np.max(errors))


def accepted(
    what: str,
    errors: Sequence[float],
    lse_errors: Sequence[float],
    *,
    below: float,
    lse_below: float,
) -> float:
    """Checks the errors of a bench and returns the greatest relative error of its outputs.

    Args:
        what: The bench and the shape, for the message.
        errors: Relative errors of the outputs.
        lse_errors: Absolute errors of the log-sum-exps.
        below, lse_below: The bounds that the greatest errors must stay below.

    Raises:
        AssertionError: an error reaches its bound or is NaN.
    """
    error, lse_error = worst(errors), worst(lse_errors)
    if not (error < below and lse_error < lse_below):
        raise AssertionError(f"{what}: relative error {error}, LSE {lse_error}")
    return error


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, last: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q [S, K] over k [T, K] and v [T, V]: (output [S, V], natural-log LSE [S]).

    Query i sees the keys up to and including index `last[i]`.
    """
    scores = q @ k.T * scale
    scores[np.arange(len(k)) > last[:, None]] = -np.inf
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    return weights @ v / total, (top + np.log(total))[:, 0]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The gated delta rule, token by token: outputs [T, H, Dv] and final state [H, Dv, Dk].

    Args:
        q, k: [T, H, Dk], not yet normalized, with each key head repeated for its value heads.
        v: [T, H, Dv].
        g: Log decay, [T, H], or [T, H, Dk] with one per key channel.
        beta: [T, H], writing strength.
        state: [H, Dv, Dk], initial state.
    """
    q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + EPS) for x in (q, k))
    outputs = []
    for t in range(len(q)):
        state = state * np.exp(g[t]).reshape(len(state), 1, -1)
        write = beta[t][:, None] * (v[t] - (state @ k[t][..., None])[..., 0])
        state = state + write[..., None] * k[t][:, None, :]
        outputs.append((state @ q[t][..., None])[..., 0])
    return np.stack(outputs) * q.shape[-1] ** -0.5, state


def delta_net(
    qkvz: np.ndarray, ba: np.ndarray, weights: np.ndarray, conv: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row's `(y, conv_state, state)` of `jaxattn.gdn.gated_delta_net_decode`.

    Args:
        qkvz: [S, C].
        ba: [S, 2 Hv].
        weights: [P], packed.
        conv: [W - 1, Dc].
        state: [Hv, Dv, Dk].
    """
    tokens, (heads, values, keys) = len(qkvz), state.shape
    before, channels = conv.shape
    rates, bias, norm, kernel = np.split(
        weights, np.cumsum([heads, heads, values]).tolist(), axis=0
    )
    mixed, seen = convolved(qkvz[:, :channels], conv, kernel)
    split = (channels - heads * values) // 2
    q, k, v = np.split(mixed, [split, 2 * split], axis=1)
    q, k = (np.repeat(x.reshape(tokens, -1, keys), heads * keys // split, axis=1) for x in (q, k))
    b, a = np.split(ba, 2, axis=1)
    g = -np.exp(rates) * np.logaddexp(0, a + bias)
    o, state = delta_rule(q, k, v.reshape(tokens, heads, values), g, 1 / (1 + np.exp(-b)), state)
    o = o / np.sqrt((o * o).mean(axis=-1, keepdims=True) + EPS) * norm
    y = o.reshape(tokens, -1) * silu(qkvz[:, channels:])
    return y, seen[-before:], state


def convolved(x: np.ndarray, conv: np.ndarray, kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(causal convolution and SiLU of x [S, Dc], its inputs with the W - 1 earlier ones)."""
    taps, channels = conv.shape[0] + 1, conv.shape[1]
    seen, kernel = np.concatenate([conv, x]), kernel.reshape(taps, channels)
    return silu(sum(kernel[i] * seen[i : i + len(x)] for i in range(taps))), seen


def kimi_delta_attention(
    qkv: np.ndarray,
    f: np.ndarray,
    b: np.ndarray,
    gate: np.ndarray,
    weights: np.ndarray,
    conv: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row's `(y, conv_state, state)` of `jaxattn.kda.kimi_delta_attention_decode`.

    Args:
        qkv: [S, 3 H D]; f, gate: [S, H D]; b: [S, H].
        weights: [P], packed.
        conv: [W - 1, 3 H D].
        state: [H, D, D].
    """
    tokens, (heads, dim, _) = len(qkv), state.shape
    rates, bias, norm, kernel = np.split(
        weights, np.cumsum([heads, heads * dim, dim]).tolist(), axis=0
    )
    mixed, seen = convolved(qkv, conv, kernel)
    q, k, v = (x.reshape(tokens, heads, dim) for x in np.split(mixed, 3, axis=1))
    g = -np.exp(rates)[:, None] * np.logaddexp(0, f + bias).reshape(tokens, heads, dim)
    o, state = delta_rule(q, k, v, g, 1 / (1 + np.exp(-b)), state)
    o = o / np.sqrt((o * o).mean(axis=-1, keepdims=True) + EPS) * norm
    return o.reshape(tokens, -1) / (1 + np.exp(-gate)), seen[-len(conv) :], state
