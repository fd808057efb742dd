"""The gradients of a chunk's value head in two warpgroups, by the formulas of
input_gradients.py."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.backward.chunk_refs import ChunkGradientRefs, tile, vector
from jaxattn.kernels.gdn.backward.gate_gradients import OF_DECAY, OF_SUM, OF_WRITE
from jaxattn.kernels.gdn.chunk.tiles import (
    BETA,
    BY_COLUMN,
    BY_ROW,
    CHUNK,
    LOG_K,
    LOG_Q,
    OUT,
    READ,
    SUM,
    TILE,
    WRITE,
    over_columns,
    over_rows,
    zero_tile,
)
from jaxattn.kernels.gdn.chunk.wgmma_accumulator import (
    WgmmaAccumulator,
    with_accumulators,
)
from jaxattn.kernels.gdn.prefill.intra_chunk.mainloop import fill_above
from jaxattn.kernels.hopper.instructions import warpgroup_barrier


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputGradientRefs(ChunkGradientRefs):
    """The refs for one decay per head: dQ and dK leave through S's buffer, `rest` are dO and Y."""

    parts_ref: Any
    scores_smem: Any  # F and H, overwritten by dV
    vectors_smem: Any
    parts_smem: Any
    keys: Any  # keys and queries
    solve: Any  # M
    dstate_loaded: Any  # the gradient of the state after the chunk
    keys_read: Any
    first_read: Any
    solve_read: Any
    rest_read: Any
    behind_read: Any


class KeyGradients(NamedTuple):
    """The accumulated gradients of q and k for a warpgroup's channels, and their products with q
    and k."""

    q: jax.Array  # [64, 64]
    k: jax.Array
    along_q: jax.Array  # [64]
    along_k: jax.Array

    @classmethod
    def zeros(cls) -> "KeyGradients":
        rows = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), BY_ROW)
        return cls(zero_tile(), zero_tile(), rows, rows)


