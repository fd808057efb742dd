"""The kernel path of MLA prefill: expands keys and values, attends to the chunk, merges the prefix.

Keys of 128 + 64 dims with values of 128 have a kernel of their own. Keys of 192 + 64 with values of
256 use the head-256 kernel of grouped-query attention, with the tile of keys in two pieces.
`jaxattn.mla.mla_prefill` is the public op and contains the plain JAX path.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxattn.core.cache.formats import LatentFormat
from jaxattn.core.cache.paged_cache import packed_pages, page_blocks
from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.dispatch import Refusal
from jaxattn.core.numerics.matmul import dot
from jaxattn.kernels.gqa.prefill import launch as grouped
from jaxattn.kernels.mla.prefill import launch
from jaxattn.ops.mla.state_merge import merge_attention_states

WIDE = (192, 64, 256)  # nope, rope and values that the kernel of grouped-query attention takes

# Cached tokens per row that are expanded at a time: as many as make EXPANDED_BYTES of keys and
# values over all rows, but at least PREFIX_BLOCK. At most MOST_EXPANDED, because a short prefix is
# expanded to a whole block.
PREFIX_BLOCK = 1024
MOST_EXPANDED = 8192
EXPANDED_BYTES = 2**29
# The same limit for packed rows, whose prefixes follow one another.
PACKED_BYTES = 2**27
LINE = 128  # queries that have their own bounds
COPIED = 8  # token alignment at which copies of keys and values begin
# A separate pass rounds an output of at most this many float32 bytes, in a few microseconds.
ROUNDED_BYTES = 2**20


def refuse(op: str, q: jax.Array, *, nope: int, rope: int, values: int, interpret: bool) -> None:
    """Raises `Refusal` with the reason if no kernel supports these shapes."""
    if (nope, rope, values) == WIDE:
        grouped.refuse(op, q, q, q, interpret=interpret)
    else:
        launch.refuse(op, q, nope=nope, rope=rope, values=values, interpret=interpret)


def refuse_lines(
    op: str, q: jax.Array, *, page: int, nope: int, rope: int, values: int, interpret: bool
) -> None:
    """Does the same as `refuse` for lines [L, T] whose prefixes have pages of `page` tokens."""
    refuse(op, q, nope=nope, rope=rope, values=values, interpret=interpret)
    if q.shape[1] % LINE:
        raise Refusal(
            f"{op}: the kernel needs lines of a multiple of {LINE} tokens, got {q.shape[1]}"
        )
    if page % COPIED:  # a row's prefix begins with a page, after those of other rows
        raise Refusal(f"{op}: the kernel needs pages of a multiple of {COPIED} tokens, got {page}")


def attend(
    q: jax.Array,
    k: jax.Array,
    k_pe: jax.Array | None,
    v: jax.Array,
    bounds: jax.Array,
    *,
    scale: float,
    firsts: jax.Array | None = None,
    all_valid: bool = False,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Computes softmax(scale q [k, k_pe]^T) v, where query t of row b sees a range of keys.

    Arguments and results are those of the kernel's `attend_mosaic`. `all_valid` means that every
    row is as long as its padded shape.
    """
    if v.shape[-1] != WIDE[2]:
        config = (
            launch.MlaPrefillTileConfig.resident() if all_valid else launch.MlaPrefillTileConfig()
        )
        return launch.attend_mosaic(
            q, k, k_pe, v, bounds, scale=scale, firsts=firsts, config=config, interpret=interpret
        )
    first, queries, keys, *rest = bounds.T
    bounds = jnp.stack([first, queries, 0 * keys, keys, *rest], axis=1)
    return grouped.gqa_prefill_mosaic(
        q, k, v, bounds, scale=scale, k_rest=k_pe, firsts=firsts, interpret=interpret
    )


