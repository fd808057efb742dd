"""The GQA append op: norms, rotation, quantization and cache write of new tokens.

Between the projections and the cache lie the norms of each head's query and key, their rotation,
and the write. Each of these takes a few microseconds for little work, so one kernel does all of
them.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.layer_index import LayerIndex, split_layer_index
from jaxattn.core.numerics.rms_norm import rms_norm
from jaxattn.core.numerics.rope import RopeConfig, Rotation, check_config, check_rotation, rope
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import check_out_dtype, finite
from jaxattn.core.validation.varying_axes import refuse_explicit_axes
from jaxattn.kernels.gqa.append import gqa_append_mosaic, heads_together, line_width
from jaxattn.ops.gqa.cache_write import check_cache, check_kv_scale, gqa_cache_write
from jaxattn.ops.gqa.scores import check_heads


def pack_gqa_weights(
    q_norm: Float[Array, "*L D"], k_norm: Float[Array, "*L D"], *, zero_centered: bool = False
) -> Float[Array, "*L W"]:
    """Packs a layer's norm weights for `gqa_append`, as float32, W = 2 max(D, 128).

    The kernel processes several heads of fewer than 128 dims together, so their weights are
    repeated. Pack a stack of layers once, at load time: the op indexes the stack, so a loop over
    layers copies nothing out of it.

    Args:
        zero_centered: Whether the weights are the w of 1 + w, as checkpoints of Qwen3-Next store
            them.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape; the message names it.
    """
    arguments = OpArguments("pack_gqa_weights")
    axes = " ".join("LMNK"[: max(getattr(q_norm, "ndim", 1) - 1, 0)]) + " D"
    norms = [
        arguments.check(name, x, axes).astype(jnp.float32)
        for name, x in (("q_norm", q_norm), ("k_norm", k_norm))
    ]
    if zero_centered:
        norms = [1 + x for x in norms]
    repeats = (*[1] * (norms[0].ndim - 1), heads_together(norms[0].shape[-1]))
    return jnp.concatenate([jnp.tile(x, repeats) for x in norms], axis=-1)


def check_new_heads(
    arguments: OpArguments,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    weights: jax.Array | None,
    *,
    rotation: Rotation,
    config: RopeConfig,
    eps: float,
    layer: Array | int | LayerIndex | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, float]:
    """Checks new tokens' heads q [B, S, H, E], k and v [B, S, Hk, D], the packed weights and eps.

    Raises:
        TypeError, ValueError: The arrays, the rotation or the heads do not fit each other; the
            message names the argument.
    """
    op = arguments.op
    q = arguments.check("q", q, "B S H E")
    k = arguments.check("k", k, "B S Hk D")
    v = arguments.check("v", v, "B S Hk D")
    batch, q_len, kv_heads, dim = k.shape
    check_heads(arguments, q, kv_heads, "k", k.shape)
    if q.shape[-1] not in (dim, 2 * dim):
        raise ValueError(
            f"{op}: q {q.shape} must have D = {dim} dims per head, like k {k.shape}, or 2 D = "
            f"{2 * dim} with gates"
        )
    check_config(op, config)
    if config.dim > dim:
        raise ValueError(f"{op}: {config.dim=} exceeds D = {dim} of k {k.shape}")
    check_rotation(op, rotation, config, (batch, q_len))
    if weights is not None:
        axes = "L W" if getattr(weights, "ndim", 1) == 2 else "W"
        weights = arguments.check("weights", weights, axes, ("float32",))
        if weights.ndim == 2 and layer is None:
            raise ValueError(f"{op}: weights {weights.shape} are a stack of layers; give layer=")
        if weights.shape[-1] != 2 * line_width(dim):
            raise ValueError(
                f"{op}: weights {weights.shape} must be float32 with W = {2 * line_width(dim)}, "
                f"as pack_gqa_weights returns them for D = {dim}"
            )
    return q, k, v, weights, finite(op, "eps", eps)


def normed_and_rotated(
    q: Float[Array, "B S H E"],
    k: Float[Array, "B S Hk D"],
    weights: jax.Array | None,
    *,
    layer: jax.Array | int | None,
    rotation: Rotation,
    config: RopeConfig,
    eps: float,
) -> tuple[Float[Array, "B S H D"], Float[Array, "B S Hk D"]]:
    """Returns queries (without gates) and keys, normed and rotated by position, in float32."""
    own = weights if weights is None or weights.ndim == 1 else weights[layer]
    dim = k.shape[-1]

    def turned(x: jax.Array, first: int) -> jax.Array:
        """Norms and rotates heads; the packed weights hold the norm's weight from `first` on."""
        if own is not None:
            x = rms_norm(x, own[first : first + dim], eps)
        rotated = rope(x[..., : config.dim].astype(jnp.float32), rotation, config)
        return jnp.concatenate([rotated, x[..., config.dim :].astype(jnp.float32)], axis=-1)

    return turned(q[..., :dim], 0), turned(k, line_width(dim))


