"""DeepSeek Sparse Attention: multi-head latent attention to the tokens that an indexer chooses.

A layer may have no indexer and take the choice of a layer before it (GLM-5.2).
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxattn import mla
from jaxattn.arena import Arena
from jaxattn.core.cache.prompt_lines import PromptLines
from jaxattn.core.dispatch import Implementation
from jaxattn.core.numerics.rope import Rotation, in_layout
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import check_sizes
from jaxattn.nn.attention.mla import MultiHeadLatentAttention
from jaxattn.nn.attention.token_indexer import IndexPages, TokenIndexer, chosen, written
from jaxattn.ops.attention.segments import SegmentBounds
from jaxattn.ops.linear.norm_linear import PendingNorm, tokens_of
from jaxattn.ops.mla.sparse.index import index_xla

type Rows = tuple[Any, Any, Any]


class SparseMultiHeadLatentAttention(MultiHeadLatentAttention):
    """MLA of which each query attends to `top_k` tokens; a DeepSeek-V3.2 layer without its norm.

    Differentiable in whole sequences, where attention runs in plain JAX. The choice has no
    gradient, and so the indexer has none.

    Parameters: those of `MultiHeadLatentAttention`, and `indexer`, a `TokenIndexer`.

    Args:
        q_lora_rank: of the queries, which the indexer reads too.
        top_k: tokens that a query attends to, of those that it sees.
        index_heads: of the indexer; 0 is a layer without one, which takes `indices`.
        index_head_dim: of its queries and keys.
        index_interleaved: the layout of its rotated dims: GLM-5 has pairs side by side,
            DeepSeek-V3.2 has halves.
        options: of `MultiHeadLatentAttention`.

    Raises:
        ValueError: a size is not a positive integer.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        q_lora_rank: int,
        top_k: int = 2048,
        index_heads: int = 64,
        index_head_dim: int = 128,
        index_interleaved: bool = False,
        fp8: Collection[str] = (),
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        check_sizes("SparseMultiHeadLatentAttention", q_lora_rank=q_lora_rank, top_k=top_k)
        given: dict[str, Any] = dict(fp8=fp8, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(hidden_size, num_heads, q_lora_rank=q_lora_rank, **given, **options)
        self.top_k = top_k
        rope = dataclasses.replace(self.rope, interleaved=index_interleaved)
        self.indexer = (
            TokenIndexer(
                hidden_size, q_lora_rank, heads=index_heads, head_dim=index_head_dim, rope=rope,
                **given,
            )
            if index_heads
            else None
        )  # fmt: skip

    def __call__(
        self,
        x: Float[Array, "B T hidden"],
        *,
        indices: Int[Array, "B T K"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cu_seqlens: Int[Array, " n+1"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T hidden"]:
        """Attention over whole sequences; see `MultiHeadLatentAttention`.

        Args:
            indices: places in the row that each token attends to (`choose`). A layer without an
                indexer needs them; another has its own.
        """
        return self._whole(x, segment_ids, cu_seqlens, positions, indices=indices)

    def choose(
        self,
        x: Float[Array, "B T hidden"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        cu_seqlens: Int[Array, " n+1"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Int[Array, "B T K"]:
        """The places in the row that each token of whole sequences attends to."""
        x, _, positions = self._isolated(x, segment_ids, cu_seqlens, positions)
        compressed = self.q_a_norm(self.q_a_proj(x)).astype(self.dtype)
        bounds = self._bounds(x, {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens})
        return self._choose_whole(x, compressed, positions, bounds)

    def _bounds(self, x: Array, packed: Mapping[str, Any]) -> SegmentBounds:
        arguments = OpArguments(type(self).__name__)
        given = packed["segment_ids"], packed["cu_seqlens"]
        return SegmentBounds.checked(arguments, x, None, *given)

    def _choose_whole(
        self, x: Array, compressed: Array, positions: Array, bounds: SegmentBounds
    ) -> Int[Array, "B T K"]:
        """Of sequences in a row each as if it were alone: a row is one page."""
        if self.indexer is None:
            raise ValueError(
                "SparseMultiHeadLatentAttention: a layer without an indexer (index_heads=0) needs "
                "indices=, the choice of a layer before it"
            )
        asked = self.indexer.turned(self.indexer(x, compressed), positions)
        tables, lens = self._as_pages(x)
        most = min(self.top_k, x.shape[1])
        first = None if bounds.first is None else jnp.broadcast_to(bounds.first, x.shape[:2])
        return index_xla(
            asked.q, asked.weights, asked.keys, tables, lens, query_lens=lens, top_k=most,
            begins=first,
        )  # fmt: skip

    @staticmethod
    def _as_pages(x: Array) -> tuple[Array, Array]:
        """The block tables and lengths of rows that are a page each."""
        rows = jnp.arange(x.shape[0], dtype=jnp.int32)
        return rows[:, None], jnp.full_like(rows, x.shape[1])

    def _attend_whole(
        self, x: Array, positions: Array, packed: dict[str, Any]
    ) -> Float[Array, "B T hidden"]:
        compressed = self.q_a_norm(self.q_a_proj(x)).astype(self.dtype)
        bounds = self._bounds(x, packed)
        indices = packed["indices"]
        if indices is None:
            indices = self._choose_whole(x, compressed, positions, bounds)
        q_nope, q_pe = self._turned(self._heads(x, compressed), positions)
        queries = mla.absorb_query(q_nope, self.w_uk[...].astype(self.dtype)), q_pe
        there = jnp.arange(x.shape[1]) < bounds.lengths[:, None]
        tables, lens = self._as_pages(x)
        out, _ = mla.mla_sparse_prefill(
            queries, self._latents(x, positions), tables, lens,
            jnp.where(there[..., None], indices, -1),
            scale=self.scale, kv_lora_rank=self.kv_lora_rank, implementation="xla",
        )  # fmt: skip
        return self._project_out(x, self._values_of(out))

    def prefill(  # type: ignore[override]
        self,
        x: Float[Array, "B T hidden"],
        kv_cache: Float[Array, "..."],
        *,
        index: IndexPages | None = None,
        indices: Int[Array, "B T K"] | None = None,
        block_tables: Int[Array, "B M"],
        seq_lens: Int[Array, "B"],
        query_lens: Int[Array, "B"],
        layer: int | Int[Array, ""] | None = None,
        kv_scale: Array | float | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T hidden"], Array, IndexPages | None, Int[Array, "B T K"]]:
        """A chunk of each row's prompt, as in `MultiHeadLatentAttention`.

        Args:
            index: the pages of the indexer's keys, with the layers and pages of `kv_cache`.
            indices: of a layer without an indexer, the choice of a layer before it.

        Returns:
            (float32 [B, T, hidden], the cache, the pages of keys, the choice).
        """
        arguments = self._check_tokens(f"{type(self).__name__}.prefill", x, "B T hidden")
        arguments.check_paged(kv_cache, block_tables, seq_lens, layer)
        block_tables, seq_lens, query_lens = self._as_given(
            arguments, x, block_tables, seq_lens, query_lens
        )
        rows = jnp.asarray(query_lens), jnp.asarray(seq_lens)
        lines = PromptLines.of(None, *rows, x.shape[1])
        flat = x.reshape(1, -1, x.shape[-1])
        y, kv_cache, index, (indices, _), _ = self.mixed(
            flat, kv_cache, index=index, indices=(indices, None), lines=lines,
            block_tables=block_tables, seq_lens=seq_lens, query_lens=query_lens, rows=None,
            layer=layer, kv_scale=kv_scale, implementation=implementation,
        )  # fmt: skip
        return y.reshape(*x.shape[:2], -1), kv_cache, index, indices

    def mixed(  # type: ignore[override]
        self,
        x: Float[Array, "1 N hidden"],
        kv_cache: Array,
        *,
        index: IndexPages | None = None,
        indices: tuple[Any, Any] = (None, None),
        lines: PromptLines,
        block_tables: Int[Array, "B M"],
        seq_lens: Int[Array, "B"],
        query_lens: Int[Array, "B"],
        rows: Mapping[str, Any] | None,
        layer: int | Int[Array, ""] | None = None,
        kv_scale: Array | float | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Any, ...]:
        """Pieces of prompts in lines and a token of each of other rows, as in
        `MultiHeadLatentAttention`.

        Args:
            index: the pages of the indexer's keys.
            indices: of a layer without an indexer, the choices [L, T, K] and [R, 1, K].

        Returns:
            (float32 [1, N, hidden], the cache, the pages of keys, the choices, the arena or None).
        """
        del seq_lens, query_lens  # each line has its own
        index = self._checked(kv_cache, index)
        q, latents = self._down(x)
        (of_lines_q, of_rows_q), (own, others) = lines.split(q), lines.split(latents)
        positions = (lines.seq_lens - lines.query_lens)[:, None] + jnp.arange(lines.tokens)
        positions = jnp.maximum(positions, 0)
        # To the ops each line is a row, whose earlier lines are its prefix.
        of_lines = lines.of_row(jnp.asarray(block_tables), 0), lines.seq_lens, lines.query_lens
        latent = self._latents_of(own, positions).astype(self._dtype_beside(kv_cache))
        tables, lens, new = of_lines
        kv_cache = mla.mla_cache_write(
            kv_cache, latent, tables, lens, query_lens=new, layer=layer, kv_scale=kv_scale
        )
        rotation, compressed = None, None
        if rows is not None:
            rotation = self._rotation_of(rows["seq_lens"], rows.get("rotation"))
            compressed, kv_cache = self._append_rows(
                others, of_rows_q, kv_cache,
                rows["block_tables"], rows["seq_lens"], rotation=rotation,
                weights=rows.get("weights"), kv_scale=kv_scale, layer=layer,
                implementation=implementation,
            )  # fmt: skip
        of_lines_q = self.q_a_norm(of_lines_q).astype(self.dtype)
        q = lines.join(of_lines_q, compressed)
        of_lines_q, of_rows_q = lines.split(self._heads(x, q))
        picked, of_rows_picked = indices
        asked: list[tuple[Array, Array]] = []
        if self.indexer is not None:
            asked = [lines.split(each) for each in self.indexer(x, q)]
        given: dict[str, Any] = dict(layer=layer, kv_scale=kv_scale)
        chunked = implementation if implementation == "xla" else None
        index, picked = self._choose(
            [each for each, _ in asked], positions, index, of_lines, layer, picked, chunked
        )
        out, _ = self._attend(
            of_lines_q, positions, kv_cache, picked, of_lines, implementation=chunked, **given
        )
        values, arena = None, None
        if rows is not None:
            of_rows = rows["block_tables"], rows["seq_lens"], None
            index, of_rows_picked = self._choose(
                [each for _, each in asked], rotation, index, of_rows, layer, of_rows_picked,
                implementation,
            )  # fmt: skip
            values, arena = self._attend(
                of_rows_q, rotation, kv_cache, of_rows_picked, of_rows, arena=rows.get("arena"),
                decoding=True, batch_invariant=rows.get("batch_invariant", False),
                implementation=implementation, **given,
            )  # fmt: skip
            values = values.astype(out.dtype)
        y = self._project_out(x, lines.join(out, values))
        y = self._marked(y, lines, kv_cache, block_tables, rows)
        return y, kv_cache, index, (picked, of_rows_picked), arena

    def decode(  # type: ignore[override]
        self,
        x: Float[Array, "B S hidden"] | PendingNorm,
        kv_cache: Float[Array, "..."],
        *,
        index: IndexPages | None = None,
        indices: Int[Array, "B S K"] | None = None,
        block_tables: Int[Array, "B M"],
        seq_lens: Int[Array, "B"],
        query_lens: Int[Array, "B"] | None = None,
        layer: int | Int[Array, ""] | None = None,
        kv_scale: Array | float | None = None,
        rotation: Rotation | None = None,
        weights: Float[Array, "*L W"] | None = None,
        batch_invariant: bool = False,
        arena: Arena | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Any, ...]:
        """The next S tokens of each row, as in `MultiHeadLatentAttention`.

        Args:
            index: the pages of the indexer's keys, with the layers and pages of `kv_cache`.
            indices: of a layer without an indexer, the choice of a layer before it.
            batch_invariant: see `mla_sparse_decode`.

        Returns:
            (float32 [B, S, hidden], the cache, the pages of keys, the choice, the arena or None).
        """
        x = tokens_of(x)  # which the indexer reads too
        arguments = self._check_tokens(f"{type(self).__name__}.decode", x, "B S hidden")
        arguments.check_paged(kv_cache, block_tables, seq_lens, layer)
        index = self._checked(kv_cache, index)
        block_tables, seq_lens, query_lens = self._as_given(
            arguments, x, block_tables, seq_lens, query_lens, optional=True
        )
        q, latents = self._down(x)
        rotation = self._rotation_of(seq_lens, rotation, x.shape[1], query_lens)
        compressed, kv_cache = self._append_rows(
            latents, q, kv_cache, block_tables, seq_lens,
            rotation=rotation, weights=weights, kv_scale=kv_scale, layer=layer,
            query_lens=query_lens, implementation=implementation,
        )  # fmt: skip
        rows = block_tables, seq_lens, query_lens
        asked = () if self.indexer is None else self.indexer(x, compressed)
        index, indices = self._choose(asked, rotation, index, rows, layer, indices, implementation)
        values, arena = self._attend(
            self._heads(x, compressed), rotation, kv_cache, indices, rows, layer=layer,
            kv_scale=kv_scale, arena=arena, decoding=True, batch_invariant=batch_invariant,
            implementation=implementation,
        )  # fmt: skip
        y = self._output(x, values, kv_cache, block_tables, seq_lens, query_lens)
        return y, kv_cache, index, indices, arena

    def _checked(self, kv_cache: Array, index: IndexPages | None) -> IndexPages | None:
        """The pages of keys, if they are there as they are needed."""
        name = type(self).__name__
        if self.indexer is None:
            return None
        if index is None:
            raise ValueError(f"{name}: a layer with an indexer needs index=, the pages of its keys")
        index, dim = IndexPages(*index), self.indexer.head_dim
        if tuple(index.cache.shape) != (*kv_cache.shape[:-1], dim):
            raise ValueError(
                f"{name}: the cache of index keys must have the layers, pages and page size of "
                f"kv_cache {tuple(kv_cache.shape)} and keys of {dim} dims, "
                f"{(*kv_cache.shape[:-1], dim)}; got {tuple(index.cache.shape)}"
            )
        return index

    def _choose(
        self,
        asked: Sequence[Array],
        positions: Array | Rotation | None,
        index: IndexPages | None,
        rows: Rows,
        layer: Any,
        indices: Array | None,
        implementation: Implementation | None,
    ) -> tuple[IndexPages | None, Array]:
        """(the pages with new tokens' keys, the positions that these attend to)."""
        if self.indexer is None or index is None:
            if indices is None:
                raise ValueError(
                    f"{type(self).__name__}: a layer without an indexer (index_heads=0) needs "
                    "indices=, the choice of a layer before it"
                )
            return None, indices
        assert positions is not None
        if isinstance(positions, Rotation):
            positions = in_layout(positions, self.rope, self.indexer.rope.interleaved)
        turned = self.indexer.turned(asked, positions)
        index = written(index, turned.keys, rows, layer)
        return index, chosen(index, turned, rows, self.top_k, layer, implementation)

    def _attend(
        self,
        q: Array,
        positions: Array | Rotation | None,
        kv_cache: Array,
        indices: Array,
        rows: Rows,
        *,
        layer: Any,
        kv_scale: Any,
        arena: Arena | None = None,
        decoding: bool = False,
        batch_invariant: bool = False,
        implementation: Implementation | None,
    ) -> tuple[Array, Arena | None]:
        """(heads' values, the arena or None) of the heads' queries before rotation."""
        block_tables, seq_lens, query_lens = rows
        if isinstance(positions, Rotation):
            queries = self._latent_queries(q, positions)
        else:
            assert positions is not None
            q_nope, q_pe = self._turned(q, positions)
            queries = [mla.absorb_query(q_nope, self.w_uk[...].astype(self.dtype)), q_pe]
        queries = [each.astype(self._dtype_beside(kv_cache)) for each in queries]
        both: Any = tuple(queries) if len(queries) > 1 else queries[0]
        given: Any = dict(
            scale=self.scale,
            query_lens=query_lens,
            layer=layer,
            kv_lora_rank=self.kv_lora_rank,
            kv_scale=kv_scale,
            implementation=implementation,
        )
        arrays = both, kv_cache, block_tables, seq_lens, indices
        if not decoding:
            out, _ = mla.mla_sparse_prefill(*arrays, **given)
            return self._values_of(out), None
        out, _, *rest = mla.mla_sparse_decode(
            *arrays, arena=arena, batch_invariant=batch_invariant, **given
        )
        return self._values_of(out), rest[0] if rest else None
