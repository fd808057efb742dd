"""The gated delta rule's pass over the chunks of a sequence, with the state in registers.

A warpgroup owns 64 of the 128 rows of a (run of chunks, value head)'s state: a row is one value
channel, and rows never meet. The two of a state share a block, or have one each where that leaves
no SM without work; a further one issues the TMA copies, and draws what the block does next from
`gdn_prefill_turns`; and one more may norm what comes out, see `gdn_prefill_norm`. With everything
transposed, so that the value channels are the rows of every wgmma, per chunk of 64 tokens

    W^T = V^T + read * (S K^T)                          S [64, Dk] float32, rounded to be an operand
    U^T = W^T X^T
    O^T = out * (S Q^T) + U^T P^T
    S   = decay S + (write * U^T) K

The left operand of every product is made of the product before it and stays in registers; X, P and
the vectors come from `gdn_prefill_chunk`. Nothing passes between those two warpgroups.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn_prefill import output_norm as gdn_prefill_norm
from jaxattn.kernels.gdn_prefill.accumulator import Accumulator, with_accumulators
from jaxattn.kernels.gdn_prefill.output_norm import GatedNorm, Norm
from jaxattn.kernels.gdn_prefill.tiles import (
    BY_COLUMN,
    CHUNK,
    DECAY,
    DIM,
    OUT,
    READ,
    TILE,
    VECTORS,
    WRITE,
    both_views,
    clear_triangles,
    compiler_params,
    copy_rows,
    copy_triangle,
    iota,
    over_columns,
    token_tiles,
    triangles,
)
from jaxattn.kernels.gdn_prefill.work_queue import Turns
from jaxattn.kernels.gdn_prefill.work_queue import scratch as turns_scratch
from jaxattn.kernels.hopper.machine import NUM_SMS, interpret_mode

STAGES = 3  # chunks in shared memory
# Registers of a thread of the warpgroups that multiply, of the one that copies, and of the one
# that norms, if there is one: 512 for all four are all of the multiprocessor's. With fewer for the
# last, each chunk waits for its norm.
REGISTERS, NORMED_REGISTERS = (232, 40), (208, 24, 72)
# Rows of a run: first token, tokens, first chunk, chunks that are computed (0: the tokens'
# output is 0), whether it ends a sequence, and the slots of the states before and after, or -1.
START, TOKENS, FIRST_CHUNK, STEPS, LAST, BEFORE, AFTER = range(7)


def halves_in_a_block(states: int) -> int:
    """Of a state, 1 or 2: with one to a block its SM's tensor cores are a warpgroup's own."""
    return 1 if 2 * states <= NUM_SMS else 2


def norms_inside(norm: Norm, dtype: Any, states: int) -> bool:
    """Whether `output_pass` norms: both halves of a head's channels have to be in one block."""
    return halves_in_a_block(states) == 2 and gdn_prefill_norm.fits(norm, dtype)


def first_half(block: Any, halves: int) -> tuple[Any, Any]:
    """The state that a block has, and the first of its halves there."""
    index = block * halves
    return lax.div(index, jnp.int32(2)), lax.rem(index, jnp.int32(2))


def first_run(x: Any) -> int:
    """The column of the plan where the runs begin, given what is there for each chunk."""
    return x.shape[0] + 1


