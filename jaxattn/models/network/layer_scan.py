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
from jaxtyping import Array

from jaxattn.core.dispatch import Implementation
from jaxattn.core.layer_index import LayerIndex
from jaxattn.nn.linear import StackedWeight


def scan_layers[Carry](
    repeats: int,
    body: Callable[[Carry, Any], Carry],
    carry: Carry,
    stacks: Any,
    unrolled: bool = False,
    repeats_per_iteration: int = 1,
) -> Carry:
    """Runs `carry = body(carry, (i + 1, *stacks[i]))` for each repeat, with one counter.

    An iteration of the loop runs `repeats_per_iteration` repeats, which may be one CUDA graph;
    `repeats_per_iteration` must divide `repeats`.

    If unrolled, the layers' indices are constants. Unrolling saves a launch for the counter, of 1.2
    us per repeat, and 1 us of host time between repeats (H200). Launches of the same kernel
    (`hopper/build/trace_cache.py`) are still lowered and compiled only once.

    A `lax.scan` has its own counter in addition to that of the layers' indices. XLA increments and
    copies both in every repeat, which takes 3 us on an H200. A use of i after i + 1 is computed
    also costs a copy, so the layers' indices derive from i + 1.
    """

    def step(looped: tuple[Array, Carry]) -> tuple[Array, Carry]:
        i, carry = looped
        last = i + repeats_per_iteration
        for left in reversed(range(repeats_per_iteration)):
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


def in_repeat(next_repeat: Array) -> LayerIndex:
    """Returns a layer's index in the stacks of its place in the pattern."""
    return LayerIndex(next_repeat, 1, -1)


def linear_stacks_of(pattern: nnx.Module) -> dict[Any, Array]:
    """Returns the weights of a segment that its modules read in their stacks, [repeats, ...] each.

    Keys are the module's place and the weight's name.
    """
    return {
        (path, name): getattr(module, name)[...]
        for path, module in nnx.iter_modules(pattern)
        for name in getattr(module, "stacked", ())
    }


def attach_weight_stacks(
    pattern: nnx.Module,
    stacks: dict[Any, Array],
    next_repeat: Array,
    implementation: Implementation | None,
) -> None:
    """Gives the modules of the repeat before `next_repeat` the stacks of their weights."""
    for path, module in nnx.iter_modules(pattern):
        for name, place in getattr(module, "stacked", {}).items():
            found = StackedWeight(stacks[path, name], in_repeat(next_repeat), implementation)
            setattr(module, place, found)
