"""The addition of a layer's output to the residual stream and the norm that follows."""

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.caches.symmetric_memory import NAME, buffer_arrays, symmetric_buffer
from jaxattn.nn import RMSNorm
from jaxattn.ops.linear.norm_linear import PendingNorm, array_of
from jaxattn.ops.linear.rms_norm import add_rms_norm_layer
from jaxattn.parallel.hlo_all_reduces import SCOPE


def add_then_norm(norm: RMSNorm) -> Callable:
    """Makes a function of a norm that adds first: (x, added, state) -> (sum, norm, state)."""

    def add_norm(x: Array, addend: Any, state: DecodeState) -> tuple[Array, Array, DecodeState]:
        x = x + array_of(addend, x.shape)
        return x, norm(x), state

    return add_norm


def add_alone(
    x: Array, addend: Any, state: DecodeState, dtype: DTypeLike
) -> tuple[Array, Array, DecodeState]:
    """Adds like `add_then_norm`, for a layer that reads the stream unnormed, in `dtype`."""
    x = x + array_of(addend, x.shape)
    return x, x.astype(dtype), state


def add_norm_in_stack(
    x: Array, addend: Any, state: DecodeState, **options: Any
) -> tuple[Array, Array, DecodeState]:
    """Adds and norms like `add_then_norm`, by a norm in the stack of all layers' norms."""
    return *add_rms_norm_layer(x, array_of(addend, x.shape), **options), state


def defer_norm(
    x: Array, addend: Any, state: DecodeState, *, weights: Array, **options: Any
) -> tuple[Array, PendingNorm, DecodeState]:
    """Adds like `add_then_norm`, but leaves norm and sum to the next product; see `summed`."""
    return x, PendingNorm(x, addend, weights, **options), state


def summed(x: Array, normed: Array | PendingNorm) -> Array:
    """Returns the stream x after the addition that `normed` includes."""
    return normed.total if isinstance(normed, PendingNorm) else x


def sum_add_norm(
    x: Array, part: Array, state: DecodeState, *, meet: Callable, **options: Any
) -> tuple[Array, Array, DecodeState]:
    """Adds and norms like `add_norm_in_stack`, with an exchange of parts or norms between GPUs.

    `meet` is an op of `jaxattn.ops.collectives.all_reduce_norm`.
    """
    features = x.shape[-1]
    with jax.named_scope(SCOPE):
        total, normed, mailbox = meet(
            x.reshape(-1, features),
            part.reshape(-1, features),
            mailbox=symmetric_buffer(state.caches[NAME]),
            **options,
        )
    state = state.replace(NAME, buffer_arrays(mailbox))
    return total.reshape(x.shape), normed.reshape(-1, *x.shape[1:]), state