class ValueHead:
    """A warpgroup's computation for a value head in shared memory."""

    def __init__(
        self, refs: InputGradientRefs, wg: int, slot: jax.Array, anew: jax.Array, *, interpret: bool
    ):
        # `anew` is 0, which the compiler does not know: addresses that contain it are recomputed
        # for each head. Addresses computed once would not fit into registers, and be spilled to
        # local memory.
        single = "k_smem", "q_smem", "do_smem", "y_smem", "dstate_smem", "scores_smem", "m_smem"
        smem = {name: getattr(refs, name).at[anew] for name in single}
        self.refs = dataclasses.replace(refs, **smem)
        self.wg, self.dtype = wg, refs.dq_ref.dtype
        self.interpret = interpret
        self.vectors, self.state = (x.at[slot] for x in (refs.vectors_smem, refs.state_smem))
        self.u = refs.v_smem.at[slot]  # V, then beta * W, then U
        self.parts = refs.parts_smem.at[wg]
        self.own = pl.ds(wg * 64, 64)

    def _release(self, barrier: Any) -> None:
        release(barrier, interpret=self.interpret)

    def _row(self, row: int) -> jax.Array:
        return vector(self.vectors.at[row], BY_ROW)

    def _rows(self, row: int) -> jax.Array:
        return over_rows(self._row(row))

    def _with(self, products: Any, count: int) -> Any:
        return with_accumulators(products, count, interpret=self.interpret)

    def seen(self) -> jax.Array:
        """Returns W for the warpgroup's channels."""
        refs, values = self.refs, self.u.at[self.wg]
        state = [self.state.at[half, self.own].transpose((1, 0)) for half in range(2)]

        def product(ref: Any) -> jax.Array:
            seen = WgmmaAccumulator(ref)
            for half in range(2):
                seen.add(refs.k_smem.at[half], state[half])
            rows, read = tile(values), self._rows(READ)
            return rows + read * seen.read()

        return self._with(product, 1)

    def solve(self, w: jax.Array) -> None:
        """Computes U in the buffer of the values."""
        refs, values = self.refs, self.u.at[self.wg]
        values[...] = (self._rows(BETA) * w).astype(self.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(refs.solve)

        def solved(ref: Any) -> jax.Array:
            acc = WgmmaAccumulator(ref)
            m = [plgpu.load(refs.m_smem.at[half], layout=TILE) for half in range(2)]
            acc.add(jnp.concatenate(m, axis=1), values)
            return acc.read()

        u = self._with(solved, 1)
        self._release(refs.solve_read)
        warpgroup_barrier(interpret=self.interpret)  # all warps' products have read W
        values[...] = u.astype(self.dtype)

    def of_values(self, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns dV and the row sums of Y * W, for the warpgroup's channels."""
        y = tile(self.refs.y_smem.at[self.wg])
        return (self._rows(BETA) * y).astype(self.dtype), (y * w).sum(axis=1)

    def _decays(self, by_row: int) -> jax.Array:
        """Returns log2 of the factor of the product of row i, including its length, and key j."""
        columns = [vector(self.vectors.at[row], BY_COLUMN) for row in (SUM, LOG_K)]
        return over_rows(self._row(SUM) + self._row(by_row)) - over_columns(columns[0] - columns[1])

    def scores_of_queries(self) -> None:
        """Computes F."""

        def scores(ref: Any) -> jax.Array:
            acc = WgmmaAccumulator(ref)
            _add_scores(acc, self.refs.do_smem, self.u)
            decays = fill_above(self._decays(LOG_Q), -1e30, interpret=self.interpret)
            decays = jnp.exp2(decays)
            return acc.read() * decays

        self.refs.scores_smem.at[0][...] = self._with(scores, 1).astype(self.dtype)

    def scores_of_keys(self) -> jax.Array:
        """Computes H, and returns the term that is subtracted from beta's gradient."""
        refs = self.refs

        def scores(*accs: Any) -> jax.Array:
            e, keys = (WgmmaAccumulator(ref) for ref in accs)
            _add_scores(e, refs.y_smem, self.u)
            _add_scores(keys, refs.k_smem, refs.k_smem)
            decays = self._decays(LOG_K)
            decays = fill_above(decays, -1e30, diagonal=True, interpret=self.interpret)
            decays = jnp.exp2(decays)
            product = e.read(pending=2) * decays
            refs.scores_smem.at[1][...] = (-self._rows(BETA) * product).astype(self.dtype)
            return (product * keys.read()).sum(axis=1)

        return self._with(scores, 2)

    def keys(self, total: KeyGradients) -> KeyGradients:
        """Adds the gradients of q and k for the warpgroup's channels."""
        refs, wg = self.refs, self.wg
        keys, queries = refs.k_smem.at[wg], refs.q_smem.at[wg]
        f, h = refs.scores_smem.at[0], refs.scores_smem.at[1]

        def products(*accs: Any) -> KeyGradients:
            of_q, of_k, of_written = (WgmmaAccumulator(ref) for ref in accs[:3])

            def add(acc: WgmmaAccumulator, left: Any, state: Any) -> None:
                for half in range(2):
                    acc.add(left.at[half], state.at[wg, pl.ds(64 * half, 64)])

            add(of_q, refs.do_smem, self.state)
            add(of_k, refs.y_smem, self.state)
            # Each accumulator continues from a previous one.
            q_sum = WgmmaAccumulator(accs[3], total.q + self._rows(OUT) * of_q.read(pending=2))
            q_sum.add(f, keys)
            plgpu.barrier_wait(refs.dstate_loaded)
            add(of_written, self.u, refs.dstate_smem)
            by_row = over_rows(self._row(READ) * self._row(BETA))
            k_sum = WgmmaAccumulator(accs[4], total.k + by_row * of_k.read(pending=3))
            k_sum.add(h, keys)
            self._release(refs.rest_read)
            outer = self._rows(WRITE) * of_written.read(pending=1)
            written_sum = WgmmaAccumulator(accs[5], outer)
            written_sum.add(f.transpose((1, 0)), queries)
            written_sum.add(h.transpose((1, 0)), keys)
            rows = tile(keys)
            self.parts[OF_WRITE, :] = (rows * outer).sum(axis=1)
            self.parts[OF_DECAY, :] = self._compute_decay_gradient()
            self._release(refs.behind_read)
            sum_k = k_sum.read(pending=2)
            along_k = (rows * sum_k).sum(axis=1)
            sum_q = q_sum.read(pending=2)
            along_q = (tile(queries) * sum_q).sum(axis=1)
            written = written_sum.read()
            along_written = (rows * written).sum(axis=1)
            of_head = along_q - total.along_q + along_k - total.along_k
            self.parts[OF_SUM, :] = of_head - along_written
            return KeyGradients(sum_q, sum_k + written, along_q, along_k + along_written)

        return self._with(products, 6)

    def _compute_decay_gradient(self) -> jax.Array:
        """Returns the row sums of S * dS, for the warpgroup's half of the rows."""
        states = [
            tile(self.state.at[half, self.own]) * tile(self.refs.dstate_smem.at[half, self.own])
            for half in range(2)
        ]
        return (states[0] + states[1]).sum(axis=1)


def release(barrier: Any, *, interpret: bool) -> None:
    """Signals that the warpgroup has read a buffer, which may be overwritten."""
    if interpret:  # which has no other ordering
        plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


def _add_scores(acc: WgmmaAccumulator, left: Any, right: Any) -> None:
    """Issues acc += left right^T, for operands [2, 64, 64]."""
    for half in range(2):
        acc.add(left.at[half], right.at[half].transpose((1, 0)))
