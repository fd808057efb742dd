"""Decode of a delta rule that writes a state only at every sixteenth token."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.core.cache.slots import check_pool, rows_in_use, state_read, state_write
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.validation.array_checks import (
    check_array,
    check_dtype,
    check_integers,
    floats,
    keep_concrete,
    output_scale,
)
from jaxattn.core.validation.shard_map_axes import refuse_explicit_axes
from jaxattn.kernels.gdn_decode.recent import PLACES, Recent, recent_decode_mosaic
from jaxattn.ops.gdn.chunk_xla import l2norm

FOLD = "fold_recent"


def recent_tokens(
    num_slots: int, num_k_heads: int, num_v_heads: int, *, layers: int | None = None,
    head_k_dim: int = 128, head_v_dim: int = 128,
) -> Recent:  # fmt: skip
    """Zeros with room for 16 tokens beside each state of a pool [Z, ..] or a stack [L, Z, ..]."""
    return recent_zeros(num_slots, num_k_heads, num_v_heads, layers, head_k_dim, head_v_dim, ())


def recent_zeros(
    num_slots: int, key_heads: int, value_heads: int, layers: int | None, key_dim: int,
    value_dim: int, of_decay: tuple[int, ...],
) -> Recent:  # fmt: skip
    """`of_decay`: the shape of a token's decay."""
    pool = (num_slots,) if layers is None else (layers, num_slots)
    shapes = (
        (key_heads, PLACES, key_dim), (value_heads, PLACES, value_dim),
        (value_heads, PLACES, *of_decay),
    )  # fmt: skip
    return Recent(*(jnp.zeros((*pool, *shape), jnp.float32) for shape in shapes))


def fold_recent(
    state: Float[Array, "*L Z Hv Dv Dk"],
    recent: Recent,
    filled: Int[Array, " B"],
    state_indices: Int[Array, " B"],
    *,
    layer: int | Int[Array, ""] | None = None,
) -> Float[Array, "*L Z Hv Dv Dk"]:
    """The pool with the rows' recent tokens in their states; `filled` is 0 from then on.

    For what reads or writes states alone: a prefill that goes on, a copy of a state, decode without
    `recent` where a batch has become small. It is plain XLA, and reads and writes each row's state.

    Args:
        state, recent, filled, state_indices, layer: as in
            `jaxattn.gdn.gated_delta_rule_decode` or `jaxattn.kda.kda_decode`. A row whose slot is
            -1 is left out.

    Raises:
        TypeError: an argument is no array, or its dtype does not fit.
        ValueError: a shape does not fit, or concrete slots repeat or leave the pool.
    """
    (state,) = floats(FOLD, state=state)
    if state.ndim not in (4, 5):
        raise ValueError(
            f"{FOLD}: state must be [Z, Hv, Dv, Dk] or [L, Z, Hv, Dv, Dk], got {list(state.shape)}"
        )
    reads, counts = keep_concrete(state_indices), keep_concrete(filled)
    if reads is None:
        raise TypeError(f"{FOLD}: state_indices must be integers of shape [B], got None")
    batch = reads.shape[0] if reads.ndim else 1
    check_pool(FOLD, "state", state, reads, layer, state.shape[-3:], batch)
    check_dtype(FOLD, "state", state, "float32", "bfloat16")
    channels = isinstance(recent, Recent) and getattr(recent.decays, "ndim", 0) == state.ndim
    value_heads, value_dim, key_dim = state.shape[-3:]
    keys: Any = getattr(recent, "keys", None)
    key_heads = keys.shape[-3] if getattr(keys, "ndim", 0) == state.ndim else value_heads
    check_recent(FOLD, state, recent, (key_heads, value_heads, key_dim, value_dim), channels)
    if not key_heads or value_heads % key_heads:
        raise ValueError(
            f"{FOLD}: recent.keys has {key_heads} heads, and state's {value_heads} must be a "
            "multiple of them; make it with recent_tokens"
        )
    slots, counts = jnp.asarray(reads), checked_counts(FOLD, counts, batch)
    counts = jnp.clip(counts, 0, PLACES - 1)  # traced ones, as decode takes them
    refuse_explicit_axes(FOLD, state, slots, counts, *recent)
    with jax.named_scope(FOLD):
        beside = Recent(*(state_read(x, slots, layer=layer) for x in recent))
        now = state_read(state, slots, layer=layer).astype(jnp.float32)
        return state_write(state, with_recent(now, beside, counts), slots, layer=layer)


