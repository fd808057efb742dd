"""The indexer of DeepSeek Sparse Attention: which cached tokens a query attends to."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxattn import mla
from jaxattn.core.cache.paged_cache import seen_lengths
from jaxattn.core.dispatch import Implementation
from jaxattn.core.numerics.rope import RopeConfig, Rotation, rope
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import BoundedLengths, check_sizes
from jaxattn.nn.fp8_linear import new_linear
from jaxattn.nn.linear import Linear
from jaxattn.nn.norm import LayerNorm
from jaxattn.ops.mla.sparse.index import best_of_parts, scores_at
from jaxattn.parallel import ContextParallelPages


class IndexPages(NamedTuple):
    """The pages of an indexer's keys; `mla_index` documents the arrays.

    Attributes:
        cache: [L, N, C, D], or [N, C, D] of one layer.
        scale: the scales of a float8_e4m3fn cache.
    """

    cache: Array
    scale: Array | None = None


class IndexQueries(NamedTuple):
    """The indexer's queries of tokens, and their own keys.

    Attributes:
        q: [B, S, Hi, D], rotated.
        weights: float32 [B, S, Hi], including all factors.
        keys: [B, S, D], normed and rotated.
    """

    q: Array
    weights: Array
    keys: Array


class TokenIndexer(nnx.Module):
    """Scores cached tokens by a few narrow heads that share one key per token.

    Parameters, in DeepSeek's names:
        wq_b [q_lora_rank, Hi * D]   wk [hidden, D]   k_norm [D]   weights_proj [hidden, Hi]

    Args:
        heads, head_dim: Hi and D.
        rope: rotation of the first dims of queries and keys. Its angles are those of the attention;
            its pair layout may differ.
        fp8: the names of the linears whose weights are FP8, with the prefix "indexer.".

    Raises:
        ValueError: a size is not a positive integer, or `rope` rotates more than D dims.
    """

    def __init__(
        self,
        hidden_size: int,
        q_lora_rank: int,
        *,
        heads: int,
        head_dim: int,
        rope: RopeConfig,
        fp8: Collection[str] = (),
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_sizes("TokenIndexer", heads=heads, head_dim=head_dim, q_lora_rank=q_lora_rank)
        if rope.dim > head_dim:
            raise ValueError(
                f"TokenIndexer: rope.dim must be at most head_dim={head_dim}; got {rope.dim}"
            )
        self.heads, self.head_dim, self.rope = heads, head_dim, rope
        self.dtype = jnp.dtype(dtype)
        linear_options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        fp8_names = [name.removeprefix("indexer.") for name in fp8]
        self.wq_b = new_linear(fp8_names, "wq_b", q_lora_rank, heads * head_dim, **linear_options)
        self.wk = new_linear(fp8_names, "wk", hidden_size, head_dim, **linear_options)
        self.k_norm = LayerNorm(head_dim, param_dtype=param_dtype)
        self.weights_proj = Linear(hidden_size, heads, **linear_options)

    def __call__(
        self, x: Float[Array, "B S hidden"], compressed: Float[Array, "B S Q"]
    ) -> tuple[Array, Array, Array]:
        """(queries [B, S, Hi, D], keys [B, S, D], weights of the heads), before rotation.

        Args:
            compressed: the normed output of the attention's q_a_proj.
        """
        with jax.named_scope("mla_indexer_proj"):
            q = self.wq_b(compressed).reshape(*x.shape[:2], self.heads, self.head_dim)
            keys = self.k_norm(self.wk(x))
            weights = self.weights_proj(x).astype(jnp.float32)
            return q, keys, weights * (self.heads * self.head_dim) ** -0.5

    def turned(self, projected: Sequence[Array], positions: Array | Rotation) -> IndexQueries:
        """The outputs of `__call__` after rotation, in the compute dtype."""
        q, keys, weights = projected
        with jax.named_scope("mla_indexer_proj"):
            q, keys = (self._apply_partial_rope(x, positions).astype(self.dtype) for x in (q, keys))
            return IndexQueries(q, weights, keys)

    def _apply_partial_rope(self, x: Array, positions: Array | Rotation) -> Array:
        first, rest = jnp.split(x, [self.rope.dim], axis=-1)
        return jnp.concatenate([rope(first, positions, self.rope), rest], axis=-1)


def written(pages: IndexPages, keys: Array, rows: tuple[Any, Any, Any], layer: Any) -> IndexPages:
    """Writes the keys of new tokens; `rows` are block tables, lengths and numbers of new tokens."""
    block_tables, seq_lens, query_lens = rows
    keys = keys if pages.scale is not None else keys.astype(pages.cache.dtype)
    found = mla.mla_index_write(
        pages.cache, keys, block_tables, seq_lens,
        query_lens=query_lens, layer=layer, k_scale=pages.scale,
    )  # fmt: skip
    return IndexPages(found) if pages.scale is None else IndexPages(*found)


def chosen(
    pages: IndexPages,
    queries: IndexQueries,
    rows: tuple[Any, Any, Any],
    top_k: int,
    layer: Any,
    implementation: Implementation | None,
    spread: ContextParallelPages | None = None,
) -> Int[Array, "B S K"]:
    """The positions that tokens attend to; K is `top_k`, or the table's size if that is smaller.

    If the table is not larger than `top_k`, every token attends to all that it sees.

    Args:
        spread: for rows whose pages are divided among several GPUs. Each GPU finds the best of its
            own keys, and all GPUs then choose the same best of these.
    """
    block_tables, seq_lens, query_lens = rows
    max_tokens = block_tables.shape[1] * pages.cache.shape[-2]
    if top_k >= max_tokens:
        arguments = OpArguments("TokenIndexer")
        lens = arguments.integers("seq_lens", seq_lens, "B")[1]
        if query_lens is not None:
            query_lens = arguments.integers("query_lens", query_lens, "B")[1]
        visible_lens = seen_lengths(
            lens, query_lens, tokens=queries.q.shape[1], max_tokens=max_tokens
        )
        positions = jnp.arange(max_tokens, dtype=jnp.int32)
        return jnp.where(positions < visible_lens[..., None], positions, -1)
    index_options: Any = dict(layer=layer, k_scale=pages.scale)
    if spread is None:
        return mla.mla_index(
            queries.q, queries.weights, pages.cache, block_tables, seq_lens,
            top_k=top_k, query_lens=query_lens, implementation=implementation, **index_options,
        )  # fmt: skip
    # Each new token becomes a row.
    batch_shape = queries.q.shape[:2]
    q, weights = (x.reshape(-1, 1, *x.shape[2:]) for x in (queries.q, queries.weights))
    local_rows = spread.tables, BoundedLengths(spread.lens, spread.most), None
    queries = queries._replace(q=q, weights=weights)
    local_positions = chosen(pages, queries, local_rows, top_k, layer, implementation)
    scores = scores_at(q, weights, pages.cache, spread.tables, local_positions, **index_options)
    with jax.named_scope("context_top_k"):
        parts = scores, spread.row_positions(local_positions)
        scores, all_positions = lax.all_gather(parts, spread.axes, axis=2, tiled=True)
        return best_of_parts(scores, all_positions, top_k).reshape(*batch_shape, top_k)
