"""Causal depthwise convolution before the gated delta rule, on arrays or on state pools.

The state of a convolution of width W is the W - 1 inputs before a token, oldest first:
`[..., W - 1, Dc]`. A new sequence starts from zeros.

A state pool is `[Z, ...]` with one slot per running sequence, or a stack of pools `[L, Z, ...]`
with the layer's index as an operand. Slot -1 marks a padding row, for which the op reads and writes
nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxattn.core.cache.state_pool import (
    as_offsets,
    check_cu_seqlens,
    check_pool,
    each_write,
    rows_in_use,
    state_read,
    state_write,
    write_slots,
)
from jaxattn.core.validation.array_checks import floats, keep_concrete, maybe_floats
from jaxattn.core.validation.varying_axes import refuse_explicit_axes

LONG = 64  # tokens from which on a row's inputs are not concatenated to its state


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
    """Computes a causal depthwise convolution over the tokens of each sequence.

    `y[t] = activation(bias + sum_j weight[:, j] * x[t - (W - 1) + j])`, in float32 and returned in
    x's dtype. The op is differentiable.

    Args:
        x: The channels, with q, k and v concatenated.
        weight: PyTorch's depthwise weight `[Dc, 1, W]` without its middle dimension. The last tap
            belongs to the token itself.
        bias: Bias of each channel.
        activation: "silu" or None.
        initial_state: The W - 1 inputs before each sequence, oldest first; None means zeros. n is
            B, or with cu_seqlens the number of sequences.
        output_final_state: Whether to return the last W - 1 inputs too, in the dtype of
            initial_state, or of x if initial_state is None. A zero-length sequence returns its
            initial state bit for bit.
        cu_seqlens: Token offsets of n sequences packed in one row (B = 1), starting at 0. Tokens
            past the last offset are padding: they may hold NaN and their y is 0.

    Returns:
        `(y, final_state)`; final_state is None unless requested.

    Raises:
        TypeError: An argument is not an array, or has a wrong dtype.
        ValueError: A shape does not fit, or a concrete cu_seqlens decreases or exceeds T.

    Source: FLA's and vLLM's causal_conv1d (W - 1 states, as vLLM stores them).
    """
    op = "causal_conv1d"
    x, weight = floats(op, x=x, weight=weight)
    bias = maybe_floats(op, "bias", bias)
    initial_state = maybe_floats(op, "initial_state", initial_state)
    _check_conv(op, x, weight, bias, activation)
    batch, length, channels = x.shape
    width = weight.shape[1]
    cu_seqlens = keep_concrete(cu_seqlens)
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
            from_zeros = initial_state is None
            y, final = _conv_packed(x, weight, bias, activation, initial, offsets, from_zeros)
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
    """Convolves S more tokens of each row, and reads and writes the state in a pool.

    Args:
        x: The new tokens' channels.
        weight, bias, activation: As in `causal_conv1d`.
        conv_state: `[Z, W - 1, Dc]`, or a stack `[L, ...]` with `layer`, of any floating dtype.
            Donate it to update it in place.
        state_indices: The slot of each row. -1 marks a padding row, whose y is exactly 0 and for
            which nothing is read or written. Slots in use must differ.
        write_indices: The slots to write, if they differ from those read; see
            `gated_delta_rule_decode`.
        layer: Index into the stack, a Python int or a traced scalar.

    Returns:
        `(y, conv_state)`.

    Raises:
        TypeError: An argument is not an array, or has a wrong dtype.
        ValueError: A shape does not fit, or concrete slots repeat or lie outside the pool.
    """
    op = "causal_conv1d_update"
    x, weight, conv_state = floats(op, x=x, weight=weight, conv_state=conv_state)
    bias = maybe_floats(op, "bias", bias)
    _check_conv(op, x, weight, bias, activation)
    slot_shape = (weight.shape[1] - 1, x.shape[2])
    reads, writes = keep_concrete(state_indices), keep_concrete(write_indices)
    check_pool(op, "conv_state", conv_state, reads, layer, slot_shape, x.shape[0])
    writes = write_slots(op, conv_state, reads, writes, layer, x.shape[1])
    state_indices, writes = jnp.asarray(reads), jnp.asarray(writes)
    refuse_explicit_axes(op, x, conv_state, state_indices, writes)
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
    """Convolves rows of one sequence: (y, state and inputs concatenated, `[B, W - 1 + T, Dc]`)."""
    length, width = x.shape[1], weight.shape[1]
    dtype = jnp.promote_types(x.dtype, initial.dtype)
    initial, inputs = initial.astype(dtype), x.astype(dtype)
    window = jnp.concatenate([initial, inputs], axis=1)
    if length < LONG:
        taps = [window[:, j : j + length] for j in range(width)]
    else:
        taps = [_inputs_before(inputs, initial, width - 1 - j) for j in range(width)]
    y = activated(weighted_sum(taps, weight), bias, activation)
    return y.astype(x.dtype), window


def _inputs_before(x: Array, initial: Array, count: int) -> Array:
    """Returns, for each token, the input `count` tokens before it; `count` is at most W - 1.

    The result is a slice of the concatenation, written as a select of padded arrays: XLA writes a
    concatenation to memory, but fuses these.
    """
    if not count:
        return x
    length, (_, held, _) = x.shape[1], initial.shape
    beside = lambda x, *pads: jnp.pad(x, ((0, 0), pads, (0, 0)))  # noqa: E731
    from_state = np.arange(length)[:, None] < count  # a constant, for which XLA launches no kernel
    old = beside(initial[:, held - count :], 0, length - count)
    return jnp.where(from_state, old, beside(x[:, : length - count], count, 0))


def _conv_packed(
    x: Array,
    weight: Array,
    bias: Array | None,
    activation: str | None,
    initial: Array,
    cu_seqlens: Array,
    from_zeros: bool,
) -> tuple[Array, Array]:
    """Convolves packed sequences; only a sequence's first W - 1 tokens see its initial state.

    Args:
        from_zeros: Whether the initial state is known to be zero, so that it adds nothing.
    """
    length, width = x.shape[1], weight.shape[1]
    if length == 0:
        return x, initial
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    token = jnp.arange(length, dtype=cu_seqlens.dtype)
    sequence = jnp.searchsorted(ends, token, side="right", method="compare_all")
    position = token - starts.at[sequence].get(mode="fill", fill_value=0)
    real = (token < ends[-1])[:, None]
    # Masked before the arithmetic, so that a NaN in the padding reaches no gradient either.
    tokens = jnp.where(real, x[0], 0)

    total = weighted_sum(shifted_inputs(tokens[None], position[None], width), weight)[0]

    row = jnp.arange(width - 1, dtype=cu_seqlens.dtype)
    if not from_zeros:
        head = jnp.pad(initial, ((0, 0), (0, width - 1), (0, 0)))
        from_state = weighted_sum([head[:, j : j + width - 1] for j in range(width)], weight)
        target = starts[:, None] + row
        unused = length + jnp.arange(target.size, dtype=target.dtype).reshape(target.shape)
        target = jnp.where(target < ends[:, None], target, unused)
        total = total.at[target].add(from_state, mode="drop", unique_indices=True)
    y = jnp.where(real, activated(total, bias, activation), 0)

    # Row i of the final state is input `len - (W - 1) + i` of the sequence. If that is negative, it
    # is row `len + i` of the initial state.
    source = (ends - starts)[:, None] + row
    old = jnp.take_along_axis(initial, jnp.minimum(source, width - 2)[:, :, None], axis=1)
    new = tokens.at[ends[:, None] - (width - 1) + row].get(mode="clip", wrap_negative_indices=False)
    dtype = jnp.promote_types(x.dtype, initial.dtype)
    is_old = (source < width - 1)[:, :, None]
    return y.astype(x.dtype)[None], jnp.where(is_old, old.astype(dtype), new.astype(dtype))


def shifted_inputs(x: Array, position: Array, width: int) -> list[Array]:
    """Returns W shifted copies of x [B, T, Dc], the input W - 1 to 0 tokens before each token.

    The copies are zero before a token's sequence, in which the token has the position [B, T].
    """

    def before(back: int) -> Array:
        shifted = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]]
        return jnp.where((position >= back)[..., None], shifted, 0)

    return [before(back) for back in reversed(range(width))]


def weighted_sum(taps: list[Array], weight: Array) -> Array:
    return sum(
        (tap.astype(jnp.float32) * weight[:, j].astype(jnp.float32) for j, tap in enumerate(taps)),
        start=jnp.zeros((), jnp.float32),
    )


def activated(total: Array, bias: Array | None, activation: str | None) -> Array:
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
