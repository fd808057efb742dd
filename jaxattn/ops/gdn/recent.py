"""Decode of the gated delta rule that writes a state only at every sixteenth token."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.core.checks import as_given, check_dtype, check_integers, floats, output_scale
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.slots import check_pool, rows_in_use, state_read, state_write
from jaxattn.core.varying import refuse_explicit_axes
from jaxattn.kernels.gdn_decode.recent import PLACES, Recent
from jaxattn.ops.gdn.chunk_xla import l2norm

OP = "gated_delta_rule_decode"


def recent_tokens(
    num_slots: int, num_k_heads: int, num_v_heads: int, *, layers: int | None = None,
    head_k_dim: int = 128, head_v_dim: int = 128,
) -> Recent:  # fmt: skip
    """Zeros with room for 16 tokens beside each state of a pool [Z, ..] or a stack [L, Z, ..]."""
    pool = (num_slots,) if layers is None else (layers, num_slots)
    shapes = (
        (num_k_heads, PLACES, head_k_dim), (num_v_heads, PLACES, head_v_dim), (num_v_heads, PLACES)
    )  # fmt: skip
    return Recent(*(jnp.zeros((*pool, *shape), jnp.float32) for shape in shapes))


def decode_recent(
    q: Array,
    k: Array,
    v: Array,
    gates: Callable[[], tuple[Array, Array]],
    kernel: Callable[..., tuple[Any, ...]],
    state: Float[Array, "*L Z Hv Dv Dk"],
    recent: Recent,
    filled: Int[Array, " B"] | None,
    state_indices: Int[Array, " B"],
    *,
    layer: int | Int[Array, ""] | None,
    scale: float | None,
    use_qk_l2norm: bool,
    implementation: Implementation | None,
) -> tuple[Array, Array, Recent]:
    """`gated_delta_rule_decode` of one token per row, with recent tokens beside the states.

    Args:
        gates: makes (g, beta), [B, 1, Hv] each.
        kernel: of (state, recent, slots, filled, scale, interpret).

    Raises:
        TypeError, ValueError: as `gated_delta_rule_decode`.
    """
    batch, tokens, value_heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    (state,) = floats(OP, state=state)
    reads, counts = as_given(state_indices), as_given(filled)
    check_pool(OP, "state", state, reads, layer, (value_heads, value_dim, key_dim), batch)
    check_dtype(OP, "state", state, "float32", "bfloat16")
    if tokens != 1:
        raise ValueError(f"{OP}: with recent a row has one token, got q {q.shape} of S={tokens}")
    check_recent(state, recent, (key_heads, value_heads, key_dim, value_dim))
    if counts is None:
        raise TypeError(f"{OP}: with recent, filled must be integers of shape [{batch}], got None")
    check_integers(OP, "filled", counts, f"[{batch}]", fits=counts.shape == (batch,))
    if isinstance(counts, np.ndarray) and ((counts < 0) | (counts >= PLACES)).any():
        raise ValueError(f"{OP}: filled must lie in [0, {PLACES}), got {counts.tolist()}")
    slots, counts = jnp.asarray(reads), jnp.asarray(counts).astype(jnp.int32)
    factor = output_scale(OP, scale, key_dim)
    refuse_explicit_axes(OP, q, k, v, state, slots, counts, *recent)

    def mosaic(interpret: bool) -> tuple[Any, ...]:
        return kernel(state, recent, slots, counts, factor, interpret)

    def xla() -> tuple[Array, Array, Recent]:
        with jax.named_scope(OP):
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
            before = before * decay[..., None, None]
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

    return dispatch_kernel(OP, implementation, mosaic, xla)


def with_recent(state: Array, recent: Recent, filled: Array) -> Array:
    """Rows' states [B, Hv, Dv, Dk] with as many tokens as are `filled` [B], in float32."""
    group = recent.deltas.shape[1] // recent.keys.shape[1]
    keys = jnp.repeat(recent.keys, group, axis=1)

    def one(state: Array, j: Array) -> tuple[Array, None]:
        key, delta, decay = keys[:, :, j], recent.deltas[:, :, j], recent.decays[:, :, j]
        more = state * decay[..., None, None] + delta[..., None] * key[:, :, None]
        return jnp.where((j < filled)[:, None, None, None], more, state), None

    return lax.scan(one, state, jnp.arange(PLACES))[0]


def check_recent(state: Array, recent: Any, heads: tuple[int, int, int, int]) -> None:
    key_heads, value_heads, key_dim, value_dim = heads
    if not isinstance(recent, Recent):
        raise TypeError(
            f"{OP}: recent must be what recent_tokens returns, got {type(recent).__name__}"
        )
    pool = state.shape[:-3]
    wanted = {
        "keys": (*pool, key_heads, PLACES, key_dim),
        "deltas": (*pool, value_heads, PLACES, value_dim),
        "decays": (*pool, value_heads, PLACES),
    }
    for name, shape in wanted.items():
        array = getattr(recent, name)
        if array.shape != shape or array.dtype != jnp.float32:
            raise ValueError(
                f"{OP}: recent.{name} must be float32 {list(shape)} beside state {state.shape}, "
                f"got {array.dtype} {list(array.shape)}; make it with recent_tokens"
            )
