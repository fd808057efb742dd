"""The second table of `python -m jaxattn.bench gqa-prefill`: chunks over TurboQuant caches.

The new tokens are already in the cache. `bfloat16 us` is the time of the same chunk over a bfloat16
cache, by `jaxattn.bench.attention.gqa_prefill` in the same run. GB/s counts the bytes of the
cache's format.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import gqa
from jaxattn.bench.attention import gqa_prefill, turboquant
from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp, columns
from jaxattn.core.cache.formats import TURBOQUANT
from jaxattn.core.dispatch import Implementation

CHECKED = 64  # number of last queries of a row to check


class TurboquantPrefillShape(NamedTuple):
    """`batch` rows of `tokens` new tokens after a prefix, in a cache of the preset `cache`."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    prefix: int
    cache: str

    @property
    def cached(self) -> turboquant.TurboquantDecodeShape:
        """The shape of decode over the same cache."""
        length = self.prefix + self.tokens
        return turboquant.TurboquantDecodeShape(*self[:4], length, self.cache)

    @property
    def plain(self) -> gqa_prefill.GqaPrefillShape:
        """The same shape with a bfloat16 cache."""
        return gqa_prefill.GqaPrefillShape(*self[:6])


SHAPES = tuple(TurboquantPrefillShape(1, 32, 8, 128, 2048, 30_720, preset) for preset in TURBOQUANT)
MORE_SHAPES: tuple[TurboquantPrefillShape, ...] = (
    TurboquantPrefillShape(1, 16, 2, 256, 2048, 30_720, "4bit_nc"),
)
SMALL_SHAPES: tuple[TurboquantPrefillShape, ...] = (
    TurboquantPrefillShape(2, 4, 2, 64, 9, 70, "4bit_nc"),
)


def label(shape: TurboquantPrefillShape) -> dict[str, str]:
    shape = TurboquantPrefillShape(*shape)
    return gqa_prefill.label(shape.plain) | {"cache": shape.cache}


def cache_format(shape: TurboquantPrefillShape) -> str:
    return TurboquantPrefillShape(*shape).cache


def prefill(shape: TurboquantPrefillShape, implementation: Implementation | None) -> TimedOp:
    arrays = turboquant.inputs(shape.cached)
    sizes = shape.batch, shape.tokens, shape.heads, shape.dim
    arrays["q"] = jax.random.normal(jax.random.key(1), sizes, jnp.bfloat16)
    new = jnp.full(shape.batch, shape.tokens, jnp.int32)
    form = shape.cached.form

    def call(operands, state, layer):
        out = gqa.turbo_attention(
            **operands[0], query_lens=operands[1], form=form, layer=layer,
            implementation=implementation,
        )  # fmt: skip
        return out, state

    return TimedOp(call, [(arrays, new)], layers=arrays["kv_cache"].shape[0])


def check(op: TimedOp, shape: TurboquantPrefillShape) -> float:
    """The larger relative L2 error against float64 attention over the dequantized cache.

    It covers the last queries of the first and the last head, in the last row.

    Raises:
        AssertionError: an error of the output or the LSE is larger than 16-bit operands explain.
    """
    arrays, _ = op.operands[0]
    out, lse = op(0)
    group = shape.heads // shape.kv_heads
    some = np.arange(max(shape.tokens - CHECKED, 0), shape.tokens)
    errors, lse_errors = [], []
    for head in (0, shape.heads - 1):
        cached = shape.cached
        keys, values = turboquant.dequantized(cached.form, arrays, -1, head // group, cached.tokens)
        q = numpy_reference.exact(arrays["q"][-1, some, head])
        expected, expected_lse = numpy_reference.attention(
            q, keys, values, shape.prefix + some, shape.dim**-0.5
        )
        errors.append(numpy_reference.relative_l2(np.asarray(out[-1, some, head]), expected))
        lse_errors.append(np.abs(numpy_reference.exact(lse[-1, some, head]) - expected_lse).max())
    return numpy_reference.accepted(
        f"gqa-prefill {shape}", errors, lse_errors, below=4e-3, lse_below=4e-3
    )


@functools.cache
def beside(shape: gqa_prefill.GqaPrefillShape, implementation: Implementation | None) -> float:
    """Seconds of the same chunk over a bfloat16 cache."""
    return gqa_prefill.prefill(shape, implementation).time()


def measure(
    shape: TurboquantPrefillShape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table, by our kernels unless XLA is named; `xla` adds XLA's time."""
    shape = TurboquantPrefillShape(*shape)
    plain = beside(shape.plain, implementation)
    op = prefill(shape, implementation)
    error = check(op, shape)
    time, _ = times = op.times()
    del op  # frees memory for XLA's intermediates
    flops, _ = gqa_prefill.counts(shape.plain)
    moved = shape.cached.read + shape.batch * shape.tokens * shape.heads * shape.dim * 4
    return {
        **label(shape),
        **columns("us", times),
        **({"xla us": prefill(shape, "xla").time() * 1e6} if xla else {}),
        "bfloat16 us": plain * 1e6,
        "of bfloat16's": plain / time,
        "TFLOP/s": flops / time / 1e12,
        "GB/s": moved / time / 1e9,
        "relative error": error,
    }
