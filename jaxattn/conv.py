"""Causal depthwise convolution before the gated delta rule, and the pools that states live in.

A convolution of width W needs the W - 1 inputs before a token: that is its whole state, oldest
first, `[..., W - 1, Dc]`. A new sequence starts from zeros.

A state pool is `[Z, ...]`, one slot a running sequence, or a stack of them `[L, Z, ...]` with the
layer's index as an operand. Slot -1 marks a padding row: nothing is read or written for it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxattn.checks import check_integers, floats, maybe_floats
from jaxattn.layer_of import check_layer


def as_given(x: Any) -> Any:
    """Numbers that are known stay so: NumPy's and Python's as a NumPy array, others as JAX's.

    `jnp.asarray` inside `jax.jit` makes a tracer of both, whose values no check can see.
    """
    known = all(
        isinstance(leaf, np.ndarray | np.generic | int | float) for leaf in jax.tree.leaves(x)
    )
    return x if x is None else np.asarray(x) if known else jnp.asarray(x)


def state_read(
    pool: Float[Array, "..."],
    state_indices: Int[Array, " B"],
    *,
    layer: int | Int[Array, ""] | None = None,
) -> Float[Array, "B ..."]:
    """The rows' states, `[B, ...]`; zeros for a slot outside the pool, -1 included.

    Args:
        pool: `[Z, ...]`, or `[L, Z, ...]` with `layer`.
        state_indices: the slot of each row.
        layer: index into the stack, a Python int or traced. It is part of the gather: no layer is
            sliced out of the stack.
    """
    slots, _ = _slots(pool, state_indices, layer)
    index = slots if layer is None else (layer, slots)
    return jnp.asarray(pool).at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def state_write(
    pool: Float[Array, "..."],
    values: Float[Array, "B ..."],
    state_indices: Int[Array, " B"],
    *,
    layer: int | Int[Array, ""] | None = None,
) -> Float[Array, "..."]:
    """The pool with each row's state stored; a slot outside the pool, -1 included, stores nothing.

    Slots in use must differ from each other: with duplicates, which row wins is undefined.

    Args:
        pool: `[Z, ...]`, or `[L, Z, ...]` with `layer`.
        values: one state a row, cast to the pool's dtype.
        state_indices: the slot of each row.
        layer: index into the stack, a Python int or traced.
    """
    slots, _ = _slots(pool, state_indices, layer)
    index = slots if layer is None else (layer, slots)
    return (
        jnp.asarray(pool)
        .at[index]
        .set(
            values.astype(pool.dtype), mode="drop", unique_indices=True, wrap_negative_indices=False
        )
    )


def _slots(pool: Array, state_indices: Array, layer: int | Array | None) -> tuple[Array, Array]:
    """Slots with every unused one moved past the pool's end, and which rows are in use."""
    size = pool.shape[0 if layer is None else 1]
    used = (state_indices >= 0) & (state_indices < size)
    # A different out-of-range index for each padding row keeps `unique_indices` true.
    unused = size + jnp.arange(state_indices.shape[0], dtype=jnp.int32)
    return jnp.where(used, state_indices.astype(jnp.int32), unused), used


def rows_in_use(
    pool: Float[Array, "..."],
    state_indices: Int[Array, " B"],
    *,
    layer: int | Int[Array, ""] | None = None,
) -> Array:
    """Boolean `[B]`: the row's slot lies in the pool. Padding rows (-1) are False."""
    return _slots(pool, state_indices, layer)[1]


def check_pool(
    op: str,
    name: str,
    pool: Array,
    state_indices: Array,
    layer: int | Array | None,
    slot_shape: tuple[int, ...],
    batch: int,
    *,
    shared: bool = False,
) -> None:
    """Raises unless `pool` and `state_indices` fit; values only where concrete.

    `shared`: several rows may read one slot.
    """
    ranks = (len(slot_shape) + 1, len(slot_shape) + 2)
    if pool.ndim not in ranks or pool.shape[-len(slot_shape) :] != slot_shape:
        want = ", ".join(str(size) for size in slot_shape)
        raise ValueError(f"{op}: {name} must be [Z, {want}] or [L, Z, {want}], got {pool.shape}")
    if (pool.ndim == ranks[1]) != (layer is not None):
        raise ValueError(
            f"{op}: pass layer with a stack of {ranks[1]} dimensions, and only then; "
            f"{name} has shape {pool.shape} and layer={layer!r}"
        )
    if layer is not None:
        check_layer(op, name, pool.shape, layer)
    if state_indices is None:
        raise TypeError(f"{op}: state_indices must be integers of shape [{batch}], got None")
    fits = state_indices.shape == (batch,)
    check_integers(op, "state_indices", state_indices, f"[{batch}]", fits=fits)
    if isinstance(state_indices, jax.core.Tracer):
        return
    slots = np.asarray(state_indices).astype(np.int64)
    size = pool.shape[0 if layer is None else 1]
    if np.any(slots < -1) or np.any(slots >= size):
        raise ValueError(
            f"{op}: state_indices must lie in [-1, {size}), where -1 is padding, "
            f"got {slots.tolist()}"
        )
    values, counts = np.unique(slots[slots >= 0], return_counts=True)
    if np.any(counts > 1) and not shared:
        raise ValueError(
            f"{op}: state_indices must not name a slot twice, got slot(s) "
            f"{values[counts > 1].tolist()} more than once in {slots.tolist()}"
        )


