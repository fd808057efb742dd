"""Norms, rotation and cache write of a decode step's new tokens: one warpgroup per token.

A second CTA per token normalizes the token's compressed queries, if the call has any. A CTA writes
the D numbers of one token to the cache, four or one per thread; nothing else in the cache is
touched.

Limits: R a multiple of 512, P 64, Q a multiple of 128, a bfloat16 or float16 cache. Reference and
tests: `jaxattn.mla.mla_append` (implementation="xla"), tests/ops/mla/test_append.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal, without_gradient
from jaxattn.kernels.attention.slot_mapping import slot_mapping
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper

ROPE = 64
THREADS = 128
# The rotated dims and as many before them: one dim per thread, and the upper half of the threads
# rotates.
WINDOW = THREADS


def norms_queries(query_rank: int) -> bool:
    """Whether the kernel has enough threads for compressed queries of this width."""
    return query_rank % THREADS == 0


def _refuse(rank: int, rope: int, cache_dtype: Any) -> None:
    if rope != ROPE or rank % 512:
        raise Refusal(
            f"mla_append: the kernel needs R a multiple of 512 and P = 64, got R={rank}, P={rope}"
        )
    if cache_dtype not in (jnp.bfloat16, jnp.float16):
        raise Refusal(
            f"mla_append: the kernel needs a bfloat16 or float16 cache, got {cache_dtype.name}"
        )


def mla_append_mosaic(
    kv: jax.Array,
    q: jax.Array | None,
    weights: jax.Array,
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
    interpret: bool = False,
) -> tuple[jax.Array | None, jax.Array]:
    """`jaxattn.mla.mla_append` on a Hopper GPU, with the same arguments.

    `q` has a width that `norms_queries` accepts, or is None.
    """
    require_hopper("mla_append", interpret=interpret)
    batch, q_len, dim = kv.shape
    query_rank = 0 if q is None else q.shape[-1]
    rank = dim - angles.shape[-1] // 2
    _refuse(rank, dim - rank, kv_cache.dtype)
    kv, q, weights, kv_cache, angles = without_gradient(
        "mla_append",
        (kv, q, weights, kv_cache, angles),
        "kv q weights kv_cache rotation",
        train_with="causal_attention",
    )
    tokens = batch * q_len
    stacked = weights.ndim == 2
    inputs = {
        "kv_ref": kv.reshape(tokens, dim),
        "weights_ref": weights.reshape(-1, weights.shape[-1]),
        "angles_ref": angles.reshape(tokens, 2 * ROPE).astype(jnp.float32),
        "layer_ref": jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1),
        "tables_ref": block_tables,
        "lens_ref": seq_lens,
        "query_lens_ref": query_lens,
        "q_ref": None if q is None else q.reshape(tokens, query_rank),
    }
    cache_ref = jax.new_ref(kv_cache if layer is not None else kv_cache[None])
    shift = 1 if interleaved else ROPE // 2
    channel = plgpu.Layout.WG_STRIDED((WINDOW,), vec_size=1)

    def load(ref: Any, width: int) -> jax.Array:
        vector = next(n for n in (4, 2, 1) if width % (n * THREADS) == 0)
        layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def load_window(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=channel, optimized=False).astype(jnp.float32)

    def factor_of(x: jax.Array, width: int) -> jax.Array:
        return lax.rsqrt(jnp.sum(x * x) * (1.0 / width) + eps)

    def body(
        kv_ref, weights_ref, angles_ref, layer_ref, tables_ref, lens_ref, query_lens_ref, q_ref,
        cache, out_ref, smem,
    ):  # fmt: skip
        token = lax.axis_index("token")
        which = layer_ref[0]
        own = which if stacked else 0
        layers, pages, page_size, _ = cache.shape

        @pl.when(lax.axis_index("kind") == 0)
        def _latent():
            # All loads are issued before the first use, so that their latencies overlap.
            x = load(kv_ref.at[token, pl.ds(0, rank)], rank)
            weight = load(weights_ref.at[own, pl.ds(0, rank)], rank)
            first = rank + ROPE - WINDOW
            some = load_window(kv_ref.at[token, pl.ds(first, WINDOW)])
            some_weight = load_window(weights_ref.at[own, pl.ds(first, WINDOW)])
            angles = load_window(angles_ref.at[token])
            page, position, known = slot_mapping(
                token, q_len=q_len, page_size=page_size, layer=which, layers=layers,
                tables_ref=tables_ref, lens_ref=lens_ref, query_lens_ref=query_lens_ref,
            )  # fmt: skip

            @pl.when(known & (page >= 0) & (page < pages))
            def _write():
                target = cache.at[which, page, lax.rem(position, page_size)]
                factor = factor_of(x, rank)
                target.at[pl.ds(0, rank)][...] = (x * factor * weight).astype(cache.dtype)

                # The last 64 of these dims are written again, with the same values, together with
                # the rotated ones. Shared memory exchanges the dims between threads: values outside
                # of the window are never selected.
                smem.at[pl.ds(WINDOW, WINDOW)][...] = some
                smem.at[pl.ds(3 * WINDOW + ROPE, WINDOW)][...] = angles
                plgpu.commit_smem()
                after = load_window(smem.at[pl.ds(WINDOW + shift, WINDOW)])
                before = load_window(smem.at[pl.ds(WINDOW - shift, WINDOW)])
                cosine = load_window(smem.at[pl.ds(3 * WINDOW, WINDOW)])
                sine = load_window(smem.at[pl.ds(3 * WINDOW + ROPE, WINDOW)])
                dim_of = plgpu.broadcasted_iota(jnp.int32, (WINDOW,), 0, layout=channel)
                of_pair = lax.rem(dim_of, 2) if interleaved else lax.div(dim_of - ROPE, shift)
                partner = jnp.where(of_pair == 0, after, before)
                normed = some * factor * some_weight
                value = jnp.where(dim_of < ROPE, normed, some * cosine + partner * sine)
                target.at[pl.ds(first, WINDOW)][...] = value.astype(cache.dtype)

        if q_ref is not None:

            @pl.when(lax.axis_index("kind") == 1)
            def _queries():
                x = load(q_ref.at[token], query_rank)
                weight = load(weights_ref.at[own, pl.ds(dim, query_rank)], query_rank)
                factor = factor_of(x, query_rank)
                out_ref.at[token][...] = (x * factor * weight).astype(dtype)

    new = None if q is None else jax.ShapeDtypeStruct((tokens, query_rank), dtype)
    out = launch(
        body,
        name="mla_append",
        # The last axis is the one that may have more than 65,535 CTAs.
        grid={"kind": 1 if q is None else 2, "token": tokens},
        inputs={**inputs, "cache": cache_ref},
        outputs={"out_ref": new},
        scratch={"smem": plgpu.SMEM((5 * WINDOW,), jnp.float32)},
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    normed = out["out_ref"].reshape(batch, q_len, query_rank) if q is not None else None
    return normed, jax.freeze(cache_ref).reshape(kv_cache.shape)
