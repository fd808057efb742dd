"""Gated delta rule decode on a state pool: a state is read once, takes S tokens, is written back.

One block of one warpgroup per (value head, batch row). The state [Dv, Dk] float32 comes by TMA into
shared memory and stays in registers over the S tokens of the row:

    S     <- exp(g) S
    S     <- S + beta (v - S k) k^T
    out   =  scale S q

Limits: Dk = Dv = 128, float32 state, Hv a multiple of Hk. Nothing is read or written for a slot
outside the pool, -1 included; its output is 0. Reference and tests:
`jaxattn.gdn.gated_delta_rule_decode` (implementation="xla"), tests/test_gdn_kernel.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.arena import Arena, ArenaSpec
from jaxattn.kernels.hopper import interpret_mode, require_hopper, swizzled

DIM = 128  # Dk and Dv


def scratch(
    *, batch: int, q_len: int, num_v_heads: int, head_v_dim: int = DIM, dtype: Any = jnp.bfloat16
) -> ArenaSpec:
    """What `gated_delta_rule_decode` keeps in the arena: region `out` [B, S, Hv, Dv]."""
    return ArenaSpec.of(
        "gated_delta_rule_decode", out=((batch, q_len, num_v_heads, head_v_dim), dtype)
    )


def _refuse(q: jax.Array, v: jax.Array, state: jax.Array) -> None:
    if v.size == 0:
        raise NotImplementedError(
            f"gated_delta_rule_decode: the kernel cannot start without a token, got v {v.shape}"
        )
    if q.shape[-1] != DIM or v.shape[-1] != DIM:
        raise NotImplementedError(
            f"gated_delta_rule_decode: the kernel has Dk = Dv = 128, and got Dk={q.shape[-1]}, "
            f"Dv={v.shape[-1]}"
        )
    if state.dtype != jnp.float32:
        raise NotImplementedError(
            f"gated_delta_rule_decode: the kernel keeps a float32 state, got {state.dtype.name}"
        )


def gdn_decode_mosaic(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    state_indices: jax.Array,
    *,
    layer: jax.Array | int | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    arena: Arena | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[Any, ...]:
    """`jaxattn.gdn.gated_delta_rule_decode` on a Hopper GPU, with its gates g and beta float32."""
    require_hopper("gated_delta_rule_decode", interpret=interpret)
    _refuse(q, v, state)
    batch, q_len, num_k_heads, _ = q.shape
    num_v_heads = v.shape[2]
    stacked = state if layer is not None else state[None]
    layer_index = jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1)

    gates = jnp.stack([jnp.exp(g), beta], axis=-1).astype(jnp.float32)  # [B, S, Hv, 2]
    # An index narrower than int32 would be sign-extended, unsigned or not.
    operands = (q, k, v, gates, layer_index, state_indices.astype(jnp.int32))

    spec = scratch(batch=batch, q_len=q_len, num_v_heads=num_v_heads, dtype=v.dtype)
    body = _body(
        q_len=q_len,
        num_v_heads=num_v_heads,
        group=num_v_heads // num_k_heads,
        scale=DIM**-0.5 if scale is None else scale,
        l2norm=use_qk_l2norm,
    )
    pool = jax.new_ref(stacked)

    def launch(out_type: Any, kernel_body: Any, *refs: Any) -> Any:
        kernel = plgpu.kernel(
            kernel_body,
            out_type=out_type,
            scratch_types=[
                plgpu.SMEM((DIM, DIM), jnp.float32, transforms=swizzled(jnp.float32)),
                plgpu.Barrier(),
            ],
            grid=(num_v_heads, batch),
            grid_names=("head", "row"),
            num_threads=1,
            thread_name="wg",
            kernel_name="gdn_decode",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret_mode(interpret, detect_races=detect_races),
        )
        with jax.enable_x64(False):  # the kernel's integers are int32
            return kernel(*operands, *refs)

    if arena is None:
        rows = jax.ShapeDtypeStruct((batch * q_len * num_v_heads, DIM), v.dtype)

        def fresh(*refs: Any) -> None:
            inputs, pool_ref, out_ref, rest = refs[:6], refs[6], refs[7], refs[8:]
            body(0, *inputs, pool_ref, out_ref, *rest)

        (out,) = launch((rows,), fresh, pool)
        out = out.reshape(batch, q_len, num_v_heads, DIM)
    else:
        lane, first_row = arena.lane(spec, "out", width=DIM)
        lane_ref = jax.new_ref(lane)

        def in_place(*refs: Any) -> None:
            body(first_row, *refs)

        launch((), in_place, pool, lane_ref)
        arena = arena.with_lane(spec, "out", jax.freeze(lane_ref))
        out = arena.read(spec, "out")
    updated = jax.freeze(pool)
    updated = updated if layer is not None else updated[0]
    return (out, updated) if arena is None else (out, updated, arena)


def _body(*, q_len: int, num_v_heads: int, group: int, scale: float, l2norm: bool) -> Any:
    tile = plgpu.Layout.WGMMA  # a state row (one value channel) lies in four threads
    by_value, by_key = tile.reduce(1), tile.reduce(0)

    def over_values(vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, (DIM, DIM), [0])

    def load_key(ref: Any) -> tuple[jax.Array, Any]:
        """A q or k over the rows [Dv, Dk], and what its l2norm multiplies a product with it by."""
        vector = plgpu.load(ref, layout=by_key, optimized=False).astype(jnp.float32)
        rows = lax.broadcast_in_dim(vector, (DIM, DIM), [1])
        return rows, lax.rsqrt((rows * rows).sum(axis=1) + 1e-6) if l2norm else 1.0

    def body(
        first_row, q_ref, k_ref, v_ref, gates_ref, layer_ref, slots_ref, pool_ref, out_ref,
        state_smem, loaded,
    ):  # fmt: skip
        head, row = lax.axis_index("head"), lax.axis_index("row")
        slot = slots_ref[row]
        # One past the layer's slots would be the next layer's: TMA sees them as one axis.
        in_pool = (slot >= 0) & (slot < pool_ref.shape[1])
        key_head = lax.div(head, group)

        def out_at(token: int) -> Any:
            return out_ref.at[first_row + (row * q_len + token) * num_v_heads + head]

        @pl.when(in_pool)
        def _update():
            stored = pool_ref.at[layer_ref[0], slot, head]
            plgpu.copy_gmem_to_smem(stored, state_smem, loaded)
            plgpu.barrier_wait(loaded)
            state = plgpu.load(state_smem, layout=tile)
            for token in range(q_len):
                q, q_norm = load_key(q_ref.at[row, token, key_head])
                k, k_norm = load_key(k_ref.at[row, token, key_head])
                v = plgpu.load(v_ref.at[row, token, head], layout=by_value, optimized=False)
                decay, beta = gates_ref[row, token, head, 0], gates_ref[row, token, head, 1]
                state *= decay
                predicted = (state * k).sum(axis=1) * k_norm
                delta = beta * (v.astype(jnp.float32) - predicted) * k_norm
                state += over_values(delta) * k
                out = (state * q).sum(axis=1) * (scale * q_norm)
                out_at(token)[...] = out.astype(out_ref.dtype)
            state_smem[...] = state
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(state_smem, stored)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(jnp.logical_not(in_pool))
        def _padding():
            zeros = plgpu.layout_cast(jnp.zeros((DIM,), jnp.float32), by_value)
            for token in range(q_len):
                out_at(token)[...] = zeros.astype(out_ref.dtype)

    return body
