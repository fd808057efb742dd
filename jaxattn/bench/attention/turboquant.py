"""The second table of `python -m jaxattn.bench gqa`: decode over TurboQuant caches.

The columns are those of `jaxattn.bench.attention.gqa`. GB/s counts the bytes of the cache's format,
and a note gives the time that copying these bytes would take.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import gqa
from jaxattn.bench.attention import gqa as grouped
from jaxattn.bench.attention.gqa import PAGE
from jaxattn.bench.attention.shuffled_pages import shuffled_pages
from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp, rotation
from jaxattn.core.cache.formats import TURBOQUANT
from jaxattn.core.dispatch import Implementation
from jaxattn.core.turboquant.codec import TurboFormat, dequantize, hadamard
from jaxattn.core.turboquant.slot_layout import GROUP, page_slots, unpack


class TurboquantDecodeShape(NamedTuple):
    """A batch of `batch` rows of `tokens` each, with a cache of the preset `cache`."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    cache: str

    @property
    def form(self) -> TurboFormat:
        return TurboFormat(preset=self.cache, head_dim=self.dim)

    @property
    def plain(self) -> grouped.GqaDecodeShape:
        """The same shape with a bfloat16 cache."""
        return grouped.GqaDecodeShape(*self[:5])

    @property
    def read(self) -> int:
        """Bytes of codes, norms, scales and minima that are read."""
        return self.batch * self.tokens * self.kv_heads * self.form.slot_bytes


def _with_presets(*shapes: tuple[int, int, int, int, int]) -> tuple[TurboquantDecodeShape, ...]:
    return tuple(TurboquantDecodeShape(*shape, preset) for shape in shapes for preset in TURBOQUANT)


SHAPES = _with_presets((64, 32, 8, 128, 8192))
MORE_SHAPES = _with_presets((64, 16, 2, 256, 8192), (64, 64, 8, 64, 8192), (1, 64, 8, 128, 4096))
SMALL_SHAPES = _with_presets((2, 4, 2, 64, 130))
# Goal in us for 64 rows of 8,192 tokens, with 32 query and 8 KV heads of 128 dims.
WANTED = {"k8v4": 245, "4bit_nc": 195, "k3v4_nc": 190, "3bit_nc": 170}


def label(shape: TurboquantDecodeShape) -> dict[str, str]:
    shape = TurboquantDecodeShape(*shape)
    return grouped.label(shape.plain) | {"cache": shape.cache}


def cache_format(shape: TurboquantDecodeShape) -> str:
    return TurboquantDecodeShape(*shape).cache


