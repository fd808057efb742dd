"""What attention over a paged cache shares, decode and prefill: the checks of its arguments, its
products, and a softmax that is built up block by block over a row's pages.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Num

from jaxattn.checks import FLOATS as FLOATS
from jaxattn.checks import check_array, check_dtype
from jaxattn.layer_of import check_layer

INT32 = ("int32",)
CACHES = (*FLOATS, "float8_e4m3fn", "uint8")  # `jaxattn.mla_cache` says what each of them holds


@dataclasses.dataclass
class Arguments:
    """Checks arguments one after another; an axis name means the same size in all of them."""

    op: str
    sizes: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def check(self, name: str, x: Any, axes: str, dtypes: tuple[str, ...] = FLOATS) -> jax.Array:
        """Returns `x` as a JAX array if it is e.g. "B S H D" of one of the dtypes, else raises."""
        check_array(self.op, name, x)
        check_dtype(self.op, name, x, *dtypes)
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
        if len(shape) == 4:
            check_layer(self.op, "kv_cache", shape, layer)

    def check_paged(
        self, kv_cache: Any, block_tables: Any, seq_lens: Any, layer: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Checks a cache and its addressing, and lengths against the tables if they are known."""
        self.check_layer(kv_cache, layer)
        # Bytes are not numbers: how many of them a latent takes is the format's to say.
        width = "Ds" if str(getattr(kv_cache, "dtype", "")) == "uint8" else "D"
        axes = f"N C {width}" if layer is None else f"L N C {width}"
        cache = self.check("kv_cache", kv_cache, axes, CACHES)
        tables = self.check("block_tables", block_tables, "B M", INT32)
        lengths = self.check("seq_lens", seq_lens, "B", INT32)
        capacity = tables.shape[1] * cache.shape[-2]
        self.check_most(
            f"seq_lens {lengths.shape}",
            seq_lens,
            capacity,
            f"block_tables {tables.shape} with pages of {cache.shape[-2]} tokens reach {capacity}; "
            "give wider block_tables",
        )
        return cache, tables, lengths

    def check_query_lens(self, query_lens: Any, name: str, tokens: jax.Array) -> jax.Array:
        """How many of `tokens` [B, S, ...] are each row's, from the left; the rest is padding."""
        lengths = self.check("query_lens", query_lens, "B", INT32)
        most = tokens.shape[1]
        self.check_most(
            f"query_lens {lengths.shape}",
            query_lens,
            most,
            f"{name} {tokens.shape} has {most} tokens a row",
        )
        return lengths

    def check_most(self, described: str, lengths: Any, most: int, but: str) -> None:
        """Refuses lengths beyond `most`, for the reason that `but` gives, unless they are traced:
        what is known now is checked now."""
        if isinstance(lengths, jax.core.Tracer):
            return
        if (longest := int(np.asarray(lengths).max())) > most:
            raise ValueError(f"{self.op}: {described} holds {longest}, but {but}")


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


def page_blocks(
    kv_cache: Num[Array, "*L N C Ds"],
    block_tables: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    layer: jax.Array | int | None,
    block: int,
    unpack: Callable[[jax.Array], jax.Array],
) -> tuple[
    Int[Array, "blocks B pages"],
    Int[Array, "blocks"],
    Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
]:
    """Tokens [0, lengths) of every row in blocks of K, whole pages and about `block` tokens.

    `unpack` makes latents [..., D] of what the cache stores [..., Ds]; of zeros, zeros.

    Returns:
        The blocks' pages, their first positions, and a function that reads one block of these:
        (pages [B, n], first) -> (kv [B, K, D], 0 past a row's length, positions [K]).
    """
    batch, width = block_tables.shape
    page, stored = kv_cache.shape[-2:]
    # Bytes of 0xFF are NaN in e4m3, bfloat16 and float32 alike.
    missing = 0xFF if kv_cache.dtype == jnp.uint8 else jnp.nan
    lengths = jnp.minimum(lengths, width * page)  # a table of whole blocks ends in others' pages
    # Whatever a table holds past the row's length is replaced before anything is addressed by it.
    owned = jnp.arange(width) < -(-lengths // page)[:, None]
    per_block = min(width, max(1, block // page))
    steps = -(-width // per_block)
    tables = jnp.where(owned, block_tables, 0)
    tables = jnp.pad(tables, ((0, 0), (0, steps * per_block - width)))
    tables = tables.reshape(batch, steps, per_block).swapaxes(0, 1)

    @jax.named_scope("read_pages")
    def read(pages: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        # One gather from the whole stack: a layer taken out first would be a copy. A page
        # that does not exist reads as NaN, not as another row's page.
        index = pages if layer is None else (jnp.asarray(layer, jnp.int32), pages)
        kv = kv_cache.at[index].get(mode="fill", fill_value=missing, wrap_negative_indices=False)
        positions = first + jnp.arange(per_block * page)
        kv = kv.reshape(batch, per_block * page, stored)
        zero = jnp.zeros((), kv.dtype)
        # Before it is unpacked: a NaN would reach the gradient of the scale.
        kv = jnp.where((positions < lengths[:, None])[..., None], kv, zero)
        return unpack(kv), positions

    return tables, jnp.arange(steps, dtype=jnp.int32) * (per_block * page), read


def attend_pages(
    state: Softmax,
    add_block: Callable[[Softmax, jax.Array, jax.Array], Softmax],
    kv_cache: Num[Array, "*L N C Ds"],
    block_tables: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    layer: jax.Array | int | None,
    block: int,
    unpack: Callable[[jax.Array], jax.Array],
) -> Softmax:
    """Feeds tokens [0, lengths) of every row to `add_block(state, kv [B, K, D], positions [K])`.

    K is about `block` tokens, whole pages, and kv what `unpack` makes of them. Blocks past every
    row's length are not read, and one past a row's own leaves that row's state as it was, bit by
    bit. `kv` is 0 past a row's length.
    """
    pages, firsts, read_block = page_blocks(
        kv_cache, block_tables, lengths, layer=layer, block=block, unpack=unpack
    )

    @jax.checkpoint
    def read(state: Softmax, pages: jax.Array, first: jax.Array) -> Softmax:
        reached = first < lengths
        new = add_block(state, *read_block(pages, first))
        return jax.tree.map(
            lambda n, o: jnp.where(reached.reshape(-1, *[1] * (n.ndim - 1)), n, o), new, state
        )

    def step(state: Softmax, xs: tuple[jax.Array, jax.Array]) -> tuple[Softmax, None]:
        pages, first = xs
        return lax.cond(
            jnp.any(first < lengths), read, lambda state, *_: state, state, pages, first
        ), None

    return lax.scan(step, state, (pages, firsts))[0]
