"""Attention of many new tokens with keys of 128 + 64 dims and values of 128: MLA's prefill.

mainloop.py has the body of a CTA. Every row has its own bounds, so that one kernel serves both a
chunk (causal) and its cached prefix (all visible). Query t of row b sees the keys k with
first <= k < min(keys, t + 1 + offset). With packed rows every tile of 128 queries has its own
bounds, which also contain the position of its keys.

Limits: 128 + 64 and 128 dims, bfloat16 or float16, any T, K and H. Reference and tests:
`jaxattn.ops.mla.prefill` (implementation="xla"), tests/kernels/mla/prefill/test_kernel.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.attention.causal_tile_order import head_group, tile_order
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.mla.prefill.mainloop import (
    KEYS,
    NOPE,
    ROPE,
    TILE,
    VALUES,
    MlaPrefillConfig,
    MlaPrefillCta,
    MlaPrefillRefs,
    MlaPrefillTileConfig,
)


def refuse(op: str, q: jax.Array, *, nope: int, rope: int, values: int, interpret: bool) -> None:
    """Raises `Refusal`, with the reason, if the kernel does not serve the call."""
    require_hopper(op, interpret=interpret)
    if (nope, rope, values) != (NOPE, ROPE, VALUES):
        raise Refusal(
            f"{op}: the kernels need keys of 128 + 64 dims and values of 128, or 192 + 64 and 256, "
            f"got {nope} + {rope} and {values}"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        wanted = "bfloat16 or float16"
        raise Refusal(f"{op}: the kernel needs q in {wanted}, got {q.dtype.name}")


def attend_mosaic(
    q: jax.Array,
    k: jax.Array,
    k_pe: jax.Array | None,
    v: jax.Array,
    bounds: jax.Array,
    *,
    scale: float,
    firsts: jax.Array | None = None,
    config: MlaPrefillTileConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns softmax(scale q [k, k_pe]^T) v, where query t of row b sees a range of keys.

    Args:
        q: [B, T, H, 192] bfloat16 or float16, as k, k_pe and v.
        k: [B, K, H, 128], or all 192 dims with k_pe None.
        k_pe: [B, K, 64], shared by all heads.
        v: [B, K, H, 128].
        bounds: int32 [B, 4], (first, queries, keys, offset): query t < queries sees the keys from
            `first` up to min(keys, t + 1 + offset), exclusive. Keys and values from `keys` on and
            queries from `queries` on may be NaN; values before `first` must be finite. Or int32
            [T / 128, 5], with B 1, for each 128 queries: t still counts from query 0 of all, and
            `first` and `keys` count from the key that is the fifth number, a multiple of 8.
        firsts: int32 [B, T], the first key that each query sees, not decreasing in a row; only with
            bounds [B, 4]. None: `bounds` decide.

    Returns:
        out [B, T, H, 128] in q's dtype and lse float32 [B, T, H], natural logarithm: 0 and -inf for
        a query that sees no key and for those from `queries` on.
    """
    out, lse = attend_padded(
        q, k, k_pe, v, bounds, q.dtype,
        scale=scale, firsts=firsts, config=config, interpret=interpret,
    )  # fmt: skip
    return unpad(out, lse, q.shape[1])


