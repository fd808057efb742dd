"""`python -m jaxattn.bench gqa-prefill`: grouped-query prefill, checked and timed shape by shape.

Times are those of `timing`. Where cuDNN supports the shape, the same run and profile also time
cuDNN's attention, as `jax.nn.dot_product_attention` calls it. The FLOP are those of the causal half
and of the whole prefix. Profiled calls take inputs in turn that do not fit in L2; the loop of `call
us` has the same inputs in each call.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import gqa
from jaxattn.bench.attention.shuffled_pages import shuffled_pages
from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp, columns, rotation
from jaxattn.core.dispatch import Implementation

PAGE = 64
CHECKED = 64  # number of last queries of a row to check


class GqaPrefillShape(NamedTuple):
    """`batch` rows of `tokens` new tokens each, after a cached prefix; `window` 0 is none.

    The bench times `gqa_attention` without a prefix, and `gqa_prefill` with one. Heads of 64 dims
    have sinks like gpt-oss, and heads of 256 a gate like Qwen3-Next.
    """

    batch: int
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    prefix: int = 0
    window: int = 0
    page: int = PAGE


SHAPES: tuple[GqaPrefillShape, ...] = (
    GqaPrefillShape(1, 32, 8, 128, 8192),
    GqaPrefillShape(1, 32, 8, 128, 32768),
    GqaPrefillShape(4, 32, 8, 128, 2048),
    GqaPrefillShape(1, 16, 2, 256, 8192),
    GqaPrefillShape(1, 64, 8, 64, 8192),
    GqaPrefillShape(1, 64, 8, 64, 8192, 0, 128),
    GqaPrefillShape(1, 32, 8, 128, 2048, 30720),
    GqaPrefillShape(2, 32, 8, 128, 512, 4096),
)
MORE_SHAPES: tuple[GqaPrefillShape, ...] = (
    GqaPrefillShape(1, 16, 2, 256, 32768),
    GqaPrefillShape(1, 20, 20, 256, 8192),
    GqaPrefillShape(1, 32, 8, 128, 2048, 30720, 0, 16),
    GqaPrefillShape(1, 16, 2, 256, 2048, 30720),
    GqaPrefillShape(16, 32, 8, 128, 16, 8192),
)
SMALL_SHAPES: tuple[GqaPrefillShape, ...] = (
    GqaPrefillShape(2, 4, 2, 128, 24),
    GqaPrefillShape(1, 4, 2, 64, 9, 70, 20, 16),
)


def label(shape: GqaPrefillShape) -> dict[str, str]:
    shape = GqaPrefillShape(*shape)
    named = f"{shape.batch},{shape.heads}/{shape.kv_heads},{shape.dim},{shape.tokens}"
    more = {"prefix": shape.prefix, "window": shape.window}
    more["page"] = shape.page if shape.page != PAGE else 0
    return {"B,H/Hk,D,T": named + "".join(f",{name}:{n}" for name, n in more.items() if n)}


@functools.partial(jax.jit, static_argnums=0)
def inputs(shape: GqaPrefillShape, seed: int) -> tuple[Any, ...]:
    """q, k, v; with a prefix the cache, its block tables and both lengths; sinks and gate, or None.

    Data are normal, and the prefix lies on shuffled pages.
    """
    keys = jax.random.split(jax.random.key(seed), 7)
    batch, heads, kv_heads, dim, tokens, prefix, _, page = shape
    counts = heads, kv_heads, kv_heads
    draw = lambda key, *sizes: jax.random.normal(key, sizes, jnp.bfloat16)  # noqa: E731
    new = tuple(draw(k, batch, tokens, n, dim) for k, n in zip(keys, counts, strict=False))
    paged: tuple[jax.Array, ...] = ()
    if prefix:
        pages = -(-(prefix + tokens) // page)
        cache = draw(keys[4], batch * pages, 2, page, kv_heads, dim)
        rows = shuffled_pages(keys[3], batch, pages, prefix + tokens)
        paged = cache, *rows, jnp.full(batch, tokens, jnp.int32)
    sinks = jax.random.normal(keys[5], (heads,)) if dim == 64 else None
    gate = draw(keys[6], batch, tokens, heads, dim) if dim == 256 else None
    return *new, *paged, sinks, gate


def prefill(shape: GqaPrefillShape, implementation: Implementation | None) -> TimedOp:
    def call(operands, state, _):
        *arrays, sinks, gate = operands
        op = gqa.gqa_prefill if shape.prefix else gqa.gqa_attention
        window = shape.window or None
        out = op(*arrays, sinks=sinks, gate=gate, window=window, implementation=implementation)
        return out, state

    sets = rotation(counts(shape)[1])
    return TimedOp(call, [inputs(shape, seed) for seed in range(sets)])


def counts(shape: GqaPrefillShape) -> tuple[float, int]:
    """The FLOP and the bytes of a call."""
    batch, heads, kv_heads, dim, tokens, prefix, window, _ = shape
    pairs = tokens**2 / 2 + tokens * prefix
    if window:
        pairs = min(pairs, tokens * window)
    seen = min(prefix, window) if window else prefix
    gates = 1 if dim == 256 else 0
    moved = 2 * tokens * heads * (2 + gates) + 4 * (tokens + seen) * kv_heads
    return 4 * batch * heads * dim * pairs, batch * moved * dim


def check(op: TimedOp, shape: GqaPrefillShape) -> float:
    """The largest relative L2 error of the last head's last queries, against float64.

    It covers the first and the last row.

    Raises:
        AssertionError: an error of the output or the LSE is larger than rounding explains.
    """
    *arrays, sinks, gate = op.operands[0]
    out, lse = op(0)
    queries = np.arange(max(0, shape.tokens - CHECKED), shape.tokens)
    errors, lse_errors = [], []
    for row in {0, shape.batch - 1}:
        q, k, v = (numpy_reference.exact(x[row, :, -1]) for x in arrays[:3])
        if shape.prefix:
            cache, tables = arrays[3:5]
            held = numpy_reference.exact(cache[tables[row], :, :, -1]).swapaxes(0, 1)
            before = held.reshape(2, -1, shape.dim)[:, : shape.prefix]
            k, v = np.concatenate([before[0], k]), np.concatenate([before[1], v])
        for query in queries:  # one by one, because with a window each sees other keys
            last = shape.prefix + query
            first = max(int(last) + 1 - shape.window, 0) if shape.window else 0
            end = last + 1
            expected, expected_lse = numpy_reference.attention(
                q[query : query + 1], k[first:end], v[first:end],
                np.array([last - first]), shape.dim**-0.5,
            )  # fmt: skip
            if sinks is not None:
                joined = np.logaddexp(expected_lse, numpy_reference.exact(sinks[-1]))
                expected *= np.exp(expected_lse - joined)[:, None]
                expected_lse = joined
            if gate is not None:
                expected /= 1 + np.exp(-numpy_reference.exact(gate[row, query, -1]))
            errors.append(numpy_reference.relative_l2(out[row, query, -1], expected[0]))
            lse_errors.append(
                np.abs(numpy_reference.exact(lse[row, query, -1]) - expected_lse).max()
            )
    return numpy_reference.accepted(
        f"gqa prefill {shape}", errors, lse_errors, below=8e-3, lse_below=2e-5
    )


def peer(shape: GqaPrefillShape) -> float:
    """TFLOP/s of cuDNN's causal attention, as JAX calls it, without gate and sinks."""
    flops, moved = counts(shape)

    def call(operands, state, _):
        out = jax.nn.dot_product_attention(*operands, is_causal=True, implementation="cudnn")
        return out, state

    sets = [inputs(shape, seed)[:3] for seed in range(rotation(moved))]
    return flops / TimedOp(call, sets).time() / 1e12


def measure(
    shape: GqaPrefillShape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time."""
    shape = GqaPrefillShape(*shape)
    op = prefill(shape, implementation)
    error = check(op, shape)
    time, _ = times = op.times()
    del op  # frees memory for XLA's intermediates
    flops, moved = counts(shape)
    row: dict[str, Any] = {
        **label(shape),
        **columns("us", times),
        **({"xla us": prefill(shape, "xla").time() * 1e6} if xla else {}),
        "TFLOP/s": flops / time / 1e12,
        "GB/s": moved / time / 1e9,
        "relative error": error,
        "cuDNN, TFLOP/s": "",
        "of cuDNN's": "",
    }
    if not (shape.prefix or shape.window) and jax.default_backend() == "gpu":
        rate = peer(shape)
        row |= {"cuDNN, TFLOP/s": rate, "of cuDNN's": row["TFLOP/s"] / rate}
    return row
