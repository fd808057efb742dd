"""MLA decode of FlashInfer and FlagGems, as their users call it, for torch_runner.py."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxattn.bench.attention import mla
from jaxattn.bench.baselines.torch_layers import DEVICE, torch
from jaxattn.bench.harness.timing import rotation


def paged(batch: int, tokens: int | str) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(tokens per row, pages per row, shuffled page numbers, number of caches that exceed L2)."""
    lens = mla.lengths(batch, tokens)
    pages = -(-lens // mla.PAGE)
    total = int(pages.sum())
    layers = rotation(total * mla.PAGE * mla.DIM * 2, max_inputs=32)
    return lens, pages, np.random.default_rng(0).permutation(total), layers


def flashinfer_mla(batch: int, heads: int, tokens: int | str, q_len: int) -> Callable[[int], Any]:
    """FlashInfer's wrapper, planned beforehand like our schedule."""
    t, flashinfer = torch(), importlib.import_module("flashinfer.mla")
    lens, pages, numbers, layers = paged(batch, tokens)
    normal = functools.partial(t.randn, dtype=t.bfloat16, device=DEVICE)
    rank, rope = mla.RANK, mla.DIM - mla.RANK
    latents = [normal(len(numbers), mla.PAGE, rank) for _ in range(layers)]
    rotated = [normal(len(numbers), mla.PAGE, rope) for _ in range(layers)]
    q_nope, q_pe = normal(batch * q_len, heads, rank), normal(batch * q_len, heads, rope)
    index = functools.partial(t.tensor, dtype=t.int32, device=DEVICE)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(
        t.empty(128 * 2**20, dtype=t.int8, device=DEVICE)
    )
    wrapper.plan(
        qo_indptr=index([q_len * row for row in range(batch + 1)]),
        kv_indptr=index([0, *pages.cumsum().tolist()]),
        kv_indices=index(numbers.tolist()),
        kv_len_arr=index(lens.tolist()),
        num_heads=heads,
        head_dim_ckv=rank,
        head_dim_kpe=rope,
        page_size=mla.PAGE,
        causal=q_len > 1,
        sm_scale=mla.SCALE,
        q_data_type=t.bfloat16,
        kv_data_type=t.bfloat16,
    )
    return lambda i: wrapper.run(
        q_nope=q_nope, q_pe=q_pe, ckv_cache=latents[i % layers], kpe_cache=rotated[i % layers]
    )


def flaggems_mla(batch: int, heads: int, tokens: int | str, q_len: int) -> Callable[[int], Any]:
    """FlagGems' kernel, which is written in Triton and does not split rows."""
    if q_len != 1:
        raise ValueError(f"it supports only one token per row, not {q_len}")
    t, flag_gems = torch(), importlib.import_module("flag_gems")
    lens, pages, numbers, layers = paged(batch, tokens)
    most = int(pages.max())
    normal = functools.partial(t.randn, dtype=t.bfloat16, device=DEVICE)
    caches = [normal(len(numbers), mla.PAGE, 1, mla.DIM) for _ in range(layers)]
    q = normal(batch, 1, heads, mla.DIM)
    table = np.zeros((batch, most), np.int32)
    table[np.arange(most) < pages[:, None]] = numbers
    index = functools.partial(t.tensor, dtype=t.int32, device=DEVICE)
    tables, lengths = index(table.tolist()), index(lens.tolist())
    return lambda i: flag_gems.flash_mla(
        q, tables, caches[i % layers], most * mla.PAGE, mla.PAGE, batch, 1, lengths, heads, 1,
        mla.DIM, mla.RANK, True,
    )  # fmt: skip
