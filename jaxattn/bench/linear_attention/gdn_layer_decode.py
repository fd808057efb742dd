"""Decode of a gated delta net layer between its projections, checked and timed.

Times are those of `timing`. Every call takes the same projections and updates the states of the
next layer; there are more states than fit in L2. layer_decode_check.py explains the decay of the
states.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp, columns, rotation
from jaxattn.bench.linear_attention import layer_decode_check
from jaxattn.core.dispatch import Implementation
from jaxattn.ops.gdn.layer_decode import gated_delta_net_decode, pack_gdn_weights

DIM = 128
# FLOP of the recurrence per token and value head: the decay, k S, the update, q S.
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


def label(shape: Shape) -> dict[str, str]:
    return {"B,Hk,Hv,S": ",".join(map(str, shape[:4])), "state": shape[4]}


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def inputs(
    batch: int, key_heads: int, value_heads: int, tokens: int, dtype: str, decay: float
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(qkvz, ba, weights, slots), (conv_state, state), with more layers than fit in L2.

    `decay` is a factor on the decay rates; with 1 they are a model's initial rates.
    """
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


def decode(shape: Shape, implementation: Implementation | None) -> TimedOp:
    return layer_decode_check.decode(
        gated_delta_net_decode, partial(inputs, *shape), implementation
    )


def check(op: TimedOp, shape: Shape) -> float:
    return layer_decode_check.check(op, partial(inputs, *shape), numpy_reference.delta_net)


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time."""
    batch, _, value_heads, tokens, dtype = shape
    op = decode(shape, implementation)
    error = check(op, shape)
    # XLA's implementation rounds to bfloat16 after the convolution and the recurrence.
    if not error < 1e-2:
        raise AssertionError(f"gdn decode {shape}: relative error {error} against float64")
    time, _ = times = op.times()
    del op  # frees its pools for XLA's
    xla_columns = {"xla us": decode(shape, "xla").time() * 1e6} if xla else {}
    moved = 2 * batch * value_heads * DIM * DIM * jnp.dtype(dtype).itemsize
    return {
        **label(shape),
        **columns("us", times),
        **xla_columns,
        "TFLOP/s": FLOP * batch * tokens * value_heads / time / 1e12,
        "GB/s": moved / time / 1e9,
        "relative error": error,
    }
