"""The body of `mla_prefill`: the roles of its three warpgroups, step by step.

A CTA takes 128 queries of one head, and its mainloop runs over the keys that any of them sees, 128
per step. Two consumer warpgroups own 64 queries each. The third, the producer, issues the TMA
copies into rings of `stages` tiles. The keys come in two pieces, 128 dims of the head and 64 that
all heads may share, and are never joined in memory. A consumer's step i is

    softmax    P = exp2(scores i - row maxima), o *= rescaling        on the CUDA cores
    products   o += P V_i ; scores i + 1 = Q K_{i+1}^T                on the tensor cores

and a barrier that alternates between the two consumers lets one run its products during the other's
softmax. P stays in registers; the output leaves through the queries' shared memory. Tiles with the
most keys go first, and the heads that are worked on at one time are few enough for their keys and
values to stay in L2. If all rows are known to be whole, one CTA per SM takes many tiles
(`MlaPrefillTileConfig.resident`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.softmax_constants import EMPTY, LOG2E

NOPE, ROPE, VALUES = 128, 64, 128
TILE = 64  # queries of a warpgroup
KEYS = 128  # keys of a step

LAYOUT = plgpu.Layout.WGMMA
BY_ROW = LAYOUT.reduce(1)


@dataclasses.dataclass(frozen=True)
class MlaPrefillTileConfig:
    """The pipeline stages, CTAs and registers of the kernel."""

    stages: int = 2  # key and value tiles in shared memory: 212,992 of 232,448 bytes with Q
    blocks: int | None = None  # resident CTAs, each taking many tiles; None: one CTA per tile
    l2_bytes: int = 24 * 2**20  # keys and values of the heads that are worked on at one time
    compute_registers: int = 240  # 240 + 240 + 24 = 504, the most that three warpgroups may have
    memory_registers: int = 24

    @classmethod
    def resident(cls) -> "MlaPrefillTileConfig":
        """The configuration for rows that are as long as their shape: one CTA per SM, which loads
        its next tile during the last. The shape fixes its share, so shorter rows would leave SMs
        idle."""
        return cls(blocks=getattr(jax.devices()[0], "core_count", 132))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaPrefillConfig:
    """The static properties of a launch, known when it is traced.

    Attributes:
        tiles: Tiles of 128 queries per row.
        group: Heads that are worked on at one time.
        joined: Whether the rotated dims of the keys are their last 64, separate for each head.
        merge: Whether the result is merged into an earlier one.
        lined: Whether each tile has its own bounds, with the position of its first key.
    """

    config: MlaPrefillTileConfig
    tiles: int
    group: int
    scale: float
    dtype: Any
    joined: bool
    merge: bool
    lined: bool
    interpret: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaPrefillRefs:
    """The refs of a CTA; launch.py describes the barriers."""

    q_ref: Any
    k_ref: Any
    k_pe_ref: Any
    v_ref: Any
    bounds_ref: Any
    firsts_ref: Any
    order_ref: Any
    out_ref: Any
    lse_ref: Any
    q_smem: Any
    q_pe_smem: Any
    k_smem: Any
    k_pe_smem: Any
    v_smem: Any
    p_smem: Any
    q_loaded: Any
    k_loaded: Any
    v_loaded: Any
    k_read: Any
    v_read: Any
    turn: Any
    cleared: Any


class MlaPrefillTile(NamedTuple):
    """A tile of 128 queries of a head, and the range of keys that they attend to."""

    exists: jax.Array
    row: jax.Array
    head: jax.Array
    start: jax.Array  # first query
    low: jax.Array  # first step of KEYS keys
    steps: jax.Array
    unmasked_from: jax.Array  # from this key on, all queries see every key that is not after them
    bounds: tuple[jax.Array, ...]
    base: jax.Array  # the position of key 0 among all


def _over_rows(vector: jax.Array, width: int) -> jax.Array:
    return lax.broadcast_in_dim(vector, (TILE, width), [0])


def _iota(dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (TILE, KEYS), dimension, layout=LAYOUT)


class MlaPrefillCta:
    """A CTA, which processes one item per round: warpgroups 0 and 1 attend, 2 loads keys and
    values."""

    def __init__(self, cut: MlaPrefillConfig, refs: MlaPrefillRefs):
        self.cut, self.refs = cut, refs
        self.wg, self.block = lax.axis_index("wg"), lax.axis_index("block")
        self.heads, self.rounds = refs.q_ref.shape[2], refs.order_ref.shape[1]

    def run(self) -> None:
        config = self.cut.config

        @pl.when(self.wg < 2)
        def _compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            (InterpretedMlaConsumer if self.cut.interpret else MlaPrefillConsumer)(self).run()

        @pl.when(self.wg == 2)
        def _memory():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            self._load()

    def work(self, r: Any) -> MlaPrefillTile:
        """The tile of this CTA in round r."""
        cut, refs, rounds = self.cut, self.refs, self.rounds
        item = self.block
        if rounds > 1:
            item = refs.order_ref[self.block, jnp.minimum(r, rounds - 1)]
        exists = (item >= 0) & (r < rounds)
        item = jnp.maximum(item, 0)
        outer = lax.div(item, cut.tiles * cut.group)
        inner = lax.rem(item, cut.tiles * cut.group)
        groups = self.heads // cut.group
        row = lax.div(outer, groups)
        head = lax.rem(outer, groups) * cut.group + lax.rem(inner, cut.group)
        start = (cut.tiles - 1 - lax.div(inner, cut.group)) * (2 * TILE)
        place = lax.div(start, 2 * TILE) if cut.lined else row
        first, queries, keys, offset = bounds = tuple(refs.bounds_ref[place, i] for i in range(4))
        base = refs.bounds_ref[place, 4] if cut.lined else jnp.int32(0)
        seen = jnp.minimum(keys, jnp.minimum(start + 2 * TILE, queries) + offset)
        seen = jnp.where(exists & (start < queries), seen, 0)
        unmasked_from = first
        if refs.firsts_ref is not None:
            first, unmasked_from = (
                jnp.maximum(bounds[0], refs.firsts_ref[row, start + i]) for i in (0, 2 * TILE - 1)
            )
        low = lax.div(first, KEYS)
        steps = jnp.maximum(lax.div(seen + KEYS - 1, KEYS) - low, 0)
        return MlaPrefillTile(exists, row, head, start, low, steps, unmasked_from, bounds, base)

    def _load(self) -> None:
        """Loads the rounds' keys and values into the rings, as stages become free."""
        refs, stages = self.refs, self.cut.config.stages
        done = lax.fori_loop(0, self.rounds, self._load_item, jnp.int32(0))

        @pl.loop(jnp.maximum(done - stages, 0), done)
        def _drain(i):
            plgpu.barrier_wait(refs.k_read.at[lax.rem(i, stages)])
            plgpu.barrier_wait(refs.v_read.at[lax.rem(i, stages)])

    def _load_item(self, r: jax.Array, done: jax.Array) -> jax.Array:
        refs, stages = self.refs, self.cut.config.stages
        _, row, head, _, low, steps, *_, base = self.work(r)

        @pl.loop(0, steps)
        def _step(i):
            slot = lax.rem(done + i, stages)
            at = pl.ds((low + i) * KEYS, KEYS)
            if self.cut.lined:
                at = pl.ds(pl.multiple_of(base + (low + i) * KEYS, 8), KEYS)

            @pl.when(done + i >= stages)
            def _keys_are_read():
                plgpu.barrier_wait(refs.k_read.at[slot])

            nope = refs.k_ref.at[row, at, head, pl.ds(0, NOPE)]
            rope = refs.k_pe_ref.at[row, at]
            if self.cut.joined:
                rope = refs.k_ref.at[row, at, head, pl.ds(NOPE, ROPE)]
            plgpu.copy_gmem_to_smem(nope, refs.k_smem.at[slot], refs.k_loaded.at[slot])
            plgpu.copy_gmem_to_smem(rope, refs.k_pe_smem.at[slot], refs.k_loaded.at[slot])

            @pl.when(done + i >= stages)
            def _values_are_read():
                plgpu.barrier_wait(refs.v_read.at[slot])

            values = refs.v_ref.at[row, at, head]
            plgpu.copy_gmem_to_smem(values, refs.v_smem.at[slot], refs.v_loaded.at[slot])

        return done + steps