def unpad(out: jax.Array, lse: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Converts the result of `attend_padded` to that of `attend_mosaic`."""
    return out[:, :tokens], lse[:, :, :tokens].swapaxes(1, 2)


def attend_padded(
    q: jax.Array,
    k: jax.Array,
    k_pe: jax.Array | None,
    v: jax.Array,
    bounds: jax.Array,
    out_dtype: Any,
    *,
    scale: float,
    firsts: jax.Array | None = None,
    state: tuple[jax.Array, jax.Array] | None = None,
    config: MlaPrefillTileConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`attend_mosaic` with the kernel's padded output, optionally merged in place into an earlier
    result.

    Args:
        state: A result of out_dtype over other keys; tiles that see no key in this call leave it as
            it is.

    Returns:
        out [B, T', H, 128] in out_dtype and lse float32 [B, H, T'], T' being T rounded up to a
        multiple of 64.
    """
    config = config or MlaPrefillTileConfig()
    batch, tokens, heads, _ = q.shape
    if bounds.shape[1] == 5 and (batch, -(-tokens // (2 * TILE))) != (1, len(bounds)):
        raise ValueError(
            f"mla_prefill: bounds {bounds.shape} must have one row per 128 tokens of q {q.shape}"
        )
    # TMA steps in the shared memory's tiles of 8 rows; past the end of an array it reads zeros.
    q, k, v = (_pad_tokens(x) for x in (q, k, v))
    joined = k_pe is None
    k_pe = k if k_pe is None else _pad_tokens(k_pe)
    padded = -(-tokens // TILE) * TILE  # the output is stored by whole tiles
    tiles = -(-tokens // (2 * TILE))
    items = batch * heads * tiles
    blocks = min(items, config.blocks or items)
    group = head_group(heads, k.shape[1] * (NOPE + VALUES) * 2, config.l2_bytes)
    cut = MlaPrefillConfig(
        config=config, tiles=tiles, group=group, scale=scale, dtype=q.dtype, joined=joined,
        merge=state is not None, lined=bounds.shape[1] == 5, interpret=interpret,
    )  # fmt: skip
    written: dict[str, Any] = {
        "out_ref": jax.ShapeDtypeStruct((batch, padded, heads, VALUES), out_dtype),
        "lse_ref": jax.ShapeDtypeStruct((batch, heads, padded), jnp.float32),
    }
    bounds = bounds.astype(jnp.int32)
    if firsts is not None:
        if cut.lined:
            raise ValueError(
                "mla_prefill: firsts cannot be combined with bounds of lines, which do not count "
                "keys from the first"
            )
        more = tiles * 2 * TILE - tokens
        firsts = jnp.pad(firsts.astype(jnp.int32), ((0, 0), (0, more)), mode="edge")
    order = tile_order(batch * heads, tiles, group, blocks)
    if state is not None:
        written = dict(zip(written, map(jax.new_ref, state), strict=True))
    out = launch(
        lambda **refs: MlaPrefillCta(cut, MlaPrefillRefs(**refs)).run(),
        name="mla_prefill",
        grid={"block": blocks},
        inputs={
            "q_ref": q,
            "k_ref": k,
            "k_pe_ref": k_pe,
            "v_ref": v,
            "bounds_ref": bounds,
            "firsts_ref": firsts,
            "order_ref": order,
            **(written if state is not None else {}),
        },
        outputs={} if state is not None else written,
        scratch=_scratch_types(q.dtype, config.stages, interpret),
        warpgroups=3,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    if state is not None:
        out = {name: jax.freeze(ref) for name, ref in written.items()}
    return out["out_ref"], out["lse_ref"]


def _scratch_types(dtype: Any, stages: int, interpret: bool) -> dict[str, Any]:
    def tiles(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype))

    return {
        "q_smem": tiles(2, TILE, NOPE),
        "q_pe_smem": tiles(2, TILE, ROPE),
        "k_smem": tiles(stages, KEYS, NOPE),
        "k_pe_smem": tiles(stages, KEYS, ROPE),
        "v_smem": tiles(stages, KEYS, VALUES),
        # The interpreter's wgmma takes no register operand.
        "p_smem": tiles(2, TILE, KEYS) if interpret else tiles(2, 8, 64),
        "q_loaded": plgpu.Barrier(num_arrivals=2, num_barriers=2),  # both pieces of Q
        "k_loaded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # both pieces of the keys
        "v_loaded": plgpu.Barrier(num_barriers=stages),
        "k_read": plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # by both warpgroups
        "v_read": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "turn": plgpu.Barrier(num_barriers=2),  # the tensor cores are this warpgroup's
        "cleared": plgpu.Barrier(num_arrivals=2),  # the values' tail
    }


def _pad_tokens(x: jax.Array) -> jax.Array:
    """Pads with zeros to a multiple of 8 tokens: a copy, unless T is already a multiple."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8)) + ((0, 0),) * (x.ndim - 2))