def output_pass(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    x: jax.Array,
    p: jax.Array,
    vectors: jax.Array,
    runs: jax.Array,
    drawn: jax.Array,
    *,
    starts: jax.Array | None,
    layer: jax.Array,
    finals: jax.Array | int,
    kept: jax.Array | None = None,
    norm: Norm | None = None,
    busy: int,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of every run, and the states after those that ask for it.

    Args:
        q, k: [T, Hk, 128]; v: [T, Hv, 128]. What lies outside the runs may be NaN.
        x, p, vectors: from `gdn_prefill_chunk.chunk_matrices`.
        runs: int32 [7, N + 1 + R], a column for each chunk of x and one more, and then the runs,
            with the rows above, padding last.
        starts: float32 [1, n, Hv, 128, 128], where the runs' BEFORE is a row; None: in the pool.
        drawn: int32 [1], 0: for `gdn_prefill_turns`.
        layer: int32 [1], of the pool.
        finals: the pool [L, Z, Hv, 128, 128], float32 or bfloat16, where AFTER is a slot, updated
            in place; or the number of states of a new one of a single layer.
        kept: int32 [N], the slot in the pool that takes the state after each chunk, or -1.
        norm: what becomes of the outputs, if `norms_inside`; None leaves them as they are.
        busy: about how many of the runs have chunks, known when traced.

    Returns:
        o [T, Hv, 128] in v's dtype, and the pool.
    """
    value_heads, dtype = v.shape[1], v.dtype
    halves, normed = halves_in_a_block(busy * value_heads), norm is not None
    # The heads of a run share keys in L2.
    items = (runs.shape[1] - first_run(x)) * value_heads * 2 // halves
    blocks = min(items, NUM_SMS)
    body = _output_body(
        blocks=blocks,
        items=items,
        halves=halves,
        heads=value_heads,
        group=value_heads // k.shape[1],
        from_pool=starts is None,
        keeps=kept is not None,
        eps=None if norm is None else norm.eps,
        dtype=dtype,
        interpret=interpret,
    )
    # A pool is the last operand, a new one the first result: the body finds both in one place.
    out = jax.ShapeDtypeStruct(v.shape, dtype)
    pool = None if isinstance(finals, int) else jax.new_ref(finals)
    if isinstance(finals, int):
        states = jax.ShapeDtypeStruct((1, finals, value_heads, DIM, DIM), jnp.float32)
    tokens = token_tiles((STAGES, 2), dtype, interpret=interpret)
    kernel = plgpu.kernel(
        body,
        out_type=(states, out) if pool is None else (out,),
        scratch_types=[
            tokens,  # K
            tokens,  # Q
            token_tiles((STAGES, halves), dtype, interpret=interpret),  # V
            triangles(STAGES, dtype),  # X
            triangles(STAGES, dtype),  # P
            plgpu.SMEM((STAGES, VECTORS, CHUNK), jnp.float32),
            token_tiles((halves,), dtype, interpret=interpret, plain=True),  # O
            plgpu.Barrier(num_arrivals=9 + halves, num_barriers=STAGES),  # loaded
            plgpu.Barrier(num_arrivals=halves, num_barriers=STAGES),  # read by all
            plgpu.Barrier(num_arrivals=halves),  # the keys past a run's end are 0
            *turns_scratch(halves + normed),
            *(gdn_prefill_norm.scratch(halves, dtype) if normed else []),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=halves + 1 + normed,
        thread_name="wg",
        kernel_name="gdn_prefill_output",
        compiler_params=compiler_params(),
        interpret=interpret_mode(interpret, detect_races=detect_races),
    )
    if starts is None:
        starts = jnp.zeros((1, 0, value_heads, DIM, DIM), jnp.float32)
    if kept is None:
        kept = jnp.zeros(1, jnp.int32)
    # A new ref is one for each row of a vmap, whatever it is that has rows.
    operands: tuple[Any, ...] = (q, k, v, x, p, vectors, runs, layer, kept, starts)
    operands += (jax.new_ref(drawn),)
    if norm is not None:
        operands += gdn_prefill_norm.operands(norm, interpret=interpret)
    with jax.enable_x64(False):  # the kernel's integers are int32
        if pool is None:
            new, o = kernel(*operands)
            return o, new
        (o,) = kernel(*operands, pool)
    return o, jax.freeze(pool)


def state_at(ref: Any, index: tuple[Any, ...], part: Any, half: int) -> Any:
    """A warpgroup's rows of the state at `index`, half of their columns."""
    return ref.at[(*index, pl.ds(part * 64, 64), pl.ds(64 * half, 64))]


def load_state(ref: Any, index: tuple[Any, ...], part: Any) -> tuple[jax.Array, ...]:
    return tuple(
        plgpu.load(state_at(ref, index, part, half), layout=TILE, optimized=False).astype(
            jnp.float32
        )
        for half in range(2)
    )


def first_state(ref: Any, layer: Any, slot: Any, head: Any, part: Any) -> tuple[jax.Array, ...]:
    """The state in a slot, or zeros for -1."""
    if ref.shape[1] == 0:
        return zero_tile(), zero_tile()
    return lax.cond(
        slot >= 0,
        lambda: load_state(ref, (layer, slot, head), part),
        lambda: (zero_tile(), zero_tile()),
    )


def store_state(state: tuple[jax.Array, ...], ref: Any, index: tuple[Any, ...], part: Any) -> None:
    for half in range(2):
        state_at(ref, index, part, half)[...] = state[half].astype(ref.dtype)


def zero_tile(dtype: Any = jnp.float32) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((CHUNK, CHUNK), dtype), TILE)


