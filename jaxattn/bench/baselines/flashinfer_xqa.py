"""FlashInfer's XQA decode, called as by its users, for torch_runner.py."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxattn.bench.attention import gqa
from jaxattn.bench.harness.timing import rotation

DEVICE = "cuda"
SEMAPHORES, SCRATCH = 2**21, 2**28  # counters, and bytes, as in FlashInfer's own wrapper


def decode(*numbers: Any) -> Callable[[int], Any]:
    """XQA at a shape of `bench gqa`, without a gate, which XQA lacks.

    Queries are bfloat16 for every cache.
    """
    t, shape = importlib.import_module("torch"), gqa.GqaDecodeShape(*numbers)
    xqa = importlib.import_module("flashinfer").xqa
    batch, heads, kv_heads, dim, tokens = shape[:5]
    page, pages = shape.page, -(-tokens // shape.page)
    dtype = t.float8_e4m3fn if shape.cache == "fp8" else t.bfloat16
    nbytes = batch * shape.seen * kv_heads * dim * 2 * dtype.itemsize
    layers = min(
        rotation(nbytes, max_inputs=32), max(1, 2**34 // (2 * batch * tokens * kv_heads * dim))
    )

    def normal(*sizes: int) -> Any:
        return t.randn(sizes, dtype=t.bfloat16, device=DEVICE)

    q = normal(batch, 1, heads, dim)
    caches = [
        [normal(batch * pages, page, kv_heads, dim).to(dtype) for _ in range(2)]
        for _ in range(layers)
    ]
    table = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages)
    fixed: dict[str, Any] = {
        "page_table": t.tensor(table.tolist(), dtype=t.int32, device=DEVICE),
        "seq_lens": t.full((batch, 1), tokens, dtype=t.int32, device=DEVICE).view(t.uint32),
        "output": t.empty_like(q),
        "workspace_buffer": t.empty(SCRATCH, dtype=t.uint8, device=DEVICE),
        "semaphores": t.zeros(SEMAPHORES, dtype=t.int32, device=DEVICE).view(t.uint32),
        "num_kv_heads": kv_heads,
        "page_size": page,
        "sinks": t.randn(kv_heads, heads // kv_heads, device=DEVICE) if dim == 64 else None,
        "sliding_win_size": shape.window,
    }

    def call(i: int) -> Any:
        xqa(q, *caches[i % layers], **fixed)
        return fixed["output"]

    return call
