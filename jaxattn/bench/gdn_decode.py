"""A gated delta net layer's decoding between its projections, checked and timed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.arena import Arena
from jaxattn.bench.mla import worst_error
from jaxattn.bench.timing import ROTATE_BYTES, per_call
from jaxattn.dispatch import Implementation
from jaxattn.gdn import scratch
from jaxattn.gdn_layer import gated_delta_net_decode, pack_gdn_weights

DIM = 128
# Of the recurrence, a token and value head: the decay, k S, the update, q S.
FLOP = DIM * DIM * (1 + 2 + 2 + 2)
# B, Hk, Hv, S, the state's dtype
SHAPES = (
    (256, 16, 32, 1, "float32"),
    (64, 16, 64, 1, "float32"),
    (32, 16, 32, 1, "float32"),
    (1, 16, 32, 1, "float32"),
    (256, 16, 32, 1, "bfloat16"),
    (32, 16, 32, 1, "bfloat16"),
    (32, 16, 32, 4, "float32"),
)
SMALL_SHAPES = ((2, 1, 2, 1, "float32"),)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def inputs(
    batch: int, key_heads: int, value_heads: int, tokens: int, dtype: str, seed: int = 0
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(qkvz, ba, weights, slots), (conv_state, state): as many layers as keep states out of L2."""
    size = batch * value_heads * DIM * DIM * jnp.dtype(dtype).itemsize
    layers = max(1, min(64, ROTATE_BYTES // size))
    channels = (2 * key_heads + value_heads) * DIM
    keys = iter(jax.random.split(jax.random.key(seed), 9))

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    rates = jax.random.uniform(next(keys), (layers, value_heads), minval=0.1, maxval=16.0)
    weights = pack_gdn_weights(
        jnp.log(rates),
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


def measure(
    shape: tuple[int, int, int, int, str],
    implementation: Implementation | None,
    *,
    xla: bool = False,
) -> dict:
    """A row of the table; with `xla` also XLA's time."""
    batch, _, value_heads, tokens, dtype = shape
    (qkvz, ba, weights, slots), pools = inputs(*shape)
    layers = weights.shape[0]
    spec = scratch(batch=batch, q_len=tokens, num_v_heads=value_heads, dtype=qkvz.dtype)

    def decode(pools, arena, layer, implementation):
        conv_state, state = pools
        return gated_delta_net_decode(
            qkvz,
            ba,
            weights,
            conv_state,
            state,
            slots,
            layer=layer,
            arena=arena,
            implementation=implementation,
        )

    def run(implementation):
        step = functools.partial(decode, layer=0, implementation=implementation)
        y, conv_state, state, _ = jax.jit(step)(pools, Arena.allocate(spec))
        return y, conv_state[0], state[0]

    error = max(map(worst_error, run(implementation), run("xla")))
    # The reference rounds to bfloat16 after the convolution and the recurrence.
    if not error < 1e-2:
        raise AssertionError(f"gdn decode {shape}: relative error {error} against the reference")

    moved = 2 * batch * value_heads * DIM * DIM * jnp.dtype(dtype).itemsize

    def time_of(implementation, pools):
        def step(carry, i):
            pools, arena = carry
            _, *pools, arena = decode(pools, arena, i % layers, implementation)
            return tuple(pools), arena

        # Enough calls that what starts an executable, up to a millisecond, does not count.
        calls = max(16, min(1024, 2**38 // moved)) if implementation != "xla" else 16
        return per_call(step, (pools, Arena.allocate(spec)), calls=calls)

    time = time_of(implementation, pools)
    # The pools were donated. XLA's own are made where they are timed.
    beside = {"xla us": time_of("xla", inputs(*shape)[1]) * 1e6} if xla else {}
    return {
        "B,Hk,Hv,S": ",".join(map(str, shape[:4])),
        "state": dtype,
        "us": time * 1e6,
        **beside,
        "TFLOP/s": FLOP * batch * tokens * value_heads / time / 1e12,
        "GB/s": moved / time / 1e9,
        "relative error": error,
    }
