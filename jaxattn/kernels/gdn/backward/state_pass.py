"""States before every chunk, and gradients of the states after every chunk, in one launch.

The kernel recomputes the states of the forward pass; their gradients go from a sequence's last
chunk to its first. Neither depends on the other, so they are separate CTAs of one launch. As in the
forward pass a warpgroup owns 64 of the 128 rows of a value head's state, which are independent of
each other. Transposed, with M = (I + A)^-1, per chunk of 64 tokens the states take

    W^T = V^T + read * (S K^T)
    U^T = (beta * W^T) M^T
    S   = decay S + (write * U^T) K

and their gradients

    dU^T = dO^T P + write * (dS K^T)
    Y^T  = dU^T M                                  beta * Y is the gradient of V
    dS   = decay dS + (out * dO^T) Q + (read * beta * Y^T) K

With decays per channel, keys and queries are already multiplied by them, and read, write and out
are 1: see `ChunkStateUpdate`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.backward.gate_gradients import LANE
from jaxattn.kernels.gdn.chunk.pipeline import drain, next_slot, stream
from jaxattn.kernels.gdn.chunk.state_update import (
    ChunkStateUpdate,
    first_half,
    first_state,
    store_state,
    times,
)
from jaxattn.kernels.gdn.chunk.tiles import (
    BETA,
    CHANNEL_BETA,
    CHUNK,
    DIM,
    OUT,
    READ,
    WRITE,
    clear_triangles,
    copy_rows,
    copy_triangle,
    triangles,
    zero_tile,
)
from jaxattn.kernels.gdn.chunk.wgmma_accumulator import (
    WgmmaAccumulator,
    with_accumulators,
)
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS
from jaxattn.kernels.hopper.instructions import fence_proxy_async, swizzled

STATES, GRADIENTS = 0, 1  # the results of a CTA
MULTIPLIES, COPIES = 232, 40  # registers per thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePassRefs:
    """The refs of a CTA: operands and results, then its shared memory and barriers."""

    q_ref: Any
    k_ref: Any
    written_ref: Any  # keys as written to the state, for decays per channel, else None
    v_ref: Any
    do_ref: Any
    m_ref: Any
    p_ref: Any
    vectors_ref: Any
    runs_ref: Any
    start_ref: Any  # None: zeros
    dend_ref: Any  # None: zeros
    states_ref: Any  # None: the next two refs have all of them
    upper_ref: Any  # None: `states_ref` has all of them
    lower_ref: Any
    dstates_ref: Any
    y_ref: Any
    dstart_ref: Any
    q_smem: Any
    k_smem: Any
    written_smem: Any
    v_smem: Any  # V or dO
    m_smem: Any
    p_smem: Any
    vectors_smem: Any
    state_smem: Any
    y_smem: Any
    loaded: Any  # for CTAs of states
    dloaded: Any  # for CTAs of gradients
    read: Any


class ChunkStates(NamedTuple):
    """The states before the chunks, as far as possible in memory that is needed anyway.

    A key head's gradients of q and k take as much memory as a state of one value head, and the CTA
    that has read this state writes them. So the state of the first value head of each key head is
    stored there, rows 0 to 63 and 64 to 127. With decays per channel all states are in `others`.
    """

    upper: jax.Array | None  # [N, 64, Hk, 128]
    lower: jax.Array | None
    others: jax.Array | None  # [N, Hv - Hk, 128, 128] in order, or [N, Hv, 128, 128]


def state_pass(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    m: jax.Array,
    p: jax.Array,
    vectors: jax.Array,
    runs: jax.Array,
    *,
    written: jax.Array | None = None,
    start: jax.Array | None,
    dend: jax.Array | None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[ChunkStates, jax.Array, jax.Array, jax.Array]:
    """Returns the states, their gradients, Y, and the gradients of the first states.

    Args:
        q, k: [N, 64, Hk, 128]; v, do: [N, 64, Hv, 128], of one 16-bit dtype. Places of a chunk
            without a token are 0.
        m, p: [N, Hv, *TRIANGLE], (I + A)^-1 and the masked scores.
        vectors: Those of `chunk_matrices`, for the backward pass.
        written: [N, Hv, 64, 128] for decays per channel. Then q and k have this shape too, as from
            `channel_chunks`, and vectors are [N, Hv, 3, 64], the last result of `channel_chunks`
            and beta.
        runs: int32 [2, n], the first chunk of each sequence, and its number of chunks.
        start, dend: float32 [1, n, Hv, 128, 128], states before the sequences, and gradients of
            those after them; None: zeros.

    Returns:
        The states before each chunk, the gradients of those after it [N, Hv, 128, 128], and Y
        [N, 64, Hv, 128], in q's dtype; and float32 [1, n, Hv, 128, 128]. Chunks that belong to no
        sequence are not written.
    """
    chunks, _, value_heads, _ = v.shape
    count, dtype, channels = runs.shape[1], q.dtype, written is not None
    halves = 1 if count * value_heads * 4 <= NUM_SMS else 2
    stages = 3 if halves == 1 and not channels else 2
    tile = swizzled(dtype)
    tokens = plgpu.SMEM((stages, 2, CHUNK, 64), dtype, transforms=tile)
    part = plgpu.SMEM((stages, halves, CHUNK, 64), dtype, transforms=tile)
    others = value_heads if channels else value_heads - k.shape[2]
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    of_keys = None if channels else shape(k.shape)
    out = launch(
        lambda **refs: StatePassCta(
            StatePassRefs(**refs), halves=halves, stages=stages, interpret=interpret
        ).run(),
        name="gdn_backward_states",
        grid={"block": count * value_heads * 4 // halves},
        inputs={
            "q_ref": q,
            "k_ref": k,
            "written_ref": written,
            "v_ref": v,
            "do_ref": do,
            "m_ref": m,
            "p_ref": p,
            "vectors_ref": vectors,
            "runs_ref": runs,
            "start_ref": start,
            "dend_ref": dend,
        },
        outputs={
            "states_ref": shape((chunks, others, DIM, DIM)) if others else None,
            "upper_ref": of_keys,
            "lower_ref": of_keys,
            "dstates_ref": shape((chunks, value_heads, DIM, DIM)),
            "y_ref": shape(v.shape),
            "dstart_ref": jax.ShapeDtypeStruct((1, count, value_heads, DIM, DIM), jnp.float32),
        },
        scratch={
            "q_smem": tokens,
            "k_smem": tokens,
            "written_smem": tokens if channels else None,
            "v_smem": part,
            "m_smem": triangles(stages, dtype),
            "p_smem": triangles(stages, dtype),
            "vectors_smem": plgpu.SMEM((stages, *vectors.shape[2:]), jnp.float32),
            "state_smem": plgpu.SMEM((halves, 2, CHUNK, 64), dtype, transforms=tile),
            "y_smem": plgpu.SMEM((halves, CHUNK, 64), dtype, transforms=tile),
            "loaded": plgpu.Barrier(num_arrivals=5 + 2 * channels + halves, num_barriers=stages),
            "dloaded": plgpu.Barrier(num_arrivals=9 + 2 * channels + halves, num_barriers=stages),
            "read": plgpu.Barrier(num_arrivals=halves, num_barriers=stages),
        },
        warpgroups=halves + 1,
        compiler_params=LANE,
        interpret=interpret,
        detect_races=detect_races,
    )
    states = ChunkStates(*(out.get(f"{name}_ref") for name in ("upper", "lower", "states")))
    return states, out["dstates_ref"], out["y_ref"], out["dstart_ref"]


class StatePassCta:
    """A CTA that computes a value head of a sequence: its states or their gradients, both halves or
    one."""

    def __init__(self, refs: StatePassRefs, *, halves: int, stages: int, interpret: bool):
        self.refs, self.halves, self.stages, self.interpret = refs, halves, stages, interpret
        self.dtype, self.channels = refs.dstates_ref.dtype, refs.written_ref is not None
        self.wg, block = lax.axis_index("wg"), lax.axis_index("block")
        self.kind = lax.rem(block, jnp.int32(2))
        index, self.first_part = first_half(lax.div(block, jnp.int32(2)), halves)
        heads = refs.v_ref.shape[2]
        self.group = 1 if self.channels else heads // refs.k_ref.shape[2]
        self.sequence, self.head = (
            lax.div(index, jnp.int32(heads)),
            lax.rem(index, jnp.int32(heads)),
        )
        self.key_head = lax.div(self.head, jnp.int32(self.group))
        self.beta = CHANNEL_BETA if self.channels else BETA  # row of the vectors
        self.part = self.first_part + self.wg  # for a consumer warpgroup
        self.first, self.steps = refs.runs_ref[0, self.sequence], refs.runs_ref[1, self.sequence]

    def run(self) -> None:
        refs, multiplies = self.refs, self.wg < self.halves

        @pl.when(multiplies & (self.kind == STATES))
        def _states():
            plgpu.set_max_registers(MULTIPLIES, action="increase")
            start = self._first_state(refs.start_ref)
            lax.fori_loop(0, self.steps, self._state_step, (start, jnp.int32(0)))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(multiplies & (self.kind == GRADIENTS))
        def _gradients():
            plgpu.set_max_registers(MULTIPLIES, action="increase")
            end = self._first_state(refs.dend_ref)
            state, _ = lax.fori_loop(0, self.steps, self._gradient_step, (end, jnp.int32(0)))
            index = 0, self.sequence, self.head
            store_state(state, refs.dstart_ref, index, self.part, interpret=self.interpret)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(self.wg == self.halves)
        def _memory():
            plgpu.set_max_registers(COPIES, action="decrease")
            clear_triangles(refs.m_smem)
            clear_triangles(refs.p_smem)
            plgpu.commit_smem()

            @pl.when(self.kind == STATES)
            def _():
                self._stream(refs.loaded, self._copy)

            @pl.when(self.kind == GRADIENTS)
            def _():
                self._stream(refs.dloaded, self._copy_for_gradients)

    def _first_state(self, ref: Any) -> tuple[jax.Array, ...]:
        if ref is None:
            return zero_tile(), zero_tile()
        return first_state(ref, 0, self.sequence, self.head, self.part)

    def _stream(self, loaded: Any, issue: Any) -> None:
        copied = stream(loaded, self.refs.read, jnp.int32(0), self.steps, issue, self.stages)
        drain(self.refs.read, copied, self.stages)

    def _copy(self, i: jax.Array, slot: jax.Array, barrier: Any) -> None:
        self._copy_shared(self.first + i, self.refs.v_ref, slot, barrier)

    def _copy_for_gradients(self, i: jax.Array, slot: jax.Array, barrier: Any) -> None:
        refs, chunk = self.refs, self.first + self.steps - 1 - i
        self._copy_shared(chunk, refs.do_ref, slot, barrier)
        copy_rows(refs.q_ref.at[self._rows_of(chunk)], refs.q_smem.at[slot], barrier)
        copy_triangle(refs.p_ref.at[chunk, self.head], refs.p_smem.at[slot], barrier)

    def _copy_shared(self, chunk: jax.Array, values: Any, slot: jax.Array, barrier: Any) -> None:
        refs, keys = self.refs, self._rows_of(chunk)
        copy_rows(refs.k_ref.at[keys], refs.k_smem.at[slot], barrier)
        if self.channels:
            copy_rows(refs.written_ref.at[keys], refs.written_smem.at[slot], barrier)
        rows = values.at[chunk, :, self.head]
        copy_rows(rows, refs.v_smem.at[slot], barrier, self.first_part, self.halves)
        copy_triangle(refs.m_ref.at[chunk, self.head], refs.m_smem.at[slot], barrier)
        vectors = refs.vectors_ref.at[chunk, self.head]
        plgpu.copy_gmem_to_smem(vectors, refs.vectors_smem.at[slot], barrier)

    def _rows_of(self, chunk: jax.Array) -> tuple[Any, ...]:
        """The index of a chunk's keys and queries."""
        if self.channels:
            return chunk, self.head
        return chunk, slice(None), self.key_head

    def _update(self, slot: jax.Array) -> ChunkStateUpdate:
        refs = self.refs
        return ChunkStateUpdate(
            refs.k_smem.at[slot], refs.v_smem.at[slot, self.wg], refs.m_smem.at[slot],
            refs.vectors_smem.at[slot], self.dtype,
            refs.written_smem.at[slot] if self.channels else None,
        )  # fmt: skip

    def _release(self, slot: jax.Array) -> None:
        fence_proxy_async(interpret=self.interpret)
        plgpu.barrier_arrive(self.refs.read.at[slot])

    def _keep(self, tiles: tuple[jax.Array, ...], copy: Callable[[Any], None]) -> None:
        """Stores a state's rows to shared memory [2, 64, 64], and from there by `copy`."""
        smem = self.refs.state_smem.at[self.wg]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for half, tile in enumerate(tiles):
            smem.at[half][...] = tile
        plgpu.commit_smem()
        copy(smem)

    def _copy_gradient(self, chunk: jax.Array, smem: Any) -> None:
        _copy_out(smem, self.refs.dstates_ref.at[chunk, self.head, self._own_rows()])

    def _copy_state(self, chunk: jax.Array, smem: Any) -> None:
        """Stores a state to its place in `ChunkStates`."""
        refs, number = self.refs, self.head
        if not self.channels:
            of_keys = lax.rem(self.head, jnp.int32(self.group)) == 0
            for part, ref in enumerate((refs.upper_ref, refs.lower_ref)):
                here = functools.partial(_copy_out, smem, ref.at[chunk, :, self.key_head])
                pl.when(of_keys & (self.part == part))(here)
            if refs.states_ref is None:
                return
            number = self.head - self.key_head - 1
        target = refs.states_ref.at[chunk, jnp.maximum(number, 0), self._own_rows()]
        pl.when(self.channels or ~of_keys)(functools.partial(_copy_out, smem, target))

    def _own_rows(self) -> Any:
        return pl.ds(self.part * 64, 64)

    def _state_step(self, i: jax.Array, carry: Any) -> Any:
        refs, (state, slot) = self.refs, carry
        plgpu.barrier_wait(refs.loaded.at[slot])
        step = self._update(slot)

        def products(*accs: Any) -> tuple[jax.Array, ...]:
            operand, decayed = step.rounded(state), step.decayed(state)
            seen, u = (WgmmaAccumulator(ref) for ref in accs[:2])
            step.times_transposed(seen, operand, step.k)
            self._keep(operand.tiles, functools.partial(self._copy_state, self.first + i))
            w = step.values().astype(jnp.float32) + times(step.factor(READ), seen.read())
            u.add_transposed((step.vector(self.beta) * w).astype(self.dtype), step.x)
            added = u.read()
            into = [WgmmaAccumulator(*each) for each in zip(accs[2:], decayed, strict=True)]
            step.write(into, added, step.factor(WRITE))
            return tuple(acc.read() for acc in into)

        state = with_accumulators(products, 4, interpret=self.interpret)
        self._release(slot)
        return state, next_slot(slot, self.stages)

    def _gradient_step(self, i: jax.Array, carry: Any) -> Any:
        refs, (state, slot) = self.refs, carry
        chunk = self.first + self.steps - 1 - i
        plgpu.barrier_wait(refs.dloaded.at[slot])
        step = self._update(slot)

        def products(wide: tuple[Any, ...], narrow: tuple[Any, ...]) -> tuple[jax.Array, ...]:
            # Work that waits for nothing overlaps with the first product, and the copies out with
            # the others.
            operand, decayed = step.rounded(state), step.decayed(state)
            written = WgmmaAccumulator(wide[0])
            step.times_transposed(written, operand, step.written)
            inside, solved = (_Halves(narrow[at : at + 2]) for at in (0, 2))
            values = step.values()  # dO^T
            inside.add(values, refs.p_smem.at[slot])
            into = [WgmmaAccumulator(*each) for each in zip(wide[1:], decayed, strict=True)]
            out = times(step.factor(OUT), values.astype(jnp.float32)).astype(self.dtype)
            for half, acc in enumerate(into):
                acc.add(out, refs.q_smem.at[slot, half])
            self._keep(operand.tiles, functools.partial(self._copy_gradient, chunk))
            added = times(step.factor(WRITE), written.read(pending=4)) + inside.read(pending=2)
            solved.add(added.astype(self.dtype), refs.m_smem.at[slot])
            y = solved.read()
            back = times(step.factor(READ), step.vector(self.beta) * y).astype(self.dtype)
            for half, acc in enumerate(into):
                acc.add(back, refs.k_smem.at[slot, half])
            self._write_y(y.astype(self.dtype), chunk)
            return tuple(acc.read() for acc in into)

        def with_wide(*wide: Any) -> tuple[jax.Array, ...]:
            def with_narrow(*narrow: Any) -> tuple[jax.Array, ...]:
                return products(wide, narrow)

            return with_accumulators(with_narrow, 4, columns=32, interpret=self.interpret)

        state = with_accumulators(with_wide, 3, interpret=self.interpret)
        self._release(slot)
        return state, next_slot(slot, self.stages)

    def _write_y(self, tile: jax.Array, chunk: jax.Array) -> None:
        """Stores Y^T to its tokens; the wait and barrier of `_keep` precede its next write."""
        smem = self.refs.y_smem.at[self.wg]
        smem.transpose((1, 0))[...] = tile
        plgpu.commit_smem()
        rows = self.refs.y_ref.at[chunk, :, self.head, pl.ds(self.part * 64, 64)]
        plgpu.copy_smem_to_gmem(smem, rows)


def _copy_out(smem: Any, rows: Any) -> None:
    """Stores [2, 64, 64] to [64, 128]."""
    for half in range(2):
        plgpu.copy_smem_to_gmem(smem.at[half], rows.at[:, pl.ds(64 * half, 64)])


class _Halves:
    """A float32 [64, 64] in two accumulators, to which products with `triangles` are added."""

    def __init__(self, accs: tuple[Any, ...]):
        self.accs = [WgmmaAccumulator(ref) for ref in accs]

    def add(self, left: jax.Array, triangle: Any) -> None:
        for half, acc in enumerate(self.accs):
            acc.add(left, triangle.at[half])

    def read(self, pending: int = 0) -> jax.Array:
        return jnp.concatenate([acc.read(pending) for acc in self.accs], axis=1)
