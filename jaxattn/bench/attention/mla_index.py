"""`python -m jaxattn.bench mla-index`: the indexer's exact top k, checked and timed shape by shape.

Times are those of `timing`. `xla us` is `jax.lax.top_k` over XLA's scores, and a sort of the
positions. `of bytes` is the time relative to one read of the rows' keys, for all tokens together,
at READ bytes per second.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxattn import mla
from jaxattn.bench.attention.shuffled_pages import shuffled_pages
from jaxattn.bench.harness.numpy_reference import exact
from jaxattn.bench.harness.timing import TimedOp, columns, rotation
from jaxattn.core.dispatch import Implementation

PAGE, DIM = 64, 128
READ = 4.0e12  # bytes per second that a pure read of the keys is assumed to reach
# B, S, Hi, T including the S new tokens, top k and the keys' dtype.
Shape = tuple[int, int, int, int, int, str]
BF16, E4M3 = "bfloat16", "float8_e4m3fn"
SHAPES: tuple[Shape, ...] = (
    (1, 1, 64, 131072, 2048, BF16),
    (32, 1, 64, 131072, 2048, BF16),
    (1, 4096, 64, 36864, 2048, BF16),
    (1, 1, 64, 131072, 2048, E4M3),
    (32, 1, 64, 131072, 2048, E4M3),
)
MORE_SHAPES: tuple[Shape, ...] = (
    (1, 1, 64, 999936, 2048, BF16),
    (32, 4, 64, 32768, 2048, BF16),
    (128, 2, 32, 8192, 2048, BF16),
)
SMALL_SHAPES: tuple[Shape, ...] = ((2, 2, 8, 640, 512, BF16), (1, 1, 8, 640, 512, E4M3))


def label(shape: Shape) -> dict[str, str]:
    return {"B,S,H,T,k": ",".join(map(str, shape[:5])), "keys": shape[5]}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def inputs(batch: int, q_len: int, heads: int, tokens: int, stored: str) -> tuple[Any, ...]:
    """Normal data on shuffled pages, with so many layers that L2 does not hold the keys.

    The last item is a scale per token for FP8 keys, else None.
    """
    pages, numbers = -(-tokens // PAGE), jax.random.split(jax.random.key(0), 4)
    layers = rotation(batch * pages * PAGE * DIM * jnp.dtype(stored).itemsize, max_inputs=8)
    q = jax.random.normal(numbers[0], (batch, q_len, heads, DIM), jnp.bfloat16)
    weights = jax.random.normal(numbers[1], (batch, q_len, heads)) * heads**-0.5
    shape = layers, batch * pages, PAGE
    keys = jax.random.normal(numbers[2], (*shape, DIM), jnp.bfloat16).astype(stored)
    scale = jnp.ones(shape) if stored == E4M3 else None
    return q, weights, keys, *shuffled_pages(numbers[3], batch, pages, tokens), scale


def top_k_of_scores(
    q: jax.Array, weights: jax.Array, keys: jax.Array, tables: jax.Array, lens: jax.Array,
    *, top_k: int, layer: Any, k_scale: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """The alternative in plain JAX: XLA's scores of 16 tokens at a time, and `jax.lax.top_k`."""

    def row(given: Any) -> jax.Array:
        q, weights, table, length = given
        held = keys[layer, table].astype(q.dtype).reshape(-1, DIM)
        scale = 1.0 if k_scale is None else k_scale[layer, table].reshape(-1)
        last = length - len(q) + jnp.arange(len(q))

        def token(given: Any) -> jax.Array:
            q, weights, last = given
            products = jnp.einsum("hd,td->ht", q, held, preferred_element_type=jnp.float32)
            scores = weights @ jnp.maximum(products, 0) * scale
            seen = jnp.arange(len(held)) <= last
            return jnp.sort(lax.top_k(jnp.where(seen, scores, -jnp.inf), top_k)[1])

        return lax.map(token, (q, weights, last), batch_size=min(len(q), 16))

    return lax.map(row, (q, weights, tables, lens))


def index(arrays: tuple[Any, ...], top_k: int, implementation: Implementation | None) -> TimedOp:
    def call(operands: Any, state: Any, layer: Any) -> Any:
        *given, scale = operands
        more: Any = {"top_k": top_k, "layer": layer, "k_scale": scale}
        if implementation == "xla":
            return top_k_of_scores(*given, **more), state
        return mla.mla_index(*given, implementation=implementation, **more), state

    return TimedOp(call, [arrays], layers=arrays[2].shape[0])


def check(op: TimedOp, top_k: int) -> float:
    """The largest lead of a key that was left out over one that was taken, against float64.

    It is relative to the standard deviation of the scores, and covers the first and the last token
    of the first and the last row.

    Raises:
        AssertionError: the lead is larger than rounding explains, or positions do not ascend.
    """
    q, weights, keys, tables, lens, scale = op.operands[0]
    places, worst = op(0), 0.0
    batch, q_len = q.shape[:2]
    for row in {0, batch - 1}:
        held = exact(keys[0, tables[row]]).reshape(-1, DIM)
        factor = 1.0 if scale is None else exact(scale[0, tables[row]]).reshape(-1, 1)
        for token in {0, q_len - 1}:
            seen = int(lens[row]) - q_len + token + 1
            products = np.maximum((held * factor)[:seen] @ exact(q[row, token]).T, 0)
            scores = products @ exact(weights[row, token])
            taken = np.asarray(places[row, token])
            if (np.diff(taken) <= 0).any() or not 0 <= taken[0] <= taken[-1] < seen:
                raise AssertionError(f"mla-index: row {row}, token {token}: {taken}")
            left = np.delete(scores, taken)
            worst = max(worst, (left.max() - scores[taken].min()) / scores.std())
    if not worst < 1e-4:
        raise AssertionError(f"mla-index: a key {worst} better than one that was taken is left out")
    return worst


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time."""
    batch, q_len, heads, tokens, top_k, stored = shape
    arrays = inputs(batch, q_len, heads, tokens, stored)
    op = index(arrays, top_k, implementation)
    error = check(op, top_k)
    time, _ = times = op.times()
    xla_columns = {"xla us": index(arrays, top_k, "xla").time() * 1e6} if xla else {}
    moved = batch * tokens * (DIM * jnp.dtype(stored).itemsize + 4 * (stored == E4M3))
    seen = sum(tokens - q_len + token + 1 for token in range(q_len))
    return {
        **label(shape),
        **columns("us", times),
        **xla_columns,
        "TFLOP/s": 2 * batch * heads * DIM * seen / time / 1e12,
        "GB/s": moved / time / 1e9,
        "of bytes": time / (moved / READ),
        "relative error": error,
    }
