"""MLA prefill, and what it shares with decode: a softmax that is built up block by block, over
cached pages or over the new tokens, and the checks of a paged cache's arguments.

Prefill does not absorb: keys and values of each head are expanded from the latent, which for many
tokens at once costs less than attending in the latent's R dims. `jaxattn.mla` is the public face.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

FLOATS = ("bfloat16", "float16", "float32", "float64")
INT32 = ("int32",)


@dataclasses.dataclass
class Arguments:
    """Checks arguments one after another; an axis name means the same size in all of them."""

    op: str
    sizes: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def check(self, name: str, x: Any, axes: str, dtypes: tuple[str, ...] = FLOATS) -> jax.Array:
        """Returns `x` as a JAX array if it is e.g. "B S H D" of one of the dtypes, else raises."""
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"{self.op}: {name} must be an array, got {type(x).__name__}")
        if str(x.dtype) not in dtypes:
            raise TypeError(f"{self.op}: {name} must be {' or '.join(dtypes)}, got {x.dtype}")
        names, shape = axes.split(), tuple(x.shape)
        title = f"{name} [{', '.join(names)}]"
        if len(shape) != len(names) or 0 in shape:
            raise ValueError(
                f"{self.op}: {title} needs {len(names)} axes, none of them empty, got shape {shape}"
            )
        for axis, size in zip(names, shape, strict=True):
            expected, source = self.sizes.setdefault(axis, (size, title))
            if size != expected:
                raise ValueError(
                    f"{self.op}: {title} has shape {shape}, so {axis} = {size}, but {source} has "
                    f"{axis} = {expected}"
                )
        return jnp.asarray(x)

    def check_scale(self, scale: Any) -> float:
        if not isinstance(scale, int | float | np.floating) or isinstance(scale, bool):
            raise TypeError(
                f"{self.op}: scale must be a Python number, got {type(scale).__name__}; DeepSeek's "
                "is jaxattn.rope.softmax_scale(qk_nope_head_dim + qk_rope_head_dim, config)"
            )
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"{self.op}: scale must be positive and finite, got {scale}")
        return float(scale)

    def check_layer(self, kv_cache: Any, layer: Any) -> None:
        """A stack needs a layer, a plain cache has none; and the layer must exist."""
        shape = tuple(getattr(kv_cache, "shape", ()))
        if layer is None:
            if len(shape) == 4:
                raise ValueError(f"{self.op}: kv_cache {shape} is a stack of layers; give layer=")
            return
        if len(shape) == 3:
            raise ValueError(
                f"{self.op}: kv_cache {shape} has no axis for {layer=}; drop layer, or give the "
                "stack [L, N, C, D]"
            )
        if isinstance(layer, jax.core.Tracer | jax.Array | np.ndarray):
            if layer.shape != () or not jnp.issubdtype(layer.dtype, jnp.integer):
                raise TypeError(
                    f"{self.op}: layer must be an integer scalar, got {layer.dtype} {layer.shape}"
                )
            if isinstance(layer, jax.core.Tracer):
                return
        elif isinstance(layer, bool) or not hasattr(layer, "__index__"):
            raise TypeError(f"{self.op}: layer must be an integer, got {type(layer).__name__}")
        if len(shape) == 4 and not 0 <= operator.index(layer) < shape[0]:
            raise ValueError(
                f"{self.op}: layer={int(layer)} is not in kv_cache {shape}, which has {shape[0]}"
            )

    def check_paged(
        self, kv_cache: Any, block_tables: Any, seq_lens: Any, layer: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Checks a cache and its addressing, and lengths against the tables if they are known."""
        self.check_layer(kv_cache, layer)
        cache = self.check("kv_cache", kv_cache, "N C D" if layer is None else "L N C D")
        tables = self.check("block_tables", block_tables, "B M", INT32)
        lengths = self.check("seq_lens", seq_lens, "B", INT32)
        capacity = tables.shape[1] * cache.shape[-2]
        if (longest := known_max(seq_lens)) > capacity:
            raise ValueError(
                f"{self.op}: seq_lens holds {longest}, but block_tables {tables.shape} with pages "
                f"of {cache.shape[-2]} tokens reach {capacity}; give wider block_tables"
            )
        return cache, tables, lengths