def write_slots(
    op: str,
    pool: Array,
    state_indices: Array,
    write_indices: Array | None,
    layer: int | Array | None,
    tokens: int,
    *,
    name: str = "write_indices",
) -> Array:
    """Where the states go, `[B]` after the last token or `[B, S]` after each; checks the argument.

    `name` is the argument's, for messages. Where the read slots are traced, no row counts as
    padding, whose concrete write slots may be any.

    Raises:
        TypeError: it holds no integers.
        ValueError: its shape does not fit, or concrete slots leave the pool or collide.
    """
    if write_indices is None:
        return state_indices
    batch = state_indices.shape[0]
    fits = write_indices.shape in ((batch,), (batch, tokens))
    shapes = f"[{batch}] or [{batch}, {tokens}]"
    check_integers(op, name, write_indices, shapes, fits=fits)
    if isinstance(write_indices, jax.core.Tracer):
        return write_indices
    size = pool.shape[0 if layer is None else 1]
    writes = np.asarray(write_indices).astype(np.int64)
    writes = writes if writes.ndim == 2 else writes[:, None]
    reads = None
    if not isinstance(state_indices, jax.core.Tracer):
        reads = np.asarray(state_indices).astype(np.int64)
        # A padding row writes nothing, whatever it names.
        writes = np.where(reads[:, None] >= 0, writes, -1)
    if np.any(writes < -1) or np.any(writes >= size):
        raise ValueError(
            f"{op}: {name} must lie in [-1, {size}), where -1 keeps nothing, got {writes.tolist()}"
        )
    values, counts = np.unique(writes[writes >= 0], return_counts=True)
    if np.any(counts > 1):
        raise ValueError(
            f"{op}: {name} must not name a slot twice, got slot(s) "
            f"{values[counts > 1].tolist()} more than once in {writes.tolist()}"
        )
    if reads is None:
        return write_indices
    rows, columns = np.nonzero((writes[:, :, None] == reads) & (writes >= 0)[:, :, None])[::2]
    if np.any(rows != columns):
        row, other = next((r, c) for r, c in zip(rows, columns, strict=True) if r != c)
        raise ValueError(
            f"{op}: {name} must not name a slot that another row reads: row {row} writes "
            f"slot {reads[other]}, which row {other} reads"
        )
    return write_indices


def each_write(writes: Array, used: Array, tokens: int) -> list[tuple[int, Array]]:
    """(tokens done, slots [B] that take the states then), from the slots of `write_slots`."""
    writes = writes.astype(jnp.int32)
    if writes.ndim == 1:
        return [(tokens, jnp.where(used, writes, -1))]
    return [(t + 1, jnp.where(used, writes[:, t], -1)) for t in range(tokens)]


def check_cu_seqlens(op: str, cu_seqlens: Array, batch: int, length: int) -> None:
    """Raises unless `cu_seqlens` fits `[1, length]`; values only where concrete."""
    if batch != 1:
        raise ValueError(f"{op}: cu_seqlens needs batch 1, all sequences in one row; got {batch}")
    fits = cu_seqlens.ndim == 1 and cu_seqlens.shape[0] >= 2
    check_integers(op, "cu_seqlens", cu_seqlens, "[n + 1] with n >= 1", fits=fits)
    if isinstance(cu_seqlens, jax.core.Tracer):
        return
    ends = np.asarray(cu_seqlens).astype(np.int64)  # of which a difference may be negative
    if ends[0] != 0 or np.any(np.diff(ends) < 0) or ends[-1] > length:
        raise ValueError(
            f"{op}: cu_seqlens must start at 0, never decrease and end within the "
            f"{length} tokens, got {ends.tolist()}"
        )


def as_offsets(cu_seqlens: Any) -> Array | None:
    """Checked offsets in int32: of a narrower type they would not reach T."""
    return None if cu_seqlens is None else jnp.asarray(cu_seqlens).astype(jnp.int32)


