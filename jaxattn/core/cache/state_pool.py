"""State pools by slot: reads, writes, and checks of slot numbers and sequence offsets."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxattn.core.validation.array_checks import (
    check_array,
    check_integers,
    check_layer,
    keep_concrete,
)
from jaxattn.core.validation.varying_axes import refuse_explicit_axes


def state_read(
    pool: Float[Array, "..."],
    state_indices: Int[Array, " B"],
    *,
    layer: int | Int[Array, ""] | None = None,
) -> Float[Array, "B ..."]:
    """Reads the rows' states, `[B, ...]`, with zeros for a slot outside the pool (such as -1).

    Args:
        pool: `[Z, ...]`, or `[L, Z, ...]` with `layer`.
        state_indices: The slot of each row.
        layer: Index into the stack, a Python int or a traced scalar, which is part of the gather:
            no layer is sliced out of the stack.

    Raises:
        TypeError: `pool` is not an array, or `state_indices` or `layer` are not integers.
        ValueError: A shape does not fit, or a concrete `layer` is not in the stack.
    """
    slots = _slots(pool, _checked("state_read", pool, state_indices, layer), layer)[0]
    index = slots if layer is None else (layer, slots)
    return jnp.asarray(pool).at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def state_write(
    pool: Float[Array, "..."],
    values: Float[Array, "B ..."],
    state_indices: Int[Array, " B"],
    *,
    layer: int | Int[Array, ""] | None = None,
) -> Float[Array, "..."]:
    """Writes each row's state to the pool; a slot outside the pool (such as -1) stores nothing.

    Slots in use must differ from each other: with duplicates, which row wins is undefined.

    Args:
        pool: `[Z, ...]`, or `[L, Z, ...]` with `layer`.
        values: One state per row, cast to the pool's dtype.
        state_indices: The slot of each row.
        layer: Index into the stack, a Python int or a traced scalar.

    Raises:
        TypeError: `pool` or `values` is not an array, or `state_indices` or `layer` are not
            integers.
        ValueError: A shape does not fit, or a concrete `layer` is not in the stack.
    """
    op = "state_write"
    indices = _checked(op, pool, state_indices, layer)
    check_array(op, "values", values)
    shape = (*indices.shape, *pool.shape[1 if layer is None else 2 :])
    if values.shape != shape:
        raise ValueError(
            f"{op}: values must be [B, ...] = {list(shape)}, a state of pool {tuple(pool.shape)} "
            f"for each row, got {list(values.shape)}"
        )
    slots = _slots(pool, indices, layer)[0]
    index = slots if layer is None else (layer, slots)
    return (
        jnp.asarray(pool)
        .at[index]
        .set(
            values.astype(pool.dtype), mode="drop", unique_indices=True, wrap_negative_indices=False
        )
    )


def _checked(op: str, pool: Any, state_indices: Any, layer: Any) -> Array:
    """Returns the slots as an array; raises unless they are integers and the layer exists."""
    check_array(op, "pool", pool)
    if state_indices is None:
        raise TypeError(f"{op}: state_indices must be integers of shape [B], got None")
    indices = keep_concrete(state_indices)
    check_integers(op, "state_indices", indices, "[B]", fits=indices.ndim == 1)
    least = 1 if layer is None else 2
    if pool.ndim < least:
        raise ValueError(
            f"{op}: pool must be [Z, ...], or with layer [L, Z, ...], got {list(pool.shape)}"
        )
    if layer is not None:
        check_layer(op, "pool", tuple(pool.shape), layer)
    refuse_explicit_axes(op, pool, indices)
    return jnp.asarray(indices)


def _slots(pool: Array, state_indices: Array, layer: int | Array | None) -> tuple[Array, Array]:
    """Returns slots, with unused ones moved past the pool's end, and which rows are in use."""
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
    """Returns bool `[B]`, whether each row's slot lies in the pool; padding rows (-1) do not."""
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
    """Raises unless `pool` and `state_indices` fit; checks only concrete values.

    With `shared`, several rows may read one slot.
    """
    ranks = (len(slot_shape) + 1, len(slot_shape) + 2)
    if pool.ndim not in ranks or pool.shape[-len(slot_shape) :] != slot_shape:
        want = ", ".join(str(size) for size in slot_shape)
        raise ValueError(f"{op}: {name} must be [Z, {want}] or [L, Z, {want}], got {pool.shape}")
    if (pool.ndim == ranks[1]) != (layer is not None):
        raise ValueError(
            f"{op}: give layer if and only if the pool is a stack of {ranks[1]} dimensions; "
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
    """Returns the checked slots to write: `[B]` after the last token, or `[B, S]` after each.

    If the read slots are traced, no row counts as padding, although the concrete write slots of a
    padding row may have any value.

    Args:
        name: The argument's name, for messages.

    Raises:
        TypeError: The argument does not hold integers.
        ValueError: Its shape does not fit, or concrete slots lie outside the pool or collide.
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
        # A padding row writes nothing, whatever its slots are.
        writes = np.where(reads[:, None] >= 0, writes, -1)
    if np.any(writes < -1) or np.any(writes >= size):
        raise ValueError(
            f"{op}: {name} must lie in [-1, {size}), where -1 stores nothing, got {writes.tolist()}"
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
    """Returns (tokens done, slots [B] to write then) for each write, from `write_slots`."""
    writes = writes.astype(jnp.int32)
    if writes.ndim == 1:
        return [(tokens, jnp.where(used, writes, -1))]
    return [(t + 1, jnp.where(used, writes[:, t], -1)) for t in range(tokens)]


def check_cu_seqlens(op: str, cu_seqlens: Array, batch: int, length: int) -> None:
    """Raises unless `cu_seqlens` fits `[1, length]`; checks only concrete values."""
    if batch != 1:
        raise ValueError(
            f"{op}: cu_seqlens needs batch 1, with all sequences in one row; got {batch}"
        )
    fits = cu_seqlens.ndim == 1 and cu_seqlens.shape[0] >= 2
    check_integers(op, "cu_seqlens", cu_seqlens, "[n + 1] with n >= 1", fits=fits)
    if isinstance(cu_seqlens, jax.core.Tracer):
        return
    ends = np.asarray(cu_seqlens).astype(np.int64)  # signed, because a difference may be negative
    if ends[0] != 0 or np.any(np.diff(ends) < 0) or ends[-1] > length:
        raise ValueError(
            f"{op}: cu_seqlens must start at 0, never decrease and end within the "
            f"{length} tokens, got {ends.tolist()}"
        )


def as_offsets(cu_seqlens: Any) -> Array | None:
    """Casts checked offsets to int32, because a narrower type might not reach T."""
    return None if cu_seqlens is None else jnp.asarray(cu_seqlens).astype(jnp.int32)


def checkpoint_slots(
    slots: Int[Array, "n M"], tokens: int, sequence: Int[Array, "*N"], done: Int[Array, "*N"]
) -> Int[Array, "*N"]:
    """Returns the slot that receives the state after `done` tokens of a sequence, or -1."""
    slot = slots.at[sequence, done // tokens - 1].get(
        mode="fill", fill_value=-1, wrap_negative_indices=False
    )
    return jnp.where(done % tokens == 0, slot, -1)
