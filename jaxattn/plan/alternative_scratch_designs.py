"""Scratch memory of other designs, computed as in the reports below.

The tests check each formula against the allocation that its report names. "Naive" is a buffer per
layer, or a workspace for the longest context that the model supports. For split-KV attention "here"
is the maximum of `gqa_decode` for the same heads in any batch up to this number of rows. Only the
number of multiprocessors bounds its partial results, not the context, the batch or the layers.

    DeepSeek-R1, decode output for each layer        vllm-project/vllm#37442, #37799, #37815
    TurboQuant, splits' partial results              vllm-project/vllm#40655, #40798
    SGLang, split-KV workspace for the longest row   sgl-project/sglang#20888
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

from jaxattn import gqa
from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.memory.plan import nbytes
from jaxattn.models.caches.cache_layouts import (
    KeyValuePages,
    LatentPages,
    RecurrentState,
    TurboquantPages,
)
from jaxattn.models.catalog.model_sizes import ModelSizes


@dataclasses.dataclass(frozen=True)
class ScratchComparison:
    """The bytes of a naive design and of jaxattn's arena for the same work."""

    name: str
    nbytes: int
    arena_bytes: int
    why: str


def per_layer_output(*, rows: int, heads: int, rank: int, layers: int, itemsize: int = 2) -> int:
    """Returns the bytes of a persistent decode output [rows, heads, rank] per layer."""
    return layers * rows * heads * rank * itemsize


def per_layer_splits(*, rows: int, heads: int, splits: int, dim: int, layers: int) -> int:
    """Returns the bytes of float32 partial outputs with their LSE [rows, heads, splits, dim + 1],
    and of output and LSE, per layer."""
    return layers * split_buffers(rows=rows, heads=heads, splits=splits, dim=dim)


def split_buffers(*, rows: int, heads: int, splits: int, dim: int) -> int:
    """Returns the bytes of `per_layer_splits` for one layer."""
    return rows * heads * 4 * (splits * (dim + 1) + dim + 1)


def split_kv_workspace(
    *, rows: int, heads: int, tokens: int, dim: int, partition: int = 256
) -> int:
    """Returns the bytes of a workspace with a partial output, a maximum and a sum per partition."""
    return rows * heads * -(-tokens // partition) * (4 * dim + 8)


def partial_results(
    *, rows: int, heads: int, kv_heads: int, dim: int, tokens: int, page_size: int = PAGE_SIZE
) -> int:
    """Returns the maximum bytes of `gqa_decode`'s partial results, for up to `rows` rows.

    They are float32 outputs in the arena, with an LSE for each.
    """
    max_bytes = 0
    for doubled in range(rows.bit_length()):
        spec = gqa.scratch(
            batch=min(2**doubled, rows), q_len=1, num_heads=heads, num_kv_heads=kv_heads,
            head_dim=dim, max_pages=-(-tokens // page_size), page_size=page_size,
        )  # fmt: skip
        shapes = dict(spec.regions)
        if "partial_out" in shapes:
            outputs = nbytes(shapes["partial_out"])
            max_bytes = max(max_bytes, outputs + outputs // dim)
    return max_bytes


def published() -> tuple[ScratchComparison, ...]:
    """Returns the four cases of the reports."""
    r1 = dict(rows=2048, heads=128, rank=512)
    qwen, llama = (dict(rows=1024, heads=heads, splits=32, dim=128) for heads in (64, 32))
    sglang = dict(rows=2048, heads=32, dim=128)
    gqa_results = partial(partial_results, kv_heads=8, dim=128)
    return (
        ScratchComparison(
            "DeepSeek-R1, 2048 rows",
            per_layer_output(**r1, layers=61),
            per_layer_output(**r1, layers=1),
            "decode output in each of 61 layers, against one in the arena",
        ),
        ScratchComparison(
            "TurboQuant, 60 layers, 64 heads, 1024 rows",
            per_layer_splits(**qwen, layers=60),
            gqa_results(rows=1024, heads=64, tokens=40_960),
            "32 splits' partial results in each layer, against those of 132 parts",
        ),
        ScratchComparison(
            "TurboQuant, Llama-3.1-70B on 2 GPUs, 1024 rows",
            per_layer_splits(**llama, layers=76),
            gqa_results(rows=1024, heads=32, kv_heads=4, tokens=131_072),
            "the same with 76 layers and 32 heads per GPU",
        ),
        ScratchComparison(
            "SGLang, 131,072 context, 25,432 cached tokens",
            split_kv_workspace(**sglang, tokens=131_072),
            gqa_results(rows=2048, heads=32, tokens=131_072),
            "a workspace for the longest context, against partial results of 132 parts",
        ),
    )


def of_model(
    model: ModelSizes, rows: int, num_shards: int, arena: int
) -> Sequence[ScratchComparison]:
    """Compares one decode output per layer of the model with its planned arena."""
    output_bytes = 0
    for cache in model.caches(num_shards):
        if isinstance(cache, LatentPages):
            heads, rank = model.num_heads // num_shards, cache.format.kv_lora_rank
            output_bytes += per_layer_output(rows=rows, heads=heads, rank=rank, layers=cache.layers)
        elif isinstance(cache, KeyValuePages | TurboquantPages):
            heads, dim = model.num_heads // num_shards, cache.head_dim
            output_bytes += per_layer_output(rows=rows, heads=heads, rank=dim, layers=cache.layers)
        elif isinstance(cache, RecurrentState):
            heads, dim, _ = cache.state_shape
            output_bytes += per_layer_output(rows=rows, heads=heads, rank=dim, layers=cache.layers)
    why = f"decode outputs of {rows:,} rows in each layer, against the planned arena"
    return (ScratchComparison(model.name, output_bytes, arena, why),)
