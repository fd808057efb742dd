"""The timed op and its check, shared by the benches of delta-rule decode.

The timed states decay only slightly, so that they keep their random values. With a model's gates,
only the last token's v k^T would remain of them.

Operands are (arrays with one entry per row, packed weights [layers, W], slots [B]); pools are
(conv_state, state), each [layers, Z, ..].
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp
from jaxattn.core.dispatch import Implementation

BARELY = 1e-6  # of a model's decay rates: after 10,000 calls, 0.9 of a state remains

# Makes operands and pools, given a factor on the decay rates.
Inputs = Callable[[float], tuple[tuple[Any, ...], tuple[Any, ...]]]


def decode(
    layer_decode: Callable[..., Any], inputs: Inputs, implementation: Implementation | None
) -> TimedOp:
    """The layer's decode step as a timed op, with the pools as its state."""
    operands, pools = inputs(BARELY)

    def call(operands: Any, pools: Any, layer: Any) -> tuple[Any, Any]:
        *given, slots = operands
        y, *after = layer_decode(*given, *pools, slots, layer=layer, implementation=implementation)
        return y, tuple(after)

    return TimedOp(call, [operands], pools, layers=operands[-2].shape[0])


def check(op: TimedOp, inputs: Inputs, exact_layer: Callable[..., Any]) -> float:
    """The largest relative L2 error of the first and the last row after one call, against float64.

    The call uses a model's decay; y and the states are compared. The op keeps its operands and
    state.

    Args:
        exact_layer: Returns y, conv_state and state of one row, given that row's operands, a
            layer's weights and the row's states.
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
