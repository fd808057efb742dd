"""`python -m jaxattn.bench gqa`: paged grouped-query decode, checked and timed shape by shape.

Times are those of `timing`, without the schedule, which a step computes once for all layers.
`invariant us` is `us` with splits that make a row's bits independent of the other rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import gqa
from jaxattn.bench.attention.shuffled_pages import shuffled_pages
from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp, columns, kernel_seconds, rotation
from jaxattn.core.cache.formats import KVFormat
from jaxattn.core.dispatch import Implementation

PAGE = 64


class GqaDecodeShape(NamedTuple):
    """A batch of `batch` rows of `tokens` each, with a window of `window` tokens or 0 for none.

    Heads of 64 dims have sinks like gpt-oss, and heads of 256 a gate like Qwen3-Next. `cache` is
    bfloat16 or fp8: e4m3 with one scale for the keys and one for the values of each head.
    """

    batch: int
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    window: int = 0
    page: int = PAGE
    cache: str = "bfloat16"

    @property
    def read(self) -> int:
        """Bytes of keys and values that are read."""
        slot = KVFormat(self.cache, self.dim).nbytes
        return self.batch * self.seen * self.kv_heads * slot

    @property
    def seen(self) -> int:
        """The number of tokens that a row's query sees."""
        return min(self.tokens, self.window or self.tokens)


SHAPES: tuple[GqaDecodeShape, ...] = (
    GqaDecodeShape(64, 32, 8, 128, 8192),
    GqaDecodeShape(32, 32, 8, 128, 4096),
    GqaDecodeShape(8, 32, 8, 128, 32768),
    GqaDecodeShape(8, 32, 8, 128, 16384),
    GqaDecodeShape(1, 32, 8, 128, 32768),
    GqaDecodeShape(1, 32, 8, 128, 1024),
    GqaDecodeShape(32, 64, 8, 128, 8192),
    GqaDecodeShape(64, 16, 2, 256, 8192),
    GqaDecodeShape(64, 64, 8, 64, 8192),
    GqaDecodeShape(64, 64, 8, 64, 8192, 128),
    GqaDecodeShape(8, 32, 8, 128, 32768, cache="fp8"),
    GqaDecodeShape(64, 32, 8, 128, 8192, cache="fp8"),
    GqaDecodeShape(1, 32, 8, 128, 1024, cache="fp8"),
    GqaDecodeShape(64, 16, 2, 256, 8192, cache="fp8"),
)
MORE_SHAPES: tuple[GqaDecodeShape, ...] = (
    GqaDecodeShape(1, 32, 4, 128, 262144),
    GqaDecodeShape(1, 16, 2, 256, 262144),
    GqaDecodeShape(64, 32, 8, 128, 8192, 0, 16),
    GqaDecodeShape(64, 28, 4, 128, 8192),
    GqaDecodeShape(256, 32, 8, 128, 1024),
    GqaDecodeShape(1, 16, 2, 256, 8192),
    GqaDecodeShape(32, 16, 2, 256, 4096),
    GqaDecodeShape(64, 64, 8, 64, 8192, cache="fp8"),
    GqaDecodeShape(64, 32, 8, 128, 8192, 0, 16, cache="fp8"),
)
SMALL_SHAPES: tuple[GqaDecodeShape, ...] = (
    GqaDecodeShape(2, 4, 2, 64, 130),
    GqaDecodeShape(1, 5, 1, 128, 200),
    GqaDecodeShape(2, 8, 1, 256, 70),
    GqaDecodeShape(2, 4, 2, 64, 300, 100, 16),
    GqaDecodeShape(2, 4, 2, 128, 130, cache="fp8"),
)


def label(shape: GqaDecodeShape) -> dict[str, str]:
    shape = GqaDecodeShape(*shape)
    named = f"{shape.batch},{shape.heads}/{shape.kv_heads},{shape.dim},{shape.tokens}"
    window = f",window:{shape.window}" if shape.window else ""
    page = f",page:{shape.page}" if shape.page != PAGE else ""
    cache = f",{shape.cache}" if shape.cache != "bfloat16" else ""
    return {"B,H/Hk,D,T": named + window + page + cache}


def cache_format(shape: GqaDecodeShape) -> str:
    return GqaDecodeShape(*shape).cache