class Step:
    """What both passes do with a chunk: the state's half of a warpgroup, from chunk to chunk."""

    def __init__(self, k_smem: Any, v_smem: Any, x_smem: Any, vectors: Any, dtype: Any):
        self.k, self.v, self.x, self.vectors = k_smem, v_smem, x_smem, vectors
        self.dtype = dtype

    def vector(self, row: int) -> jax.Array:
        values = plgpu.load(self.vectors.at[row], layout=BY_COLUMN, optimized=False)
        return over_columns(values)

    def clear_tail(self, left: Any, wg: Any, halves: int, cleared: Any) -> None:
        """Keys and values past the end of the run may be NaN, and 0 * NaN is NaN: a block's
        `halves` warpgroups clear the keys together, and each its values.

        Only the last chunk of a run has such tokens. `cleared` completes once for each such run,
        and every warpgroup waits for each: none can be two ahead of another."""

        @pl.when(left < CHUNK)
        def _():
            inside = iota((CHUNK, CHUNK), 0) < left
            keys = [self.k.at[half] for half in ((wg,) if halves == 2 else (0, 1))]
            for rows in (*keys, self.v):
                kept = plgpu.load(rows, layout=TILE)
                rows[...] = jnp.where(inside, kept, jnp.zeros((), self.dtype))
            plgpu.commit_smem()
            plgpu.barrier_arrive(cleared)
            plgpu.barrier_wait(cleared)

    def rounded(self, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(half.astype(self.dtype) for half in state)

    def times_transposed(self, acc: Accumulator, state: tuple[jax.Array, ...], rows: Any) -> None:
        """acc += state rows^T, for keys or queries [2, 64, 64]."""
        for half in range(2):
            acc.add(state[half], rows.at[half].transpose((1, 0)))

    def values(self) -> jax.Array:
        """V^T"""
        return plgpu.load(self.v.transpose((1, 0)), layout=TILE)

    def residual(self, read: jax.Array, seen: jax.Array, values: jax.Array) -> jax.Array:
        """W^T = V^T + read * (S K^T)"""
        return (values.astype(jnp.float32) + read * seen).astype(self.dtype)

    def decayed(self, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        decay = self.vectors[DECAY, 0]
        return tuple(decay * half for half in state)

    def write(self, accs: list[Accumulator], u: jax.Array, weight: jax.Array) -> None:
        """accs += (write * U^T) K"""
        weighted = (u * weight).astype(self.dtype)
        for half in range(2):
            accs[half].add(weighted, self.k.at[half])


def next_slot(slot: Any) -> Any:
    """Slots in turn; a remainder by 3 takes twenty instructions, one after another."""
    return jnp.where(slot == STAGES - 1, 0, slot + 1)


def stream(loaded: Any, read: Any, before: Any, steps: Any, issue: Any) -> jax.Array:
    """The copying warpgroup: `issue(i, slot, barrier)` copies chunk i, as slots become free, after
    so many chunks before. Returns how many it has copied in all."""

    @pl.loop(0, steps)
    def _(i):
        slot = lax.rem(before + i, jnp.int32(STAGES))

        @pl.when(before + i >= STAGES)
        def _():
            plgpu.barrier_wait(read.at[slot])

        issue(i, slot, loaded.at[slot])

    return before + steps


def drain(read: Any, copied: Any) -> None:
    """At the end: a thread that waits on a barrier has to see each of its completions."""

    @pl.loop(jnp.maximum(copied - STAGES, 0), copied)
    def _(i):
        plgpu.barrier_wait(read.at[lax.rem(i, jnp.int32(STAGES))])


def _output_body(
    *,
    blocks: int,
    items: int,
    halves: int,
    heads: int,
    group: int,
    from_pool: bool,
    keeps: bool,
    eps: float | None,
    dtype: Any,
    interpret: bool,
) -> Any:
    normed = eps is not None
    multiplies, copies, *norms = NORMED_REGISTERS if normed else REGISTERS

    def body(
        q_ref, k_ref, v_ref, x_ref, p_ref, vectors_ref, runs_ref, layer_ref, kept_ref, starts_ref,
        drawn_ref, *refs,
    ):  # fmt: skip
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        norm_refs, (pool_ref, o_ref, *scratch_refs) = refs[: 2 * normed], refs[2 * normed :]
        k_union, q_union, v_union, x_smem, p_smem, vectors_smem, o_union, *rest = scratch_refs
        loaded, read, cleared, *rest = rest
        turns_refs, norm_scratch = rest[:3], rest[3:]
        turns = Turns(drawn_ref, turns_refs, block, blocks=blocks, items=items, interpret=interpret)
        layer = layer_ref[0]
        k_copied, k_smem = both_views(k_union, interpret=interpret)
        q_copied, q_smem = both_views(q_union, interpret=interpret)
        v_copied, v_smem = both_views(v_union, interpret=interpret)
        o_copied, o_smem, o_plain = (o_union,) * 3 if interpret else o_union
        if eps is not None:
            of_norm = (*norm_refs, o_smem, o_ref, norm_scratch)
            norm = GatedNorm(of_norm, eps=eps, interpret=interpret)

        def place(item):
            """Column of the run, value head, and the first of the state's halves."""
            index, first_part = first_half(item, halves)
            run = lax.div(index, jnp.int32(heads)) + first_run(x_ref)
            return run, lax.rem(index, jnp.int32(heads)), first_part

        def wait_for_copies() -> None:
            """Until the last output has left shared memory."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def write_out(tile: jax.Array, first: Any, left: Any, head: Any, part: Any) -> None:
            """O^T [64 channels, 64 tokens] to the run's tokens from `first`, `left` of them."""
            if normed:
                norm.hand_over(tile, wg)
                return
            channels = pl.ds(part * 64, 64)

            @pl.when(left >= CHUNK)
            def _():
                o_smem.at[wg].transpose((1, 0))[...] = tile

            @pl.when(left < CHUNK)
            def _():
                o_plain.at[wg].transpose((1, 0))[...] = tile

            plgpu.commit_smem()

            @pl.when(left >= CHUNK)
            def _():
                rows = o_ref.at[pl.ds(first, CHUNK), head, channels]
                plgpu.copy_smem_to_gmem(o_copied.at[wg], rows)

            @pl.when(left < CHUNK)
            def _():
                for size in (32, 16, 8, 4, 2, 1):
                    offset = lax.div(left, jnp.int32(2 * size)) * (2 * size)

                    @pl.when(lax.rem(lax.div(left, jnp.int32(size)), jnp.int32(2)) == 1)
                    def _(size=size, offset=offset):
                        rows = o_ref.at[pl.ds(first + offset, size), head, channels]
                        plgpu.copy_smem_to_gmem(o_plain.at[wg, pl.ds(offset, size)], rows)

        def compute(item, slot):
            run, head, first_part = place(item)
            part = first_part + wg
            start, tokens = runs_ref[START, run], runs_ref[TOKENS, run]
            steps, first_chunk = runs_ref[STEPS, run], runs_ref[FIRST_CHUNK, run]

            def chunk_step(i, carry):
                state, slot = carry
                left = tokens - i * CHUNK
                plgpu.barrier_wait(loaded.at[slot])
                keys = k_smem.at[slot]
                step = Step(
                    keys, v_smem.at[slot, wg], x_smem.at[slot], vectors_smem.at[slot], dtype
                )
                step.clear_tail(left, wg, halves, cleared)

                def with_refs(*refs):
                    # Before the first product: ptxas waits for all that are in flight where
                    # registers change that a product of the last iteration wrote.
                    operand, decayed = step.rounded(state), step.decayed(state)
                    seen, out, u, inside = (Accumulator(ref) for ref in refs[:4])
                    step.times_transposed(seen, operand, keys)
                    step.times_transposed(out, operand, q_smem.at[slot])
                    # What needs no product, here, where products run.
                    values, read_by = step.values(), step.vector(READ)
                    if not normed:
                        wait_for_copies()
                    w = step.residual(read_by, seen.read(pending=2), values)
                    u.add_transposed(w, step.x)
                    weight = step.vector(WRITE)
                    added = u.read()
                    accs = [
                        Accumulator(ref, half) for ref, half in zip(refs[4:], decayed, strict=True)
                    ]
                    inside.add_transposed(added.astype(dtype), p_smem.at[slot])
                    step.write(accs, added, weight)
                    # The output leaves while the state's products run.
                    before = out.read(pending=4) * step.vector(OUT)
                    tile = (before + inside.read(pending=2)).astype(dtype)
                    write_out(tile, start + i * CHUNK, left, head, part)
                    return tuple(acc.read() for acc in accs)

                state = with_accumulators(with_refs, 6, interpret=interpret)
                plgpu.barrier_arrive(read.at[slot])
                if keeps:
                    store_if(kept_ref[first_chunk + i], state)
                return state, next_slot(slot)

            def store_if(target, state):
                @pl.when(target >= 0)
                def _():
                    store_state(state, pool_ref, (layer, target, head), part)

            before = runs_ref[BEFORE, run]
            if from_pool:
                state = first_state(pool_ref, layer, before, head, part)
            else:
                state = first_state(starts_ref, 0, before, head, part)
            state, slot = lax.fori_loop(0, steps, chunk_step, (state, slot))
            store_if(runs_ref[AFTER, run], state)
            if normed:  # which writes the zeros as well
                return slot

            @pl.when(steps == 0)
            def _():
                @pl.loop(0, lax.div(tokens + (CHUNK - 1), jnp.int32(CHUNK)))
                def _(i):
                    wait_for_copies()
                    first, left = start + i * CHUNK, tokens - i * CHUNK
                    write_out(zero_tile(dtype), first, left, head, part)

            return slot

        def finish(item, carry):
            run, head, _ = place(item)
            norm.run(runs_ref[START, run], runs_ref[TOKENS, run], runs_ref[STEPS, run], head)
            return carry

        def copy(item, copied):
            run, head, first_part = place(item)
            key_head = lax.div(head, jnp.int32(group))
            start, first_chunk = runs_ref[START, run], runs_ref[FIRST_CHUNK, run]

            def issue(i, slot, barrier):
                rows = pl.ds(start + i * CHUNK, CHUNK)
                copy_rows(k_ref.at[rows, key_head], k_copied.at[slot], barrier)
                copy_rows(q_ref.at[rows, key_head], q_copied.at[slot], barrier)
                copy_rows(v_ref.at[rows, head], v_copied.at[slot], barrier, first_part, halves)
                chunk = first_chunk + i
                copy_triangle(x_ref.at[chunk, head], x_smem.at[slot], barrier)
                copy_triangle(p_ref.at[chunk, head], p_smem.at[slot], barrier)
                plgpu.copy_gmem_to_smem(vectors_ref.at[chunk, head], vectors_smem.at[slot], barrier)

            return stream(loaded, read, copied, runs_ref[STEPS, run], issue)

        @pl.when(wg < halves)
        def _compute():
            plgpu.set_max_registers(multiplies, action="increase")
            turns.each(False, compute, jnp.int32(0))
            if normed:
                norm.wait()
            else:
                plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == halves)
        def _memory():
            plgpu.set_max_registers(copies, action="decrease")
            clear_triangles(x_smem)
            clear_triangles(p_smem)
            plgpu.commit_smem()
            drain(read, turns.each(True, copy, jnp.int32(0)))

        if normed:

            @pl.when(wg == halves + 1)
            def _norm():
                plgpu.set_max_registers(norms[0], action="decrease")
                norm.begin()
                turns.each(False, finish, None)

    return body
