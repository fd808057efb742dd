"""FlashMLA and FlashAttention-3 as shipped by vLLM, for torch_runner.py.

Both are libraries in vLLM's wheel that register operators with PyTorch. This module loads them from
the wheel's folder without importing vllm, so any PyTorch 2.11 or later with CUDA 13 works.

vLLM does not build FlashMLA with FlashMLA's own flags, which are faster (docs/performance.md).
"""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxattn.bench.attention import gqa, gqa_prefill, mla, mla_prefill, mla_sparse
from jaxattn.bench.harness.timing import rotation

DEVICE = "cuda"
FLASHMLA = "_flashmla_C.abi3.so"
FLASH_ATTENTION = "vllm_flash_attn/_vllm_fa3_C.abi3.so"

Call = Callable[[int], Any]


def operators(file: str) -> Any:
    """The operators of a library in vLLM's folder.

    Raises:
        OSError: the library is missing, or does not load.
    """
    torch = importlib.import_module("torch")
    spec = importlib.util.find_spec("vllm")
    [folder] = (spec and spec.submodule_search_locations) or [""]
    torch.ops.load_library(str(Path(folder) / file))
    return getattr(torch.ops, Path(file).name.partition(".")[0])


def _normal(*shape: int, dtype: Any = None) -> Any:
    torch = importlib.import_module("torch")
    drawn = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    return drawn if dtype is None else drawn.to(dtype)


def _ints(values: Any) -> Any:
    torch = importlib.import_module("torch")
    return torch.as_tensor(np.asarray(values, np.int32), device=DEVICE)


def _tables(batch: int, pages: int) -> Any:
    return _ints(np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages))


