"""Gradients of a chunk's inputs, of the state before it and the gradient of the state behind it.

Each chunk of a key head by itself, its value heads one after another; two warpgroups, each with 64
of the 128 channels of values first and of keys then. With the names of state_pass.py, S the state
before the chunk and dS the gradient of the one behind it, D the decays between tokens, and lengths
of q and k in D and in the vectors,

    W   = V + read * (K S^T)                   U = M (beta * W)
    F   = tril(dO U^T) * scale D               E = Y U^T
    H   = -beta * tril(E, -1) * D
    dQ  = out * (dO S) + F K
    dK  = read * beta * (Y S) + H K  +  write * (U dS) + F^T Q + H^T K
    dV  = beta * Y
    dbeta = rows of Y * W, less rows of E * tril(K K^T, -1) * D

What D, out, read and write are made of, sums of log decays, gets from each token the products of q
and k with these terms, those of the second half of dK negative; XLA adds them up.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.backward.gate_gradients import (
    LANE,
    OF_BETA,
    OF_DECAY,
    OF_SUM,
    OF_WRITE,
    PARTS,
)
from jaxattn.kernels.gdn.prefill.inter_chunk.accumulator import WgmmaAccumulator, with_accumulators
from jaxattn.kernels.gdn.prefill.inter_chunk.state_update import zero_tile
from jaxattn.kernels.gdn.prefill.intra_chunk.mainloop import fill_above
from jaxattn.kernels.gdn.prefill.tiles import (
    BACKWARD_VECTORS,
    BETA,
    BY_COLUMN,
    BY_ROW,
    CHUNK,
    DIM,
    LOG_K,
    LOG_Q,
    OUT,
    READ,
    SUM,
    TILE,
    WRITE,
    clear_triangles,
    copy_rows,
    copy_triangle,
    iota,
    over_columns,
    over_rows,
    triangles,
)
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS, swizzled, warpgroup_barrier

WARPGROUPS = 2  # one for each half of the channels
SLOTS = 2  # value heads whose states and values are in shared memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputGradientRefs:
    """What a block works on: operands and results, then its shared memory and barriers."""

    q_ref: Any
    k_ref: Any
    v_ref: Any
    do_ref: Any
    m_ref: Any
    vectors_ref: Any
    states_ref: Any
    dstates_ref: Any
    y_ref: Any  # Y, then dV
    dq_ref: Any
    dk_ref: Any
    parts_ref: Any
    q_smem: Any
    k_smem: Any
    v_smem: Any
    do_smem: Any
    y_smem: Any
    state_smem: Any  # S, then dQ and dK
    dstate_smem: Any
    m_smem: Any
    scores_smem: Any  # F and H, then dV
    vectors_smem: Any
    parts_smem: Any
    products_smem: Any  # of q and k with their gradients, of each half of the channels
    keys: Any  # and queries
    first: Any
    rest: Any
    met: Any


def input_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    m: jax.Array,
    vectors: jax.Array,
    states: jax.Array,
    dstates: jax.Array,
    y: jax.Array,
    *,
    scale: float,
    l2norm: bool,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k [N, 64, Hk, 128] and v [N, 64, Hv, 128], and what `gate_gradients` takes.

    Args: those and the results of `state_pass`; scale is greater than 0.
    """
    chunks, _, key_heads, _ = k.shape
    value_heads, dtype = v.shape[2], q.dtype
    tile = swizzled(dtype)
    tokens = plgpu.SMEM((2, CHUNK, 64), dtype, transforms=tile)
    blocks = min(chunks * key_heads, NUM_SMS)
    parts = jax.ShapeDtypeStruct((chunks, value_heads, WARPGROUPS, PARTS, CHUNK), jnp.float32)
    of_v = jax.new_ref(y)
    out = launch(
        lambda **refs: InputGradientCta(
            InputGradientRefs(**refs),
            blocks=blocks,
            scale=scale,
            l2norm=l2norm,
            interpret=interpret,
        ).run(),
        name="gdn_backward_inputs",
        grid={"block": blocks},
        inputs={
            "q_ref": q,
            "k_ref": k,
            "v_ref": v,
            "do_ref": do,
            "m_ref": m,
            "vectors_ref": vectors,
            "states_ref": states,
            "dstates_ref": dstates,
            "y_ref": of_v,
        },
        outputs={
            "dq_ref": jax.ShapeDtypeStruct(q.shape, dtype),
            "dk_ref": jax.ShapeDtypeStruct(k.shape, dtype),
            "parts_ref": parts,
        },
        scratch={
            "q_smem": tokens,
            "k_smem": tokens,
            "v_smem": plgpu.SMEM((SLOTS, 2, CHUNK, 64), dtype, transforms=tile),
            "do_smem": tokens,
            "y_smem": tokens,
            "state_smem": plgpu.SMEM((SLOTS, 2, DIM, 64), dtype, transforms=tile),
            "dstate_smem": plgpu.SMEM((2, DIM, 64), dtype, transforms=tile),
            "m_smem": triangles(1, dtype),
            "scores_smem": tokens,
            "vectors_smem": plgpu.SMEM((SLOTS, BACKWARD_VECTORS, CHUNK), jnp.float32),
            "parts_smem": plgpu.SMEM((WARPGROUPS, PARTS, CHUNK), jnp.float32),
            "products_smem": plgpu.SMEM((WARPGROUPS, 2, CHUNK), jnp.float32),
            "keys": plgpu.Barrier(num_arrivals=4),
            "first": plgpu.Barrier(num_arrivals=7, num_barriers=SLOTS),
            "rest": plgpu.Barrier(num_arrivals=6),
            "met": plgpu.Barrier(num_arrivals=WARPGROUPS),
        },
        warpgroups=WARPGROUPS,
        compiler_params=LANE,
        interpret=interpret,
        detect_races=detect_races,
    )
    return out["dq_ref"], out["dk_ref"], jax.freeze(of_v), out["parts_ref"]


