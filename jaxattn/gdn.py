"""Gated delta rule: chunked prefill and training, token recurrence, decode on a state pool.

For each value head, with log decay `g_t`, writing strength `beta_t` and state `S` of `[Dv, Dk]`:

    S   <- exp(g_t) S
    S   <- S + beta_t (v_t - S k_t) k_t^T
    o_t  = scale * S q_t

The state is value-first everywhere, `[..., Hv, Dv, Dk]` and float32, as vLLM, SGLang and FlashInfer
store it (FLA's `state_v_first=True`): decode's tiles are whole rows, and to move them takes as long
as tiles of columns do, 7% less in bfloat16 (benchmarks/LOG.md). Value head h uses key head
`h // (Hv // Hk)`.
Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024); Qwen3-Next and Qwen3.5 are built on it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.arena import Arena
from jaxattn.checks import (
    check_arena,
    check_dtype,
    check_integer,
    floats,
    maybe_floats,
    output_scale,
)
from jaxattn.conv import (
    as_given,
    as_offsets,
    check_cu_seqlens,
    check_pool,
    each_write,
    rows_in_use,
    write_slots,
)
from jaxattn.conv import causal_conv1d as causal_conv1d
from jaxattn.conv import causal_conv1d_update as causal_conv1d_update
from jaxattn.conv import state_read as state_read
from jaxattn.conv import state_write as state_write
from jaxattn.dispatch import Implementation, dispatch
from jaxattn.gdn_chunk import gated_delta_rule_chunks, l2norm
from jaxattn.kernels.gdn_decode import gdn_decode_mosaic
from jaxattn.kernels.gdn_decode import scratch as scratch
from jaxattn.kernels.gdn_prefill import gdn_prefill_mosaic, refuse_prefill
from jaxattn.varying import vary_alike


def gdn_gates(
    a: Float[Array, "*B Hv"],
    b: Float[Array, "*B Hv"],
    A_log: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
) -> tuple[Float[Array, "*B Hv"], Float[Array, "*B Hv"]]:
    """Log decay `g = -exp(A_log) * softplus(a + dt_bias)` and `beta = sigmoid(b)`, in float32.

    Both stay float32: beta rounded to bfloat16 is a known source of drift. Qwen3-Next's gates.

    Raises:
        TypeError, ValueError: an argument is no array, or its shape or dtype does not fit.
    """
    op = "gdn_gates"
    a, b, A_log, dt_bias = floats(op, a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    if a.ndim < 1 or a.shape != b.shape:
        raise ValueError(
            f"{op}: a and b must have one shape [..., Hv], got {a.shape} and {b.shape}"
        )
    for name, array in (("A_log", A_log), ("dt_bias", dt_bias)):
        if array.shape != a.shape[-1:]:
            raise ValueError(
                f"{op}: {name} must be [Hv={a.shape[-1]}], as many as a {a.shape} has last, "
                f"got {array.shape}"
            )
    rate = jnp.exp(A_log.astype(jnp.float32))
    step = jax.nn.softplus(a.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    return -rate * step, jax.nn.sigmoid(b.astype(jnp.float32))


def chunk_gated_delta_rule(
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
    chunk_size: int = 64,
    use_qk_l2norm: bool = False,
    split_tokens: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "n Hv Dv Dk"] | None]:
    """Gated delta rule over whole sequences, in matmuls over chunks of tokens. Differentiable
    in reverse mode.

    Matmul operands have q's dtype; states, gates, their sums and the chunk's inverse are float32.

    Args:
        q, k, v: one dtype, float32, bfloat16 or float16.
        g: log decay, <= 0, float32. Any strength: -1000 or -inf clears the state.
        beta: writing strength after the sigmoid; float32 keeps its precision.
        scale: factor on the output, a Python number, Dk**-0.5 if None.
        initial_state: float32, value-first; zeros if None. n is B, or with cu_seqlens the number
            of sequences.
        output_final_state: also return the state after each sequence's last token.
            `jaxattn.gdn_prefill.gated_delta_rule_prefill` takes states from a pool instead.
        cu_seqlens: token offsets of n sequences packed in one row (B = 1), starting at 0. A
            zero-length sequence keeps its initial state bit for bit. Tokens past the last offset
            are padding: they may hold NaN and their output is 0.
        chunk_size: tokens a chunk, a power of two from 16 to 128.
        use_qk_l2norm: normalise q and k to `x * rsqrt(sum(x^2) + 1e-6)` first.
        split_tokens: tokens, a multiple of chunk_size, that one block of the kernel takes of a long
            sequence; the pieces are joined by their exact transitions. None chooses from T, n and
            Hv alone. 0 never splits, and as with any fixed number a sequence's bits then do not
            depend on what it is packed with. "xla" never splits.
        implementation: None, "mosaic_gpu", "mosaic_gpu_interpret" or "xla". The kernel has
            Dk = Dv = 128, chunk_size 64 and bfloat16 or float16 operands, and refuses the rest.

    The gradient is the "xla" implementation's, whichever ran forward; a kernel for it may come
    later. It recomputes the forward pass from the arguments and keeps one float32 state a chunk of
    tokens, T / chunk_size x Dv x Dk a head, never one a token. What else it keeps grows as
    T x (Dk + Dv + chunk_size) a head.

    Without cu_seqlens, a token with k = 0 or beta = 0, and g = 0, leaves the state as it is, to a
    float32's rounding where the kernel splits: rows of different lengths can be padded with it.

    Returns:
        `(o, final_state)`: o in v's dtype; final_state float32, or None unless asked for.

    Raises:
        TypeError: an argument is no array, its dtype does not fit, or a size is no integer.
        ValueError: a shape does not fit, or a concrete cu_seqlens decreases or passes T.
        NotImplementedError: the named implementation refuses; the message says why.
    """
    op = "chunk_gated_delta_rule"
    q, k, v, g, beta = floats(op, q=q, k=k, v=v, g=g, beta=beta)
    initial_state = maybe_floats(op, "initial_state", initial_state)
    ends = as_given(cu_seqlens)
    check_sequence(op, q, k, v, g, beta, initial_state, ends)
    cu_seqlens = as_offsets(ends)
    check_chunks(op, chunk_size, split_tokens)
    factor = output_scale(op, scale, k.shape[-1])

    def reference(q, k, v, g, beta, initial_state, cu_seqlens):
        arguments = (q, k, v, g, beta, factor, initial_state, cu_seqlens, use_qk_l2norm)
        if k.shape[1] == 0:
            return _recurrent(*arguments)
        return gated_delta_rule_chunks(*arguments, chunk_size)[:2]

    def mosaic(interpret: bool):
        refuse_prefill(op, q, v, chunk_size, interpret=interpret)
        known = None if isinstance(ends, jax.core.Tracer) else ends

        def kernel(q, k, v, g, beta, initial_state, cu_seqlens):
            return gdn_prefill_mosaic(
                q,
                k,
                v,
                g,
                beta,
                scale=factor,
                initial_state=initial_state,
                cu_seqlens=cu_seqlens if known is None else known,  # here a tracer
                use_qk_l2norm=use_qk_l2norm,
                segment=split_tokens,
                interpret=interpret,
            )

        return run(_with_gradient_of(reference, kernel))

    def run(function):
        with jax.named_scope(op):
            o, final = function(q, k, v, g, beta, initial_state, cu_seqlens)
        return o, final if output_final_state else None

    return dispatch(
        op,
        implementation,
        {
            "mosaic_gpu": lambda: mosaic(False),
            "mosaic_gpu_interpret": lambda: mosaic(True),
            "xla": lambda: run(reference),
        },
    )


def _with_gradient_of(reference: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """`function`, differentiated as `reference` of the same arguments."""
    differentiable = jax.custom_vjp(function)

    def backward(arguments, cotangents):
        return jax.vjp(reference, *arguments)[1](cotangents)

    differentiable.defvjp(lambda *arguments: (function(*arguments), arguments), backward)
    return differentiable


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
    """The same function one token at a time, in float32: the definition, and for a few tokens.

    Arguments, results and errors are those of `chunk_gated_delta_rule`; `scale` may be traced.
    Differentiable, at the cost of one saved state a token.
    """
    op = "recurrent_gated_delta_rule"
    q, k, v, g, beta = floats(op, q=q, k=k, v=v, g=g, beta=beta)
    initial_state = maybe_floats(op, "initial_state", initial_state)
    ends = as_given(cu_seqlens)
    check_sequence(op, q, k, v, g, beta, initial_state, ends)
    cu_seqlens = as_offsets(ends)
    factor: Any = scale  # traced, only a kernel could not take it
    if not isinstance(scale, jax.core.Tracer):
        factor = output_scale(op, scale, k.shape[-1])

    def xla():
        with jax.named_scope(op):
            o, final = _recurrent(
                q, k, v, g, beta, factor, initial_state, cu_seqlens, use_qk_l2norm
            )
        return o, final if output_final_state else None

    return dispatch(op, implementation, {"xla": xla})


def gated_delta_rule_decode(
    q: Float[Array, "B S Hk Dk"],
    k: Float[Array, "B S Hk Dk"],
    v: Float[Array, "B S Hv Dv"],
    a: Float[Array, "B S Hv"],
    b: Float[Array, "B S Hv"],
    state: Float[Array, "*L Z Hv Dv Dk"],
    state_indices: Int[Array, " B"],
    *,
    A_log: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    write_indices: Int[Array, " B"] | Int[Array, "B S"] | None = None,
    layer: int | Int[Array, ""] | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    arena: Arena | None = None,
    implementation: Implementation | None = None,
) -> tuple[Any, ...]:
    """S more tokens of each row, with the state read from and written to a pool.

    `jaxattn.gdn_layer.gated_delta_net_decode` is the same with a layer's convolution, gates and
    gated norm in one kernel; this is for models that have other ones.

    Args:
        q, k, v: one dtype. The recurrence itself is float32.
        a, b: inputs of `gdn_gates`, any float dtype.
        state: float32 or bfloat16, `[Z, Hv, Dv, Dk]`, or a stack `[L, ...]` with `layer`. Donate
            it to update it in place. It is rounded when it is stored, not between the S tokens.
        state_indices: each row's slot; -1 is a padding row, whose o is exactly 0 and for which
            nothing is read or written. Slots in use must differ.
        A_log, dt_bias: per value head; kept in float32.
        write_indices: the slots that are written, if not those that were read. `[B]` takes the
            state after the row's last token, `[B, S]` the state after each token; -1 keeps nothing.
            A speculative decoder that accepts n of S tokens goes on from
            `write_indices[b, n - 1]`. Slots must differ; only the row itself may read a slot that
            it writes.
        layer: index into the stack, a Python int or traced.
        scale: factor on the output, Dk**-0.5 if None.
        use_qk_l2norm: normalise q and k to `x * rsqrt(sum(x^2) + 1e-6)` first.
        arena: scratch that holds at least `scratch(...)`; o is then a view of it, valid until the
            next op that uses the arena.
        implementation: None, "mosaic_gpu", "mosaic_gpu_interpret" or "xla".

    Returns:
        `(o, state)`, or with an arena `(o, state, arena)`; o is `[B, S, Hv, Dv]` in v's dtype.

    Raises:
        TypeError: an argument is no array, or its dtype does not fit.
        ValueError: a shape does not fit, or concrete slots repeat or leave the pool.
        NotImplementedError: the named implementation refuses; the message says why.
    """
    op = "gated_delta_rule_decode"
    q, k, v, a, b, state = floats(op, q=q, k=k, v=v, a=a, b=b, state=state)
    A_log, dt_bias = floats(op, A_log=A_log, dt_bias=dt_bias)
    check_arena(op, arena)
    reads, writes = as_given(state_indices), as_given(write_indices)
    _check_heads(op, q, k, v, "S")
    batch, tokens, value_heads, value_dim = v.shape
    for name, array, shape in (
        ("a", a, (batch, tokens, value_heads)),
        ("b", b, (batch, tokens, value_heads)),
        ("A_log", A_log, (value_heads,)),
        ("dt_bias", dt_bias, (value_heads,)),
    ):
        if array.shape != shape:
            raise ValueError(f"{op}: {name} must be {list(shape)}, got {list(array.shape)}")
    slot_shape = (value_heads, value_dim, k.shape[-1])
    check_pool(op, "state", state, reads, layer, slot_shape, batch)
    check_dtype(op, "state", state, "float32", "bfloat16")
    writes = write_slots(op, state, reads, writes, layer, tokens)
    state_indices, writes = jnp.asarray(reads), jnp.asarray(writes)
    factor = output_scale(op, scale, k.shape[-1])

    def mosaic(interpret: bool):
        # One array each, as a layer's projections would write them.
        qkv = jnp.concatenate([lax.collapse(x, 2) for x in (q, k, v)], axis=-1)
        out, _, *rest = gdn_decode_mosaic(
            op,
            qkv,
            jnp.concatenate([b.astype(jnp.float32), a.astype(jnp.float32)], axis=-1),
            jnp.concatenate([A_log.astype(jnp.float32), dt_bias.astype(jnp.float32)]),
            None,
            state,
            state_indices,
            writes,
            num_key_heads=k.shape[2],
            layer=layer,
            scale=factor,
            l2norm=use_qk_l2norm,
            arena=arena,
            interpret=interpret,
        )
        return out, *rest

    def xla():
        with jax.named_scope(op):
            g, beta = gdn_gates(a, b, A_log, dt_bias)
            now = state_read(state, state_indices, layer=layer).astype(jnp.float32)
            used = rows_in_use(state, state_indices, layer=layer)
            new_state, begin, outs = state, 0, []
            for done, slots in each_write(writes, used, tokens):
                qs, ks, vs, gs, betas = (x[:, begin:done] for x in (q, k, v, g, beta))
                o, now = _recurrent(qs, ks, vs, gs, betas, factor, now, None, use_qk_l2norm)
                new_state = state_write(new_state, now, slots, layer=layer)
                outs.append(o)
                begin = done
            o = jnp.where(used[:, None, None, None], jnp.concatenate(outs, axis=1), 0)
        if arena is None:
            return o, new_state
        spec = scratch(
            batch=batch,
            q_len=tokens,
            num_v_heads=value_heads,
            head_v_dim=value_dim,
            dtype=v.dtype,
        )
        held = arena.write(spec, "out", o)
        return held.read(spec, "out"), new_state, held

    return dispatch(
        op,
        implementation,
        {
            "mosaic_gpu": lambda: mosaic(False),
            "mosaic_gpu_interpret": lambda: mosaic(True),
            "xla": xla,
        },
    )


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
    q, k, v, g, beta, initial_state = vary_alike((q, k, v, g, beta, initial_state), cu_seqlens)
    if cu_seqlens is not None:
        index = jnp.arange(length, dtype=cu_seqlens.dtype)
        real = (index < cu_seqlens[-1])[:, None, None]
        # Selected before the arithmetic, so that a NaN in the padding reaches no gradient either.
        q, k, v = (jnp.where(real, x[0], 0)[None] for x in (q, k, v))
        g, beta = (jnp.where(real[..., 0], x[0], 0)[None] for x in (g, beta))
    q, k, values, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (jnp.repeat(x, value_heads // key_heads, axis=2) for x in (q, k))
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q * scale, k, values, jnp.exp(g), beta))

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        # Products and sums rather than dots: float32 on every device.
        q, k, v, decay, beta = token
        state = state * decay[..., None, None]
        delta = beta[..., None] * (v - jnp.sum(state * k[:, :, None], axis=-1))
        state = state + delta[..., None] * k[:, :, None]
        return state, jnp.sum(state * q[:, :, None], axis=-1)

    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None:
        start = initial_state
    else:
        start = vary_alike(jnp.zeros((count, value_heads, value_dim, key_dim), jnp.float32), q)
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
        raise ValueError(f"{op}: q and k must have one shape, got {q.shape} and {k.shape}")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"{op}: k and v must have the same [B, {tokens}], got {k.shape} and {v.shape}"
        )
    if k.shape[2] == 0 or v.shape[2] == 0 or v.shape[2] % k.shape[2]:
        raise ValueError(
            f"{op}: the Hv={v.shape[2]} heads of v must be a multiple of the Hk={k.shape[2]} of k"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"{op}: q, k and v must share float32, bfloat16 or float16, "
            f"got {q.dtype}, {k.dtype} and {v.dtype}"
        )


def check_chunks(op: str, chunk_size: int, split_tokens: int | None) -> None:
    check_integer(op, "chunk_size", chunk_size)
    if split_tokens is not None:
        check_integer(op, "split_tokens", split_tokens)
    if chunk_size not in (16, 32, 64, 128):
        raise ValueError(f"{op}: chunk_size must be 16, 32, 64 or 128, got {chunk_size}")
    if split_tokens is not None and (split_tokens < 0 or split_tokens % chunk_size):
        raise ValueError(
            f"{op}: split_tokens must be None, 0 or a multiple of {chunk_size=}, got {split_tokens}"
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
) -> None:
    _check_heads(op, q, k, v, "T")
    for name, array in (("g", g), ("beta", beta)):
        if array.shape != v.shape[:3]:
            raise ValueError(
                f"{op}: {name} must be [B, T, Hv] = {list(v.shape[:3])}, got {list(array.shape)}"
            )
    if g.dtype != jnp.float32:
        raise TypeError(f"{op}: g must be float32, got {g.dtype}; gdn_gates returns it so")
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
