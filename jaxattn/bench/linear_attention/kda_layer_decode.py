"""Decode of a Kimi Delta Attention layer between its projections, checked and timed.

Times are those of `timing`, by the method of gdn_layer_decode.py. `gdn us` is the time of a gated
delta net with as many heads, in the same run. KDA adds 128 exponentials per head for its decay per
channel, but no state.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp, columns, rotation
from jaxattn.bench.linear_attention import gdn_layer_decode, layer_decode_check
from jaxattn.core.dispatch import Implementation
from jaxattn.ops.kda.layer_decode import kimi_delta_attention_decode, pack_kda_weights

DIM = 128
# B, H, S
Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = ((1, 32, 1), (32, 32, 1), (128, 32, 1), (32, 32, 4))
MORE_SHAPES: tuple[Shape, ...] = ((8, 32, 1), (256, 32, 1), (128, 16, 1))
SMALL_SHAPES: tuple[Shape, ...] = ((2, 1, 1),)


def label(shape: Shape) -> dict[str, str]:
    return {"B,H,S": ",".join(map(str, shape))}


@partial(jax.jit, static_argnums=(0, 1, 2))
def inputs(
    batch: int, heads: int, tokens: int, decay: float
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(qkv, f, b, gate, weights, slots), (conv_state, state), with more layers than fit in L2.

    `decay` is a factor on the decay rates.
    """
    layers, width = rotation(batch * heads * DIM * DIM * 4), heads * DIM
    keys = iter(jax.random.split(jax.random.key(0), 12))

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    rates = jax.random.uniform(next(keys), (layers, heads), minval=0.1, maxval=16.0)
    weights = pack_kda_weights(
        jnp.log(rates * decay),
        normal(layers, width, dtype=jnp.float32),
        normal(layers, DIM, dtype=jnp.float32),
        normal(layers, 3 * width, 4) / 2,
    )
    slots = jax.random.permutation(next(keys), batch).astype(jnp.int32)
    operands = (
        normal(batch, tokens, 3 * width),
        normal(batch, tokens, width, dtype=jnp.float32),
        normal(batch, tokens, heads, dtype=jnp.float32),
        normal(batch, tokens, width),
        weights,
        slots,
    )
    pools = normal(layers, batch, 3, 3 * width), normal(layers, batch, heads, DIM, DIM)
    return operands, (pools[0], pools[1].astype(jnp.float32))


def decode(shape: Shape, implementation: Implementation | None) -> TimedOp:
    layer = kimi_delta_attention_decode
    return layer_decode_check.decode(layer, partial(inputs, *shape), implementation)


def check(op: TimedOp, shape: Shape) -> float:
    return layer_decode_check.check(
        op, partial(inputs, *shape), numpy_reference.kimi_delta_attention
    )


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time."""
    batch, heads, tokens = shape
    op = decode(shape, implementation)
    error = check(op, shape)
    # XLA's implementation rounds to bfloat16 after the convolution and the recurrence.
    if not error < 1e-2:
        raise AssertionError(f"kda decode {shape}: relative error {error} against float64")
    time, _ = times = op.times()
    del op  # frees its pools for those of the next ops
    xla_columns = {"xla us": decode(shape, "xla").time() * 1e6} if xla else {}
    of_heads = gdn_layer_decode.decode((batch, heads, heads, tokens, "float32"), implementation)
    return {
        **label(shape),
        **columns("us", times),
        "gdn us": of_heads.time() * 1e6,
        **xla_columns,
        "TFLOP/s": gdn_layer_decode.FLOP * batch * tokens * heads / time / 1e12,
        "GB/s": 2 * batch * heads * DIM * DIM * 4 / time / 1e9,
        "relative error": error,
    }