def decode_recent(
    op: str,
    q: Array,
    k: Array,
    v: Array,
    gates: Callable[[], tuple[Array, Array]],
    operands: Callable[[], tuple[Array, Array, Array]],
    state: Float[Array, "*L Z Hv Dv Dk"],
    recent: Recent,
    filled: Int[Array, " B"] | None,
    state_indices: Int[Array, " B"],
    *,
    layer: int | Int[Array, ""] | None,
    scale: float | None,
    use_qk_l2norm: bool,
    channels: bool,
    implementation: Implementation | None,
    **of_gates: Any,
) -> tuple[Array, Array, Recent]:
    """Decode of one token per row, with recent tokens beside the states.

    Args:
        op: the public name, for messages.
        gates: makes (g, beta), [B, 1, Hv] each; with decays per channel g is [B, 1, Hv, Dk].
        channels: whether it is.
        operands: makes the kernel's arrays, as a layer's projections would write them.
        of_gates: what else the kernel takes for its gates.

    Raises:
        TypeError, ValueError: as `gated_delta_rule_decode`.
    """
    batch, tokens, value_heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    (state,) = floats(op, state=state)
    reads, counts = keep_concrete(state_indices), keep_concrete(filled)
    check_pool(op, "state", state, reads, layer, (value_heads, value_dim, key_dim), batch)
    check_dtype(op, "state", state, "float32", "bfloat16")
    if tokens != 1:
        raise ValueError(f"{op}: with recent a row has one token, got q {q.shape} of S={tokens}")
    check_recent(op, state, recent, (key_heads, value_heads, key_dim, value_dim), channels)
    slots, counts = jnp.asarray(reads), checked_counts(op, counts, batch)
    factor = output_scale(op, scale, key_dim)
    refuse_explicit_axes(op, q, k, v, state, slots, counts, *recent)

    def mosaic(interpret: bool) -> tuple[Any, ...]:
        return recent_decode_mosaic(
            op, *operands(), state, recent, slots, counts, num_key_heads=key_heads, layer=layer,
            scale=factor, l2norm=use_qk_l2norm, **of_gates, interpret=interpret,
        )  # fmt: skip

    def xla() -> tuple[Array, Array, Recent]:
        with jax.named_scope(op):
            (g,), (beta,) = ([x[:, 0].astype(jnp.float32)] for x in gates())
            place = jnp.clip(counts, 0, PLACES - 1)
            new_q, new_k = (
                jnp.repeat((l2norm(x) if use_qk_l2norm else x)[:, 0], value_heads // key_heads, 1)
                for x in (q.astype(jnp.float32), k.astype(jnp.float32))
            )
            keys, deltas, decays = (state_read(x, slots, layer=layer) for x in recent)
            before = state_read(state, slots, layer=layer).astype(jnp.float32)
            before = with_recent(before, Recent(keys, deltas, decays), place)
            decay = jnp.exp(g)
            before = before * _over_values(decay, before)
            seen = jnp.einsum("bhvk,bhk->bhv", before, new_k)
            delta = beta[..., None] * (v[:, 0].astype(jnp.float32) - seen)
            after = before + delta[..., None] * new_k[:, :, None]
            out = factor * jnp.einsum("bhvk,bhk->bhv", after, new_q)
            used = rows_in_use(state, slots, layer=layer)
            out = jnp.where(used[:, None, None], out, 0).astype(v.dtype)[:, None]
            full = place == PLACES - 1
            folded, kept = (jnp.where(full == fold, slots, -1) for fold in (True, False))
            rows = jnp.arange(batch)
            own = new_k[:, :: value_heads // key_heads]
            new = Recent(
                keys.at[rows, :, place].set(own),
                deltas.at[rows, :, place].set(delta),
                decays.at[rows, :, place].set(decay),
            )
            pairs = zip(recent, new, strict=True)
            new = Recent(*(state_write(old, x, kept, layer=layer) for old, x in pairs))
            return out, state_write(state, after, folded, layer=layer), new

    return dispatch_kernel(op, implementation, mosaic, xla)


def with_recent(state: Array, recent: Recent, filled: Array) -> Array:
    """Rows' states [B, Hv, Dv, Dk] with as many tokens as are `filled` [B], in float32."""
    group = recent.deltas.shape[1] // recent.keys.shape[1]
    keys = jnp.repeat(recent.keys, group, axis=1)

    def one(state: Array, j: Array) -> tuple[Array, None]:
        key, delta, decay = keys[:, :, j], recent.deltas[:, :, j], recent.decays[:, :, j]
        more = state * _over_values(decay, state) + delta[..., None] * key[:, :, None]
        return jnp.where((j < filled)[:, None, None, None], more, state), None

    return lax.scan(one, state, jnp.arange(PLACES))[0]


def _over_values(decay: Array, state: Array) -> Array:
    """Decays [B, Hv], or of channels [B, Hv, Dk], as they meet states [B, Hv, Dv, Dk]."""
    return decay[..., None, :] if decay.ndim == state.ndim - 1 else decay[..., None, None]


def checked_counts(op: str, counts: Array | None, batch: int) -> Array:
    """`filled` as int32."""
    if counts is None:
        raise TypeError(f"{op}: with recent, filled must be integers of shape [{batch}], got None")
    check_integers(op, "filled", counts, f"[{batch}]", fits=counts.shape == (batch,))
    if not isinstance(counts, jax.core.Tracer):
        known = np.asarray(counts)
        if ((known < 0) | (known >= PLACES)).any():
            raise ValueError(f"{op}: filled must lie in [0, {PLACES}), got {known.tolist()}")
    return jnp.asarray(counts).astype(jnp.int32)


def check_recent(
    op: str, state: Array, recent: Any, heads: tuple[int, int, int, int], channels: bool
) -> None:
    key_heads, value_heads, key_dim, value_dim = heads
    if not isinstance(recent, Recent):
        raise TypeError(
            f"{op}: recent must be what recent_tokens returns, got {type(recent).__name__}"
        )
    pool = state.shape[:-3]
    wanted = {
        "keys": (*pool, key_heads, PLACES, key_dim),
        "deltas": (*pool, value_heads, PLACES, value_dim),
        "decays": (*pool, value_heads, PLACES, *((key_dim,) if channels else ())),
    }
    for name, shape in wanted.items():
        array = getattr(recent, name)
        check_array(op, f"recent.{name}", array)
        if array.shape != shape or array.dtype != jnp.float32:
            raise ValueError(
                f"{op}: recent.{name} must be float32 {list(shape)} beside state {state.shape}, "
                f"got {array.dtype} {list(array.shape)}; make it with recent_tokens"
            )
