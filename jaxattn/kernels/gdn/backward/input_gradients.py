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
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.backward.chunk_vectors import (
    BETA,
    GRADIENTS,
    LANE,
    LOG_K,
    LOG_Q,
    OF_BETA,
    OF_DECAY,
    OF_SUM,
    OF_WRITE,
    ROWS,
    SUM,
)
from jaxattn.kernels.gdn.prefill.inter_chunk.accumulator import WgmmaAccumulator, with_accumulators
from jaxattn.kernels.gdn.prefill.inter_chunk.state_update import zero_tile
from jaxattn.kernels.gdn.prefill.intra_chunk.mainloop import fill_above
from jaxattn.kernels.gdn.prefill.tiles import (
    BY_COLUMN,
    BY_ROW,
    CHUNK,
    DIM,
    OUT,
    READ,
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
from jaxattn.kernels.hopper.device import swizzled

WARPGROUPS = 2  # one for each half of the channels


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
    v_smem: Any  # V, then beta * W, then U
    do_smem: Any
    y_smem: Any
    state_smem: Any
    dstate_smem: Any
    m_smem: Any
    scores_smem: Any  # F and H, then dV
    vectors_smem: Any
    parts_smem: Any
    products_smem: Any  # of q and k with their gradients, of each half of the channels
    shared: Any  # q and k
    loaded: Any
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
    state = plgpu.SMEM((2, DIM, 64), dtype, transforms=tile)
    parts = jax.ShapeDtypeStruct((chunks, value_heads, WARPGROUPS, GRADIENTS, CHUNK), jnp.float32)
    of_v = jax.new_ref(y)
    out = launch(
        lambda **refs: InputGradientCta(
            InputGradientRefs(**refs), scale=scale, l2norm=l2norm, interpret=interpret
        ).run(),
        name="gdn_backward_inputs",
        grid={"block": chunks * key_heads},
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
            "v_smem": tokens,
            "do_smem": tokens,
            "y_smem": tokens,
            "state_smem": state,
            "dstate_smem": state,
            "m_smem": triangles(1, dtype),
            "scores_smem": tokens,
            "vectors_smem": plgpu.SMEM((ROWS, CHUNK), jnp.float32),
            "parts_smem": plgpu.SMEM((WARPGROUPS, GRADIENTS, CHUNK), jnp.float32),
            "products_smem": plgpu.SMEM((WARPGROUPS, 2, CHUNK), jnp.float32),
            "shared": plgpu.Barrier(num_arrivals=4),
            "loaded": plgpu.Barrier(num_arrivals=13),
            "met": plgpu.Barrier(num_arrivals=WARPGROUPS),
        },
        warpgroups=WARPGROUPS,
        compiler_params=LANE,
        interpret=interpret,
        detect_races=detect_races,
    )
    return out["dq_ref"], out["dk_ref"], jax.freeze(of_v), out["parts_ref"]


