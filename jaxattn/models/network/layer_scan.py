"""The loop over the repeats of a segment, and the stacks that layers read in place.

Weights that a kernel reads in place are not sliced by the loop: their modules receive the stack and
the layer's index.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxattn.core.dispatch import Implementation
from jaxattn.core.stacked_layer import StackedLayer
from jaxattn.models.caches.layer_cache import HANDED_ON, Arrays, DecodeState
from jaxattn.models.caches.symmetric_memory import (
    EXCHANGE,
    MEETING,
    NAME,
    buffer_arrays,
    symmetric_buffer,
)
from jaxattn.nn import RMSNorm
from jaxattn.nn.linear import StackedWeight
from jaxattn.ops.linear.norm_linear import PendingNorm, array_of
from jaxattn.ops.linear.rms_norm import add_rms_norm_layer
from jaxattn.parallel.hlo_all_reduces import SCOPE


def scan_layers[Carry](
    repeats: int,
    body: Callable[[Carry, Any], Carry],
    carry: Carry,
    stacks: Any,
    unrolled: bool = False,
    together: int = 1,
) -> Carry:
    """Runs `carry = body(carry, (i + 1, *stacks[i]))` for each repeat, with one counter.

    An iteration of the loop runs `together` repeats, which may be one CUDA graph; `together` must
    divide `repeats`.

    If unrolled, the layers' indices are constants. Unrolling saves a launch for the counter, of 1.2
    us per repeat, and 1 us of host time between repeats (H200). Launches of the same kernel
    (`hopper/build/trace_cache.py`) are still lowered and compiled only once.

    A `lax.scan` has its own counter in addition to that of the layers' indices. XLA increments and
    copies both in every repeat, which takes 3 us on an H200. A use of i after i + 1 is computed
    also costs a copy, so the layers' indices derive from i + 1.
    """

    def step(looped: tuple[Array, Carry]) -> tuple[Array, Carry]:
        i, carry = looped
        last = i + together
        for left in reversed(range(together)):
            following = last - left if left else last
            here = following - 1
            one = jax.tree.map(
                lambda x, here=here: lax.dynamic_index_in_dim(x, here, keepdims=False), stacks
            )
            carry = body(carry, (following, *one))
        return last, carry

    if unrolled:
        for i in range(repeats):
            one = jax.tree.map(lambda x, i=i: x[i], stacks)
            carry = body(carry, (np.int32(i + 1), *one))
        return carry
    return lax.while_loop(lambda looped: looped[0] < repeats, step, (jnp.int32(0), carry))[1]


def in_repeat(following: Array) -> StackedLayer:
    """Returns a layer's index in the stacks of its place in the pattern."""
    return StackedLayer(following, 1, -1)


def add_then_norm(norm: RMSNorm) -> Callable:
    """Makes a function of a norm that adds first: (x, added, state) -> (sum, norm, state)."""

    def add_norm(x: Array, added: Any, state: DecodeState) -> tuple[Array, Array, DecodeState]:
        x = x + array_of(added, x.shape)
        return x, norm(x), state

    return add_norm


def add_alone(
    x: Array, added: Any, state: DecodeState, dtype: DTypeLike
) -> tuple[Array, Array, DecodeState]:
    """Adds like `add_then_norm`, for a layer that reads the stream unnormed, in `dtype`."""
    x = x + array_of(added, x.shape)
    return x, x.astype(dtype), state


def add_norm_in_stack(
    x: Array, added: Any, state: DecodeState, **options: Any
) -> tuple[Array, Array, DecodeState]:
    """Adds and norms like `add_then_norm`, by a norm in the stack of all layers' norms."""
    return *add_rms_norm_layer(x, array_of(added, x.shape), **options), state


def defer_norm(
    x: Array, added: Any, state: DecodeState, *, weights: Array, **options: Any
) -> tuple[Array, PendingNorm, DecodeState]:
    """Adds like `add_then_norm`, but leaves norm and sum to the next product; see `summed`."""
    return x, PendingNorm(x, added, weights, **options), state


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


def kept(state: DecodeState, name: str, arrays: Arrays, arena: Any) -> DecodeState:
    """Returns the state with a layer's arrays, the mailboxes it used, and what it passes on."""
    for cache in (name, EXCHANGE, MEETING, HANDED_ON):
        own = state.caches.get(cache, {})
        if found := {key: arrays[key] for key in own if key in arrays}:
            state = state.replace(cache, found, arena)
    return state


def linear_stacks_of(pattern: nnx.Module) -> dict[Any, Array]:
    """Returns the weights of a segment that its modules read in their stacks, [repeats, ...] each.

    Keys are the module's place and the weight's name.
    """
    return {
        (path, name): getattr(module, name)[...]
        for path, module in nnx.iter_modules(pattern)
        for name in getattr(module, "stacked", ())
    }


def leave_in_stacks(
    pattern: nnx.Module,
    stacks: dict[Any, Array],
    following: Array,
    implementation: Implementation | None,
) -> None:
    """Gives the modules of the repeat before `following` the stacks of their weights."""
    for path, module in nnx.iter_modules(pattern):
        for name, place in getattr(module, "stacked", {}).items():
            found = StackedWeight(stacks[path, name], in_repeat(following), implementation)
            setattr(module, place, found)
