"""Small launches of the kernels for grouped queries, as sanitize_cases.py has those of others."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import gqa
from jaxattn.core.dispatch import Implementation
from jaxattn.core.numerics.rope import RopeConfig, rotation

HEADS, KV_HEADS, PAGE, LAYERS = 8, 2, 64, 2

Case = Callable[[Implementation], tuple[Callable[..., Any], tuple[Any, ...]]]


def _rows(lens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(block tables without a page behind a row's end, lengths)."""
    needed = [-(-length // PAGE) for length in lens]
    tables = np.full((len(lens), max(needed)), 2147480000, np.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = sum(needed[:row]) + np.arange(count)
    return tables, np.asarray(lens, np.int32)


def append_and_decode(
    dim: int, *, fp8: bool = False, preset: str | None = None, window: int | None = None
) -> Case:
    """A chunk of 70 tokens in each of three rows, of which one is empty, is cached and attended to
    what is cached, and then the last two tokens alone. One row is long enough to be cut."""

    def case(implementation: Implementation) -> Any:
        draw, new = np.random.default_rng(dim), 70
        tables, lens = _rows([70, 0, 860])
        config, count = RopeConfig(dim=dim, interleaved=False), int((-(-lens // PAGE)).sum())
        normal = lambda *shape: np.asarray(draw.normal(size=shape))  # noqa: E731
        sinks = normal(HEADS).astype(np.float32) if dim == 64 else None
        options: dict[str, Any] = {"layer": 1, "implementation": implementation}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the cache format")  # of 3 bits
            form = None if preset is None else gqa.TurboFormat(preset=preset, head_dim=dim)
        if form is None:
            stored = jnp.float8_e4m3fn if fp8 else jnp.bfloat16
            cache = normal(LAYERS, count, 2, PAGE, KV_HEADS, dim).astype(stored)
            scaled = options | ({"kv_scale": 0.5} if fp8 else {})
            append, attend = gqa.gqa_append, gqa.gqa_decode
        else:
            cache = np.full((LAYERS, count, KV_HEADS, PAGE * form.slot_bytes), 0x11, np.uint8)
            scaled = options | {"form": form}
            append, attend = gqa.turbo_append, gqa.turbo_attention  # type: ignore[assignment]

        def op(q: Any, k: Any, v: Any, cache: Any, tables: Any, lens: Any, sinks: Any) -> Any:
            angles = rotation(jnp.maximum(lens - new, 0)[:, None] + jnp.arange(new), config)
            queries, cache = append(
                q, k, v, None, cache, tables, lens, rotation=angles, config=config, **scaled
            )
            more = scaled | {"window": window, "sinks": sinks}
            if form is not None:
                chunk = attend(queries, cache, tables, lens, **more)
            else:
                news = jnp.minimum(lens, new)
                chunk = gqa.gqa_prefill(queries, k, v, cache, tables, lens, news, **more)
            gate = q[:, -2:] if dim == 256 else None
            return attend(queries[:, -2:], cache, tables, lens, gate=gate, **more), chunk

        q, kv = (3, new, HEADS, dim), (3, new, KV_HEADS, dim)
        new_heads = [normal(*shape).astype(jnp.bfloat16) for shape in (q, kv, kv)]
        arrays = *new_heads, cache, tables, lens
        return op, (*map(jax.device_put, arrays), None if sinks is None else jax.device_put(sinks))

    return case


CASES: dict[str, Case] = {
    "gqa_append_decode": append_and_decode(128),
    "gqa_append_decode_window": append_and_decode(64, window=100),
    "gqa_append_decode_e4m3": append_and_decode(256, fp8=True),
    "turbo_append_decode_k8v4": append_and_decode(128, preset="k8v4"),
    "turbo_append_decode_4bit": append_and_decode(64, preset="4bit_nc"),
    "turbo_append_decode_k3v4": append_and_decode(128, preset="k3v4_nc"),
}
