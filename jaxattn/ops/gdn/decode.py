"""The gated delta rule for a few new tokens per row, on a state pool."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.arena import Arena
from jaxattn.core.cache.state_pool import (
    check_pool,
    each_write,
    rows_in_use,
    state_read,
    state_write,
    write_slots,
)
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.validation.array_checks import (
    check_arena,
    check_dtype,
    floats,
    keep_concrete,
    output_scale,
)
from jaxattn.core.validation.varying_axes import refuse_explicit_axes
from jaxattn.kernels.gdn.decode.arguments import GdnDecodeCall
from jaxattn.kernels.gdn.decode.launch import gdn_decode_mosaic, scratch
from jaxattn.ops.gdn.recurrent import _check_heads, _recurrent, gdn_gates


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
    """Processes S more tokens of each row, and reads and writes the state in a pool.

    `jaxattn.gdn.gated_delta_net_decode` fuses the recurrence with a layer's convolution, gates and
    gated norm. Use this op for models whose convolution, gates or norm differ.

    Args:
        q, k, v: Arrays of one dtype. The recurrence itself is float32.
        a, b: Inputs of `gdn_gates`, of any floating dtype.
        state: float32 or bfloat16, `[Z, Hv, Dv, Dk]`, or a stack `[L, ...]` with `layer`. Donate it
            to update it in place. The op rounds a state when it stores it, not between the S
            tokens.
        state_indices: The slot of each row. -1 marks a padding row, whose o is exactly 0 and for
            which nothing is read or written. Slots in use must differ.
        A_log, dt_bias: Gate parameters of each value head, used in float32.
        write_indices: The slots to write, if they differ from those read. `[B]` receives the state
            after the row's last token, `[B, S]` the state after each token; -1 stores nothing. A
            speculative decoder that accepts n of S tokens continues from `write_indices[b, n - 1]`.
            Slots must differ, and no other row may read a slot that a row writes.
        layer: Index into the stack, a Python int or a traced scalar.
        scale: Factor of the output. None means Dk**-0.5.
        use_qk_l2norm: Whether to normalize q and k to `x * rsqrt(sum(x^2) + 1e-6)` first.
        arena: Scratch memory of at least `scratch(...)`; o is then a view of it, valid until the
            next op that uses the arena.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.

    Returns:
        `(o, state)`, with an arena `(o, state, arena)`; o is `[B, S, Hv, Dv]` in v's dtype.

    Raises:
        TypeError: An argument is not an array, or has a wrong dtype.
        ValueError: A shape does not fit, or concrete slots repeat or lie outside the pool.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    op = "gated_delta_rule_decode"
    q, k, v, a, b = floats(op, q=q, k=k, v=v, a=a, b=b)
    A_log, dt_bias = floats(op, A_log=A_log, dt_bias=dt_bias)
    _check_heads(op, q, k, v, "S")
    of_tokens, of_heads = v.shape[:3], v.shape[2:3]
    check_gate_shapes(
        op, (("a", a, of_tokens), ("b", b, of_tokens), ("A_log", A_log, of_heads),
             ("dt_bias", dt_bias, of_heads)),
    )  # fmt: skip

    def packed_gates() -> dict[str, Any]:
        return {
            "ba": jnp.concatenate([b.astype(jnp.float32), a.astype(jnp.float32)], axis=-1),
            "weights": jnp.concatenate([A_log.astype(jnp.float32), dt_bias.astype(jnp.float32)]),
        }

    return decode_rule(
        op,
        q,
        k,
        v,
        lambda: gdn_gates(a, b, A_log, dt_bias),
        state,
        state_indices,
        packed_gates,
        write_indices=write_indices,
        layer=layer,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        arena=arena,
        implementation=implementation,
    )


class StateSlots(NamedTuple):
    """The slots whose states a step reads, [B], and those it writes, [B] or [B, S]."""

    reads: Array
    writes: Array


def decode_rule(
    op: str,
    q: Array,
    k: Array,
    v: Array,
    gates: Callable[[], tuple[Array, Array]],
    state: Array,
    state_indices: Array,
    packed_gates: Callable[[], dict[str, Any]],
    *,
    write_indices: Array | None,
    layer: int | Array | None,
    scale: float | None,
    use_qk_l2norm: bool,
    arena: Arena | None,
    implementation: Implementation | None,
) -> tuple[Any, ...]:
    """`gated_delta_rule_decode` for any gates.

    Args:
        op: The public name, for messages.
        q, k, v: Checked arrays.
        gates: Computes (g, beta), where g is [B, S, Hv] or [B, S, Hv, Dk].
        packed_gates: Computes the fields of `GdnDecodeCall` from which the kernel reads the gates.
    """
    (state,) = floats(op, state=state)
    check_arena(op, arena)
    reads, writes = keep_concrete(state_indices), keep_concrete(write_indices)
    batch, tokens, value_heads, value_dim = v.shape
    slot_shape = (value_heads, value_dim, k.shape[-1])
    check_pool(op, "state", state, reads, layer, slot_shape, batch)
    check_dtype(op, "state", state, "float32", "bfloat16")
    writes = write_slots(op, state, reads, writes, layer, tokens)
    slots = StateSlots(jnp.asarray(reads), jnp.asarray(writes))
    factor = output_scale(op, scale, k.shape[-1])
    refuse_explicit_axes(op, q, k, v, state, *slots)

    def mosaic(interpret: bool):
        call = GdnDecodeCall(
            op=op,
            # One array, as a layer's projections would write them.
            qkvz=jnp.concatenate([lax.collapse(x, 2) for x in (q, k, v)], axis=-1),
            **packed_gates(),
            state=state,
            reads=slots.reads,
            writes=slots.writes,
            num_key_heads=k.shape[2],
            layer=layer,
            scale=factor,
            l2norm=use_qk_l2norm,
            arena=arena,
        )
        out, _, *rest = gdn_decode_mosaic(call, interpret=interpret)
        return out, *rest

    def xla():
        with jax.named_scope(op):
            g, beta = gates()
            now = state_read(state, slots.reads, layer=layer).astype(jnp.float32)
            used = rows_in_use(state, slots.reads, layer=layer)
            new_state, begin, outs = state, 0, []
            for done, kept in each_write(slots.writes, used, tokens):
                qs, ks, vs, gs, betas = (x[:, begin:done] for x in (q, k, v, g, beta))
                o, now = _recurrent(qs, ks, vs, gs, betas, factor, now, None, use_qk_l2norm)
                new_state = state_write(new_state, now, kept, layer=layer)
                outs.append(o)
                begin = done
            o = jnp.concatenate(outs, axis=1) if outs else v  # v has S = 0 tokens
            o = jnp.where(used[:, None, None, None], o, 0)
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

    return dispatch_kernel(op, implementation, mosaic, xla)


def check_gate_shapes(op: str, gates: Sequence[tuple[str, Array, tuple[int, ...]]]) -> None:
    for name, array, shape in gates:
        if array.shape != shape:
            raise ValueError(f"{op}: {name} must be {list(shape)}, got {list(array.shape)}")
