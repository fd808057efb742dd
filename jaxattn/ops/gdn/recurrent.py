"""The gated delta rule token by token, and its gates; `jaxattn.gdn` has the state's layout."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.core.cache.state_pool import as_offsets, check_cu_seqlens
from jaxattn.core.dispatch import Implementation, dispatch_xla
from jaxattn.core.validation.array_checks import (
    check_dtype,
    floats,
    keep_concrete,
    maybe_floats,
    output_scale,
)
from jaxattn.core.validation.varying_axes import match_varying_axes
from jaxattn.ops.gdn.chunk_xla import l2norm


def gdn_gates(
    a: Float[Array, "*B Hv"],
    b: Float[Array, "*B Hv"],
    A_log: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
) -> tuple[Float[Array, "*B Hv"], Float[Array, "*B Hv"]]:
    """Computes `g = -exp(A_log) * softplus(a + dt_bias)` and `beta = sigmoid(b)`, in float32.

    g is the log decay. Both results stay float32: beta rounded to bfloat16 is a known source of
    drift. Source: Qwen3-Next.

    Raises:
        TypeError, ValueError: An argument is not an array, or has a wrong shape or dtype.
    """
    op = "gdn_gates"
    a, b, A_log, dt_bias = floats(op, a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    if a.ndim < 1 or a.shape != b.shape:
        raise ValueError(
            f"{op}: a and b must have the same shape [..., Hv], got {a.shape} and {b.shape}"
        )
    for name, array in (("A_log", A_log), ("dt_bias", dt_bias)):
        if array.shape != a.shape[-1:]:
            raise ValueError(
                f"{op}: {name} must be [Hv={a.shape[-1]}], the last axis of a {a.shape}, got "
                f"{array.shape}"
            )
    rate = jnp.exp(A_log.astype(jnp.float32))
    step = jax.nn.softplus(a.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    return -rate * step, jax.nn.sigmoid(b.astype(jnp.float32))


def recurrent_gated_delta_rule(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "n Hv Dv Dk"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Array, " n+1"] | None = None,
    use_qk_l2norm: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "n Hv Dv Dk"] | None]:
    """Computes `chunk_gated_delta_rule` token by token in float32: the definition of the rule.

    Use it for a few tokens, and as a reference. Arguments, results and errors are those of
    `chunk_gated_delta_rule`, except that `scale` may be traced. The op is differentiable in both
    modes; reverse mode saves one state per token. There is no kernel, so the op rejects
    "mosaic_gpu".
    """
    return recurrent_rule(
        "recurrent_gated_delta_rule",
        q,
        k,
        v,
        g,
        beta,
        channels=False,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm=use_qk_l2norm,
        implementation=implementation,
    )


def recurrent_rule(
    op: str,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    channels: bool,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    cu_seqlens: Array | None,
    use_qk_l2norm: bool,
    implementation: Implementation | None,
) -> tuple[Array, Array | None]:
    """`recurrent_gated_delta_rule` for either rule.

    Args:
        op: The public name, for messages.
        channels: Whether g is [B, T, Hv, Dk].
    """
    q, k, v, g, beta = floats(op, q=q, k=k, v=v, g=g, beta=beta)
    initial_state = maybe_floats(op, "initial_state", initial_state)
    ends = keep_concrete(cu_seqlens)
    check_sequence(op, q, k, v, g, beta, initial_state, ends, channels=channels)
    cu_seqlens = as_offsets(ends)
    factor: Any = scale  # only a kernel could not take a traced scale
    if not isinstance(scale, jax.core.Tracer):
        factor = output_scale(op, scale, k.shape[-1])

    def xla():
        with jax.named_scope(op):
            o, final = _recurrent(
                q, k, v, g, beta, factor, initial_state, cu_seqlens, use_qk_l2norm
            )
        return o, final if output_final_state else None

    return dispatch_xla(op, implementation, xla)


def _recurrent(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    scale: float,
    initial_state: Array | None,
    cu_seqlens: Array | None,
    use_qk_l2norm: bool,
) -> tuple[Array, Array]:
    batch, length, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[2:]
    q, k, v, g, beta, initial_state = match_varying_axes(
        (q, k, v, g, beta, initial_state), cu_seqlens
    )
    if cu_seqlens is not None:
        index = jnp.arange(length, dtype=cu_seqlens.dtype)
        real = (index < cu_seqlens[-1])[:, None, None]
        # Masked before the arithmetic, so that a NaN in the padding reaches no gradient either.
        q, k, v = (jnp.where(real, x[0], 0)[None] for x in (q, k, v))
        beta = jnp.where(real[..., 0], beta[0], 0)[None]
        g = jnp.where(real if g.ndim == 4 else real[..., 0], g[0], 0)[None]
    q, k, values, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (jnp.repeat(x, value_heads // key_heads, axis=2) for x in (q, k))
    # One decay for all channels of the key, or one per channel: [B, T, Hv, 1 or Dk].
    decay = jnp.exp(g if g.ndim == 4 else g[..., None])
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q * scale, k, values, decay, beta))

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        # Products and sums instead of dots, for float32 on every device.
        q, k, v, decay, beta = token
        state = state * decay[..., None, :]
        delta = beta[..., None] * (v - jnp.sum(state * k[:, :, None], axis=-1))
        state = state + delta[..., None] * k[:, :, None]
        return state, jnp.sum(state * q[:, :, None], axis=-1)

    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None:
        start = initial_state
    else:
        start = match_varying_axes(
            jnp.zeros((count, value_heads, value_dim, key_dim), jnp.float32), q
        )
    if cu_seqlens is None:
        final, out = lax.scan(step, start, tokens)
    else:
        sequence = jnp.searchsorted(cu_seqlens[1:], index, side="right", method="compare_all")
        first = index == cu_seqlens.at[sequence].get(mode="clip")

        def packed_step(carry: tuple[Array, Array], xs: Any) -> tuple[tuple[Array, Array], Array]:
            state, final = carry
            sequence, first, token = xs
            begin = start.at[sequence].get(mode="clip")[None]
            state, out = step(jnp.where(first, begin, state), token)
            # Padding has the sequence index n, which is dropped.
            return (state, final.at[sequence].set(state[0], mode="drop")), out

        begin = (jnp.zeros_like(start[:1]), start)
        (_, final), out = lax.scan(packed_step, begin, (sequence, first, tokens))
        out = jnp.where(real[..., None], out, 0)
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), final


def _state_shape(v: Array, k: Array) -> tuple[int, int, int]:
    return v.shape[2], v.shape[3], k.shape[-1]


def _check_heads(op: str, q: Array, k: Array, v: Array, tokens: str) -> None:
    for name, array, dims in (("q", q, "Hk, Dk"), ("k", k, "Hk, Dk"), ("v", v, "Hv, Dv")):
        if array.ndim != 4:
            raise ValueError(f"{op}: {name} must be [B, {tokens}, {dims}], got shape {array.shape}")
    if q.shape != k.shape:
        raise ValueError(f"{op}: q and k must have the same shape, got {q.shape} and {k.shape}")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"{op}: k and v must have the same [B, {tokens}], got {k.shape} and {v.shape}"
        )
    if k.shape[2] == 0 or v.shape[2] == 0 or v.shape[2] % k.shape[2]:
        raise ValueError(
            f"{op}: the Hv={v.shape[2]} heads of v must be a multiple of the Hk={k.shape[2]} "
            "heads of k"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"{op}: q, k and v must have the same dtype, float32, bfloat16 or float16, got "
            f"{q.dtype}, {k.dtype} and {v.dtype}"
        )


def check_sequence(
    op: str,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    initial_state: Array | None,
    cu_seqlens: Array | None,
    *,
    channels: bool = False,
) -> None:
    """Raises if a whole sequence's arguments do not fit; with `channels`, g is [B, T, Hv, Dk]."""
    _check_heads(op, q, k, v, "T")
    heads = v.shape[:3]
    of_g = ("[B, T, Hv, Dk]", (*heads, k.shape[3])) if channels else ("[B, T, Hv]", heads)
    for name, array, (axes, shape) in (("g", g, of_g), ("beta", beta, ("[B, T, Hv]", heads))):
        if array.shape != shape:
            raise ValueError(
                f"{op}: {name} must be {axes} = {list(shape)}, got {list(array.shape)}"
            )
    if g.dtype != jnp.float32:
        made_by = "kda_gates" if channels else "gdn_gates"
        raise TypeError(f"{op}: g must be float32, got {g.dtype}; {made_by} returns float32")
    if cu_seqlens is not None:
        check_cu_seqlens(op, cu_seqlens, v.shape[0], v.shape[1])
    if initial_state is None:
        return
    count = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (count, *_state_shape(v, k))
    check_dtype(op, "initial_state", initial_state, "float32")
    if initial_state.shape != shape:
        raise ValueError(
            f"{op}: initial_state must be [n, Hv, Dv, Dk] = {list(shape)}, "
            f"got {list(initial_state.shape)}"
        )