class KeyGradients(NamedTuple):
    """Gradients of q and k so far, of a warpgroup's channels, and their products with q and k."""

    q: jax.Array  # [64, 64]
    k: jax.Array
    along_q: jax.Array  # [64]
    along_k: jax.Array

    @classmethod
    def zeros(cls) -> "KeyGradients":
        rows = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), BY_ROW)
        return cls(zero_tile(), zero_tile(), rows, rows)


class InputGradientCta:
    """Chunks of key heads, one after another, and the value heads that share each.

    The next value head's state and values are on their way while this one is worked on, its other
    tiles and the next keys from its end on.
    """

    def __init__(
        self,
        refs: InputGradientRefs,
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
        self.wg, self.block = lax.axis_index("wg"), lax.axis_index("block")
        self.items = lax.div(chunks * self.key_heads - self.block + (blocks - 1), jnp.int32(blocks))

    def run(self) -> None:
        @pl.when(self.wg == 0)
        def _():
            clear_triangles(self.refs.m_smem)
            plgpu.commit_smem()
            self._copy_keys(jnp.int32(0))
            self._copy_first(jnp.int32(0))
            self._copy_rest(jnp.int32(0))

        lax.fori_loop(0, self.items, self._item, None)
        plgpu.wait_smem_to_gmem(0)

    def _item(self, i: jax.Array, carry: None) -> None:
        plgpu.barrier_wait(self.refs.keys)
        first = i * self.group
        head = functools.partial(self._value_head, first)
        total = lax.fori_loop(0, self.group, head, KeyGradients.zeros())
        self._write_keys(i, total)
        return carry

    def _place(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Chunk and key head of an item."""
        item, heads = self.block + i * self.blocks, jnp.int32(self.key_heads)
        return lax.div(item, heads), lax.rem(item, heads)

    def _head(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Chunk and value head of a step."""
        group = jnp.int32(self.group)
        chunk, key_head = self._place(lax.div(step, group))
        return chunk, key_head * self.group + lax.rem(step, group)

    def _copy_keys(self, i: jax.Array) -> None:
        refs, (chunk, head) = self.refs, self._place(i)
        copy_rows(refs.k_ref.at[chunk, :, head], refs.k_smem, refs.keys)
        copy_rows(refs.q_ref.at[chunk, :, head], refs.q_smem, refs.keys)

    def _copy_first(self, step: jax.Array) -> None:
        """What a step begins with: its slot, and M."""
        refs, (chunk, head), slot = self.refs, self._head(step), lax.rem(step, jnp.int32(SLOTS))
        barrier = refs.first.at[slot]
        copy_rows(refs.states_ref.at[chunk, head], refs.state_smem.at[slot], barrier)
        copy_rows(refs.v_ref.at[chunk, :, head], refs.v_smem.at[slot], barrier)
        copy_triangle(refs.m_ref.at[chunk, head], refs.m_smem.at[0], barrier)
        vectors = refs.vectors_ref.at[chunk, head]
        plgpu.copy_gmem_to_smem(vectors, refs.vectors_smem.at[slot], barrier)

    def _copy_rest(self, step: jax.Array) -> None:
        refs, (chunk, head) = self.refs, self._head(step)
        copy_rows(refs.do_ref.at[chunk, :, head], refs.do_smem, refs.rest)
        copy_rows(refs.y_ref.at[chunk, :, head], refs.y_smem, refs.rest)
        copy_rows(refs.dstates_ref.at[chunk, head], refs.dstate_smem, refs.rest)

    def _meet(self, then: Callable[[], None] | None = None) -> None:
        """Both warpgroups see what either has written, and have done with what it has read; one
        does what is to follow."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs.met)
        plgpu.barrier_wait(self.refs.met)
        if then is not None:
            pl.when(self.wg == 0)(then)

    def _value_head(self, first: jax.Array, n: jax.Array, total: KeyGradients) -> KeyGradients:
        step, steps = first + n, self.items * self.group
        slot = lax.rem(step, jnp.int32(SLOTS))
        head = ValueHead(self, slot)

        def copy(do: Callable[[jax.Array], None]) -> Callable[[], None]:
            return lambda: pl.when(step + 1 < steps)(lambda: do(step + 1))

        plgpu.barrier_wait(self.refs.first.at[slot])
        w = head.values()
        self._meet(copy(self._copy_first))
        plgpu.barrier_wait(self.refs.rest)
        y, of_beta = head.of_values(w)
        pl.when(self.wg == 0)(head.scores_of_queries)
        of_beta = lax.cond(self.wg == 1, lambda: of_beta - head.scores_of_keys(), lambda: of_beta)
        head.parts[OF_BETA, :] = of_beta
        self._meet()
        total = head.keys(total)
        self._meet(copy(self._copy_rest))
        self._write_values(y, *self._head(step))
        return total

    def _write_values(self, y: jax.Array, chunk: jax.Array, head: jax.Array) -> None:
        """dV and the gates' parts, on their way."""
        refs, wg = self.refs, self.wg
        dv = refs.scores_smem.at[wg]
        dv[...] = y
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(dv, refs.y_ref.at[chunk, :, head, pl.ds(wg * 64, 64)])
        plgpu.copy_smem_to_gmem(refs.parts_smem.at[wg], refs.parts_ref.at[chunk, head, wg])

    def _write_keys(self, i: jax.Array, total: KeyGradients) -> None:
        """dQ and dK, on their way by the slot of the last value head."""
        refs, wg, (chunk, key_head) = self.refs, self.wg, self._place(i)
        slot = lax.rem((i + 1) * self.group - 1, jnp.int32(SLOTS))

        def copy() -> None:
            pl.when(i + 1 < self.items)(lambda: self._copy_keys(i + 1))

        if self.l2norm:
            gradients = self._of_lengths(slot, total, copy)
        else:
            gradients = total.q, total.k
            pl.when(wg == 0)(copy)
        staged = [refs.state_smem.at[slot, wg, pl.ds(at, CHUNK)] for at in (0, CHUNK)]
        for smem, gradient in zip(staged, gradients, strict=True):
            smem[...] = gradient.astype(self.dtype)
        plgpu.commit_smem()
        for smem, ref in zip(staged, (refs.dq_ref, refs.dk_ref), strict=True):
            plgpu.copy_smem_to_gmem(smem, ref.at[chunk, :, key_head, pl.ds(wg * 64, 64)])

    def _of_lengths(
        self, slot: jax.Array, total: KeyGradients, then: Callable[[], None]
    ) -> tuple[jax.Array, ...]:
        """Gradients of unit vectors, times the inverse lengths, to those of q and k: less their
        part along q and k."""
        refs, wg = self.refs, self.wg
        rows = [_tile(ref.at[wg]) for ref in (refs.q_smem, refs.k_smem)]
        products = refs.products_smem.at[wg]
        products[0, :], products[1, :] = total.along_q, total.along_k
        self._meet(then)

        def across(i: int, log: int, scale: float) -> jax.Array:
            along = [_vector(refs.products_smem.at[half, i], BY_ROW) for half in range(WARPGROUPS)]
            length = _vector(refs.vectors_smem.at[slot, log], BY_ROW) - scale
            along_unit = (along[0] + along[1]) * jnp.exp2(2.0 * length)
            return (total.q, total.k)[i] - over_rows(along_unit) * rows[i]

        return across(0, LOG_Q, self.log2_scale), across(1, LOG_K, 0.0)


class ValueHead:
    """What a warpgroup does of a value head in shared memory."""

    def __init__(self, block: InputGradientCta, slot: jax.Array):
        self.refs, self.wg, self.dtype = block.refs, block.wg, block.dtype
        self.interpret = block.interpret
        self.vectors, self.state = (
            x.at[slot] for x in (block.refs.vectors_smem, block.refs.state_smem)
        )
        self.u = block.refs.v_smem.at[slot]  # V, then beta * W, then U
        self.parts = block.refs.parts_smem.at[block.wg]
        self.own = pl.ds(block.wg * 64, 64)

    def _row(self, row: int) -> jax.Array:
        return _vector(self.vectors.at[row], BY_ROW)

    def _rows(self, row: int) -> jax.Array:
        return over_rows(self._row(row))

    def _with(self, products: Any, count: int) -> Any:
        return with_accumulators(products, count, interpret=self.interpret)

    def values(self) -> jax.Array:
        """W, of the warpgroup's channels, and U in the values' place."""
        refs, values = self.refs, self.u.at[self.wg]
        state = [self.state.at[half, self.own].transpose((1, 0)) for half in range(2)]

        def product(ref: Any) -> jax.Array:
            seen = WgmmaAccumulator(ref)
            for half in range(2):
                seen.add(refs.k_smem.at[half], state[half])
            rows, read = _tile(values), self._rows(READ)
            return rows + read * seen.read()

        w = self._with(product, 1)
        # What was copied out before.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        values[...] = (self._rows(BETA) * w).astype(self.dtype)
        plgpu.commit_smem()

        def solved(ref: Any) -> jax.Array:
            acc = WgmmaAccumulator(ref)
            m = [plgpu.load(refs.m_smem.at[0, half], layout=TILE) for half in range(2)]
            acc.add(jnp.concatenate(m, axis=1), values)
            return acc.read()

        u = self._with(solved, 1)
        warpgroup_barrier(interpret=self.interpret)  # the products of all its warps have read W
        values[...] = u.astype(self.dtype)
        return w

    def of_values(self, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        """dV and the rows of Y * W, of the warpgroup's channels."""
        y = _tile(self.refs.y_smem.at[self.wg])
        return (self._rows(BETA) * y).astype(self.dtype), (y * w).sum(axis=1)

    def _decays(self, by_row: int) -> jax.Array:
        """log2 of what multiplies the product of row i, with its length, and key j."""
        columns = [_vector(self.vectors.at[row], BY_COLUMN) for row in (SUM, LOG_K)]
        return over_rows(self._row(SUM) + self._row(by_row)) - over_columns(columns[0] - columns[1])

    def scores_of_queries(self) -> None:
        """F"""

        def scores(ref: Any) -> jax.Array:
            acc = WgmmaAccumulator(ref)
            _add_scores(acc, self.refs.do_smem, self.u)
            decays = fill_above(self._decays(LOG_Q), -1e30, interpret=self.interpret)
            decays = jnp.exp2(decays)
            return acc.read() * decays

        self.refs.scores_smem.at[0][...] = self._with(scores, 1).astype(self.dtype)

    def scores_of_keys(self) -> jax.Array:
        """H, and what beta's gradient loses."""
        refs = self.refs

        def scores(*accs: Any) -> jax.Array:
            e, keys = (WgmmaAccumulator(ref) for ref in accs)
            _add_scores(e, refs.y_smem, self.u)
            _add_scores(keys, refs.k_smem, refs.k_smem)
            below = iota((CHUNK, CHUNK), 0) > iota((CHUNK, CHUNK), 1)
            decays = jnp.exp2(jnp.where(below, self._decays(LOG_K), -1e30))
            product = e.read(pending=2) * decays
            refs.scores_smem.at[1][...] = (-self._rows(BETA) * product).astype(self.dtype)
            return (product * keys.read()).sum(axis=1)

        return self._with(scores, 2)

    def keys(self, total: KeyGradients) -> KeyGradients:
        """Adds the gradients of q and k, of the warpgroup's channels."""
        refs, wg = self.refs, self.wg
        keys, queries = refs.k_smem.at[wg], refs.q_smem.at[wg]
        f, h = refs.scores_smem.at[0], refs.scores_smem.at[1]

        def products(*accs: Any) -> KeyGradients:
            read = [WgmmaAccumulator(ref) for ref in accs[:3]]
            lefts = refs.do_smem, refs.y_smem, self.u
            pairs = zip(lefts, (self.state, self.state, refs.dstate_smem), strict=True)
            for acc, (left, state) in zip(read, pairs, strict=True):
                for half in range(2):
                    acc.add(left.at[half], state.at[wg, pl.ds(64 * half, 64)])
            # Each sum goes on where another one left it.
            onto_q = total.q + self._rows(OUT) * read[0].read(pending=4)
            q_sum = WgmmaAccumulator(accs[3], onto_q)
            q_sum.add(f, keys)
            by_row = over_rows(self._row(READ) * self._row(BETA))
            k_sum = WgmmaAccumulator(accs[4], total.k + by_row * read[1].read(pending=3))
            k_sum.add(h, keys)
            outer = self._rows(WRITE) * read[2].read(pending=2)
            written_sum = WgmmaAccumulator(accs[5], outer)
            written_sum.add(f.transpose((1, 0)), queries)
            written_sum.add(h.transpose((1, 0)), keys)
            rows = _tile(keys)
            self.parts[OF_WRITE, :] = (rows * outer).sum(axis=1)
            self.parts[OF_DECAY, :] = self._of_decay()
            of_k = k_sum.read(pending=2)
            along_k = (rows * of_k).sum(axis=1)
            of_q = q_sum.read(pending=2)
            along_q = (_tile(queries) * of_q).sum(axis=1)
            written = written_sum.read()
            along_written = (rows * written).sum(axis=1)
            of_head = along_q - total.along_q + along_k - total.along_k
            self.parts[OF_SUM, :] = of_head - along_written
            return KeyGradients(of_q, of_k + written, along_q, along_k + along_written)

        return self._with(products, 6)

    def _of_decay(self) -> jax.Array:
        """Rows of S * dS, of the warpgroup's half of the rows."""
        states = [
            _tile(self.state.at[half, self.own]) * _tile(self.refs.dstate_smem.at[half, self.own])
            for half in range(2)
        ]
        return (states[0] + states[1]).sum(axis=1)


def _tile(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=TILE).astype(jnp.float32)


def _vector(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _add_scores(acc: WgmmaAccumulator, left: Any, right: Any) -> None:
    """acc += left right^T, of [2, 64, 64]."""
    for half in range(2):
        acc.add(left.at[half], right.at[half].transpose((1, 0)))
