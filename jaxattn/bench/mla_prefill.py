"""`python -m jaxattn.bench mla-prefill`: MLA's causal prefill, checked and timed shape by shape.

Beside it, in the same run, jax's own `attention_mgpu` at its nearest shapes: it has one head dim
for keys and values, so 128 and 256 stand around MLA's 192 and 128. FLOP are the causal half's.
Inputs are not rotated: they are larger than L2, or the arithmetic hides what L2 saves.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn import mla
from jaxattn.bench.mla import worst_error
from jaxattn.bench.timing import per_call
from jaxattn.dispatch import Implementation

NOPE, ROPE, VALUES, RANK, PAGE = 128, 64, 128, 512, 64
SCALE = (NOPE + ROPE) ** -0.5
# B, T, H, and tokens of the prefix. Without one `causal_attention` is measured, with one all of
# `mla_prefill`, the expansion of keys and values included.
SHAPES = (
    (1, 8192, 128, 0),
    (4, 2048, 128, 0),
    (1, 2048, 128, 30720),
    (1, 32768, 16, 0),
    (8, 1024, 16, 7168),
    (1, 2048, 16, 0),
)
SMALL_SHAPES = ((2, 72, 1, 0), (1, 24, 2, 70))
# attention_mgpu's head dim, keys of a step, stages: the fastest that fit, of those tried.
PEERS = ((128, 128, 2), (256, 64, 2))


def inputs(batch: int, tokens: int, heads: int, seed: int = 0) -> tuple[jax.Array, ...]:
    shapes = (heads, NOPE + ROPE), (heads, NOPE), (heads, VALUES), (ROPE,)
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    draw = lambda key, shape: jax.random.normal(key, (batch, tokens, *shape), jnp.bfloat16)  # noqa: E731
    return tuple(draw(key, shape) for key, shape in zip(keys, shapes, strict=True))


def check(out: jax.Array, lse: jax.Array, arrays: tuple[jax.Array, ...]) -> float:
    """Relative L2 error of the last head of the first and last row, against float32."""
    rows = jnp.array([0, out.shape[0] - 1])
    q, k, v = (x[rows, :, -1:].astype(jnp.float32) for x in arrays[:3])
    k_pe = arrays[3][rows].astype(jnp.float32)
    reference = functools.partial(mla.causal_attention, scale=SCALE, implementation="xla")
    expected, expected_lse = jax.jit(reference)(q, k, v, k_pe=k_pe)
    out, lse = out[rows, :, -1:], lse[rows, :, -1:]
    error = worst_error(out, expected)
    lse_error = float(jnp.abs(lse - expected_lse).max())
    if not (error < 4e-3 and lse_error < 2e-5):
        raise AssertionError(f"relative error {error}, LSE off by {lse_error}")
    return error


def peer(batch: int, tokens: int, heads: int, dim: int, block: int, stages: int) -> float:
    """TFLOP/s of jax's own causal attention, float16 (the dtype that it stages in)."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=block, max_concurrent_steps=stages, causal=True
    )
    keys = jax.random.split(jax.random.key(1), 3)
    shape = (batch, tokens, heads, dim)
    q, k, v = (jax.random.normal(key, shape, jnp.float16) for key in keys)

    def call(carry: Any, i: jax.Array) -> Any:
        q, k, v = carry
        out = attention_mgpu.attention(q, k, v, config)
        return lax.dynamic_update_slice(q, out[:1, :1, :1], (0, 0, 0, 0)), k, v

    return batch * heads * tokens**2 * 2 * dim / per_call(call, (q, k, v), calls=4) / 1e12


def chunk(batch: int, tokens: int, heads: int, prefix: int) -> tuple[jax.Array, ...]:
    """Arguments of `mla_prefill`: normal data, the prefix on shuffled pages."""
    pages = -(-(prefix + tokens) // PAGE)
    shapes = (
        (batch, tokens, heads, NOPE + ROPE),
        (batch, tokens, RANK + ROPE),
        (heads, NOPE, RANK),
        (heads, RANK, VALUES),
        (batch * pages, PAGE, RANK + ROPE),
    )
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    floats = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=False)]
    floats[2:4] = [w * RANK**-0.5 for w in floats[2:4]]
    tables = jax.random.permutation(keys[-1], batch * pages).reshape(batch, pages)
    lens = jnp.full(batch, prefix + tokens, jnp.int32)
    return (*floats, tables.astype(jnp.int32), lens, jnp.full(batch, tokens, jnp.int32))


