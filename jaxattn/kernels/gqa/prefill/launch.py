"""Grouped-query prefill: softmax(q K^T) V of new tokens, over a cached prefix and themselves.

Persistent CTAs draw tiles of 128 packed rows of a head (192 where D is 64), one after another. The
definition of a tile is in tile_scheduler.py, the producer warpgroup in producer.py, the consumers
in mainloop.py, and the configuration for each D in tile_config.py. The online softmax runs through
the prefix, read page by page from the cache, and on through the new tokens. It needs no global
memory except for the output and the LSE. If a row has few new tokens, the heads of a group are
adjacent packed rows (pack GQA).

Limits: D 64, 128 or 256, q, k, v and cache all bfloat16 or all float16, pages of 16, 32, 64 or 128
tokens, any T, group and number of rows.
Reference: `jaxattn.gqa.gqa_prefill` (implementation="xla"); tests:
tests/kernels/gqa/prefill/test_kernel.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.attention.causal_tile_order import head_group
from jaxattn.kernels.gqa.prefill.mainloop import GqaPrefillCta, ScoreScaling
from jaxattn.kernels.gqa.prefill.smem import scratch_types
from jaxattn.kernels.gqa.prefill.tile_config import (
    PAGE_SIZES,
    ROWS,
    GqaPrefillTileConfig,
    config_of,
    copies_of,
    refusal,
)
from jaxattn.kernels.gqa.prefill.tile_scheduler import GqaPrefillTileScheduler
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS, require_hopper

# With fewer new tokens than this, the heads of a group are packed, if a group has more than one.
# This costs a copy of the queries and of the output, and fills the tiles.
FEW_TOKENS = 256


def refuse(op: str, q: Any, k: Any, v: Any, *, interpret: bool) -> None:
    """Raises `Refusal`, with the reason, if the kernel does not serve the call.

    Args:
        q: [B, T, H, D]; q, k and v are arrays or their shapes.
    """
    require_hopper(op, interpret=interpret)
    reason = refusal(q.dtype, q.shape[-1])
    for name, x in (("k", k), ("v", v)):
        if reason is None and x.dtype != q.dtype:
            reason = f"{name} in the dtype of q, {q.dtype.name}, got {x.dtype.name}"
    if reason is None and q.size == 0:
        reason = f"at least one token, got q {q.shape}"
    if reason is not None:
        raise Refusal(f"{op}: the kernel needs {reason}")


def reads_pages(q: Any, kv_cache: Any) -> bool:
    """Whether the kernel itself reads these pages [..., N, 2, C, Hk, D]."""
    return kv_cache.dtype == q.dtype and kv_cache.shape[-3] in PAGE_SIZES


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedPrefix:
    """A cached prefix.

    Attributes:
        cache: [L, N, 2, C, Hk, D].
        table: int32 [B, M].
        layer: int32 scalar.
    """

    cache: jax.Array
    table: jax.Array
    layer: jax.Array


def _zero_of(q: jax.Array) -> jax.Array:
    """Returns uint32 [1], 0, in memory of its own: the kernel counts in it, and leaves it at 0.

    XLA does not know that no NaN is above 0. A constant might share its memory with another 0, such
    as the layer's number. A ref instead could not be in a scan that is differentiated.
    """
    one = q[0, 0, 0, :1]
    return (jnp.isnan(one) & (one > 0)).astype(jnp.uint32)


def gqa_prefill_mosaic(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bounds: jax.Array,
    *,
    scale: float,
    k_rest: jax.Array | None = None,
    paged: PagedPrefix | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    firsts: jax.Array | None = None,
    shift: jax.Array | None = None,
    gate: jax.Array | None = None,
    config: GqaPrefillTileConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the attention of each row's new tokens to its cached prefix and to new keys. The
    arguments must pass `refuse`.

    Args:
        q: [B, T, H, D] bfloat16 or float16, as all others.
        k, v: [B, K, Hk, D].
        k_rest: [B, K, P], the last dims of the keys where all heads share them; k then has D - P.
        bounds: int32 [B, 5], (first, queries, prefix, keys, offset). Token t, with
            first <= t < queries, sees all `prefix` cached tokens, and the new keys from `first` up
            to min(keys, t + 1 + offset), exclusive, except those left of its window. With a prefix
            `first` must be 0. Anything else may hold NaN. Or int32 [T / 128, 6], with B 1 and no
            prefix, for each 128 queries: t still counts from token 0 of all, and `first` and `keys`
            count from the key that is the sixth number, a multiple of 8.
        window, sinks, soft_cap, gate: As for `jaxattn.gqa.gqa_decode`.
        firsts: int32 [B, T], the first new key that each token sees, not decreasing in a row; only
            without a prefix. None: `bounds` decide.
        shift: float32 [B, T, H], added to each of a query's scores before the soft cap, or None.
            Without a cap it would change nothing but the LSE.

    Returns:
        out [B, T, H, D] and lse float32 [B, T, H], natural logarithm, the sink included: 0 and -inf
        for a token that sees no key and for those outside of `first` and `queries`.
    """
    if k_rest is not None and paged is not None:
        raise ValueError(
            "gqa_prefill_mosaic: k_rest needs paged=None, because pages contain whole keys"
        )
    batch, tokens, heads, dim = q.shape
    kv_heads, dtype = v.shape[2], q.dtype
    group = heads // kv_heads
    config = config or config_of(dim, window)
    lined = bounds.shape[1] == 6
    packed = group if group > 1 and tokens < FEW_TOKENS and not lined else 1

    def pack(x: jax.Array) -> jax.Array:
        """Returns [B, T, H, ...] as [B, packed rows, heads that share nothing, ...], in whole tiles
        of 8. TMA steps in tiles, and reads zeros past the end of an array."""
        x = x.reshape(batch, tokens, heads // packed, packed, *x.shape[3:]).swapaxes(2, 3)
        return _pad_tokens(x.reshape(batch, tokens * packed, heads // packed, *x.shape[4:]))

    def unpack(x: jax.Array) -> jax.Array:
        x = x[:, : tokens * packed].reshape(batch, tokens, packed, heads // packed, *x.shape[3:])
        return x.swapaxes(2, 3).reshape(batch, tokens, heads, *x.shape[4:])

    rows = tokens * packed
    sharing = group // packed
    kv_bytes = k.shape[1] * 2 * dim * 2
    if paged is not None:
        kv_bytes += paged.table.shape[1] * paged.cache.shape[3] * 2 * dim * 2
    tiles = GqaPrefillTileScheduler(
        rows=config.rows, keys=config.keys, packed=packed, count=-(-rows // config.rows),
        heads=heads // packed,
        group=sharing * head_group(kv_heads, kv_bytes, config.l2_bytes), window=window,
        lined=lined,
    )  # fmt: skip
    if lined and (batch, tiles.count, packed) != (1, len(bounds), 1):
        raise ValueError(
            f"gqa_prefill: bounds {bounds.shape} must have one row per {config.rows} tokens of q "
            f"{q.shape}"
        )
    items = batch * tiles.heads * tiles.count
    blocks = min(items, config.blocks or NUM_SMS)
    if sinks is not None:
        # For every packed row of a head, or for 64 equal ones.
        sinks = sinks.reshape(heads // packed, packed)
        sinks = jnp.tile(sinks, (1, tokens if packed > 1 else ROWS))
        whole = tiles.count * config.rows if packed > 1 else ROWS  # includes the last tile's rows
        sinks = jnp.pad(sinks, ((0, 0), (0, whole - sinks.shape[1])))
    if firsts is not None:
        if lined:
            raise ValueError(
                "gqa_prefill: firsts cannot be combined with bounds of lines, which do not count "
                "keys from the first"
            )
        firsts = jnp.repeat(firsts.astype(jnp.int32), packed, axis=1)
        firsts = jnp.pad(firsts, ((0, 0), (0, tiles.count * config.rows - rows)), mode="edge")
    scores = ScoreScaling(scale=scale, soft_cap=soft_cap)
    if shift is not None:
        shift = (shift * scores.power).reshape(batch, tokens, tiles.heads, packed)
        shift = shift.transpose(0, 2, 1, 3).reshape(batch, tiles.heads, rows)
        shift = jnp.pad(shift, ((0, 0), (0, 0), (0, tiles.count * config.rows - rows)))
    cache = None
    if paged is not None:
        layers, pages, _, size, _, _ = paged.cache.shape
        cache = paged.cache.reshape(layers, 2 * pages, size, kv_heads * dim)
    pieces = (dim,) if k_rest is None else (k.shape[-1], k_rest.shape[-1])
    copies = copies_of(config, None if paged is None else paged.cache.shape[3])
    block = GqaPrefillCta(
        config=config, tiles=tiles, scores=scores,
        sharing=sharing, copies=copies, head_dim=dim, dtype=dtype, blocks=blocks, items=items,
        interpret=interpret,
    )  # fmt: skip
    whole_rows = -(-rows // ROWS) * ROWS
    drawn = _zero_of(q) if items > blocks else None
    results = launch(
        block.run,
        name="gqa_prefill",
        grid={"block": blocks},
        inputs={
            "q": pack(q),
            "k": _pad_tokens(k),
            "v": _pad_tokens(v),
            "k_rest": None if k_rest is None else _pad_tokens(k_rest),
            "cache": cache,
            "table": None if paged is None else paged.table,
            "layer": None if paged is None else paged.layer.astype(jnp.int32).reshape(1),
            "bounds": bounds.astype(jnp.int32),
            "sinks": sinks,
            "firsts": firsts,
            "shift": shift,
            "gate": None if gate is None else pack(gate.astype(dtype)),
            "drawn": drawn,
        },
        outputs={
            "out": jax.ShapeDtypeStruct((batch, -(-rows // 8) * 8, tiles.heads, dim), dtype),
            "lse": jax.ShapeDtypeStruct((batch, tiles.heads, whole_rows), jnp.float32),
        },
        scratch=scratch_types(config, dtype, dim, copies, pieces)._asdict(),
        warpgroups=config.warpgroups + 1,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    return unpack(results["out"]), unpack(results["lse"].swapaxes(1, 2))


def _pad_tokens(x: jax.Array) -> jax.Array:
    """Pads with zeros to a multiple of 8 tokens: a copy, unless T is already a multiple."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8)) + ((0, 0),) * (x.ndim - 2))