def known_max(x: Any) -> int:
    """The largest element, or 0 if `x` is traced: what is known now is checked now."""
    return 0 if isinstance(x, jax.core.Tracer) else int(np.asarray(x).max())


def dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum accumulated in float32 (float64 for float64), with no TF32 for float32 operands."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        precision = lax.Precision.HIGHEST if a.dtype == wide else None
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=wide)

    if dtype == wide:
        return product(a, b)

    # XLA's CPU backend has no bfloat16 product summed in float32 for some layouts (jax 0.11.2); the
    # product of the operands in float32 is the same number.
    def widened(a: jax.Array, b: jax.Array) -> jax.Array:
        return product(a.astype(wide), b.astype(wide))

    return lax.platform_dependent(a, b, cpu=widened, default=product)


class Softmax(NamedTuple):
    """Attention over the keys seen so far: row maxima, sums of exponentials, undivided output."""

    top: jax.Array  # [*rows], -inf before the first key
    total: jax.Array  # [*rows]
    acc: jax.Array  # [*rows, V]

    @classmethod
    def empty(cls, rows: tuple[int, ...], width: int, dtype: Any) -> "Softmax":
        total = jnp.zeros(rows, dtype)
        return cls(jnp.full(rows, -jnp.inf, dtype), total, jnp.zeros((*rows, width), dtype))

    def add(
        self, scores: jax.Array, visible: jax.Array, weigh: Callable[[jax.Array], jax.Array]
    ) -> "Softmax":
        """Adds keys: scores [*rows, K], those not visible excluded; weigh(p) sums p's values."""
        scores = jnp.where(visible, scores, -jnp.inf)
        top = jnp.maximum(self.top, scores.max(-1))
        # The result does not depend on the shift, so no gradient goes through it. Rows that have
        # seen nothing shift by 0: -inf - -inf is NaN.
        top = lax.stop_gradient(top)
        shift = jnp.where(top == -jnp.inf, 0, top)
        p = jnp.exp(scores - shift[..., None])
        rescale = jnp.exp(lax.stop_gradient(self.top) - shift)
        total = self.total * rescale + p.sum(-1)
        return Softmax(top, total, self.acc * rescale[..., None] + weigh(p))

    def finish(self, sees: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(out [*rows, V], lse [*rows]); `sees` says which rows have any key, the rest is 0, -inf.

        It comes from the lengths and not from `total`: a NaN of a real row is not hidden.
        """
        total = jnp.where(sees, self.total, 1)
        out = jnp.where(sees[..., None], self.acc / total[..., None], 0)
        return out, jnp.where(sees, self.top + jnp.log(total), -jnp.inf)


def attend_pages(
    state: Softmax,
    add_block: Callable[[Softmax, jax.Array, jax.Array], Softmax],
    kv_cache: Float[Array, "*L N C D"],
    block_tables: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    layer: jax.Array | int | None,
    block: int,
) -> Softmax:
    """Feeds tokens [0, lengths) of every row to `add_block(state, kv [B, K, D], positions [K])`.

    K is about `block` tokens, whole pages. Blocks past every row's length are not read, and one
    past a row's own leaves that row's state as it was, bit by bit. `kv` is 0 past a row's length.
    """
    batch, width = block_tables.shape
    page, dim = kv_cache.shape[-2:]
    # Whatever a table holds past the row's length is replaced before anything is addressed by it.
    owned = jnp.arange(width) < -(-lengths // page)[:, None]
    per_block = min(width, max(1, block // page))
    steps = -(-width // per_block)
    tables = jnp.where(owned, block_tables, 0)
    tables = jnp.pad(tables, ((0, 0), (0, steps * per_block - width)))
    tables = tables.reshape(batch, steps, per_block).swapaxes(0, 1)

    @jax.checkpoint
    def read(state: Softmax, pages: jax.Array, first: jax.Array) -> Softmax:
        with jax.named_scope("read_pages"):
            # One gather from the whole stack: a layer taken out first would be a copy. A page
            # that does not exist reads as NaN, not as another row's page.
            index = pages if layer is None else (jnp.asarray(layer, jnp.int32), pages)
            kv = kv_cache.at[index].get(
                mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
            )
            positions = first + jnp.arange(per_block * page)
            kv = kv.reshape(batch, per_block * page, dim)
            kv = jnp.where((positions < lengths[:, None])[..., None], kv, 0)
        reached = first < lengths
        new = add_block(state, kv, positions)
        return jax.tree.map(
            lambda n, o: jnp.where(reached.reshape(batch, *[1] * (n.ndim - 1)), n, o), new, state
        )

    def step(state: Softmax, xs: tuple[jax.Array, jax.Array]) -> tuple[Softmax, None]:
        pages, first = xs
        return lax.cond(
            jnp.any(first < lengths), read, lambda state, *_: state, state, pages, first
        ), None

    firsts = jnp.arange(steps, dtype=jnp.int32) * (per_block * page)
    return lax.scan(step, state, (tables, firsts))[0]


@jax.named_scope("merge_attention_states")
def merge_attention_states(
    outs: Sequence[Float[Array, "*rows V"]] | Float[Array, "K *rows V"],
    lses: Sequence[Float[Array, "*rows"]] | Float[Array, "K *rows"],
) -> tuple[Float[Array, "*rows V"], Float[Array, "*rows"]]:
    """One attention from several over disjoint keys, by their log-sum-exps (natural logarithm).

    A part with lse -inf saw no key: its `out` is not read, whatever it holds. If no part saw any
    key, the result is 0 and -inf. An lse of +inf or NaN gives NaN; FlashMLA marks empty rows by
    +inf, so turn that into -inf first. Returns `out` in the parts' dtype and `lse` float32.

    Raises:
        ValueError: there are no parts, or their shapes do not fit.
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(
            f"merge_attention_states: needs as many outs as lses and at least one, got {len(outs)} "
            f"and {len(lses)}"
        )
    shapes = [(tuple(out.shape), tuple(lse.shape)) for out, lse in zip(outs, lses, strict=True)]
    if any(out[:-1] != lse or out != shapes[0][0] for out, lse in shapes):
        raise ValueError(
            "merge_attention_states: every lse must be shaped as its out without the last axis, "
            f"and all outs alike, got (out, lse) {shapes}"
        )
    dtype = jnp.result_type(*outs)
    wide = jnp.promote_types(dtype, jnp.float32)
    parts, lse = jnp.stack([*outs]).astype(wide), jnp.stack([*lses]).astype(wide)
    parts = jnp.where((lse == -jnp.inf)[..., None], 0, parts)
    top = lax.stop_gradient(lse.max(0))
    shift = jnp.where(top == -jnp.inf, 0, top)
    weight = jnp.exp(lse - shift)
    empty = top == -jnp.inf
    total = jnp.where(empty, 1, weight.sum(0))
    out = (parts * weight[..., None]).sum(0) / total[..., None]
    return out.astype(dtype), jnp.where(empty, -jnp.inf, shift + jnp.log(total))


@functools.partial(jax.jit, static_argnames="scale")
def _causal(
    q: jax.Array, k: jax.Array, v: jax.Array, valid: Bool[Array, "B T"], *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Causal attention among valid tokens, (out [B, T, H, V], lse [B, T, H]) not yet narrowed."""
    batch, tokens, heads, _ = q.shape
    # All three: a NaN times a zero gradient would be NaN in the other operand's gradient.
    q, k, v = (jnp.where(valid[..., None, None], x, 0) for x in (q, k, v))
    # At most 8 blocks of queries, each against the keys up to its own end: about half of the
    # scores are computed, and an eighth of them held at a time.
    block = max(512, -(-tokens // 8))

    def attend(first: int) -> tuple[jax.Array, jax.Array]:
        stop = min(first + block, tokens)
        keys, values = k[:, :stop], v[:, :stop]
        scores = dot("bqhd,bkhd->bhqk", q[:, first:stop], keys) * scale
        causal = jnp.arange(stop) <= jnp.arange(first, stop)[:, None]
        state = Softmax.empty((batch, heads, stop - first), v.shape[-1], scores.dtype)
        return state.add(
            scores,
            causal & valid[:, None, None, :stop],
            lambda p: dot("bhqk,bkhv->bhqv", p.astype(v.dtype), values),
        ).finish(valid[:, None, first:stop])

    parts = [attend(first) for first in range(0, tokens, block)]
    out = jnp.concatenate([out for out, _ in parts], axis=2)
    lse = jnp.concatenate([lse for _, lse in parts], axis=2)
    return out.swapaxes(1, 2), lse.swapaxes(1, 2)


@jax.named_scope("causal_attention")
def causal_attention(
    q: Float[Array, "B T H Dqk"],
    k: Float[Array, "B T H Dqk"],
    v: Float[Array, "B T H Dv"],
    *,
    scale: float,
    lengths: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """Causal attention of tokens to themselves, values as wide as they like; differentiable.

    Args:
        q, k, v: floating, one dtype; float32 accumulation.
        scale: factor of the scores, a Python number.
        lengths: int32, valid tokens of each row (all, if None). The rest is padding: whatever it
            holds, its output is 0, its lse -inf, and it receives and causes no gradient.

    Returns:
        `out` in q's dtype and `lse` float32, natural logarithm.
    """
    arguments = Arguments("causal_attention")
    q = arguments.check("q", q, "B T H Dqk")
    k = arguments.check("k", k, "B T H Dqk")
    v = arguments.check("v", v, "B T H Dv")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            "causal_attention: q, k and v must have one dtype, got "
            f"{q.dtype}, {k.dtype} and {v.dtype}"
        )
    scale = arguments.check_scale(scale)
    tokens = jnp.arange(q.shape[1])
    if lengths is None:
        valid = jnp.ones(q.shape[:2], bool)
    else:
        valid = tokens < arguments.check("lengths", lengths, "B", INT32)[:, None]
    out, lse = _causal(q, k, v, valid, scale=scale)
    return out.astype(q.dtype), lse


@jax.named_scope("mla_prefill")
def mla_prefill(
    q: Float[Array, "B T H nope_and_P"],
    latent: Float[Array, "B T D"],
    w_uk: Float[Array, "H nope R"],
    w_uv: Float[Array, "H R Dv"],
    kv_cache: Float[Array, "L N C D"] | Float[Array, "N C D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    query_lens: Int[Array, "B"],
    *,
    scale: float,
    layer: jax.Array | int | None = None,
    block: int = 1024,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """Attention of new tokens to themselves and to their row's cached prefix.

    The new tokens' own causal attention is merged by log-sum-exp with that to the prefix (positions
    below seq_lens - query_lens), which is read from the cache `block` tokens at a time. The
    new tokens come from `latent`, so the cache may hold them already or not; give the cache that
    `mla_cache_write` returned, so that XLA need not keep the one from before the write.

    Args:
        q: queries, nope dims first, then the rotated P.
        latent: of the new tokens: normed c_kv (R) and rotated k_pe (P), as in the cache.
        w_uk, w_uv: per-head up-projections of keys and values.
        kv_cache: a stack with `layer`, or one layer's pages.
        block_tables: int32 page ids; entries past a row's length are not read.
        seq_lens: int32 tokens of each row, the new ones included. 0 is a padding row.
        query_lens: int32 new tokens of each row, at most T.
        scale: factor of the scores; see `jaxattn.rope.softmax_scale`.
        layer: index into the stack, a Python int or a traced scalar.
        block: cached tokens read at a time; the scores take B * H * T * block * 4 bytes.

    Returns:
        `out` in q's dtype and `lse` float32, natural logarithm. Tokens t >= query_lens, and those
        whose position would be negative, are padding: exactly 0 and -inf.

    Raises:
        TypeError, ValueError: an argument's dtype or shape does not fit; it is named.
    """
    arguments = Arguments("mla_prefill")
    q = arguments.check("q", q, "B T H Dqk")
    latent = arguments.check("latent", latent, "B T D")
    w_uk = arguments.check("w_uk", w_uk, "H nope R")
    w_uv = arguments.check("w_uv", w_uv, "H R Dv")
    kv_cache, block_tables, seq_lens = arguments.check_paged(
        kv_cache, block_tables, seq_lens, layer
    )
    new_lens = arguments.check("query_lens", query_lens, "B", INT32)
    if (longest := known_max(query_lens)) > q.shape[1]:
        raise ValueError(
            f"mla_prefill: query_lens holds {longest}, but q {q.shape} has T = {q.shape[1]} tokens"
        )
    scale = arguments.check_scale(scale)
    nope, rank = w_uk.shape[1:]
    if not 0 <= latent.shape[-1] - rank == q.shape[-1] - nope:
        raise ValueError(
            "mla_prefill: q's last axis must be nope + P and latent's R + P, got q "
            f"{q.shape}, latent {latent.shape}, w_uk [H, nope, R] {w_uk.shape}"
        )
    if block < 1:
        raise ValueError(f"mla_prefill: block must be at least 1, got {block}")
    return _prefill(
        q,
        latent,
        w_uk,
        w_uv,
        kv_cache,
        block_tables,
        seq_lens,
        new_lens,
        layer,
        scale=scale,
        block=block,
    )


@functools.partial(jax.jit, static_argnames=("scale", "block"))
def _prefill(
    q: jax.Array,
    latent: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
    *,
    scale: float,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    (batch, tokens, heads, _), rank = q.shape, w_uk.shape[2]
    query_lens = jnp.where(seq_lens > 0, query_lens, 0)
    prefix = jnp.where(query_lens > 0, jnp.maximum(seq_lens - query_lens, 0), 0)
    token = jnp.arange(tokens)
    valid = (token < query_lens[:, None]) & (token >= (query_lens - seq_lens)[:, None])

    def expand(latent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each head's keys [B, K, H, nope + P] and values [B, K, H, Dv]."""
        latent = latent.astype(q.dtype)
        compressed, k_pe = latent[..., :rank], latent[..., None, rank:]
        k_nope = dot("bkr,hnr->bkhn", compressed, w_uk).astype(q.dtype)
        k_pe = jnp.broadcast_to(k_pe, (*k_nope.shape[:-1], k_pe.shape[-1]))
        v = dot("bkr,hrv->bkhv", compressed, w_uv).astype(q.dtype)
        return jnp.concatenate([k_nope, k_pe], axis=-1), v

    with jax.named_scope("new_tokens"):
        new = _causal(q, *expand(jnp.where(valid[..., None], latent, 0)), valid, scale=scale)

    queries = jnp.where(valid[..., None, None], q, 0)

    def add_block(state: Softmax, kv: jax.Array, positions: jax.Array) -> Softmax:
        k, v = expand(kv)
        scores = dot("bqhd,bkhd->bhqk", queries, k) * scale
        visible = (positions < prefix[:, None])[:, None, None, :]
        return state.add(scores, visible, lambda p: dot("bhqk,bkhv->bhqv", p.astype(v.dtype), v))

    with jax.named_scope("cached_prefix"):
        state = Softmax.empty((batch, heads, tokens), w_uv.shape[-1], new[1].dtype)
        state = attend_pages(
            state, add_block, kv_cache, block_tables, prefix, layer=layer, block=block
        )
        out, lse = state.finish((valid & (prefix > 0)[:, None])[:, None])
    out, lse = merge_attention_states([new[0], out.swapaxes(1, 2)], [new[1], lse.swapaxes(1, 2)])
    return out.astype(q.dtype), lse