@jax.named_scope("mla_expand")
def _expand(
    compressed: Float[Array, "N R"], w_uk: Float[Array, "H nope R"], w_uv: Float[Array, "H R Dv"]
) -> tuple[Float[Array, "N H nope"], Float[Array, "N H Dv"]]:
    """Returns each head's keys and values, rounded to the operands' dtype in the products."""
    heads, nope, rank = w_uk.shape

    def gpu(compressed: jax.Array, w_uk: jax.Array, w_uv: jax.Array) -> tuple[jax.Array, ...]:
        product = functools.partial(jnp.einsum, preferred_element_type=compressed.dtype)
        k = product("kr,nr->kn", compressed, w_uk.reshape(-1, rank)).reshape(-1, heads, nope)
        # One product per head with the same left operand: XLA neither repeats its bytes nor
        # transposes w_uv, as it would for one product over all heads.
        repeated = jnp.broadcast_to(compressed, (heads, *compressed.shape))
        return k, product("hkr,hrv->khv", repeated, w_uv)

    def cpu(compressed: jax.Array, w_uk: jax.Array, w_uv: jax.Array) -> tuple[jax.Array, ...]:
        k, v = dot("kr,hnr->khn", compressed, w_uk), dot("kr,hrv->khv", compressed, w_uv)
        return k.astype(compressed.dtype), v.astype(compressed.dtype)

    return lax.platform_dependent(compressed, w_uk, w_uv, cpu=cpu, default=gpu)


def _over(
    q: jax.Array,
    latent: jax.Array,
    weights: tuple[jax.Array, jax.Array],
    bounds: jax.Array,
    out_dtype: Any,
    state: Any = None,
    **options: Any,
) -> Any:
    """Attends to keys and values expanded from latents [B, K, D], and merges into `state`."""
    w_uk, w_uv = weights
    rank, latent = w_uk.shape[2], latent.astype(q.dtype)
    compressed, k_pe = latent[..., :rank], latent[..., rank:]
    k, v = _expand(compressed.reshape(-1, rank), w_uk, w_uv)
    k, v = (x.reshape(*latent.shape[:2], w_uk.shape[0], -1) for x in (k, v))
    if w_uv.shape[2] != WIDE[2]:
        return launch.attend_padded(q, k, k_pe, v, bounds, out_dtype, state=state, **options)
    out, lse = attend(q, k, k_pe, v, bounds, **options)
    if state is not None:
        return merge_attention_states([state[0], out], [state[1], lse])
    return out.astype(out_dtype), lse


