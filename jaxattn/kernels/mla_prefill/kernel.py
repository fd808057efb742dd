"""Attention of many new tokens with keys of 128 + 64 dims and values of 128: MLA's prefill.

A block takes 128 queries of one head and walks over the keys that any of them sees, 128 a step. Of
its three warpgroups two own 64 queries each and the third issues the TMA copies into rings of
`stages` tiles. The keys come in two pieces, 128 dims of the head and 64 that all heads may share,
and are never joined in memory. A compute warpgroup's step i is

    softmax    P = exp2(scores i - row maxima), o *= rescaling        on the CUDA cores
    products   o += P V_i ; scores i + 1 = Q K_{i+1}^T                on the tensor cores

and a barrier that goes back and forth lets one warpgroup's products run during the other's softmax.
P stays in registers; the output leaves through the queries' shared memory. Tiles with the most keys
go first, and the heads that work at one time are few enough for their keys and values to stay in
L2. Where all rows are known to be whole, a block of each SM takes many tiles (`Config.resident`).

Every row has its own bounds, so that one kernel serves a chunk (causal) and its cached prefix (all
visible): query t of row b sees the keys k with first <= k < min(keys, t + 1 + offset).

Limits: 128 + 64 and 128 dims, bfloat16 or float16, any T, K and H. Reference and tests:
`jaxattn.ops.mla.prefill` (implementation="xla"), tests/kernels/mla_prefill/test_kernel.py.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.machine import interpret_mode, require_hopper, swizzled
from jaxattn.kernels.mla_prefill.tile_order import head_group, tile_order

LOG2E = math.log2(math.e)
NOPE, ROPE, VALUES = 128, 64, 128
TILE = 64  # queries of a warpgroup
KEYS = 128  # keys of a step
EMPTY = -3e38  # row maximum before the first key: finite, since -inf - -inf is NaN


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut."""

    stages: int = 2  # key and value tiles in shared memory: 212,992 of 232,448 bytes with Q
    blocks: int | None = None  # resident blocks, each taking many tiles; None: a block a tile
    l2_bytes: int = 24 * 2**20  # keys and values of the heads that are worked on at one time
    compute_registers: int = 240  # 240 + 240 + 24 = 504, the most that three warpgroups may have
    memory_registers: int = 24

    @classmethod
    def resident(cls) -> "Config":
        """For rows that are all as long as they look: one block an SM, which loads its next tile
        during the last. Its share is fixed by the shape, so shorter rows would leave SMs idle."""
        return cls(blocks=getattr(jax.devices()[0], "core_count", 132))


class _Item(NamedTuple):
    """128 queries of a head and what they attend to."""

    exists: jax.Array
    row: jax.Array
    head: jax.Array
    start: jax.Array  # first query
    low: jax.Array  # first step of KEYS keys
    steps: jax.Array
    bounds: tuple[jax.Array, ...]


