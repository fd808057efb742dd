"""Gradients of a chunk's inputs, from the state before it and the gradient of the state after it.

A CTA processes each chunk of a key head by itself, and its value heads one after another. Two
warpgroups have 64 of the 128 channels each, of values first and of keys then; a third one copies.
The names are those of state_pass.py. S is the state before the chunk, dS the gradient of the state
after it, and D the decays between tokens. D and the vectors include the lengths of q and k.

    W   = V + read * (K S^T)                   U = M (beta * W)
    F   = tril(dO U^T) * scale D               E = Y U^T
    H   = -beta * tril(E, -1) * D
    dQ  = out * (dO S) + F K
    dK  = read * beta * (Y S) + H K  +  write * (U dS) + F^T Q + H^T K
    dV  = beta * Y
    dbeta = rows of Y * W, less rows of E * tril(K K^T, -1) * D

D, out, read and write are functions of sums of log decays. Each token contributes to a sum's
gradient the products of q and k with these terms, those of the second half of dK negative; XLA adds
them up.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.backward.chunk_refs import tile, vector
from jaxattn.kernels.gdn.backward.gate_gradients import (
    LANE,
    OF_BETA,
    PARTS,
)
from jaxattn.kernels.gdn.backward.state_pass import ChunkStates
from jaxattn.kernels.gdn.backward.value_head_gradients import (
    InputGradientRefs,
    KeyGradients,
    ValueHead,
    release,
)
from jaxattn.kernels.gdn.chunk.tiles import (
    BACKWARD_VECTORS,
    BY_ROW,
    CHUNK,
    DIM,
    LOG_K,
    LOG_Q,
    clear_triangles,
    copy_rows,
    copy_triangle,
    over_rows,
    triangles,
)
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS
from jaxattn.kernels.hopper.instructions import swizzled

WARPGROUPS = 2  # consumers, one for each half of the channels; one more copies
MULTIPLIES, COPIES = 240, 24  # registers per thread
SLOTS = 2  # value heads whose states and values are in shared memory


def input_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    m: jax.Array,
    vectors: jax.Array,
    states: ChunkStates,
    dstates: jax.Array,
    y: jax.Array,
    *,
    scale: float,
    l2norm: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of q, k [N, 64, Hk, 128] and v [N, 64, Hv, 128], and the input of
    `gate_gradients`.

    Args: those and the results of `state_pass`; scale is greater than 0.
    """
    chunks, _, key_heads, _ = k.shape
    value_heads, dtype = v.shape[2], q.dtype
    swizzle = swizzled(dtype)
    tokens = plgpu.SMEM((1, 2, CHUNK, 64), dtype, transforms=swizzle)
    blocks = min(chunks * key_heads, NUM_SMS)
    parts = jax.ShapeDtypeStruct((chunks, value_heads, WARPGROUPS, PARTS, CHUNK), jnp.float32)
    assert states.upper is not None and states.lower is not None
    of_q, of_k, of_v = (jax.new_ref(x) for x in (states.upper, states.lower, y))
    read = plgpu.Barrier(num_arrivals=WARPGROUPS)
    out = launch(
        lambda **refs: _by_warpgroup(
            lambda wg: InputGradientCta(
                InputGradientRefs(**refs),
                wg,
                blocks=blocks,
                scale=scale,
                l2norm=l2norm,
                interpret=interpret,
            ).run()
        ),
        name="gdn_backward_inputs",
        grid={"block": blocks},
        inputs={
            "q_ref": q,
            "k_ref": k,
            "v_ref": v,
            "do_ref": do,
            "m_ref": m,
            "vectors_ref": vectors,
            "states_ref": states.others,
            "dstates_ref": dstates,
            "y_ref": of_v,
            "dq_ref": of_q,
            "dk_ref": of_k,
        },
        outputs={"parts_ref": parts},
        scratch={
            "q_smem": tokens,
            "k_smem": tokens,
            "v_smem": plgpu.SMEM((SLOTS, 2, CHUNK, 64), dtype, transforms=swizzle),
            "do_smem": tokens,
            "y_smem": tokens,
            "state_smem": plgpu.SMEM((SLOTS, 2, DIM, 64), dtype, transforms=swizzle),
            "dstate_smem": plgpu.SMEM((1, 2, DIM, 64), dtype, transforms=swizzle),
            "m_smem": triangles(1, dtype),
            "scores_smem": tokens,
            "vectors_smem": plgpu.SMEM((SLOTS, BACKWARD_VECTORS, CHUNK), jnp.float32),
            "parts_smem": plgpu.SMEM((WARPGROUPS, PARTS, CHUNK), jnp.float32),
            "products_smem": plgpu.SMEM((WARPGROUPS, 2, CHUNK), jnp.float32),
            "keys": plgpu.Barrier(num_arrivals=4),
            "first_loaded": plgpu.Barrier(num_arrivals=7, num_barriers=SLOTS),
            "solve": plgpu.Barrier(num_arrivals=2),
            "rest": plgpu.Barrier(num_arrivals=4),
            "dstate_loaded": plgpu.Barrier(num_arrivals=2),
            "keys_read": read,
            "first_read": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=SLOTS),
            "solve_read": read,
            "rest_read": read,
            "behind_read": read,
            "warpgroup_barrier": read,
        },
        warpgroups=WARPGROUPS + 1,
        compiler_params=LANE,
        interpret=interpret,
    )
    return *(jax.freeze(ref) for ref in (of_q, of_k, of_v)), out["parts_ref"]