def measure_chunk(
    shape: tuple[int, ...], implementation: Implementation | None, xla: bool
) -> dict[str, Any]:
    """The whole of `mla_prefill`: keys and values expanded, chunk and prefix attended."""
    batch, tokens, heads, prefix = shape
    args = chunk(*shape)
    prefill: Any = functools.partial(mla.mla_prefill, scale=SCALE)
    out, _ = jax.jit(functools.partial(prefill, implementation=implementation))(*args)
    few = (args[0][:1, :, -1:], args[1][:1], args[2][-1:], args[3][-1:], args[4])
    reference = functools.partial(prefill, implementation="xla")
    expected, _ = jax.jit(reference)(*few, *(x[:1] for x in args[5:]))
    error = worst_error(out[:1, :, -1:], expected)
    if not error < 6e-3:  # both round P, keys and values
        raise AssertionError(f"mla_prefill {shape}: relative error {error}")

    def time_of(implementation: Implementation | None, args: Any) -> float:
        # The arrays are carried: closed over, gigabytes would be compiled in as constants.
        def call(args: Any, i: jax.Array) -> Any:
            out, _ = prefill(*args, implementation=implementation)
            return (*args[:6], jnp.where(jnp.isnan(out[0, 0, 0, 0]), 0, args[6]), args[7])

        return per_call(call, args, calls=4)

    pairs = tokens**2 / 2 + tokens * prefix
    expanded = (tokens + prefix) * RANK * (NOPE + VALUES)
    flops = 2 * batch * heads * (pairs * (NOPE + ROPE + VALUES) + expanded)
    # Queries and output, the latents twice (new ones come, all are read), both weights.
    queries = batch * tokens * heads * (NOPE + ROPE + VALUES)
    latents = batch * (2 * tokens + prefix) * (RANK + ROPE)
    moved = 2 * (queries + latents + heads * RANK * (NOPE + VALUES))
    time = time_of(implementation, args)
    beside = time_of("xla", chunk(*shape)) if xla else None
    return row(shape, time, beside, flops, moved, error)


def row(
    shape: tuple[int, ...],
    time: float,
    xla: float | None,
    flops: float,
    moved: float,
    error: float,
) -> dict[str, Any]:
    return {
        "B,T,H,prefix": ",".join(map(str, shape)),
        "us": time * 1e6,
        **({"xla us": xla * 1e6} if xla else {}),
        "TFLOP/s": flops / time / 1e12,
        "GB/s": moved / time / 1e9,
        "relative error": error,
        "jax's, 128, TFLOP/s": "",
        "jax's, 256, TFLOP/s": "",
        "of jax's best": "",
    }


def measure(
    shape: tuple[int, ...], implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """A row of the table; with `xla` also XLA's time."""
    if shape[3]:
        return measure_chunk(shape, implementation, xla)
    batch, tokens, heads, _ = shape
    q, k, v, k_pe = arrays = inputs(batch, tokens, heads)
    attend: Any = functools.partial(mla.causal_attention, scale=SCALE)
    out, lse = jax.jit(functools.partial(attend, implementation=implementation))(q, k, v, k_pe=k_pe)
    error = check(out, lse, arrays)

    def time_of(implementation: Implementation | None, arrays: tuple[jax.Array, ...]) -> float:
        def call(carry: Any, i: jax.Array) -> Any:
            q, k, v, k_pe = carry
            out, _ = attend(q, k, v, k_pe=k_pe, implementation=implementation)
            return lax.dynamic_update_slice(q, out[:1, :1, :1], (0, 0, 0, 0)), k, v, k_pe

        return per_call(call, arrays, calls=4)

    time = time_of(implementation, arrays)
    beside = time_of("xla", inputs(batch, tokens, heads)) if xla else None
    flops = batch * heads * tokens**2 * (NOPE + ROPE + VALUES)
    dims = heads * (NOPE + ROPE + NOPE + 2 * VALUES) + ROPE
    moved = batch * tokens * (2 * dims + 4 * heads)
    result = row(shape, time, beside, flops, moved, error)
    if jax.default_backend() == "gpu":
        rates = {dim: peer(batch, tokens, heads, dim, *rest) for dim, *rest in PEERS}
        result |= {f"jax's, {dim}, TFLOP/s": rate for dim, rate in rates.items()}
        result["of jax's best"] = result["TFLOP/s"] / max(rates.values())
    return result
