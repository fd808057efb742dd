"""The body of the state pass: its warpgroups' roles for the runs that a CTA draws.

One or two warpgroups multiply, each with half of the state. One copies, and draws the CTA's next
item (attention/work_queue.py). One norms the output, if requested (norm_epilogue.py).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention import work_queue
from jaxattn.kernels.attention.work_queue import WorkQueue
from jaxattn.kernels.gdn.chunk.pipeline import CHANNEL_STAGES, STAGES, drain, next_slot, stream
from jaxattn.kernels.gdn.chunk.state_update import (
    ChunkStateUpdate,
    first_half,
    first_state,
    store_state,
    times,
)
from jaxattn.kernels.gdn.chunk.tiles import (
    CHUNK,
    OUT,
    READ,
    VECTORS,
    WRITE,
    both_views,
    clear_triangles,
    copy_rows,
    copy_triangle,
    copy_vectors,
    token_tiles,
    triangles,
    zero_tile,
)
from jaxattn.kernels.gdn.chunk.wgmma_accumulator import (
    WgmmaAccumulator,
    with_accumulators,
)
from jaxattn.kernels.gdn.prefill.chunk_plan import (
    AFTER,
    BEFORE,
    FIRST_CHUNK,
    START,
    STEPS,
    TOKENS,
    first_run,
)
from jaxattn.kernels.gdn.prefill.inter_chunk import norm_epilogue
from jaxattn.kernels.gdn.prefill.inter_chunk.norm_epilogue import GatedNormEpilogue
from jaxattn.kernels.hopper.instructions import fence_proxy_async
from jaxattn.kernels.hopper.store.unoptimized_store import store

# Registers per thread of the warpgroups that multiply, of the one that copies, and of the one that
# norms, if there is one. All four use 512, all of the multiprocessor's. With fewer for the last
# one, each chunk waits for its norm.
REGISTERS, NORMED_REGISTERS = (232, 40), (208, 24, 72)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterChunkConfig:
    """The static properties of a launch, known when it is traced.

    Attributes:
        blocks, items: Those of the work queue; an item is a run of a value head, or half of its
            state.
        halves: The halves of a state in a CTA.
        heads: Hv.
        group: Value heads per key head.
        from_pool: Whether states before the runs are in the pool.
        keeps: Whether states after chunks are stored there.
        eps: The epsilon of the norm; None: outputs are not normed.
        channels: Whether channels of the key have their own decays; keys and queries are then
            arranged by chunk, see `ChunkStateUpdate`.
    """

    blocks: int
    items: int
    halves: int
    heads: int
    group: int
    from_pool: bool
    keeps: bool
    eps: float | None
    channels: bool
    dtype: Any
    interpret: bool

    @property
    def stages(self) -> int:
        return CHANNEL_STAGES if self.channels else STAGES


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterChunkRefs:
    """The refs of a CTA: operands and results, then its shared memory and barriers."""

    q_ref: Any
    k_ref: Any
    written_ref: Any  # keys as written to the state, for decays per channel, else None
    v_ref: Any
    x_ref: Any
    p_ref: Any
    vectors_ref: Any
    runs_ref: Any
    layer_ref: Any
    kept_ref: Any
    starts_ref: Any
    drawn_ref: Any
    gate_ref: Any  # the norm's gate, else None
    weight_ref: Any
    pool_ref: Any
    o_ref: Any
    k_union: Any
    written_union: Any
    q_union: Any
    v_union: Any
    x_smem: Any
    p_smem: Any
    vectors_smem: Any
    o_union: Any
    loaded: Any  # a chunk has been loaded
    read: Any  # arrived at by all that multiply
    cleared: Any  # the keys past a run's end are 0
    turns: Any
    norm: Any


def scratch_types(cut: InterChunkConfig) -> dict[str, Any]:
    halves, dtype, stages, interpret = cut.halves, cut.dtype, cut.stages, cut.interpret
    tokens, normed = token_tiles((stages, 2), dtype, interpret=interpret), cut.eps is not None
    vectors, copies = (2, 11) if cut.channels else (VECTORS, 9)
    return {
        "k_union": tokens,
        "written_union": tokens if cut.channels else None,
        "q_union": tokens,
        "v_union": token_tiles((stages, halves), dtype, interpret=interpret),
        "x_smem": triangles(stages, dtype),
        "p_smem": triangles(stages, dtype),
        "vectors_smem": plgpu.SMEM((stages, vectors, CHUNK), jnp.float32),
        "o_union": token_tiles((halves,), dtype, interpret=interpret, plain=True),
        "loaded": plgpu.Barrier(num_arrivals=copies + halves, num_barriers=stages),
        "read": plgpu.Barrier(num_arrivals=halves, num_barriers=stages),
        "cleared": plgpu.Barrier(num_arrivals=halves),
        "turns": work_queue.scratch(halves + normed),
        "norm": norm_epilogue.scratch(halves, dtype) if normed else None,
    }


class InterChunkCta:
    """The runs that a CTA draws, with one value head of each, both halves of its state or one."""

    def __init__(self, cut: InterChunkConfig, refs: InterChunkRefs):
        self.cut, self.refs, interpret = cut, refs, cut.interpret
        self.wg, block = lax.axis_index("wg"), lax.axis_index("block")
        self.turns = WorkQueue(
            refs.drawn_ref, refs.turns, block,
            blocks=cut.blocks, items=cut.items, interpret=interpret,
        )  # fmt: skip
        self.layer = refs.layer_ref[0]
        self.k_copied, self.k_smem = both_views(refs.k_union, interpret=interpret)
        self.q_copied, self.q_smem = both_views(refs.q_union, interpret=interpret)
        if cut.channels:
            written = both_views(refs.written_union, interpret=interpret)
            self.written_copied, self.written_smem = written
        self.v_copied, self.v_smem = both_views(refs.v_union, interpret=interpret)
        self.o_copied, self.o_smem, self.o_plain = (
            (refs.o_union,) * 3 if interpret else refs.o_union
        )
        self.norm = None
        if cut.eps is not None:
            of_norm = refs.gate_ref, refs.weight_ref, self.o_smem, refs.o_ref, refs.norm
            self.norm = GatedNormEpilogue(of_norm, eps=cut.eps, interpret=interpret)

    def run(self) -> None:
        cut, norm = self.cut, self.norm
        multiplies, copies, *norms = REGISTERS if norm is None else NORMED_REGISTERS

        @pl.when(self.wg < cut.halves)
        def _compute():
            plgpu.set_max_registers(multiplies, action="increase")
            self.turns.each(False, self._compute, jnp.int32(0))
            if norm is None:
                plgpu.wait_smem_to_gmem(0)
            else:
                norm.wait()

        @pl.when(self.wg == cut.halves)
        def _memory():
            plgpu.set_max_registers(copies, action="decrease")
            clear_triangles(self.refs.x_smem)
            clear_triangles(self.refs.p_smem)
            plgpu.commit_smem()
            copied = self.turns.each(True, self._copy, jnp.int32(0))
            drain(self.refs.read, copied, self.cut.stages)

        if norm is not None:

            @pl.when(self.wg == cut.halves + 1)
            def _norm():
                plgpu.set_max_registers(norms[0], action="decrease")
                norm.begin()
                self.turns.each(False, functools.partial(self._finish, norm), None)

    def _place(self, item: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The column of the run, the value head, and the first of the state's halves."""
        index, first_part = first_half(item, self.cut.halves)
        heads = jnp.int32(self.cut.heads)
        run = lax.div(index, heads) + first_run(self.refs.x_ref)
        return run, lax.rem(index, heads), first_part

    def _copy(self, item: jax.Array, copied: jax.Array) -> jax.Array:
        """Loads an item's chunks into the ring, in the producer warpgroup."""
        refs, (run, head, first_part) = self.refs, self._place(item)
        key_head = lax.div(head, jnp.int32(self.cut.group))
        start, first_chunk = refs.runs_ref[START, run], refs.runs_ref[FIRST_CHUNK, run]

        def issue(i: jax.Array, slot: jax.Array, barrier: Any) -> None:
            rows, chunk = pl.ds(start + i * CHUNK, CHUNK), first_chunk + i
            keys = (chunk, head) if self.cut.channels else (rows, key_head)
            copy_rows(refs.k_ref.at[keys], self.k_copied.at[slot], barrier)
            copy_rows(refs.q_ref.at[keys], self.q_copied.at[slot], barrier)
            if self.cut.channels:
                copy_rows(refs.written_ref.at[keys], self.written_copied.at[slot], barrier)
            values = refs.v_ref.at[rows, head]
            copy_rows(values, self.v_copied.at[slot], barrier, first_part, self.cut.halves)
            copy_triangle(refs.x_ref.at[chunk, head], refs.x_smem.at[slot], barrier)
            copy_triangle(refs.p_ref.at[chunk, head], refs.p_smem.at[slot], barrier)
            copy_vectors(refs.vectors_ref.at[chunk, head], refs.vectors_smem.at[slot], barrier)

        steps = refs.runs_ref[STEPS, run]
        return stream(refs.loaded, refs.read, copied, steps, issue, self.cut.stages)

    def _finish(self, norm: GatedNormEpilogue, item: jax.Array, carry: Any) -> Any:
        """Norms an item, in the norming warpgroup."""
        runs, (run, head, _) = self.refs.runs_ref, self._place(item)
        norm.run(runs[START, run], runs[TOKENS, run], runs[STEPS, run], head)
        return carry

    def _compute(self, item: jax.Array, slot: jax.Array) -> jax.Array:
        """Computes an item in a consumer warpgroup: updates the state chunk by chunk, from ring
        stage `slot` on."""
        refs, (run, head, first_part) = self.refs, self._place(item)
        chunks = InterChunkMainloop(self, run, head, first_part + self.wg)
        before = refs.runs_ref[BEFORE, run]
        if self.cut.from_pool:
            state = first_state(refs.pool_ref, self.layer, before, head, chunks.part)
        else:
            state = first_state(refs.starts_ref, 0, before, head, chunks.part)
        state, slot = lax.fori_loop(0, chunks.steps, chunks.step, (state, slot))
        chunks.store_if(refs.runs_ref[AFTER, run], state)
        if self.norm is None:  # which writes the zeros as well
            pl.when(chunks.steps == 0)(chunks.write_zeros)
        return slot


