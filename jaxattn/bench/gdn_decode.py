"""A gated delta net layer's decoding between its projections, checked and timed.

Times are `timing`'s. Every call has the same projections and updates the next layer's states; there
are as many as do not fit in L2. Timed are states that barely decay, so that they stay the random
ones that were drawn; the gates of a model would leave one token's v k^T of them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.bench import reference
from jaxattn.bench.timing import Op, columns, rotation
from jaxattn.core.dispatch import Implementation
from jaxattn.ops.gdn.layer import gated_delta_net_decode, pack_gdn_weights

DIM = 128
# Of the recurrence, a token and value head: the decay, k S, the update, q S.
FLOP = DIM * DIM * (1 + 2 + 2 + 2)
# B, Hk, Hv, S, the state's dtype
Shape = tuple[int, int, int, int, str]
SHAPES: tuple[Shape, ...] = (
    (256, 16, 32, 1, "float32"),
    (64, 16, 64, 1, "float32"),
    (32, 16, 32, 1, "float32"),
    (1, 16, 32, 1, "float32"),
    (256, 16, 32, 1, "bfloat16"),
    (32, 16, 32, 1, "bfloat16"),
    (1, 16, 32, 1, "bfloat16"),
    (32, 16, 32, 4, "float32"),
)
MORE_SHAPES: tuple[Shape, ...] = ()
SMALL_SHAPES: tuple[Shape, ...] = ((2, 1, 2, 1, "float32"),)


BARELY = 1e-6  # of a model's decay: 10,000 calls leave 0.9 of a state


def label(shape: Shape) -> dict[str, str]:
    return {"B,Hk,Hv,S": ",".join(map(str, shape[:4])), "state": shape[4]}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def inputs(
    batch: int, key_heads: int, value_heads: int, tokens: int, dtype: str, decay: float
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(qkvz, ba, weights, slots), (conv_state, state): as many layers as keep states out of L2.
    `decay` is a factor on the rates, which at 1 are those that models begin with."""
    layers = rotation(batch * value_heads * DIM * DIM * jnp.dtype(dtype).itemsize)
    channels = (2 * key_heads + value_heads) * DIM
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    rates = jax.random.uniform(next(keys), (layers, value_heads), minval=0.1, maxval=16.0)
    weights = pack_gdn_weights(
        jnp.log(rates * decay),
        normal(layers, value_heads, dtype=jnp.float32),
        normal(layers, DIM, dtype=jnp.float32),
        normal(layers, channels, 4) / 2,
    )
    qkvz = normal(batch, tokens, channels + value_heads * DIM)
    ba = normal(batch, tokens, 2 * value_heads, dtype=jnp.float32)
    slots = jax.random.permutation(next(keys), batch).astype(jnp.int32)
    conv_state = normal(layers, batch, 3, channels)
    state = normal(layers, batch, value_heads, DIM, DIM, dtype=dtype)
    return (qkvz, ba, weights, slots), (conv_state, state)


def decode(shape: Shape, implementation: Implementation | None) -> Op:
    operands, pools = inputs(*shape, BARELY)

    def call(operands, pools, layer):
        qkvz, ba, weights, slots = operands
        conv, state = pools
        y, conv, state = gated_delta_net_decode(
            qkvz, ba, weights, conv, state, slots, layer=layer, implementation=implementation
        )
        return y, (conv, state)

    return Op(call, [operands], pools, layers=operands[2].shape[0])


def check(op: Op, shape: Shape) -> float:
    """Relative L2 error of the first and the last row after a call with a model's decay, the
    greatest of y and the states, against float64. Leaves the op as it was."""
    timed = op.operands
    (qkvz, ba, weights, slots), op.state = inputs(*shape, 1.0)
    op.operands = [(qkvz, ba, weights, slots)]
    rows = sorted({0, shape[0] - 1})
    expected = [
        reference.delta_net(
            *(reference.exact(x) for x in (qkvz[row], ba[row], weights[0])),
            *(reference.exact(pool[0, slots[row]]) for pool in op.state),
        )
        for row in rows
    ]
    y = op(0)
    errors = [
        reference.relative_l2(actual, exact)
        for row, each in zip(rows, expected, strict=True)
        for actual, exact in zip(
            (y[row], *(pool[0, slots[row]] for pool in op.state)), each, strict=True
        )
    ]
    op.operands = timed
    _, op.state = inputs(*shape, BARELY)
    return reference.worst(errors)


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """A row of the table; with `xla` also XLA's time."""
    batch, _, value_heads, tokens, dtype = shape
    op = decode(shape, implementation)
    error = check(op, shape)
    # XLA's rounds to bfloat16 after the convolution and the recurrence.
    if not error < 1e-2:
        raise AssertionError(f"gdn decode {shape}: relative error {error} against float64")
    time, _ = times = op.times()
    del op  # before XLA's pools
    beside = {"xla us": decode(shape, "xla").time() * 1e6} if xla else {}
    moved = 2 * batch * value_heads * DIM * DIM * jnp.dtype(dtype).itemsize
    return {
        **label(shape),
        **columns("us", times),
        **beside,
        "TFLOP/s": FLOP * batch * tokens * value_heads / time / 1e12,
        "GB/s": moved / time / 1e9,
        "relative error": error,
    }