class MlaPrefillConsumer:
    """Consumer warpgroup 0 or 1, which owns 64 queries of an item."""

    def __init__(self, block: MlaPrefillCta):
        self.block, self.cut, self.refs, self.wg = block, block.cut, block.refs, block.wg
        self.factor = block.cut.scale * LOG2E
        self.zero_rows = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), BY_ROW)
        self.zero_out = plgpu.layout_cast(jnp.zeros((TILE, VALUES), jnp.float32), LAYOUT)

    def run(self) -> None:
        turn = self.refs.turn

        @pl.when(self.wg == 1)
        def _():
            plgpu.barrier_arrive(turn.at[0])

        item = self.block.work(0)
        self._load_q(item)
        lax.fori_loop(0, self.block.rounds, self._round, (jnp.int32(0), item))
        plgpu.wait_smem_to_gmem(0)

        # A thread that waits on a barrier must observe each of its completions.
        @pl.when(self.wg == 0)
        def _():
            plgpu.barrier_wait(turn.at[0])

    def _load_q(self, item: MlaPrefillTile) -> None:
        """Starts the copies of this warpgroup's queries, whether they see any key or not."""
        refs, wg = self.refs, self.wg

        @pl.when(item.exists)
        def _():
            rows = pl.ds(pl.multiple_of(item.start, TILE) + wg * TILE, TILE)
            both = refs.q_ref.at[item.row, rows, item.head]
            for dims, smem in ((pl.ds(0, NOPE), refs.q_smem), (pl.ds(NOPE, ROPE), refs.q_pe_smem)):
                plgpu.copy_gmem_to_smem(both.at[:, dims], smem.at[wg], refs.q_loaded.at[wg])

    def _round(self, r: jax.Array, carry: Any) -> Any:
        done, item = carry
        steps, rounds = item.steps, self.block.rounds
        tile = MlaPrefillMainloop(self, item, done)
        following = self.block.work(r + 1) if rounds > 1 else item

        @pl.when(item.exists)
        def _():
            plgpu.barrier_wait(self.refs.q_loaded.at[self.wg])

        pl.when(steps > 0)(tile.attend)
        if not self.cut.merge:
            nothing = self.zero_out, self.zero_rows, self.zero_rows
            pl.when(steps == 0)(lambda: tile.write(*nothing))
        if rounds > 1:
            self._load_q(following)
        return done + steps, following

    def softmax(self, s: jax.Array, top: jax.Array, total: jax.Array, o: jax.Array) -> Any:
        """Returns P, and the state with the rows rescaled to the new maxima."""
        new_top = jnp.maximum(top, s.max(axis=1) * self.factor)
        rescale = jnp.exp2(top - new_top)
        p = jnp.exp2(s * self.factor - _over_rows(new_top, KEYS))
        total = total * rescale + p.sum(axis=1)
        return p.astype(self.cut.dtype), new_top, total, o * _over_rows(rescale, VALUES)

    def _multiply_keys(self, acc: Any, slot: jax.Array) -> None:
        refs, wg = self.refs, self.wg
        plgpu.wgmma(acc, refs.q_smem.at[wg], refs.k_smem.at[slot].transpose((1, 0)))
        plgpu.wgmma(acc, refs.q_pe_smem.at[wg], refs.k_pe_smem.at[slot].transpose((1, 0)))

    def scores(self, slot: jax.Array) -> jax.Array:
        def product(acc: Any) -> jax.Array:
            self._multiply_keys(acc, slot)
            plgpu.barrier_arrive(self.refs.turn.at[1 - self.wg])
            return acc[...]

        return pl.run_scoped(product, plgpu.ACC((TILE, KEYS), jnp.float32))

    def add_values(self, o: jax.Array, p: jax.Array, slot: jax.Array) -> jax.Array:
        """Returns o + P V."""
        values = self.refs.v_smem.at[slot]
        return pl.run_state(lambda acc: plgpu.wgmma(acc, p, values))(plgpu.ACC.init(o))

    def products(self, o: jax.Array, p: jax.Array, slot: jax.Array, next_slot: jax.Array) -> Any:
        """Returns (o + P V, the next tile's scores); the tensor cores are handed on in between."""
        refs = self.refs

        def both(accs: Any) -> None:
            o_acc, s_acc = accs
            plgpu.wgmma(o_acc, p, refs.v_smem.at[slot])
            self._multiply_keys(s_acc, next_slot)
            plgpu.barrier_arrive(refs.turn.at[1 - self.wg])
            plgpu.wgmma_wait(2)  # all but the two of the keys
            plgpu.barrier_arrive(refs.v_read.at[slot])

        zero = plgpu.layout_cast(jnp.zeros((TILE, KEYS), jnp.float32), LAYOUT)
        return pl.run_state(both)((plgpu.ACC.init(o), plgpu.ACC.init(zero)))

    def clear_tail(self, slot: jax.Array, left: jax.Array) -> None:
        """Zeroes the values from `left` on, which may be NaN, and 0 * NaN is NaN."""
        refs = self.refs

        @pl.when(left < KEYS)
        def _clear():
            for half in range(2):

                @pl.when(self.wg == half)
                def _my_half(half=half):
                    values = refs.v_smem.at[slot, pl.ds(half * TILE, TILE)]
                    inside = _iota(0) + half * TILE < left
                    kept = plgpu.load(values, layout=LAYOUT)
                    values[...] = jnp.where(inside, kept, jnp.zeros((), self.cut.dtype))

            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.cleared)
            plgpu.barrier_wait(refs.cleared)


