"""The indexer of DeepSeek Sparse Attention: scores of cached keys, and their exact top-k.

The plain-JAX path reads the keys in blocks and keeps the best of all blocks so far. Whatever the
rows' lengths are, it holds only the scores of one block for some of the queries.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from jaxattn.core.cache.paged_cache import page_blocks, seen_lengths
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.numerics.matmul import dot
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import is_integer
from jaxattn.core.validation.varying_axes import match_varying_axes, refuse_explicit_axes
from jaxattn.kernels.mla.index.launch import mla_index_mosaic
from jaxattn.ops.mla.sparse.index_cache_write import check_index_cache

# Plain-JAX path: keys per block, and the most scores of one block over all heads.
KEY_BLOCK, MOST_SCORES = 1024, 2**24


@jax.named_scope("mla_index")
def mla_index(
    q: Float[Array, "B S Hi D"],
    weights: Float[Array, "B S Hi"],
    index_cache: Num[Array, "L N C D"] | Num[Array, "N C D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    top_k: int,
    query_lens: Int[Array, "B"] | None = None,
    layer: Array | int | None = None,
    k_scale: Float[Array, "L N C"] | Float[Array, "N C"] | None = None,
    implementation: Implementation | None = None,
) -> Int[Array, "B S K"]:
    """Returns, for each new token, the `top_k` positions of its row that the token attends to.

    The score of position t is the sum over index heads of weights_h * relu(q_h . k_t), in float32.
    Token s of a row sees the positions up to its own, seq_lens - query_lens + s, as in
    `mla_decode`; the keys must be in the cache already (`mla_index_write`). S may be a few tokens
    of decoding or a chunk of a prompt. The choice has no gradient.

    If scores are equal, the lower position wins. A token that sees at most `top_k` positions gets
    all of them. Padding (a row with seq_lens 0, a token s >= query_lens) gets none. Entries of
    `block_tables` past a row's length may hold anything, NaN included, and so may cache slots
    outside the rows' tokens. A NaN in a row's own tokens counts as the highest score.

    Args:
        q: Queries of the index heads, rotated.
        weights: float32 weight of each index head, with all factors included: the scale of the
            scores and that of the number of heads.
        index_cache: Pages of normed and rotated keys, one key for all heads: a stack of layers
            (with `layer`) or one layer's pages. A floating dtype, or float8_e4m3fn with `k_scale`.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1.
        seq_lens: int32 number of tokens of each row, the S new ones included, at most M * C.
        top_k: K, the number of positions per token, at most M * C.
        query_lens: int32 number of new tokens of each row, at most S. None means S.
        layer: Index into the stack, a Python int or a traced scalar.
        k_scale: float32 scale of each token of a float8_e4m3fn cache, required for that dtype only.
            NaN marks a key that contains NaN, as `mla_index_write` stores it.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.

    Returns:
        int32 positions in the row, ascending, followed by -1 where there are fewer than K.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, or a concrete length or page
            is out of range; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    op = "mla_index"
    arguments = OpArguments(op)
    q = arguments.check("q", q, "B S Hi D")
    weights = arguments.check("weights", weights, "B S Hi", ("float32",))
    index_cache, k_scale, block_tables, seq_lens = check_index_cache(
        arguments, index_cache, k_scale, block_tables, seq_lens, layer
    )
    most = block_tables.shape[1] * index_cache.shape[-2]
    if not is_integer(top_k):
        raise TypeError(f"{op}: top_k must be a Python integer, got {type(top_k).__name__}")
    if not 1 <= top_k <= most:
        raise ValueError(
            f"{op}: top_k must be from 1 to {most:,}, the tokens that block_tables "
            f"{block_tables.shape} with pages of {index_cache.shape[-2]} reach, got {top_k}"
        )
    if query_lens is not None:
        query_lens = arguments.check_query_lens(query_lens, "q", q)
    arrays = q, weights, index_cache, block_tables, seq_lens
    refuse_explicit_axes(op, *arrays, query_lens, k_scale)
    arrays, k_scale = lax.stop_gradient((arrays, k_scale))
    given: Any = dict(query_lens=query_lens, layer=layer, k_scale=k_scale, top_k=int(top_k))

    def mosaic(interpret: bool) -> jax.Array:
        return mla_index_mosaic(*arrays, **given, interpret=interpret)

    return dispatch_kernel(op, implementation, mosaic, lambda: index_xla(*arrays, **given))