def _by_warpgroup(body: Callable[[int], None]) -> None:
    """Traces the body for each warpgroup: with a static warpgroup index its addresses are static
    too."""
    for wg in range(WARPGROUPS + 1):
        pl.when(lax.axis_index("wg") == wg)(functools.partial(body, wg))


def _copy_state(halves: list[Any], destination: Any, barrier: Any) -> None:
    """Copies rows 0 to 63 and 64 to 127 of a state."""
    for i, rows in enumerate(halves):
        copy_rows(rows, destination.at[:, pl.ds(CHUNK * i, CHUNK)], barrier)


class InputGradientCta:
    """A CTA that processes chunks of key heads, one after another, and the value heads that share
    each.

    The next value head's state and values are loaded while this one is processed, and its other
    tiles after both warpgroups have read those of this one.
    """

    def __init__(
        self,
        refs: InputGradientRefs,
        wg: int,
        *,
        blocks: int,
        scale: float,
        l2norm: bool,
        interpret: bool,
    ):
        self.refs, self.log2_scale, self.l2norm = refs, math.log2(scale), l2norm
        self.interpret, self.dtype, self.blocks = interpret, refs.dq_ref.dtype, blocks
        chunks, _, self.key_heads, _ = refs.k_ref.shape
        self.group = refs.v_ref.shape[2] // self.key_heads
        self.wg, self.block = wg, lax.axis_index("block")
        self.items = lax.div(chunks * self.key_heads - self.block + (blocks - 1), jnp.int32(blocks))

    def run(self) -> None:
        if self.wg == WARPGROUPS:
            plgpu.set_max_registers(COPIES, action="decrease")
            clear_triangles(self.refs.m_smem)
            plgpu.commit_smem()
            self._copy()
        else:
            plgpu.set_max_registers(MULTIPLIES, action="increase")
            lax.fori_loop(0, self.items, self._item, None)
            plgpu.wait_smem_to_gmem(0)

    def _item(self, i: jax.Array, carry: None) -> None:
        plgpu.barrier_wait(self.refs.keys)
        first = i * self.group
        head = functools.partial(self._value_head, first)
        total, _ = lax.fori_loop(0, self.group, head, (KeyGradients.zeros(), jnp.int32(0)))
        self._write_keys(i, total)
        return carry

    def _place(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The chunk and key head of an item."""
        item, heads = self.block + i * self.blocks, jnp.int32(self.key_heads)
        return lax.div(item, heads), lax.rem(item, heads)

    def _head(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The chunk and value head of a step."""
        group = jnp.int32(self.group)
        chunk, key_head = self._place(lax.div(step, group))
        return chunk, key_head * self.group + lax.rem(step, group)

    def _copy(self) -> None:
        """Starts all copies of a CTA in their order, each after the previous contents of its buffer
        have been read."""
        refs, group = self.refs, jnp.int32(self.group)
        steps = self.items * self.group

        def step(n: jax.Array, carry: None) -> None:
            (chunk, head), slot = self._head(n), lax.rem(n, jnp.int32(SLOTS))
            begins, key_head = lax.rem(n, group) == 0, lax.div(head, group)

            def when_read(barrier: Any, places: int = 1) -> None:
                pl.when(n >= places)(lambda: plgpu.barrier_wait(barrier))

            def keys() -> None:
                when_read(refs.keys_read)
                copy_rows(refs.k_ref.at[chunk, :, key_head], refs.k_smem.at[0], refs.keys)
                copy_rows(refs.q_ref.at[chunk, :, key_head], refs.q_smem.at[0], refs.keys)

            when_read(refs.first_read.at[slot], SLOTS)
            first = refs.first_loaded.at[slot]
            place = refs.state_smem.at[slot]
            of_keys = [ref.at[chunk, :, key_head] for ref in (refs.dq_ref, refs.dk_ref)]
            pl.when(begins)(functools.partial(_copy_state, of_keys, place, first))
            if refs.states_ref is not None:
                state = refs.states_ref.at[chunk, jnp.maximum(head - key_head - 1, 0)]
                rows = [state.at[pl.ds(at, CHUNK)] for at in (0, CHUNK)]
                pl.when(~begins)(functools.partial(_copy_state, rows, place, first))
            copy_rows(refs.v_ref.at[chunk, :, head], refs.v_smem.at[slot], first)
            vectors = refs.vectors_ref.at[chunk, head]
            plgpu.copy_gmem_to_smem(vectors, refs.vectors_smem.at[slot], first)
            when_read(refs.solve_read)
            copy_triangle(refs.m_ref.at[chunk, head], refs.m_smem.at[0], refs.solve)
            pl.when(n == 0)(keys)
            when_read(refs.rest_read)
            copy_rows(refs.do_ref.at[chunk, :, head], refs.do_smem.at[0], refs.rest)
            copy_rows(refs.y_ref.at[chunk, :, head], refs.y_smem.at[0], refs.rest)
            when_read(refs.behind_read)
            copy_rows(refs.dstates_ref.at[chunk, head], refs.dstate_smem.at[0], refs.dstate_loaded)
            pl.when((n > 0) & begins)(keys)  # read last of all
            return carry

        lax.fori_loop(0, steps, step, None)
        # A thread that waits on a barrier must observe each of its completions.
        for barrier in (refs.keys_read, refs.solve_read, refs.rest_read, refs.behind_read):
            plgpu.barrier_wait(barrier)
        last = refs.first_read.at[lax.rem(steps, jnp.int32(SLOTS))]
        pl.when(steps >= SLOTS)(lambda: plgpu.barrier_wait(last))

    def _sync_warpgroups(self) -> None:
        """Synchronizes both warpgroups: each sees what the other has written, and both have
        finished their reads."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs.warpgroup_barrier)
        plgpu.barrier_wait(self.refs.warpgroup_barrier)

    def _value_head(
        self, first: jax.Array, n: jax.Array, carry: tuple[KeyGradients, jax.Array]
    ) -> tuple[KeyGradients, jax.Array]:
        refs, step, (total, anew) = self.refs, first + n, carry
        slot = lax.rem(step, jnp.int32(SLOTS))
        head = ValueHead(refs, self.wg, slot, anew, interpret=self.interpret)
        plgpu.barrier_wait(refs.first_loaded.at[slot])
        w = head.seen()
        # Waits for earlier copies out, also those of the other slot.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(step > 0)(lambda: release(refs.first_read.at[1 - slot], interpret=self.interpret))
        head.solve(w)
        self._sync_warpgroups()
        plgpu.barrier_wait(refs.rest)
        y, of_beta = head.of_values(w)
        if self.wg == 0:
            head.scores_of_queries()
        else:
            of_beta = of_beta - head.scores_of_keys()
        head.parts[OF_BETA, :] = of_beta
        self._sync_warpgroups()
        total = head.keys(total)
        self._sync_warpgroups()
        self._write_values(y, *self._head(step))
        return total, anew ^ lax.shift_right_logical(step, jnp.int32(30))

    def _write_values(self, y: jax.Array, chunk: jax.Array, head: jax.Array) -> None:
        """Starts the stores of dV and the gates' parts."""
        refs, wg = self.refs, self.wg
        dv = refs.scores_smem.at[0, wg]
        dv[...] = y
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(dv, refs.y_ref.at[chunk, :, head, pl.ds(wg * 64, 64)])
        plgpu.copy_smem_to_gmem(refs.parts_smem.at[wg], refs.parts_ref.at[chunk, head, wg])

    def _write_keys(self, i: jax.Array, total: KeyGradients) -> None:
        """Starts the stores of dQ and dK, through the slot of the last value head."""
        refs, wg, (chunk, key_head) = self.refs, self.wg, self._place(i)
        slot = lax.rem((i + 1) * self.group - 1, jnp.int32(SLOTS))
        if self.l2norm:
            gradients = self._l2norm_backward(slot, total)
        else:
            gradients = total.q, total.k
            release(refs.keys_read, interpret=self.interpret)
        staged = [refs.state_smem.at[slot, wg, pl.ds(at, CHUNK)] for at in (0, CHUNK)]
        for smem, gradient in zip(staged, gradients, strict=True):
            smem[...] = gradient.astype(self.dtype)
        plgpu.commit_smem()
        for smem, ref in zip(staged, (refs.dq_ref, refs.dk_ref), strict=True):
            plgpu.copy_smem_to_gmem(smem, ref.at[chunk, :, key_head, pl.ds(wg * 64, 64)])

    def _l2norm_backward(self, slot: jax.Array, total: KeyGradients) -> tuple[jax.Array, ...]:
        """Converts gradients of unit vectors, times the inverse lengths, to those of q and k:
        subtracts their components along q and k."""
        refs, wg = self.refs, self.wg
        rows = [tile(ref.at[0, wg]) for ref in (refs.q_smem, refs.k_smem)]
        products = refs.products_smem.at[wg]
        products[0, :], products[1, :] = total.along_q, total.along_k
        self._sync_warpgroups()
        release(refs.keys_read, interpret=self.interpret)

        def across(i: int, log: int, scale: float) -> jax.Array:
            along = [vector(refs.products_smem.at[half, i], BY_ROW) for half in range(WARPGROUPS)]
            length = vector(refs.vectors_smem.at[slot, log], BY_ROW) - scale
            along_unit = (along[0] + along[1]) * jnp.exp2(2.0 * length)
            return (total.q, total.k)[i] - over_rows(along_unit) * rows[i]

        return across(0, LOG_Q, self.log2_scale), across(1, LOG_K, 0.0)