class InterpretedMlaConsumer(MlaPrefillConsumer):
    """A consumer for the interpreter of JAX 0.11.2, whose `wgmma` supports neither register
    operands nor an accumulator that continues. P goes through shared memory, and its product to an
    accumulator of its own."""

    def add_values(self, o: jax.Array, p: jax.Array, slot: jax.Array) -> jax.Array:
        refs = self.refs
        refs.p_smem[self.wg] = p
        plgpu.commit_smem()

        def product(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, refs.p_smem.at[self.wg], refs.v_smem.at[slot])
            return acc[...]

        return o + pl.run_scoped(product, plgpu.ACC((TILE, VALUES), jnp.float32))

    def products(self, o: jax.Array, p: jax.Array, slot: jax.Array, next_slot: jax.Array) -> Any:
        o = self.add_values(o, p, slot)
        plgpu.barrier_arrive(self.refs.v_read.at[slot])
        return o, self.scores(next_slot)


class MlaPrefillMainloop:
    """The mainloop over a warpgroup's 64 queries of an item; `done` ring steps came before."""

    def __init__(self, attention: MlaPrefillConsumer, item: MlaPrefillTile, done: jax.Array):
        self.attention, self.item, self.done = attention, item, done
        # This warpgroup's first query.
        self.mine = pl.multiple_of(item.start, TILE) + attention.wg * TILE

    def attend(self) -> None:
        attention, item = self.attention, self.item
        refs, wg, stages = attention.refs, attention.wg, attention.cut.config.stages
        steps, (_, _, keys, offset) = item.steps, item.bounds
        slot = lax.rem(self.done, stages)
        plgpu.barrier_wait(refs.k_loaded.at[slot])
        plgpu.barrier_wait(refs.turn.at[wg])
        s = attention.scores(slot)
        plgpu.barrier_arrive(refs.k_read.at[slot])

        # Steps whose keys all of this warpgroup's queries see; the last is masked.
        whole = lax.div(jnp.maximum(jnp.minimum(self.mine + 1 + offset, keys), 0), KEYS)
        whole = jnp.where(item.unmasked_from > 0, 0, jnp.minimum(whole, steps - 1))
        carry = (s, attention.zero_rows + EMPTY, attention.zero_rows, attention.zero_out)
        carry = lax.fori_loop(0, whole, functools.partial(self._step, masked=False), carry)
        masked = functools.partial(self._step, masked=True)
        s, top, total, o = lax.fori_loop(whole, steps - 1, masked, carry)

        slot = lax.rem(self.done + steps - 1, stages)
        p, top, total, o = attention.softmax(self._mask(s, steps - 1), top, total, o)
        plgpu.barrier_wait(refs.v_loaded.at[slot])
        attention.clear_tail(slot, keys - (item.low + steps - 1) * KEYS)
        plgpu.barrier_wait(refs.turn.at[wg])
        o = attention.add_values(o, p, slot)
        plgpu.barrier_arrive(refs.turn.at[1 - wg])
        plgpu.barrier_arrive(refs.v_read.at[slot])
        self.write(o, top, total)

    def _step(self, i: jax.Array, carry: Any, *, masked: bool) -> Any:
        """Runs step i's softmax and values, and step i + 1's scores."""
        attention, refs, stages = self.attention, self.attention.refs, self._stages
        s, top, total, o = carry
        slot, next_slot = lax.rem(self.done + i, stages), lax.rem(self.done + i + 1, stages)
        if masked:
            s = self._mask(s, i)
        p, top, total, o = attention.softmax(s, top, total, o)
        plgpu.barrier_wait(refs.v_loaded.at[slot])
        plgpu.barrier_wait(refs.k_loaded.at[next_slot])
        plgpu.barrier_wait(refs.turn.at[attention.wg])
        o, s = attention.products(o, p, slot, next_slot)
        plgpu.barrier_arrive(refs.k_read.at[next_slot])
        return s, top, total, o

    @property
    def _stages(self) -> int:
        return self.attention.cut.config.stages

    def _mask(self, s: jax.Array, i: jax.Array) -> jax.Array:
        first, _, keys, offset = self.item.bounds
        key = (self.item.low + i) * KEYS + _iota(1)
        last = jnp.minimum(self.mine + _iota(0) + offset, keys - 1)
        seen = (key >= first) & (key <= last)
        firsts = self.attention.refs.firsts_ref
        if firsts is not None:
            mine = firsts.at[self.item.row, pl.ds(self.mine, TILE)]
            seen &= key >= _over_rows(plgpu.load(mine, layout=BY_ROW, optimized=False), KEYS)
        return jnp.where(seen, s, -jnp.inf)

    def write(self, o: jax.Array, top: jax.Array, total: jax.Array) -> None:
        """Writes the queries' output and LSE, or merges them into earlier ones."""
        cut, refs, wg, item = self.attention.cut, self.attention.refs, self.attention.wg, self.item
        at, queries = pl.ds(self.mine, TILE), item.bounds[1]
        # A NaN total is not 0: a NaN among a row's own keys shows in its output.
        row_iota = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=BY_ROW)
        sees = (self.mine + row_iota < queries) & (total != 0)
        lse = jnp.where(sees, (top + jnp.log2(total)) * (1 / LOG2E), -jnp.inf)
        inverse = _over_rows(jnp.where(sees, 1 / total, 0.0), VALUES)
        out = jnp.where(inverse != 0, o * inverse, 0.0)

        @pl.when(item.exists & (self.mine < refs.out_ref.shape[1]))
        def _():
            o_ref = refs.out_ref.at[item.row, at, item.head]
            l_ref = refs.lse_ref.at[item.row, item.head, at]
            if cut.merge:
                _merge_into(o_ref, l_ref, out, lse)
                return
            l_ref[...] = lse
            if refs.out_ref.dtype != cut.dtype:
                o_ref[...] = out.astype(refs.out_ref.dtype)
                return
            # The output leaves through the queries' shared memory, which is free until the next
            # ones: stores from registers are 16 bytes each and delay the CTA.
            refs.q_smem[wg] = out.astype(cut.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(refs.q_smem.at[wg], o_ref)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _merge_into(o_ref: Any, l_ref: Any, out: jax.Array, lse: jax.Array) -> None:
    """Merges (out, lse) into the refs' contents, as attention over disjoint sets of keys."""
    before = plgpu.load(o_ref, layout=LAYOUT, optimized=False).astype(jnp.float32)
    lse_before = plgpu.load(l_ref, layout=BY_ROW, optimized=False)
    top = jnp.maximum(lse_before, lse)
    empty = top == -jnp.inf
    shift = jnp.where(empty, 0.0, top)
    w_before, w = (jnp.exp2((x - shift) * LOG2E) for x in (lse_before, lse))
    total = jnp.where(empty, 1.0, w_before + w)
    out = before * _over_rows(w_before / total, VALUES) + out * _over_rows(w / total, VALUES)
    o_ref[...] = out.astype(o_ref.dtype)
    l_ref[...] = jnp.where(empty, top, shift + jnp.log2(total) * (1 / LOG2E))
