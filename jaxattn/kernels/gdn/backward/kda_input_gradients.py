"""Gradients of a chunk's inputs in KDA, where every channel of the key has its own decay.

The computation is that of input_gradients.py, with vectors by channel instead of the numbers of a
head. The scores' gradients F and E contain no decays: a product of row i with column j has
exp(G_i - G_j) in every channel. As in prefill/kda_intra_chunk, a chunk is divided recursively into
halves. A row of a second half meets a column of the first half at the boundary m between them. With
phi the decay between a token and that boundary,

    dQ += phi * (F (phi * K))
    dK += phi * (H (phi * K)  +  F^T (phi * Q) + H^T (phi * K))

for F and H of such rows and columns. The exponents are products of log decays with matrices of 0
and 1; log decays are two bfloat16 terms, the rounded value and the remainder.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.backward.chunk_refs import ChunkGradientRefs, tile, vector
from jaxattn.kernels.gdn.backward.gate_gradients import LANE
from jaxattn.kernels.gdn.backward.hierarchical_masks import across_halves, up_to_each
from jaxattn.kernels.gdn.chunk.tiles import (
    BY_COLUMN,
    BY_ROW,
    CHANNEL_BETA,
    CHUNK,
    DIM,
    TILE,
    clear_triangles,
    copy_rows,
    copy_triangle,
    iota,
    over_columns,
    over_rows,
    triangles,
)
from jaxattn.kernels.gdn.chunk.wgmma_accumulator import (
    WgmmaAccumulator,
    with_accumulators,
)
from jaxattn.kernels.gdn.prefill.intra_chunk.gate_cumsum import LOWEST_LOG2_DECAY
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.instructions import swizzled, warpgroup_barrier
from jaxattn.kernels.hopper.ptx import register_constant, without_constants
from jaxattn.kernels.hopper.store.unoptimized_store import store

WARPGROUPS = 2  # one for each half of the channels
LEVELS = 6  # of halves, down to single tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelGradientRefs(ChunkGradientRefs):
    """The refs for a decay per channel. V's buffer holds beta * W and then U, S's holds keys and
    queries times decays, and that of dS holds F, E and H."""

    read_ref: Any
    g_ref: Any
    dg_ref: Any
    dbeta_ref: Any
    read_smem: Any  # keys that read the state, then scratch
    g_smem: Any  # log2 decays, rounded values and remainders
    vectors_smem: Any
    dbeta_smem: Any


def channel_gradients(
    q: jax.Array,
    k: jax.Array,
    read: jax.Array,
    g: tuple[jax.Array, jax.Array],
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
) -> tuple[jax.Array, ...]:
    """Returns the gradients by value head of q, k, v [N, 64, Hv, 128], of g, and of beta.

    Args:
        q, k: [N, 64, Hk, 128]; with l2norm the kernel makes unit vectors of them.
        read: The keys of `channel_chunks`, [N, Hv, 64, 128].
        g: bfloat16 [N, 64, Hv, 128], log2 decays: the rounded values, and the remainders.
        v, do, m, vectors, states, dstates, y: As for `state_pass`.

    Returns:
        dv in q's dtype; dq and dk in q's dtype too, unless value heads share a key head: they are
        then float32, to be summed over these heads. Then float32 [N, 64, Hv, 128], the gradient of
        g; and float32 [N, Hv, 2, 64], whose sum is beta's.
    """
    chunks, _, value_heads, _ = v.shape
    dtype = q.dtype
    of_keys = jax.ShapeDtypeStruct(v.shape, dtype if q.shape == v.shape else jnp.float32)
    swizzle = swizzled(dtype)
    tokens = plgpu.SMEM((2, CHUNK, 64), dtype, transforms=swizzle)
    state = plgpu.SMEM((2, DIM, 64), dtype, transforms=swizzle)
    of_v = jax.new_ref(y)
    out = launch(
        lambda **refs: ChannelGradientCta(
            ChannelGradientRefs(**refs), scale=scale, l2norm=l2norm, interpret=interpret
        ).run(),
        name="kda_backward_inputs",
        grid={"block": chunks * value_heads},
        inputs={
            "q_ref": q,
            "k_ref": k,
            "read_ref": read,
            "g_ref": g,
            "v_ref": v,
            "do_ref": do,
            "m_ref": m,
            "vectors_ref": vectors,
            "states_ref": states,
            "dstates_ref": dstates,
            "y_ref": of_v,
        },
        outputs={
            "dq_ref": of_keys,
            "dk_ref": of_keys,
            "dg_ref": jax.ShapeDtypeStruct(v.shape, jnp.float32),
            "dbeta_ref": jax.ShapeDtypeStruct(
                (chunks, value_heads, WARPGROUPS, CHUNK), jnp.float32
            ),
        },
        scratch={
            "q_smem": tokens,
            "k_smem": tokens,
            "read_smem": tokens,
            "g_smem": plgpu.SMEM((2, 2, CHUNK, 64), dtype, transforms=swizzle),
            "v_smem": tokens,
            "do_smem": tokens,
            "y_smem": tokens,
            "state_smem": state,
            "dstate_smem": state,
            "m_smem": triangles(1, dtype),
            "vectors_smem": plgpu.SMEM(vectors.shape[2:], jnp.float32),
            "products_smem": plgpu.SMEM((WARPGROUPS, 4, CHUNK), jnp.float32),
            "dbeta_smem": plgpu.SMEM((WARPGROUPS, CHUNK), jnp.float32),
            "first_loaded": plgpu.Barrier(num_arrivals=9),
            "rest": plgpu.Barrier(num_arrivals=14),
            "warpgroup_barrier": plgpu.Barrier(num_arrivals=WARPGROUPS),
        },
        warpgroups=WARPGROUPS,
        compiler_params=LANE,
        interpret=interpret,
    )
    return out["dq_ref"], out["dk_ref"], jax.freeze(of_v), out["dg_ref"], out["dbeta_ref"]


class ChannelGradientCta:
    """A CTA that processes a chunk of a value head."""

    def __init__(self, refs: ChannelGradientRefs, *, scale: float, l2norm: bool, interpret: bool):
        self.refs, self.scale, self.l2norm, self.interpret = refs, scale, l2norm, interpret
        self.dtype = refs.q_ref.dtype
        self.wg, block = lax.axis_index("wg"), lax.axis_index("block")
        heads = refs.v_ref.shape[2]
        self.chunk, self.head = lax.div(block, jnp.int32(heads)), lax.rem(block, jnp.int32(heads))
        self.key_head = lax.div(self.head, jnp.int32(heads // refs.k_ref.shape[2]))
        self.own = pl.ds(self.wg * 64, 64)
        self.zero = None if interpret else register_constant(0)
        self.row, self.column = (iota((CHUNK, CHUNK), axis) for axis in (0, 1))

    def run(self) -> None:
        refs, wg = self.refs, self.wg
        pl.when(wg == 0)(self._copy)
        plgpu.barrier_wait(refs.first_loaded)
        values = self._values()
        self._sync_warpgroups()
        plgpu.barrier_wait(refs.rest)
        if self.l2norm:
            self._l2_normalize()
        y = tile(refs.y_smem.at[wg])
        dbeta = (y * values).sum(axis=1)
        sums = self._with_states()
        self._sync_warpgroups()  # the states' buffers are free
        pl.when(wg == 0)(self._scores_of_queries)
        pl.when(wg == 1)(self._scores_of_keys)
        self._sync_warpgroups()
        sums = self._diagonal(*sums)
        of_q, of_row, of_column = lax.fori_loop(0, LEVELS, self._level, sums)
        self._write(dbeta, y, of_q, of_row, of_column)

    def _copy(self) -> None:
        refs, chunk, head = self.refs, self.chunk, self.head
        clear_triangles(refs.m_smem)
        plgpu.commit_smem()
        copy_rows(refs.read_ref.at[chunk, head], refs.read_smem, refs.first_loaded)
        copy_rows(refs.states_ref.at[chunk, head], refs.state_smem, refs.first_loaded)
        copy_rows(refs.v_ref.at[chunk, :, head], refs.v_smem, refs.first_loaded)
        copy_triangle(refs.m_ref.at[chunk, head], refs.m_smem.at[0], refs.first_loaded)
        vectors = refs.vectors_ref.at[chunk, head]
        plgpu.copy_gmem_to_smem(vectors, refs.vectors_smem, refs.first_loaded)
        copy_rows(refs.dstates_ref.at[chunk, head], refs.dstate_smem, refs.rest)
        for ref, smem in ((refs.do_ref, refs.do_smem), (refs.y_ref, refs.y_smem)):
            copy_rows(ref.at[chunk, :, head], smem, refs.rest)
        for ref, smem in ((refs.q_ref, refs.q_smem), (refs.k_ref, refs.k_smem)):
            copy_rows(ref.at[chunk, :, self.key_head], smem, refs.rest)
        for term in range(2):
            copy_rows(refs.g_ref[term].at[chunk, :, head], refs.g_smem.at[term], refs.rest)

    def _sync_warpgroups(self) -> None:
        """Synchronizes both warpgroups: each sees what the other has written, and both have
        finished their reads."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs.warpgroup_barrier)
        plgpu.barrier_wait(self.refs.warpgroup_barrier)

    def _sum_warpgroups(self, *rows: jax.Array) -> list[jax.Array]:
        """Returns sums [64] over both warpgroups' rows."""
        products = self.refs.products_smem
        for i, of_half in enumerate(rows):
            products[self.wg, i, :] = of_half
        self._sync_warpgroups()
        halves = [[vector(products.at[wg, i], BY_ROW) for wg in range(2)] for i in range(len(rows))]
        return [left + right for left, right in halves]

    def _l2_normalize(self) -> None:
        """Makes unit vectors of q and k, and stores their inverse lengths after the products."""
        places = [ref.at[self.wg] for ref in (self.refs.q_smem, self.refs.k_smem)]
        rows = [tile(place) for place in places]
        squares = self._sum_warpgroups(*((x * x).sum(axis=1) for x in rows))
        for i, (place, x, square) in enumerate(zip(places, rows, squares, strict=True)):
            inverse = lax.rsqrt(square + 1e-6)
            self.refs.products_smem[self.wg, 2 + i, :] = inverse
            place[...] = (over_rows(inverse) * x).astype(self.dtype)
        plgpu.commit_smem()

    def _l2norm_backward(self, *pairs: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        """Converts gradients of unit vectors, in pairs with these vectors, to those of q and k."""
        along = self._sum_warpgroups(*((unit * of_unit).sum(axis=1) for unit, of_unit in pairs))
        inverse = [vector(self.refs.products_smem.at[self.wg, 2 + i], BY_ROW) for i in range(2)]
        return [
            over_rows(length) * (of_unit - over_rows(part) * unit)
            for (unit, of_unit), part, length in zip(pairs, along, inverse, strict=True)
        ]

    def _product(self, *pairs: Any) -> jax.Array:
        """Returns the sum of the pairs' products."""

        def product(ref: Any) -> jax.Array:
            acc = WgmmaAccumulator(ref)
            for left, right in pairs:
                acc.add(left, right)
            return acc.read()

        return with_accumulators(product, 1, interpret=self.interpret)

    def _make_mask_operand(self, which: jax.Array) -> jax.Array:
        """Returns 1 where `which` holds, else 0, as an operand."""
        return self._prevent_constant_folding(jnp.where(which, 1.0, 0.0).astype(self.dtype))

    def _prevent_constant_folding(self, operand: jax.Array) -> jax.Array:
        """Returns an operand, a part of which the compiler would otherwise know to be constant."""
        return operand if self.zero is None else without_constants(operand, TILE, self.zero)

    def _decays(self, ones: jax.Array) -> jax.Array:
        """Returns the decay of the warpgroup's channels over the tokens with ones in each row."""
        terms = self.refs.g_smem
        return jnp.exp2(self._product(*((ones, terms.at[term, self.wg]) for term in range(2))))

    def _sum_masked_tokens(self, which: jax.Array, x: jax.Array) -> jax.Array:
        """Returns for each token the sum of x over the tokens `which`, with x again in two
        terms."""
        scratch, ones = self.refs.read_smem.at[self.wg], self._make_mask_operand(which)
        rounded = x.astype(self.dtype)
        scratch[...] = rounded
        plgpu.commit_smem()
        total = self._product((ones, scratch))
        plgpu.commit_smem()
        scratch[...] = (x - rounded.astype(jnp.float32)).astype(self.dtype)
        plgpu.commit_smem()
        return total + self._product((ones, scratch))

    def _beta(self) -> jax.Array:
        return over_rows(vector(self.refs.vectors_smem.at[CHANNEL_BETA], BY_ROW))

    def _values(self) -> jax.Array:
        """Loads V, the warpgroup's channels; U then overwrites it."""
        refs, values = self.refs, self.refs.v_smem.at[self.wg]
        state = [refs.state_smem.at[half, self.own].transpose((1, 0)) for half in range(2)]
        seen = self._product(*((refs.read_smem.at[half], state[half]) for half in range(2)))
        rows = tile(values)
        values[...] = (self._beta() * (rows + seen)).astype(self.dtype)
        plgpu.commit_smem()
        m = [plgpu.load(refs.m_smem.at[0, half], layout=TILE) for half in range(2)]
        u = self._product((jnp.concatenate(m, axis=1), values))
        warpgroup_barrier(interpret=self.interpret)  # all warps' products have read W
        values[...] = u.astype(self.dtype)
        return rows

    def _with_states(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients that pass through the states: of queries; of keys that read the
        state, without beta; and of keys written to the state, whose decays reach to the chunk's
        end."""
        refs, wg = self.refs, self.wg

        def with_state(left: Any, state: Any) -> jax.Array:
            pairs = ((left.at[half], state.at[wg, pl.ds(64 * half, 64)]) for half in range(2))
            return self._product(*pairs)

        written = with_state(refs.v_smem, refs.dstate_smem)
        written = written * self._decays(self._make_mask_operand(self.column > self.row))
        # The gradient of the last token's sum collects all of these, and that of the decay of the
        # state before the chunk.
        decay = over_columns(vector(refs.vectors_smem.at[wg], BY_COLUMN))
        total = written * tile(refs.k_smem.at[wg])
        for rows in (pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)):
            states = tile(refs.state_smem.at[wg, rows]) * tile(refs.dstate_smem.at[wg, rows])
            total = total + decay * states
        total = self._sum_masked_tokens(self.row == CHUNK - 1, total)
        store(self._of_gates(), total, interpret=self.interpret)
        read = self._decays(self._make_mask_operand(self.column <= self.row))
        of_q = self.scale * read * with_state(refs.do_smem, refs.state_smem)
        of_row = -read * with_state(refs.y_smem, refs.state_smem)
        return of_q, of_row, written

    def _of_gates(self) -> Any:
        return self.refs.dg_ref.at[self.chunk, :, self.head, self.own]

    def _scores(self, left: Any) -> jax.Array:
        """Returns left U^T, with left [2, 64, 64]."""
        right = [self.refs.v_smem.at[half].transpose((1, 0)) for half in range(2)]
        return self._product(*((left.at[half], right[half]) for half in range(2)))

    def _scores_of_queries(self) -> None:
        """Computes F."""
        f = jnp.where(self.column <= self.row, self.scale * self._scores(self.refs.do_smem), 0.0)
        self._f[...] = f.astype(self.dtype)

    def _scores_of_keys(self) -> None:
        """Computes E, and H, which contains beta."""
        e = jnp.where(self.column < self.row, -self._scores(self.refs.y_smem), 0.0)
        self._e[...] = e.astype(self.dtype)
        self._h[...] = (self._beta() * e).astype(self.dtype)

    @property
    def _f(self) -> Any:
        return self.refs.dstate_smem.at[0, pl.ds(0, CHUNK)]

    @property
    def _e(self) -> Any:
        return self.refs.dstate_smem.at[1, pl.ds(0, CHUNK)]

    @property
    def _h(self) -> Any:
        return self.refs.dstate_smem.at[1, pl.ds(CHUNK, CHUNK)]

    def _times_decays(self) -> tuple[Any, Any]:
        """The buffers of keys and queries times decays, for the warpgroup's channels."""
        return tuple(self.refs.state_smem.at[self.wg, pl.ds(at, CHUNK)] for at in (0, CHUNK))

    def _diagonal(
        self, of_q: jax.Array, of_row: jax.Array, of_column: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Adds the products of each token with itself."""
        f = self._masked(self._f, self.row == self.column)
        of_q = of_q + self._product((f, self.refs.k_smem.at[self.wg]))
        of_column = of_column + self._product((f, self.refs.q_smem.at[self.wg]))
        return of_q, of_row, of_column

    def _masked(self, ref: Any, which: jax.Array) -> jax.Array:
        kept = jnp.where(which, plgpu.load(ref, layout=TILE), jnp.zeros((), self.dtype))
        return self._prevent_constant_folding(kept)

    def _level(self, level: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Adds products of tokens in halves of 2**level tokens."""
        of_q, of_row, of_column = sums
        # From the boundary between the halves up to a token, or from after a token up to the
        # boundary.
        decays = self._decays(up_to_each(level, self.zero))
        keys, queries = self._times_decays()
        for smem, rows in ((keys, self.refs.k_smem), (queries, self.refs.q_smem)):
            smem[...] = (decays * tile(rows.at[self.wg])).astype(self.dtype)
        plgpu.commit_smem()

        def met(scores: Any, *, second: bool) -> jax.Array:
            loaded = plgpu.load(scores, layout=TILE)
            return across_halves(loaded, level, self.zero, second=second)

        of_q = of_q + decays * self._product((met(self._f, second=True), keys))
        of_row = of_row + decays * self._product((met(self._e, second=True), keys))
        f, h = (met(ref.transpose((1, 0)), second=False) for ref in (self._f, self._h))
        of_column = of_column + decays * self._product((f, queries), (h, keys))
        plgpu.commit_smem()  # all of the warpgroup's warps have read keys and queries
        return of_q, of_row, of_column

    def _write(
        self,
        dbeta: jax.Array,
        y: jax.Array,
        of_q: jax.Array,
        of_row: jax.Array,
        of_column: jax.Array,
    ) -> None:
        refs, wg = self.refs, self.wg
        keys, queries = (tile(rows.at[wg]) for rows in (refs.k_smem, refs.q_smem))
        refs.dbeta_smem.at[wg][...] = dbeta + (keys * of_row).sum(axis=1)
        of_row = self._beta() * of_row
        target = self._of_gates()
        of_last = plgpu.load(target, layout=TILE, optimized=False)
        # A gate is in the sums of its own token and of later ones.
        of_gates = queries * of_q + keys * (of_row - of_column) + of_last
        of_gates = self._sum_masked_tokens(self.column >= self.row, of_gates)
        # For a decay of 0 only the sums' rounding would be left, and its gradient is 0.
        log_decays = tile(refs.g_smem.at[0, wg]) + tile(refs.g_smem.at[1, wg])
        of_gates = jnp.where(log_decays > LOWEST_LOG2_DECAY, of_gates, 0.0)
        store(target, of_gates, interpret=self.interpret)
        of_k = of_row + of_column
        if self.l2norm:
            of_q, of_k = self._l2norm_backward((queries, of_q), (keys, of_k))
        staged = (*self._times_decays(), refs.y_smem.at[wg])
        results = [
            (smem, ref.at[self.chunk, :, self.head, self.own], x)
            for smem, ref, x in zip(
                staged,
                (refs.dq_ref, refs.dk_ref, refs.y_ref),
                (of_q, of_k, self._beta() * y),
                strict=True,
            )
        ]
        if refs.dq_ref.dtype != self.dtype:
            for _, target, x in results[:2]:
                store(target, x, interpret=self.interpret)
            del results[:2]
        for smem, _, x in results:
            smem[...] = x.astype(self.dtype)
        plgpu.commit_smem()
        for smem, target, _ in results:
            plgpu.copy_smem_to_gmem(smem, target)
        dbeta_ref = refs.dbeta_ref.at[self.chunk, self.head, wg]
        plgpu.copy_smem_to_gmem(refs.dbeta_smem.at[wg], dbeta_ref)
        plgpu.wait_smem_to_gmem(0)
