"""Gradients of causal attention: one launch computes dq, dk and dv, with the same bits every time.

A CTA takes a tile of at most 128 keys of a key-value head and keeps their dK and dV in registers.
Its mainloop runs over all queries that see these keys, of all query heads of the group. Each step's
part of dQ is added to global memory in float32, in the order of the key tiles. The products are in
mainloop.py, the assignment of tiles to CTAs in tile_scheduler.py, the order of the additions in
dq_semaphore.py, and the tile configurations in tile_config.py.

Limits: queries and values of 64 and 64 dims, 128 and 128, 192 and 128, or 256 and 256; all operands
bfloat16 or all float16; any T, heads, group and number of rows. Scratch memory: dq in float32.
Reference: the gradient of `jaxattn.gqa.gqa_attention` and `jaxattn.mla.causal_attention`
(implementation="xla"); tests: tests/kernels/attention/test_backward.py, and for the ops on a GPU
test_op_gradients.py next to it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.backward.cta import BackwardCta
from jaxattn.kernels.attention.backward.score_gradient import ScoreGradient
from jaxattn.kernels.attention.backward.smem import scratch_types
from jaxattn.kernels.attention.backward.tile_config import CONFIGS, BackwardTileConfig
from jaxattn.kernels.attention.backward.tile_scheduler import BackwardTileScheduler, ranges_of
from jaxattn.kernels.attention.causal_tile_order import head_group
from jaxattn.kernels.attention.softmax_constants import LOG2E
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS

SEES_NOTHING = 1e30  # the LSE, in powers of 2, of a query without keys: its weights are 0


class AttentionGrads(NamedTuple):
    """The gradients of q, k and v.

    Attributes:
        dq: [B, T, H, D].
        dk: [B, T, Hk, D], or without the dims that all heads share.
        dk_rest: float32 [B, T, P], the gradient of the shared dims, or None.
        dv: [B, T, Hk, Dv].
    """

    dq: jax.Array
    dk: jax.Array
    dk_rest: jax.Array | None
    dv: jax.Array


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grads: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    k_rest: jax.Array | None = None,
    first: jax.Array | None = None,
    soft_cap: float | None = None,
    config: BackwardTileConfig | None = None,
    interpret: bool = False,
) -> AttentionGrads:
    """Returns the gradients of attention in which token t sees the keys from first[t] to t.

    Args:
        q: [B, T, H, D] bfloat16 or float16, the dtype also of k, k_rest, v and grads. All arrays
            must be finite past a row's length, and grads and delta must be 0 there.
        k, v: [B, T, Hk, D] and [B, T, Hk, Dv].
        grads: [B, T, H, Dv], the gradient of the output.
        lse: float32 [B, T, H], natural logarithm, -inf for a query that sees no key.
        delta: float32 [B, T, H], sum(grads * output) - (the gradient of the lse).
        lengths: int32 [B], the tokens of each row.
        k_rest: [B, T, P], the last dims of the keys where all heads share them; k then has D - P.
        first: int32 [B, T] or [1, T], not decreasing in a row; None: all queries see key 0.
    """
    batch, tokens, heads, dim = q.shape
    kv_heads, values, dtype = v.shape[2], v.shape[3], q.dtype
    config = config or CONFIGS[dim, values]
    group = heads // kv_heads
    steps = -(-tokens // config.queries)
    whole = steps * config.queries
    lse = jnp.where(lse == -jnp.inf, SEES_NOTHING, lse * LOG2E)
    # The barrier makes XLA reduce delta before it transposes: it would otherwise load one number at
    # a time for both.
    delta = lax.optimization_barrier(delta)
    stats = jnp.pad(
        jnp.stack([lse, delta], axis=1), ((0, 0), (0, 0), (0, whole - tokens), (0, 0))
    ).transpose(0, 3, 1, 2)
    if first is not None:
        first = jnp.broadcast_to(first, (batch, tokens))
    ranges = ranges_of(lengths.astype(jnp.int32), first, tokens, config)
    turns = jnp.broadcast_to(ranges.turns[:, None, :, None], (batch, heads, steps, config.parts))
    tiles = BackwardTileScheduler(
        keys=config.keys, queries=config.queries, count=-(-tokens // config.keys),
        heads=kv_heads, group=group,
        together=head_group(batch * kv_heads, 1, config.heads_together),
    )  # fmt: skip
    items = batch * kv_heads * tiles.count
    blocks = min(items, 1 if interpret else config.blocks or _resident_blocks())
    padded = -(-tokens // 8) * 8
    cta = BackwardCta(
        config=config, tiles=tiles, scores=ScoreGradient(scale=scale, soft_cap=soft_cap),
        dtype=dtype, blocks=blocks, items=items, interpret=interpret,
    )  # fmt: skip
    dq: Any = jax.ShapeDtypeStruct((batch, whole, heads, dim), jnp.float32)
    if first is not None:
        dq = jax.new_ref(jnp.zeros(dq.shape, dq.dtype))

    def like(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((batch, padded, kv_heads, *shape), dtype)

    results = launch(
        cta.run,
        name="attention_backward",
        grid={"block": blocks},
        inputs={
            "q": _pad_tokens(q),
            "k": _pad_tokens(k),
            "k_rest": None if k_rest is None else _pad_tokens(k_rest),
            "v": _pad_tokens(v),
            "grads": _pad_tokens(grads),
            "stats": stats,
            "ranges": ranges.tiles,
            "first": ranges.first,
            "drawn": jax.new_ref(jnp.zeros(1, jnp.uint32)) if items > blocks else None,
            **({} if first is None else {"dq": dq}),
            "turns": jax.new_ref(turns),
        },
        outputs={
            **({"dq": dq} if first is None else {}),
            "dk": like(k.shape[3]),
            "dk_rest": None if k_rest is None else like(k_rest.shape[2]),
            "dv": like(values),
        },
        scratch=scratch_types(config, dtype)._asdict(),
        warpgroups=3,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    dk, dv = (results[name][:, :tokens] for name in ("dk", "dv"))
    dk_rest = results.get("dk_rest")
    if dk_rest is not None:
        dk_rest = dk_rest[:, :tokens].sum(axis=2, dtype=jnp.float32)
    there = (jnp.arange(tokens) < lengths[:, None])[..., None, None]
    dq = results["dq"] if first is None else jax.freeze(dq)
    dq = jnp.where(there, dq[:, :tokens] * scale, 0).astype(dtype)
    return AttentionGrads(dq, dk, dk_rest, dv)


def _resident_blocks() -> int:
    """Returns the number of CTAs that run at one time, one per multiprocessor. With more CTAs, one
    might wait for the turn of another that does not run."""
    return min(NUM_SMS, getattr(jax.devices()[0], "core_count", NUM_SMS))


def _pad_tokens(x: jax.Array) -> jax.Array:
    """Pads with zeros to a multiple of 8 tokens: a copy, unless T is already a multiple."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8)) + ((0, 0),) * (x.ndim - 2))
