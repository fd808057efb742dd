"""One decode step of a Kimi Delta Attention layer, between its input and output projections.

The layer (Kimi-Linear, Ling-3.0) projects its input to q, k and v, to f, to b, and to a gate.
Causal convolutions with SiLU process q, k and v; the three are one convolution of 3 H D channels.
The decay of each channel of the key is computed from f. The delta rule gives an output per head,
and a RMS norm times sigmoid(gate) ends the layer.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.arena import Arena
from jaxattn.core.cache.state_pool import check_pool, write_slots
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
from jaxattn.kernels.gdn.decode.launch import gdn_decode_mosaic
from jaxattn.ops.gdn.decode import StateSlots, check_gate_shapes
from jaxattn.ops.gdn.layer_decode import layer_in_xla
from jaxattn.ops.kda.decode import kda_decode
from jaxattn.ops.kda.gates import check_lower_bound


def pack_kda_weights(
    A_log: Float[Array, "*L H"],
    dt_bias: Float[Array, "*L H*D"],
    norm: Float[Array, "*L D"],
    conv: Float[Array, "*L 3*H*D W"],
) -> Float[Array, "*L P"]:
    """Packs a layer's small weights for `kimi_delta_attention_decode`, as float32.

    P is `H + H D + D + W 3 H D`: A_log, dt_bias, the norm's weight, and the convolution's taps,
    oldest first. Pack a stack of layers once, at load time: the op indexes the stack, so a loop
    over layers copies nothing out of it.

    Raises:
        TypeError, ValueError: An argument is not an array or does not fit the others; the message
            names it.
    """
    op = "pack_kda_weights"
    A_log, dt_bias, norm, conv = floats(op, A_log=A_log, dt_bias=dt_bias, norm=norm, conv=conv)
    if A_log.ndim not in (1, 2) or A_log.shape[-1] == 0:
        raise ValueError(f"{op}: A_log must be [H] or [L, H], got {list(A_log.shape)}")
    if norm.ndim != A_log.ndim or norm.shape[-1] == 0:
        raise ValueError(f"{op}: norm must be [..., D], got {list(norm.shape)}")
    layers, values = A_log.shape[:-1], A_log.shape[-1] * norm.shape[-1]
    check_gate_shapes(
        op, (("dt_bias", dt_bias, (*layers, values)), ("norm", norm, (*layers, norm.shape[-1])))
    )
    if conv.ndim != len(layers) + 2 or conv.shape[:-1] != (*layers, 3 * values):
        raise ValueError(
            f"{op}: conv must be {[*layers, 3 * values, 'W']} with 3 H D channels, got "
            f"{list(conv.shape)}"
        )
    taps = jnp.swapaxes(conv, -1, -2).reshape(*layers, -1)
    pieces = (A_log, dt_bias, norm, taps)
    return jnp.concatenate([x.astype(jnp.float32) for x in pieces], axis=-1)


def kimi_delta_attention_decode(
    qkv: Float[Array, "B S 3*H*D"],
    f: Float[Array, "B S H*D"],
    b: Float[Array, "B S _"],
    gate: Float[Array, "B S H*D"],
    weights: Float[Array, "*L P"],
    conv_state: Float[Array, "*L Z W-1 3*H*D"],
    state: Float[Array, "*L Z H D D"],
    state_indices: Int[Array, " B"],
    *,
    lower_bound: float | None = None,
    write_indices: Int[Array, " B"] | Int[Array, "B S"] | None = None,
    layer: int | Int[Array, ""] | LayerIndex | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    arena: Arena | None = None,
    implementation: Implementation | None = None,
) -> tuple[Any, ...]:
    """Processes S more tokens of each row: convolution, gates, Kimi's delta rule and gated norm.

    Args:
        qkv: The projections' columns q | k | v, head after head; float32, bfloat16 or float16.
        f, b: Inputs of `kda_gates`, head after head, of any floating dtype. The gates are float32.
            Columns of b after the heads' are ignored.
        gate: The norm's output is multiplied by sigmoid(gate). Any floating dtype.
        weights: `pack_kda_weights(...)` of this layer, or of a stack of layers that `layer`
            indexes.
        conv_state: The last W - 1 inputs of the convolution, oldest first, `[Z, W - 1, 3 H D]` or a
            stack `[L, ...]` with `layer`; any floating dtype.
        lower_bound: As in `kda_gates`.
        state, state_indices, write_indices, layer, arena, implementation: As in
            `jaxattn.gdn.gated_delta_net_decode`.
        scale: Factor of the delta rule's output. None means D**-0.5.
        eps: Epsilon of the norm over D.

    Returns:
        `(y, conv_state, state)`, and the arena if one was given; y is `[B, S, H D]` in qkv's dtype.

    Raises:
        TypeError: An argument is not an array, or has a wrong dtype.
        ValueError: A shape does not fit, or concrete slots repeat or lie outside the pool.
        Refusal: The requested implementation does not support this call; the message says why.

    Source: Kimi-Linear's layer.
    """
    op = "kimi_delta_attention_decode"
    qkv, f, b, gate = floats(op, qkv=qkv, f=f, b=b, gate=gate)
    weights, conv_state, state = floats(op, weights=weights, conv_state=conv_state, state=state)
    check_arena(op, arena)
    reads, writes = keep_concrete(state_indices), keep_concrete(write_indices)
    _check(op, qkv, f, b, gate, weights, conv_state, state)
    check_lower_bound(op, lower_bound)
    batch, tokens, _ = qkv.shape
    first, affine, number = split_layer_index(layer)
    check_pool(op, "state", state, reads, number, state.shape[-3:], batch)
    check_pool(op, "conv_state", conv_state, reads, number, conv_state.shape[-2:], batch)
    writes = write_slots(op, state, reads, writes, number, tokens)
    slots = StateSlots(jnp.asarray(reads), jnp.asarray(writes))
    refuse_explicit_axes(op, qkv, f, b, gate, conv_state, state, *slots)
    heads, dim = state.shape[-3:-1]
    factor, eps = output_scale(op, scale, dim), finite(op, "eps", eps)

    call = GdnDecodeCall(
        op=op,
        qkvz=qkv,
        ba=b,
        weights=weights,
        conv_state=conv_state,
        state=state,
        reads=slots.reads,
        writes=slots.writes,
        num_key_heads=heads,
        layer=first,
        affine=affine,
        scale=factor,
        eps=eps,
        f=f,
        z=gate,
        lower_bound=lower_bound,
        arena=arena,
    )

    def mosaic(interpret: bool) -> tuple[Any, ...]:
        out, *rest = gdn_decode_mosaic(call, interpret=interpret)
        return lax.collapse(out, 2), *rest

    def xla() -> tuple[Any, ...]:
        own = weights if weights.ndim == 1 else weights[number]
        begins = [heads, heads + heads * dim, heads + heads * dim + dim]
        A_log, dt_bias, norm, taps = jnp.split(own, begins)

        def rule(q: Array, k: Array, v: Array) -> tuple[Any, ...]:
            return kda_decode(
                q,
                k,
                v,
                f.reshape(*f.shape[:2], heads, dim),
                b[..., :heads],
                state,
                slots.reads,
                A_log=A_log,
                dt_bias=dt_bias.reshape(heads, dim),
                lower_bound=lower_bound,
                write_indices=slots.writes,
                layer=number,
                scale=factor,
                implementation="xla",
            )

        return layer_in_xla(
            qkv,
            taps,
            conv_state,
            state,
            slots,
            rule,
            lambda o: gated_rms_norm(o, gate, norm, eps, sigmoid=True),
            layer=number,
            arena=arena,
        )

    return dispatch_kernel(op, implementation, mosaic, xla)


def _check(
    op: str,
    qkv: Array,
    f: Array,
    b: Array,
    gate: Array,
    weights: Array,
    conv_state: Array,
    state: Array,
) -> None:
    check_dtype(op, "state", state, "float32", "bfloat16")
    check_dtype(op, "qkv", qkv, "float32", "bfloat16", "float16")
    check_dtype(op, "weights", weights, "float32")
    if state.ndim not in (4, 5) or state.shape[-1] != state.shape[-2] or 0 in state.shape[-3:]:
        raise ValueError(
            f"{op}: state must be [Z, H, D, D] or [L, Z, H, D, D], got {list(state.shape)}"
        )
    heads, dim = state.shape[-3:-1]
    values = heads * dim
    if conv_state.ndim != state.ndim - 1 or conv_state.shape[:-2] != state.shape[:-3]:
        raise ValueError(
            f"{op}: conv_state must be [Z, W - 1, 3 H D] or [L, Z, W - 1, 3 H D] with the L and Z "
            f"of state {list(state.shape)}, got {list(conv_state.shape)}"
        )
    if conv_state.shape[-1] != 3 * values:
        raise ValueError(
            f"{op}: conv_state must have 3 H D = {3 * values} channels for the H and D of state; "
            f"got {list(conv_state.shape)}"
        )
    if qkv.ndim != 3 or qkv.shape[1] < 1:
        raise ValueError(f"{op}: qkv must be [B, S, 3 H D] with S >= 1, got {list(qkv.shape)}")
    rows = qkv.shape[:2]
    check_gate_shapes(
        op, (("qkv", qkv, (*rows, 3 * values)), ("f", f, (*rows, values)),
             ("gate", gate, (*rows, values))),
    )  # fmt: skip
    if b.ndim != 3 or b.shape[:2] != rows or b.shape[2] < heads:
        raise ValueError(
            f"{op}: b must be {[*rows, heads]}, optionally with more columns after these, got "
            f"{list(b.shape)}"
        )
    width = conv_state.shape[-2] + 1
    length = heads + values + dim + width * 3 * values
    one, stack = [length], [*state.shape[: state.ndim - 4], length]
    if list(weights.shape) not in (one, stack):
        raise ValueError(
            f"{op}: weights must be {one}, or for a stack of states {stack}, as pack_kda_weights "
            f"returns them; got {list(weights.shape)}"
        )
