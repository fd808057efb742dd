"""`python -m jaxattn.bench gdn`: gated delta rule decode on a state pool, checked and timed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn import gdn
from jaxattn.bench.mla import worst_error
from jaxattn.bench.timing import ROTATE_BYTES, per_call
from jaxattn.dispatch import Implementation

DIM = 128
# B, Hk, Hv
SHAPES = ((256, 16, 32), (64, 16, 64), (32, 16, 32), (1, 16, 32))
SMALL_SHAPES = ((2, 1, 2),)


def inputs(batch: int, key_heads: int, value_heads: int, seed: int = 0) -> tuple[Any, Any]:
    """(operands, state): a pool of as many layers as keep the states out of L2."""
    layers = max(1, min(64, ROTATE_BYTES // (batch * value_heads * DIM * DIM * 4)))
    keys = jax.random.split(jax.random.key(seed), 9)
    q, k = (jax.random.normal(keys[i], (batch, 1, key_heads, DIM), jnp.bfloat16) for i in (0, 1))
    v = jax.random.normal(keys[2], (batch, 1, value_heads, DIM), jnp.bfloat16)
    a, b = (jax.random.normal(keys[i], (batch, 1, value_heads), jnp.bfloat16) for i in (3, 4))
    slots = jax.random.permutation(keys[5], batch).astype(jnp.int32)
    gates = {
        "A_log": jnp.log(jax.random.uniform(keys[6], (value_heads,), minval=0.1, maxval=16.0)),
        "dt_bias": jax.random.normal(keys[7], (value_heads,)),
    }
    state = jax.random.normal(keys[8], (layers, batch, value_heads, DIM, DIM), jnp.float32)
    return (q, k, v, a, b, slots, gates), state


def measure(shape: tuple[int, int, int], implementation: Implementation | None) -> dict:
    batch, _, value_heads = shape
    (q, k, v, a, b, slots, gates), state = inputs(*shape)
    layers = state.shape[0]

    def decode(state, layer, implementation):
        return gdn.gated_delta_rule_decode(
            q, k, v, a, b, state, slots, **gates, layer=layer, implementation=implementation
        )

    expected, after = jax.jit(functools.partial(decode, layer=0, implementation="xla"))(state)
    out, updated = jax.jit(functools.partial(decode, layer=0, implementation=implementation))(state)
    error = max(worst_error(out, expected), worst_error(updated[0], after[0]))
    if not error < 5e-3:
        raise AssertionError(f"gdn {shape}: relative error {error} against the reference")
    del after, updated

    time = per_call(lambda state, i: decode(state, i % layers, implementation)[1], state)
    moved = 2 * batch * value_heads * DIM * DIM * 4
    return {
        "B,Hk,Hv": ",".join(map(str, shape)),
        "us": time * 1e6,
        "GB/s": moved / time / 1e9,
        "relative error": error,
    }