@functools.partial(jax.jit, static_argnums=0)
def inputs(shape: TurboquantDecodeShape) -> dict[str, Any]:
    """Normal queries, and random codes on shuffled pages with the norms and scales of normal data.

    There are so many layers that L2 does not hold what a call reads.
    """
    batch, heads, kv_heads, dim, tokens, _ = shape
    pages, form = -(-tokens // PAGE), shape.form
    layers = min(rotation(shape.read, max_inputs=32), max(1, 2**34 // shape.read))
    keys = jax.random.split(jax.random.key(0), 4)
    groups = (layers, batch * pages, kv_heads, PAGE // GROUP)
    if form.rotated:
        key_codes = jax.random.bits(keys[0], (*groups, GROUP * form.key_bytes), jnp.uint8)
    else:
        some = jax.random.normal(keys[0], (*groups, GROUP * dim), jnp.bfloat16)
        key_codes = jax.lax.bitcast_convert_type(some.astype(jnp.float8_e4m3fn), jnp.uint8)
    value_codes = jax.random.bits(keys[1], (*groups, GROUP * form.value_bytes), jnp.uint8)
    # The levels of a normal key have length dim**0.5, so its norm is 1. Values lie in -3 to 3.
    norm, scale, minimum = 1.0, 6 / (2**form.value_bits - 1), -3.0
    numbers = np.array([norm, scale, minimum][0 if form.rotated else 1 :], np.float16)
    plain = jnp.asarray(np.repeat(numbers, GROUP).view(np.uint8))
    plain = jnp.broadcast_to(plain, (*groups, plain.size))
    cache = jnp.concatenate([key_codes, value_codes, plain], axis=-1)
    tables, lens = shuffled_pages(keys[2], batch, pages, tokens)
    return {
        "q": jax.random.normal(keys[3], (batch, 1, heads, dim), jnp.bfloat16),
        "kv_cache": cache.reshape(*groups[:3], PAGE * form.slot_bytes),
        "block_tables": tables,
        "seq_lens": lens,
    }


def decode(
    shape: TurboquantDecodeShape,
    arrays: dict[str, Any],
    schedule: gqa.PairSchedule,
    implementation: Implementation | None,
) -> TimedOp:
    def call(operands, state, layer):
        arrays, schedule = operands
        out = gqa.turbo_attention(
            **arrays, form=shape.form, layer=layer, schedule=schedule,
            implementation=implementation,
        )  # fmt: skip
        return out, state

    return TimedOp(call, [(arrays, schedule)], layers=arrays["kv_cache"].shape[0])


def dequantized(
    form: TurboFormat, arrays: dict[str, Any], row: int, head: int, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys, not rotated by the Hadamard matrix, and values [tokens, D] of a row's KV head."""
    pages = arrays["kv_cache"][0, arrays["block_tables"][row], head]
    slots = page_slots(form, pages).reshape(-1, form.slot_bytes)[:tokens]
    keys, values = map(numpy_reference.exact, dequantize(form, unpack(form, slots)))
    return keys @ numpy_reference.exact(hadamard(form.head_dim)) if form.rotated else keys, values


def check(op: TimedOp, shape: TurboquantDecodeShape) -> float:
    """The largest relative L2 error against float64 attention over the dequantized cache.

    It covers the heads of the first and the last KV head, in the first and the last row.

    Raises:
        AssertionError: an error of the output or the LSE is larger than queries in two e4m3 terms
            explain.
    """
    arrays, _ = op.operands[0]
    out, lse = op(0)
    group = shape.heads // shape.kv_heads
    errors, lse_errors = [], []
    for row, head in {(0, 0), (shape.batch - 1, shape.kv_heads - 1)}:
        keys, values = dequantized(shape.form, arrays, row, head, shape.tokens)
        group_heads = slice(head * group, (head + 1) * group)
        q = numpy_reference.exact(arrays["q"][row, 0, group_heads])
        last = np.full(group, shape.tokens - 1)
        expected, expected_lse = numpy_reference.attention(q, keys, values, last, shape.dim**-0.5)
        errors.append(numpy_reference.relative_l2(np.asarray(out[row, 0, group_heads]), expected))
        lse_errors.append(
            np.abs(numpy_reference.exact(lse[row, 0, group_heads]) - expected_lse).max()
        )
    return numpy_reference.accepted(f"gqa {shape}", errors, lse_errors, below=1e-2, lse_below=3e-2)


def measure(
    shape: TurboquantDecodeShape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time."""
    arrays = inputs(shape)
    return label(shape) | grouped.timed(
        shape.plain,
        shape.read,
        arrays["seq_lens"],
        functools.partial(decode, shape, arrays),
        functools.partial(check, shape=shape),
        implementation,
        xla=xla,
    )


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The time, the goal and, if known, the time of a copy of the same bytes, per row."""
    said = []
    for row in rows:
        shape, cache = row["B,H/Hk,D,T"], row["cache"]
        floor = (
            f"; {row['us'] * row['of copy']:.0f} us at the copy's rate" if "of copy" in row else ""
        )
        first = SHAPES[0]
        wanted = f" (wanted: {WANTED[cache]})" if shape == label(first)["B,H/Hk,D,T"] else ""
        said.append(f"{shape} {cache}: {row['us']:.0f} us{wanted}{floor}")
    return said
