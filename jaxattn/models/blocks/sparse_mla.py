"""Sparse latent attention as a mixer of tokens: the indexer's pages, and choices handed on."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxattn import mla
from jaxattn.arena import Arena, ArenaSpec
from jaxattn.core.cache.formats import FP8, IndexKeyFormat
from jaxattn.core.cache.prompt_lines import PromptLines
from jaxattn.core.dispatch import Implementation
from jaxattn.core.stacked_layer import StackedLayer
from jaxattn.models.blocks.block import Matrix, Stream
from jaxattn.models.blocks.mla import MLA
from jaxattn.models.blocks.paged_mixer import addressing
from jaxattn.models.caches.cache_layouts import LatentPages, SparseLatentPages
from jaxattn.models.caches.layer_cache import Arrays
from jaxattn.models.interface import DecodeBatch, PrefillBatch
from jaxattn.nn import IndexPages, SparseMultiHeadLatentAttention
from jaxattn.ops.linear.norm_linear import PendingNorm

# What a layer with an indexer leaves to those without one: positions of prompts' and rows' tokens.
OF_PROMPTS, OF_ROWS = "chosen_by_prompts", "chosen_by_rows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseMLA(MLA):
    """DeepSeek Sparse Attention: MLA of each query to the tokens that an indexer chooses.

    Attributes:
        top_k: tokens that a query attends to, of those that it sees.
        index_heads: of the indexer; 0 is a layer without one, which takes the choice of the last
            layer before it that has one.
        index_head_dim: of its queries and keys.
        index_interleaved: the layout of its rotated dims.
        hands_on: whether layers without an indexer follow.
    """

    top_k: int
    index_heads: int
    index_head_dim: int = 128
    index_interleaved: bool = False
    hands_on: bool = False

    norms = False  # of one token too the indexer reads the norm
    read_apart = ("indexer",)

    @property
    def cache_name(self) -> str:
        return "latents" if self.index_heads else "latents without indexer"

    @property
    def array(self) -> str:
        return "kv_cache" if self.index_heads else "kv_cache_without_indexer"

    @property
    def kernels(self) -> dict[str, str]:
        of_indexer = {"mla_index": "mla_index_top_k"} if self.index_heads else {}
        return {"mla_sparse_decode": "mla_sparse"} | of_indexer

    def build(self, stream: Stream, rngs: nnx.Rngs) -> SparseMultiHeadLatentAttention:
        return SparseMultiHeadLatentAttention(
            **self.options(stream),
            top_k=self.top_k,
            index_heads=self.index_heads,
            index_head_dim=self.index_head_dim,
            index_interleaved=self.index_interleaved,
            rngs=rngs,
        )

    def matrices(self, stream: Stream) -> dict[str, Matrix]:
        found = super().matrices(stream)
        if not self.index_heads:
            return found
        low, dim = self.q_lora_rank or 0, self.index_head_dim
        return found | {
            "indexer.wq_b": Matrix(low, self.index_heads * dim),
            "indexer.wk": Matrix(stream.hidden_size, dim),
        }

    def cache(self, stream: Stream, layers: int) -> LatentPages:
        latents = super().cache(stream, layers)
        dtype = FP8 if latents.format.quantized else latents.format.dtype
        return SparseLatentPages(
            name=latents.name,
            layers=layers,
            format=latents.format,
            array=latents.array,
            keys=IndexKeyFormat(dtype, self.index_head_dim) if self.index_heads else None,
        )

    def scratch(
        self, stream: Stream, rows: int, *, q_len: int, max_pages: int, page_size: int
    ) -> ArenaSpec:
        return mla.sparse_scratch(
            batch=rows,
            q_len=q_len,
            num_heads=self.num_heads,
            top_k=min(self.top_k, max_pages * page_size),
            kv_lora_rank=self.kv_lora_rank,
            dtype=stream.dtype,
            batch_invariant=self.batch_invariant,
        )

    def handed_on(
        self, arrays: Arrays, prompts: PrefillBatch | None, rows: DecodeBatch | None
    ) -> Arrays:
        if not self.hands_on:
            return {}
        found = {}
        if prompts is not None:
            found[OF_PROMPTS] = prompts.tokens, prompts.block_tables
        if rows is not None:
            found[OF_ROWS] = rows.tokens, rows.block_tables
        page = self.page_size(arrays)
        return {
            name: jnp.full((*tokens.shape, min(self.top_k, tables.shape[1] * page)), -1, jnp.int32)
            for name, (tokens, tables) in found.items()
        }

    def handed_on_whole(self, rows: int, tokens: int) -> Array | None:
        if not self.hands_on:
            return None
        return jnp.full((rows, tokens, min(self.top_k, tokens)), -1, jnp.int32)

    def shared(
        self,
        module: Any,
        arrays: Arrays,
        batch: DecodeBatch,
        implementation: Any,
    ) -> dict[str, Any]:
        rotation = module.decode_rotation(batch.seq_lens, batch.tokens.shape[1])
        return {"rotation": rotation, "spread": None}

    def mixed(
        self,
        module: Any,
        x: Array,
        arrays: Arrays,
        arena: Arena | None,
        prompts: PrefillBatch,
        lines: PromptLines,
        rows: DecodeBatch | None,
        layer: StackedLayer,
        weights: Array | None,
        shared: dict[str, Any],
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena | None]:
        of_rows: dict[str, Any] | None = None
        if rows is not None:
            of_rows = {
                **addressing(rows, shared, self.most_tokens(arrays, rows)),
                "rotation": shared["rotation"],
                "weights": weights,
                "batch_invariant": self.batch_invariant,
                "arena": arena,
            }
        y, kv_cache, index, indices, after = module.mixed(
            x,
            arrays[self.array],
            index=self._pages(arrays),
            indices=(arrays.get(OF_PROMPTS), arrays.get(OF_ROWS)),
            lines=lines,
            block_tables=prompts.block_tables,
            seq_lens=prompts.seq_lens,
            query_lens=prompts.query_lens,
            rows=of_rows,
            layer=layer.index,
            implementation=implementation,
        )
        chosen = dict(zip((OF_PROMPTS, OF_ROWS), indices, strict=True))
        return y, self._arrays(kv_cache, index, chosen), after

    def decode(
        self,
        module: Any,
        x: Array | PendingNorm,
        arrays: Arrays,
        arena: Arena,
        batch: DecodeBatch,
        layer: StackedLayer,
        weights: Array | None,
        shared: dict[str, Any],
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena]:
        y, kv_cache, index, indices, after = module.decode(
            x,
            arrays[self.array],
            index=self._pages(arrays),
            indices=arrays.get(OF_ROWS),
            **addressing(batch, shared, self.most_tokens(arrays, batch)),
            layer=layer.index,
            rotation=shared["rotation"],
            weights=weights,
            batch_invariant=self.batch_invariant,
            arena=arena,
            implementation=implementation,
        )
        assert after is not None  # an arena came in
        return y, self._arrays(kv_cache, index, {OF_ROWS: indices}), after

    def _pages(self, arrays: Arrays) -> IndexPages | None:
        if not self.index_heads:
            return None
        return IndexPages(arrays["index_cache"], arrays.get("index_scale"))

    def _arrays(self, kv_cache: Array, index: IndexPages | None, chosen: dict[str, Any]) -> Arrays:
        """The arrays of a layer's cache, and what it hands on."""
        found = {self.array: kv_cache, **chosen}
        if index is not None:
            found |= {"index_cache": index.cache, "index_scale": index.scale}
        return {name: array for name, array in found.items() if array is not None}
