"""The second table of `python -m jaxattn.bench mla`: FP8 caches compared with bfloat16.

The columns are those of `jaxattn.bench.attention.mla`. GB/s counts the bytes of the cache's format.
"""

from collections.abc import Sequence
from typing import Any

from jaxattn.bench.attention import mla
from jaxattn.core.dispatch import Implementation

# The label of a cache, and its dtype.
CACHES = {"bfloat16": "bfloat16", "e4m3": "float8_e4m3fn", "block-scaled": "uint8"}
Shape = tuple[int, int, int, int, str]  # B, H, T, S and the cache


def _with_caches(*shapes: tuple[int, int, int, int]) -> tuple[Shape, ...]:
    return tuple((*shape, cache) for shape in shapes for cache in CACHES)


SHAPES = _with_caches((128, 16, 4096, 1), (128, 128, 4096, 1))
MORE_SHAPES = _with_caches()
SMALL_SHAPES = _with_caches((1, 4, 70, 1))
FASTER = 1.5  # speedup of block-scaled over bfloat16 that 16 heads should reach


def label(shape: Shape) -> dict[str, str]:
    return {"B,H,T,S": ",".join(map(str, shape[:4])), "cache": shape[4]}


def cache_format(shape: Shape) -> str:
    """The cache's name in --kv-cache-dtype."""
    return {"bfloat16": "bfloat16", "e4m3": "fp8", "block-scaled": "fp8_block"}[shape[4]]


def measure(
    shape: Shape, implementation: Implementation | None, *, xla: bool = False
) -> dict[str, Any]:
    """Returns a row of the table; with `xla` also XLA's time."""
    *sizes, cache = shape
    batch, heads, tokens, q_len = sizes
    row = mla.measure((batch, heads, tokens, q_len), implementation, xla=xla, cache=CACHES[cache])
    return {**label(shape), **{name: value for name, value in row.items() if name != "B,H,T,S"}}


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The speedups of FP8 caches over bfloat16 ones."""
    times = {(row["B,H,T,S"], row["cache"]): row["us"] for row in rows}
    said = []
    for (name, cache), time in times.items():
        if cache != "bfloat16" and (name, "bfloat16") in times:
            ratio = times[name, "bfloat16"] / time
            wanted = f" (wanted: at least {FASTER})" if name.split(",")[1] == "16" else ""
            said.append(f"{name}: {cache} {ratio:.2f} times as fast as bfloat16{wanted}")
    return said