@functools.partial(jax.jit, static_argnums=0)
def inputs(shape: GqaDecodeShape) -> dict[str, Any]:
    """Normal data on shuffled pages, with so many layers that no read of a call hits L2."""
    batch, heads, kv_heads, dim, tokens, _, page, cache = shape
    pages, stored = -(-tokens // page), KVFormat(cache, dim)
    layers = rotation(shape.read, max_inputs=32)
    layers = min(layers, max(1, 2**34 // (batch * tokens * kv_heads * stored.nbytes)))
    keys = jax.random.split(jax.random.key(0), 5)
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    tables, lens = shuffled_pages(keys[2], batch, pages, tokens)
    q = normal(keys[0], (batch, 1, heads, dim))
    kv = normal(keys[1], (layers, batch * pages, 2, page, kv_heads, dim))
    scales = None
    if stored.scaled:
        # Numbers of order 16, far from the largest and from subnormal ones.
        kv, scales = (kv * 16).astype(stored.dtype), jnp.full((2, kv_heads), 1 / 16, jnp.float32)
    return {
        "q": q,
        "kv_cache": kv,
        "kv_scale": scales,
        "block_tables": tables,
        "seq_lens": lens,
        "sinks": jax.random.normal(keys[3], (heads,)) if dim == 64 else None,
        "gate": normal(keys[4], q.shape) if dim == 256 else None,
    }


def schedule_of(
    shape: GqaDecodeShape, lens: jax.Array, *, batch_invariant: bool
) -> gqa.PairSchedule:
    _, heads, kv_heads, dim, tokens, window, page, _ = shape
    return gqa.decode_schedule(
        lens, q_len=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        max_pages=-(-tokens // page), page_size=page, window=window or None,
        batch_invariant=batch_invariant,
    )  # fmt: skip


def decode(
    shape: GqaDecodeShape,
    arrays: dict[str, Any],
    schedule: gqa.PairSchedule,
    implementation: Implementation | None,
) -> TimedOp:
    def call(operands, state, layer):
        arrays, schedule = operands
        out = gqa.gqa_decode(
            **arrays, window=shape.window or None, layer=layer, schedule=schedule,
            implementation=implementation,
        )  # fmt: skip
        return out, state

    return TimedOp(call, [(arrays, schedule)], layers=arrays["kv_cache"].shape[0])


def check(op: TimedOp, shape: GqaDecodeShape) -> float:
    """The largest relative L2 error against float64.

    It covers the heads of the first and the last KV head, in the first and the last row.

    Raises:
        AssertionError: an error of the output or the LSE is larger than rounding explains.
    """
    arrays, _ = op.operands[0]
    out, lse = op(0)
    group = shape.heads // shape.kv_heads
    errors, lse_errors = [], []
    for row, head in {(0, 0), (shape.batch - 1, shape.kv_heads - 1)}:
        held = arrays["kv_cache"][0, arrays["block_tables"][row], :, :, head]  # [pages, 2, C, D]
        kv = numpy_reference.exact(held).swapaxes(0, 1).reshape(2, -1, shape.dim)
        if arrays["kv_scale"] is not None:
            kv = kv * numpy_reference.exact(arrays["kv_scale"][:, head])[:, None, None]
        kv = kv[:, shape.tokens - shape.seen : shape.tokens]
        group_heads = slice(head * group, (head + 1) * group)
        q = numpy_reference.exact(arrays["q"][row, 0, group_heads])
        last = np.full(group, shape.seen - 1)
        expected, expected_lse = numpy_reference.attention(q, kv[0], kv[1], last, shape.dim**-0.5)
        if arrays["sinks"] is not None:
            joined = np.logaddexp(expected_lse, numpy_reference.exact(arrays["sinks"][group_heads]))
            expected *= np.exp(expected_lse - joined)[:, None]
            expected_lse = joined
        if arrays["gate"] is not None:
            expected /= 1 + np.exp(-numpy_reference.exact(arrays["gate"][row, 0, group_heads]))
        errors.append(numpy_reference.relative_l2(np.asarray(out[row, 0, group_heads]), expected))
        lse_errors.append(
            np.abs(numpy_reference.exact(lse[row, 0, group_heads]) - expected_lse).max()
        )
    return numpy_reference.accepted(f"gqa {shape}", errors, lse_errors, below=5e-3, lse_below=1e-4)


def measure(
    shape: GqaDecodeShape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time."""
    arrays = inputs(shape)
    return label(shape) | timed(
        shape,
        shape.read,
        arrays["seq_lens"],
        functools.partial(decode, shape, arrays),
        functools.partial(check, shape=shape),
        implementation,
        xla=xla,
    )


def timed(
    shape: GqaDecodeShape,
    read: int,
    lens: jax.Array,
    decode: Callable[[gqa.PairSchedule, Implementation | None], TimedOp],
    check: Callable[[TimedOp], float],
    implementation: Implementation | None,
    *,
    xla: bool,
) -> dict[str, Any]:
    """Returns the measured columns of a row, by the usual and the batch-invariant schedule.

    Args:
        shape: The shape for the schedules and the FLOP.
        read: Bytes that are read from the cache.
        lens: Tokens of each row.
        decode: Makes the op for a schedule and an implementation.
        check: Returns the error of an op.
    """
    schedule, invariant = (
        schedule_of(shape, lens, batch_invariant=apart) for apart in (False, True)
    )
    op = decode(schedule, implementation)
    error = check(op)
    time, _ = times = op.times()
    op = decode(invariant, implementation)
    error = max(error, check(op))
    alone = kernel_seconds(op)
    xla_columns = {"xla us": decode(schedule, "xla").time() * 1e6} if xla else {}
    moved = read + shape.batch * shape.heads * shape.dim * 4
    return {
        **columns("us", times),
        "invariant us": alone * 1e6 if alone else "",
        **xla_columns,
        "TFLOP/s": 4 * shape.batch * shape.seen * shape.heads * shape.dim / time / 1e12,
        "GB/s": moved / time / 1e9,
        "relative error": error,
    }
