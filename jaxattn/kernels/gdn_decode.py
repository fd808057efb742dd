"""A gated delta net's decode between its projections: one kernel, one pass over the states.

A block of one warpgroup has one value head of a row (a part of the key head's `group` of them). It
convolves the channels of its q, k and v, prepares the gates, and takes the state [Dv, Dk] tile by
tile through a ring in shared memory, so that loads, arithmetic and stores overlap, with those of
the other blocks on the multiprocessor as well. A tile stays in registers over the S tokens:

    delta = beta (v - exp(g) S k)
    S     <- exp(g) S + delta k^T
    out   =  scale S q

Both products are taken of the state before the update (S q is exp(g) S q + delta (k q)), so that
their sums run side by side. The lengths of q and k are factors of delta and out: q and k stay as
the convolution leaves them. The output is normalised and gated when its head is complete.

A row of one token takes little more than its latencies, so that warps wait for each other where
another warp's writes are read and nowhere else: Pallas would have them wait around every store.

The convolution's state moves by S inputs a step, and a key head's q and k channels feed all of its
value heads. The blocks of a key head therefore form a cluster: each reads those channels, and one
writes them once all have.

Limits: Dk = Dv = 128, W = 4, Hv a multiple of Hk. Reference and tests:
`jaxattn.gdn_layer.gated_delta_net_decode` (implementation="xla"), tests/test_gdn_layer.py.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.arena import Arena, ArenaSpec
from jaxattn.kernels.hopper import NUM_SMS, interpret_mode, require_hopper, swizzled

DIM = 128  # Dk and Dv
WIDTH = 4  # taps of the convolution
MAX_TOKENS = 8  # that a row may have: all of them are unrolled


@dataclasses.dataclass(frozen=True)
class Config:
    """How the states are cut up.

    Attributes:
        tile: rows of a state [Dv, Dk] that are in registers at a time.
        stages: tiles in the ring.
        parts: blocks that share a key head's value heads, a cluster.
    """

    tile: int = 64
    stages: int = 2
    parts: int = 1

    def __post_init__(self):
        if self.tile not in (32, 64, 128) or self.stages < 2:
            raise ValueError(f"tile must be 32, 64 or 128 and stages at least 2, got {self}")

    @classmethod
    def choose(cls, group: int, states: int, dtype: Any, *, interpret: bool) -> "Config":
        """A block a value head: the more and smaller the blocks, the shorter the last ones run.

        A cluster has at most 8 blocks; the interpreter may not have the threads for one. Where
        there are more states than multiprocessors, tiles are small: four blocks share one, of
        float32 states and one token, and not three. A key head's two states of 16 bits have one
        block where those fill the places for four a multiprocessor once, and more than half.
        """
        if interpret:
            return cls()
        once = 2 * NUM_SMS < states // group <= 4 * NUM_SMS
        if once and group == 2 and jnp.dtype(dtype).itemsize == 2:
            return cls(32, 6)
        parts = max(parts for parts in range(1, 9) if group % parts == 0)
        return cls(32, 3, parts) if states > NUM_SMS else cls(parts=parts)


@dataclasses.dataclass(frozen=True)
class Op:
    """What a launch computes; `conv` and `norm` say which ends of the layer are fused.

    `stacked`: there is a row of weights a layer, not one. `keep`: states are kept after every
    token, not after the last. `affine`: (a, b), the layer is a times the given number plus b.
    """

    q_len: int
    key_heads: int
    value_heads: int
    conv: bool
    norm: bool
    l2norm: bool
    stacked: bool
    keep: bool
    affine: tuple[int, int]
    scale: float
    eps: float

    @property
    def group(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * DIM


def scratch(
    *, batch: int, q_len: int, num_v_heads: int, head_v_dim: int = DIM, dtype: Any = jnp.bfloat16
) -> ArenaSpec:
    """What a decode op keeps in the arena: region `out` [B, S, Hv, Dv]."""
    return ArenaSpec.of(
        "gated_delta_rule_decode", out=((batch, q_len, num_v_heads, head_v_dim), dtype)
    )


def _refuse(name: str, tokens: int, heads: tuple[int, ...], conv_state: jax.Array | None) -> None:
    if not 1 <= tokens <= MAX_TOKENS:
        raise NotImplementedError(
            f"{name}: the kernel takes 1 to {MAX_TOKENS} tokens a row, got S={tokens}"
        )
    if heads[1:] != (DIM, DIM):
        raise NotImplementedError(
            f"{name}: the kernel has Dk = Dv = 128, and got Dk={heads[2]}, Dv={heads[1]}"
        )
    if conv_state is not None and conv_state.shape[-2] != WIDTH - 1:
        raise NotImplementedError(
            f"{name}: the kernel's convolution has W = 4, and got W={conv_state.shape[-2] + 1}"
        )


def gdn_decode_mosaic(
    name: str,
    qkvz: jax.Array,
    ba: jax.Array,
    weights: jax.Array,
    conv_state: jax.Array | None,
    state: jax.Array,
    reads: jax.Array,
    writes: jax.Array,
    *,
    num_key_heads: int,
    layer: jax.Array | int | None = None,
    affine: tuple[int, int] = (1, 0),
    scale: float,
    l2norm: bool = True,
    eps: float | None = None,
    arena: Arena | None = None,
    config: Config | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[Any, ...]:
    """The decode ops of `jaxattn.gdn` and `jaxattn.gdn_layer` on a Hopper GPU.

    Args:
        name: the op's, for messages.
        qkvz: [B, S, q | k | v | z], head after head; without `eps` there is no z.
        ba: [B, S, b | a], any float dtype.
        weights: float32 [A_log | dt_bias | norm | the convolution's taps [W, Dc]], or a stack of
            such rows. Only the gates' part is read where there is no norm and no convolution.
        conv_state: [L, Z, W - 1, Dc] with `layer`, or [Z, W - 1, Dc]; None: no convolution.
        state: [L, Z, Hv, Dv, Dk] with `layer`, or [Z, Hv, Dv, Dk].
        affine: (a, b), for the layer `a * layer + b`.
        reads, writes: the slots of each row [B]; writes may be [B, S].
        eps: of the gated RMS norm; None: no norm.

    Returns:
        (out [B, S, Hv, Dv] in qkvz's dtype, conv_state, state), and the arena if there is one.
    """
    require_hopper(name, interpret=interpret)
    batch, q_len, _ = qkvz.shape
    _refuse(name, q_len, state.shape[-3:], conv_state)
    if batch == 0:
        raise NotImplementedError(f"{name}: the kernel cannot start without a row, got B=0")
    num_value_heads = state.shape[-3]
    op = Op(
        q_len=q_len,
        key_heads=num_key_heads,
        value_heads=num_value_heads,
        conv=conv_state is not None,
        norm=eps is not None,
        l2norm=l2norm,
        stacked=weights.ndim == 2,
        keep=writes.ndim == 2,
        affine=affine,
        scale=scale,
        eps=eps or 0.0,
    )
    states = batch * num_value_heads
    config = config or Config.choose(op.group, states, state.dtype, interpret=interpret)
    # Two axes of a state's stack are one in memory, and a tile may span two heads' rows.
    pools = [state.reshape(-1, *state.shape[-4:-3], num_value_heads * DIM, DIM)]
    if conv_state is not None:
        pools.append(conv_state.reshape(-1, *conv_state.shape[-3:]))
    refs = [jax.new_ref(pool) for pool in pools]
    operands = (
        qkvz,
        ba,
        weights.reshape(-1, weights.shape[-1]),
        jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1),
        # An index narrower than int32 would be sign-extended, unsigned or not.
        reads.astype(jnp.int32),
        writes.astype(jnp.int32),
    )
    spec = scratch(batch=batch, q_len=q_len, num_v_heads=num_value_heads, dtype=qkvz.dtype)
    rows = jax.ShapeDtypeStruct((batch * q_len * num_value_heads, DIM), qkvz.dtype)
    first_row = 0
    if arena is not None:
        lane, first_row = arena.lane(spec, "out", width=DIM)
        refs.append(jax.new_ref(lane))
    body = _body(op, config, first_row)

    def entry(*args: Any) -> None:
        inputs, pools, rest = args[:6], list(args[6 : 6 + len(refs)]), list(args[6 + len(refs) :])
        out = rest.pop(0) if arena is None else pools.pop()
        conv_ref = pools[1] if op.conv else None
        body(*inputs, pools[0], conv_ref, out, *rest)

    kernel = plgpu.kernel(
        entry,
        out_type=(rows,) if arena is None else (),
        scratch_types=_scratch_types(op, config, state.dtype),
        # The last axis runs fastest: blocks at work together read neighbouring states.
        grid=(batch, num_key_heads),
        grid_names=("row", "key_head"),
        cluster=(config.parts,) if config.parts > 1 else (),
        cluster_names=("part",) if config.parts > 1 else (),
        num_threads=1,
        thread_name="wg",
        kernel_name="gdn_decode",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # the body says where warps wait for each other
        ),
        interpret=interpret_mode(interpret, detect_races=detect_races),
    )
    with jax.enable_x64(False):  # the kernel's integers are int32
        outs = kernel(*operands, *refs)
    new_state = jax.freeze(refs[0]).reshape(state.shape)
    new_conv = jax.freeze(refs[1]).reshape(conv_state.shape) if conv_state is not None else None
    if arena is None:
        return outs[0].reshape(batch, q_len, num_value_heads, DIM), new_conv, new_state
    arena = arena.with_lane(spec, "out", jax.freeze(refs[-1]))
    return arena.read(spec, "out"), new_conv, new_state, arena


def _steps_and_stages(op: Op, config: Config) -> tuple[int, int]:
    """Tiles that a block takes, and places in its ring: no more than it has tiles."""
    steps = op.group // config.parts * DIM // config.tile
    return steps, min(config.stages, steps)


def _scratch_types(op: Op, config: Config, state_dtype: Any) -> list[Any]:
    heads = op.group // config.parts
    _, stages = _steps_and_stages(op, config)
    ring = (stages, config.tile, DIM)
    types = [
        plgpu.SMEM(ring, state_dtype, transforms=_tile_transforms(state_dtype)),
        plgpu.SMEM((2, op.q_len, DIM), jnp.float32),  # q and k
        plgpu.SMEM((op.q_len, heads * DIM), jnp.float32),  # v
        plgpu.SMEM((op.q_len, heads * DIM), jnp.float32),  # the output before its norm
        plgpu.SMEM((op.q_len, heads * DIM), jnp.float32),  # what the normed output is times
        plgpu.SMEM((2 * heads, op.q_len), jnp.float32),  # decays, betas
        plgpu.Barrier(num_barriers=stages),  # tile loaded
    ]
    if config.parts > 1 and op.conv:
        types.append(plgpu.ClusterBarrier(collective_axes=("part",)))
    return types


def _tile_transforms(state_dtype: Any) -> Any:
    """A tile of float32 is row-major, so that a copy is of whole rows, one piece of memory; left to
    itself, JAX would choose a swizzle. One of bfloat16 is swizzled, and copied 128 bytes of a row
    at a time: row-major, with 16 bytes a thread, it is slower."""
    if state_dtype == jnp.float32:
        return (plgpu.TilingTransform((8, DIM)),)  # type: ignore[abstract]
    return swizzled(state_dtype)


def _layout(tile: int) -> Any:
    """Registers of a tile [tile, Dk]: a warp a quarter of its rows, eight threads a row.

    A float32 row's 32 keys are 128 bytes of shared memory, so that a warp's 16-byte loads meet no
    bank conflict; and of k and q, held beside the states, a thread has an eighth.
    """
    tiling = plgpu.Tiling(((tile, DIM), (tile // 4, DIM), (4, 32), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)


def _softplus(x: jax.Array) -> jax.Array:
    """log(1 + e^x). The GPU's logarithm is good to 2^-22 of 1, not of a result near 0."""
    t = jnp.exp(-jnp.abs(x))
    series = t * (1 - t * (1 / 2 - t * (1 / 3 - t * (1 / 4))))
    return jnp.maximum(x, 0.0) + jnp.where(t < 0.05, series, jnp.log(1.0 + t))


def _body(op: Op, config: Config, first_row: int) -> Any:
    q_len, group, tile = op.q_len, op.group, config.tile
    heads = group // config.parts
    steps, stages = _steps_and_stages(op, config)
    matrix = _layout(tile)
    by_value, by_key = matrix.reduce(1), matrix.reduce(0)
    channel = plgpu.Layout.WG_STRIDED((DIM,), vec_size=1)  # a thread a channel

    def per_channel(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=channel, optimized=False)

    def silu(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return x / (1.0 + jnp.exp(-x))

    def rows(vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, (tile, DIM), [0])

    def columns(ref: Any) -> jax.Array:
        return lax.broadcast_in_dim(plgpu.load(ref, layout=by_key), (tile, DIM), [1])

    def factors_of(qk_smem: Any, token: int) -> tuple[Any, Any, jax.Array]:
        """What a token's q and k are times, and k q; every warp adds up the whole vectors."""
        q, k = (plgpu.load(qk_smem.at[i, token], layout=by_key) for i in range(2))
        if not op.l2norm:
            return op.scale, 1.0, jnp.sum(q * k)
        q_factor, k_factor = (lax.rsqrt(jnp.sum(x * x) + 1e-6) for x in (q, k))
        return q_factor * op.scale, k_factor, jnp.sum(q * k)

    def body(
        qkvz_ref, ba_ref, weights_ref, layer_ref, reads_ref, writes_ref, pool_ref, conv_ref,
        out_ref, ring, qk_smem, v_smem, out_smem, gate_smem, scalars, loaded, all_read=None,
    ):  # fmt: skip
        row, key_head = lax.axis_index("row"), lax.axis_index("key_head")
        part = lax.axis_index("part") if config.parts > 1 else 0
        layer, slot = layer_ref[0] * op.affine[0] + op.affine[1], reads_ref[row]
        own = layer if op.stacked else 0  # row of weights
        first_head = key_head * group + part * heads
        slots = pool_ref.shape[1]

        if op.keep:
            targets = {token: writes_ref[row, token] for token in range(q_len)}
        else:
            targets = {q_len - 1: writes_ref[row]}

        def in_pool(slot: Any) -> Any:
            # One past the layer's slots would be the next layer's: TMA sees them as one axis.
            return (slot >= 0) & (slot < slots)

        # Both numbers are asked for at once: one after the other would take twice as long.
        live = in_pool(slot) & (layer >= 0) & (layer < pool_ref.shape[0])

        def states(slot: Any, step: Any) -> Any:
            return pool_ref.at[layer, slot, pl.ds(first_head * DIM + step * tile, tile)]

        def fetch(step: Any) -> None:
            at = lax.rem(step, stages)
            plgpu.copy_gmem_to_smem(states(slot, step), ring.at[at], loaded.at[at])

        def out_at(token: int, head: int) -> Any:
            at = (row * q_len + token) * op.value_heads + first_head + head
            return out_ref.at[first_row + at]

        def inputs_of(first: Any) -> tuple[list[jax.Array], list[jax.Array]]:
            """128 channels from `first` on: (their W - 1 + S inputs, their W taps)."""
            new = [
                per_channel(qkvz_ref.at[row, token, pl.ds(first, DIM)]) for token in range(q_len)
            ]
            if not op.conv:
                return new, []
            old = [
                per_channel(conv_ref.at[layer, slot, j, pl.ds(first, DIM)])
                for j in range(WIDTH - 1)
            ]
            start = 2 * op.value_heads + DIM + first
            taps = [
                per_channel(weights_ref.at[own, pl.ds(start + j * op.channels, DIM)])
                for j in range(WIDTH)
            ]
            return old + [x.astype(conv_ref.dtype) for x in new], taps

        def convolved(window: list[jax.Array], taps: list[jax.Array], token: int) -> jax.Array:
            if not taps:
                return window[token].astype(jnp.float32)
            terms = [tap * window[token + j].astype(jnp.float32) for j, tap in enumerate(taps)]
            return silu(functools.reduce(operator.add, terms))

        def keep_inputs(first: Any, window: list[jax.Array]) -> None:
            for token, target in targets.items():

                @pl.when(in_pool(target))
                def _(token=token, target=target):
                    for j, x in enumerate(window[token + 1 : token + WIDTH]):
                        conv_ref.at[layer, target, j, pl.ds(first, DIM)][...] = x

        @pl.when(live)
        def _update():
            for step in range(stages):
                fetch(step)

            # Every load comes before what waits for the first one: latencies run side by side.
            key_channels = (key_head * DIM, (op.key_heads + key_head) * DIM)
            value_channels = [(2 * op.key_heads + first_head + head) * DIM for head in range(heads)]
            keys = [inputs_of(first) for first in key_channels]
            values = [inputs_of(first) for first in value_channels]
            if op.norm:
                norm = per_channel(weights_ref.at[own, pl.ds(2 * op.value_heads, DIM)])
                z_at = op.channels + first_head * DIM
                z = [
                    [
                        per_channel(qkvz_ref.at[row, token, pl.ds(z_at + head * DIM, DIM)])
                        for head in range(heads)
                    ]
                    for token in range(q_len)
                ]
            gates = [
                (
                    weights_ref[own, index],
                    weights_ref[own, op.value_heads + index],
                    [ba_ref[row, token, index] for token in range(q_len)],
                    [ba_ref[row, token, op.value_heads + index] for token in range(q_len)],
                )
                for index in (first_head + head for head in range(heads))
            ]

            for head, (A_log, bias, bs, as_) in enumerate(gates):
                rate = jnp.exp(A_log)
                for token in range(q_len):
                    a, b = (x[token].astype(jnp.float32) for x in (as_, bs))
                    scalars[head, token] = jnp.exp(-rate * _softplus(a + bias))
                    scalars[heads + head, token] = 1.0 / (1.0 + jnp.exp(-b))

            for token in range(q_len):
                for i, inputs in enumerate(keys):
                    qk_smem.at[i, token][...] = convolved(*inputs, token)
                for head in range(heads):
                    at = pl.ds(head * DIM, DIM)
                    v_smem.at[token, at][...] = convolved(*values[head], token)
                    if op.norm:
                        gate_smem.at[token, at][...] = norm * silu(z[token][head])
            if op.conv:
                for first, (window, _) in zip(value_channels, values, strict=True):
                    keep_inputs(first, window)
            plgpu.commit_smem()  # vectors are there for every warp, and every warp has its inputs
            if all_read is not None:
                plgpu.barrier_arrive(all_read)
            factors = [factors_of(qk_smem, token) for token in range(q_len)]

            @pl.loop(0, steps)
            def _tile(step):
                at = lax.rem(step, stages)
                head = lax.div(step * tile, DIM)
                plgpu.barrier_wait(loaded.at[at])
                state = plgpu.load(ring.at[at], layout=matrix).astype(jnp.float32)
                here = pl.ds(step * tile, tile)
                for token in range(q_len):
                    q, k = columns(qk_smem.at[0, token]), columns(qk_smem.at[1, token])
                    q_factor, k_factor, k_q = factors[token]
                    decay, beta = scalars[head, token], scalars[heads + head, token]
                    v = plgpu.load(v_smem.at[token, here], layout=by_value)
                    delta = beta * k_factor * (v - decay * k_factor * (state * k).sum(axis=1))
                    out = q_factor * (decay * (state * q).sum(axis=1) + delta * k_q)
                    state = state * decay + rows(delta) * k
                    out_smem.at[token, here][...] = out
                    if token not in targets:
                        continue

                    @pl.when(in_pool(targets[token]))
                    def _store(token=token, target=targets[token], state=state):
                        if op.keep and token > 0:
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        ring.at[at][...] = state.astype(ring.dtype)  # a warp writes what it read
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(ring.at[at], states(target, step))

                if stages < steps:

                    @pl.when((step > 0) & (step - 1 + stages < steps))
                    def _refill():
                        # Every warp is past the tile before this one, and waits here for its store.
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        fetch(step - 1 + stages)

            plgpu.commit_smem()  # the output is there for every warp
            for head in range(heads):
                for token in range(q_len):
                    head_out = out_smem.at[token, pl.ds(head * DIM, DIM)]
                    out = per_channel(head_out)
                    if op.norm:
                        whole = plgpu.load(head_out, layout=by_key)
                        mean_square = jnp.sum(whole * whole) * (1.0 / DIM)
                        gate = per_channel(gate_smem.at[token, pl.ds(head * DIM, DIM)])
                        out = out * lax.rsqrt(mean_square + op.eps) * gate
                    out_at(token, head)[...] = out.astype(out_ref.dtype)
            if all_read is not None:
                plgpu.barrier_wait(all_read)
            if op.conv:

                @pl.when(part == 0)
                def _():
                    for first, (window, _) in zip(key_channels, keys, strict=True):
                        keep_inputs(first, window)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(jnp.logical_not(live))
        def _padding():
            zeros = plgpu.layout_cast(jnp.zeros((DIM,), jnp.float32), channel)
            for head in range(heads):
                for token in range(q_len):
                    out_at(token, head)[...] = zeros.astype(out_ref.dtype)

    return body
