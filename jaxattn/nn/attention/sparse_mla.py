"""DeepSeek Sparse Attention: multi-head latent attention to the tokens that an indexer chooses.

A layer may have no indexer and use the choice of an earlier layer (GLM-5.2).
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxattn import mla
from jaxattn.arena import Arena
from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.dispatch import Implementation
from jaxattn.core.numerics.rope import Rotation, in_layout
from jaxattn.core.validation.array_checks import check_sizes
from jaxattn.nn.attention.mla import MultiHeadLatentAttention
from jaxattn.nn.attention.token_indexer import IndexPages, TokenIndexer, chosen, written
from jaxattn.ops.attention.segments import SegmentBounds
from jaxattn.ops.linear.norm_linear import PendingNorm, tokens_of
from jaxattn.ops.mla.sparse.index import index_xla
from jaxattn.parallel import ALONE, ContextParallelPages, Parallel
from jaxattn.parallel.context_parallel import prefix_of

type Rows = tuple[Any, Any, Any]


class SparseMultiHeadLatentAttention(MultiHeadLatentAttention):
    """MLA whose queries attend to `top_k` tokens each; a DeepSeek-V3.2 layer without its pre-norm.

    Differentiable over whole sequences, for which attention runs in plain JAX. The choice of tokens
    has no gradient, so the indexer gets no gradient.

    Parameters: those of `MultiHeadLatentAttention`; indexer, which is a `TokenIndexer`; and with
    `sinks`, sinks float32 [H].

    Args:
        q_lora_rank: the rank of the compressed queries, which the indexer also uses.
        top_k: the number of visible tokens that a query attends to.
        index_heads: heads of the indexer; 0 is a layer without an indexer, which needs `indices`.
        index_head_dim: head dim of the indexer's queries and keys.
        index_interleaved: the layout of the indexer's rotated dims: True pairs neighboring dims
            (GLM-5), False pairs halves (DeepSeek-V3.2).
        sinks: the softmax of each head includes a logit without a value.
        options: options of `MultiHeadLatentAttention`.

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
        sinks: bool = False,
        fp8: Collection[str] = (),
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        check_sizes("SparseMultiHeadLatentAttention", q_lora_rank=q_lora_rank, top_k=top_k)
        linear_options: dict[str, Any] = dict(
            fp8=fp8, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        super().__init__(
            hidden_size, num_heads, q_lora_rank=q_lora_rank, **linear_options, **options
        )
        self.top_k = top_k
        self.sinks = nnx.Param(jnp.zeros(num_heads, jnp.float32)) if sinks else None
        rope = dataclasses.replace(self.rope, interleaved=index_interleaved)
        self.indexer = (
            TokenIndexer(
                hidden_size, q_lora_rank, heads=index_heads, head_dim=index_head_dim, rope=rope,
                **linear_options,
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
            indices: positions in the row that each token attends to (`choose`). A layer without an
                indexer needs `indices`; a layer with an indexer computes them.
        """
        return self._forward(x, segment_ids, cu_seqlens, positions, indices=indices)

    def choose(
        self,
        x: Float[Array, "B T hidden"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        cu_seqlens: Int[Array, " n+1"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Int[Array, "B T K"]:
        """The positions in the row that each token of whole sequences attends to."""
        x, _, positions, bounds = self._isolated(x, segment_ids, cu_seqlens, positions)
        compressed = self.q_a_norm(self.q_a_proj(x)).astype(self.dtype)
        return self._choose_whole(x, compressed, positions, bounds)

    def _choose_whole(
        self, x: Array, compressed: Array, positions: Array, bounds: SegmentBounds
    ) -> Int[Array, "B T K"]:
        """The choice for each sequence as if it were alone; each row is one page."""
        if self.indexer is None:
            raise self._missing_choice()
        index_queries = self.indexer.turned(self.indexer(x, compressed), positions)
        tables, lens = self._as_pages(x)
        top_k = min(self.top_k, x.shape[1])
        segment_starts = (
            None if bounds.first is None else jnp.broadcast_to(bounds.first, x.shape[:2])
        )
        return index_xla(
            index_queries.q, index_queries.weights, index_queries.keys, tables, lens,
            query_lens=lens, top_k=top_k, begins=segment_starts,
        )  # fmt: skip

    def _missing_choice(self) -> ValueError:
        return ValueError(
            f"{type(self).__name__}: a layer without an indexer (index_heads=0) needs indices=, "
            "the tokens that an earlier layer chose"
        )

    @staticmethod
    def _as_pages(x: Array) -> tuple[Array, Array]:
        """The block tables and lengths of rows that are one page each."""
        rows = jnp.arange(x.shape[0], dtype=jnp.int32)
        return rows[:, None], jnp.full_like(rows, x.shape[1])

    def _attend_whole(
        self,
        x: Array,
        positions: Array,
        bounds: SegmentBounds,
        packed: dict[str, Any],
        indices: Array | None = None,
    ) -> Float[Array, "B T hidden"]:
        compressed = self.q_a_norm(self.q_a_proj(x)).astype(self.dtype)
        if indices is None:
            indices = self._choose_whole(x, compressed, positions, bounds)
        q_nope, q_pe = self._apply_rope(self._heads(x, compressed), positions)
        queries = mla.absorb_query(q_nope, self.w_uk[...].astype(self.dtype)), q_pe
        there = jnp.arange(x.shape[1]) < bounds.lengths[:, None]
        tables, lens = self._as_pages(x)
        out, _ = mla.mla_sparse_prefill(
            queries, self._latents(x, positions), tables, lens,
            jnp.where(there[..., None], indices, -1),
            scale=self.scale, kv_lora_rank=self.kv_lora_rank, sinks=self._sink_logits,
            implementation="xla",
        )  # fmt: skip
        return self._project_out(x, self._values_of(out))

    @property
    def _sink_logits(self) -> Array | None:
        return None if self.sinks is None else self.sinks[...]

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
        parallel: Parallel = ALONE,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T hidden"], Array, IndexPages | None, Int[Array, "B T K"]]:
        """Processes a chunk of each row's prompt, as in `MultiHeadLatentAttention`.

        Args:
            index: the pages of the indexer's keys, with the layers and pages of `kv_cache`.
            indices: for a layer without an indexer, the choice of an earlier layer.

        Returns:
            (float32 [B, T, hidden], the cache, the pages of keys, the choice).
        """
        arguments = self._check_tokens(f"{type(self).__name__}.prefill", x, "B T hidden")
        arguments.check_paged(kv_cache, block_tables, seq_lens, layer)
        block_tables, seq_lens, query_lens = self._check_tables(
            arguments, x, block_tables, seq_lens, query_lens
        )
        rows = jnp.asarray(query_lens), jnp.asarray(seq_lens)
        lines = PromptLines.of(None, *rows, x.shape[1])
        flat = x.reshape(1, -1, x.shape[-1])
        y, kv_cache, index, (indices, _), *_ = self.mixed(
            flat, kv_cache, index=index, indices=(indices, None), lines=lines,
            block_tables=block_tables, seq_lens=seq_lens, query_lens=query_lens, rows=None,
            layer=layer, kv_scale=kv_scale, parallel=parallel, implementation=implementation,
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
        parallel: Parallel = ALONE,
        implementation: Implementation | None = None,
    ) -> tuple[Any, ...]:
        """Processes pieces of prompts in lines, and one token of each decoding row, as in
        `MultiHeadLatentAttention`.

        Args:
            index: the pages of the indexer's keys.
            indices: for a layer without an indexer, the choices [L, T, K] and [R, 1, K].

        Returns:
            (float32 [1, N, hidden], the cache, the pages of keys, the choices, and the remaining
            results of `decode`).
        """
        del seq_lens, query_lens  # each line has its own
        index = self._checked(kv_cache, index)
        tokens = self._write_mixed(
            x, kv_cache, lines, block_tables, rows,
            layer=layer, kv_scale=kv_scale, parallel=parallel, implementation=implementation,
        )  # fmt: skip
        kv_cache = tokens.kv_cache
        line_q, decode_q = lines.split(self._heads(x, tokens.q))
        prompt_implementation = implementation if implementation == "xla" else None

        def read(pages: Array) -> tuple[Array, Rows, Any]:
            """The pages of all GPUs in the order of rows. For the ops each line is a row whose
            prefix is its row's earlier lines."""
            pages, tables, read_layer = prefix_of(parallel, pages, jnp.asarray(block_tables), layer)
            return pages, (lines.of_row(tables, 0), lines.seq_lens, lines.query_lens), read_layer

        line_indices, decode_indices = indices
        decode_index_features: Sequence[Array] = ()
        if self.indexer is not None and index is not None:
            parts = map(lines.split, self.indexer(x, tokens.q))
            line_index_features, decode_index_features = zip(*parts, strict=True)
            index_queries = self.indexer.turned(line_index_features, tokens.positions)
            places = tokens.write_tables, lines.seq_lens, lines.query_lens
            index = written(index, index_queries.keys, places, layer)
            keys, line_rows, read_layer = read(index.cache)
            scale = None if index.scale is None else read(index.scale)[0]
            line_indices = chosen(
                IndexPages(keys, scale),
                index_queries,
                line_rows,
                self.top_k,
                read_layer,
                prompt_implementation,
            )
        if line_indices is None:
            raise self._missing_choice()
        q_nope, q_pe = self._apply_rope(line_q, tokens.positions)
        queries = mla.absorb_query(q_nope, self.w_uk[...].astype(self.dtype)), q_pe
        latents, line_rows, read_layer = read(kv_cache)
        out, *_ = self._attend_chosen(
            [each.astype(self._query_dtype(kv_cache)) for each in queries],
            latents, line_rows, line_indices, layer=read_layer, kv_scale=kv_scale,
            implementation=prompt_implementation,
        )  # fmt: skip
        out, values, rest = self._values_of(out), None, [None]
        if rows is not None:
            # A barrier: the prompts' choice reads the index keys before the rows write theirs.
            # Otherwise XLA would copy the keys for the later read.
            line_indices, index = lax.optimization_barrier((line_indices, index))
            decode_options = {
                name: rows[name] for name in rows if name not in ("rotation", "weights")
            }
            values, index, decode_indices, *rest = self._attend_rows(
                decode_q, tokens.rotation, kv_cache, index, decode_index_features,
                indices=decode_indices, layer=layer, kv_scale=kv_scale,
                implementation=implementation, **decode_options,
            )  # fmt: skip
        y = self._join_mixed(x, out, values, lines, tokens, rows)
        return y, kv_cache, index, (line_indices, decode_indices), *rest

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
        spread: ContextParallelPages | None = None,
        arena: Arena | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Any, ...]:
        """Decodes the next S tokens of each row, as in `MultiHeadLatentAttention`.

        Args:
            index: the pages of the indexer's keys, with the layers and pages of `kv_cache`.
            indices: for a layer without an indexer, the choice of an earlier layer: positions in
                the row, on any GPU.
            batch_invariant: see `mla_sparse_decode`.
            spread: a `ContextParallelPages`, if several GPUs each store a part of each row's pages.
                Not with sinks.

        Returns:
            (float32 [B, S, hidden], the cache, the pages of keys, the choice, the arena or None;
            and the mailbox of a `spread` that has one).
        """
        x = tokens_of(x)  # because the indexer reads x too
        index = self._checked(kv_cache, index)
        compressed, rotation, kv_cache, rows = self._write_rows(
            x, kv_cache, block_tables, seq_lens, query_lens, rotation=rotation, weights=weights,
            layer=layer, kv_scale=kv_scale, implementation=implementation,
        )  # fmt: skip
        block_tables, seq_lens, query_lens = rows
        index_features = () if self.indexer is None else self.indexer(x, compressed)
        values, *rest = self._attend_rows(
            self._heads(x, compressed), rotation, kv_cache, index, index_features, indices=indices,
            block_tables=block_tables, seq_lens=seq_lens, query_lens=query_lens,
            layer=layer, kv_scale=kv_scale, batch_invariant=batch_invariant, spread=spread,
            arena=arena, implementation=implementation,
        )  # fmt: skip
        return self._output(x, values, kv_cache, *rows), kv_cache, *rest

    def _checked(self, kv_cache: Array, index: IndexPages | None) -> IndexPages | None:
        """Checks the pages of keys if the layer has an indexer; returns None if it has none."""
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

    def _attend_rows(  # type: ignore[override]
        self,
        q: Array,
        rotation: Rotation,
        kv_cache: Array,
        index: IndexPages | None,
        index_features: Sequence[Array],
        *,
        indices: Array | None = None,
        block_tables: Any,
        seq_lens: Any,
        query_lens: Any = None,
        layer: Any,
        kv_scale: Any,
        batch_invariant: bool = False,
        spread: ContextParallelPages | None = None,
        arena: Arena | None = None,
        implementation: Implementation | None,
    ) -> tuple[Any, ...]:
        """(heads' outputs, pages with the tokens' keys, the choice, the arena or None, mailboxes).

        The queries `q` are not yet rotated. `index_features` are the indexer's outputs, if any.
        """
        rows = block_tables, seq_lens, query_lens
        if spread is not None and self.sinks is not None:
            raise ValueError(
                f"{type(self).__name__}: context parallelism does not support sinks; use context=1"
            )
        if self.indexer is not None and index is not None:
            index_rotation = in_layout(rotation, self.rope, self.indexer.rope.interleaved)
            index_queries = self.indexer.turned(index_features, index_rotation)
            index = written(index, index_queries.keys, rows, layer)
            indices = chosen(index, index_queries, rows, self.top_k, layer, implementation, spread)
        if indices is None:
            raise self._missing_choice()
        queries = self._latent_queries(q, rotation)
        queries = [each.astype(self._query_dtype(kv_cache)) for each in queries]
        local_indices = indices if spread is None else spread.own_positions(indices)

        def attend(queries: Any, tables: Any, lens: Any, query_lens: Any = None) -> Any:
            return self._attend_chosen(
                queries, kv_cache, (tables, lens, query_lens), local_indices, layer=layer,
                kv_scale=kv_scale, batch_invariant=batch_invariant, arena=arena, decoding=True,
                implementation=implementation,
            )  # fmt: skip

        mailboxes: list[Any] = []
        if spread is None:
            out, _, arenas = attend(queries, *rows)
        else:
            out, arenas, mailboxes = spread.attend(queries, attend)
        return self._values_of(out), index, indices, arenas[0] if arenas else None, *mailboxes

    def _attend_chosen(
        self,
        queries: Sequence[Array],
        kv_cache: Array,
        rows: Rows,
        indices: Array,
        *,
        layer: Any,
        kv_scale: Any,
        arena: Arena | None = None,
        decoding: bool = False,
        batch_invariant: bool = False,
        implementation: Implementation | None,
    ) -> tuple[Array, Array, list[Arena]]:
        """(outputs in the latent space, LSEs, the arena if one was given), for absorbed queries."""
        query: Any = tuple(queries) if len(queries) > 1 else queries[0]
        block_tables, seq_lens, query_lens = rows
        arrays = query, kv_cache, block_tables, seq_lens, indices
        attend_options: Any = dict(
            scale=self.scale, query_lens=query_lens, layer=layer, kv_lora_rank=self.kv_lora_rank,
            kv_scale=kv_scale, sinks=self._sink_logits,
            implementation=implementation,
        )  # fmt: skip
        if not decoding:
            return *mla.mla_sparse_prefill(*arrays, **attend_options), []
        out, lse, *rest = mla.mla_sparse_decode(
            *arrays, arena=arena, batch_invariant=batch_invariant, **attend_options
        )
        return out, lse, rest
