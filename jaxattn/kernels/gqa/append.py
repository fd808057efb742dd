"""Norms, rotation and cache write of new tokens' heads: a CTA of one warpgroup per token and head.

A CTA has a query head, or a key head and its values; with 64 dims it has two heads, so that each
thread has one or two numbers. Nothing in the cache is touched that no row owns.

Limits: D 64, 128 or 256, H and Hk even where D is 64; a cache of bfloat16, float16 or
float8_e4m3fn. Reference: `jaxattn.gqa.gqa_append` (implementation="xla"); tests:
tests/ops/gqa/test_append.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import FP8, FP8_MAX
from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.kernels.attention.slot_mapping import slot_mapping
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper

THREADS = 128


def heads_together(head_dim: int) -> int:
    """Returns the heads of a CTA: as many as give each thread a number."""
    return max(1, THREADS // head_dim)


def line_width(head_dim: int) -> int:
    """Returns the numbers of a CTA, those of one head or of several."""
    return head_dim * heads_together(head_dim)


def refuse(op: str, heads: int, kv_heads: int, head_dim: int) -> None:
    """Raises `Refusal`, with the reason, if a kernel cannot divide the heads."""
    if head_dim not in (64, 128, 256):
        raise Refusal(f"{op}: the kernel needs D = 64, 128 or 256, got D = {head_dim}")
    together = heads_together(head_dim)
    if heads % together or kv_heads % together:
        raise Refusal(
            f"{op}: the kernel needs H and Hk multiples of {together} for {head_dim} dims, got H = "
            f"{heads}, Hk = {kv_heads}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaAppendCta:
    """A CTA of the append kernel.

    Attributes:
        q_len: S.
        q_lines: CTAs of a token that process queries; the CTAs after them process keys and values.
        head_dim: D.
        rotated: The number of rotated dims, the first ones of D.
        page_size: C.
        stacked: Whether the weights are those of all layers.
        dtype: The dtype of the returned queries.
    """

    q_len: int
    q_lines: int
    head_dim: int
    rotated: int
    page_size: int
    interleaved: bool
    eps: float
    stacked: bool
    dtype: Any

    @property
    def width(self) -> int:
        return line_width(self.head_dim)

    @property
    def channel(self) -> Any:
        """The register layout of a CTA's numbers."""
        return plgpu.Layout.WG_STRIDED((self.width,), vec_size=1)

    def run(self, *, layer_ref: Any, angles_ref: Any, weights_ref: Any, **refs: Any) -> None:
        """Runs the CTA; `refs` are those of the queries, and of the keys and values."""
        token, line = lax.axis_index("token"), lax.axis_index("line")
        smem, width = refs["smem"], self.width
        which = layer_ref[0]
        # A layer that the cache lacks is not written; its queries use the nearest layer's weights.
        own = jnp.clip(which, 0, weights_ref.shape[0] - 1) if self.stacked else 0
        cosine = self.load(angles_ref.at[token, pl.ds(0, width)])
        sine = self.load(angles_ref.at[token, pl.ds(width, width)])

        def weight_of(kind: int) -> jax.Array | None:
            if weights_ref is None:
                return None
            return self.load(weights_ref.at[own, pl.ds(kind * width, width)])

        def prepared(x: jax.Array, weight: jax.Array | None) -> jax.Array:
            return self.turned(self.normed(x, weight), cosine, sine, smem)

        @pl.when(line < self.q_lines)
        def _queries() -> None:
            x = self.load(refs["q_ref"].at[token, line, pl.ds(0, width)])
            if refs["gates_ref"] is not None:
                gate = self.load(refs["q_ref"].at[token, line, pl.ds(width, width)])
                refs["gates_ref"].at[token, line][...] = gate.astype(refs["gates_ref"].dtype)
            refs["out_ref"].at[token, line][...] = prepared(x, weight_of(0)).astype(self.dtype)

        @pl.when(line >= self.q_lines)
        def _key_and_value() -> None:
            mine = line - self.q_lines
            # All loads are issued before the first use, so that their latencies overlap.
            key, value = (self.load(refs[name].at[token, mine]) for name in ("k_ref", "v_ref"))
            weight = weight_of(1)
            page, position, known = slot_mapping(
                token, q_len=self.q_len, page_size=self.page_size, layer=which,
                layers=refs["cache_ref"].shape[0], tables_ref=refs["tables_ref"],
                lens_ref=refs["lens_ref"], query_lens_ref=refs["query_lens_ref"],
            )  # fmt: skip
            at = lax.rem(position, self.page_size)

            @pl.when(known & (page >= 0) & (page < refs["cache_ref"].shape[1]))
            def _write() -> None:
                self.write((which, page, at), mine, prepared(key, weight), value, refs)

    def write(
        self, place: tuple[Any, ...], mine: jax.Array, key: jax.Array, value: jax.Array, refs: Any
    ) -> None:
        """Writes a line's key and value to their place (layer, page, token in the page)."""
        cache, scale_ref = refs["cache_ref"], refs["scale_ref"]
        (layer, page, at), dims = place, pl.ds(mine * self.width, self.width)
        for kind, x in enumerate((key, value)):
            scale = self.scale(scale_ref, kind, mine)
            cache.at[layer, page, kind, at, dims][...] = self.stored(x, scale, cache.dtype)

    def load(self, ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=self.channel, optimized=False).astype(jnp.float32)

    def dim_of_line(self) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (self.width,), 0, layout=self.channel)

    def per_head(self, values: list[jax.Array]) -> jax.Array:
        """Broadcasts one number per head of the CTA over the head's dims."""
        if len(values) == 1:
            return values[0]
        return jnp.where(self.dim_of_line() < self.head_dim, values[0], values[1])

    def normed(self, x: jax.Array, weight: jax.Array | None) -> jax.Array:
        if weight is None:
            return x
        squares = [x * x]
        if heads_together(self.head_dim) > 1:
            mine = self.dim_of_line() < self.head_dim
            squares = [jnp.where(mine, squares[0], 0.0), jnp.where(mine, 0.0, squares[0])]
        share = 1.0 / self.head_dim
        factors = [lax.rsqrt(jnp.sum(some) * share + self.eps) for some in squares]
        return x * self.per_head(factors) * weight

    def turned(self, x: jax.Array, cosine: jax.Array, sine: jax.Array, smem: Any) -> jax.Array:
        """Returns the rotated dims. Shared memory brings the other dim of its pair to a thread:
        numbers outside of the head, or not yet written, are never selected."""
        width, shift = self.width, 1 if self.interleaved else self.rotated // 2
        smem.at[pl.ds(width, width)][...] = x
        plgpu.commit_smem()
        after = self.load(smem.at[pl.ds(width + shift, width)])
        before = self.load(smem.at[pl.ds(width - shift, width)])
        place = lax.rem(self.dim_of_line(), self.head_dim)
        first = lax.rem(place, 2) == 0 if self.interleaved else place < shift
        partner = jnp.where(first, after, before)
        return jnp.where(place < self.rotated, x * cosine + partner * sine, x)

    def scale(self, scale_ref: Any, kind: int, line: jax.Array) -> jax.Array | None:
        """Returns the scales of the CTA's heads, for each of its dims; None if the cache has no
        scales."""
        if scale_ref is None:
            return None
        together = heads_together(self.head_dim)
        first = line * together
        return self.per_head([scale_ref[kind, first + i] for i in range(together)])

    def stored(self, x: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
        if scale is None:
            return x.astype(dtype)
        x = jnp.where((x == jnp.inf) | (x == -jnp.inf), jnp.nan, x) / scale
        return jnp.minimum(jnp.maximum(x, -FP8_MAX), FP8_MAX).astype(FP8)


def gqa_append_mosaic(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    weights: jax.Array | None,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    angles: jax.Array,
    interleaved: bool,
    eps: float,
    dtype: Any,
    query_lens: jax.Array | None = None,
    layer: jax.Array | int | None = None,
    kv_scale: jax.Array | None = None,
    gates: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """`jaxattn.gqa.gqa_append` on a Hopper GPU, with the same arguments.

    `kv_scale` is float32 [2, Hk] with a float8_e4m3fn cache, and None with others.
    """
    require_hopper("gqa_append", interpret=interpret)
    kv_heads, dim = k.shape[2:]
    refuse("gqa_append", q.shape[2], kv_heads, dim)
    if kv_cache.dtype not in (jnp.bfloat16, jnp.float16, FP8):
        raise Refusal(
            "gqa_append: the kernel needs a bfloat16, float16 or FP8 cache, got "
            f"{kv_cache.dtype.name}"
        )
    q, k, v, weights, kv_cache, angles, kv_scale = without_gradient(
        "gqa_append",
        (q, k, v, weights, kv_cache, angles, kv_scale),
        "q k v weights kv_cache rotation kv_scale",
        train_with="gqa_attention",
    )
    layers = kv_cache if layer is not None else kv_cache[None]
    cache_ref = jax.new_ref(layers.reshape(*layers.shape[:4], kv_heads * dim))
    out = launch_append(
        "gqa_append", GqaAppendCta, q, k, v, weights, cache_ref, block_tables, seq_lens,
        angles=angles, page_size=layers.shape[3], interleaved=interleaved, eps=eps, dtype=dtype,
        query_lens=query_lens, layer=layer, kv_scale=kv_scale, interpret=interpret,
        gates=gates,
    )  # fmt: skip
    queries, *behind = out
    return queries, jax.freeze(cache_ref).reshape(kv_cache.shape), *behind


def launch_append(
    name: str,
    make: Callable[..., GqaAppendCta],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    weights: jax.Array | None,
    cache_ref: Any,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    angles: jax.Array,
    page_size: int,
    interleaved: bool,
    eps: float,
    dtype: Any,
    query_lens: jax.Array | None,
    layer: jax.Array | int | None,
    kv_scale: jax.Array | None = None,
    lines: int = 3,
    gates: bool = False,
    interpret: bool,
) -> list[jax.Array]:
    """Writes keys and values to `cache_ref` [L, N, ..], and returns the queries [B, S, H, D].

    Args:
        make: Creates the CTA from the fields of `GqaAppendCta`.
        lines: Lines of shared memory, float32; the first three are for the rotation.
        gates: Whether q has the gates of each head after its queries. They are the second result.
    """
    batch, q_len, heads, of_head = q.shape
    kv_heads, dim = k.shape[2:]
    together, width, tokens = heads_together(dim), line_width(dim), batch * q_len
    apart = q[..., dim:] if gates and together > 1 else None
    if together > 1:
        q, of_head = q[..., :dim], dim
    q_lines, kv_lines, rotated = heads // together, kv_heads // together, angles.shape[-1] // 2

    def of_line(some: jax.Array) -> jax.Array:
        """Extends numbers of the rotated dims to all dims of a CTA."""
        some = jnp.pad(some.reshape(tokens, rotated), ((0, 0), (0, dim - rotated)))
        return jnp.tile(some, (1, together))

    if rotated == width:
        angles = angles.reshape(tokens, 2 * width)
    else:
        angles = jnp.concatenate([of_line(x) for x in jnp.split(angles, 2, axis=-1)], axis=-1)
    inputs = {
        "q_ref": q.reshape(tokens, q_lines, together * of_head),
        "k_ref": k.reshape(tokens, kv_lines, width),
        "v_ref": v.reshape(tokens, kv_lines, width),
        "angles_ref": angles.astype(jnp.float32),
        "layer_ref": jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1),
        "tables_ref": block_tables,
        "lens_ref": seq_lens,
        "weights_ref": None if weights is None else weights.reshape(-1, weights.shape[-1]),
        "query_lens_ref": query_lens,
        "scale_ref": kv_scale,
    }
    block = make(
        q_len=q_len, q_lines=q_lines, head_dim=dim, rotated=rotated, page_size=page_size,
        interleaved=interleaved, eps=eps, stacked=weights is not None and weights.ndim == 2,
        dtype=dtype,
    )  # fmt: skip
    out = launch(
        block.run,
        name=name,
        # The last axis is the one that may have more than 65,535 CTAs.
        grid={"line": q_lines + kv_lines, "token": tokens},
        inputs={**inputs, "cache_ref": cache_ref},
        outputs={
            "out_ref": jax.ShapeDtypeStruct((tokens, q_lines, width), dtype),
            "gates_ref": jax.ShapeDtypeStruct((tokens, q_lines, width), q.dtype)
            if gates and apart is None
            else None,
        },
        scratch={"smem": plgpu.SMEM((lines * width,), jnp.float32)},
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    found = [x.reshape(batch, q_len, heads, dim) for x in out.values()]
    return found if apart is None else [*found, apart]