def flashmla(batch: int, heads: int, tokens: int | str, q_len: int) -> Call:
    """FlashMLA's dense decode; its schedule is computed beforehand, like ours."""
    if isinstance(tokens, str):
        raise ValueError(f"it supports only rows of one length, not {tokens}")
    op = operators(FLASHMLA).dense_decode_fwd
    pages = -(-tokens // mla.PAGE)
    layers = rotation(batch * pages * mla.PAGE * mla.DIM * 2, max_inputs=32)
    q = _normal(batch, q_len, heads, mla.DIM)
    caches = [_normal(batch * pages, mla.PAGE, 1, mla.DIM) for _ in range(layers)]
    fixed = (mla.RANK, _ints([tokens] * batch), _tables(batch, pages), mla.SCALE, q_len > 1)
    plan = op(q, caches[0], *fixed, None, None, None)[2:]
    return lambda i: op(q, caches[i % layers], *fixed, *plan, None)


def flashmla_sparse(
    batch: int, q_len: int, heads: int, tokens: int, top_k: int, cache: str
) -> Call:
    """FlashMLA's attention to lists of positions: its decode, or its prefill of one row.

    The lists index tokens of a flat cache without a block table, so a row's pages are consecutive.
    """
    decodes = q_len <= mla_sparse.MOST_DECODED
    if decodes != (cache == mla_sparse.SCALED) or not (decodes or batch == 1):
        raise ValueError(
            "it decodes only from block-scaled caches, and prefills only one row of a bfloat16 "
            "cache"
        )
    ops, width = operators(FLASHMLA), -(-tokens // mla.PAGE) * mla.PAGE
    layers = mla_sparse.layers_of(batch, q_len, tokens, top_k, cache)
    drawn = np.random.default_rng(0)
    lists = np.empty((batch, q_len, top_k), np.int32)
    for row, token in np.ndindex(batch, q_len):
        seen = drawn.permutation(tokens - q_len + 1 + token)
        lists[row, token] = row * width + np.sort(seen[:top_k])
    q, listed = _normal(batch, q_len, heads, mla.DIM), _ints(lists)
    latents = [_normal(batch * width, 1, mla.DIM) for _ in range(layers)]
    if not decodes:
        fixed = (listed.view(q_len, 1, top_k), mla.SCALE, mla.RANK, None, None, None)
        return lambda i: ops.sparse_prefill_fwd(q[0], latents[i % layers], *fixed)
    caches = [_block_scaled(each).view(-1, mla.PAGE, 1, 656) for each in latents]
    rest = (None, None, None, mla.RANK, mla.SCALE)
    plan = ops.sparse_decode_fwd(q, caches[0], listed, None, None, None, None, *rest)[2:]
    return lambda i: ops.sparse_decode_fwd(q, caches[i % layers], listed, None, None, *plan, *rest)


def _block_scaled(latents: Any) -> Any:
    """Latents [N, 1, 576] in FlashMLA's 656 bytes: e4m3 numbers, four scales, the rope dims."""
    torch = importlib.import_module("torch")
    numbers = latents[..., : mla.RANK].reshape(-1, 4, 128).float()
    scale = (numbers.abs().amax(-1, keepdim=True) / 448).log2().ceil().exp2()
    parts = (numbers / scale).to(torch.float8_e4m3fn), scale, latents[..., mla.RANK :].contiguous()
    return torch.cat([x.view(torch.uint8).reshape(len(latents), -1) for x in parts], -1)


class FlashAttention3:
    """FlashAttention-3's `fwd` on packed queries, called as in vLLM.

    Args:
        scale: The scale of the scores.
        window: Tokens that a query sees, including itself; None for all before it.
        sinks: [heads], or None.
    """

    def __init__(self, *, scale: float, window: int | None = None, sinks: Any = None):
        self.ops = operators(FLASH_ATTENTION)
        self.scale, self.sinks = scale, sinks
        self.left = -1 if window is None else window - 1

    def metadata(
        self, lens: Any, rows: Any, *, heads: int, kv_heads: int, dim: int, most: int, page: int,
        dtype: Any,
    ) -> Any:  # fmt: skip
        """The schedule for one token per row."""
        right = -1 if self.left < 0 else 0
        return self.ops.get_scheduler_metadata(
            *(len(lens), 1, most, heads, kv_heads, dim, dim, dtype, lens, rows),
            *(None, None, None, None, page, 0, True, self.left, right, False, 0, None, 0),
        )

    def __call__(
        self,
        q: Any,
        keys: Any,
        values: Any,
        out: Any,
        rows: Any,
        *,
        longest: tuple[int, int],
        lens: Any = None,
        tables: Any = None,
        metadata: Any = None,
        descales: tuple[Any, Any, Any] = (None, None, None),
    ) -> Any:
        """Attention of queries `rows[i]` to `rows[i + 1]`.

        The keys are those of the same packed tokens, or `lens[i]` tokens in the pages `tables[i]`.
        """
        right = -1 if self.left < 0 else 0
        packed_keys = None if tables is not None else rows
        return self.ops.fwd(
            *(q, keys, values, None, None, None, out, rows, packed_keys, None, None, lens),
            *(*longest, tables, None, None, None, None, None, *descales),
            *(self.scale, True, self.left, right, 0.0, True, metadata, 0, None, 0, self.sinks),
            *(1, 0, None),
        )


def flash_attention_decode(*numbers: Any) -> Call:
    """FlashAttention-3's paged decode at a shape of `bench gqa`, without a gate, which it lacks."""
    torch = importlib.import_module("torch")
    shape = gqa.GqaDecodeShape(*numbers)
    batch, heads, kv_heads, dim, tokens = shape[:5]
    page = shape.page
    pages = -(-tokens // page)
    dtype = torch.float8_e4m3fn if shape.cache == "fp8" else torch.bfloat16
    nbytes = batch * shape.seen * kv_heads * dim * 2 * dtype.itemsize
    layers = min(
        rotation(nbytes, max_inputs=32), max(1, 2**34 // (2 * batch * tokens * kv_heads * dim))
    )
    q = _normal(batch, heads, dim, dtype=dtype)
    keys, values = (
        [_normal(batch * pages, page, kv_heads, dim, dtype=dtype) for _ in range(layers)]
        for _ in range(2)
    )
    tables, lens, rows = _tables(batch, pages), _ints([tokens] * batch), _ints(range(batch + 1))
    out = torch.empty(batch, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    sinks = _normal(heads) if dim == 64 else None
    attention = FlashAttention3(scale=dim**-0.5, window=shape.window or None, sinks=sinks)
    metadata = attention.metadata(
        lens, rows, heads=heads, kv_heads=kv_heads, dim=dim, most=tokens, page=page, dtype=dtype
    )
    ones = torch.ones(1, device=DEVICE).expand(batch, kv_heads) if dtype.itemsize == 1 else None
    return lambda i: attention(
        *(q, keys[i % layers], values[i % layers], out, rows),
        longest=(1, tokens), lens=lens, tables=tables, metadata=metadata, descales=(ones,) * 3,
    )  # fmt: skip


def _packed(count: int, tokens: int, heads: int, kv_heads: int, dim: int, values: int) -> Call:
    """Causal prefill of `count` sequences of `tokens` each."""
    torch = importlib.import_module("torch")
    total = count * tokens
    layers = rotation(total * 2 * ((heads + kv_heads) * dim + kv_heads * values))
    sets = [
        [_normal(total, n, d) for n, d in ((heads, dim), (kv_heads, dim), (kv_heads, values))]
        for _ in range(layers)
    ]
    out = torch.empty(total, heads, values, dtype=torch.bfloat16, device=DEVICE)
    rows = _ints(range(0, total + 1, tokens))
    attention = FlashAttention3(scale=dim**-0.5)

    def call(i: int) -> Any:
        q, keys, values = sets[i % layers]
        return attention(q, keys, values, out, rows, longest=(tokens, tokens))

    return call


def flash_attention_mla_prefill(batch: int, tokens: int, heads: int, prefix: int) -> Call:
    """FlashAttention-3 with 192 dims of keys and 128 of values."""
    if prefix:
        raise ValueError("it needs the keys and values of a prefix to be expanded")
    dim = mla_prefill.NOPE + mla_prefill.ROPE
    return _packed(batch, tokens, heads, heads, dim, mla_prefill.VALUES)


def flash_attention_prefill(*numbers: int) -> Call:
    """FlashAttention-3 at a shape of `bench gqa-prefill`, without a gate, which it lacks."""
    shape = gqa_prefill.GqaPrefillShape(*numbers)
    if shape.prefix:
        raise ValueError("its call on a prefix in pages is not timed here")
    if shape.window:
        raise ValueError("its call with a window is not timed here")
    return _packed(shape.batch, shape.tokens, shape.heads, shape.kv_heads, shape.dim, shape.dim)
