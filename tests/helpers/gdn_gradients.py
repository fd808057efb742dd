"""Float64 gradients of the delta rules' recurrences, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers.kernel_cases import relative

NAMES = "q", "k", "v", "g", "beta", "initial_state"


def recurrence(q, k, v, g, beta, state, *, scale, l2norm):
    """Output and final state of one sequence: q, k [T, Hk, D], v [T, Hv, D], state [Hv, D, D]."""
    if l2norm:
        q, k = (x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    group = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x, group, axis=1) for x in (q, k))
    decay = jnp.exp(g)[:, :, None, None] if g.ndim == 2 else jnp.exp(g)[:, :, None]

    def step(state, token):
        q, k, v, decay, beta = token
        state = decay * state
        delta = beta[:, None] * (v - jnp.einsum("hvk,hk->hv", state, k))
        state = state + delta[..., None] * k[:, None]
        return state, scale * jnp.einsum("hvk,hk->hv", state, q)

    state, out = jax.lax.scan(step, state, (q, k, v, decay, beta))
    return out, state


@functools.partial(jax.jit, static_argnames=("scale", "l2norm"))
def _gradients(arguments, cotangents, *, scale, l2norm):
    rule = functools.partial(recurrence, scale=scale, l2norm=l2norm)
    return jax.vjp(rule, *arguments)[1](cotangents)


def oracle_gradients(case, dout, dfinal, *, l2norm=True, scale=128**-0.5):
    """Float64 gradients of the arguments of a `Case`, without the padding."""
    with jax.enable_x64(True):
        wide = [np.asarray(x)[0, : case.tokens].astype(np.float64) for x in (*case.args, dout)]
        states, dstates = (np.asarray(x, np.float64) for x in (case.initial_state, dfinal))
        parts = []
        offsets = np.asarray(case.cu_seqlens)
        for i, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
            *tokens, do = (x[start:end] for x in wide)
            arguments, cotangents = (*tokens, states[i]), (do, dstates[i])
            parts.append(_gradients(arguments, cotangents, scale=scale, l2norm=l2norm))
        *tokens, starts = zip(*parts, strict=True)
        return *(np.concatenate(x)[None] for x in tokens), np.stack(starts)


def assert_gradients(case, actual, expected, *, bound):
    """Asserts that each gradient is within the bound, and 0 for padding."""
    wrong = {}
    for name, ours, theirs in zip(NAMES, actual, expected, strict=True):
        ours = np.asarray(ours)
        if name != "initial_state":
            assert (ours[:, case.tokens :] == 0).all(), name
            ours = ours[:, : case.tokens]
        if not (error := relative(ours, theirs)) < bound:
            wrong[name] = error
    assert not wrong, wrong
