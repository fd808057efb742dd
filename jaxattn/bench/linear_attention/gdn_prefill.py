"""`python -m jaxattn.bench gdn`: chunked gated delta rule prefill, checked and timed.

Times are those of `timing`; `ms` includes the small kernels that XLA generates for the plan and the
gates. Profiled calls take inputs in turn that do not fit in L2. The loop of `call ms` has the same
inputs in each call, as the baselines do, so up to about 4,000 tokens come from L2. `weak ms` is
`ms` with gates scaled by `WEAK`: it shows what a kernel gains by skipping the state that strong
decay forgets.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxattn import gdn
from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp, columns, rotation
from jaxattn.core.dispatch import Implementation

DIM = 128
# FLOP of the recurrence in chunks of 64, per token and value head: K K^T, K S, X W, Q K^T, Q S,
# P U and K^T U.
FLOP = 2 * 64 * DIM * 4 + 2 * DIM * DIM * 3
# Hk, Hv, sequences, tokens of each
Shape = tuple[int, int, int, int]
SHAPES: tuple[Shape, ...] = (
    (2, 8, 1, 8192),
    (2, 8, 8, 1024),
    (16, 32, 1, 8192),
    (16, 32, 4, 8192),
    (16, 64, 4, 8192),
)
MORE_SHAPES: tuple[Shape, ...] = (
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
SMALL_SHAPES: tuple[Shape, ...] = ((1, 2, 2, 70),)
# Tokens to check at a sequence's start and end. A gate is at most log sigmoid(1) = -0.31, so half
# as many tokens leave exp(-160) of an earlier state. So the end does not need the tokens before it.
CHECKED = 1024
WEAK = 0.002


def label(shape: Shape) -> dict[str, str]:
    return {"Hk/Hv": f"{shape[0]}/{shape[1]}", "sequences": f"{shape[2]}x{shape[3]}"}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def inputs(
    key_heads: int, value_heads: int, count: int, length: int, seed: int = 0
) -> dict[str, Any]:
    """Random operands of `count` packed sequences; gates log sigmoid(uniform) as in FLA's tests."""
    keys = jax.random.split(jax.random.key(seed), 5)
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


def moved(key_heads: int, value_heads: int, count: int, length: int) -> int:
    """Bytes of q, k, v, the gates, beta, the output and the final states."""
    token = 2 * 2 * key_heads * DIM + 2 * 2 * value_heads * DIM + 2 * 4 * value_heads
    return count * (length * token + value_heads * DIM * DIM * 4)


def prefill(shape: Shape, implementation: Implementation | None) -> TimedOp:
    def call(operands, state, _):
        rule = gdn.chunk_gated_delta_rule(
            **operands, use_qk_l2norm=True, output_final_state=True, implementation=implementation
        )
        return rule, state

    return TimedOp(call, [inputs(*shape, seed=seed) for seed in range(rotation(moved(*shape)))])


def check(op: TimedOp, shape: Shape) -> float:
    """The `error` of a call's result."""
    out, final = op(0)
    return error(op.operands[0], out, final, shape)


def error(
    operands: dict[str, Any],
    out: jax.Array,
    final: jax.Array,
    shape: Shape,
    after: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> float:
    """The largest relative L2 error of some value heads, against float64.

    It covers the first tokens, the last tokens and the final state.

    Args:
        after: Applied to the expected outputs and the operand z before the comparison.
    """
    key_heads, value_heads, count, length = shape
    heads = np.unique([0, value_heads // 2, value_heads - 1])
    key_heads_of = heads // (value_heads // key_heads)
    few = min(length, CHECKED)
    names = ("q", "k", "v", "g", "beta", *(["z"] if after else []))
    arrays = {name: operands[name] for name in names} | {"out": out}
    cut = jax.jit(lambda x, at: jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x[0], at, few), x))

    def compare(first: int) -> tuple[float, np.ndarray]:
        """(error, final state) of `few` tokens from `first`.

        Unless a sequence begins there, the first half only settles the state.
        """
        tokens = {name: numpy_reference.exact(x) for name, x in cut(arrays, first).items()}
        q, k = (tokens[name][:, key_heads_of] for name in "qk")
        v, g, beta, actual = (tokens[name][:, heads] for name in ("v", "g", "beta", "out"))
        expected, state = numpy_reference.delta_rule(
            q, k, v, g, beta, np.zeros((len(heads), DIM, DIM))
        )
        if after:
            expected = after(expected, tokens["z"][:, heads])
        settled = few // 2 if first % length else 0
        return numpy_reference.relative_l2(actual[settled:], expected[settled:]), state

    start, _ = compare(0)
    end, state = compare(count * length - few)
    return numpy_reference.worst([start, end, numpy_reference.relative_l2(final[-1][heads], state)])


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time."""
    _, value_heads, count, length = shape
    op = prefill(shape, implementation)
    error = check(op, shape)
    if not error < 5e-3:
        raise AssertionError(f"gdn prefill {shape}: relative L2 {error} against float64")
    time, _ = times = op.times()
    op.operands = [each | {"g": WEAK * each["g"]} for each in op.operands]
    weak = op.time()
    del op  # frees memory for XLA's intermediates
    xla_columns = {"xla ms": prefill(shape, "xla").time() * 1e3} if xla else {}
    return {
        **label(shape),
        **columns("ms", times),
        "weak ms": weak * 1e3,
        **xla_columns,
        "TFLOP/s": FLOP * count * length * value_heads / time / 1e12,
        "GB/s": moved(*shape) / time / 1e9,
        "relative L2": error,
    }