@functools.partial(jax.jit, static_argnames="top_k")
def index_xla(
    q: jax.Array,
    weights: jax.Array,
    index_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    top_k: int,
    query_lens: jax.Array | None = None,
    layer: jax.Array | int | None = None,
    k_scale: jax.Array | None = None,
    begins: jax.Array | None = None,
) -> jax.Array:
    """`mla_index` for checked arguments; a token sees positions from `begins` [B, S] on."""
    q, weights, index_cache, k_scale = lax.stop_gradient((q, weights, index_cache, k_scale))
    q, weights, index_cache, k_scale = match_varying_axes(
        (q, weights, index_cache, k_scale), block_tables, seq_lens, query_lens, layer, begins
    )
    batch, tokens, heads, _ = q.shape
    most = block_tables.shape[1] * index_cache.shape[-2]
    limits = seen_lengths(seq_lens, query_lens, tokens=tokens, max_tokens=most)
    begins = jnp.zeros_like(limits) if begins is None else begins
    q = jnp.where((limits > 0)[..., None, None], q, 0)
    weights = jnp.where((limits > 0)[..., None], weights, 0)
    blocks = functools.partial(page_blocks, layer=layer, block=KEY_BLOCK)
    pages, firsts, read = blocks(index_cache, block_tables, seq_lens)
    if k_scale is not None:
        read_scales = blocks(k_scale[..., None], block_tables, seq_lens)[2]
    size = pages.shape[-1] * index_cache.shape[-2]

    def of_queries(
        xs: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    ) -> jax.Array:
        """Returns the positions of some tokens of every row."""
        q, weights, limits, begins = xs

        def add(best: tuple[jax.Array, jax.Array], pages: jax.Array, first: jax.Array):
            keys, positions = read(pages, first)
            scale = None if k_scale is None else read_scales(pages, first)[0][:, None, :, 0]
            visible = (positions < limits[..., None]) & (positions >= begins[..., None])
            scores = _scores(q, weights, keys[:, None], scale, visible)
            positions = jnp.where(visible, positions, -1)
            # `top_k` keeps the order of equal scores, and `best` holds lower positions than this
            # block.
            joined = [jnp.concatenate(x, -1) for x in zip(best, (scores, positions), strict=True)]
            scores, chosen = lax.top_k(joined[0], top_k)
            return scores, jnp.take_along_axis(joined[1], chosen, axis=-1)

        def step(best: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, jax.Array]):
            reached = jnp.any((xs[1] < limits) & (xs[1] + size > begins))
            return lax.cond(reached, add, lambda best, *_: best, best, *xs), None

        shape = (*limits.shape, top_k)
        empty = jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32)
        empty = match_varying_axes(empty, q)
        (_, found), _ = lax.scan(step, empty, (pages, firsts))
        # A token that sees at most top_k positions gets all of them, whatever their scores are.
        every = begins[..., None] + jnp.arange(top_k)
        few = (limits - begins <= top_k)[..., None]
        found = jnp.where(few, jnp.where(every < limits[..., None], every, -1), found)
        return _ascending(found)

    of_token = batch * (heads * size + 3 * (top_k + size))
    together = max(1, min(tokens, MOST_SCORES // of_token))
    steps = -(-tokens // together)

    def cut(x: jax.Array) -> jax.Array:
        """Splits the tokens into steps, [steps, B, n, ...], with padding."""
        x = jnp.pad(x, ((0, 0), (0, steps * together - tokens), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(batch, steps, together, *x.shape[2:]).swapaxes(0, 1)

    found = lax.map(of_queries, tuple(map(cut, (q, weights, limits, begins))))
    return found.swapaxes(0, 1).reshape(batch, steps * together, top_k)[:, :tokens]


def best_of_parts(
    scores: Float[Array, "*B n"], positions: Int[Array, "*B n"], top_k: int
) -> Int[Array, "*B K"]:
    """Returns the positions of the `top_k` highest scores, ascending, from scores of `scores_at`.

    If scores are equal, the lower positions win. Positions of -1 are ignored, and -1 fills up the
    result.
    """
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # the order of the scores, NaN above all
    order = jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, ~order)
    _, found = lax.sort((order, positions), num_keys=2)
    return _ascending(found[..., :top_k])


@jax.jit
def scores_at(
    q: Float[Array, "B S Hi D"],
    weights: Float[Array, "B S Hi"],
    index_cache: Num[Array, "L N C D"] | Num[Array, "N C D"],
    block_tables: Int[Array, "B M"],
    positions: Int[Array, "B S K"],
    *,
    layer: Array | int | None = None,
    k_scale: Array | None = None,
) -> Float[Array, "B S K"]:
    """Returns `mla_index`'s float32 scores at the given positions of each row, as it compares them.

    The score is -inf where a position is -1.
    """
    seen, page = positions >= 0, index_cache.shape[-2]
    own = jnp.arange(len(block_tables))[:, None, None]
    pages = jnp.where(seen, block_tables[own, jnp.where(seen, positions, 0) // page], 0)
    place: Any = (pages, positions % page)
    place = place if layer is None else (jnp.asarray(layer, jnp.int32), *place)
    scale = None if k_scale is None else k_scale[place]
    return _scores(q, weights, index_cache[place], scale, seen)


def _scores(
    q: jax.Array, weights: jax.Array, keys: jax.Array, scale: jax.Array | None, visible: jax.Array
) -> jax.Array:
    """Returns the float32 scores [B, S, K] by which the indexer compares keys.

    `keys` are [B, S, K, D], or [B, 1, K, D] if all tokens share them. A sort does not know that 0
    and -0 are equal, so zeros get one sign. NaN of any sign ranks above all numbers. An invisible
    key ranks below every visible one, even one with -inf.
    """
    if scale is not None:
        keys = keys.astype(q.dtype)  # FP8 numbers are exact in any dtype of queries
    if keys.shape[1] == 1:
        scores = dot("bshd,bkd->bshk", q, keys[:, 0])
    else:
        scores = dot("bshd,bskd->bshk", q, keys)
    scores = dot("bsh,bshk->bsk", weights.astype(scores.dtype), jax.nn.relu(scores))
    if scale is not None:  # the scale is positive, so it commutes with relu and the sum
        scores = scores * scale
    scores = jnp.where(scores == 0, 0, scores).astype(jnp.float32)
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(jnp.isnan(scores), jnp.nan, jnp.maximum(scores, lowest))
    return jnp.where(visible, scores, -jnp.inf)


def _ascending(positions: jax.Array) -> jax.Array:
    """Sorts positions in ascending order, followed by the -1 entries."""
    none = jnp.iinfo(jnp.int32).max
    found = jnp.sort(jnp.where(positions < 0, none, positions), axis=-1)
    return jnp.where(found == none, -1, found)
