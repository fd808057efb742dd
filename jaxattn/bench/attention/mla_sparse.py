"""`python -m jaxattn.bench mla-sparse`: MLA attention to lists of positions, checked and timed.

Each token attends to K positions of its row. They are drawn from all positions that the token sees,
in ascending order like the indexer's. With S up to 8 the tokens are those of a decode step, with
more those of a prompt chunk. Times are those of `timing`. GB/s counts the latents of each token
separately, as if tokens shared none.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxattn import mla
from jaxattn.bench.attention.shuffled_pages import shuffled_pages
from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp, columns, rotation
from jaxattn.core.cache.formats import LatentFormat
from jaxattn.core.dispatch import Implementation

PAGE, DIM, RANK = 64, 576, 512
SCALE = 192**-0.5
MOST_DECODED = 8  # tokens of a row in a decode step
# B, S, H, T including the S new tokens, K and the cache's dtype.
Shape = tuple[int, int, int, int, int, str]
BF16, SCALED = "bfloat16", "uint8"
SHAPES: tuple[Shape, ...] = (
    (128, 2, 128, 32768, 2048, SCALED),
    (128, 2, 128, 32768, 2048, BF16),
    (1, 2, 128, 32768, 2048, SCALED),
    (8, 2, 128, 32768, 2048, SCALED),
    (1, 4096, 128, 32768, 2048, BF16),
)
MORE_SHAPES: tuple[Shape, ...] = (
    (1, 4096, 128, 32768, 2048, SCALED),
    (128, 2, 16, 32768, 2048, SCALED),
    (128, 1, 64, 32768, 2048, SCALED),
    (1, 1, 128, 999936, 2048, SCALED),
)
SMALL_SHAPES: tuple[Shape, ...] = ((2, 2, 4, 200, 64, SCALED), (1, 9, 4, 200, 64, BF16))


def label(shape: Shape) -> dict[str, str]:
    return {"B,S,H,T,K": ",".join(map(str, shape[:5])), "cache": shape[5]}


def layers_of(batch: int, q_len: int, tokens: int, top_k: int, cache: str) -> int:
    """The number of layers whose listed latents together do not fit in L2."""
    listed = min(q_len * top_k, tokens)
    return rotation(batch * listed * LatentFormat(cache).nbytes, max_inputs=16)


@functools.partial(jax.jit, static_argnums=range(6))
def inputs(
    batch: int, q_len: int, heads: int, tokens: int, top_k: int, cache: str
) -> tuple[jax.Array, ...]:
    """Normal data on shuffled pages, and the lists of positions."""
    latents, pages = LatentFormat(cache), -(-tokens // PAGE)
    layers = layers_of(batch, q_len, tokens, top_k, cache)
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (batch, q_len, heads, DIM), jnp.bfloat16)
    drawn = jax.random.normal(keys[1], (layers, batch * pages, PAGE, DIM), jnp.bfloat16)

    def chosen(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        key, visible = given
        order = jnp.where(jnp.arange(tokens) < visible, jax.random.uniform(key, (tokens,)), 2.0)
        return jnp.sort(jnp.argsort(order)[:top_k]).astype(jnp.int32)

    visible = jnp.tile(tokens - q_len + 1 + jnp.arange(q_len), batch)
    lists = lax.map(chosen, (jax.random.split(keys[3], len(visible)), visible), batch_size=64)
    indices = lists.reshape(batch, q_len, top_k)
    return q, latents.pack(drawn), *shuffled_pages(keys[2], batch, pages, tokens), indices


def attend(arrays: tuple[jax.Array, ...], implementation: Implementation | None) -> TimedOp:
    few = arrays[0].shape[1] <= MOST_DECODED
    run = mla.mla_sparse_decode if few else mla.mla_sparse_prefill

    def call(operands: Any, state: Any, layer: Any) -> Any:
        return run(*operands, scale=SCALE, layer=layer, implementation=implementation), state

    return TimedOp(call, [arrays], layers=arrays[1].shape[0])


def check(op: TimedOp, shape: Shape) -> float:
    """The largest relative L2 error of up to 16 heads, against float64.

    It covers the first and the last token of the first and the last row.

    Raises:
        AssertionError: an error of the output or the LSE is larger than rounding explains.
    """
    q, cache, tables, _, indices = op.operands[0]
    out, lse = op(0)
    heads = np.unique(np.linspace(0, shape[2] - 1, 16).astype(int))
    errors, lse_errors = [], []
    for row in {0, shape[0] - 1}:
        for token in {0, shape[1] - 1}:
            listed = indices[row, token]
            stored = cache[0, tables[row, listed // PAGE], listed % PAGE]
            kv = numpy_reference.exact(LatentFormat(shape[5]).unpack(stored))
            queries = numpy_reference.exact(q[row, token])[heads]
            last = np.full(len(heads), len(kv) - 1)
            expected, expected_lse = numpy_reference.attention(
                queries, kv, kv[:, :RANK], last, SCALE
            )
            actual = np.asarray(out[row, token])[heads]
            errors.append(numpy_reference.relative_l2(actual, expected))
            actual_lse = numpy_reference.exact(lse[row, token])[heads]
            lse_errors.append(np.abs(actual_lse - expected_lse).max())
    return numpy_reference.accepted(
        f"mla-sparse {shape}", errors, lse_errors, below=4e-3, lse_below=1e-4
    )


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time."""
    batch, q_len, heads, _, top_k, cache = shape
    arrays = inputs(*shape)
    op = attend(arrays, implementation)
    error = check(op, shape)
    time, _ = times = op.times()
    xla_columns = {"xla us": attend(arrays, "xla").time() * 1e6} if xla else {}
    rows = batch * q_len
    flops = 2 * rows * heads * top_k * (DIM + RANK)
    moved = rows * (top_k * LatentFormat(cache).nbytes + heads * (DIM + RANK) * 2)
    return {
        **label(shape),
        **columns("us", times),
        **xla_columns,
        "TFLOP/s": flops / time / 1e12,
        "GB/s": moved / time / 1e9,
        "relative error": error,
    }