def gqa_append(
    q: Float[Array, "B S H E"],
    k: Float[Array, "B S Hk D"],
    v: Float[Array, "B S Hk D"],
    weights: Float[Array, "*L W"] | None,
    kv_cache: Num[Array, "L N 2 C Hk D"] | Num[Array, "N 2 C Hk D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    rotation: Rotation,
    config: RopeConfig,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    query_lens: Int[Array, "B"] | None = None,
    kv_scale: Array | float | None = None,
    layer: Array | int | LayerIndex | None = None,
    gates: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Array, ...]:
    """Normalizes and rotates each row's new queries and keys, and caches keys and values.

    Args:
        q: Queries from the projection, neither normed nor rotated. E is D, or 2 D if each head's
            gate follows its queries; the op reads only the queries.
        k, v: Keys and values from the projections.
        weights: `pack_gqa_weights(...)` of this layer, or of a stack that `layer` indexes. None if
            neither queries nor keys are normed.
        kv_cache: A stack of layers (with `layer`) or one layer's pages, of any dtype that
            `gqa_cache_write` writes. Donate it to update it in place.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1, and no
            two rows may share a page that is written.
        seq_lens: int32 number of tokens of each row, the S new ones included, at most M * C.
            Nothing is written for a row with 0.
        rotation: `jaxattn.rotation` of the tokens' positions [B, S].
        config: Configuration of `rotation`. The first `config.dim` of D dims are rotated, and its
            layout defines which are a pair.
        eps: Epsilon of both norms.
        dtype: Dtype of the returned queries. None means q's.
        query_lens: int32 number of new tokens of each row, which come first among its S. None means
            S.
        kv_scale: Scales of a float8_e4m3fn cache, as for `gqa_cache_write`.
        layer: Index into the stacks, a Python int, a traced scalar or a `LayerIndex`.
        gates: Whether to return the heads' gates too, in a separate array. E must be 2 D.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernel requires D 64, 128 or 256, even H and Hk if D is 64, and a cache of bfloat16,
            float16 or FP8.

    Returns:
        (queries [B, S, H, D], the cache), and with `gates` the gates [B, S, H, D] in q's dtype.
        Rows that `gqa_cache_write` does not write, such as those with seq_lens 0, write nothing
        here either; their queries are still normed.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, a concrete length or page is
            out of range, or two tokens are written to one place; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    op = "gqa_append"
    arguments = OpArguments(op)
    q, k, v, weights, eps = check_new_heads(
        arguments, q, k, v, weights, rotation=rotation, config=config, eps=eps, layer=layer
    )
    dim = k.shape[-1]
    if gates and q.shape[-1] != 2 * dim:
        raise ValueError(
            f"{op}: gates=True needs q [B, S, H, 2 D] with D = {dim} gates after each head's "
            f"queries; got q {q.shape}"
        )
    given = block_tables, seq_lens, query_lens
    kv_cache, block_tables, seq_lens = check_cache(
        arguments, kv_cache, block_tables, seq_lens, layer
    )
    query_lens = arguments.check_written(given, "k", k, kv_cache.shape[-3])
    kv_scale = check_kv_scale(op, kv_cache, kv_scale)
    refuse_explicit_axes(
        op, q, k, v, weights, kv_cache, block_tables, seq_lens, query_lens, kv_scale
    )
    out_dtype = check_out_dtype(op, dtype, q.dtype)
    number = split_layer_index(layer)[2]

    def mosaic(interpret: bool) -> tuple[Array, ...]:
        return gqa_append_mosaic(
            q,
            k,
            v,
            weights,
            kv_cache,
            block_tables,
            seq_lens,
            angles=rotation.angles,
            interleaved=config.interleaved,
            eps=eps,
            dtype=out_dtype,
            query_lens=query_lens,
            layer=number,
            kv_scale=kv_scale,
            gates=gates,
            interpret=interpret,
        )

    def xla() -> tuple[Array, ...]:
        queries, keys = normed_and_rotated(
            q, k, weights, layer=number, rotation=rotation, config=config, eps=eps
        )
        written = gqa_cache_write(
            kv_cache,
            keys,
            v,
            block_tables,
            seq_lens,
            query_lens=query_lens,
            layer=number,
            kv_scale=kv_scale,
        )
        behind = (q[..., dim:],) if gates else ()
        return queries.astype(out_dtype), written, *behind

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, xla)