class InputGradientCta:
    """A chunk of a key head, and the value heads that share it."""

    def __init__(self, refs: InputGradientRefs, *, scale: float, l2norm: bool, interpret: bool):
        self.refs, self.log2_scale, self.l2norm = refs, math.log2(scale), l2norm
        self.interpret, self.dtype = interpret, refs.dq_ref.dtype
        key_heads = refs.k_ref.shape[2]
        self.group = refs.v_ref.shape[2] // key_heads
        self.wg, block = lax.axis_index("wg"), lax.axis_index("block")
        self.chunk, self.key_head = (op(block, jnp.int32(key_heads)) for op in (lax.div, lax.rem))

    def run(self) -> None:
        refs, chunk, wg = self.refs, self.chunk, self.wg

        @pl.when(wg == 0)
        def _():
            clear_triangles(refs.m_smem)
            plgpu.commit_smem()
            for source, target in ((refs.k_ref, refs.k_smem), (refs.q_ref, refs.q_smem)):
                copy_rows(source.at[chunk, :, self.key_head], target, refs.shared)

        plgpu.barrier_wait(refs.shared)
        total = lax.fori_loop(0, self.group, self._value_head, (zero_tile(), zero_tile()))
        if self.l2norm:
            total = self._of_lengths(total)
        # Every product has been read, and keys and queries with them.
        outputs = (refs.q_smem, refs.dq_ref), (refs.k_smem, refs.dk_ref)
        for gradient, (smem, ref) in zip(total, outputs, strict=True):
            smem.at[wg][...] = gradient.astype(self.dtype)
        plgpu.commit_smem()
        for smem, ref in outputs:
            target = ref.at[chunk, :, self.key_head, pl.ds(wg * 64, 64)]
            plgpu.copy_smem_to_gmem(smem.at[wg], target)
        plgpu.wait_smem_to_gmem(0)

    def _copy(self, head: jax.Array) -> None:
        refs, chunk = self.refs, self.chunk
        for ref, smem in (
            (refs.v_ref, refs.v_smem), (refs.do_ref, refs.do_smem), (refs.y_ref, refs.y_smem),
        ):  # fmt: skip
            copy_rows(ref.at[chunk, :, head], smem, refs.loaded)
        for ref, smem in (
            (refs.states_ref, refs.state_smem), (refs.dstates_ref, refs.dstate_smem),
        ):  # fmt: skip
            copy_rows(ref.at[chunk, head], smem, refs.loaded)
        copy_triangle(refs.m_ref.at[chunk, head], refs.m_smem.at[0], refs.loaded)
        plgpu.copy_gmem_to_smem(refs.vectors_ref.at[chunk, head], refs.vectors_smem, refs.loaded)

    def _meet(self) -> None:
        """Both warpgroups see what either has written, and have done with what it has read."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs.met)
        plgpu.barrier_wait(self.refs.met)

    def _row(self, row: int) -> jax.Array:
        """A vector [64], by row."""
        return plgpu.load(self.refs.vectors_smem.at[row], layout=BY_ROW, optimized=False)

    def _rows(self, row: int) -> jax.Array:
        return over_rows(self._row(row))

    def _column(self, row: int) -> jax.Array:
        return plgpu.load(self.refs.vectors_smem.at[row], layout=BY_COLUMN, optimized=False)

    def _tile(self, ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=TILE).astype(jnp.float32)

    def _scores(self, left: Any, right: Any) -> jax.Array:
        """left right^T, of [2, 64, 64]."""

        def product(ref: Any) -> jax.Array:
            acc = WgmmaAccumulator(ref)
            for half in range(2):
                acc.add(left.at[half], right.at[half].transpose((1, 0)))
            return acc.read()

        return with_accumulators(product, 1, interpret=self.interpret)

    def _product(self, *pairs: Any, onto: jax.Array | None = None) -> jax.Array:
        """The sum of the pairs' products, and of what they are added to."""

        def product(ref: Any) -> jax.Array:
            acc = WgmmaAccumulator(ref, onto)
            for left, right in pairs:
                acc.add(left, right)
            return acc.read()

        return with_accumulators(product, 1, interpret=self.interpret)

    def _value_head(self, n: jax.Array, total: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        refs, wg = self.refs, self.wg
        head = self.key_head * self.group + n
        pl.when(wg == 0)(lambda: self._copy(head))
        plgpu.barrier_wait(refs.loaded)
        self._values()
        self._meet()

        @pl.when(wg == 0)
        def _():
            self._scores_of_queries()

        @pl.when(wg == 1)
        def _():
            self._scores_of_keys()

        self._meet()
        total = self._keys(total)
        self._meet()
        self._write_out(head)
        return total

    def _decays(self, by_row: int) -> jax.Array:
        """log2 of what multiplies the product of row i, with its length, and key j."""
        rows = self._row(SUM) + self._row(by_row)
        return over_rows(rows) - over_columns(self._column(SUM) - self._column(LOG_K))

    def _values(self) -> None:
        """U, in the values' place, and parts of beta's gradient; channels of values."""
        refs, wg = self.refs, self.wg
        own, values = pl.ds(wg * 64, 64), refs.v_smem.at[wg]
        state = [refs.state_smem.at[half, own].transpose((1, 0)) for half in range(2)]
        seen = self._product(*((refs.k_smem.at[half], state[half]) for half in range(2)))
        w = self._tile(values) + self._rows(READ) * seen
        of_beta = (self._tile(refs.y_smem.at[wg]) * w).sum(axis=1)
        beta = self._rows(BETA)
        # The last head's parts and dV have left.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.parts_smem.at[wg][OF_BETA, :] = of_beta
        values[...] = (beta * w).astype(self.dtype)
        plgpu.commit_smem()
        m = [plgpu.load(refs.m_smem.at[0, half], layout=TILE) for half in range(2)]
        u = self._product((jnp.concatenate(m, axis=1), values))
        values[...] = u.astype(self.dtype)

    def _scores_of_queries(self) -> None:
        """F"""
        refs = self.refs
        f = self._scores(refs.do_smem, refs.v_smem)
        between = self._decays(LOG_Q) + self.log2_scale
        f = f * jnp.exp2(fill_above(between, -1e30, interpret=self.interpret))
        refs.scores_smem.at[0][...] = f.astype(self.dtype)

    def _scores_of_keys(self) -> None:
        """H, and the rest of beta's gradient."""
        refs = self.refs
        e = self._scores(refs.y_smem, refs.v_smem)
        below = iota((CHUNK, CHUNK), 0) > iota((CHUNK, CHUNK), 1)
        between = jnp.where(below, self._decays(LOG_K), -1e30)
        e = e * jnp.exp2(between)
        refs.scores_smem.at[1][...] = (-self._rows(BETA) * e).astype(self.dtype)
        of_beta = (self._scores(refs.k_smem, refs.k_smem) * e).sum(axis=1)
        parts = refs.parts_smem.at[1]
        before = plgpu.load(parts.at[OF_BETA], layout=BY_ROW, optimized=False)
        parts[OF_BETA, :] = before - of_beta

    def _keys(self, total: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Adds the gradients of q and k; channels of keys."""
        refs, wg = self.refs, self.wg
        keys, queries = refs.k_smem.at[wg], refs.q_smem.at[wg]
        f, h = refs.scores_smem.at[0], refs.scores_smem.at[1]
        parts = refs.parts_smem.at[wg]

        def with_state(left: Any, state: Any) -> jax.Array:
            pairs = ((left.at[half], state.at[wg, pl.ds(64 * half, 64)]) for half in range(2))
            return self._product(*pairs)

        def times_keys(x: jax.Array) -> jax.Array:
            return (self._tile(keys) * x).sum(axis=1)

        of_q = self._rows(OUT) * with_state(refs.do_smem, refs.state_smem)
        of_q = self._product((f, keys), onto=of_q)
        of_sum = (self._tile(queries) * of_q).sum(axis=1)
        read = over_rows(self._row(READ) * self._row(BETA))
        of_k = read * with_state(refs.y_smem, refs.state_smem)
        of_k = self._product((h, keys), onto=of_k)
        of_sum += times_keys(of_k)
        written = self._rows(WRITE) * with_state(refs.v_smem, refs.dstate_smem)
        parts[OF_WRITE, :] = times_keys(written)
        pairs = (f.transpose((1, 0)), queries), (h.transpose((1, 0)), keys)
        written = self._product(*pairs, onto=written)
        parts[OF_SUM, :] = of_sum - times_keys(written)
        own = pl.ds(wg * 64, 64)
        states = [
            self._tile(refs.state_smem.at[half, own]) * self._tile(refs.dstate_smem.at[half, own])
            for half in range(2)
        ]
        parts[OF_DECAY, :] = (states[0] + states[1]).sum(axis=1)
        return total[0] + of_q, total[1] + of_k + written

    def _write_out(self, head: jax.Array) -> None:
        """dV and the gates' parts, on their way."""
        refs, wg = self.refs, self.wg
        dv = refs.scores_smem.at[wg]
        dv[...] = (self._rows(BETA) * self._tile(refs.y_smem.at[wg])).astype(self.dtype)
        self._meet()  # the next head's copies come
        target = refs.y_ref.at[self.chunk, :, head, pl.ds(wg * 64, 64)]
        plgpu.copy_smem_to_gmem(dv, target)
        plgpu.copy_smem_to_gmem(refs.parts_smem.at[wg], refs.parts_ref.at[self.chunk, head, wg])

    def _of_lengths(self, total: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Gradients of unit vectors, times the inverse lengths, to those of q and k: less their
        part along q and k."""
        refs, wg = self.refs, self.wg
        rows = [self._tile(ref.at[wg]) for ref in (refs.q_smem, refs.k_smem)]
        for i, (x, gradient) in enumerate(zip(rows, total, strict=True)):
            refs.products_smem.at[wg][i, :] = (x * gradient).sum(axis=1)
        self._meet()

        def across(i: int, log: int) -> jax.Array:
            along = [
                plgpu.load(refs.products_smem.at[half, i], layout=BY_ROW, optimized=False)
                for half in range(WARPGROUPS)
            ]
            scale = (along[0] + along[1]) * jnp.exp2(2.0 * self._row(log))
            return total[i] - over_rows(scale) * rows[i]

        return across(0, LOG_Q), across(1, LOG_K)