def causal_conv1d(
    x: Float[Array, "B T Dc"],
    weight: Float[Array, "Dc W"],
    *,
    bias: Float[Array, " Dc"] | None = None,
    activation: str | None = "silu",
    initial_state: Float[Array, "n W-1 Dc"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Array, " n+1"] | None = None,
) -> tuple[Float[Array, "B T Dc"], Float[Array, "n W-1 Dc"] | None]:
    """Causal depthwise convolution over the tokens of each sequence.

    `y[t] = activation(bias + sum_j weight[:, j] * x[t - (W - 1) + j])`, in float32, returned in
    x's dtype. Differentiable.

    Args:
        x: the channels, q, k and v side by side.
        weight: PyTorch's depthwise `[Dc, 1, W]` without its middle dimension; the last tap is the
            token itself.
        bias: per channel.
        activation: "silu" or None.
        initial_state: the W - 1 inputs before each sequence, oldest first; zeros if None.
            n is B, or with cu_seqlens the number of sequences.
        output_final_state: also return the last W - 1 inputs, in initial_state's dtype (x's
            without one). A zero-length sequence returns its initial state bit for bit.
        cu_seqlens: token offsets of n sequences packed in one row (B = 1), starting at 0. Tokens
            past the last offset are padding: they may hold NaN and their y is 0.

    Returns:
        `(y, final_state)`; final_state is None unless asked for.

    Raises:
        TypeError: an argument is no array, or its dtype does not fit.
        ValueError: a shape does not fit, or a concrete cu_seqlens decreases or passes T.

    Source: FLA's and vLLM's causal_conv1d (W - 1 states, as vLLM stores them).
    """
    op = "causal_conv1d"
    x, weight = floats(op, x=x, weight=weight)
    bias = maybe_floats(op, "bias", bias)
    initial_state = maybe_floats(op, "initial_state", initial_state)
    _check_conv(op, x, weight, bias, activation)
    batch, length, channels = x.shape
    width = weight.shape[1]
    cu_seqlens = as_given(cu_seqlens)
    if cu_seqlens is not None:
        check_cu_seqlens(op, cu_seqlens, batch, length)
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state_shape = (count, width - 1, channels)
    if initial_state is not None and initial_state.shape != state_shape:
        raise ValueError(
            f"{op}: initial_state must be {list(state_shape)}, got {list(initial_state.shape)}"
        )
    initial = jnp.zeros(state_shape, x.dtype) if initial_state is None else initial_state
    with jax.named_scope(op):
        offsets = as_offsets(cu_seqlens)
        if offsets is None:
            y, window = _conv_rows(x, weight, bias, activation, initial)
            final = window[:, length:]
        else:
            y, final = _conv_packed(x, weight, bias, activation, initial, offsets)
    return y, final.astype(initial.dtype) if output_final_state else None


def causal_conv1d_update(
    x: Float[Array, "B S Dc"],
    weight: Float[Array, "Dc W"],
    conv_state: Float[Array, "*L Z W-1 Dc"],
    state_indices: Int[Array, " B"],
    *,
    write_indices: Int[Array, " B"] | Int[Array, "B S"] | None = None,
    layer: int | Int[Array, ""] | None = None,
    bias: Float[Array, " Dc"] | None = None,
    activation: str | None = "silu",
) -> tuple[Float[Array, "B S Dc"], Float[Array, "*L Z W-1 Dc"]]:
    """S more tokens of each row, with the state read from and written to a pool.

    Args:
        x: the new tokens' channels.
        weight, bias, activation: as in `causal_conv1d`.
        conv_state: `[Z, W - 1, Dc]`, or a stack `[L, ...]` with `layer`; any float dtype. Donate
            it to update it in place.
        state_indices: each row's slot; -1 is a padding row, whose y is exactly 0 and for which
            nothing is read or written. Slots in use must differ.
        write_indices: the slots that are written, if not those that were read; see
            `gated_delta_rule_decode`.
        layer: index into the stack, a Python int or traced.

    Returns:
        `(y, conv_state)`.

    Raises:
        TypeError: an argument is no array, or its dtype does not fit.
        ValueError: a shape does not fit, or concrete slots repeat or leave the pool.
    """
    op = "causal_conv1d_update"
    x, weight, conv_state = floats(op, x=x, weight=weight, conv_state=conv_state)
    bias = maybe_floats(op, "bias", bias)
    _check_conv(op, x, weight, bias, activation)
    slot_shape = (weight.shape[1] - 1, x.shape[2])
    reads, writes = as_given(state_indices), as_given(write_indices)
    check_pool(op, "conv_state", conv_state, reads, layer, slot_shape, x.shape[0])
    writes = write_slots(op, conv_state, reads, writes, layer, x.shape[1])
    state_indices, writes = jnp.asarray(reads), jnp.asarray(writes)
    with jax.named_scope(op):
        initial = state_read(conv_state, state_indices, layer=layer)
        y, window = _conv_rows(x, weight, bias, activation, initial)
        used = rows_in_use(conv_state, state_indices, layer=layer)
        for done, slots in each_write(writes, used, x.shape[1]):
            inputs = window[:, done : done + weight.shape[1] - 1]
            conv_state = state_write(conv_state, inputs, slots, layer=layer)
        return jnp.where(used[:, None, None], y, 0), conv_state


