"""A segment scan for few long sequences: parallel segments, joined by exact transitions.

The recurrence is linear in the state, and the state's rows are independent: over a segment of
chunks

    S_end = S_begin M + E

where row i of M [Dk, Dk] is the result for the unit row e_i without values, and E the result for a
state of 0. `transition_pass` computes both as states of one run each. `segment_starts` iterates
over the segments of a sequence, S_{j+1} = S_j M_j + E_j, so that `output_pass` can process every
segment at once. The gates' values do not change what is computed.

M is stored as two bfloat16 arrays, the rounded value and the remainder. Three products of 16-bit
operands then have 16 bits; one product would round the whole state once per segment.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.chunk.pipeline import STAGES, drain, next_slot, stream
from jaxattn.kernels.gdn.chunk.state_update import (
    ChunkStateUpdate,
    first_half,
    first_state,
    load_state,
    store_state,
)
from jaxattn.kernels.gdn.chunk.tiles import (
    CHUNK,
    DIM,
    READ,
    VECTORS,
    WRITE,
    both_views,
    clear_triangles,
    compiler_params,
    copy_rows,
    copy_triangle,
    copy_vectors,
    iota,
    token_tiles,
    triangles,
    zero_tile,
)
from jaxattn.kernels.gdn.chunk.wgmma_accumulator import (
    WgmmaAccumulator,
    with_accumulators,
)
from jaxattn.kernels.gdn.prefill.chunk_plan import (
    FIRST_CHUNK,
    LAST,
    START,
    STEPS,
    TOKENS,
    first_run,
)
from jaxattn.kernels.gdn.prefill.inter_chunk.launch import halves_in_a_block
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.instructions import fence_proxy_async, swizzled
from jaxattn.kernels.hopper.store.unoptimized_store import store

VALUES, IDENTITY = 0, 1  # the initial state of a CTA of the transition pass


def transition_pass(
    k: jax.Array,
    v: jax.Array,
    x: jax.Array,
    vectors: jax.Array,
    runs: jax.Array,
    *,
    busy: int,
    written: jax.Array | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns E float32 [R, Hv, 128, 128] and M bfloat16 [R, Hv, 2, 128, 128] of every run except
    the last, which is the padding.

    Runs that end a sequence do not need theirs, which stay undefined.
    About `busy` of the others have chunks; this number is known when traced. `written` and the
    other arguments are those of `output_pass`.
    """
    value_heads, dtype, count = v.shape[1], v.dtype, runs.shape[1] - first_run(x) - 1
    halves = halves_in_a_block(busy * value_heads * 2)
    channels = written is not None
    tokens = token_tiles((STAGES, 2), dtype, interpret=interpret)
    body = _transition_body(
        halves=halves, heads=value_heads, group=1 if channels else value_heads // k.shape[1],
        dtype=dtype, channels=channels, interpret=interpret,
    )  # fmt: skip
    transitions = (count, value_heads, 2, DIM, DIM)
    out = launch(
        body,
        name="gdn_prefill_transition",
        grid={"block": count * value_heads * 2 * 2 // halves},
        inputs={
            "k_ref": k,
            "written_ref": written,
            "v_ref": v,
            "x_ref": x,
            "vectors_ref": vectors,
            "runs_ref": runs,
        },
        outputs={
            "ends_ref": jax.ShapeDtypeStruct((count, value_heads, DIM, DIM), jnp.float32),
            "transitions_ref": jax.ShapeDtypeStruct(transitions, jnp.bfloat16),
        },
        scratch={
            "k_union": tokens,
            "written_union": tokens if channels else None,
            "v_union": token_tiles((STAGES, halves), dtype, interpret=interpret),
            "x_smem": triangles(STAGES, dtype),
            "vectors_smem": plgpu.SMEM((STAGES, 2 if channels else VECTORS, CHUNK), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=5 + 2 * channels + halves, num_barriers=STAGES),
            "read": plgpu.Barrier(num_arrivals=halves, num_barriers=STAGES),  # arrived at by all
            "cleared": plgpu.Barrier(num_arrivals=halves),  # the keys past a run's end are 0
        },
        warpgroups=halves + 1,
        compiler_params=compiler_params(),
        interpret=interpret,
        detect_races=detect_races,
    )
    return out["ends_ref"], out["transitions_ref"]


def _transition_body(
    *, halves: int, heads: int, group: int, dtype: Any, channels: bool, interpret: bool
) -> Any:
    def body(
        k_ref, written_ref, v_ref, x_ref, vectors_ref, runs_ref, ends_ref, transitions_ref,
        k_union, written_union, v_union, x_smem, vectors_smem, loaded, read, cleared,
    ):  # fmt: skip
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        block, first_part = first_half(block, halves)
        part = first_part + wg  # for a consumer warpgroup
        kind, block = lax.rem(block, jnp.int32(2)), lax.div(block, jnp.int32(2))
        run, head = lax.div(block, jnp.int32(heads)), lax.rem(block, jnp.int32(heads))
        row = first_run(x_ref) + run
        start, tokens = runs_ref[START, row], runs_ref[TOKENS, row]
        inner = (runs_ref[LAST, row] == 0) & (tokens > 0)
        steps = jnp.where(inner, runs_ref[STEPS, row], 0)
        k_copied, k_smem = both_views(k_union, interpret=interpret)
        v_copied, v_smem = both_views(v_union, interpret=interpret)
        if channels:
            written_copied, written_smem = both_views(written_union, interpret=interpret)

        @pl.when(wg < halves)
        def _compute():
            plgpu.set_max_registers(232, action="increase")

            def chunk_step(i, carry):
                state, slot = carry
                left = tokens - i * CHUNK
                plgpu.barrier_wait(loaded.at[slot])
                step = ChunkStateUpdate(
                    k_smem.at[slot],
                    v_smem.at[slot, wg],
                    x_smem.at[slot],
                    vectors_smem.at[slot],
                    dtype,
                    written_smem.at[slot] if channels else None,
                )
                step.clear_tail(left, wg, halves, cleared)

                def with_refs(*refs):
                    seen, u = (WgmmaAccumulator(ref) for ref in refs[:2])
                    operand, decayed = step.rounded(state), step.decayed(state)
                    step.times_transposed(seen, operand, step.k)
                    # Not 0 times the values, which may be NaN.
                    zeros = functools.partial(zero_tile, dtype)
                    values = lax.cond(kind == VALUES, step.values, zeros)
                    read_by = step.factor(READ)
                    w = step.residual(read_by, operand.widened(seen.read()), values)
                    u.add_transposed(w.tiles[0], step.x)
                    weight = step.factor(WRITE)
                    added = u.read()
                    starts = (w.divided(half) for half in decayed)
                    accs = [
                        WgmmaAccumulator(ref, half)
                        for ref, half in zip(refs[2:], starts, strict=True)
                    ]
                    step.write(accs, added, weight)
                    return tuple(w.widened(acc.read()) for acc in accs)

                state = with_accumulators(with_refs, 4, interpret=interpret)
                fence_proxy_async(interpret=interpret)
                plgpu.barrier_arrive(read.at[slot])
                return state, next_slot(slot)

            diagonal = iota((CHUNK, CHUNK), 0) == iota((CHUNK, CHUNK), 1)
            diagonal = jnp.where(diagonal, 1.0, 0.0)
            begin = tuple(
                diagonal * jnp.where((kind == IDENTITY) & (part == half), 1.0, 0.0)
                for half in range(2)
            )
            state = lax.fori_loop(0, steps, chunk_step, (begin, jnp.int32(0)))[0]

            @pl.when(inner & (kind == VALUES))
            def _():
                store_state(state, ends_ref, (run, head), part, interpret=interpret)

            @pl.when(inner & (kind == IDENTITY))
            def _():
                for half in range(2):
                    rounded = state[half].astype(jnp.bfloat16)
                    rest = state[half] - rounded.astype(jnp.float32)
                    for term, value in enumerate((rounded, rest.astype(jnp.bfloat16))):
                        rows = transitions_ref.at[run, head, term]
                        target = rows.at[pl.ds(part * 64, 64), pl.ds(64 * half, 64)]
                        store(target, value, interpret=interpret)

        @pl.when(wg == halves)
        def _memory():
            plgpu.set_max_registers(40, action="decrease")
            first_chunk = runs_ref[FIRST_CHUNK, row]
            key_head = lax.div(head, jnp.int32(group))

            def issue(i, slot, barrier):
                rows, chunk = pl.ds(start + i * CHUNK, CHUNK), first_chunk + i
                keys = (chunk, head) if channels else (rows, key_head)
                copy_rows(k_ref.at[keys], k_copied.at[slot], barrier)
                if channels:
                    copy_rows(written_ref.at[keys], written_copied.at[slot], barrier)
                copy_rows(v_ref.at[rows, head], v_copied.at[slot], barrier, first_part, halves)
                copy_triangle(x_ref.at[chunk, head], x_smem.at[slot], barrier)
                copy_vectors(vectors_ref.at[chunk, head], vectors_smem.at[slot], barrier)

            clear_triangles(x_smem)
            plgpu.commit_smem()
            drain(read, stream(loaded, read, jnp.int32(0), steps, issue))

    return body


def segment_starts(
    ends: jax.Array,
    transitions: jax.Array,
    sequences: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    *,
    interpret: bool = False,
    detect_races: bool = False,
) -> jax.Array:
    """Returns the states before every segment, float32 [1, R, Hv, 128, 128].

    Args:
        ends, transitions: E and M of the segments.
        sequences: int32 [n, 3], the first segment of a sequence, its number of segments, at least
            1, and the slot of the state before it, or -1.
        pool: float32 or bfloat16 [L, Z, Hv, 128, 128], those states; layer: int32 [1].
    """
    count, value_heads = sequences.shape[0], ends.shape[1]
    part = plgpu.SMEM((STAGES, 2, DIM, 64), jnp.bfloat16, transforms=swizzled(jnp.bfloat16))
    out = launch(
        _scan_body(heads=value_heads, interpret=interpret),
        name="gdn_prefill_segments",
        # The state's rows are independent: a CTA has half of them, and all of its SM's tensor
        # cores.
        grid={"block": count * value_heads * 2},
        inputs={
            "ends_ref": ends,
            "transitions_ref": transitions,
            "sequences_ref": sequences,
            "pool_ref": pool,
            "layer_ref": layer,
        },
        outputs={"starts_ref": jax.ShapeDtypeStruct((1, *ends.shape), jnp.float32)},
        scratch={
            "rounded_smem": part,  # M
            "rest_smem": part,  # the remainder of the rounding
            "loaded": plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
            "read": plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        },
        warpgroups=2,
        compiler_params=compiler_params(),
        interpret=interpret,
        detect_races=detect_races,
    )
    return out["starts_ref"]


def _scan_body(*, heads: int, interpret: bool) -> Any:
    def body(
        ends_ref, transitions_ref, sequences_ref, pool_ref, layer_ref, starts_ref,
        rounded_smem, rest_smem, loaded, read,
    ):  # fmt: skip
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        rows, block = lax.rem(block, jnp.int32(2)), lax.div(block, jnp.int32(2))
        sequence, head = lax.div(block, jnp.int32(heads)), lax.rem(block, jnp.int32(heads))
        first, steps = sequences_ref[sequence, 0], sequences_ref[sequence, 1] - 1

        @pl.when(wg == 0)
        def _compute():
            plgpu.set_max_registers(240, action="increase")

            def write_start(segment, state):
                store_state(state, starts_ref, (0, segment, head), rows, interpret=interpret)

            def segment_step(i, state):
                slot = lax.rem(i, jnp.int32(STAGES))
                write_start(first + i, state)
                rounded = tuple(half.astype(jnp.bfloat16) for half in state)
                rest = tuple(
                    (half - high.astype(jnp.float32)).astype(jnp.bfloat16)
                    for half, high in zip(state, rounded, strict=True)
                )
                plgpu.barrier_wait(loaded.at[slot])

                def with_refs(*refs):
                    accs = [WgmmaAccumulator(ref) for ref in refs]
                    products = (
                        (rest, rounded_smem),
                        (rounded, rest_smem),
                        (rounded, rounded_smem),
                    )
                    for left, smem in products:
                        for half, acc in enumerate(accs):
                            for inner in range(2):
                                acc.add(left[inner], smem.at[slot, half, pl.ds(64 * inner, 64)])
                    # Loaded from memory while the products run.
                    end = load_state(ends_ref, (first + i, head), rows)
                    return tuple(acc.read() + half for acc, half in zip(accs, end, strict=True))

                state = with_accumulators(with_refs, 2, interpret=interpret)
                if interpret:  # whose products read like plain loads
                    fence_proxy_async(interpret=True)
                plgpu.barrier_arrive(read.at[slot])
                return state

            slot = sequences_ref[sequence, 2]
            state = first_state(pool_ref, layer_ref[0], slot, head, rows)
            write_start(first + steps, lax.fori_loop(0, steps, segment_step, state))

        @pl.when(wg == 1)
        def _memory():
            plgpu.set_max_registers(40, action="decrease")

            def issue(i, slot, barrier):
                for part, smem in enumerate((rounded_smem, rest_smem)):
                    for half in range(2):
                        columns = pl.ds(64 * half, 64)
                        source = transitions_ref.at[first + i, head, part, :, columns]
                        plgpu.copy_gmem_to_smem(source, smem.at[slot, half], barrier)

            drain(read, stream(loaded, read, jnp.int32(0), steps, issue))

    return body
