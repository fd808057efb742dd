"""`python -m jaxattn.bench gdn`: chunked gated delta rule prefill, checked and timed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn import gdn
from jaxattn.bench.timing import per_call
from jaxattn.dispatch import Implementation

DIM = 128
# What the recurrence in chunks of 64 costs a token and value head: K K^T, K S, X W, Q K^T, Q S,
# P U and K^T U.
FLOP = 2 * 64 * DIM * 4 + 2 * DIM * DIM * 3
# Hk, Hv, sequences, tokens of each
SHAPES = (
    (2, 8, 1, 8192),
    (2, 8, 8, 1024),
    (16, 32, 1, 8192),
    (16, 32, 4, 8192),
    (16, 64, 4, 8192),
)
MORE_SHAPES = (
    (2, 8, 1, 32768),
    (2, 8, 1, 2048),
    (8, 32, 1, 32768),
    (8, 32, 4, 8192),
    (8, 32, 4, 2048),
    (16, 32, 1, 32768),
    (16, 32, 8, 1024),
    (16, 64, 1, 32768),
    (16, 64, 1, 2048),
    (16, 16, 1, 32768),
)
SMALL_SHAPES = ((1, 2, 2, 70),)


def inputs(key_heads: int, value_heads: int, count: int, length: int) -> dict[str, Any]:
    """Random operands of `count` packed sequences; gates of log sigmoid(uniform), as FLA's tests
    have them."""
    keys = jax.random.split(jax.random.key(0), 5)
    tokens = count * length
    q, k = (jax.random.normal(keys[i], (1, tokens, key_heads, DIM), jnp.bfloat16) for i in (0, 1))
    return {
        "q": q,
        "k": k,
        "v": jax.random.normal(keys[2], (1, tokens, value_heads, DIM), jnp.bfloat16),
        "g": jax.nn.log_sigmoid(jax.random.uniform(keys[3], (1, tokens, value_heads))),
        "beta": jax.random.uniform(keys[4], (1, tokens, value_heads)),
        "cu_seqlens": length * jnp.arange(count + 1, dtype=jnp.int32),
    }


def relative_l2(actual: jax.Array, expected: jax.Array) -> float:
    return float(jnp.linalg.norm(actual.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))


def moved(key_heads: int, value_heads: int, count: int, length: int) -> int:
    """Bytes of q, k, v, the gates, beta, the output and the final states."""
    token = 2 * 2 * key_heads * DIM + 2 * 2 * value_heads * DIM + 2 * 4 * value_heads
    return count * (length * token + value_heads * DIM * DIM * 4)


def measure(
    shape: tuple[int, int, int, int],
    implementation: Implementation | None,
    *,
    xla: bool = False,
) -> dict:
    """A row of the table; with `xla` also XLA's time."""
    key_heads, value_heads, count, length = shape
    operands = inputs(*shape)
    prefill = functools.partial(
        gdn.chunk_gated_delta_rule,
        cu_seqlens=operands.pop("cu_seqlens"),
        use_qk_l2norm=True,
        output_final_state=True,
    )
    exact = {name: x.astype(jnp.float32) for name, x in operands.items()}
    expected = jax.jit(functools.partial(prefill, implementation="xla"))(**exact)
    run = functools.partial(prefill, implementation=implementation)
    actual = jax.jit(run)(**operands)
    error = max(relative_l2(*pair) for pair in zip(actual, expected, strict=True))
    if not error < 5e-3:
        raise AssertionError(f"gdn prefill {shape}: relative L2 {error} against float32")
    del exact, expected, actual

    def time_of(implementation, operands):
        op = functools.partial(prefill, implementation=implementation)

        # The output takes the values' place, so that every call waits for the one before it.
        def step(operands, i):
            return {**operands, "v": op(**operands)[0]}

        return per_call(step, operands, calls=8)

    time = time_of(implementation, operands)
    beside = {}
    if xla:  # on operands of its own: the others were donated
        fresh = inputs(*shape)
        del fresh["cu_seqlens"]
        beside = {"xla ms": time_of("xla", fresh) * 1e3}
    return {
        "Hk/Hv": f"{key_heads}/{value_heads}",
        "sequences": f"{count}x{length}",
        "ms": time * 1e3,
        **beside,
        "TFLOP/s": FLOP * count * length * value_heads / time / 1e12,
        "GB/s": moved(*shape) / time / 1e9,
        "relative L2": error,
    }
