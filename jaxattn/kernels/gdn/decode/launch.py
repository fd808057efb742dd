"""A gated delta net's decode between its projections: one kernel, one pass over the states.

    delta = beta (v - exp(g) S k)
    S     <- exp(g) S + delta k^T
    out   =  scale S q

A CTA of one warpgroup has one value head of a row, or some of the value heads of a key head;
mainloop.py is its body. If there are few states, four CTAs share each: cluster_mainloop.py. The
convolution's state advances by S inputs per step, and a key head's q and k channels feed all of its
value heads. The CTAs of a key head therefore form a cluster: each reads those channels, and one
overwrites them after all have read them.

If f is given, the decay is a vector over Dk (KDA), and the norm's factor is sigmoid(z).

Limits: Dk = Dv = 128, W = 4, Hv a multiple of Hk, 65,535 rows. Reference and tests:
`jaxattn.gdn.gated_delta_net_decode` (implementation="xla"), tests/ops/gdn/test_layer_decode.py; for
KDA `jaxattn.kda.kimi_delta_attention_decode`, tests/ops/kda/test_layer_decode.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.arena import ArenaSpec
from jaxattn.core.dispatch import Refusal
from jaxattn.core.validation.array_checks import check_sizes
from jaxattn.kernels.gdn.decode import cluster_mainloop
from jaxattn.kernels.gdn.decode import mainloop as ring_body
from jaxattn.kernels.gdn.decode.arguments import GdnDecodeCall
from jaxattn.kernels.gdn.decode.cluster_mainloop import SPLIT
from jaxattn.kernels.gdn.decode.mainloop import GdnDecodeTileConfig, shared_bytes
from jaxattn.kernels.gdn.decode.prologue import DIM, WIDTH
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS, RESERVED_BYTES, SHARED_BYTES, require_hopper

MOST_BLOCKS = 8  # of a cluster, on every Hopper GPU
MAX_TOKENS = 8  # tokens per row: the loop over them is unrolled
MAX_ROWS = 65_535  # CUDA's limit on a grid's second axis; the first axis has the key heads
MOST_SHARED = SHARED_BYTES - RESERVED_BYTES - 1024  # of a CTA, without barriers and alignment


def choose_config(
    group: int, states: int, q_len: int, dtype: Any, *, interpret: bool
) -> GdnDecodeTileConfig:
    """Returns the tile configuration: one CTA per value head, as a rule, since many small CTAs
    shorten the tail.

    The interpreter may not have the threads for a cluster. A multiprocessor has room for three
    rings of large tiles (two with more than five tokens). With more states per multiprocessor than
    that, or with several heads per CTA, tiles are small: four CTAs share a multiprocessor, for one
    token. A key head's two states of 16 bits have one CTA if such CTAs fill the places for four per
    multiprocessor once, and more than half. With so few states that each may have four
    multiprocessors, each state gets four CTAs, if a key head's CTAs fit in a cluster. Two CTAs per
    state would be slower.
    """
    if interpret:
        return GdnDecodeTileConfig()
    if q_len == 1 and group * SPLIT <= MOST_BLOCKS and states * SPLIT <= NUM_SMS:
        return GdnDecodeTileConfig(split=True)
    once = 2 * NUM_SMS < states // group <= 4 * NUM_SMS
    if once and group == 2 and jnp.dtype(dtype).itemsize == 2:
        return GdnDecodeTileConfig(32, 6)
    parts = max(parts for parts in range(1, MOST_BLOCKS + 1) if group % parts == 0)
    large = parts == group and states <= (3 if q_len <= 5 else 2) * NUM_SMS
    return GdnDecodeTileConfig(parts=parts) if large else GdnDecodeTileConfig(32, 3, parts)


def scratch(
    *, batch: int, q_len: int, num_v_heads: int, head_v_dim: int = DIM, dtype: Any = jnp.bfloat16
) -> ArenaSpec:
    """Returns the scratch of a decode op in the arena: region `out` [B, S, Hv, Dv].

    Raises:
        ValueError: A size is not a positive integer; the message names the size. B and S may be 0.
    """
    check_sizes("gdn.scratch", least=0, batch=batch, q_len=q_len)
    check_sizes("gdn.scratch", num_v_heads=num_v_heads, head_v_dim=head_v_dim)
    return ArenaSpec.of(
        "gated_delta_rule_decode", out=((batch, q_len, num_v_heads, head_v_dim), dtype)
    )


def _refuse(
    name: str, batch: int, tokens: int, heads: tuple[int, ...], conv_state: jax.Array | None
) -> None:
    if not 1 <= batch <= MAX_ROWS:
        raise Refusal(
            f"{name}: the kernel supports 1 to {MAX_ROWS:,} rows, got state_indices of B={batch:,}"
        )
    if not 1 <= tokens <= MAX_TOKENS:
        raise Refusal(
            f"{name}: the kernel supports 1 to {MAX_TOKENS} tokens per row, got S={tokens}"
        )
    if heads[1:] != (DIM, DIM):
        raise Refusal(f"{name}: the kernel needs Dk = Dv = 128, got Dk={heads[2]}, Dv={heads[1]}")
    if conv_state is not None and conv_state.shape[-2] != WIDTH - 1:
        raise Refusal(
            f"{name}: the kernel needs a convolution with W = 4, got W={conv_state.shape[-2] + 1}"
        )


def gdn_decode_mosaic(
    call: GdnDecodeCall,
    *,
    config: GdnDecodeTileConfig | None = None,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """Runs the decode ops of `jaxattn.gdn` and `jaxattn.kda` on a Hopper GPU.

    Returns:
        (out [B, S, Hv, Dv] in qkvz's dtype, conv_state, state), and the arena if there is one.
    """
    require_hopper(call.op, interpret=interpret)
    batch, q_len, num_value_heads = call.batch, call.q_len, call.num_value_heads
    _refuse(call.op, batch, q_len, call.state.shape[-3:], call.conv_state)
    op = call.config()
    states = batch * num_value_heads
    config = config or choose_config(op.group, states, q_len, call.state.dtype, interpret=interpret)
    needed = 0 if config.split else shared_bytes(op, config, call.state.dtype)
    if needed > MOST_SHARED:
        raise Refusal(
            f"{call.op}: a CTA of the kernel has at most {MOST_SHARED:,} bytes of shared memory, "
            f"but S={q_len} tokens of {op.group // config.parts} value heads need {needed:,}; give "
            "fewer tokens"
        )
    call = call.without_gradient()
    state, conv_state, arena = call.state, call.conv_state, call.arena
    # Two axes of a state's stack are contiguous in memory, and a tile may span two heads' rows.
    pool = state.reshape(-1, *state.shape[-4:-3], num_value_heads * DIM, DIM)
    pool_ref, conv_ref, out_ref = jax.new_ref(pool), None, None
    if conv_state is not None:
        conv_ref = jax.new_ref(conv_state.reshape(-1, *conv_state.shape[-3:]))
    inputs: dict[str, Any] = {
        "qkvz_ref": call.qkvz,
        "ba_ref": call.ba,
        "f_ref": call.f,
        "z_ref": call.z,
        "weights_ref": call.weights.reshape(-1, call.weights.shape[-1]),
        "layer_ref": jnp.asarray(0 if call.layer is None else call.layer, jnp.int32).reshape(1),
        # An operand, so that all layers of a step are one kernel to compile.
        "affine_ref": jnp.asarray(call.affine, jnp.int32),
        # An index narrower than int32 would be sign-extended, unsigned or not.
        "reads_ref": call.reads.astype(jnp.int32),
        "writes_ref": call.writes.astype(jnp.int32),
        "pool_ref": pool_ref,
        "conv_ref": conv_ref,
    }
    dtype = call.qkvz.dtype
    spec = scratch(batch=batch, q_len=q_len, num_v_heads=num_value_heads, dtype=dtype)
    rows = jax.ShapeDtypeStruct((batch * q_len * num_value_heads, DIM), dtype)
    first_row = 0
    if arena is not None:
        lane, first_row = arena.lane(spec, "out", width=DIM)
        inputs["out_ref"] = out_ref = jax.new_ref(lane)
    if config.split:
        if q_len != 1 or op.group * SPLIT > MOST_BLOCKS:
            raise ValueError(
                f"{call.op}: split needs one token per row and 1 or 2 value heads per key head, "
                f"got S={q_len}, Hv / Hk = {op.group}"
            )
        blocks = op.group * SPLIT
        block: Any = functools.partial(
            cluster_mainloop.GdnDecodeClusterCta, op, first_row, interpret=interpret
        )
        scratch_types = cluster_mainloop.scratch_types(op, interpret=interpret)
        if interpret:  # whose CTAs share no shared memory
            between = jnp.zeros((batch, op.key_heads, blocks), jnp.float32)
            inputs["between"] = jax.new_ref(between)
    else:
        blocks = config.parts
        block = functools.partial(
            ring_body.GdnDecodeCta, op, config, first_row, interpret=interpret
        )
        scratch_types = ring_body.scratch_types(op, config, state.dtype)

    out = launch(
        lambda **refs: block(**refs).run(),
        name="gdn_decode" if call.f is None else "kda_decode",
        # The last axis runs fastest: concurrent CTAs read neighboring states.
        grid={"row": batch, "key_head": op.key_heads},
        cluster={"part": blocks} if blocks > 1 else {},
        inputs=inputs,
        outputs={"out_ref": rows} if arena is None else {},
        scratch=scratch_types,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # the body synchronizes warps itself
        ),
        interpret=interpret,
    )
    new_state = jax.freeze(pool_ref).reshape(state.shape)
    new_conv = None
    if conv_state is not None and conv_ref is not None:
        new_conv = jax.freeze(conv_ref).reshape(conv_state.shape)
    if arena is None or out_ref is None:
        return out["out_ref"].reshape(batch, q_len, num_value_heads, DIM), new_conv, new_state
    arena = arena.with_lane(spec, "out", jax.freeze(out_ref))
    return arena.read(spec, "out"), new_conv, new_state, arena
