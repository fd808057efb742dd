"""`python -m jaxattn.bench mla-prefill`: MLA's causal prefill, checked and timed shape by shape.

Times are those of `timing`. The same run and profile also time jax's own `attention_mgpu` at its
nearest shapes. It has one head dim for keys and values, so 128 and 256 enclose MLA's 192 and 128.
The FLOP are those of the causal half. Profiled calls take inputs in turn that do not fit in L2; the
loop of `call us` has the same inputs in each call.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import mla
from jaxattn.bench.attention.shuffled_pages import shuffled_pages
from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp, columns, rotation
from jaxattn.core.dispatch import Implementation

NOPE, ROPE, VALUES, RANK, PAGE = 128, 64, 128, 512, 64
SCALE = (NOPE + ROPE) ** -0.5
# B, T, H, and tokens of the prefix. Without a prefix the bench times `causal_attention`, with one
# all of `mla_prefill`, including the expansion of keys and values.
Shape = tuple[int, int, int, int]
SHAPES: tuple[Shape, ...] = (
    (1, 8192, 128, 0),
    (4, 2048, 128, 0),
    (1, 2048, 128, 30720),
    (1, 32768, 16, 0),
    (8, 1024, 16, 7168),
    (1, 2048, 16, 0),
)
MORE_SHAPES: tuple[Shape, ...] = ()
SMALL_SHAPES: tuple[Shape, ...] = ((2, 72, 1, 0), (1, 24, 2, 70))
# attention_mgpu's head dim, keys per step and stages: the fastest configurations tried that fit.
PEERS = ((128, 128, 2), (256, 64, 2))


CHECKED = 64  # number of last queries of a row to check


def label(shape: Shape) -> dict[str, str]:
    return {"B,T,H,prefix": ",".join(map(str, shape))}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def inputs(batch: int, tokens: int, heads: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """Normal q, k, v and k_pe for `causal_attention`."""
    shapes = (heads, NOPE + ROPE), (heads, NOPE), (heads, VALUES), (ROPE,)
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    draw = lambda key, shape: jax.random.normal(key, (batch, tokens, *shape), jnp.bfloat16)  # noqa: E731
    return tuple(draw(key, shape) for key, shape in zip(keys, shapes, strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def chunk(batch: int, tokens: int, heads: int, prefix: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """Normal arguments for `mla_prefill`, with the prefix on shuffled pages."""
    pages = -(-(prefix + tokens) // PAGE)
    shapes = (
        (batch, tokens, heads, NOPE + ROPE),
        (batch, tokens, RANK + ROPE),
        (heads, NOPE, RANK),
        (heads, RANK, VALUES),
        (batch * pages, PAGE, RANK + ROPE),
    )
    keys = jax.random.split(jax.random.key(seed), len(shapes) + 1)
    floats = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=False)]
    floats[2:4] = [w * RANK**-0.5 for w in floats[2:4]]
    rows = shuffled_pages(keys[-1], batch, pages, prefix + tokens)
    return (*floats, *rows, jnp.full(batch, tokens, jnp.int32))


def prefill(shape: Shape, implementation: Implementation | None) -> TimedOp:
    """`causal_attention`, or with a prefix all of `mla_prefill`, as a timed op."""
    *chunk_shape, prefix = shape

    def call(operands, state, _):
        if prefix:
            out = mla.mla_prefill(*operands, scale=SCALE, implementation=implementation)
        else:
            q, k, v, k_pe = operands
            out = mla.causal_attention(
                q, k, v, k_pe=k_pe, scale=SCALE, implementation=implementation
            )
        return out, state

    sets = rotation(counts(shape)[1])
    make = functools.partial(chunk, *shape) if prefix else functools.partial(inputs, *chunk_shape)
    return TimedOp(call, [make(seed=seed) for seed in range(sets)])


def counts(shape: Shape) -> tuple[float, int]:
    """The FLOP and the bytes of a call."""
    batch, tokens, heads, prefix = shape
    if not prefix:
        dims = heads * (NOPE + ROPE + NOPE + 2 * VALUES) + ROPE
        flops = batch * heads * tokens**2 * (NOPE + ROPE + VALUES)
        return flops, batch * tokens * (2 * dims + 4 * heads)
    pairs = tokens**2 / 2 + tokens * prefix
    expanded = (tokens + prefix) * RANK * (NOPE + VALUES)
    # Queries and output; all latents, and the new ones once more as an argument; both weights.
    queries = batch * tokens * heads * (NOPE + ROPE + VALUES)
    latents = batch * (2 * tokens + prefix) * (RANK + ROPE)
    moved = 2 * (queries + latents + heads * RANK * (NOPE + VALUES))
    return 2 * batch * heads * (pairs * (NOPE + ROPE + VALUES) + expanded), moved


def check(op: TimedOp, shape: Shape) -> float:
    """The largest relative L2 error of the last head's last queries, against float64.

    It covers the first and the last row.

    Raises:
        AssertionError: an error of the output or the LSE is larger than rounding explains.
    """
    batch, tokens, _, prefix = shape
    out, lse = op(0)
    queries = np.arange(max(0, tokens - CHECKED), tokens)
    errors, lse_errors = [], []
    for row in {0, batch - 1}:
        if prefix:
            q, new, w_uk, w_uv, cache, tables, *_ = op.operands[0]
            pages = numpy_reference.exact(cache[tables[row]]).reshape(-1, RANK + ROPE)
            latents = np.concatenate([pages[:prefix], numpy_reference.exact(new[row])])
            latent, k_pe = latents[:, :RANK], latents[:, RANK:]
            k = latent @ numpy_reference.exact(w_uk[-1]).T
            v = latent @ numpy_reference.exact(w_uv[-1])
        else:
            q, *rest = op.operands[0]
            k, v = (numpy_reference.exact(x[row, :, -1]) for x in rest[:2])
            k_pe = numpy_reference.exact(rest[2][row])
        expected, expected_lse = numpy_reference.attention(
            numpy_reference.exact(q[row, :, -1])[queries],
            np.concatenate([k, k_pe], axis=1),
            v,
            prefix + queries,
            SCALE,
        )
        errors.append(numpy_reference.relative_l2(out[row, :, -1][queries], expected))
        lse_errors.append(
            np.abs(numpy_reference.exact(lse[row, :, -1])[queries] - expected_lse).max()
        )
    # With a prefix, the op rounds the expanded keys and values; the reference does not.
    below, lse_below = (6e-3, math.inf) if prefix else (4e-3, 2e-5)
    return numpy_reference.accepted(
        f"mla prefill {shape}", errors, lse_errors, below=below, lse_below=lse_below
    )


def peer(shape: Shape, dim: int, block: int, stages: int) -> float:
    """TFLOP/s of jax's own causal attention in float16, the dtype of its staged tiles."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    batch, tokens, heads, _ = shape
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=block, max_concurrent_steps=stages, causal=True
    )

    def normal(seed: int) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(seed), 3)
        draw = functools.partial(jax.random.normal, dtype=jnp.float16)
        return tuple(draw(key, (batch, tokens, heads, dim)) for key in keys)

    sets = rotation(4 * 2 * batch * tokens * heads * dim)
    op = TimedOp(
        lambda qkv, state, _: (attention_mgpu.attention(*qkv, config), state),
        [normal(seed) for seed in range(sets)],
    )
    return batch * heads * tokens**2 * 2 * dim / op.time() / 1e12


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time."""
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
        **{f"jax's, {dim}, TFLOP/s": "" for dim, *_ in PEERS},
        "of jax's best": "",
    }
    if not shape[3] and jax.default_backend() == "gpu":
        rates = {f"jax's, {dim}, TFLOP/s": peer(shape, dim, *rest) for dim, *rest in PEERS}
        row |= rates | {"of jax's best": row["TFLOP/s"] / max(rates.values())}
    return row
