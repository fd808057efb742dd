"""Sparse MLA as a mixer of tokens: the indexer's pages, and choices passed on between layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxattn import mla
from jaxattn.arena import Arena, ArenaSpec
from jaxattn.core.cache.formats import FP8, IndexKeyFormat
from jaxattn.models.blocks.mixer import Matrix, Stream
from jaxattn.models.blocks.mla import MLA
from jaxattn.models.blocks.paged_mixer import attended
from jaxattn.models.caches.cache_layouts import LatentPages, SparseLatentPages
from jaxattn.models.caches.layer_cache import Arrays
from jaxattn.models.interface import DecodeBatch, PrefillBatch
from jaxattn.nn import IndexPages, SparseMultiHeadLatentAttention

# Names of the positions that a layer with an indexer passes on, for prompts' and rows' tokens.
OF_PROMPTS, OF_ROWS = "chosen_by_prompts", "chosen_by_rows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseMLA(MLA):
    """DeepSeek Sparse Attention: MLA of each query to the tokens that an indexer chooses.

    Attributes:
        top_k: Number of tokens that a query attends to, among those that it sees.
        index_heads: Number of heads of the indexer. 0 means that the layer has none and uses the
            choice of the last layer before it that has one.
        index_head_dim: Dimension of the indexer's queries and keys.
        index_interleaved: Whether the indexer's rotated dims are interleaved.
        shares_indices: Whether layers without an indexer follow.
        sinks: Whether each head has a logit without a value in its softmax.
    """

    top_k: int
    index_heads: int
    index_head_dim: int = 128
    index_interleaved: bool = False
    shares_indices: bool = False
    sinks: bool = False

    norms = False  # the indexer reads the norm, also for a single token
    unpacked_params = ("indexer", "sinks")

    @property
    def cache_name(self) -> str:
        return "latents" if self.index_heads else "latents without indexer"

    @property
    def array(self) -> str:
        return "kv_cache" if self.index_heads else "kv_cache_without_indexer"

    @property
    def meeting(self) -> None:
        return None

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
            sinks=self.sinks,
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
        places = max_pages * page_size * self.parallel.context
        rows, q_len, heads = attended(self.parallel, rows, q_len, self.num_heads)
        return mla.sparse_scratch(
            batch=rows,
            q_len=q_len,
            num_heads=heads,
            top_k=min(self.top_k, places),
            kv_lora_rank=self.kv_lora_rank,
            dtype=stream.dtype,
            batch_invariant=self.batch_invariant,
        )

    def handed_on(
        self, arrays: Arrays, prompts: PrefillBatch | None, rows: DecodeBatch | None
    ) -> Arrays:
        if not self.shares_indices:
            return {}
        found = {}
        if prompts is not None:
            found[OF_PROMPTS] = prompts.tokens, prompts.block_tables
        if rows is not None:
            found[OF_ROWS] = rows.tokens, rows.block_tables
        page = self.page_size(arrays) * self.parallel.context
        return {
            name: jnp.full((*tokens.shape, min(self.top_k, tables.shape[1] * page)), -1, jnp.int32)
            for name, (tokens, tables) in found.items()
        }

    def whole(
        self, module: Any, x: Array, packed: Mapping[str, Any], handed_on: Array | None
    ) -> tuple[Array, Array | None]:
        if handed_on is None:
            return module(x, **packed), None
        if self.index_heads:
            handed_on = module.choose(x, **packed)
        return module(x, indices=handed_on, **packed), handed_on

    def handed_on_whole(self, rows: int, tokens: int) -> Array | None:
        if not self.shares_indices:
            return None
        return jnp.full((rows, tokens, min(self.top_k, tokens)), -1, jnp.int32)

    def options_of_step(self, **sizes: Any) -> dict[str, Any]:
        return {"batch_invariant": self.batch_invariant}

    def get_decode_extras(self, arrays: Arrays, *, mixed: bool) -> dict[str, Any]:
        of_prompts, of_rows = arrays.get(OF_PROMPTS), arrays.get(OF_ROWS)
        index = None
        if self.index_heads:
            index = IndexPages(arrays["index_cache"], arrays.get("index_scale"))
        return {"index": index, "indices": (of_prompts, of_rows) if mixed else of_rows}

    def arrays_of(self, results: list[Any]) -> tuple[Arrays, Arena | None]:
        kv_cache, index, chosen, after, *sent = results
        of_prompts, of_rows = chosen if isinstance(chosen, tuple) else (None, chosen)
        given = {self.array: kv_cache, OF_PROMPTS: of_prompts, OF_ROWS: of_rows}
        if index is not None:
            given |= {"index_cache": index.cache, "index_scale": index.scale}
        given = {name: array for name, array in given.items() if array is not None}
        return given | self.exchanged_by(sent), after