def refuse(op: str, q: jax.Array, *, nope: int, rope: int, values: int, interpret: bool) -> None:
    """Raises `NotImplementedError` with the reason where the kernel does not serve."""
    require_hopper(op, interpret=interpret)
    if (nope, rope, values) != (NOPE, ROPE, VALUES):
        raise NotImplementedError(
            f"{op}: kernels have keys of 128 + 64 dims and values of 128, or 192 + 64 and 256, and "
            f"got {nope} + {rope} and {values}"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        wanted = "bfloat16 and float16"
        raise NotImplementedError(f"{op}: the kernel takes {wanted}, and got {q.dtype.name}")


def attend_mosaic(
    q: jax.Array,
    k: jax.Array,
    k_pe: jax.Array | None,
    v: jax.Array,
    bounds: jax.Array,
    *,
    scale: float,
    config: Config | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale q [k, k_pe]^T) v, query t of row b seeing a range of keys.

    Args:
        q: [B, T, H, 192] bfloat16 or float16, as k, k_pe and v.
        k: [B, K, H, 128], or all 192 dims with k_pe None.
        k_pe: [B, K, 64], shared by all heads.
        v: [B, K, H, 128].
        bounds: int32 [B, 4], (first, queries, keys, offset): query t < queries sees the keys from
            `first` up to, and without, min(keys, t + 1 + offset). Keys and values from `keys` on
            and queries from `queries` on may be NaN; values before `first` must be finite.

    Returns:
        out [B, T, H, 128] in q's dtype and lse float32 [B, T, H], natural logarithm: 0 and -inf for
        a query that sees nothing and for those from `queries` on.
    """
    out, lse = attend_padded(
        q, k, k_pe, v, bounds, q.dtype,
        scale=scale, config=config, interpret=interpret, detect_races=detect_races,
    )  # fmt: skip
    return unpad(out, lse, q.shape[1])


def unpad(out: jax.Array, lse: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """What `attend_padded` returns, as `attend_mosaic` does."""
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
    state: tuple[jax.Array, jax.Array] | None = None,
    config: Config | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`attend_mosaic` as the kernel writes it, or merged in place into an earlier such result.

    Args:
        state: a result of out_dtype over other keys; tiles that see nothing now leave it as it is.

    Returns:
        out [B, T', H, 128] in out_dtype and lse float32 [B, H, T'], T up to a multiple of 64.
    """
    config = config or Config()
    batch, tokens, heads, _ = q.shape
    # TMA steps in the shared memory's tiles of 8 rows; past the end of an array it reads zeros.
    q, k, v = (_pad_tokens(x) for x in (q, k, v))
    joined = k_pe is None
    k_pe = k if k_pe is None else _pad_tokens(k_pe)
    padded = -(-tokens // TILE) * TILE  # the output is stored by whole tiles
    tiles = -(-tokens // (2 * TILE))
    items = batch * heads * tiles
    blocks = min(items, config.blocks or items)
    group = head_group(heads, k.shape[1] * (NOPE + VALUES) * 2, config.l2_bytes)
    tiled = swizzled(q.dtype)
    stages = config.stages
    body = _body(
        config, tiles=tiles, group=group, scale=scale, dtype=q.dtype, joined=joined,
        merge=state is not None, interpret=interpret,
    )  # fmt: skip
    out_type = (
        jax.ShapeDtypeStruct((batch, padded, heads, VALUES), out_dtype),
        jax.ShapeDtypeStruct((batch, heads, padded), jnp.float32),
    )
    kernel = plgpu.kernel(
        body,
        out_type=out_type if state is None else (),
        scratch_types=[
            plgpu.SMEM((2, TILE, NOPE), q.dtype, transforms=tiled),
            plgpu.SMEM((2, TILE, ROPE), q.dtype, transforms=tiled),
            plgpu.SMEM((stages, KEYS, NOPE), q.dtype, transforms=tiled),
            plgpu.SMEM((stages, KEYS, ROPE), q.dtype, transforms=tiled),
            plgpu.SMEM((stages, KEYS, VALUES), q.dtype, transforms=tiled),
            # The interpreter's wgmma takes no operand from registers.
            plgpu.SMEM((2, TILE, KEYS) if interpret else (2, 8, 64), q.dtype, transforms=tiled),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),  # both pieces of Q, of each warpgroup
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # both pieces of the keys loaded
            plgpu.Barrier(num_barriers=stages),  # values loaded
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # keys read by both
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # values read by both
            plgpu.Barrier(num_barriers=2),  # the tensor cores are this warpgroup's
            plgpu.Barrier(num_arrivals=2),  # the values' tail is cleared
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        kernel_name="mla_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret_mode(interpret, detect_races=detect_races),
    )
    order = tile_order(batch * heads, tiles, group, blocks)
    operands = (q, k, k_pe, v, bounds.astype(jnp.int32), order)
    with jax.enable_x64(False):  # the kernel's integers are int32
        if state is None:
            return kernel(*operands)
        refs = tuple(jax.new_ref(x) for x in state)
        kernel(*operands, *refs)
        return jax.freeze(refs[0]), jax.freeze(refs[1])


def _pad_tokens(x: jax.Array) -> jax.Array:
    """Zeros up to a multiple of 8 tokens: a copy, where the tokens are not one already."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8)) + ((0, 0),) * (x.ndim - 2))


def _body(
    config: Config,
    *,
    tiles: int,
    group: int,
    scale: float,
    dtype: Any,
    joined: bool,
    merge: bool,
    interpret: bool,
) -> Any:
    tile_layout = plgpu.Layout.WGMMA
    row_layout = tile_layout.reduce(1)
    stages = config.stages
    factor = scale * LOG2E

    def over_rows(vector: jax.Array, width: int) -> jax.Array:
        return lax.broadcast_in_dim(vector, (TILE, width), [0])

    def iota(dimension: int) -> jax.Array:
        shape = (TILE, KEYS)
        return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=tile_layout)

    def body(
        q_ref, k_ref, k_pe_ref, v_ref, bounds_ref, order_ref, out_ref, lse_ref,
        q_smem, q_pe_smem, k_smem, k_pe_smem, v_smem, p_smem,
        q_loaded, k_loaded, v_loaded, k_read, v_read, turn, cleared,
    ):  # fmt: skip
        wg = lax.axis_index("wg")
        block = lax.axis_index("block")
        heads = q_ref.shape[2]
        rounds = order_ref.shape[1]

        def work(r: Any) -> _Item:
            """What this block does in round r."""
            item = block if rounds == 1 else order_ref[block, jnp.minimum(r, rounds - 1)]
            exists = (item >= 0) & (r < rounds)
            item = jnp.maximum(item, 0)
            outer, inner = lax.div(item, tiles * group), lax.rem(item, tiles * group)
            groups = heads // group
            row = lax.div(outer, groups)
            head = lax.rem(outer, groups) * group + lax.rem(inner, group)
            start = (tiles - 1 - lax.div(inner, group)) * (2 * TILE)
            first, queries, keys, offset = bounds = tuple(bounds_ref[row, i] for i in range(4))
            seen = jnp.minimum(keys, jnp.minimum(start + 2 * TILE, queries) + offset)
            seen = jnp.where(exists & (start < queries), seen, 0)
            low = lax.div(first, KEYS)
            steps = jnp.maximum(lax.div(seen + KEYS - 1, KEYS) - low, 0)
            return _Item(exists, row, head, start, low, steps, bounds)

        def load_q(item: _Item) -> None:
            """Starts the copies of this warpgroup's queries, whether they see anything or not."""

            @pl.when(item.exists)
            def _():
                rows = pl.ds(pl.multiple_of(item.start, TILE) + wg * TILE, TILE)
                both = q_ref.at[item.row, rows, item.head]
                for dims, smem in ((pl.ds(0, NOPE), q_smem), (pl.ds(NOPE, ROPE), q_pe_smem)):
                    plgpu.copy_gmem_to_smem(both.at[:, dims], smem.at[wg], q_loaded.at[wg])

        def multiply_keys(acc, slot):
            plgpu.wgmma(acc, q_smem.at[wg], k_smem.at[slot].transpose((1, 0)))
            plgpu.wgmma(acc, q_pe_smem.at[wg], k_pe_smem.at[slot].transpose((1, 0)))

        def scores(slot):
            def product(acc):
                multiply_keys(acc, slot)
                plgpu.barrier_arrive(turn.at[1 - wg])
                return acc[...]

            return pl.run_scoped(product, plgpu.ACC((TILE, KEYS), jnp.float32))

        def multiply_values(o, p, slot):
            """o + P V."""
            if interpret:
                p_smem[wg] = p
                plgpu.commit_smem()

                def product(acc):
                    plgpu.wgmma(acc, p_smem.at[wg], v_smem.at[slot])
                    return acc[...]

                return o + pl.run_scoped(product, plgpu.ACC((TILE, VALUES), jnp.float32))
            return pl.run_state(lambda acc: plgpu.wgmma(acc, p, v_smem.at[slot]))(plgpu.ACC.init(o))

        def products(o, p, slot, next_slot):
            """(o + P V, the next tile's scores), the tensor cores handed on in between."""
            if interpret:
                o = multiply_values(o, p, slot)
                plgpu.barrier_arrive(v_read.at[slot])
                return o, scores(next_slot)

            def both(refs):
                o_acc, s_acc = refs
                plgpu.wgmma(o_acc, p, v_smem.at[slot])
                multiply_keys(s_acc, next_slot)
                plgpu.barrier_arrive(turn.at[1 - wg])
                plgpu.wgmma_wait(2)  # all but the two of the keys
                plgpu.barrier_arrive(v_read.at[slot])

            zero = plgpu.layout_cast(jnp.zeros((TILE, KEYS), jnp.float32), tile_layout)
            return pl.run_state(both)((plgpu.ACC.init(o), plgpu.ACC.init(zero)))

        def softmax(s, top, total, o):
            """P, and the state with the rows rescaled to the new maxima."""
            new_top = jnp.maximum(top, s.max(axis=1) * factor)
            rescale = jnp.exp2(top - new_top)
            p = jnp.exp2(s * factor - over_rows(new_top, KEYS))
            total = total * rescale + p.sum(axis=1)
            return p.astype(dtype), new_top, total, o * over_rows(rescale, VALUES)

        def clear_tail(slot, left):
            """Zeroes the values from `left` on, which may be NaN, and 0 * NaN is NaN."""

            @pl.when(left < KEYS)
            def _clear():
                for half in range(2):

                    @pl.when(wg == half)
                    def _my_half(half=half):
                        values = v_smem.at[slot, pl.ds(half * TILE, TILE)]
                        inside = iota(0) + half * TILE < left
                        kept = plgpu.load(values, layout=tile_layout)
                        values[...] = jnp.where(inside, kept, jnp.zeros((), dtype))

                plgpu.commit_smem()
                plgpu.barrier_arrive(cleared)
                plgpu.barrier_wait(cleared)

        def merge_into(o_ref, l_ref, out, lse):
            """What the refs hold and (out, lse), two attentions over disjoint keys, as one."""
            before = plgpu.load(o_ref, layout=tile_layout, optimized=False).astype(jnp.float32)
            lse_before = plgpu.load(l_ref, layout=row_layout, optimized=False)
            top = jnp.maximum(lse_before, lse)
            empty = top == -jnp.inf
            shift = jnp.where(empty, 0.0, top)
            w_before, w = (jnp.exp2((x - shift) * LOG2E) for x in (lse_before, lse))
            total = jnp.where(empty, 1.0, w_before + w)
            out = before * over_rows(w_before / total, VALUES) + out * over_rows(w / total, VALUES)
            o_ref[...] = out.astype(o_ref.dtype)
            l_ref[...] = jnp.where(empty, top, shift + jnp.log2(total) * (1 / LOG2E))

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            zero_rows = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), row_layout)
            zero_out = plgpu.layout_cast(jnp.zeros((TILE, VALUES), jnp.float32), tile_layout)

            @pl.when(wg == 1)
            def _():
                plgpu.barrier_arrive(turn.at[0])

            def round_(r, carry):
                done, item = carry
                exists, row, head, start, low, steps, (first, queries, keys, offset) = item
                mine = pl.multiple_of(start, TILE) + wg * TILE  # this warpgroup's first query
                following = work(r + 1) if rounds > 1 else item

                def mask(s, i):
                    key = (low + i) * KEYS + iota(1)
                    last = jnp.minimum(mine + iota(0) + offset, keys - 1)
                    return jnp.where((key >= first) & (key <= last), s, -jnp.inf)

                def write(o, top, total):
                    at = pl.ds(mine, TILE)
                    # A NaN total is not 0: a NaN among a row's own keys shows in its output.
                    row_iota = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=row_layout)
                    sees = (mine + row_iota < queries) & (total != 0)
                    lse = jnp.where(sees, (top + jnp.log2(total)) * (1 / LOG2E), -jnp.inf)
                    inverse = over_rows(jnp.where(sees, 1 / total, 0.0), VALUES)
                    out = jnp.where(inverse != 0, o * inverse, 0.0)

                    @pl.when(exists & (mine < out_ref.shape[1]))
                    def _():
                        o_ref, l_ref = out_ref.at[row, at, head], lse_ref.at[row, head, at]
                        if merge:
                            merge_into(o_ref, l_ref, out, lse)
                            return
                        l_ref[...] = lse
                        if out_ref.dtype != dtype:
                            o_ref[...] = out.astype(out_ref.dtype)
                            return
                        # Through the queries' memory, which is free until the next ones: stores
                        # from registers go by 16 bytes and hold the block up.
                        q_smem[wg] = out.astype(dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(q_smem.at[wg], o_ref)
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                def step(i, carry, masked):
                    s, top, total, o = carry
                    slot, next_slot = lax.rem(done + i, stages), lax.rem(done + i + 1, stages)
                    if masked:
                        s = mask(s, i)
                    p, top, total, o = softmax(s, top, total, o)
                    plgpu.barrier_wait(v_loaded.at[slot])
                    plgpu.barrier_wait(k_loaded.at[next_slot])
                    plgpu.barrier_wait(turn.at[wg])
                    o, s = products(o, p, slot, next_slot)
                    plgpu.barrier_arrive(k_read.at[next_slot])
                    return s, top, total, o

                @pl.when(exists)
                def _():
                    plgpu.barrier_wait(q_loaded.at[wg])

                @pl.when(steps > 0)
                def _attend():
                    slot = lax.rem(done, stages)
                    plgpu.barrier_wait(k_loaded.at[slot])
                    plgpu.barrier_wait(turn.at[wg])
                    s = scores(slot)
                    plgpu.barrier_arrive(k_read.at[slot])

                    # Steps whose keys all of this warpgroup's queries see; the last is masked.
                    whole = lax.div(jnp.maximum(jnp.minimum(mine + 1 + offset, keys), 0), KEYS)
                    whole = jnp.where(first > 0, 0, jnp.minimum(whole, steps - 1))
                    carry = (s, zero_rows + EMPTY, zero_rows, zero_out)
                    carry = lax.fori_loop(0, whole, lambda i, c: step(i, c, False), carry)
                    carry = lax.fori_loop(whole, steps - 1, lambda i, c: step(i, c, True), carry)
                    s, top, total, o = carry

                    slot = lax.rem(done + steps - 1, stages)
                    p, top, total, o = softmax(mask(s, steps - 1), top, total, o)
                    plgpu.barrier_wait(v_loaded.at[slot])
                    clear_tail(slot, keys - (low + steps - 1) * KEYS)
                    plgpu.barrier_wait(turn.at[wg])
                    o = multiply_values(o, p, slot)
                    plgpu.barrier_arrive(turn.at[1 - wg])
                    plgpu.barrier_arrive(v_read.at[slot])
                    write(o, top, total)

                if not merge:

                    @pl.when(steps == 0)
                    def _see_nothing():
                        write(zero_out, zero_rows, zero_rows)

                if rounds > 1:
                    load_q(following)
                return done + steps, following

            item = work(0)
            load_q(item)
            lax.fori_loop(0, rounds, round_, (jnp.int32(0), item))
            plgpu.wait_smem_to_gmem(0)

            # A thread that waits on a barrier has to see each of its completions.
            @pl.when(wg == 0)
            def _():
                plgpu.barrier_wait(turn.at[0])

        @pl.when(wg == 2)
        def _memory():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            def round_(r, done):
                _, row, head, _, low, steps, _ = work(r)

                @pl.loop(0, steps)
                def _load(i):
                    slot = lax.rem(done + i, stages)
                    at = pl.ds((low + i) * KEYS, KEYS)

                    @pl.when(done + i >= stages)
                    def _keys_are_read():
                        plgpu.barrier_wait(k_read.at[slot])

                    nope, rope = k_ref.at[row, at, head, pl.ds(0, NOPE)], k_pe_ref.at[row, at]
                    if joined:
                        rope = k_ref.at[row, at, head, pl.ds(NOPE, ROPE)]
                    plgpu.copy_gmem_to_smem(nope, k_smem.at[slot], k_loaded.at[slot])
                    plgpu.copy_gmem_to_smem(rope, k_pe_smem.at[slot], k_loaded.at[slot])

                    @pl.when(done + i >= stages)
                    def _values_are_read():
                        plgpu.barrier_wait(v_read.at[slot])

                    plgpu.copy_gmem_to_smem(
                        v_ref.at[row, at, head], v_smem.at[slot], v_loaded.at[slot]
                    )

                return done + steps

            done = lax.fori_loop(0, rounds, round_, jnp.int32(0))

            @pl.loop(jnp.maximum(done - stages, 0), done)
            def _drain(i):
                plgpu.barrier_wait(k_read.at[lax.rem(i, stages)])
                plgpu.barrier_wait(v_read.at[lax.rem(i, stages)])

    return body
