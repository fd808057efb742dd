"""The timed op and its check, shared by the benches of delta-rule decode.

Timed are states that barely decay, so that they stay the random ones that were drawn; the gates of
a model would leave one token's v k^T of them.

Operands are (arrays of rows .., packed weights [layers, W], slots [B]); pools are (conv_state,
state), each [layers, Z, ..].
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp
from jaxattn.core.dispatch import Implementation

BARELY = 1e-6  # of a model's decay: 10,000 calls leave 0.9 of a state

# Operands and pools, with a factor on the rates of decay.
Inputs = Callable[[float], tuple[tuple[Any, ...], tuple[Any, ...]]]


def decode(
    layer_decode: Callable[..., Any], inputs: Inputs, implementation: Implementation | None
) -> TimedOp:
    """The layer's step over pools that are its state."""
    operands, pools = inputs(BARELY)

    def call(operands: Any, pools: Any, layer: Any) -> tuple[Any, Any]:
        *given, slots = operands
        y, *after = layer_decode(*given, *pools, slots, layer=layer, implementation=implementation)
        return y, tuple(after)

    return TimedOp(call, [operands], pools, layers=operands[-2].shape[0])


def check(op: TimedOp, inputs: Inputs, exact_layer: Callable[..., Any]) -> float:
    """Relative L2 error of the first and the last row after a call with a model's decay, the
    greatest of y and the states, against float64. Leaves the op as it was.

    Args:
        exact_layer: y, conv_state and state of one row, from that row's operands, a layer's
            weights and the row's states.
    """
    timed = op.operands
    operands, op.state = inputs(1.0)
    op.operands = [operands]
    *of_rows, weights, slots = operands

    def states(row: int) -> tuple[jax.Array, ...]:
        return tuple(pool[0, slots[row]] for pool in op.state)

    rows = sorted({0, len(slots) - 1})
    expected = [
        exact_layer(
            *map(numpy_reference.exact, (*(x[row] for x in of_rows), weights[0], *states(row)))
        )
        for row in rows
    ]
    y = op(0)
    errors = [
        numpy_reference.relative_l2(actual, exact)
        for row, each in zip(rows, expected, strict=True)
        for actual, exact in zip((y[row], *states(row)), each, strict=True)
    ]
    op.operands = timed
    _, op.state = inputs(BARELY)
    return numpy_reference.worst(errors)