class InterChunkMainloop:
    """The mainloop over the chunks of a run, for a warpgroup's half of a value head's state."""

    def __init__(self, block: InterChunkCta, run: jax.Array, head: jax.Array, part: jax.Array):
        self.block, self.cut, self.refs, self.wg = block, block.cut, block.refs, block.wg
        self.head, self.part = head, part
        runs = block.refs.runs_ref
        self.start, self.tokens = runs[START, run], runs[TOKENS, run]
        self.steps, self.first_chunk = runs[STEPS, run], runs[FIRST_CHUNK, run]

    def step(self, i: jax.Array, carry: Any) -> Any:
        block, cut, refs = self.block, self.cut, self.refs
        state, slot = carry
        left = self.tokens - i * CHUNK
        plgpu.barrier_wait(refs.loaded.at[slot])
        step = ChunkStateUpdate(
            block.k_smem.at[slot], block.v_smem.at[slot, self.wg], refs.x_smem.at[slot],
            refs.vectors_smem.at[slot], cut.dtype,
            block.written_smem.at[slot] if cut.channels else None,
        )  # fmt: skip
        step.clear_tail(left, self.wg, cut.halves, refs.cleared)

        def products(*accs: Any) -> tuple[jax.Array, ...]:
            return self._products(step, state, i, slot, left, accs)

        state = with_accumulators(products, 6, interpret=cut.interpret)
        if block.norm is not None:  # else the output's copies have shown that all is read
            fence_proxy_async(interpret=cut.interpret)
        plgpu.barrier_arrive(refs.read.at[slot])
        if cut.keeps:
            self.store_if(refs.kept_ref[self.first_chunk + i], state)
        return state, next_slot(slot, cut.stages)

    def _products(
        self, step: ChunkStateUpdate, state: tuple[jax.Array, ...], i: jax.Array, slot: jax.Array,
        left: jax.Array, refs: tuple[Any, ...],
    ) -> tuple[jax.Array, ...]:  # fmt: skip
        """Starts to store the chunk's output, and returns the state after it."""
        # These come before the first product: ptxas waits for all wgmmas in flight where registers
        # change that a product of the last iteration wrote.
        operand, decayed = step.rounded(state), step.decayed(state)
        seen, out, u, inside = (WgmmaAccumulator(ref) for ref in refs[:4])
        step.times_transposed(seen, operand, step.k)
        step.times_transposed(out, operand, self.block.q_smem.at[slot])
        # Work that needs no product overlaps with the products here.
        values, read_by = step.values(), step.factor(READ)
        if self.block.norm is None:
            self._wait_for_copies()
        w = step.residual(read_by, operand.widened(seen.read(pending=2)), values)
        u.add_transposed(w.tiles[0], step.x)
        weight = step.factor(WRITE)
        added = u.read()
        starts = (w.divided(half) for half in decayed)
        accs = [WgmmaAccumulator(ref, half) for ref, half in zip(refs[4:], starts, strict=True)]
        inside.add_transposed(added.astype(self.cut.dtype), self.refs.p_smem.at[slot])
        step.write(accs, added, weight)
        # The output leaves while the state's products run.
        before = times(step.factor(OUT), operand.widened(out.read(pending=4)))
        tile = (before + w.widened(inside.read(pending=2))).astype(self.cut.dtype)
        self._write_out(tile, self.start + i * CHUNK, left)
        return tuple(w.widened(acc.read()) for acc in accs)

    def store_if(self, target: jax.Array, state: tuple[jax.Array, ...]) -> None:
        """Stores the state to a slot of the pool, unless the slot is -1."""

        @pl.when(target >= 0)
        def _():
            index = self.block.layer, target, self.head
            store_state(state, self.refs.pool_ref, index, self.part, interpret=self.cut.interpret)

    def write_zeros(self) -> None:
        """Writes the outputs of a run for which nothing is computed."""

        @pl.loop(0, lax.div(self.tokens + (CHUNK - 1), jnp.int32(CHUNK)))
        def _(i):
            self._wait_for_copies()
            first, left = self.start + i * CHUNK, self.tokens - i * CHUNK
            self._write_out(zero_tile(self.cut.dtype), first, left)

    def _wait_for_copies(self) -> None:
        """Waits until the last output has left shared memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _write_out(self, tile: jax.Array, first: jax.Array, left: jax.Array) -> None:
        """Stores O^T [64 channels, 64 tokens] to the run's tokens from `first`, `left` of them."""
        block, wg = self.block, self.wg
        if block.norm is not None:
            block.norm.hand_over(tile, wg)
            return
        out, channels = self.refs.o_ref, pl.ds(self.part * 64, 64)

        @pl.when(left >= CHUNK)
        def _():
            block.o_smem.at[wg].transpose((1, 0))[...] = tile

        @pl.when(left < CHUNK)
        def _():
            target = block.o_plain.at[wg].transpose((1, 0))
            store(target, tile, interpret=self.cut.interpret)

        plgpu.commit_smem()

        @pl.when(left >= CHUNK)
        def _():
            rows = out.at[pl.ds(first, CHUNK), self.head, channels]
            plgpu.copy_smem_to_gmem(block.o_copied.at[wg], rows)

        @pl.when(left < CHUNK)
        def _():
            for size in (32, 16, 8, 4, 2, 1):
                offset = lax.div(left, jnp.int32(2 * size)) * (2 * size)

                @pl.when(lax.rem(lax.div(left, jnp.int32(size)), jnp.int32(2)) == 1)
                def _(size=size, offset=offset):
                    rows = out.at[pl.ds(first + offset, size), self.head, channels]
                    plgpu.copy_smem_to_gmem(block.o_plain.at[wg, pl.ds(offset, size)], rows)
