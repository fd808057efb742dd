"""Norms, rotation and cache write of new tokens' heads: a block of a warpgroup per token and head.

A block has a query head, or a key head and its values; of 64 dims it has two heads, so that each
thread has a number or two. What a row does not own in the cache is not touched.

Limits: D 64, 128 or 256, H and Hk even where D is 64; a cache of bfloat16, float16 or
float8_e4m3fn. Reference: `jaxattn.gqa.gqa_append` (implementation="xla"); tests:
tests/ops/gqa/test_append.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.core.formats import FP8, FP8_MAX
from jaxattn.kernels.hopper.machine import interpret_mode, require_hopper

THREADS = 128


def heads_together(head_dim: int) -> int:
    """Heads of a block: as many as give each thread a number."""
    return max(1, THREADS // head_dim)


def line_width(head_dim: int) -> int:
    """Numbers of a block, of one head or of several."""
    return head_dim * heads_together(head_dim)


def refuse(heads: int, kv_heads: int, head_dim: int, cache_dtype: Any) -> None:
    """Raises `NotImplementedError`, with the reason, where the kernel cannot run."""
    if head_dim not in (64, 128, 256):
        raise Refusal(f"gqa_append: the kernel has D 64, 128 or 256, got {head_dim}")
    together = heads_together(head_dim)
    if heads % together or kv_heads % together:
        raise Refusal(
            f"gqa_append: the kernel takes heads of {head_dim} dims {together} at a time, and got "
            f"H = {heads}, Hk = {kv_heads}"
        )
    if cache_dtype not in (jnp.bfloat16, jnp.float16, FP8):
        raise Refusal(
            "gqa_append: the kernel writes a bfloat16, float16 or FP8 cache, got "
            f"{cache_dtype.name}"
        )


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
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`jaxattn.gqa.gqa_append` on a Hopper GPU; arguments are documented there.

    `kv_scale` is float32 [2, Hk] with a float8_e4m3fn cache, and None with others.
    """
    require_hopper("gqa_append", interpret=interpret)
    batch, q_len, heads, of_head = q.shape
    kv_heads, dim = k.shape[2:]
    refuse(heads, kv_heads, dim, kv_cache.dtype)
    together, width, tokens = heads_together(dim), line_width(dim), batch * q_len
    if together > 1:
        q, of_head = q[..., :dim], dim
    q_lines, kv_lines, rotated = heads // together, kv_heads // together, angles.shape[-1] // 2
    stacked, fp8 = weights is not None and weights.ndim == 2, kv_cache.dtype == FP8

    def of_line(some: jax.Array) -> jax.Array:
        """Numbers of the rotated dims, for all of a block's."""
        some = jnp.pad(some.reshape(tokens, rotated), ((0, 0), (0, dim - rotated)))
        return jnp.tile(some, (1, together))

    if rotated == width:
        angles = angles.reshape(tokens, 2 * width)
    else:
        angles = jnp.concatenate([of_line(x) for x in jnp.split(angles, 2, axis=-1)], axis=-1)
    layers = kv_cache if layer is not None else kv_cache[None]
    operands = [
        q.reshape(tokens, q_lines, together * of_head),
        k.reshape(tokens, kv_lines, width),
        v.reshape(tokens, kv_lines, width),
        angles.astype(jnp.float32),
        jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1),
        block_tables,
        seq_lens,
    ]
    if weights is not None:
        weights = weights.reshape(-1, weights.shape[-1])
    operands += [x for x in (weights, query_lens, kv_scale) if x is not None]
    cache_ref = jax.new_ref(layers.reshape(*layers.shape[:4], kv_heads * dim))
    shift = 1 if interleaved else rotated // 2
    channel = plgpu.Layout.WG_STRIDED((width,), vec_size=1)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=channel, optimized=False).astype(jnp.float32)

    dim_of_line = lambda: plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=channel)  # noqa: E731

    def per_head(values: list[jax.Array]) -> jax.Array:
        """A number for each head of the block, for each of its dims."""
        if together == 1:
            return values[0]
        return jnp.where(dim_of_line() < dim, values[0], values[1])

    def normed(x: jax.Array, weight: jax.Array | None) -> jax.Array:
        if weight is None:
            return x
        squares = [x * x]
        if together > 1:
            mine = dim_of_line() < dim
            squares = [jnp.where(mine, squares[0], 0.0), jnp.where(mine, 0.0, squares[0])]
        factors = [lax.rsqrt(jnp.sum(some) * (1.0 / dim) + eps) for some in squares]
        return x * per_head(factors) * weight

    def turned(x: jax.Array, cosine: jax.Array, sine: jax.Array, smem: Any) -> jax.Array:
        """To shared memory and back, the other dim of its pair comes to a thread: what lies outside
        of the head, or has not been written, is never selected."""
        smem.at[pl.ds(width, width)][...] = x
        plgpu.commit_smem()
        after = load(smem.at[pl.ds(width + shift, width)])
        before = load(smem.at[pl.ds(width - shift, width)])
        place = lax.rem(dim_of_line(), dim)
        first = lax.rem(place, 2) == 0 if interleaved else place < shift
        partner = jnp.where(first, after, before)
        return jnp.where(place < rotated, x * cosine + partner * sine, x)

    def stored(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        if scale is None:
            return x.astype(kv_cache.dtype)
        x = jnp.where((x == jnp.inf) | (x == -jnp.inf), jnp.nan, x) / scale
        return jnp.minimum(jnp.maximum(x, -FP8_MAX), FP8_MAX).astype(FP8)

    def body(q_ref, k_ref, v_ref, angles_ref, layer_ref, tables_ref, lens_ref, *rest):
        refs = iter(rest)
        weights_ref: Any = next(refs) if weights is not None else None
        query_lens_ref: Any = next(refs) if query_lens is not None else None
        scale_ref: Any = next(refs) if fp8 else None
        cache, out_ref, smem = refs
        token, line = lax.axis_index("token"), lax.axis_index("line")
        which = layer_ref[0]
        own = which if stacked else 0
        layers, pages, _, page_size, _ = cache.shape
        cosine = load(angles_ref.at[token, pl.ds(0, width)])
        sine = load(angles_ref.at[token, pl.ds(width, width)])

        def weight_of(kind: int) -> jax.Array | None:
            if weights_ref is None:
                return None
            return load(weights_ref.at[own, pl.ds(kind * width, width)])

        @pl.when(line < q_lines)
        def _queries():
            x = load(q_ref.at[token, line, pl.ds(0, width)])
            x = turned(normed(x, weight_of(0)), cosine, sine, smem)
            out_ref.at[token, line][...] = x.astype(dtype)

        @pl.when(line >= q_lines)
        def _key_and_value():
            mine = line - q_lines
            # Everything is read before anything waits: latencies run side by side.
            key, value = load(k_ref.at[token, mine]), load(v_ref.at[token, mine])
            weight = weight_of(1)
            row = lax.div(token, q_len)
            length, place = lens_ref[row], lax.rem(token, q_len)
            queries = q_len if query_lens is None else query_lens_ref[row]
            position = length - queries + place
            column = lax.div(jnp.maximum(position, 0), page_size)
            known = (length > 0) & (place < queries) & (position >= 0)
            known &= (column < tables_ref.shape[1]) & (which >= 0) & (which < layers)
            page = tables_ref[row, jnp.minimum(column, tables_ref.shape[1] - 1)]

            @pl.when(known & (page >= 0) & (page < pages))
            def _write():
                slot, dims = lax.rem(position, page_size), pl.ds(mine * width, width)
                kept = turned(normed(key, weight), cosine, sine, smem)
                for kind, x in enumerate((kept, value)):
                    scale: Any = None
                    if fp8:
                        first = mine * together
                        scale = per_head([scale_ref[kind, first + i] for i in range(together)])
                    cache.at[which, page, kind, slot, dims][...] = stored(x, scale)

    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((tokens, q_lines, width), dtype),),
        scratch_types=[plgpu.SMEM((3 * width,), jnp.float32)],
        # The last axis is the one that may have more than 65,535 blocks.
        grid=(q_lines + kv_lines, tokens),
        grid_names=("line", "token"),
        num_threads=1,
        thread_name="wg",
        kernel_name="gqa_append",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret_mode(interpret, detect_races=detect_races),
    )
    with jax.enable_x64(False):  # the kernel's integers are int32
        (out,) = kernel(*operands, cache_ref)
    return out.reshape(batch, q_len, heads, dim), jax.freeze(cache_ref).reshape(kv_cache.shape)
