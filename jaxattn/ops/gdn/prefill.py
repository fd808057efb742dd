"""The chunked gated delta rule on a state pool: prompts start from slots and end in slots.

Beside the state after a prompt's last token, a server that caches prefixes keeps those after every
n tokens: a later request with the same beginning goes on from the last of them. They are written to
slots that the caller names, as all states here are, and not returned as an array: such a server has
the slots, handed out and taken back like pages; an array would be as large as what it keeps, and
copied into it once more; and most of a prompt's checkpoints may not be wanted at all.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxattn.core.checks import (
    as_given,
    check_dtype,
    check_integer,
    check_integers,
    finite,
    floats,
    output_scale,
)
from jaxattn.core.dispatch import Implementation, dispatch, without_gradient
from jaxattn.core.norms import gated_rms_norm
from jaxattn.core.slots import (
    as_offsets,
    check_pool,
    rows_in_use,
    state_read,
    state_write,
    write_slots,
)
from jaxattn.core.varying import refuse_explicit_axes
from jaxattn.kernels.gdn_prefill.launch import Pool, gdn_prefill_mosaic, refuse_prefill
from jaxattn.kernels.gdn_prefill.output_norm import Norm
from jaxattn.ops.gdn.chunk import check_chunks
from jaxattn.ops.gdn.chunk_xla import Checkpoints, gated_delta_rule_chunks
from jaxattn.ops.gdn.recurrent import check_sequence
from jaxattn.ops.gdn.rule import GATED, Rule


def gated_delta_rule_prefill(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "*L Z Hv Dv Dk"],
    state_indices: Int[Array, " n"],
    *,
    write_indices: Int[Array, " n"] | None = None,
    has_initial_state: Bool[Array, " n"] | None = None,
    cu_seqlens: Int[Array, " n+1"] | None = None,
    layer: int | Int[Array, ""] | None = None,
    checkpoint_tokens: int | None = None,
    checkpoint_indices: Int[Array, "n M"] | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    use_qk_l2norm: bool = True,
    split_tokens: int | None = None,
    gate: Float[Array, "B T N"] | None = None,
    norm_weight: Float[Array, " Dv"] | None = None,
    norm_eps: float = 1e-6,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "*L Z Hv Dv Dk"]]:
    """`chunk_gated_delta_rule` with each sequence's state read from and written to a pool.

    Differentiable in reverse mode only, and only by "xla".

    Args:
        q, k, v, g, beta, cu_seqlens, scale, chunk_size, split_tokens: as in
            `chunk_gated_delta_rule`; n is B, or with cu_seqlens the number of sequences.
        state: float32 or bfloat16, `[Z, Hv, Dv, Dk]`, or a stack `[L, ...]` with `layer`. Donate
            it to update it in place. States are rounded when they are stored, not in between.
        state_indices: the slot that each sequence starts from; -1 is a padding sequence, whose o
            is exactly 0 and for which nothing is read or written. A sequence without a token
            reads and writes nothing either.
        write_indices: the slots that take the states after the last tokens, if not those that were
            read; -1 keeps nothing. Several sequences may then start from one slot, a shared
            prefix's. A written slot may be named only once, and read by its own sequence only.
        has_initial_state: False for a sequence that starts from zeros, whatever its slot holds;
            all start from their slots if None.
        layer: index into the stack, a Python int or traced.
        checkpoint_tokens: a multiple of chunk_size, counted from each sequence's first token here:
            a prompt that comes in parts has its checkpoints where it wants them if the parts are
            multiples of it too.
        checkpoint_indices: `checkpoint_indices[i, j]` is the slot that takes sequence i's state
            after `(j + 1) * checkpoint_tokens` tokens; -1 keeps nothing, and what lies past a
            sequence's end is ignored. The rules of write_indices hold for both together. These
            are states of the recurrence alone. That of a convolution before it is its last W - 1
            inputs, which the caller has: of the `x` that `causal_conv1d` was given, the tokens
            `x[:, end - (W - 1) : end]`, where the checkpoint is taken before token `end`.
        use_qk_l2norm: normalise q and k to `x * rsqrt(sum(x^2) + 1e-6)` first.
        gate: with norm_weight, o becomes `o / rms(o) * norm_weight * silu(z)` over Dv, in float32
            (Qwen3-Next's convention). z is in the gate's last Hv * Dv columns, head after head: the
            packed projection q | k | v | z serves as it is, N = Dc + Hv * Dv. The kernel does it on
            the way out where more than 66 states are worked on at once and the gate has v's dtype;
            elsewhere XLA does.
        norm_eps: added to the mean square.
        implementation: None, "mosaic_gpu", "mosaic_gpu_interpret" or "xla". The kernel has
            Dk = Dv = 128, chunk_size 64 and bfloat16 or float16 operands, and refuses the rest. It
            is not differentiable.

    Returns:
        `(o, state)`; o is `[B, T, Hv, Dv]` in v's dtype.

    Raises:
        TypeError: an argument is no array, its dtype does not fit, or a size is no integer.
        ValueError: a shape does not fit, a concrete cu_seqlens decreases or passes T, or concrete
            slots leave the pool or collide.
        Refusal: the named implementation refuses; the message says why.
    """
    return prefill_rule(
        "gated_delta_rule_prefill",
        GATED,
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices,
        write_indices=write_indices,
        has_initial_state=has_initial_state,
        cu_seqlens=cu_seqlens,
        layer=layer,
        checkpoint_tokens=checkpoint_tokens,
        checkpoint_indices=checkpoint_indices,
        scale=scale,
        chunk_size=chunk_size,
        use_qk_l2norm=use_qk_l2norm,
        split_tokens=split_tokens,
        gate=gate,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        implementation=implementation,
    )


def prefill_rule(
    op: str,
    rule: Rule,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    state_indices: Array,
    *,
    write_indices: Array | None,
    has_initial_state: Array | None,
    cu_seqlens: Array | None,
    layer: int | Array | None,
    checkpoint_tokens: int | None,
    checkpoint_indices: Array | None,
    scale: float | None,
    chunk_size: int,
    use_qk_l2norm: bool,
    split_tokens: int | None,
    gate: Array | None,
    norm_weight: Array | None,
    norm_eps: float,
    implementation: Implementation | None,
) -> tuple[Array, Array]:
    """`gated_delta_rule_prefill` of either rule; `op` is the public name, for messages."""
    q, k, v, g, beta, state = floats(op, q=q, k=k, v=v, g=g, beta=beta, state=state)
    initial = None if has_initial_state is None else jnp.asarray(has_initial_state)
    given = (cu_seqlens, state_indices, write_indices, checkpoint_indices)
    ends, reads, writes, kept = map(as_given, given)
    check_sequence(op, q, k, v, g, beta, None, ends, channels=rule.channels)
    check_chunks(op, chunk_size, split_tokens)
    count = v.shape[0] if ends is None else ends.shape[0] - 1
    slot_shape = (*v.shape[2:], k.shape[-1])
    shared = writes is not None
    check_pool(op, "state", state, reads, layer, slot_shape, count, shared=shared)
    check_dtype(op, "state", state, "float32", "bfloat16")
    if initial is not None:
        check_dtype(op, "has_initial_state", initial, "bool")
        if initial.shape != (count,):
            raise ValueError(
                f"{op}: has_initial_state must be [{count}], got {list(initial.shape)}"
            )
    writes = _check_writes(op, state, reads, writes, layer, kept, checkpoint_tokens, chunk_size)
    if kept is not None and kept.shape[1] == 0:
        kept = checkpoint_tokens = None
    cu_seqlens, reads, writes = as_offsets(ends), jnp.asarray(reads), jnp.asarray(writes)
    kept = None if kept is None else jnp.asarray(kept)
    factor = output_scale(op, scale, k.shape[-1])
    norm = _check_norm(op, rule, v, gate, norm_weight, norm_eps)
    refuse_explicit_axes(op, q, k, v, g, beta, state, reads, writes, kept, cu_seqlens, initial)

    # Nothing but slots in the pool and -1 from here on.
    live = rows_in_use(state, reads, layer=layer)
    known = live if initial is None else live & initial
    reads = jnp.where(known, reads.astype(jnp.int32), -1)
    if cu_seqlens is None:
        some = jnp.full(count, v.shape[1] > 0)
    else:
        some = cu_seqlens[1:] > cu_seqlens[:-1]
    stored = live & some & rows_in_use(state, writes, layer=layer)
    writes = jnp.where(stored, writes.astype(jnp.int32), -1)
    if kept is not None:
        inside = rows_in_use(state, kept.reshape(-1), layer=layer).reshape(kept.shape)
        kept = jnp.where(live[:, None] & inside, kept.astype(jnp.int32), -1)

    def mosaic(interpret: bool) -> tuple[Array, Array]:
        refuse_prefill(op, q, v, chunk_size, interpret=interpret)
        tokens, held, normed = without_gradient(op, ((q, k, v, g, beta), state, norm))
        stack = held.reshape(-1, *state.shape[-4:])
        index = jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1)
        pool = Pool(stack, index, live, reads, writes, kept, checkpoint_tokens or 0)
        with jax.named_scope(op):
            o, stack = gdn_prefill_mosaic(
                *tokens,
                scale=factor,
                pool=pool,
                cu_seqlens=ends,
                use_qk_l2norm=use_qk_l2norm,
                segment=split_tokens,
                norm=normed,
                make=rule.make,
                interpret=interpret,
            )
        return o, stack.reshape(state.shape)

    def xla() -> tuple[Array, Array]:
        if v.shape[1] == 0:
            return jnp.zeros_like(v), state
        with jax.named_scope(op):
            start = state_read(state, reads, layer=layer).astype(jnp.float32)
            checkpoints = None
            if kept is not None and checkpoint_tokens is not None:
                checkpoints = Checkpoints(state, layer, kept, checkpoint_tokens)
            o, final, pool = gated_delta_rule_chunks(
                q,
                k,
                v,
                g,
                beta,
                factor,
                start,
                cu_seqlens,
                use_qk_l2norm,
                chunk_size,
                checkpoints,
                operands=rule.operands,
            )
            pool = state_write(state if pool is None else pool, final, writes, layer=layer)
            if cu_seqlens is None:
                shown = live[:, None]
            else:
                # Tokens past the last offset belong to nobody.
                token = lax.iota(cu_seqlens.dtype, v.shape[1])
                owner = jnp.searchsorted(cu_seqlens[1:], token, side="right")
                shown = live.at[owner].get(mode="clip")[None] & (token < cu_seqlens[-1])
            if norm is not None:
                o = gated_rms_norm(o.reshape(-1, *o.shape[2:]), *norm).reshape(o.shape)
            return jnp.where(shown[..., None, None], o, 0), pool

    return dispatch(
        op,
        implementation or rule.default,
        {
            "mosaic_gpu": lambda: mosaic(False),
            "mosaic_gpu_interpret": lambda: mosaic(True),
            "xla": xla,
        },
    )


def _check_norm(
    op: str, rule: Rule, v: Array, gate: Array | None, weight: Array | None, eps: float
) -> Norm | None:
    if (gate is None) != (weight is None):
        raise ValueError(
            f"{op}: pass gate and norm_weight together, got gate={_shape(gate)} and norm_weight="
            f"{_shape(weight)}"
        )
    if gate is None or weight is None:
        return None
    gate, weight = floats(op, gate=gate, norm_weight=weight)
    tokens, columns, width = v.shape[:2], v.shape[2] * v.shape[3], v.shape[3]
    if gate.ndim != 3 or gate.shape[:2] != tokens or gate.shape[2] < columns:
        raise ValueError(
            f"{op}: gate must be [{tokens[0]}, {tokens[1]}, N] with N at least Hv * Dv = "
            f"{columns}, got {list(gate.shape)}"
        )
    if weight.shape != (width,):
        raise ValueError(f"{op}: norm_weight must be [{width}], got {list(weight.shape)}")
    eps = finite(op, "norm_eps", eps)
    gate = gate.reshape(v.shape[0] * v.shape[1], gate.shape[2])
    return Norm(gate, weight.astype(jnp.float32), eps, rule.sigmoid)


def _shape(x: Array | None) -> list[int] | None:
    return None if x is None else list(x.shape)


def _check_writes(
    op: str,
    state: Array,
    reads: Array,
    writes: Array | None,
    layer: int | Array | None,
    kept: Array | None,
    tokens: int | None,
    chunk_size: int,
) -> Array:
    """The slots of the final states; raises where they or the checkpoints do not fit."""
    count = reads.shape[0]
    if writes is not None:
        fits = writes.shape == (count,)
        check_integers(op, "write_indices", writes, f"[{count}]", fits=fits)
    finals = write_slots(op, state, reads, writes, layer, 1)
    if (kept is None) != (tokens is None):
        raise ValueError(
            f"{op}: pass checkpoint_tokens and checkpoint_indices together, got checkpoint_tokens="
            f"{tokens} and checkpoint_indices {_shape(kept)}"
        )
    if kept is None or tokens is None:
        return finals
    check_integer(op, "checkpoint_tokens", tokens)
    if tokens <= 0 or tokens % chunk_size:
        raise ValueError(
            f"{op}: checkpoint_tokens must be a positive multiple of {chunk_size=}, got {tokens}"
        )
    fits = kept.ndim == 2 and kept.shape[0] == count
    check_integers(op, "checkpoint_indices", kept, f"[{count}, M]", fits=fits)
    if isinstance(kept, jax.core.Tracer):
        return finals
    # Of one width: of uint64 and int64 NumPy would make float64.
    every: Any = np.asarray(kept).astype(np.int64)
    name = "checkpoint_indices"
    if not isinstance(finals, jax.core.Tracer):
        every = np.concatenate([np.asarray(finals).astype(np.int64)[:, None], every], axis=1)
        name = f"write_indices and {name}, side by side,"
    write_slots(op, state, reads, every, layer, every.shape[1], name=name)
    return finals
