"""One decode step of a gated delta net layer, from its input projections to its output projection.

The layer (Qwen3-Next, Qwen3.5) projects its input to `q | k | v | z` and `b | a`. A causal
convolution with SiLU processes q, k and v, and q and k are l2-normalized. The delta rule then gives
an output per value head, and a RMS norm gated by SiLU(z) ends the layer. Between the projections
everything depends on one row's token and states only, so one kernel does it in one pass over the
states.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.arena import Arena
from jaxattn.core.cache.state_pool import check_pool, rows_in_use, write_slots
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.layer_index import LayerIndex, split_layer_index
from jaxattn.core.numerics.rms_norm import gated_rms_norm
from jaxattn.core.validation.array_checks import (
    check_arena,
    check_dtype,
    finite,
    floats,
    keep_concrete,
    output_scale,
)
from jaxattn.core.validation.varying_axes import refuse_explicit_axes
from jaxattn.kernels.gdn.decode.arguments import GdnDecodeCall
from jaxattn.kernels.gdn.decode.launch import gdn_decode_mosaic, scratch
from jaxattn.ops.gdn.causal_conv1d import causal_conv1d_update
from jaxattn.ops.gdn.decode import StateSlots, gated_delta_rule_decode


def pack_gdn_weights(
    A_log: Float[Array, "*L Hv"],
    dt_bias: Float[Array, "*L Hv"],
    norm: Float[Array, "*L Dv"],
    conv: Float[Array, "*L Dc W"],
) -> Float[Array, "*L P"]:
    """Packs a layer's small weights for `gated_delta_net_decode`, as float32.

    P is `2 Hv + Dv + W Dc`: A_log, dt_bias, the norm's weight, and the convolution's taps, oldest
    first. Pack a stack of layers once, at load time: the op indexes the stack, so a loop over
    layers copies nothing out of it.

    Raises:
        TypeError, ValueError: An argument is not an array or does not fit the others; the message
            names it.
    """
    op = "pack_gdn_weights"
    A_log, dt_bias, norm, conv = floats(op, A_log=A_log, dt_bias=dt_bias, norm=norm, conv=conv)
    if A_log.ndim < 1 or dt_bias.shape != A_log.shape:
        raise ValueError(
            f"{op}: A_log and dt_bias must have the same shape, [Hv] or [L, Hv], got "
            f"{A_log.shape} and {dt_bias.shape}"
        )
    layers = A_log.shape[:-1]
    if norm.shape[:-1] != layers or norm.ndim < 1:
        raise ValueError(f"{op}: norm must be {[*layers, 'Dv']}, got {norm.shape}")
    values = A_log.shape[-1] * norm.shape[-1]
    if values == 0:
        raise ValueError(
            f"{op}: there must be at least one value head of at least one dim, got A_log "
            f"{A_log.shape} and norm {norm.shape}"
        )
    keys = conv.shape[-2] - values if conv.ndim == len(layers) + 2 else 0
    if conv.shape[:-2] != layers or keys <= 0 or keys % 2:
        raise ValueError(
            f"{op}: conv must be {[*layers, 'Dc', 'W']} with Dc = 2 Hk Dk + Hv Dv, where A_log "
            f"and norm give Hv Dv={values}, got {conv.shape}"
        )
    taps = jnp.swapaxes(conv, -1, -2).reshape(*conv.shape[:-2], -1)
    pieces = (A_log, dt_bias, norm, taps)
    return jnp.concatenate([x.astype(jnp.float32) for x in pieces], axis=-1)


def gated_delta_net_decode(
    qkvz: Float[Array, "B S C"],
    ba: Float[Array, "B S _"],
    weights: Float[Array, "*L P"],
    conv_state: Float[Array, "*L Z W-1 Dc"],
    state: Float[Array, "*L Z Hv Dv Dk"],
    state_indices: Int[Array, " B"],
    *,
    write_indices: Int[Array, " B"] | Int[Array, "B S"] | None = None,
    layer: int | Int[Array, ""] | LayerIndex | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    halves: bool = False,
    arena: Arena | None = None,
    implementation: Implementation | None = None,
) -> tuple[Any, ...]:
    """Processes S more tokens of each row: convolution, gates, delta rule and gated norm.

    Args:
        qkvz: The projection's columns `q | k | v | z`, head after head: C = Dc + Hv Dv with
            Dc = 2 Hk Dk + Hv Dv. float32, bfloat16 or float16.
        ba: The columns `b | a`, of any floating dtype; other columns may follow. The gates are
            float32: `g = -exp(A_log) softplus(a + dt_bias)`, `beta = sigmoid(b)`.
        weights: `pack_gdn_weights(...)` of this layer, or of a stack of layers that `layer`
            indexes.
        conv_state: The last W - 1 inputs of the convolution, oldest first, `[Z, W - 1, Dc]` or a
            stack `[L, ...]` with `layer`; any floating dtype.
        state: float32 or bfloat16, `[Z, Hv, Dv, Dk]`, or a stack `[L, ...]` with `layer`. Donate
            both pools to update them in place. The op rounds a state when it stores it, not between
            the S tokens.
        state_indices: The slot of each row in both pools. -1 marks a padding row, whose y is
            exactly 0 and for which nothing is read or written. Slots in use must differ.
        write_indices: The slots of both pools to write, if they differ from those read. `[B]`
            receives the states after the row's last token, `[B, S]` those after each token; -1
            stores nothing. A speculative decoder that accepts n of S tokens continues from
            `write_indices[b, n - 1]`. Slots must differ, and no other row may read a slot that a
            row writes.
        layer: Index into the stacks, a Python int or a traced scalar, or a `LayerIndex` of a
            repeated pattern. A traced index out of range changes no pool, and y is then
            meaningless.
        scale: Factor of the delta rule's output. None means Dk**-0.5.
        eps: Epsilon of the norm over Dv.
        halves: Whether the projection multiplied two parts of its weights separately. The op then
            adds the second 2 Hv columns of `ba` to the first 2 Hv columns, `b | a`.
        arena: Scratch memory of at least `scratch(...)`; y is then a view of it, valid until the
            next op that uses the arena.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.

    Returns:
        `(y, conv_state, state)`, and the arena if one was given; y is `[B, S, Hv Dv]` in qkvz's
        dtype.

    Raises:
        TypeError: An argument is not an array, or has a wrong dtype.
        ValueError: A shape does not fit, or concrete slots repeat or lie outside the pool.
        Refusal: The requested implementation does not support this call; the message says why. The
            kernel requires Dk = Dv = 128, W = 4, and at most 8 tokens per row and 65,535 rows;
            "xla" has no such limits.

    Source: Qwen3-Next's layer; one slot per token is vLLM's scheme for speculative decoding.
    """
    op = "gated_delta_net_decode"
    qkvz, ba, weights, conv_state, state = floats(
        op, qkvz=qkvz, ba=ba, weights=weights, conv_state=conv_state, state=state
    )
    check_arena(op, arena)
    reads, writes = keep_concrete(state_indices), keep_concrete(write_indices)
    key_heads = _check(op, qkvz, ba, weights, conv_state, state, halves)
    batch, tokens, _ = qkvz.shape
    value_heads, value_dim, key_dim = state.shape[-3:]
    first, affine, number = split_layer_index(layer)
    check_pool(op, "state", state, reads, number, state.shape[-3:], batch)
    check_pool(op, "conv_state", conv_state, reads, number, conv_state.shape[-2:], batch)
    writes = write_slots(op, state, reads, writes, number, tokens)
    state_indices, writes = jnp.asarray(reads), jnp.asarray(writes)
    refuse_explicit_axes(op, qkvz, ba, conv_state, state, state_indices, writes)
    factor, eps, gates = output_scale(op, scale, key_dim), finite(op, "eps", eps), 2 * value_heads

    call = GdnDecodeCall(
        op=op,
        qkvz=qkvz,
        ba=ba,
        weights=weights,
        conv_state=conv_state,
        state=state,
        reads=state_indices,
        writes=writes,
        num_key_heads=key_heads,
        layer=first,
        affine=affine,
        scale=factor,
        eps=eps,
        halves=halves,
        arena=arena,
    )

    def mosaic(interpret: bool):
        out, *rest = gdn_decode_mosaic(call, interpret=interpret)
        return lax.collapse(out, 2), *rest

    def xla():
        own = weights if weights.ndim == 1 else weights[number]
        channels = conv_state.shape[-1]
        A_log, dt_bias, norm, taps = jnp.split(
            own, [value_heads, 2 * value_heads, 2 * value_heads + value_dim]
        )
        one, *others = (ba[..., i * gates : (i + 1) * gates] for i in range(1 + halves))
        b, a = jnp.split(sum(others, one), 2, axis=-1)

        def rule(q: Array, k: Array, v: Array) -> tuple[Any, ...]:
            return gated_delta_rule_decode(
                q,
                k,
                v,
                a,
                b,
                state,
                state_indices,
                A_log=A_log,
                dt_bias=dt_bias,
                write_indices=writes,
                layer=number,
                scale=factor,
                implementation="xla",
            )

        return layer_in_xla(
            qkvz[..., :channels],
            taps,
            conv_state,
            state,
            StateSlots(state_indices, writes),
            rule,
            lambda o: gated_rms_norm(o, qkvz, norm, eps),
            layer=number,
            arena=arena,
        )

    return dispatch_kernel(op, implementation, mosaic, xla)


def layer_in_xla(
    qkv: Array,
    taps: Array,
    conv_state: Array,
    state: Array,
    slots: StateSlots,
    rule: Callable[[Array, Array, Array], tuple[Any, ...]],
    gated_norm: Callable[[Array], Array],
    *,
    layer: int | Array | None,
    arena: Arena | None,
) -> tuple[Any, ...]:
    """Decodes a layer between its projections in XLA, with any delta rule and norm.

    Args:
        qkv: The columns q | k | v, [B, S, Dc].
        taps: Taps of the convolution [W * Dc], oldest first.
        rule: Maps q, k [B, S, Hk, Dk] and v [B, S, Hv, Dv] to (o, the pool of states).
        gated_norm: Applies the gated norm to o in float32.
    """
    batch, tokens, channels = qkv.shape
    value_heads, value_dim, key_dim = state.shape[-3:]
    qkv, new_conv = causal_conv1d_update(
        qkv,
        taps.reshape(-1, channels).T,
        conv_state,
        slots.reads,
        write_indices=slots.writes,
        layer=layer,
    )
    keys = (channels - value_heads * value_dim) // 2
    q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)
    of_keys = (batch, tokens, keys // key_dim, key_dim)
    v = v.reshape(batch, tokens, value_heads, value_dim)
    o, new_state = rule(q.reshape(of_keys), k.reshape(of_keys), v)
    with jax.named_scope("gated_rms_norm"):
        used = rows_in_use(state, slots.reads, layer=layer)
        # A select, so that a padding row's output is 0 whatever its gate holds.
        y = gated_norm(o.astype(jnp.float32))
        y = jnp.where(used[:, None, None, None], y, 0).astype(qkv.dtype)
    if arena is None:
        return lax.collapse(y, 2), new_conv, new_state
    spec = scratch(
        batch=batch,
        q_len=tokens,
        num_v_heads=value_heads,
        head_v_dim=value_dim,
        dtype=y.dtype,
    )
    held = arena.write(spec, "out", y)
    return lax.collapse(held.read(spec, "out"), 2), new_conv, new_state, held


def _check(
    op: str,
    qkvz: Array,
    ba: Array,
    weights: Array,
    conv_state: Array,
    state: Array,
    halves: bool,
) -> int:
    """Returns the number of key heads; raises unless the shapes and dtypes fit each other."""
    check_dtype(op, "state", state, "float32", "bfloat16")
    check_dtype(op, "qkvz", qkvz, "float32", "bfloat16", "float16")
    check_dtype(op, "weights", weights, "float32")
    if state.ndim not in (4, 5):
        raise ValueError(
            f"{op}: state must be [Z, Hv, Dv, Dk] or [L, Z, Hv, Dv, Dk], got {list(state.shape)}"
        )
    value_heads, value_dim, key_dim = state.shape[-3:]
    values = value_heads * value_dim
    if conv_state.ndim != state.ndim - 1 or conv_state.shape[:-2] != state.shape[:-3]:
        raise ValueError(
            f"{op}: conv_state must be [Z, W - 1, Dc] or [L, Z, W - 1, Dc] with the L and Z of "
            f"state {list(state.shape)}, got {list(conv_state.shape)}"
        )
    taps, channels = conv_state.shape[-2:]
    keys = channels - values
    key_heads = keys // (2 * max(key_dim, 1))
    if keys <= 0 or key_dim == 0 or keys % (2 * key_dim) or values == 0 or value_heads % key_heads:
        raise ValueError(
            f"{op}: conv_state's Dc={channels} must be 2 Hk Dk + Hv Dv with a number of key heads "
            f"Hk that divides Hv={value_heads}; state has Hv Dv={values} and Dk={key_dim}"
        )
    if qkvz.ndim != 3 or qkvz.shape[2] != channels + values or qkvz.shape[1] < 1:
        raise ValueError(
            f"{op}: qkvz must be [B, S, Dc + Hv Dv = {channels + values}] with S >= 1, "
            f"got {list(qkvz.shape)}"
        )
    gates = (4 if halves else 2) * value_heads
    if ba.ndim != 3 or ba.shape[:2] != qkvz.shape[:2] or ba.shape[2] < gates:
        raise ValueError(
            f"{op}: ba must be [B, S, {4 if halves else 2} Hv] = {[*qkvz.shape[:2], gates]}, "
            f"optionally with more columns after these, got {list(ba.shape)}"
        )
    length = 2 * value_heads + value_dim + (taps + 1) * channels
    one, stack = [length], [*state.shape[: state.ndim - 4], length]
    if list(weights.shape) not in (one, stack):
        raise ValueError(
            f"{op}: weights must be {one}, or for a stack of states {stack}, as pack_gdn_weights "
            f"returns them; got {list(weights.shape)}"
        )
    return key_heads