def _conv_rows(
    x: Array, weight: Array, bias: Array | None, activation: str | None, initial: Array
) -> tuple[Array, Array]:
    """Every row one sequence: (y, its inputs with the initial state's, `[B, W - 1 + T, Dc]`)."""
    length, width = x.shape[1], weight.shape[1]
    dtype = jnp.promote_types(x.dtype, initial.dtype)
    window = jnp.concatenate([initial.astype(dtype), x.astype(dtype)], axis=1)
    taps = [window[:, j : j + length] for j in range(width)]
    y = _activate(_weigh(taps, weight), bias, activation)
    return y.astype(x.dtype), window


def _conv_packed(
    x: Array,
    weight: Array,
    bias: Array | None,
    activation: str | None,
    initial: Array,
    cu_seqlens: Array,
) -> tuple[Array, Array]:
    """Sequences packed in one row; only a sequence's first W - 1 tokens see its initial state."""
    length, width = x.shape[1], weight.shape[1]
    if length == 0:
        return x, initial
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    token = jnp.arange(length, dtype=cu_seqlens.dtype)
    sequence = jnp.searchsorted(ends, token, side="right", method="compare_all")
    position = token - starts.at[sequence].get(mode="fill", fill_value=0)
    real = (token < ends[-1])[:, None]
    # Selected before the arithmetic, so that a NaN in the padding reaches no gradient either.
    tokens = jnp.where(real, x[0], 0)

    taps = []
    for j in range(width):
        back = width - 1 - j
        shifted = jnp.pad(tokens, ((back, 0), (0, 0)))[:length]
        taps.append(jnp.where((position >= back)[:, None], shifted, 0))
    total = _weigh(taps, weight)

    head = jnp.pad(initial, ((0, 0), (0, width - 1), (0, 0)))
    from_state = _weigh([head[:, j : j + width - 1] for j in range(width)], weight)
    row = jnp.arange(width - 1, dtype=cu_seqlens.dtype)
    target = starts[:, None] + row
    unused = length + jnp.arange(target.size, dtype=target.dtype).reshape(target.shape)
    target = jnp.where(target < ends[:, None], target, unused)
    total = total.at[target].add(from_state, mode="drop", unique_indices=True)
    y = jnp.where(real, _activate(total, bias, activation), 0)

    # Row i of the final state is input `len - (W - 1) + i` of the sequence: a token, or if that is
    # negative, row `len + i` of the initial state.
    source = (ends - starts)[:, None] + row
    old = jnp.take_along_axis(initial, jnp.minimum(source, width - 2)[:, :, None], axis=1)
    new = tokens.at[ends[:, None] - (width - 1) + row].get(mode="clip", wrap_negative_indices=False)
    dtype = jnp.promote_types(x.dtype, initial.dtype)
    is_old = (source < width - 1)[:, :, None]
    return y.astype(x.dtype)[None], jnp.where(is_old, old.astype(dtype), new.astype(dtype))


def _weigh(taps: list[Array], weight: Array) -> Array:
    return sum(
        (tap.astype(jnp.float32) * weight[:, j].astype(jnp.float32) for j, tap in enumerate(taps)),
        start=jnp.zeros((), jnp.float32),
    )


def _activate(total: Array, bias: Array | None, activation: str | None) -> Array:
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    return jax.nn.silu(total) if activation == "silu" else total


def _check_conv(
    op: str, x: Array, weight: Array, bias: Array | None, activation: str | None
) -> None:
    if x.ndim != 3:
        raise ValueError(f"{op}: x must be [B, T, Dc], got shape {x.shape}")
    if weight.ndim != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 2:
        raise ValueError(
            f"{op}: weight must be [Dc={x.shape[2]}, W] with W >= 2, got shape {weight.shape}"
        )
    if bias is not None and bias.shape != (x.shape[2],):
        raise ValueError(f"{op}: bias must be [Dc={x.shape[2]}], got shape {bias.shape}")
    if activation not in ("silu", None):
        raise ValueError(f"{op}: activation must be 'silu' or None, got {activation!r}")
