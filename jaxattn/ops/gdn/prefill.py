"""The chunked gated delta rule on a state pool: prompts start from slots and end in slots.

A server with a prefix cache keeps the states after every n tokens, so that a later request with the
same beginning can continue from the last of them. The op writes them to slots that the caller names
instead of returning an array. Such a server already manages slots like pages. An array would be as
large as the checkpoints and cost another copy, and the server may not need most of a prompt's
checkpoints.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxattn.core.cache.state_pool import (
    as_offsets,
    check_pool,
    rows_in_use,
    state_read,
    state_write,
)
from jaxattn.core.deprecation import KeywordGroup, with_older_keywords
from jaxattn.core.dispatch import Implementation, dispatch_kernel, without_gradient
from jaxattn.core.numerics.rms_norm import gated_rms_norm
from jaxattn.core.reverse_mode import in_reverse_mode_only
from jaxattn.core.validation.array_checks import (
    check_dtype,
    floats,
    keep_concrete,
    output_scale,
)
from jaxattn.core.validation.varying_axes import refuse_explicit_axes
from jaxattn.kernels.gdn.prefill.chunk_plan import PrefillStatePool
from jaxattn.kernels.gdn.prefill.launch import gdn_prefill_mosaic, refuse_prefill
from jaxattn.ops.gdn.chunk import check_chunks
from jaxattn.ops.gdn.chunk_xla import GATED, DeltaRule, PoolCheckpoints, gated_delta_rule_chunks
from jaxattn.ops.gdn.prefill_options import (
    Checkpoints,
    OutputNorm,
    check_checkpoints,
    check_output_norm,
    check_writes,
)
from jaxattn.ops.gdn.recurrent import check_sequence


@with_older_keywords(
    checkpoints=KeywordGroup(
        Checkpoints, {"checkpoint_indices": "slots", "checkpoint_tokens": "tokens"}
    ),
    output_norm=KeywordGroup(
        OutputNorm, {"gate": "gate", "norm_weight": "weight", "norm_eps": "eps"}
    ),
)
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
    checkpoints: Checkpoints | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    use_qk_l2norm: bool = True,
    split_tokens: int | None = None,
    output_norm: OutputNorm | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "*L Z Hv Dv Dk"]]:
    """`chunk_gated_delta_rule` that reads and writes each sequence's state in a pool.

    The op is differentiable in reverse mode only, and only with "xla".

    Args:
        q, k, v, g, beta, cu_seqlens, scale, chunk_size, split_tokens: As in
            `chunk_gated_delta_rule`; n is B, or with cu_seqlens the number of sequences.
        state: float32 or bfloat16, `[Z, Hv, Dv, Dk]`, or a stack `[L, ...]` with `layer`. Donate it
            to update it in place. The op rounds states when it stores them, not in between.
        state_indices: The slot from which each sequence starts. -1 marks a padding sequence, whose
            o is exactly 0 and for which nothing is read or written. A sequence without tokens reads
            and writes nothing either.
        write_indices: The slots that receive the states after the last tokens, if they differ from
            those read; -1 stores nothing. Several sequences may then start from one slot, that of a
            shared prefix. A written slot may be named only once, and only its own sequence may read
            it.
        has_initial_state: False for a sequence that starts from zeros, whatever its slot holds.
            None means that all start from their slots.
        layer: Index into the stack, a Python int or a traced scalar.
        checkpoints: The slots that receive intermediate states, for a prefix cache.
        use_qk_l2norm: Whether to normalize q and k to `x * rsqrt(sum(x^2) + 1e-6)` first.
        output_norm: The gated norm of o. The kernel computes it in its epilogue if it processes
            more than 66 states at once and the gate has v's dtype; otherwise XLA does.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernel requires Dk = Dv = 128, chunk_size 64 and bfloat16 or float16 operands, and
            is not differentiable.

    Returns:
        `(o, state)`; o is `[B, T, Hv, Dv]` in v's dtype.

    Raises:
        TypeError: An argument is not an array, has a wrong dtype, or should be an integer.
        ValueError: A shape does not fit, a concrete cu_seqlens decreases or exceeds T, or concrete
            slots lie outside the pool or collide.
        Refusal: The requested implementation does not support this call; the message says why.
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
        checkpoints=checkpoints,
        scale=scale,
        chunk_size=chunk_size,
        use_qk_l2norm=use_qk_l2norm,
        split_tokens=split_tokens,
        output_norm=output_norm,
        implementation=implementation,
    )