@functools.partial(jax.jit, static_argnames=("scale", "block", "format", "interpret"))
def prefill_lines_mosaic(
    q: jax.Array,
    latent: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
    kv_scale: jax.Array | None,
    lines: jax.Array,
    *,
    scale: float,
    block: int | None,
    format: LatentFormat,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """The kernel path of `jaxattn.mla.mla_prefill` with lines.

    All lines form one row, in which every 128 queries have their own range of keys. The prefixes of
    all rows follow one another in the same way.
    """
    count, tokens, heads, _ = q.shape
    dtype, most = q.dtype, count * tokens
    query_lens = jnp.where(seq_lens > 0, jnp.clip(query_lens, 0, most), 0)
    layout = PromptLines.of(lines, query_lens, seq_lens, tokens)
    prefix = jnp.where(query_lens > 0, jnp.maximum(seq_lens - query_lens, 0), 0)
    weights = w_uk.astype(dtype), w_uv.astype(dtype)
    queries = q.reshape(1, most, heads, -1)
    over = functools.partial(_over, queries, scale=scale, interpret=interpret)

    def of_tiles(values: jax.Array) -> jax.Array:
        """Repeats the value of each row for each 128 queries of it."""
        return jnp.repeat(layout.of_row(values, 0), tokens // LINE)

    begin, new = of_tiles(layout.offsets[:-1]), of_tiles(query_lens)
    zero, ends = jnp.zeros_like(begin), begin + new

    def new_tokens(out_dtype: Any) -> Any:
        with jax.named_scope("new_tokens"):
            own = jnp.where(layout.valid[..., None], latent, 0).reshape(1, most, -1)
            bounds = jnp.stack([zero, ends, new, -begin, begin], axis=1)
            return over(own, weights, bounds, out_dtype)

    def all_tokens() -> Any:
        state = new_tokens(jnp.float32)
        room = PACKED_BYTES // (heads * (w_uk.shape[1] + w_uv.shape[2]) * 2)
        with jax.named_scope("cached_prefix"):
            blocks, firsts, read = packed_pages(
                kv_cache,
                block_tables,
                prefix,
                layer=layer,
                block=block or max(PREFIX_BLOCK, min(MOST_EXPANDED, room)),
                unpack=functools.partial(format.unpack, kv_scale=kv_scale),
            )
            first, seen = of_tiles(firsts), of_tiles(prefix)

            def add_block(i: jax.Array, state: Any) -> Any:
                latents = read(i)
                length = latents.shape[0]
                low, high = (jnp.clip(x - i * length, 0, length) for x in (first, first + seen))
                bounds = jnp.stack([zero, ends, high - low, zero + length, low], axis=1)
                return over(latents[None], weights, bounds, jnp.float32, state)

            out, lse = lax.fori_loop(0, blocks, add_block, state)
        return out.astype(dtype), lse

    out, lse = lax.cond(jnp.any(prefix > 0), all_tokens, lambda: new_tokens(dtype))
    if w_uv.shape[2] != WIDE[2]:
        out, lse = launch.unpad(out, lse, most)
    return out.reshape(count, tokens, heads, -1), lse.reshape(count, tokens, heads)


@functools.partial(jax.jit, static_argnames=("scale", "block", "format", "interpret"))
def prefill_mosaic(
    q: jax.Array,
    latent: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
    kv_scale: jax.Array | None,
    *,
    scale: float,
    block: int | None,
    format: LatentFormat,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """The kernel path of `jaxattn.mla.mla_prefill`, with its arguments and results."""
    batch, tokens, heads, _ = q.shape
    dtype, zero = q.dtype, jnp.zeros_like(seq_lens)
    query_lens = jnp.where(seq_lens > 0, jnp.clip(query_lens, 0, tokens), 0)
    first = jnp.maximum(query_lens - seq_lens, 0)
    prefix = jnp.where(query_lens > 0, jnp.maximum(seq_lens - query_lens, 0), 0)
    token = jnp.arange(tokens)
    valid = (token >= first[:, None]) & (token < query_lens[:, None])
    w_uk, w_uv = w_uk.astype(dtype), w_uv.astype(dtype)

    wide = w_uv.shape[2] == WIDE[2]

    def over(latent: jax.Array, bounds: Any, out_dtype: Any, state: Any = None) -> Any:
        rows = jnp.stack(bounds, axis=1)
        options: dict[str, Any] = {"scale": scale, "interpret": interpret}
        return _over(q, latent, (w_uk, w_uv), rows, out_dtype, state, **options)

    def new_tokens(out_dtype: Any) -> Any:
        with jax.named_scope("new_tokens"):
            # Zeroed, because values below `first` are read too, with a weight of 0.
            new = jnp.where(valid[..., None], latent, 0)
            return over(new, (first, query_lens, query_lens, zero), out_dtype)

    def all_tokens() -> Any:
        state = new_tokens(jnp.float32)
        token_bytes = batch * heads * (w_uk.shape[1] + w_uv.shape[2]) * 2
        room = min(MOST_EXPANDED, EXPANDED_BYTES // token_bytes)
        size = block or max(PREFIX_BLOCK, room)
        with jax.named_scope("cached_prefix"):
            pages, firsts, read = page_blocks(
                kv_cache,
                block_tables,
                prefix,
                layer=layer,
                block=size,
                unpack=functools.partial(format.unpack, kv_scale=kv_scale),
            )

            def add_block(i: jax.Array, state: Any) -> Any:
                kv, positions = read(pages[i], firsts[i])
                count = positions.shape[0]
                visible = jnp.clip(prefix - firsts[i], 0, count)
                return over(kv, (zero, query_lens, visible, zero + count), jnp.float32, state)

            # Not a scan with a condition inside: a branch that reads nothing would copy the state.
            reached = jnp.sum(firsts < prefix.max(), dtype=jnp.int32)
            out, lse = lax.fori_loop(0, reached, add_block, state)
        return out.astype(dtype), lse

    def no_prefix() -> Any:
        # A small output is rounded after the kernel, so that both branches use one kernel:
        # compiling another would add seconds to the start.
        small = batch * tokens * heads * w_uv.shape[2] * 4 <= ROUNDED_BYTES
        out, lse = new_tokens(jnp.float32 if small else dtype)
        return out.astype(dtype), lse

    # Both branches create their output; one that passed it through would copy it.
    out, lse = lax.cond(jnp.any(prefix > 0), all_tokens, no_prefix)
    return (out, lse) if wide else launch.unpad(out, lse, tokens)