def prefill_rule(
    op: str,
    rule: DeltaRule,
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
    checkpoints: Checkpoints | None,
    scale: float | None,
    chunk_size: int,
    use_qk_l2norm: bool,
    split_tokens: int | None,
    output_norm: OutputNorm | None,
    implementation: Implementation | None,
) -> tuple[Array, Array]:
    """`gated_delta_rule_prefill` for either rule; `op` is the public name, for messages."""
    q, k, v, g, beta, state = floats(op, q=q, k=k, v=v, g=g, beta=beta, state=state)
    initial = None if has_initial_state is None else jnp.asarray(has_initial_state)
    ends, reads, writes = map(keep_concrete, (cu_seqlens, state_indices, write_indices))
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
    checkpoints = check_checkpoints(op, checkpoints, count, chunk_size)
    checkpoint_slots, checkpoint_tokens = (
        (None, 0) if checkpoints is None else (checkpoints.slots, checkpoints.tokens)
    )
    writes = check_writes(op, state, reads, writes, layer, checkpoint_slots)
    cu_seqlens, reads, writes = as_offsets(ends), jnp.asarray(reads), jnp.asarray(writes)
    checkpoint_slots = None if checkpoint_slots is None else jnp.asarray(checkpoint_slots)
    factor = output_scale(op, scale, k.shape[-1])
    norm = check_output_norm(op, output_norm, v, sigmoid=rule.sigmoid)
    refuse_explicit_axes(
        op, q, k, v, g, beta, state, reads, writes, checkpoint_slots, cu_seqlens, initial
    )

    # From here on every entry is a slot in the pool or -1.
    live = rows_in_use(state, reads, layer=layer)
    known = live if initial is None else live & initial
    reads = jnp.where(known, reads.astype(jnp.int32), -1)
    if cu_seqlens is None:
        some = jnp.full(count, v.shape[1] > 0)
    else:
        some = cu_seqlens[1:] > cu_seqlens[:-1]
    stored = live & some & rows_in_use(state, writes, layer=layer)
    writes = jnp.where(stored, writes.astype(jnp.int32), -1)
    if checkpoint_slots is not None:
        inside = rows_in_use(state, checkpoint_slots.reshape(-1), layer=layer).reshape(
            checkpoint_slots.shape
        )
        checkpoint_slots = jnp.where(live[:, None] & inside, checkpoint_slots.astype(jnp.int32), -1)

    def mosaic(interpret: bool) -> tuple[Array, Array]:
        refuse_prefill(op, q, v, chunk_size, interpret=interpret)
        *tokens, held, normed = without_gradient(
            op,
            (q, k, v, g, beta, state, norm),
            "q k v g beta state output_norm",
            train_with="chunk_kda" if rule.channels else "chunk_gated_delta_rule",
        )
        stack = held.reshape(-1, *state.shape[-4:])
        index = jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1)
        pool = PrefillStatePool(
            stack, index, live, reads, writes, checkpoint_slots, checkpoint_tokens
        )
        with jax.named_scope(op):
            o, stack = gdn_prefill_mosaic(
                *tokens,
                scale=factor,
                pool=pool,
                cu_seqlens=ends,
                use_qk_l2norm=use_qk_l2norm,
                segment=split_tokens,
                norm=normed,
                interpret=interpret,
            )
        return o, stack.reshape(state.shape)

    def xla() -> tuple[Array, Array]:
        if v.shape[1] == 0:
            return jnp.zeros_like(v), state
        with jax.named_scope(op):
            start = state_read(state, reads, layer=layer).astype(jnp.float32)
            stored = (
                None
                if checkpoint_slots is None
                else PoolCheckpoints(state, layer, checkpoint_slots, checkpoint_tokens)
            )
            recurrent = "recurrent_kda" if rule.channels else "recurrent_gated_delta_rule"
            chunks = in_reverse_mode_only(op, gated_delta_rule_chunks, instead=recurrent)
            o, final, pool = chunks(
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
                stored,
                operands=rule.operands,
            )
            pool = state_write(state if pool is None else pool, final, writes, layer=layer)
            if cu_seqlens is None:
                shown = live[:, None]
            else:
                # Tokens past the last offset belong to no sequence.
                token = lax.iota(cu_seqlens.dtype, v.shape[1])
                owner = jnp.searchsorted(cu_seqlens[1:], token, side="right")
                shown = live.at[owner].get(mode="clip")[None] & (token < cu_seqlens[-1])
            if norm is not None:
                o = gated_rms_norm(o.reshape(-1, *o.shape[2:]), *norm).reshape(o.shape)
            return jnp.where(shown[..., None, None], o, 0), pool

    return dispatch_kernel(op, implementation, mosaic, xla)
